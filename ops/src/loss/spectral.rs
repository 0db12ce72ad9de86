//! Loss of the amplitudes of modes.

use halocline_core::ShardTensor;

use super::{Reduction, reduced};
use crate::field::{Field, Rank};
use crate::precision::{cast_shard, narrowed, wider};
use crate::reduce::ReduceField;
use crate::spectral::{FftNorm, SpectralField};

/// The squared error of the amplitudes of Fourier modes, `(|x̂| − |t̂|)²`, over the modes of `dims` (those of
/// [`rfft`](fn@crate::spectral::rfft), orthonormal) and all other cells. Unlike [`mse_loss`](super::mse_loss) it
/// does not reward blurred predictions: phases do not matter. `E = D + 1`.
///
/// # Panics
/// Panics where [`rfft`](fn@crate::spectral::rfft) returns an error.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, spectral_loss};
///
/// let x = Tensor::<2>::from([[1.0, 0.0, 0.0, 0.0]]);
/// let shifted = Tensor::<2>::from([[0.0, 1.0, 0.0, 0.0]]);
/// let loss = spectral_loss::<3, _, _>(x, shifted, &[1], Reduction::Mean);
/// assert!(loss.into_scalar::<f32>() < 1e-12);
/// ```
pub fn spectral_loss<const E: usize, const D: usize, X: Field<D>>(
    x: X,
    target: X,
    dims: &[usize],
    reduction: Reduction,
) -> Rank<X, 1> {
    let (x, target) = (x.into_shard(), target.into_shard());
    let dtype = x.local().dtype();
    let amplitude = |x: ShardTensor<D>| {
        let modes: ShardTensor<E> =
            SpectralField::rfft(cast_shard(x, wider(dtype)), dims, FftNorm::Ortho);
        // The gradient of an amplitude of zero is zero.
        (modes.square().sum_dims(&[E - 1]) + 1e-24).sqrt()
    };
    let error = amplitude(x) - amplitude(target);
    Field::from_shard(narrowed(reduced(error.square(), reduction), dtype))
}
