//! Loss of the amplitudes of modes.

use super::{Reduction, reduced};
use crate::field::{Field, Rank};
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
    let amplitude = |x: X| {
        let modes = SpectralField::rfft::<E>(x, dims, FftNorm::Ortho);
        // The gradient of an amplitude of zero is zero.
        (modes.square().sum_dims(&[E - 1]) + 1e-24).sqrt()
    };
    let error = amplitude(x) - amplitude(target);
    reduced(error.square(), reduction)
}
