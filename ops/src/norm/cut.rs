//! Group normalization where shards of the channels cut groups: sums of each channel are added up
//! by group, then over the ranks.

use burn::tensor::Tensor;
use halocline_core::comm::Operation;
use halocline_core::ops::{all_reduce, fan_out};
use halocline_core::{Error, ReduceOp, Result, Shard, ShardTensor, Traffic};

use super::parameter::{affine, both_along};
use crate::driver::empty::{fill_all, without_fill};
use crate::kernel::taken::{Places, add, take};
use crate::operand::Operand;
use crate::precision::in_f32;
use crate::reshape;

/// [`group_norm`](super::group_norm) with groups that divide the channels of `x`.
pub(super) fn cut<const D: usize>(
    x: ShardTensor<D>,
    groups: usize,
    parameters: [Option<Operand<1>>; 2],
    epsilon: f64,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let parameters = both_along(&x, 1, parameters, operator)?;
    let y = in_f32(x, |x| normalized(x, groups, epsilon, operator))?;
    Ok(affine(y, parameters))
}

fn normalized<const D: usize>(
    x: ShardTensor<D>,
    groups: usize,
    epsilon: f64,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let channels = x.dims()[1] / groups;
    let count = (x.dims()[2..].iter().product::<usize>() * channels) as f64;
    let (local, layout, mesh) = x.into_parts();
    let held = layout.local_box(mesh.position()).ranges()[1].clone();
    let mut group: Vec<usize> = held.map(|channel| channel / channels).collect();
    group.resize(group.len().max(1), 0); // a placeholder has one channel
    let group = Places::new(group);
    let axes = layout.axes_where(|placement| matches!(placement, Shard(dim) if dim >= 1));
    let operation = Operation::new(operator, Traffic::Reduce, Some(&layout));
    // A placeholder has no share of the sums.
    let share = f64::from(!local.dims().contains(&0)) / count;
    let local = fill_all(local, &layout, operator, 0.0)?;
    let mean = |x: Tensor<D>| {
        let mut shape = x.dims();
        let cells: usize = shape[2..].iter().product();
        let x: Tensor<3> = reshape(x, vec![shape[0], shape[1], cells]);
        let sums = add(x.sum_dim(2) * share, 1, &group, groups); // [batch, groups, 1]
        let means = all_reduce(sums, &mesh, &axes, ReduceOp::Sum, operation.clone());
        let means = take(fan_out(means, &mesh, &axes, operator), 1, &group);
        shape[2..].fill(1);
        reshape::<3, D>(means, shape.to_vec()) // [batch, channels, 1, ..]
    };
    let y = Error::catch(|| {
        let offsets = local.clone() - mean(local);
        let variance = mean(offsets.clone().square());
        offsets / (variance + epsilon).sqrt()
    })?;
    without_fill(y, layout, mesh, operator)
}
