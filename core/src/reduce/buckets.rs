//! Gradients of replicated parameters, summed many at a time.
//!
//! A backward pass produces the gradients of parameters one by one, most of them small. While
//! [`ShardTensor::backward`](crate::ShardTensor::backward) runs, they are put into buckets. The sum
//! of a bucket over the ranks starts when the bucket is full and travels while the pass continues;
//! the rest is summed at the end. Each element is summed in rank order, as without buckets, so the
//! result is bit-identical, except for a parameter with several uses: each rank adds the gradients
//! of all uses first, in at least f32, so that one gradient is summed over the ranks instead of one
//! for each use. Uses are counted in the forward pass; a parameter with a use that the backward
//! pass does not reach waits until the end.
//!
//! The order of a backward pass is the same on all ranks. Their buckets therefore fill with the
//! same parameters and start at the same points, without any message, as long as all ranks of a
//! group record and forget the same uses. If they do not, because one rank alone ran a forward pass
//! or caught an error, the ranks detect another order of parameters in a bucket, also of parameters
//! of one shape. Ranks of different groups may hold shards of different sizes: the handling of a
//! bucket depends only on the buckets of its group, and at the end groups follow each other in the
//! order of their ranks.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::kind::Kind;
use burn::tensor::{DType, Gradients, Shape, Tensor};
use foldhash::fast::FixedState;

use super::substitutes;
use crate::comm::all_reduce::{self, PendingReduction};
use crate::comm::{Communicator, InFlight, Operation, Overlap, Traffic, collectives};
use crate::dispatch::{added, cast, cut, flattened, kind_of, node_of, reshaped, widened};
use crate::exchange::{Exchange, travels};
use crate::layout::ReduceOp;
use crate::{IndexBox, OrRaise, Result};

/// Size of a full bucket in bytes.
const FULL: usize = 4 << 20;
/// Maximum number of buckets of a group in flight.
const TRAVELLING: usize = 4;
/// Maximum number of gradients of gathered parameters in flight; each has the size of its layer.
const SCATTERING: usize = 2;
/// Maximum number of uses of parameters recorded for each group of ranks.
const MOST_USES: usize = 1 << 14;

/// The key of the next use of a parameter.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Uses of parameters, by the group of ranks that sums their gradients.
type LeavesByGroup = HashMap<Arc<[usize]>, Leaves>;

thread_local! {
    static LEAVES: RefCell<LeavesByGroup> = RefCell::default();
    /// The buckets of the current backward pass of this rank.
    static BUCKETS: RefCell<Option<Buckets>> = const { RefCell::new(None) };
}

/// Use of a parameter in an autodiff graph.
#[derive(Debug)]
pub(crate) struct Leaf {
    key: u64,
    group: Arc<[usize]>,
    /// The node of the parameter.
    node: NodeId,
}

/// Uses of parameters, equal on all ranks of a group.
///
/// They keep abandoned graphs alive, so they are forgotten at the end of a pass, and after many
/// uses: the gradient of a forgotten parameter is summed by itself. All ranks of the group must
/// forget at the same point, so a pass forgets the groups whose ranks all take part in it and
/// leaves the others unchanged.
#[derive(Default)]
struct Leaves {
    /// Parameters whose gradient may be put into a bucket; they receive the sum.
    tensors: HashMap<u64, DispatchTensor>,
    /// The number of uses whose gradients are ahead, by the node of the parameter. Abandoned graphs
    /// count, because ranks drop them at different times.
    ahead: HashMap<NodeId, usize>,
    /// The number of uses since parameters were last forgotten. The number of recorded parameters
    /// would differ between ranks, which drop graphs at different times.
    uses: usize,
}

impl Leaf {
    /// Records a use of the parameter `tensor`, whose gradients a group sums; returns `None` for a
    /// computed tensor. A block that will be recomputed counts its uses in its first run, without
    /// gradients, and records them when it runs again.
    pub(crate) fn of(tensor: &DispatchTensor, group: &Arc<[usize]>) -> Option<Arc<Self>> {
        if kind_of(tensor.dtype()) != Kind::Float {
            return None;
        }
        let parameter = substitutes::parameter(tensor)?;
        let node = node_of(&parameter)?;
        let has_gradient = Dispatch::float_is_require_grad(tensor);
        let counts = !substitutes::runs_again();
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        let forgotten = LEAVES.with_borrow_mut(|leaves| {
            let leaves = leaves.entry(group.clone()).or_default();
            let full = leaves.uses == MOST_USES;
            let forgotten = full.then(|| std::mem::take(leaves));
            leaves.uses += 1;
            if counts {
                *leaves.ahead.entry(node).or_default() += 1;
            }
            if has_gradient {
                leaves.tensors.insert(key, parameter);
            }
            forgotten
        });
        drop(forgotten);
        let group = group.clone();
        has_gradient.then(|| Arc::new(Self { key, group, node }))
    }

    /// Counts the gradient of this use; returns whether it is the last one.
    fn count_gradient(&self) -> bool {
        LEAVES.with_borrow_mut(|leaves| {
            let leaves = leaves.get_mut(&self.group);
            match leaves.and_then(|leaves| leaves.ahead.get_mut(&self.node)) {
                Some(ahead) => {
                    *ahead = ahead.saturating_sub(1);
                    *ahead == 0
                }
                // The other uses have been forgotten.
                None => true,
            }
        })
    }

    /// Takes the parameter, unless it has been forgotten.
    fn take(&self) -> Option<DispatchTensor> {
        // At the end of a thread its leaves are dropped before its graphs.
        let leaf = LEAVES.try_with(|leaves| {
            let mut leaves = leaves.borrow_mut();
            leaves.get_mut(&self.group)?.tensors.remove(&self.key)
        });
        leaf.ok().flatten()
    }
}

/// Forgets the parameters of some groups. They are dropped after the borrow, because dropping a
/// parameter may drop a graph, which borrows again.
fn forget(which: impl Fn(&Arc<[usize]>) -> bool) {
    let forgotten: Vec<_> = LEAVES.with_borrow_mut(|leaves| {
        let forgotten = leaves.extract_if(|group, _| which(group));
        forgotten.collect()
    });
    drop(forgotten);
}

impl Drop for Leaf {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Gradients of one group of ranks and one element type.
#[derive(Debug)]
struct Bucket {
    comm: Arc<dyn Communicator>,
    group: Arc<[usize]>,
    dtype: DType,
    bytes: usize,
    /// Parameters and this rank's gradients of them.
    parts: Vec<(DispatchTensor, DispatchTensor)>,
    /// The places of their last gradients in the pass.
    places: Vec<usize>,
}

/// The parameters of a bucket in flight, and the shapes of their gradients.
type Owners = Vec<(DispatchTensor, Shape)>;

/// Gradient of a parameter of which other uses are ahead.
#[derive(Debug)]
struct Waiting {
    /// The number of the group's gradients before the last one of this parameter.
    place: usize,
    comm: Arc<dyn Communicator>,
    leaf: DispatchTensor,
    /// The type of the gradients.
    dtype: DType,
    /// The sum over the uses so far, in at least f32 while other uses are ahead.
    gradient: DispatchTensor,
}

#[derive(Debug, Default)]
struct Buckets {
    /// The number of gradients so far, by the group that sums.
    groups: HashMap<Arc<[usize]>, usize>,
    waiting: HashMap<(NodeId, Arc<[usize]>), Waiting>,
    open: Vec<Bucket>,
    /// Buckets in flight, by group.
    travelling: BTreeMap<Arc<[usize]>, VecDeque<(Owners, PendingReduction)>>,
    summed: Vec<(Owners, DispatchTensor)>,
    scattering: VecDeque<Scattering>,
    /// Parameters and the gradients of their shards.
    scattered: Vec<(DispatchTensor, DispatchTensor)>,
}

/// Gradient of a gathered parameter in flight; each rank receives the parts of its shard.
#[derive(Debug)]
struct Scattering {
    leaf: DispatchTensor,
    exchange: Exchange,
    gradient: DispatchTensor,
    in_flight: Option<InFlight>,
}

impl Scattering {
    fn finish(self) -> Result<(DispatchTensor, DispatchTensor)> {
        let received = self.exchange.boxes(self.in_flight).finish()?;
        Ok((self.leaf, self.exchange.assemble(self.gradient, received)))
    }
}

/// Puts the gradient of a parameter into a bucket; returns it if the parameter has been forgotten,
/// or outside a pass.
pub(super) fn put(
    leaf: &Leaf,
    comm: &Arc<dyn Communicator>,
    gradient: DispatchTensor,
) -> Result<Option<DispatchTensor>> {
    BUCKETS.with_borrow_mut(|buckets| match (buckets, leaf.take()) {
        (Some(buckets), Some(tensor)) => {
            buckets.put(comm, leaf, tensor, gradient)?;
            Ok(None)
        }
        _ => Ok(Some(gradient)),
    })
}

/// Starts the exchange that sums and scatters the gradient of a gathered parameter, which travels
/// while the pass continues; returns the gradient if the parameter has been forgotten, outside a
/// pass, or if messages may not travel while ranks compute.
pub(crate) fn scatter(
    leaf: &Leaf,
    exchange: &Exchange,
    gradient: DispatchTensor,
) -> Result<Option<DispatchTensor>> {
    if !travels(&exchange.comm) {
        return Ok(Some(gradient));
    }
    BUCKETS.with_borrow_mut(|buckets| match (buckets, leaf.take()) {
        (Some(buckets), Some(tensor)) => {
            buckets.groups.entry(leaf.group.clone()).or_default();
            buckets.scatter(tensor, exchange.clone().reversed(), gradient)?;
            Ok(None)
        }
        _ => Ok(Some(gradient)),
    })
}

/// Runs a function whose uses of parameters, and backward passes, are separate from the surrounding
/// ones.
pub(crate) fn aside<T>(program: impl FnOnce() -> T) -> T {
    struct Restore(LeavesByGroup, Option<Buckets>);

    impl Drop for Restore {
        fn drop(&mut self) {
            let leaves = std::mem::take(&mut self.0);
            drop((LEAVES.replace(leaves), BUCKETS.replace(self.1.take())));
        }
    }

    let _restore = Restore(LEAVES.take(), BUCKETS.take());
    program()
}

/// Runs a backward pass of these ranks, with buckets if there is more than one rank.
pub(crate) fn collect(ranks: &[usize], backward: impl FnOnce() -> Gradients) -> Gradients {
    /// Restores the buckets of an outer pass, also if this pass panics. Parameters are forgotten
    /// only at the end of the outer pass, which still needs them.
    struct Restore<'a>(Option<Buckets>, &'a [usize]);

    impl Drop for Restore<'_> {
        fn drop(&mut self) {
            let outer = self.0.take();
            let inner = outer.is_some();
            BUCKETS.set(outer);
            if !inner {
                forget(|group| group.iter().all(|rank| self.1.contains(rank)));
            }
        }
    }

    // A pass within a step of another pass has its own buckets.
    let buckets = (ranks.len() > 1).then(Buckets::default);
    let restore = Restore(BUCKETS.replace(buckets), ranks);
    let inner = restore.0.is_some();
    let mut gradients = backward();
    let buckets = BUCKETS.take();
    drop(restore);
    if let Some(buckets) = buckets {
        // All ranks of a group that has summed are in a pass, though perhaps on meshes without some
        // of this mesh's ranks.
        if !inner {
            forget(|group| buckets.groups.contains_key(group));
        }
        let finished = buckets.finish(&mut gradients);
        finished.or_raise();
    }
    gradients
}

impl Buckets {
    /// Adds a gradient to those of the parameter's other uses, and puts the sum into a bucket after
    /// the last use.
    fn put(
        &mut self,
        comm: &Arc<dyn Communicator>,
        leaf: &Leaf,
        tensor: DispatchTensor,
        gradient: DispatchTensor,
    ) -> Result<()> {
        let gradients = self.groups.entry(leaf.group.clone()).or_default();
        let place = *gradients;
        *gradients += 1;
        let key = (leaf.node, leaf.group.clone());
        let dtype = gradient.dtype();
        let gradient = match self.waiting.remove(&key) {
            Some(waiting) => added(waiting.gradient, widened(gradient)),
            None => gradient,
        };
        let mut waiting = Waiting {
            place,
            comm: comm.clone(),
            leaf: tensor,
            dtype,
            gradient,
        };
        if leaf.count_gradient() {
            return self.fill(&leaf.group, waiting);
        }
        waiting.gradient = widened(waiting.gradient);
        self.waiting.insert(key, waiting);
        Ok(())
    }

    /// Puts the gradient of a parameter into the bucket of its group, which starts when it is full.
    fn fill(&mut self, group: &Arc<[usize]>, waiting: Waiting) -> Result<()> {
        let Waiting {
            place,
            comm,
            leaf,
            dtype,
            gradient,
        } = waiting;
        let gradient = cast(gradient, dtype);
        let bytes = gradient.shape().num_elements() * dtype.size();
        let fits = |bucket: &Bucket| bucket.dtype == dtype && bucket.group == *group;
        let index = self.open.iter().position(fits).unwrap_or_else(|| {
            self.open.push(Bucket {
                comm,
                group: group.clone(),
                dtype,
                bytes: 0,
                parts: Vec::new(),
                places: Vec::new(),
            });
            self.open.len() - 1
        });
        let bucket = &mut self.open[index];
        bucket.parts.push((leaf, gradient));
        bucket.places.push(place);
        bucket.bytes += bytes;
        if bucket.bytes >= FULL {
            let bucket = self.open.remove(index);
            self.start(bucket)?;
        }
        Ok(())
    }

    fn start(&mut self, bucket: Bucket) -> Result<()> {
        let travelling = self.travelling.entry(bucket.group.clone()).or_default();
        if travelling.len() == TRAVELLING
            && let Some((owners, sum)) = travelling.pop_front()
        {
            self.summed.push((owners, sum.finish()?));
        }
        let may_travel = bucket.comm.settings().overlap != Overlap::Off;
        let (owners, mut sum) = bucket.start()?;
        if may_travel {
            sum.in_background()?;
        }
        travelling.push_back((owners, sum));
        Ok(())
    }

    fn scatter(
        &mut self,
        leaf: DispatchTensor,
        exchange: Exchange,
        gradient: DispatchTensor,
    ) -> Result<()> {
        if self.scattering.len() == SCATTERING {
            let first = self.scattering.pop_front().expect("it is not empty");
            self.scattered.push(first.finish()?);
        }
        let boxes = exchange.send_all(&gradient)?;
        boxes.in_background();
        let in_flight = boxes.into_in_flight();
        self.scattering.push_back(Scattering {
            leaf,
            exchange,
            gradient,
            in_flight,
        });
        Ok(())
    }

    fn finish(mut self, gradients: &mut Gradients) -> Result<()> {
        let mut waiting: Vec<_> = std::mem::take(&mut self.waiting).into_iter().collect();
        waiting.sort_by_cached_key(|((_, group), waiting)| (group.clone(), waiting.place));
        for ((_, group), waiting) in waiting {
            self.fill(&group, waiting)?;
        }
        let mut open = std::mem::take(&mut self.open);
        open.sort_by(|one, other| one.group.cmp(&other.group));
        for bucket in open {
            self.start(bucket)?;
        }
        for (owners, sum) in self.travelling.into_values().flatten() {
            self.summed.push((owners, sum.finish()?));
        }
        for scattering in self.scattering {
            self.scattered.push(scattering.finish()?);
        }
        for (owners, sum) in self.summed {
            hand_out(owners, &sum, gradients);
        }
        for (leaf, gradient) in self.scattered {
            add(leaf, gradient, gradients);
        }
        Ok(())
    }
}

impl Bucket {
    fn start(self) -> Result<(Owners, PendingReduction)> {
        let Self {
            comm,
            group,
            parts,
            places,
            ..
        } = self;
        let mut owners = Owners::new();
        let flat = parts.into_iter().map(|(leaf, gradient)| {
            owners.push((leaf, gradient.shape()));
            flattened(gradient)
        });
        let flat = collectives::concatenated(flat.collect());
        let operation = Operation::new("gradients", Traffic::Reduce, None).backward();
        let operation = operation.of(ReduceOp::Sum, flat.shape()[0], flat.dtype());
        let operation = operation.of_parts(owners.iter().map(|(_, shape)| shape.clone()));
        let operation = operation.of_arguments(FixedState::default().hash_one(&places));
        collectives::agree(&comm, &group, &operation)?;
        let sum = all_reduce::start(&comm, &group, &operation, ReduceOp::Sum, flat)?;
        Ok((owners, sum))
    }
}

/// Adds each parameter's part of a sum to its gradient.
fn hand_out(owners: Owners, sum: &DispatchTensor, gradients: &mut Gradients) {
    let mut start = 0;
    for (leaf, shape) in owners {
        let elements = shape.num_elements();
        let cells = start..start + elements;
        let part = IndexBox::new(Vec::from([cells]));
        let part = reshaped(cut(sum, &part), shape);
        start += elements;
        add(leaf, part, gradients);
    }
}

/// Adds a part to the gradient of a parameter.
fn add(leaf: DispatchTensor, part: DispatchTensor, gradients: &mut Gradients) {
    // `Tensor<1>` merely carries the data.
    let leaf = Tensor::<1>::from_dispatch(leaf);
    let part = match leaf.grad(gradients) {
        Some(gradient) => Dispatch::float_add(gradient.into_dispatch(), part),
        None => part,
    };
    leaf.grad_replace(gradients, Tensor::from_dispatch(part));
}
