//! Roots of sums, with a gradient of zero at zero.

use burn::tensor::Tensor;
use halocline_core::{OrRaise, ShardTensor};

/// The root of this order of a sum that is not negative; infinite at zero if the order is negative. At zero its gradient,
/// which has no limit there, is zero: that of the norm of a field without anything in it.
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

/// The power or root of zero of an order.
pub(super) fn at_zero(order: f64) -> f64 {
    if order > 0.0 { 0.0 } else { f64::INFINITY }
}

/// A function, but of zero this value with a gradient of zero.
pub(crate) fn but_at_zero<const D: usize>(
    x: Tensor<D>,
    value: f64,
    f: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let zero = x.clone().equal_elem(0.0);
    f(x.mask_fill(zero.clone(), 1.0)).mask_fill(zero, value)
}
