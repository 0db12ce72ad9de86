//! Changes of placement.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::backend::ops::BoolTensorOps;
use burn::tensor::Tensor;

use super::{LocalGradient, ShardTensor};
use crate::comm::{Operation, Traffic, collectives};
use crate::exchange::{Direction, Exchange, ExchangePlan, Move, Need, Source};
use crate::layout::{Layout, Partial, Placement, ReduceOp, Replicate, Shard};
use crate::ops;
use crate::{Error, IndexBox, Result};

const NAME: &str = "redistribute";

impl<const D: usize> ShardTensor<D> {
    /// The same values under other placements, with shards as even as can be.
    ///
    /// | from → to | forward | backward |
    /// |---|---|---|
    /// | `Shard` → `Replicate` | all-gather | local slice |
    /// | `Replicate` → `Shard` | local slice | all-gather |
    /// | `Shard(i)` → `Shard(j)` | all-to-all | all-to-all |
    /// | `Partial` → `Replicate` | all-reduce | identity |
    /// | `Partial(Sum)` → `Shard` | reduce-scatter | all-gather |
    ///
    /// A replicated result has the same gradient on all ranks, because every operator sees to that; where a tensor
    /// leaves the sharded world, [`LocalGradient`] says which of the two meanings its gradient has.
    ///
    /// # Panics
    /// Panics where [`try_redistribute`](Self::try_redistribute) returns an error.
    pub fn redistribute(self, placements: &[Placement]) -> Self {
        self.try_redistribute(placements)
            .unwrap_or_else(|error| error.raise())
    }

    /// [`redistribute`](Self::redistribute), with an error instead of a panic.
    ///
    /// # Errors
    /// Placements that do not fit the tensor or ask for partial values; a failure of communication.
    pub fn try_redistribute(self, placements: &[Placement]) -> Result<Self> {
        let shape = self.layout.shape().to_vec();
        // Dims that keep their parts keep their extents too.
        let mut layout = Layout::new(self.layout.mesh(), &shape, placements)?;
        for dim in 0..D {
            if layout.axes_of(dim) == self.layout.axes_of(dim) {
                layout = layout.with_extents(dim, self.layout.extents(dim))?;
            }
        }
        self.try_redistribute_to(&layout)
    }

    /// The same values in the given layout.
    ///
    /// # Errors
    /// A layout of another mesh or shape, or with partial values that this tensor does not have; a failure of
    /// communication.
    pub fn try_redistribute_to(self, layout: &Layout) -> Result<Self> {
        if layout.mesh() != self.layout.mesh() || layout.shape() != self.layout.shape() {
            return Err(Error::operator(
                NAME,
                format!("from {} to {layout}: mesh and shape must stay", self.layout),
            ));
        }
        let from = self.placements().to_vec();
        for (axis, (from, to)) in from.iter().zip(layout.placements()).enumerate() {
            if matches!(to, Partial(_)) && from != to {
                return Err(Error::Placement {
                    operator: NAME.into(),
                    placement: format!("{from} → {to} on axis \"{}\"", self.axis_name(axis)),
                    help: "partial values come from operators only".into(),
                });
            }
        }
        Error::catch(|| {
            let mut tensor = self;
            for (axis, (from, to)) in from.iter().zip(layout.placements()).enumerate() {
                if let (Partial(op), to) = (*from, *to)
                    && from != &to
                {
                    tensor = match to {
                        Shard(dim) if op == ReduceOp::Sum && !tensor.layout.is_sharded(dim) => {
                            tensor.reduce_scatter(axis, dim, layout)
                        }
                        _ => tensor.resolve_axis(axis, op),
                    };
                }
            }
            if tensor.layout == *layout {
                return tensor;
            }
            tensor.move_to(layout)
        })
    }

    /// Partial values made whole: an all-reduce over each axis that holds them. For maxima and minima every rank receives
    /// the partial values of all ranks along the axis.
    ///
    /// # Adjoint
    /// The identity for sums; for maxima and minima the gradient goes to the first rank that holds the extremum.
    #[must_use]
    pub fn resolve(self) -> Self {
        let mut tensor = self;
        while let Some((axis, op)) = tensor.layout.partial_axis() {
            tensor = tensor.resolve_axis(axis, op);
        }
        tensor
    }

    fn resolve_axis(self, axis: usize, op: ReduceOp) -> Self {
        let operation = Operation::new("resolve", Traffic::Reduce, Some(&self.layout));
        let layout = self.layout.with_placement(axis, Replicate);
        let local = match op {
            ReduceOp::Sum => self.local,
            ReduceOp::Max | ReduceOp::Min => {
                owned_extremum(self.local, &self.mesh, axis, op, &operation)
            }
        };
        let local = ops::all_reduce_sum(local, &self.mesh, &[axis], operation);
        Self::from_parts(local, layout, self.mesh)
    }

    /// `Partial(Sum)` → `Shard(dim)`: the all-gather of the sharded layout, run in reverse.
    fn reduce_scatter(self, axis: usize, dim: usize, target: &Layout) -> Self {
        let mut placements = self.placements().to_vec();
        placements[axis] = Shard(dim);
        let mut extents = self.layout.all_extents().to_vec();
        extents[dim] = if target.axes_of(dim) == [axis] {
            target.extents(dim).to_vec()
        } else {
            let shape = self.layout.shape();
            let even = Layout::new(self.layout.mesh(), shape, &placements)
                .expect("the target layout has been checked");
            even.extents(dim).to_vec()
        };
        let sharded = self.layout.derive(placements, extents);
        let gather = self.plan(&sharded, &self.layout);
        let to = |direction| Move {
            plan: gather.clone(),
            direction,
        };
        let local = ops::run(
            self.local.clone(),
            Exchange {
                operation: self.operation(&sharded),
                comm: self.mesh.comm().clone(),
                ranks: self.ranks(),
                forward: to(Direction::Reverse),
                backward: to(Direction::Forward),
            },
        );
        Self::from_parts(local, sharded, self.mesh)
    }

    /// One exchange to a layout with the same partial axes. The gradient, which is replicated where the tensor is,
    /// takes the way back.
    fn move_to(self, layout: &Layout) -> Self {
        let forward = |plan| Move {
            plan,
            direction: Direction::Forward,
        };
        let exchange = Exchange {
            operation: self.operation(layout),
            comm: self.mesh.comm().clone(),
            ranks: self.ranks(),
            forward: forward(self.plan(&self.layout, layout)),
            backward: forward(self.plan(layout, &self.layout)),
        };
        let local = ops::run(self.local, exchange);
        Self::from_parts(local, layout.clone(), self.mesh)
    }

    fn operation(&self, to: &Layout) -> Operation {
        Operation::new(NAME, Traffic::Redistribute, Some(to))
    }

    /// The plan by which every rank gets its box of `to` from the owners in `from`.
    fn plan(&self, from: &Layout, to: &Layout) -> Arc<ExchangePlan> {
        let key = (NAME, from.clone(), to.clone());
        let plan = self.mesh.cache().get_or_make(key, |_| {
            let need_of = |position| Need::of(to.local_box(position));
            Ok(self.mesh.exchange_plan(Source::Layout(from), need_of))
        });
        plan.expect("making this plan cannot fail")
    }

    /// The whole tensor on every rank: a gather, for small tensors and for tests.
    ///
    /// # Panics
    /// Panics if communication fails.
    pub fn full_tensor(&self, gradient: LocalGradient) -> Tensor<D> {
        let resolved = self.clone().resolve();
        let whole = Layout::replicated(self.layout.mesh(), self.layout.shape());
        let all_sharded = (resolved.placements().iter()).all(|p| matches!(p, Shard(_)));
        if gradient == LocalGradient::Partial && all_sharded {
            // Every axis goes from shards to replicas: the reduce-scatter that is the exchange's adjoint.
            let plan = resolved.plan(&resolved.layout, &whole);
            let operation = resolved.operation(&whole);
            return ops::exchange(resolved.local, &resolved.mesh, plan, operation);
        }
        let whole = resolved.try_redistribute_to(&whole);
        whole
            .unwrap_or_else(|error| error.raise())
            .to_local(gradient)
    }

    /// The whole tensor on one rank of the world and nothing on the others: for writing files.
    ///
    /// # Errors
    /// A root that is not in the mesh; a failure of communication.
    pub fn gather_tensor(&self, root: usize) -> Result<Option<Tensor<D>>> {
        let ranks = self.mesh.shape().ranks();
        let root = ranks.iter().position(|&rank| rank == root).ok_or_else(|| {
            Error::operator(
                "gather_tensor",
                format!("rank {root} is not in the {}", self.mesh),
            )
        })?;
        let whole = IndexBox::whole(self.layout.shape());
        Error::catch(|| {
            let resolved = self.clone().inner().resolve();
            let need = |position| {
                if position == root {
                    Need::of(whole.clone())
                } else {
                    Need::nothing(vec![0; D])
                }
            };
            let key = ("gather_tensor", resolved.layout.clone(), root);
            let plan = self.mesh.cache().get_or_make(key, |(_, layout, _)| {
                Ok(self.mesh.exchange_plan(Source::Layout(layout), need))
            });
            let plan = plan.expect("making this plan cannot fail");
            let operation =
                Operation::new("gather_tensor", Traffic::Scatter, Some(&resolved.layout));
            let gathered = ops::exchange(resolved.local, &self.mesh, plan, operation);
            (self.mesh.position() == root).then_some(gathered)
        })
    }
}

/// The local extremum where this rank is the first along the axis to hold the global one, and zero elsewhere, so that
/// a sum over the ranks gives the extremum, and its gradient goes to one owner.
fn owned_extremum<const D: usize>(
    local: Tensor<D>,
    mesh: &crate::DeviceMesh,
    axis: usize,
    op: ReduceOp,
    operation: &Operation,
) -> Tensor<D> {
    let group = mesh.ranks_along(&[axis]);
    let comm = mesh.comm();
    let flat = local.clone().inner().flatten::<1>(0, D - 1);
    let all = collectives::agree(comm, &group, operation)
        .and_then(|()| {
            collectives::all_gather(comm, &group, operation, &flat.clone().into_dispatch())
        })
        .unwrap_or_else(|error| error.raise());
    let all: Vec<Tensor<1>> = all.into_iter().map(Tensor::from_dispatch).collect();
    let best = all
        .iter()
        .cloned()
        .reduce(|a, b| match op {
            ReduceOp::Min => a.min_pair(b),
            _ => a.max_pair(b),
        })
        .expect("a group has at least one rank");
    let place = group.iter().position(|&rank| rank == comm.rank());
    // What is not a number is never lost, so that it shows in the result.
    let mut lost = best
        .clone()
        .not_equal(flat.clone())
        .bool_and(flat.is_nan().bool_not());
    for earlier in all.iter().take(place.unwrap_or(0)) {
        lost = lost.bool_or(best.clone().equal(earlier.clone()));
    }
    // `Tensor::reshape` takes a size of zero for one that is to be kept.
    let lost = Dispatch::bool_reshape(lost.into_dispatch(), local.shape());
    local.mask_fill(Tensor::from_dispatch(lost), 0.0)
}
