//! Roots of sums, with a gradient of zero at zero.

use burn::tensor::Tensor;
use halocline_core::{OrRaise, ShardTensor};

/// Computes the root of this order of a non-negative sum; infinite at zero for a negative order.
/// The gradient at zero, where it has no limit, is zero: that of the norm of a zero field.
pub(crate) fn root<const D: usize>(sum: ShardTensor<D>, order: f64) -> ShardTensor<D> {
    if order == 1.0 {
        return sum;
    }
    sum.require_resolved("root").or_raise();
    let (local, layout, mesh) = sum.into_parts();
    ShardTensor::from_parts(root_of(local, order), layout, mesh)
}

/// [`root`] of one shard.
pub(crate) fn root_of<const D: usize>(sum: Tensor<D>, order: f64) -> Tensor<D> {
    if order == 1.0 {
        return sum;
    }
    but_at_zero(sum, at_zero(order), |sum| match order {
        2.0 => sum.sqrt(),
        order => sum.powf_scalar(1.0 / order),
    })
}

/// Power or root of zero, for an order.
pub(super) fn at_zero(order: f64) -> f64 {
    if order > 0.0 { 0.0 } else { f64::INFINITY }
}

/// Applies a function, except at zero, where the result is `value` with a gradient of zero.
pub(crate) fn but_at_zero<const D: usize>(
    x: Tensor<D>,
    value: f64,
    f: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let zero = x.clone().equal_elem(0.0);
    f(x.mask_fill(zero.clone(), 1.0)).mask_fill(zero, value)
}
