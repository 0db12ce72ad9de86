//! The bridge to burn: exchange and reduction as operators of a backend, with their adjoints.
//!
//! All communication that gradients flow through is one of the two methods of [`CommBackend`]. `Autodiff` records a
//! step whose state is the plan; its backward calls the same method of the inner backend with the roles swapped.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchKindConversion, DispatchTensor, Flex,
    TensorMetadata, backend_extension,
};
use burn::tensor::{Device, Shape, Slice, Tensor};

use crate::comm::{Batch, Communicator, Expected, InFlight, Operation, Payload, collectives};
use crate::plan::{ExchangePlan, Transfer};
use crate::{Error, IndexBox, Result};

/// Which way a plan is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Owners' cells go where they are needed.
    Forward,
    /// What lies where cells are needed goes back to the owners, who add: the adjoint.
    Reverse,
}

/// One run of a plan.
#[derive(Clone, Debug)]
pub struct Move {
    /// The plan of this rank.
    pub plan: Arc<ExchangePlan>,
    /// Which way it is run.
    pub direction: Direction,
}

/// An exchange as an operator: what moves forward, and what moves backward.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The way to the other ranks.
    pub comm: Arc<dyn Communicator>,
    /// The ranks of the world, by mesh position.
    pub ranks: Arc<[usize]>,
    /// The forward pass.
    pub forward: Move,
    /// The backward pass.
    pub backward: Move,
}

impl Exchange {
    /// An exchange whose backward pass is the adjoint of its forward pass.
    pub fn with_adjoint(
        operation: Operation,
        comm: Arc<dyn Communicator>,
        ranks: Arc<[usize]>,
        plan: Arc<ExchangePlan>,
    ) -> Self {
        let to = |direction| Move {
            plan: plan.clone(),
            direction,
        };
        Self {
            operation,
            comm,
            ranks,
            forward: to(Direction::Forward),
            backward: to(Direction::Reverse),
        }
    }

    /// The exchange that is this one's gradient.
    fn reversed(self) -> Self {
        Self {
            operation: self.operation.backward(),
            forward: self.backward,
            backward: self.forward,
            ..self
        }
    }
}

/// A reduction as an operator: what is reduced forward, and what backward.
#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    /// The operation, for messages and errors.
    pub operation: Operation,
    /// The way to the other ranks.
    pub comm: Arc<dyn Communicator>,
    /// The ranks of the world that take part, the same on each of them.
    pub group: Arc<[usize]>,
    /// Whether the values, or the gradients, are summed.
    pub pass: Pass,
}

/// In which pass a [`Reduce`] sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Values are summed; the gradient, equal on all ranks, passes as it is.
    Forward,
    /// Values pass as they are; gradients are summed (`fan_out`).
    Backward,
}

/// The communication that gradients flow through.
#[backend_extension(Flex, Autodiff)]
pub(crate) trait CommBackend: Backend {
    /// Moves boxes of cells between ranks.
    fn exchange(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self>;

    /// Sums over ranks in one of the passes.
    fn reduce(tensor: FloatTensor<Self>, reduce: Reduce) -> FloatTensor<Self>;
}

/// Runs a function of dispatch tensors on a concrete backend's tensor.
fn on<B: Backend>(
    tensor: FloatTensor<B>,
    f: impl FnOnce(DispatchTensor) -> Result<DispatchTensor>,
) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let tensor = DispatchTensor::from_backend(BackendTensor::Float(tensor));
    let result = f(tensor).unwrap_or_else(|error| error.raise());
    let result: BackendTensor<B> = DispatchTensor::try_into_backend(result)
        .unwrap_or_else(|error| Error::Engine(error).raise());
    result.float()
}

impl CommBackend for Flex {
    fn exchange(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        on::<Self>(tensor, |tensor| start(tensor, &exchange)?.finish())
    }

    fn reduce(tensor: FloatTensor<Self>, reduce: Reduce) -> FloatTensor<Self> {
        match reduce.pass {
            Pass::Forward => on::<Self>(tensor, |tensor| all_reduce(tensor, &reduce)),
            Pass::Backward => tensor,
        }
    }
}

fn all_reduce(tensor: DispatchTensor, reduce: &Reduce) -> Result<DispatchTensor> {
    let Reduce {
        operation,
        comm,
        group,
        ..
    } = reduce;
    collectives::agree(&**comm, group, operation)?;
    let shape = tensor.shape();
    let flat = Tensor::<1>::from_dispatch(Dispatch::float_reshape(
        tensor,
        Shape::from([shape.num_elements()]),
    ));
    let sum = collectives::all_reduce_sum(&**comm, group, operation, flat)?;
    Ok(Dispatch::float_reshape(sum.into_dispatch(), shape))
}

impl<B: CommBackend, C: CheckpointStrategy> CommBackend for Autodiff<B, C> {
    fn exchange(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: CommBackend> Backward<B, 1> for Step {
            type State = Exchange;

            fn backward(self, ops: Ops<Exchange, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let exchange = ops.state.reversed();
                unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                    B::exchange(grad, exchange)
                });
            }
        }

        let (primitive, node) = tensor.into_parts();
        // Compute-bound: gradient checkpointing must not replay communication.
        match Step.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                prep.finish(exchange.clone(), B::exchange(primitive, exchange))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::exchange(primitive, exchange)),
        }
    }

    fn reduce(tensor: FloatTensor<Self>, reduce: Reduce) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Step;

        impl<B: CommBackend> Backward<B, 1> for Step {
            type State = Reduce;

            fn backward(self, ops: Ops<Reduce, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let reduce = Reduce {
                    operation: ops.state.operation.backward(),
                    pass: match ops.state.pass {
                        Pass::Forward => Pass::Backward,
                        Pass::Backward => Pass::Forward,
                    },
                    ..ops.state
                };
                unary::<B, _>(ops.parents, ops.node, grads, |grad| B::reduce(grad, reduce));
            }
        }

        let (primitive, node) = tensor.into_parts();
        match Step.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(reduce.clone(), B::reduce(primitive, reduce)),
            OpsKind::UnTracked(prep) => prep.finish(B::reduce(primitive, reduce)),
        }
    }
}

/// An exchange on its way: what this rank sends has left, what it receives has not come.
#[must_use = "an exchange in flight must be finished"]
pub(crate) struct Started<'a> {
    in_flight: Option<InFlight<'a>>,
    tensor: DispatchTensor,
    run: &'a Move,
}

/// Sends what the exchange's forward pass sends.
pub(crate) fn start(tensor: DispatchTensor, exchange: &Exchange) -> Result<Started<'_>> {
    let Exchange {
        operation,
        comm,
        ranks,
        forward: run,
        ..
    } = exchange;
    let plan = &run.plan;
    collectives::agree(&**comm, ranks, operation)?;

    let (outgoing, incoming) = match run.direction {
        Direction::Forward => (&plan.sends, &plan.receives),
        Direction::Reverse => (&plan.receives, &plan.sends),
    };
    if outgoing.is_empty() && incoming.is_empty() {
        return Ok(Started {
            in_flight: None,
            tensor,
            run,
        });
    }
    let sends = outgoing.iter().map(|(peer, transfers)| {
        let boxes = transfers.iter().map(|transfer| match run.direction {
            Direction::Forward => cut(&tensor, &transfer.src),
            Direction::Reverse => flipped(cut(&tensor, &transfer.dst), &transfer.flip),
        });
        (ranks[*peer], Payload::Tensors(boxes.collect()))
    });
    let device = Device::new(tensor.device());
    let receives = incoming.iter().map(|(peer, transfers)| {
        let expected = Expected::Tensors {
            shapes: transfers.iter().map(|t| t.src.shape()).collect(),
            dtype: tensor.dtype(),
            device: device.clone(),
        };
        (ranks[*peer], expected)
    });
    let batch = Batch {
        operation: operation.clone(),
        sends: sends.collect(),
        receives: receives.collect(),
    };
    Ok(Started {
        in_flight: Some(comm.start(batch)?),
        tensor,
        run,
    })
}

impl Started<'_> {
    /// Assembles this rank's result from its own boxes and those that it receives.
    pub(crate) fn finish(self) -> Result<DispatchTensor> {
        let Self {
            in_flight,
            tensor,
            run: Move { plan, direction },
        } = self;
        let incoming = match direction {
            Direction::Forward => &plan.receives,
            Direction::Reverse => &plan.sends,
        };
        let received = in_flight.map_or(Ok(Vec::new()), InFlight::finish)?;
        if plan.is_identity() && incoming.is_empty() {
            return Ok(tensor);
        }
        let (shape, value) = match direction {
            Direction::Forward if plan.covers_output() => (&plan.output_shape, None),
            Direction::Forward => (&plan.output_shape, Some(plan.fill)),
            Direction::Reverse => (&plan.source_shape, Some(0.0)),
        };
        let mut output = blank(&tensor, shape, value);
        let mut place = |transfer: &Transfer, cells: DispatchTensor| {
            let whole = std::mem::replace(&mut output, cells.clone());
            output = match direction {
                Direction::Forward => paste(whole, &transfer.dst, flipped(cells, &transfer.flip)),
                Direction::Reverse => {
                    let sum = Dispatch::float_add(cut(&whole, &transfer.src), cells);
                    paste(whole, &transfer.src, sum)
                }
            };
        };
        for copy in &plan.copies {
            place(
                copy,
                match direction {
                    Direction::Forward => cut(&tensor, &copy.src),
                    Direction::Reverse => flipped(cut(&tensor, &copy.dst), &copy.flip),
                },
            );
        }
        for ((_, transfers), payload) in incoming.iter().zip(received) {
            if let Payload::Tensors(tensors) = payload {
                for (transfer, cells) in transfers.iter().zip(tensors) {
                    place(transfer, cells);
                }
            }
        }
        Ok(output)
    }
}

/// A tensor of the kind of `like`, of another shape, that holds one value or nothing in particular.
fn blank(like: &DispatchTensor, shape: &[usize], value: Option<f64>) -> DispatchTensor {
    let options = (&Device::new(like.device()), like.dtype());
    // Rank is a run-time matter here; `Tensor<1>` only carries the data.
    let elements = [shape.iter().product::<usize>()];
    let flat = match value {
        Some(value) => Tensor::<1>::full(elements, value, options),
        None => Tensor::<1>::empty(elements, options),
    };
    Dispatch::float_reshape(flat.into_dispatch(), Shape::from(shape.to_vec()))
}

fn slices(cells: &IndexBox) -> Vec<Slice> {
    let ranges = cells.ranges().iter();
    ranges.map(|range| Slice::from(range.clone())).collect()
}

fn cut(tensor: &DispatchTensor, cells: &IndexBox) -> DispatchTensor {
    Dispatch::float_slice(tensor.clone(), &slices(cells))
}

fn paste(tensor: DispatchTensor, at: &IndexBox, cells: DispatchTensor) -> DispatchTensor {
    Dispatch::float_slice_assign(tensor, &slices(at), cells)
}

fn flipped(tensor: DispatchTensor, flip: &[bool]) -> DispatchTensor {
    let dims: Vec<usize> = (0..flip.len()).filter(|&dim| flip[dim]).collect();
    if dims.is_empty() {
        tensor
    } else {
        Dispatch::float_flip(tensor, &dims)
    }
}
