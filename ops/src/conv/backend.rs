//! Convolution as an operator of a backend: exchange and kernels in one node of the graph.
//!
//! Boxes from other ranks are used as they come; the haloed field is never assembled. In the backward pass the gradient
//! of every box is computed by itself and goes back to its owner.

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
use halocline_core::ops::{add_box, blank, cut, from_dispatch, to_dispatch};
use halocline_core::{Exchange, IndexBox, Result, Transfer};

use super::engine::correlate::Job;
use super::engine::geometry::{Conv, Dims};
use super::engine::tile::{Piece, Pieces};
use super::engine::weight::WeightJob;
use crate::flex::{self, Float};
use crate::kernel::activation::Activation;
use crate::kernel::pool::Buffer;
use crate::kernel::simd::Isa;
use crate::local::{LocalKernels, LocalOperator};

/// One convolution on one rank.
#[derive(Clone, Debug)]
pub(crate) struct ConvRun {
    /// What is computed on the cells that this rank's windows reach.
    pub conv: Conv,
    /// How these cells come here; `None` if they are the shard.
    pub exchange: Option<Exchange>,
    /// The shape of this rank's result.
    pub output: Vec<usize>,
    /// What is applied to the result.
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
#[backend_extension(Flex, Autodiff)]
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
pub(crate) trait ConvKernels: LocalKernels {
    /// The result, and the boxes that came from other ranks.
    fn conv_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        run: &ConvRun,
    ) -> Result<(FloatTensor<Self>, Vec<FloatTensor<Self>>)>;

    /// The gradients of input, weight and bias, those that are `wanted`, without the activation.
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
    run: ConvRun,
) -> Tensor<D> {
    let bias = bias.unwrap_or_else(|| Tensor::empty([0], (&x.device(), x.dtype())));
    Tensor::from_dispatch(<Dispatch as ConvBackend>::conv(
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
        run,
    ))
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
            type State = (
                NodeId,
                NodeId,
                Vec<FloatTensor<B>>,
                ConvRun,
                Option<(FloatTensor<B>, LocalOperator)>,
            );

            fn backward(
                self,
                ops: Ops<Self::State, 3>,
                grads: &mut Gradients,
                checkpointer: &mut Checkpointer,
            ) {
                let (x, weight, received, run, activation) = ops.state;
                let saved = Saved {
                    x: checkpointer.retrieve_node_output(x),
                    weight: checkpointer.retrieve_node_output(weight),
                    received,
                };
                let mut cotangent = grads.consume::<B>(&ops.node);
                if let Some((y, operator)) = activation {
                    cotangent =
                        B::backward(y, cotangent, operator).unwrap_or_else(|error| error.raise());
                }
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
                // The derivative of the activation needs what goes into it.
                let operator = run.activation.map(LocalOperator::Activation);
                let run = ConvRun {
                    activation: None,
                    ..run
                };
                let (y, received) = forward(x_inner, weight_inner, bias, &run);
                let Some(operator) = operator else {
                    return prep.finish((x, weight, received, run, None), y);
                };
                let activated =
                    B::forward(y.clone(), operator).unwrap_or_else(|error| error.raise());
                let state = (x, weight, received, run, Some((y, operator)));
                prep.finish(state, activated)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward(x_inner, weight_inner, bias, &run).0),
        }
    }
}

impl ConvBackend for Flex {
    fn conv(x: FlexTensor, weight: FlexTensor, bias: FlexTensor, run: ConvRun) -> FlexTensor {
        match Self::conv_forward(x, weight, bias, &run) {
            Ok((y, _)) => y,
            Err(error) => error.raise(),
        }
    }
}

impl ConvKernels for Flex {
    fn conv_forward(
        x: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        run: &ConvRun,
    ) -> Result<(FlexTensor, Vec<FlexTensor>)> {
        let received = run.receive(&x)?;
        let y = match x.dtype() {
            DType::F32 => run.forward::<f32>(&x, &received, weight, bias)?,
            DType::F64 => run.forward::<f64>(&x, &received, weight, bias)?,
            narrow => {
                let [x, weight, bias] = [x, weight, bias].map(flex::widened);
                let received: Vec<_> = received.iter().cloned().map(flex::widened).collect();
                let y = run.forward::<f32>(&x, &received, weight, bias)?;
                flex::narrowed(y, narrow)
            }
        };
        Ok((y, received))
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

/// The spatial extents of a shape, as three.
fn spatial(shape: &[usize]) -> Dims {
    let mut dims = [1; 3];
    dims[5 - shape.len()..].copy_from_slice(&shape[2..]);
    dims
}

impl ConvRun {
    /// The boxes that come from other ranks.
    fn receive(&self, x: &FlexTensor) -> Result<Vec<FlexTensor>> {
        let Some(exchange) = &self.exchange else {
            return Ok(Vec::new());
        };
        let x = to_dispatch::<Flex>(x.clone());
        let boxes = exchange.send(&x, |transfer| cut(&x, &transfer.src))?;
        let cells = boxes.finish()?.into_iter().map(|(_, cells)| cells);
        cells.map(from_dispatch::<Flex>).collect()
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

    fn forward<E: Float>(
        &self,
        x: &FlexTensor,
        received: &[FlexTensor],
        weight: FlexTensor,
        bias: FlexTensor,
    ) -> Result<FlexTensor> {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = self.conv;
        let (weight, bias) = (weight.to_contiguous(), bias.to_contiguous());
        let (weight, bias) = (flex::elements::<E>(&weight), flex::elements::<E>(&bias));
        let shape = spatial(&self.output);
        let kernel = self.conv.elements();
        let job = Job {
            parts: &[self.conv.forward(shape)],
            groups,
            inputs,
            outputs,
            batch: self.output[0],
            shape,
            pieces: &self.pieces(x, received),
            bias: (!bias.is_empty()).then_some(bias),
            activation: self.activation,
        };
        let y = job.run(Isa::chosen()?, |[group, output, input, element]| {
            weight[((group * outputs + output) * inputs + input) * kernel + element]
        });
        Ok(flex::tensor(y, &self.output))
    }

    fn backward<E: Float>(
        &self,
        saved: &Saved<FlexTensor>,
        cotangent: &FlexTensor,
        wanted: [bool; 3],
    ) -> Result<[Option<FlexTensor>; 3]> {
        let isa = Isa::chosen()?;
        let weight = saved.weight.clone().to_contiguous();
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
