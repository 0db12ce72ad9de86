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
use burn::tensor::{Device, Shape, Slice, Tensor};

use crate::buckets::{self, Leaf};
use crate::comm::{
    Batch, Communicator, Expected, InFlight, Operation, Overlap, Payload, collectives,
};
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
    collectives::agree(comm, group, operation)?;
    let shape = tensor.shape();
    let flat = Tensor::<1>::from_dispatch(Dispatch::float_reshape(
        tensor,
        Shape::from([shape.num_elements()]),
    ));
    let sum = collectives::all_reduce_sum(comm, group, operation, flat)?;
    Ok(Dispatch::float_reshape(sum.into_dispatch(), shape))
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

/// Boxes on their way between ranks: what this rank sends has left, what it receives has not come.
#[derive(Debug)]
#[must_use = "boxes on their way must be received"]
pub struct Boxes<'a> {
    comm: &'a Arc<dyn Communicator>,
    in_flight: Option<InFlight>,
    /// The size of what comes.
    bytes: usize,
    expected: &'a [(usize, Vec<Transfer>)],
}

impl<'a> Boxes<'a> {
    /// Has the boxes travel on while the rank computes: see [`InFlight::in_background`].
    pub fn in_background(&self) {
        self.in_flight.iter().for_each(InFlight::in_background);
    }

    /// Whether to compute what needs none of the boxes, a fraction of the work, while they travel. If so they travel on.
    ///
    /// The rule: the engine takes time, the boxes have at least 64 KiB, and the fraction is more than half.
    pub fn overlap(&self, fraction: f64) -> bool {
        const WORTH_WHILE: usize = 64 << 10;
        let Some(in_flight) = &self.in_flight else {
            return false;
        };
        let overlap = match self.comm.settings().overlap {
            Overlap::On => fraction > 0.0,
            Overlap::Off => false,
            Overlap::Auto => self.comm.takes_time() && self.bytes >= WORTH_WHILE && fraction > 0.5,
        };
        if overlap {
            in_flight.in_background();
        }
        overlap
    }

    /// Waits for what this rank receives: each box as it lies on its owner if the exchange runs forward, as it lies
    /// where it was needed otherwise, which is the same but for [`Transfer::flip`].
    ///
    /// # Errors
    /// A failure of communication.
    pub fn finish(self) -> Result<Vec<(&'a Transfer, DispatchTensor)>> {
        let received = self.in_flight.map_or(Ok(Vec::new()), InFlight::finish)?;
        let tensors = received.into_iter().flat_map(|payload| match payload {
            Payload::Tensors(tensors) => tensors,
            Payload::Bytes(_) => unreachable!("an engine gives what was expected"),
        });
        let transfers = self.expected.iter().flat_map(|(_, transfers)| transfers);
        Ok(transfers.zip(tensors).collect())
    }
}

impl Exchange {
    /// Sends the boxes of the exchange's forward pass, each as `cells_of` gives it, of the kind of `like`.
    ///
    /// For operators that use boxes one by one, rather than a tensor assembled of them. In an exchange that runs forward
    /// a box is [`cut`] from this rank's shard; in one that runs in reverse it is the gradient of a box that was needed
    /// here.
    ///
    /// # Errors
    /// A failure of communication.
    pub fn send<'a>(
        &'a self,
        like: &DispatchTensor,
        mut cells_of: impl FnMut(&'a Transfer) -> DispatchTensor,
    ) -> Result<Boxes<'a>> {
        let Self {
            operation,
            comm,
            ranks,
            forward: Move { plan, direction },
            ..
        } = self;
        collectives::agree(comm, ranks, operation)?;
        let (outgoing, expected) = match direction {
            Direction::Forward => (&plan.sends, &plan.receives),
            Direction::Reverse => (&plan.receives, &plan.sends),
        };
        if outgoing.is_empty() && expected.is_empty() {
            return Ok(Boxes {
                comm,
                in_flight: None,
                bytes: 0,
                expected,
            });
        }
        let sends = outgoing.iter().map(|(peer, transfers)| {
            let boxes = transfers.iter().map(&mut cells_of);
            (ranks[*peer], Payload::Tensors(boxes.collect()))
        });
        let device = Device::new(like.device());
        let receives = expected.iter().map(|(peer, transfers)| {
            let expected = Expected::Tensors {
                shapes: transfers.iter().map(|t| t.src.shape()).collect(),
                dtype: like.dtype(),
                device: device.clone(),
            };
            (ranks[*peer], expected)
        });
        let batch = Batch {
            operation: operation.clone(),
            sends: sends.collect(),
            receives: receives.collect(),
        };
        let transfers = expected.iter().flat_map(|(_, transfers)| transfers);
        let cells: usize = transfers.map(|transfer| transfer.src.volume()).sum();
        Ok(Boxes {
            comm,
            in_flight: Some(comm.clone().start(batch)?),
            bytes: cells * like.dtype().size(),
            expected,
        })
    }

    /// [Sends](Self::send) the boxes of a tensor: this rank's shard in an exchange that runs forward, the gradient of
    /// what was assembled here in one that runs in reverse.
    ///
    /// # Errors
    /// A failure of communication.
    pub fn send_all<'a>(&'a self, tensor: &DispatchTensor) -> Result<Boxes<'a>> {
        let direction = self.forward.direction;
        self.send(tensor, |transfer| match direction {
            Direction::Forward => cut(tensor, &transfer.src),
            Direction::Reverse => cut(tensor, &transfer.dst),
        })
    }

    /// The result of the exchange's forward pass, from the boxes of this rank's own tensor and those it received.
    pub fn assemble<'a>(
        &'a self,
        tensor: DispatchTensor,
        received: Vec<(&'a Transfer, DispatchTensor)>,
    ) -> DispatchTensor {
        let Move { plan, direction } = &self.forward;
        if plan.is_identity() && received.is_empty() {
            return tensor;
        }
        let own = plan.copies.iter().map(|copy| match direction {
            Direction::Forward => (copy, cut(&tensor, &copy.src)),
            Direction::Reverse => (copy, cut(&tensor, &copy.dst)),
        });
        match direction {
            Direction::Forward => {
                let value = (!plan.covers_output()).then_some(plan.fill);
                let mut output = blank(&tensor, &plan.output_shape, value);
                for (transfer, cells) in own.chain(received) {
                    output = paste(output, &transfer.dst, flipped(cells, &transfer.flip));
                }
                output
            }
            Direction::Reverse => {
                let sum = blank(&tensor, &plan.source_shape, Some(0.0));
                own.chain(received).fold(sum, add_box)
            }
        }
    }
}

/// Runs an exchange's forward pass and assembles this rank's result from its own boxes and those that it receives.
fn assemble(tensor: DispatchTensor, exchange: &Exchange) -> Result<DispatchTensor> {
    let received = exchange.send_all(&tensor)?.finish()?;
    Ok(exchange.assemble(tensor, received))
}

/// Adds the gradient of a box, as it lies where it was needed, to the cells that it is a copy of.
pub fn add_box(
    sum: DispatchTensor,
    (transfer, gradient): (&Transfer, DispatchTensor),
) -> DispatchTensor {
    let gradient = flipped(gradient, &transfer.flip);
    let cells = Dispatch::float_add(cut(&sum, &transfer.src), gradient);
    paste(sum, &transfer.src, cells)
}

/// A tensor of the kind of `like`, of another shape, that holds one value or nothing in particular.
pub fn blank(like: &DispatchTensor, shape: &[usize], value: Option<f64>) -> DispatchTensor {
    let options = (&Device::new(like.device()), like.dtype());
    // Rank is a run-time matter here; `Tensor<1>` only carries the data.
    let elements = [shape.iter().product::<usize>()];
    let flat = match value {
        Some(value) => Tensor::<1>::full(elements, value, options),
        None => Tensor::<1>::empty(elements, options),
    };
    reshaped(flat.into_dispatch(), Shape::from(shape.to_vec()))
}

/// A tensor of any backend in another shape.
pub(crate) fn reshaped(tensor: DispatchTensor, shape: Shape) -> DispatchTensor {
    Dispatch::float_reshape(tensor, shape)
}

fn slices(cells: &IndexBox) -> Vec<Slice> {
    let ranges = cells.ranges().iter();
    ranges.map(|range| Slice::from(range.clone())).collect()
}

/// A box of a tensor.
pub fn cut(tensor: &DispatchTensor, cells: &IndexBox) -> DispatchTensor {
    Dispatch::float_slice(tensor.clone(), &slices(cells))
}

/// A tensor with other cells in a box.
pub fn paste(tensor: DispatchTensor, at: &IndexBox, cells: DispatchTensor) -> DispatchTensor {
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
