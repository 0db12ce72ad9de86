//! Convolution as an operator with an adjoint: exchange and kernels in one node of the graph.
//!
//! Boxes from other ranks are used as they come; the haloed field is never assembled. In the backward pass the gradient
//! of every box is computed by itself and goes back to its owner.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{DType, Device, Tensor};
use halocline_core::ops::{self, BackwardPass, Boxes, Operator, add_box, blank, to_dispatch};
use halocline_core::{Exchange, IndexBox, Result, Transfer};

use super::assembled;
use super::engine::correlate::Job;
use super::engine::geometry::{Conv, Correlation, Dims};
use super::engine::tile::{Piece, Pieces};
use super::engine::weight::WeightJob;
use crate::activation::Activation;
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::local::LocalOperator;
use crate::kernel::simd::Isa;

/// One convolution on one rank.
#[derive(Clone, Debug)]
pub(crate) struct ConvRun {
    /// What is computed on the cells that this rank's windows reach.
    pub conv: Conv,
    /// How these cells come here; `None` if they are the shard.
    pub exchange: Option<Exchange>,
    /// The shape of this rank's result.
    pub output: Vec<usize>,
    /// What is applied to the result; nothing if gradients are tracked.
    pub activation: Option<Activation>,
}

/// The convolution of this rank's shard. A bias of no elements is none.
pub(crate) fn conv<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    mut run: ConvRun,
) -> Tensor<D> {
    let bias = bias.unwrap_or_else(|| Tensor::empty([0], (&x.device(), x.dtype())));
    let tracked = x.is_tracked() || weight.is_tracked() || bias.is_tracked();
    // The derivative of the activation needs what goes into it; and only our kernels apply it on their way.
    let apart = tracked || !flex::runs_on(&x.device());
    let activation = run.activation.take_if(|_| apart);
    let inputs = [
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
    ];
    let y = Tensor::from_dispatch(ops::apply(run, inputs));
    match activation {
        Some(activation) => activation.run(y),
        None => y,
    }
}

impl Operator for ConvRun {
    /// The boxes that came from other ranks, in the plan's order.
    type Saved = Vec<DispatchTensor>;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["conv", "conv (backward)"])
    }

    /// All but the bias.
    fn keeps(&self, input: usize) -> bool {
        input < 2
    }

    fn forward(
        &self,
        inputs: Vec<DispatchTensor>,
    ) -> Result<(DispatchTensor, Vec<DispatchTensor>)> {
        let dtype = inputs[0].dtype();
        if !runs_on_kernels(&inputs[0]) {
            return assembled::forward(self, inputs);
        }
        with_float!(dtype, E => self.forward_as::<E>(inputs, dtype))
    }

    fn backward(
        &self,
        pass: BackwardPass<'_, Vec<DispatchTensor>>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let dtype = pass.cotangent.dtype();
        if !runs_on_kernels(&pass.cotangent) {
            return assembled::backward(self, pass);
        }
        with_float!(dtype, E => self.backward_as::<E>(pass, dtype))
    }
}

fn runs_on_kernels(tensor: &DispatchTensor) -> bool {
    flex::runs_on(&Device::new(tensor.device()))
}

/// The boxes that come from other ranks.
fn receive(boxes: Option<Boxes<'_>>) -> Result<Vec<DispatchTensor>> {
    let received = boxes.map_or(Ok(Vec::new()), Boxes::finish)?;
    Ok(received.into_iter().map(|(_, cells)| cells).collect())
}

/// The spatial extents of a shape, as three.
fn spatial(shape: &[usize]) -> Dims {
    let mut dims = [1; 3];
    dims[5 - shape.len()..].copy_from_slice(&shape[2..]);
    dims
}

impl ConvRun {
    /// All that the windows reach, assembled.
    pub(super) fn field(&self, x: DispatchTensor, received: &[DispatchTensor]) -> DispatchTensor {
        let Some(exchange) = &self.exchange else {
            return x;
        };
        let plan = &exchange.forward.plan;
        let transfers = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let received = transfers.zip(received.iter().cloned()).collect();
        exchange.assemble(x, received)
    }

    /// All that the windows reach, where it lies.
    fn pieces<'a, E: Float>(&self, x: &'a FlexTensor, received: &'a [FlexTensor]) -> Pieces<'a, E> {
        let Some(exchange) = &self.exchange else {
            return Pieces::whole(flex::field(x));
        };
        let plan = &exchange.forward.plan;
        let own = plan.copies.iter().map(|copy| Piece {
            at: start(&copy.dst),
            cells: flex::field_box(x, &copy.src, &copy.flip),
        });
        let transfers = plan.receives.iter().flat_map(|(_, transfers)| transfers);
        let others = transfers.zip(received).map(|(transfer, cells)| {
            let whole = IndexBox::whole(&transfer.src.shape());
            Piece {
                at: start(&transfer.dst),
                cells: flex::field_box(cells, &whole, &transfer.flip),
            }
        });
        Pieces::new(own.chain(others).collect())
    }

    /// The result, and the boxes that came. Results that need none of them are computed while they travel.
    fn forward_as<E: Float>(
        &self,
        inputs: Vec<DispatchTensor>,
        dtype: DType,
    ) -> Result<(DispatchTensor, Vec<DispatchTensor>)> {
        let boxes = self.exchange.as_ref();
        let boxes = boxes
            .map(|exchange| exchange.send_all(&inputs[0]))
            .transpose()?;
        let inputs = inputs.into_iter().map(flex::cast::<E>);
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let [x, weight, bias] = inputs.try_into().expect("field, weight and bias");
        let mut received = Vec::new();
        let y = self.forward_with::<E>(weight, bias, dtype, |compute| {
            let early = boxes.as_ref().and_then(|boxes| self.early(boxes));
            let late = match early {
                None => vec![self.whole()],
                Some(early) => {
                    compute(&[self.whole().within(&early)], &self.pieces(&x, &[]));
                    let whole = IndexBox::whole(&spatial(&self.output));
                    let late = whole.around(&IndexBox::new(early.to_vec())).into_iter();
                    late.map(|cells| self.whole().within(cells.ranges()))
                        .collect()
                }
            };
            received = receive(boxes)?;
            compute(&late, &self.pieces(&x, &casts::<E>(&received)?));
            Ok(())
        })?;
        Ok((y, received))
    }

    /// All results.
    fn whole(&self) -> Correlation {
        self.conv.forward(spatial(&self.output))
    }

    /// The results to compute while boxes travel; none if it is not worth while.
    pub(super) fn early(&self, boxes: &Boxes<'_>) -> Option<[Range<usize>; 3]> {
        let interior = self.exchange.as_ref()?.forward.plan.interior()?;
        let mut there = [const { 0..1 }; 3];
        let missing = 5 - interior.ranges().len();
        there[missing..].clone_from_slice(&interior.ranges()[2..]);
        let early = self.conv.results_within(&there, spatial(&self.output));
        let part = early.iter().map(Range::len).product::<usize>();
        let all: usize = self.output[2..].iter().product();
        boxes.overlap(part as f64 / all as f64).then_some(early)
    }

    /// Runs a forward pass in stages, each of which computes some of the results from what is there.
    fn forward_with<E: Float>(
        &self,
        weight: FlexTensor,
        bias: FlexTensor,
        dtype: DType,
        stages: impl FnOnce(&dyn Fn(&[Correlation], &Pieces<'_, E>)) -> Result<()>,
    ) -> Result<DispatchTensor> {
        let isa = Isa::chosen()?;
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let (weight, bias) = (flex::contiguous(weight), flex::contiguous(bias));
        let (weight, bias) = (flex::elements::<E>(&weight), flex::elements::<E>(&bias));
        let kernel = self.conv.elements();
        let weight = |[group, output, input, element]: [usize; 4]| {
            weight[((group * outputs + output) * inputs + input) * kernel + element]
        };
        let nothing = Pieces::new(Vec::new());
        let job = Job {
            parts: &[],
            groups,
            inputs,
            outputs,
            batch: self.output[0],
            shape: spatial(&self.output),
            pieces: &nothing,
            bias: (!bias.is_empty()).then_some(bias),
            activation: self.activation,
        };
        let mut result = Ok(());
        let fill = |output| {
            result = stages(&|parts, pieces| {
                let stage = Job {
                    parts,
                    pieces,
                    ..job
                };
                stage.run_into(isa, &weight, output);
            });
        };
        // SAFETY: stages compute all results, or fail.
        let y = unsafe { Buffer::filled(job.len(), fill) };
        result.map(|()| flex::result(y, &self.output, dtype))
    }

    fn backward_as<E: Float>(
        &self,
        mut pass: BackwardPass<'_, Vec<DispatchTensor>>,
        dtype: DType,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let isa = Isa::chosen()?;
        let x = flex::cast::<E>(pass.take_input(0))?;
        let weight = flex::operand::<E>(pass.take_input(1))?;
        let received = casts::<E>(pass.saved)?;
        let cotangent = &flex::cast::<E>(pass.cotangent)?;
        let wanted = pass.wanted;
        let exchange = self.exchange.clone().map(Exchange::reversed);
        let like = to_dispatch::<Flex>(x.clone());
        let gradient_of = |cells: &IndexBox| {
            self.input_gradient::<E>(isa, cotangent, flex::elements(&weight), cells)
        };
        // What other ranks wait for goes first.
        let boxes = exchange
            .as_ref()
            .filter(|_| wanted[0])
            .map(|exchange| exchange.send(&like, |transfer| gradient_of(&transfer.dst)))
            .transpose()?;
        boxes.iter().for_each(Boxes::in_background);
        let own = wanted[0].then(|| match &self.exchange {
            None => gradient_of(&IndexBox::whole(&x.shape())),
            Some(exchange) => {
                let plan = &exchange.forward.plan;
                let (whole, parts): (Vec<&Transfer>, _) = plan.copies.iter().partition(|copy| {
                    copy.src.shape() == plan.source_shape && !copy.flip.contains(&true)
                });
                let [first, rest @ ..] = &whole[..] else {
                    let zeros = blank(&like, &plan.source_shape, Some(0.0));
                    return add_all(zeros, parts, gradient_of);
                };
                let sum = gradient_of(&first.dst);
                add_all(sum, rest.iter().copied().chain(parts), gradient_of)
            }
        });
        let parameters = (wanted[1] || wanted[2]).then(|| {
            let job = WeightJob {
                conv: &self.conv,
                pieces: &self.pieces::<E>(&x, &received),
                cotangent: flex::field(cotangent),
            };
            job.run(isa)
        });
        let input = match (own, boxes) {
            (Some(sum), Some(boxes)) => Some(boxes.finish()?.into_iter().fold(sum, add_box)),
            (own, _) => own,
        };
        let input = input.map(|input| flex::in_dtype(input, dtype));
        let [weight, bias] = match parameters {
            None => [None, None],
            Some(gradient) => [
                Some(flex::small_result(gradient.weight, &weight.shape(), dtype)),
                Some(flex::small_result(gradient.bias, &[self.output[1]], dtype)),
            ],
        };
        Ok(vec![input, weight, bias])
    }

    /// The gradient of a box of the cells that the windows reach.
    fn input_gradient<E: Float>(
        &self,
        isa: Isa,
        cotangent: &FlexTensor,
        weight: &[E],
        cells: &IndexBox,
    ) -> DispatchTensor {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let mut ranges = [0..1, 0..1, 0..1];
        let missing = 5 - cells.ranges().len();
        ranges[missing..].clone_from_slice(&cells.ranges()[2..]);
        let kernel = self.conv.elements();
        let shape = cells.shape();
        let job = Job {
            parts: &self.conv.input_gradient(&ranges),
            groups,
            inputs: outputs,
            outputs: inputs,
            batch: shape[0],
            shape: spatial(&shape),
            pieces: &Pieces::whole(flex::field(cotangent)),
            bias: None,
            activation: None,
        };
        let gradient: Buffer<E> = job.run(isa, |[group, input, output, element]| {
            weight[((group * outputs + output) * inputs + input) * kernel + element]
        });
        flex::result(gradient, &shape, E::dtype())
    }
}

/// Boxes in the float type of a kernel.
fn casts<E: Float>(boxes: &[DispatchTensor]) -> Result<Vec<FlexTensor>> {
    boxes.iter().cloned().map(flex::cast::<E>).collect()
}

/// The first cell of a box, of its spatial dims.
fn start(cells: &IndexBox) -> Dims {
    let mut at = [0; 3];
    let missing = 5 - cells.ranges().len();
    for (dim, range) in cells.ranges()[2..].iter().enumerate() {
        at[missing + dim] = range.start;
    }
    at
}

/// Adds the gradients of boxes of this rank.
fn add_all<'a>(
    sum: DispatchTensor,
    copies: impl IntoIterator<Item = &'a Transfer>,
    gradient_of: impl Fn(&IndexBox) -> DispatchTensor,
) -> DispatchTensor {
    copies.into_iter().fold(sum, |sum, copy| {
        add_box(sum, (copy, gradient_of(&copy.dst)))
    })
}
