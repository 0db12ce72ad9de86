//! Roots of sums, with a gradient of zero at zero.

use halocline_core::{OrRaise, ShardTensor};

/// The root of this order of a sum that is not negative. At zero its gradient, which has no limit there, is zero: that of
/// the norm of a field without anything in it.
pub(crate) fn root<const D: usize>(sum: ShardTensor<D>, order: f64) -> ShardTensor<D> {
    if order == 1.0 {
        return sum;
    }
    sum.require_resolved("root").or_raise();
    let (local, layout, mesh) = sum.into_parts();
    let zero = local.clone().equal_elem(0.0);
    let local = local.mask_fill(zero.clone(), 1.0);
    let root = match order {
        2.0 => local.sqrt(),
        order => local.powf_scalar(1.0 / order),
    };
    ShardTensor::from_parts(root.mask_fill(zero, 0.0), layout, mesh)
}
