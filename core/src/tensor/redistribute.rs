//! Changes of placement.

use burn::tensor::Tensor;
use burn::tensor::kind::{self, Basic};

use super::{LocalGradient, ShardTensor};
use crate::balance::even_extents;
use crate::comm::{Operation, Traffic};
use crate::exchange::{Direction, Exchange, Move, Need, Source};
use crate::into_layout::IntoLayout;
use crate::layout::{Fan, Layout, Partial, Placement, ReduceOp, Replicate, Shard};
use crate::operator::is_tracked;
use crate::ops;
use crate::{Error, IndexBox, OrRaise, Result};

const NAME: &str = "redistribute";

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Returns the same values in another layout. Given placements, dims whose sharding changes are
    /// divided as evenly as possible.
    ///
    /// | from → to | forward | backward |
    /// |---|---|---|
    /// | `Shard` → `Replicate` | all-gather | local slice |
    /// | `Replicate` → `Shard` | local slice | all-gather |
    /// | `Shard(i)` → `Shard(j)` | all-to-all | all-to-all |
    /// | `Partial(Sum)` → `Replicate` | all-reduce | identity |
    /// | `Partial(Sum)` → `Shard` | reduce-scatter | all-gather |
    /// | `Partial(Max)`, `Min`, `Product` → `Replicate` | all-reduce | two all-to-alls, each on a share of the values |
    /// | `Partial(Max)`, `Min`, `Product` → `Shard` | reduce-scatter | all-to-all |
    /// | `Replicate` → `Fan` | – | all-reduce |
    /// | `Shard` → `Fan` | all-gather | reduce-scatter |
    /// | `Partial` → `Fan` | all-reduce | all-reduce, then the backward pass of `Partial` → `Replicate` |
    /// | `Fan` → `Shard` | local slice | – |
    ///
    /// `Fan` can become `Replicate` only for tensors without gradients: the gradient of a
    /// replicated tensor is complete on every rank, and the sum of the ranks' parts would count it
    /// once per rank.
    ///
    /// Every operator passes the same gradient to all replicas of its result; where a tensor is
    /// converted to a local one, [`LocalGradient`] states which of two meanings its gradient has.
    /// Partial values have the gradient of [`resolve`](Self::resolve). Integers and booleans have
    /// no backward pass.
    ///
    /// # Panics
    /// Panics where [`try_redistribute`](Self::try_redistribute) returns an error.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Fan, Launcher, Layout, Partial, ReduceOp, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let rows = ShardTensor::<2>::ones([4, 6], &mesh, &[Shard(0)])?;
    ///     let columns = rows.redistribute(&[Shard(1)]);
    ///     assert_eq!(columns.local_dims(), [4, 3]);
    ///     // Every rank uses all rows of x for its columns of y, and computes its part of the
    ///     // gradient of x.
    ///     let x = ShardTensor::<2>::ones([4, 1], &mesh, &[Shard(0)])?.require_grad();
    ///     let y = x.clone().redistribute(&[Fan]) * columns;
    ///     assert_eq!(y.placements(), [Shard(1)]);
    ///     // Every element of y is added exactly once.
    ///     let part = y.into_local().sum();
    ///     let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
    ///     let loss = ShardTensor::from_parts(part, layout, mesh);
    ///     let gradient = x.grad(&loss.backward()).expect("a gradient");
    ///     gradient.into_local().into_data().assert_eq(&[[6.0_f32], [6.0]].into(), true);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn redistribute(self, to: impl IntoLayout) -> Self {
        self.try_redistribute(to).or_raise()
    }

    /// Like [`redistribute`](Self::redistribute), with an error instead of a panic.
    ///
    /// # Errors
    /// The layout does not fit the tensor, asks for partial values that the tensor does not have,
    /// or asks for `Replicate` on an axis with `Fan` of a tensor with gradients; communication
    /// fails.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let rows = ShardTensor::<2>::ones([4, 6], &mesh, &[Shard(0)])?;
    ///     let error = rows.try_redistribute(&[Shard(2)]).unwrap_err();
    ///     assert!(error.to_string().contains("Shard(2) for a tensor of 2 dims"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn try_redistribute(self, to: impl IntoLayout) -> Result<Self> {
        let layout = &to.layout_like(&self.layout)?;
        self.check_target(layout)?;
        Error::catch(|| {
            let mut tensor = self;
            for axis in tensor.layout.axes_where(|placement| placement == Fan) {
                tensor = match layout.placements()[axis] {
                    Fan => tensor,
                    // Each rank has the whole gradient of its cells; with zeros elsewhere it is a
                    // part.
                    Shard(dim) => tensor.exchange_to(axis, Shard(dim), layout),
                    // Without gradients the two are equal.
                    _ => tensor.with_placement(axis, Replicate),
                };
            }
            for (axis, op) in tensor.partial_axes() {
                tensor = match layout.placements()[axis] {
                    Partial(_) => tensor,
                    Shard(dim) if !tensor.layout.is_sharded(dim) => {
                        tensor.reduce_scatter(axis, dim, op, layout)
                    }
                    _ => tensor.resolve_axis(axis, op),
                };
            }
            let mut fans = layout.axes_where(|placement| placement == Fan);
            fans.retain(|axis| tensor.placements()[*axis] != Fan);
            if fans.is_empty() {
                return tensor.move_to(layout);
            }
            // The fan-out comes last, so that gradients are whole until then.
            let mut before = layout.placements().to_vec();
            fans.iter()
                .for_each(|axis| before[*axis] = tensor.placements()[*axis]);
            let before = (&before).layout_like(&tensor.layout);
            tensor = tensor.move_to(&before.or_raise());
            let is_sharded = |axis: &usize| matches!(tensor.placements()[*axis], Shard(_));
            let (sharded, replicated): (Vec<_>, Vec<_>) = fans.into_iter().partition(is_sharded);
            for axis in sharded {
                tensor = tensor.exchange_to(axis, Fan, layout);
            }
            // A single sum over all axes, which the gradient of a parameter may share with others.
            tensor.fan_out(&replicated).move_to(layout)
        })
    }

    /// Returns the same values with `Fan` on the axes that `chosen` selects among those with
    /// `Replicate`.
    ///
    /// # Errors
    /// The errors of [`try_redistribute`](Self::try_redistribute).
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Fan, Launcher, Replicate, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2), ("lon", 1)])?;
    ///     let x = ShardTensor::<1>::ones([4], &mesh, &[Replicate, Shard(0)])?;
    ///     assert_eq!(x.try_fan_out(|_| true)?.placements(), [Fan, Shard(0)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn try_fan_out(self, chosen: impl Fn(usize) -> bool) -> Result<Self> {
        let placements = self.placements().iter().enumerate();
        let placements = placements.map(|(axis, placement)| match placement {
            Replicate if chosen(axis) => Fan,
            other => *other,
        });
        let placements: Vec<Placement> = placements.collect();
        self.try_redistribute(&placements)
    }

    /// Whether the autodiff graph has a node for the tensor.
    fn is_tracked(&self) -> bool {
        is_tracked(&self.local.clone().into_dispatch())
    }

    /// Refuses placements that cannot be reached.
    fn check_target(&self, layout: &Layout) -> Result<()> {
        let pairs = self.placements().iter().zip(layout.placements());
        for (axis, (from, to)) in pairs.enumerate() {
            let help = match (from, to) {
                (from, to) if from == to => continue,
                (_, Partial(_)) => "partial values come from operators only",
                (Fan, Replicate) if self.is_tracked() => {
                    "shard it instead, or end its gradient with inner()"
                }
                _ => continue,
            };
            let name = &layout.mesh().names()[axis];
            let placement = format!("{from} → {to} on axis \"{name}\"");
            return Err(Error::placement(NAME, placement, help));
        }
        Ok(())
    }

    /// Reduces partial values: an all-reduce over each axis that holds them, in rank order.
    ///
    /// # Adjoint
    /// A sum passes its gradient to each term: the identity. A maximum or minimum passes it to the
    /// first rank, in mesh order, that attains it. A product passes it to each factor, times the
    /// other factors, also where some are zero. For the latter two, each rank receives all
    /// contributions to a share of the elements; no rank receives those to all elements.
    ///
    /// # Panics
    /// [Raises](Error::raise) a failure of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Layout, Partial, ReduceOp, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Max)])?;
    ///     let value = Tensor::<1>::full([1], world.rank() as f32, world.device());
    ///     let x = ShardTensor::from_local(value, &mesh, &layout)?;
    ///     let largest = x.resolve().to_local();
    ///     largest.into_data().assert_eq(&[1.0_f32].into(), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[must_use]
    pub fn resolve(self) -> Self {
        let axes = self.partial_axes().into_iter();
        axes.fold(self, |tensor, (axis, op)| tensor.resolve_axis(axis, op))
    }

    /// The axes with partial values, in the order in which they are resolved. Without sums the last
    /// axis comes first, so that if several ranks hold an extremum, the first in mesh order
    /// receives the gradient.
    fn partial_axes(&self) -> Vec<(usize, ReduceOp)> {
        let mut axes: Vec<_> = self.layout.partial_axes().collect();
        if axes.iter().all(|(_, op)| *op != ReduceOp::Sum) {
            axes.reverse();
        }
        axes
    }

    fn resolve_axis(self, axis: usize, op: ReduceOp) -> Self {
        let operation = Operation::new("resolve", Traffic::Reduce, Some(&self.layout));
        let layout = self.layout.with_placement(axis, Replicate);
        let local = ops::all_reduce(self.local, &self.mesh, &[axis], op, operation);
        Self::from_parts(local, layout, self.mesh)
    }

    /// `Partial` → `Shard(dim)`.
    fn reduce_scatter(self, axis: usize, dim: usize, op: ReduceOp, target: &Layout) -> Self {
        let mut placements = self.placements().to_vec();
        placements[axis] = Shard(dim);
        let mut extents = self.layout.all_extents().to_vec();
        extents[dim] = if target.axes_of(dim) == [axis] {
            target.extents(dim).to_vec()
        } else {
            let parts = self.layout.mesh().sizes()[axis];
            even_extents(self.layout.shape()[dim], parts)
        };
        let sharded = self.layout.derive(placements, extents);
        let local = match op {
            ReduceOp::Sum => self.sum_scatter(&sharded),
            op => {
                let positions = self
                    .mesh
                    .shape()
                    .positions_along(self.mesh.position(), &[axis]);
                let held = self.layout.local_box(self.mesh.position());
                let part = |position| sharded.local_box(position).seen_from(&held);
                let boxes = positions.into_iter().map(part).collect();
                let (group, operation) = (self.mesh.ranks_along(&[axis]), self.operation(&sharded));
                ops::reduce_scatter(self.local, &self.mesh, group, boxes, op, operation)
            }
        };
        Self::from_parts(local, sharded, self.mesh)
    }

    /// `Partial(Sum)` → `Shard(dim)`: the all-gather of the sharded layout, run in reverse.
    fn sum_scatter(&self, sharded: &Layout) -> Tensor<D, K> {
        let plan = self.mesh.plan_between(sharded, &self.layout);
        let (comm, operation) = (self.mesh.comm().clone(), self.operation(sharded));
        // The backward pass of the gather is the forward pass of this operation.
        let gather = Exchange::with_adjoint(operation.backward(), comm, self.ranks(), plan);
        ops::run(self.local.clone(), gather.reversed())
    }

    /// `Replicate` → `Fan`.
    fn fan_out(self, axes: &[usize]) -> Self {
        if axes.is_empty() {
            return self;
        }
        let local = ops::fan_out(self.local, &self.mesh, axes, NAME);
        let layout = self.layout.fanned_out(axes);
        Self {
            local,
            layout,
            ..self
        }
    }

    fn with_placement(self, axis: usize, placement: Placement) -> Self {
        let layout = self.layout.with_placement(axis, placement);
        Self { layout, ..self }
    }

    /// `Shard` → `Fan` or `Fan` → `Shard` on one axis. The adjoint adds the gradients of a cell
    /// from all ranks.
    fn exchange_to(self, axis: usize, placement: Placement, target: &Layout) -> Self {
        let mut placements = self.placements().to_vec();
        placements[axis] = placement;
        let even = (&placements).layout_like(&self.layout);
        let mut layout = even.or_raise();
        // A dim that already has its final axes takes its final extents, so that it is not moved
        // again.
        for dim in 0..D {
            if layout.axes_of(dim) == target.axes_of(dim) {
                let last = layout.with_extents(dim, target.extents(dim));
                layout = last.or_raise();
            }
        }
        let plan = self.mesh.plan_between(&self.layout, &layout);
        let operation = self.operation(&layout);
        let local = ops::exchange(self.local, &self.mesh, plan, operation);
        Self::from_parts(local, layout, self.mesh)
    }

    /// Moves to a layout with the same axes of `Partial` and `Fan` by a single exchange.
    fn move_to(self, layout: &Layout) -> Self {
        if self.layout == *layout {
            return self;
        }
        // The backward pass is an exchange back, not the adjoint of this one: the gradient is equal
        // on all replicas, and the adjoint would sum it over them.
        let forward = |plan| Move {
            plan,
            direction: Direction::Forward,
        };
        let exchange = Exchange {
            operation: self.operation(layout),
            comm: self.mesh.comm().clone(),
            ranks: self.ranks(),
            forward: forward(self.mesh.plan_between(&self.layout, layout)),
            backward: forward(self.mesh.plan_between(layout, &self.layout)),
        };
        let local = ops::run(self.local, exchange);
        Self::from_parts(local, layout.clone(), self.mesh)
    }

    fn operation(&self, target: &Layout) -> Operation {
        Operation::new(NAME, Traffic::Redistribute, Some(target)).leaving(&self.layout)
    }

    /// Returns the whole tensor on every rank: a gather, for small tensors and for tests.
    ///
    /// The gradient of the result must be complete on every rank;
    /// [`full_tensor_with`](Self::full_tensor_with) offers another choice. Integers and booleans
    /// have no gradient.
    ///
    /// # Panics
    /// [Raises](Error::raise) a failure of communication.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::full([3], 2.0, &mesh, &[Shard(0)])?;
    ///     let whole = x.full_tensor();
    ///     whole.into_data().assert_eq(&[2.0_f32; 3].into(), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn full_tensor(&self) -> Tensor<D, K> {
        self.full_tensor_with(LocalGradient::Replicated)
    }

    /// Like [`full_tensor`](Self::full_tensor), with a choice of the meaning of the ranks'
    /// gradients; see the example of [`to_local_with`](Self::to_local_with).
    ///
    /// # Panics
    /// [Raises](Error::raise) a failure of communication.
    #[track_caller]
    pub fn full_tensor_with(&self, gradient: LocalGradient) -> Tensor<D, K> {
        let resolved = self.clone().resolve();
        let whole = resolved.layout.map_placements(|placement| match placement {
            Fan => Fan,
            _ => Replicate,
        });
        let whole = Layout::new(self.layout.mesh(), self.layout.shape(), &whole).or_raise();
        let all_sharded = resolved.placements().iter().all(|p| p.varies());
        if gradient == LocalGradient::Partial && all_sharded {
            // From shards to replicas on every axis: the adjoint of the exchange is the
            // reduce-scatter that sums the gradients.
            let plan = resolved.mesh.plan_between(&resolved.layout, &whole);
            let operation = resolved.operation(&whole);
            return ops::exchange(resolved.local, &resolved.mesh, plan, operation);
        }
        let whole = resolved.try_redistribute(&whole);
        whole.or_raise().to_local_with(gradient)
    }
}

impl<const D: usize, K: kind::Autodiff> ShardTensor<D, K> {
    /// Returns the whole tensor, without autodiff, on rank `root` of the world, and `None` on the
    /// others, for example to write files.
    ///
    /// # Errors
    /// The root is not in the mesh; communication fails.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([3], &mesh, &[Shard(0)])?;
    ///     let whole = x.gather_tensor(0)?;
    ///     assert_eq!(whole.map(|x| x.dims()), world.is_root().then_some([3]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn gather_tensor(&self, root: usize) -> Result<Option<Tensor<D, K>>> {
        let root = self.mesh.shape().position_of(root).ok_or_else(|| {
            Error::operator(
                "gather_tensor",
                format!("rank {root} is not in the {}", self.mesh),
            )
        })?;
        Error::catch(|| {
            let resolved = self.clone().inner().resolve();
            let need = |position| {
                if position == root {
                    Need::of(IndexBox::whole(self.layout.shape()))
                } else {
                    Need::nothing(vec![0; D])
                }
            };
            let key = ("gather_tensor", resolved.layout.clone(), root);
            let plan = self.mesh.cache().get_or_make(key, |key| {
                let plan = self.mesh.exchange_plan(Source::Layout(&key.1), need);
                Ok(plan.with_arguments(key))
            });
            let plan = plan.expect("making this plan cannot fail");
            let operation =
                Operation::new("gather_tensor", Traffic::Scatter, Some(&resolved.layout));
            let gathered = ops::exchange(resolved.local, &self.mesh, plan, operation);
            (self.mesh.position() == root).then_some(gathered)
        })
    }
}
