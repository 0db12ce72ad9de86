//! Convolution as an operator of a backend: exchange and kernels in one node of the graph.
//!
//! Boxes from other ranks are used as they come; the haloed field is never assembled. In the backward pass the gradient
//! of every box is computed by itself and goes back to its owner.

use std::ops::Range;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchTensor, Flex, TensorMetadata, backend_extension,
};
use burn::tensor::{DType, Tensor};
use halocline_core::ops::{Boxes, add_box, blank, from_dispatch, to_dispatch};
use halocline_core::{Exchange, IndexBox, Result, Transfer, trace};

use super::engine::correlate::Job;
use super::engine::geometry::{Conv, Correlation, Dims};
use super::engine::tile::{Piece, Pieces};
use super::engine::weight::WeightJob;
use crate::flex::{self, Float};
use crate::kernel::activation::Activation;
use crate::kernel::buffer::Buffer;
use crate::kernel::simd::Isa;
use crate::local::LocalOperator;

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

/// What the backward pass needs.
#[derive(Clone, Debug)]
pub(crate) struct Saved<T> {
    /// This rank's shard of the input.
    pub x: T,
    /// Boxes from other ranks, in the plan's order.
    pub received: Vec<T>,
    /// The weights.
    pub weight: T,
}

/// Convolution with gradients. A bias of no elements is none.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait ConvBackend: Backend {
    /// This rank's part of the convolution of a sharded field.
    fn conv(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        run: ConvRun,
    ) -> FloatTensor<Self>;
}

/// The passes of a convolution, on a backend without gradients.
pub(crate) trait ConvKernels: Backend {
    /// The result, and the boxes that came from other ranks.
    fn conv_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        run: &ConvRun,
    ) -> Result<(FloatTensor<Self>, Vec<FloatTensor<Self>>)>;

    /// The gradients of input, weight and bias, those that are `wanted`; `run` has no activation.
    fn conv_backward(
        saved: Saved<FloatTensor<Self>>,
        cotangent: FloatTensor<Self>,
        run: &ConvRun,
        wanted: [bool; 3],
    ) -> Result<[Option<FloatTensor<Self>>; 3]>;
}

/// The convolution of this rank's shard.
pub(crate) fn conv<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    mut run: ConvRun,
) -> Tensor<D> {
    let _span = trace::span("conv");
    let bias = bias.unwrap_or_else(|| Tensor::empty([0], (&x.device(), x.dtype())));
    let tracked = x.is_tracked() || weight.is_tracked() || bias.is_tracked();
    // The derivative of the activation needs what goes into it; and only our kernels apply it on their way.
    let apart = tracked || !flex::runs_on(&x.device());
    let activation = run.activation.take_if(|_| apart);
    let y = Tensor::from_dispatch(<Dispatch as ConvBackend>::conv(
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
        run,
    ));
    match activation {
        Some(activation) => LocalOperator::Activation(activation).apply(y),
        None => y,
    }
}

impl<B: ConvKernels, C: CheckpointStrategy> ConvBackend for Autodiff<B, C> {
    fn conv(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        run: ConvRun,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: ConvKernels> Backward<B, 3> for Step {
            type State = (NodeId, NodeId, Vec<FloatTensor<B>>, ConvRun);

            fn backward(
                self,
                ops: Ops<Self::State, 3>,
                grads: &mut Gradients,
                checkpointer: &mut Checkpointer,
            ) {
                let _span = trace::span("conv (backward)");
                let (x, weight, received, run) = ops.state;
                let saved = Saved {
                    x: checkpointer.retrieve_node_output(x),
                    weight: checkpointer.retrieve_node_output(weight),
                    received,
                };
                let cotangent = grads.consume::<B>(&ops.node);
                let wanted = ops.parents.each_ref().map(Option::is_some);
                let gradients = B::conv_backward(saved, cotangent, &run, wanted)
                    .unwrap_or_else(|error| error.raise());
                for (node, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let (Some(node), Some(gradient)) = (node, gradient) {
                        grads.register::<B>(node.id, gradient);
                    }
                }
            }
        }

        let forward = |x, weight, bias, run: &ConvRun| {
            B::conv_forward(x, weight, bias, run).unwrap_or_else(|error| error.raise())
        };
        let (x_inner, x_node) = x.clone().into_parts();
        let (weight_inner, weight_node) = weight.clone().into_parts();
        let (bias, bias_node) = bias.into_parts();
        // Compute-bound: gradient checkpointing must not replay communication.
        match Step
            .prepare::<C>([x_node, weight_node, bias_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut prep) => {
                let (x, weight) = (prep.checkpoint(&x), prep.checkpoint(&weight));
                let (y, received) = forward(x_inner, weight_inner, bias, &run);
                prep.finish((x, weight, received, run), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward(x_inner, weight_inner, bias, &run).0),
        }
    }
}

impl ConvBackend for Flex {
    fn conv(x: FlexTensor, weight: FlexTensor, bias: FlexTensor, run: ConvRun) -> FlexTensor {
        untracked::<Self>(x, weight, bias, &run)
    }
}

/// The result alone.
pub(super) fn untracked<B: ConvKernels>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: FloatTensor<B>,
    run: &ConvRun,
) -> FloatTensor<B> {
    match B::conv_forward(x, weight, bias, run) {
        Ok((y, _)) => y,
        Err(error) => error.raise(),
    }
}

impl ConvKernels for Flex {
    fn conv_forward(
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        run: &ConvRun,
    ) -> Result<(FlexTensor, Vec<FlexTensor>)> {
        let shard = to_dispatch::<Self>(x.clone());
        let exchange = run.exchange.as_ref();
        let boxes = exchange
            .map(|exchange| exchange.send_all(&shard))
            .transpose()?;
        match x.dtype() {
            DType::F32 => run.forward::<f32>(&x, weight, bias, boxes),
            DType::F64 => run.forward::<f64>(&x, weight, bias, boxes),
            narrow => {
                let [x, weight, bias] = [x, weight, bias].map(flex::widened);
                let received = receive(boxes)?;
                let wide: Vec<_> = received.iter().cloned().map(flex::widened).collect();
                let y = run.forward_with::<f32>(weight, bias, |compute| {
                    compute(&[run.whole()], &run.pieces(&x, &wide));
                    Ok(())
                })?;
                Ok((flex::narrowed(y, narrow), received))
            }
        }
    }

    fn conv_backward(
        saved: Saved<FlexTensor>,
        cotangent: FlexTensor,
        run: &ConvRun,
        wanted: [bool; 3],
    ) -> Result<[Option<FlexTensor>; 3]> {
        match cotangent.dtype() {
            DType::F32 => run.backward::<f32>(&saved, &cotangent, wanted),
            DType::F64 => run.backward::<f64>(&saved, &cotangent, wanted),
            narrow => {
                let saved = Saved {
                    x: flex::widened(saved.x),
                    received: saved.received.into_iter().map(flex::widened).collect(),
                    weight: flex::widened(saved.weight),
                };
                let gradients = run.backward::<f32>(&saved, &flex::widened(cotangent), wanted)?;
                let narrowed = |gradient| flex::narrowed(gradient, narrow);
                Ok(gradients.map(|gradient| gradient.map(narrowed)))
            }
        }
    }
}

/// The boxes that come from other ranks.
fn receive(boxes: Option<Boxes<'_>>) -> Result<Vec<FlexTensor>> {
    let received = boxes.map_or(Ok(Vec::new()), Boxes::finish)?.into_iter();
    received
        .map(|(_, cells)| from_dispatch::<Flex>(cells))
        .collect()
}

/// The spatial extents of a shape, as three.
fn spatial(shape: &[usize]) -> Dims {
    let mut dims = [1; 3];
    dims[5 - shape.len()..].copy_from_slice(&shape[2..]);
    dims
}

impl ConvRun {
    /// All that the windows reach, assembled.
    #[cfg(any(feature = "cube", test))]
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
    fn forward<E: Float>(
        &self,
        x: &FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        boxes: Option<Boxes<'_>>,
    ) -> Result<(FlexTensor, Vec<FlexTensor>)> {
        let mut received = Vec::new();
        let y = self.forward_with::<E>(weight, bias, |compute| {
            let early = boxes.as_ref().and_then(|boxes| self.early(boxes));
            let late = match early {
                None => vec![self.whole()],
                Some(early) => {
                    compute(&[self.whole().within(&early)], &self.pieces(x, &[]));
                    let whole = IndexBox::whole(&spatial(&self.output));
                    let late = whole.around(&IndexBox::new(early.to_vec())).into_iter();
                    late.map(|cells| self.whole().within(cells.ranges()))
                        .collect()
                }
            };
            received = receive(boxes)?;
            compute(&late, &self.pieces(x, &received));
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
        stages: impl FnOnce(&dyn Fn(&[Correlation], &Pieces<'_, E>)) -> Result<()>,
    ) -> Result<FlexTensor> {
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
        result.map(|()| flex::tensor(y, &self.output))
    }

    fn backward<E: Float>(
        &self,
        saved: &Saved<FlexTensor>,
        cotangent: &FlexTensor,
        wanted: [bool; 3],
    ) -> Result<[Option<FlexTensor>; 3]> {
        let isa = Isa::chosen()?;
        let weight = flex::contiguous(saved.weight.clone());
        let exchange = self.exchange.clone().map(Exchange::reversed);
        let like = to_dispatch::<Flex>(saved.x.clone());
        let gradient_of = |cells: &IndexBox| {
            let gradient = self.input_gradient::<E>(isa, cotangent, flex::elements(&weight), cells);
            to_dispatch::<Flex>(gradient)
        };
        // What other ranks wait for goes first.
        let boxes = exchange
            .as_ref()
            .filter(|_| wanted[0])
            .map(|exchange| exchange.send(&like, |transfer| gradient_of(&transfer.dst)))
            .transpose()?;
        boxes.iter().for_each(Boxes::in_background);
        let own = wanted[0].then(|| match &self.exchange {
            None => gradient_of(&IndexBox::whole(&saved.x.shape())),
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
                pieces: &self.pieces::<E>(&saved.x, &saved.received),
                cotangent: flex::field(cotangent),
            };
            job.run(isa)
        });
        let input = match (own, boxes) {
            (Some(sum), Some(boxes)) => Some(boxes.finish()?.into_iter().fold(sum, add_box)),
            (own, _) => own,
        };
        let [weight, bias] = match parameters {
            None => [None, None],
            Some(gradient) => [
                Some(flex::small_tensor(gradient.weight, &saved.weight.shape())),
                Some(flex::small_tensor(gradient.bias, &[self.output[1]])),
            ],
        };
        Ok([
            input.map(from_dispatch::<Flex>).transpose()?,
            weight.filter(|_| wanted[1]),
            bias.filter(|_| wanted[2]),
        ])
    }

    /// The gradient of a box of the cells that the windows reach.
    fn input_gradient<E: Float>(
        &self,
        isa: Isa,
        cotangent: &FlexTensor,
        weight: &[E],
        cells: &IndexBox,
    ) -> FlexTensor {
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
        flex::tensor(gradient, &shape)
    }
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
