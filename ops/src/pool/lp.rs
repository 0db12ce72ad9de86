//! Norms over windows.
//!
//! `y = (Σ |x|^p)^(1/p)` over a window. Semantics follow PyTorch's `lp_pool{1,2,3}d`, except that
//! PyTorch sums powers of `x` itself. Where `x` is negative and `p` is not even, it returns NaN or,
//! if other cells of the window are larger, less than the norm; for `p = 1` it returns the sum.
//!
//! # Placement
//! All dims may be sharded. An output belongs to the rank that holds the middle cell of its window.
//!
//! # Communication
//! The halos of [`avg_pool`](fn@super::avg_pool).
//!
//! # Adjoint
//! `sign(x) · (|x| / y)^(p − 1)` times the cotangent, summed over the windows of a cell; zero for a
//! window of zeros.

use halocline_core::{Error, Result, ShardTensor};

use super::combine::Norm;
use super::windows::WindowNorm;
use super::{PaddingCount, PoolOptions, counted, name};
use crate::precision::in_f32;

/// Computes the norm of the given order over windows, counting padding as zeros. See the
/// [module](self).
///
/// # Errors
/// An order below one or not finite; partial values; the errors of
/// [`avg_pool`](fn@super::avg_pool).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::PoolOptions;
/// use halocline_ops::pool::lp_pool;
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, -3.0, 5.0, 9.0]]]));
/// let y = lp_pool(x, 1.0, &PoolOptions::new([2]))?;
/// y.local().to_data().assert_eq(&[[[4.0_f32, 14.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn lp_pool<const D: usize, const N: usize>(
    x: ShardTensor<D>,
    order: f64,
    options: &PoolOptions<N>,
) -> Result<ShardTensor<D>> {
    let name = name::<D, N>(x.dims(), ["lp_pool1d", "lp_pool2d", "lp_pool3d"])?;
    if order.is_nan() || order < 1.0 || order.is_infinite() {
        let message = format!("a norm of order {order}; expected at least 1");
        return Err(Error::operator(name, message));
    }
    x.require_resolved(name)?;
    let options = options.with_count(PaddingCount::Included);
    let windows = WindowNorm(Norm(order));
    in_f32(x, |x| {
        counted(name, x, &options, windows, |factor| {
            factor.powf(1.0 / order)
        })
    })
}
