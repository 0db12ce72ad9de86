//! Ranks without cells.
//!
//! Kernels of the backend need not cope with dims of size zero. Where some rank has such a shard, every rank passes its
//! tensor through the same two steps, so that the graph is the same everywhere: empty dims get one cell of a value that
//! changes nothing, and what was computed from it is dropped. On ranks with cells both steps pass the tensor as it is.

use std::sync::Arc;

use burn::tensor::Tensor;
use halocline_core::{ExchangePlan, IndexBox, Layout, Need, Result, ShardTensor, Source};

/// Gives empty dims one cell of `value`, if some rank's shard is empty in one of `dims`.
pub(crate) fn fill_empty<const D: usize>(
    local: Tensor<D>,
    layout: &Layout,
    dims: &[usize],
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D>> {
    fill_up_to(1, local, layout, dims, operator, value)
}

/// Gives dims of fewer than `least` cells so many, if some rank's shard is empty in one of `dims`.
pub(crate) fn fill_up_to<const D: usize>(
    least: usize,
    local: Tensor<D>,
    layout: &Layout,
    dims: &[usize],
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D>> {
    if !dims.iter().any(|&dim| layout.extents(dim).contains(&0)) {
        return Ok(local);
    }
    fill(least, local, dims, operator, value)
}

/// Gives dims of fewer than `least` cells so many: the same step on every rank.
pub(crate) fn fill<const D: usize>(
    least: usize,
    local: Tensor<D>,
    dims: &[usize],
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D>> {
    let held = local.dims();
    let plan = ExchangePlan::new(Source::Single(0, &held), 0, 1, |_| {
        let mut need = Need::of(IndexBox::whole(&held));
        for &dim in dims {
            need.shape[dim] = held[dim].max(least);
        }
        need
    });
    run(local, operator, plan.with_fill(value))
}

/// Keeps the cells of a shard, if some rank's shard of the result is empty.
pub(crate) fn drop_empty<const D: usize>(
    local: Tensor<D>,
    layout: &Layout,
    position: usize,
    operator: &'static str,
) -> Result<Tensor<D>> {
    if !layout.has_empty_shard() {
        return Ok(local);
    }
    let kept = IndexBox::whole(&layout.local_shape(position));
    keep(local, &kept, operator)
}

/// A box of a shard, which may be empty: the same graph whatever the box is.
pub(crate) fn keep<const D: usize>(
    local: Tensor<D>,
    cells: &IndexBox,
    operator: &'static str,
) -> Result<Tensor<D>> {
    let plan = ExchangePlan::new(Source::Single(0, &local.dims()), 0, 1, |_| {
        Need::of(cells.clone())
    });
    run(local, operator, plan)
}

/// Runs a plan without messages.
fn run<const D: usize>(
    local: Tensor<D>,
    operator: &'static str,
    plan: ExchangePlan,
) -> Result<Tensor<D>> {
    ShardTensor::solo(local).run_plan(operator, &Arc::new(plan))
}
