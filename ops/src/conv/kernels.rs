//! Convolution by our own kernels, which read boxes in place: the haloed field is never assembled.
//! The backward pass computes the gradient of each box separately and sends it to the box's owner;
//! the gradients of periodic ends that a rank holds itself are part of the gradient of its own
//! cells ([`continued`]).

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{DType, Element as BurnElement};
use halocline_core::ops::{BackwardPass, Boxes, Exchange, add_box, blank, to_dispatch};
use halocline_core::plan::Transfer;
use halocline_core::{IndexBox, Result};

use super::engine::geometry::{Conv, Correlation, Dims};
use super::engine::job::Job;
use super::engine::method::Method;
use super::engine::pieces::{Piece, Pieces};
use super::engine::plan::WeightJob;
use super::periodic::{Cotangent, continued};
use super::run::{ConvRun, channels_of, joint_shape, spatial, split, three_ranges};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float};
use crate::kernel::memory::Shared;
use crate::kernel::products::Products;
use crate::kernel::simd::Isa;

impl ConvRun {
    /// Views of the cells that the windows reach, at their positions in the haloed field.
    fn pieces<'a, N: BurnElement + bytemuck::Pod>(
        &self,
        fields: &'a [FlexTensor],
        received: &'a [FlexTensor],
    ) -> Pieces<'a, N> {
        let Some(exchange) = &self.exchange else {
            let whole = channels_of(fields).map(|(channel, x)| Piece {
                channel,
                at: [0; 3],
                cells: flex::field(x),
            });
            return Pieces::new(whole.collect());
        };
        let plan = &exchange.forward.plan;
        let copies = plan.copies.iter().flat_map(|copy| {
            channels_of(fields).map(move |(channel, x)| {
                let cells = copy.src.with_range(1, 0..x.shape()[1]);
                Piece {
                    channel,
                    at: start(&copy.dst),
                    cells: flex::field_box(x, &cells, &copy.flip),
                }
            })
        });
        let transfers = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let boxes = transfers.zip(received).map(|(transfer, cells)| {
            let whole = IndexBox::whole(&transfer.src.shape());
            Piece {
                channel: 0,
                at: start(&transfer.dst),
                cells: flex::field_box(cells, &whole, &transfer.flip),
            }
        });
        Pieces::new(copies.chain(boxes).collect())
    }

    /// Computes the result, with sums of type `E`, and also returns the received boxes.
    pub(super) fn forward_as<E: Float, P: Products<E>>(
        &self,
        inputs: Vec<DispatchTensor>,
        dtype: DType,
    ) -> Result<(DispatchTensor, Vec<DispatchTensor>)>
    where
        P::Number: BurnElement + bytemuck::Pod,
    {
        let (isa, method) = (Isa::chosen()?, Method::chosen()?);
        let (fields, parameters) = inputs.split_at(self.fields);
        let cells = casts::<P::Number>(fields)?;
        let weight = flex::operand::<P::Number>(parameters[0].clone())?;
        let bias = flex::operand::<E>(parameters[1].clone())?;
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let weight = flex::elements::<P::Number>(&weight);
        let bias = flex::elements::<E>(&bias);
        let kernel = self.conv.elements();
        let weight = |[group, output, input, element]: [usize; 4]| {
            weight[((group * outputs + output) * inputs + input) * kernel + element]
        };
        let whole = self.conv.forward(spatial(&self.output));
        let mut received = Ok(Vec::new());
        let fill = |y: Shared<P::Number>| {
            received = self.in_stages(fields, |boxes, results| {
                let parts = results
                    .iter()
                    .map(|results| whole.within(&three_ranges(results)));
                let parts: Vec<Correlation> = parts.collect();
                let boxes = boxes
                    .iter()
                    .map(|(_, cells)| flex::cast::<P::Number>(cells.clone()));
                let boxes = boxes.collect::<Result<Vec<_>>>()?;
                let job = Job {
                    parts: &parts,
                    groups,
                    inputs,
                    outputs,
                    batch: self.output[0],
                    shape: spatial(&self.output),
                    pieces: &self.pieces::<P::Number>(&cells, &boxes),
                    bias: (!bias.is_empty()).then_some(bias),
                    method,
                };
                job.run_into::<P>(isa, &weight, y);
                Ok(())
            });
        };
        // SAFETY: the stages compute all results, or fail.
        let y = unsafe { Buffer::filled(self.output.iter().product(), fill) };
        let received = received?;
        Ok((flex::result(y, &self.output, dtype), received))
    }

    /// Computes the requested gradients of input, weight and bias, with sums of type `E`.
    pub(super) fn backward_as<E: Float, P: Products<E>>(
        &self,
        mut pass: BackwardPass<'_, Vec<DispatchTensor>>,
        dtype: DType,
    ) -> Result<Vec<Option<DispatchTensor>>>
    where
        P::Number: BurnElement + bytemuck::Pod,
    {
        let (isa, method) = (Isa::chosen()?, Method::chosen()?);
        let fields: Vec<_> = (0..self.fields).map(|x| pass.take_input(x)).collect();
        let fields = casts::<P::Number>(&fields)?;
        let like = to_dispatch::<Flex>(fields[0].clone());
        let weight = flex::operand::<P::Number>(pass.take_input(self.fields))?;
        let received = casts::<P::Number>(pass.saved)?;
        let cotangent = &flex::cast::<P::Number>(pass.cotangent)?;
        let plain = Cotangent {
            cells: cotangent,
            margin: [0; 3],
        };
        let (of_fields, of_parameters) = pass.wanted.split_at(self.fields);
        let input_wanted = of_fields.contains(&true);
        let exchange = self.exchange.clone().map(Exchange::reversed);
        let gradient = |cotangent: Cotangent, cells: &IndexBox| {
            let weight = flex::elements(&weight);
            self.input_gradient::<E, P>((isa, method), cotangent, weight, cells)
        };
        // Gradients of received boxes come first, because their owners wait for them.
        let boxes = exchange
            .as_ref()
            .filter(|_| input_wanted)
            .map(|exchange| exchange.send(&like, |transfer| gradient(plain, &transfer.dst)))
            .transpose()?;
        boxes.iter().for_each(Boxes::in_background);
        let sum = input_wanted.then(|| match &self.exchange {
            None => gradient(plain, &IndexBox::whole(&joint_shape(&fields))),
            Some(exchange) => {
                let plan = &exchange.forward.plan;
                let (margin, copies) = continued(&self.conv, plan, &self.output);
                let gradient_of = |cells: &IndexBox| gradient(Cotangent { margin, ..plain }, cells);
                let (whole, parts): (Vec<&Transfer>, _) = copies.iter().partition(|copy| {
                    copy.src.shape() == plan.source_shape && !copy.flip.contains(&true)
                });
                let [first, rest @ ..] = &whole[..] else {
                    let zeros = blank(&like, &plan.source_shape, Some(0.0));
                    return add_all::<E>(zeros, parts, gradient_of);
                };
                let sum = gradient_of(&first.dst);
                add_all::<E>(sum, rest.iter().copied().chain(parts), gradient_of)
            }
        });
        let parameters = of_parameters.contains(&true).then(|| {
            let job = WeightJob {
                conv: &self.conv,
                pieces: &self.pieces::<P::Number>(&fields, &received),
                cotangent: flex::field(cotangent),
                method,
            };
            job.run::<E, P>(isa)
        });
        let input = match (sum, boxes) {
            (Some(sum), Some(boxes)) => Some(boxes.finish()?.into_iter().fold(sum, add_wide::<E>)),
            (sum, _) => sum,
        };
        let input = input.map(|input| flex::in_dtype(input, dtype));
        let mut gradients = split(input, &fields);
        gradients.extend(match parameters {
            None => [None, None],
            Some(gradient) => [
                Some(flex::small_result(gradient.weight, &weight.shape(), dtype)),
                Some(flex::small_result(gradient.bias, &[self.output[1]], dtype)),
            ],
        });
        Ok(gradients)
    }

    /// Computes the gradient of a box of the cells that the windows reach.
    fn input_gradient<E: Float, P: Products<E>>(
        &self,
        (isa, method): (Isa, Method),
        cotangent: Cotangent<'_>,
        weight: &[P::Number],
        cells: &IndexBox,
    ) -> DispatchTensor
    where
        P::Number: BurnElement + bytemuck::Pod,
    {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let parts = (self.conv)
            .input_gradient(&cotangent.place(&three_ranges(cells)))
            .into_iter()
            .map(|part| part.meeting(cotangent.extents()));
        let kernel = self.conv.elements();
        let shape = cells.shape();
        let job = Job {
            parts: &parts.collect::<Vec<_>>(),
            groups,
            inputs: outputs,
            outputs: inputs,
            batch: shape[0],
            shape: spatial(&shape),
            pieces: &cotangent.pieces(),
            bias: None,
            method,
        };
        let gradient = job.run::<P>(isa, |[group, input, output, element]| {
            weight[((group * outputs + output) * inputs + input) * kernel + element]
        });
        flex::result(gradient, &shape, P::Number::dtype())
    }
}

/// Casts boxes to the dtype of a kernel.
fn casts<N: BurnElement>(boxes: &[DispatchTensor]) -> Result<Vec<FlexTensor>> {
    boxes.iter().cloned().map(flex::cast::<N>).collect()
}

/// First cell of a box, in its spatial dims.
fn start(cells: &IndexBox) -> Dims {
    three_ranges(cells).map(|range| range.start)
}

/// Adds to `sum` the gradients of boxes that this rank copied from its own shard.
fn add_all<'a, E: Float>(
    sum: DispatchTensor,
    copies: impl IntoIterator<Item = &'a Transfer>,
    gradient_of: impl Fn(&IndexBox) -> DispatchTensor,
) -> DispatchTensor {
    copies.into_iter().fold(sum, |sum, copy| {
        add_wide::<E>(sum, (copy, gradient_of(&copy.dst)))
    })
}

/// [`add_box`] in a wider dtype, which the sum keeps until all boxes are added.
fn add_wide<E: Float>(
    sum: DispatchTensor,
    (place, cells): (&Transfer, DispatchTensor),
) -> DispatchTensor {
    let [sum, cells] = [sum, cells].map(|numbers| flex::in_dtype(numbers, E::dtype()));
    add_box(sum, (place, cells))
}
