//! Normalization in groups of cells, which may lie on several ranks.

use halocline_core::comm::Operation;
use halocline_core::ops::{all_reduce, fan_out};
use halocline_core::{Error, ReduceOp, Result, Shard, ShardTensor, Traffic};

use super::cut::cut;
use super::kernel::group::Extents;
use super::node::{GroupRun, Norm};
use super::parameter::factors;
use super::{composed, require_epsilon};
use crate::driver::empty::{drop_empty, fill, fill_all};
use crate::kernel::simd::Isa;
use crate::operand::Operand;

/// [`group_norm`](super::group_norm) with our kernels, or with burn's operators.
pub(super) fn grouped<const D: usize>(
    x: ShardTensor<D>,
    groups: usize,
    parameters: [Option<Operand<1>>; 2],
    epsilon: f64,
    kernels: bool,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "group_norm";
    x.require_resolved(NAME)?;
    require_epsilon(NAME, epsilon)?;
    if D < 2 || groups == 0 || x.dims()[1] == 0 || !x.dims()[1].is_multiple_of(groups) {
        let message = format!(
            "{groups} groups of {:?}; expected [batch, groups·n, ..]",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    let channels = x.dims()[1] / groups;
    let apart = x
        .layout()
        .extents(1)
        .iter()
        .all(|held| held.is_multiple_of(channels));
    if !apart && groups > 1 {
        return cut(x, groups, parameters, epsilon, NAME);
    }
    let together = |dim: usize| dim >= 2 || (dim == 1 && groups == 1);
    let axes = x
        .layout()
        .axes_where(|placement| matches!(placement, Shard(dim) if together(dim)));
    let run = Grouped {
        operator: NAME,
        dim: 1,
        axes,
        count: x.dims()[2..].iter().product::<usize>() * channels,
        extents: |held: [usize; D]| Extents {
            batch: held[0],
            channels: held[1],
            cells: held[2..].iter().product(),
            groups: if groups == 1 {
                1
            } else {
                held[1].div_ceil(channels)
            },
        },
    };
    run.apply(x, parameters, epsilon, kernels)
}

/// Division of a field into groups, each with a mean and a variance.
pub(super) struct Grouped<F> {
    pub(super) operator: &'static str,
    /// Dim of weight and bias.
    pub(super) dim: usize,
    /// Mesh axes over which a group is sharded.
    pub(super) axes: Vec<usize>,
    /// Number of elements of a group on all ranks.
    pub(super) count: usize,
    /// Extents for kernels, as a function of the shape of a shard.
    pub(super) extents: F,
}

impl<F> Grouped<F> {
    pub(super) fn apply<const D: usize>(
        self,
        x: ShardTensor<D>,
        parameters: [Option<Operand<1>>; 2],
        epsilon: f64,
        kernels: bool,
    ) -> Result<ShardTensor<D>>
    where
        F: Fn([usize; D]) -> Extents,
    {
        let Self {
            operator,
            dim,
            axes,
            count,
            extents,
        } = self;
        // Here, not in a kernel, so that an unknown HALOCLINE_ISA fails before anything is sent.
        Isa::chosen()?;
        let [weight, bias] = factors(&x, dim, parameters, operator)?;
        let (local, layout, mesh) = x.into_parts();
        let (held, count) = (local.dims(), count as f64);
        let operation = Operation::new(operator, Traffic::Reduce, Some(&layout));
        let y = if kernels {
            let run = Norm::Group(GroupRun {
                extents: extents(held),
                count,
                epsilon,
                comm: mesh.comm().clone(),
                ranks: mesh.ranks_along(&axes),
                operation,
                together: None,
            });
            Error::catch(|| run.apply(local, weight, bias))?
        } else {
            let filled = fill_all(local, &layout, operator, 0.0)?;
            let (extents, present) = (extents(filled.dims()), !held.contains(&0));
            let mut parameters = [weight, bias];
            if layout.extents(dim).contains(&0) {
                for factors in &mut parameters {
                    *factors = fill(1, factors.clone(), &[0], operator, 0.0)?;
                }
            }
            let sum = |part| {
                let sum = all_reduce(part, &mesh, &axes, ReduceOp::Sum, operation.clone());
                fan_out(sum, &mesh, &axes, operator)
            };
            let y = Error::catch(|| {
                composed::group_norm(filled, parameters, extents, count, epsilon, present, sum)
            })?;
            drop_empty(y, &layout, mesh.position(), operator)?
        };
        Ok(ShardTensor::from_parts(y, layout, mesh))
    }
}
