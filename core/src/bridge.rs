//! The bridge to burn: exchange and reduction as operators of a backend, with their adjoints.
//!
//! All communication that gradients flow through is one of the two methods of [`CommBackend`]. `Autodiff` records a
//! step whose state is the plan; its backward calls the same method of the inner backend with the roles swapped.

use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::Cube;
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
use burn::tensor::Shape;

use crate::buckets::{self, Leaf};
use crate::comm::{Communicator, Operation, collectives, sums};
use crate::plan::ExchangePlan;
use crate::{Error, Result};

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
    #[must_use]
    pub fn reversed(self) -> Self {
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
    /// The parameter that is reduced, if its gradient may be put into a bucket.
    pub leaf: Option<Arc<Leaf>>,
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
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait CommBackend: Backend {
    /// Moves boxes of cells between ranks.
    fn exchange(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self>;

    /// Sums over ranks in one of the passes.
    fn reduce(tensor: FloatTensor<Self>, reduce: Reduce) -> FloatTensor<Self>;
}

/// A concrete backend's tensor as one of any backend.
pub fn to_dispatch<B: Backend>(tensor: FloatTensor<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::from_backend(BackendTensor::Float(tensor))
}

/// The inverse of [`to_dispatch`].
///
/// # Errors
/// The tensor belongs to another backend.
pub fn from_dispatch<B: Backend>(tensor: DispatchTensor) -> Result<FloatTensor<B>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let tensor: BackendTensor<B> =
        DispatchTensor::try_into_backend(tensor).map_err(Error::Engine)?;
    Ok(tensor.float())
}

/// What [`CommBackend`] needs of a backend without gradients.
pub(crate) trait Bucketed: CommBackend {
    /// Puts a parameter's gradient into a bucket; gives it back where that cannot be.
    fn put(gradient: FloatTensor<Self>, reduce: &Reduce) -> Option<FloatTensor<Self>>;
}

impl<B: CommBackend> Bucketed for B
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn put(gradient: FloatTensor<Self>, reduce: &Reduce) -> Option<FloatTensor<Self>> {
        let left = buckets::put(reduce, to_dispatch::<B>(gradient));
        let left = left.and_then(|left| left.map(from_dispatch::<B>).transpose());
        left.unwrap_or_else(|error| error.raise())
    }
}

impl CommBackend for Flex {
    fn exchange(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        exchange_on::<Self>(tensor, &exchange)
    }

    fn reduce(tensor: FloatTensor<Self>, reduce: Reduce) -> FloatTensor<Self> {
        reduce_on::<Self>(tensor, &reduce)
    }
}

/// CubeCL's runtimes: boxes are cut and pasted by operators of the fused stream.
#[cfg(feature = "cube")]
impl CommBackend for Cube {
    fn exchange(tensor: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        exchange_on::<Self>(tensor, &exchange)
    }

    fn reduce(tensor: FloatTensor<Self>, reduce: Reduce) -> FloatTensor<Self> {
        reduce_on::<Self>(tensor, &reduce)
    }
}

fn exchange_on<B: Backend>(tensor: FloatTensor<B>, exchange: &Exchange) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    assemble(to_dispatch::<B>(tensor), exchange)
        .and_then(from_dispatch::<B>)
        .unwrap_or_else(|error| error.raise())
}

fn reduce_on<B: Backend>(tensor: FloatTensor<B>, reduce: &Reduce) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    match reduce.pass {
        Pass::Forward => all_reduce(to_dispatch::<B>(tensor), reduce)
            .and_then(from_dispatch::<B>)
            .unwrap_or_else(|error| error.raise()),
        Pass::Backward => tensor,
    }
}

fn all_reduce(tensor: DispatchTensor, reduce: &Reduce) -> Result<DispatchTensor> {
    let Reduce {
        operation,
        comm,
        group,
        ..
    } = reduce;
    let shape = tensor.shape();
    let elements = shape.num_elements();
    let operation = operation.of(elements, tensor.dtype());
    collectives::agree(comm, group, &operation)?;
    let flat = reshaped(tensor, Shape::from([elements]));
    let sum = sums::all_reduce_sum(comm, group, &operation, flat)?;
    Ok(reshaped(sum, shape))
}

impl<B: Bucketed, C: CheckpointStrategy> CommBackend for Autodiff<B, C> {
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

        impl<B: Bucketed> Backward<B, 1> for Step {
            type State = Reduce;

            fn backward(self, ops: Ops<Reduce, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                if ops.state.leaf.is_some() {
                    let gradient = B::put(grads.consume::<B>(&ops.node), &ops.state);
                    let Some(gradient) = gradient else { return };
                    grads.register::<B>(ops.node.id, gradient);
                }
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

/// Runs an exchange's forward pass and assembles this rank's result from its own boxes and those that it receives.
fn assemble(tensor: DispatchTensor, exchange: &Exchange) -> Result<DispatchTensor> {
    let received = exchange.send_all(&tensor)?.finish()?;
    Ok(exchange.assemble(tensor, received))
}

/// A tensor of any backend in another shape.
pub(crate) fn reshaped(tensor: DispatchTensor, shape: Shape) -> DispatchTensor {
    if tensor.shape() == shape {
        return tensor;
    }
    Dispatch::float_reshape(tensor, shape)
}
