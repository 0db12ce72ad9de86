//! Merging of attention to the keys of several ranks, for queries that all of them hold.

use burn::tensor::Tensor;
use halocline_core::comm::Operation;
use halocline_core::ops::{all_reduce, fan_out};
use halocline_core::{DeviceMesh, Error, Fan, Layout, ReduceOp, Result, ShardTensor, Traffic};

use super::dims::{NAME, WIDTH};
use crate::attention::attended::{AttentionOutput, attended};
use crate::rearrange::cat;

/// Attention to the keys of all ranks along `axes`, from each rank's attention to its own keys.
/// Argument and result have the log-sum-exps as their last column; `layout` is that of the output.
///
/// One maximum and one sum are sent. The maximum cancels, so it needs no gradient.
pub(super) fn over_ranks(
    both: Tensor<4>,
    layout: &Layout,
    mesh: &DeviceMesh,
    axes: &[usize],
) -> Result<Tensor<4>> {
    let dtype = both.dtype();
    let differing = axes.iter().fold(layout.clone(), |layout, axis| {
        layout.with_placement(*axis, Fan)
    });
    let reduced = |local: Tensor<4>, op: ReduceOp| {
        let operation = Operation::new(NAME, Traffic::Reduce, Some(layout));
        Error::catch(|| all_reduce(local, mesh, axes, op, operation))
    };
    let AttentionOutput { output, lse } = attended(both, &differing, mesh, dtype)?;
    let most = reduced(lse.clone().detach().into_local(), ReduceOp::Max)?;
    let most = ShardTensor::from_parts(most, lse.layout().clone(), mesh.clone());
    let weight = (lse - most.clone()).exp();
    let weighted = cat(vec![output * weight.clone(), weight], WIDTH)?;
    let sums = reduced(weighted.into_local(), ReduceOp::Sum)?;
    let sums = attended(sums, &differing, mesh, dtype)?;
    let (output, sum) = (sums.output, sums.lse);
    let merged = cat(vec![output / sum.clone(), sum.log() + most], WIDTH)?;
    // Ranks with different uses of the result have different gradients of it.
    let mut fans = axes.to_vec();
    fans.retain(|axis| layout.placements()[*axis] == Fan);
    Error::catch(|| fan_out(merged.into_local(), mesh, &fans, NAME))
}
