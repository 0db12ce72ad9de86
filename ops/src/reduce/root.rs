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
    let zero = sum.clone().equal_elem(0.0);
    let sum = sum.mask_fill(zero.clone(), 1.0);
    let root = match order {
        2.0 => sum.sqrt(),
        order => sum.powf_scalar(1.0 / order),
    };
    root.mask_fill(zero, if order > 0.0 { 0.0 } else { f64::INFINITY })
}
