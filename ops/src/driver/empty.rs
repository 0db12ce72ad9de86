//! Ranks without cells.
//!
//! Kernels of a backend may not support dims of size zero. If any rank has such a shard, every rank
//! passes its tensor through the same two steps, so that the graph is the same on all ranks: empty
//! dims get one cell of a neutral value, and the results computed from it are dropped. On ranks
//! with cells both steps return the tensor unchanged.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use halocline_core::plan::{ExchangePlan, Need, Source};
use halocline_core::{DeviceMesh, IndexBox, Layout, Result, ShardTensor};

/// Pads empty dims with one cell of `value`, if any rank's shard is empty in one of `dims`.
pub(crate) fn fill_empty<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    layout: &Layout,
    dims: &[usize],
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D, K>> {
    fill_up_to(1, local, layout, dims, operator, value)
}

/// Pads all empty dims with one cell of `value`, if any rank's shard is empty.
pub(crate) fn fill_all<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    layout: &Layout,
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D, K>> {
    let all: Vec<usize> = (0..D).collect();
    fill_empty(local, layout, &all, operator, value)
}

/// Pads dims to at least `least` cells of `value`, if any rank's shard is empty in one of `dims`.
pub(crate) fn fill_up_to<const D: usize, K: Basic>(
    least: usize,
    local: Tensor<D, K>,
    layout: &Layout,
    dims: &[usize],
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D, K>> {
    if !dims.iter().any(|&dim| layout.extents(dim).contains(&0)) {
        return Ok(local);
    }
    fill(least, local, dims, operator, value)
}

/// Pads dims to at least `least` cells, with the same step on every rank.
pub(crate) fn fill<const D: usize, K: Basic>(
    least: usize,
    local: Tensor<D, K>,
    dims: &[usize],
    operator: &'static str,
    value: f64,
) -> Result<Tensor<D, K>> {
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

/// Drops the padding of a result, if any rank's shard of the result is empty.
pub(crate) fn drop_empty<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    layout: &Layout,
    position: usize,
    operator: &'static str,
) -> Result<Tensor<D, K>> {
    if !layout.has_empty_shard() {
        return Ok(local);
    }
    let kept = IndexBox::whole(&layout.local_shape(position));
    keep(local, &kept, operator)
}

/// Shard of a result, without the padding that [`drop_empty`] drops.
pub(crate) fn without_fill<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    layout: Layout,
    mesh: DeviceMesh,
    operator: &'static str,
) -> Result<ShardTensor<D, K>> {
    let local = drop_empty(local, &layout, mesh.position(), operator)?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Cuts a box, which may be empty, out of a shard; the graph does not depend on the box.
pub(crate) fn keep<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    cells: &IndexBox,
    operator: &'static str,
) -> Result<Tensor<D, K>> {
    let plan = ExchangePlan::new(Source::Single(0, &local.dims()), 0, 1, |_| {
        Need::of(cells.clone())
    });
    run(local, operator, plan)
}

/// Runs a plan that sends no messages.
fn run<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    operator: &'static str,
    plan: ExchangePlan,
) -> Result<Tensor<D, K>> {
    ShardTensor::solo(local).run_plan(operator, &Arc::new(plan))
}
