//! Power of the modes along a dim.

use halocline_core::{Result, ShardTensor};

use super::fft::{FftNorm, rfft};
use crate::driver::place::renumbered;
use crate::precision::{cast_shard, narrowed, wider};
use crate::rearrange::profile;
use crate::reduce::sum_dims;

/// Computes the power of each mode along a dim, averaged over all other dims: `|x̂_k/n|²`, doubled
/// where a mode has a conjugate. The sum over all modes is the mean of `x²`. `E = D + 1`.
///
/// # Shapes
/// `[..]` → `[modes]`, with modes `0..=n/2`.
///
/// # Placement
/// `Partial(Sum)` on every axis that shards `x`, or `Shard(0)` where the exchange of [`rfft`]
/// leaves the modes sharded; resolved in f16 and bf16.
///
/// # Errors
/// The errors of [`rfft`]; partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::spectral::power_spectrum;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 3.0, 1.0, 3.0]]));
/// let power = power_spectrum::<2, 3>(x, 1)?.into_local();
/// power.into_data().assert_eq(&[4.0_f32, 0.0, 1.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn power_spectrum<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dim: usize,
) -> Result<ShardTensor<1>> {
    x.require_resolved("power_spectrum")?;
    let (dims, dtype) = (x.dims(), x.local().dtype());
    let x = cast_shard(x, wider(dtype));
    let modes: ShardTensor<E> = rfft(x, &[dim], FftNorm::Forward)?; // checks the dim
    let others: usize = dims.iter().product::<usize>() / dims[dim];
    let weights: Vec<f64> = (0..modes.dims()[dim])
        .map(|k| {
            let pair = if k == 0 || 2 * k == dims[dim] {
                1.0
            } else {
                2.0
            };
            pair / others.max(1) as f64
        })
        .collect();
    let squares = modes.square();
    let weights = profile(&squares, dim, &weights)?;
    let summed: Vec<usize> = (0..E).filter(|other| *other != dim).collect();
    let power = sum_dims(squares * weights, &summed)?;
    let extents = vec![power.layout().extents(dim).to_vec()];
    Ok(narrowed(renumbered(power, extents, |_| 0), dtype))
}
