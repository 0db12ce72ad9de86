//! Fourier and cosine transforms, products of modes, and power spectra.
//!
//! `rfft` computes `y_k = Σ_j x_j e^{−2πijk/n}` along each of the dims. Semantics follow PyTorch's
//! `torch.fft.rfftn` and related functions, with the same [norms](FftNorm). A complex tensor has a
//! last dim of size 2 with the real and the imaginary part, as returned by `torch.view_as_real`.
//!
//! # Placement
//! All dims may be sharded, except that of real and imaginary parts. An exchange makes a dim whole
//! before it is transformed; dims that are whole already are transformed first. The result keeps
//! the placements of the last exchange:
//!
//! | `x` `[batch, channels, lat, lon]` | `rfft(&[2, 3])` `[.., lat, modes, 2]` | communication |
//! |---|---|---|
//! | `Shard(0)` | `Shard(0)` | – |
//! | `Shard(2)` | `Shard(3)` | an all-to-all of complex cells |
//! | `Shard(3)` | `Shard(1)` | an all-to-all of real cells |
//! | `Shard(2)`, `Shard(3)` | `Shard(3)`, `Shard(1)` | both |
//! | `Partial(Sum)`, `Fan`, `Replicate` | the same | – |
//!
//! The mesh axis moves to the dim with the most cells. A dim that is still to be transformed
//! (latitude, while longitude is made whole) is chosen only if no other dim has a cell for every
//! rank. If no dim has, ranks without cells hold no lines: all of `[1, 1, cells]` is on one rank. A
//! tensor with no other dim is an error.
//!
//! # Adjoint
//! The transpose of the transform as a real matrix, which is a transform in the opposite direction:
//! that of `rfft` halves all modes that have a conjugate, and that of `irfft` doubles them.
//! Exchanges are reversed.
//!
//! Each line of cells is transformed independently, in f32 or f64 (narrower types are widened), so
//! results do not depend on the number of threads or ranks, bit for bit.

mod complex;
pub mod conv;
mod fft;
mod golden;
mod kernel;
mod line;
mod local;
pub mod modes;
mod pencil;
mod power;
mod products;
mod real;
#[cfg(test)]
mod tests;

pub(crate) use golden::OPERATORS;
pub(crate) use line::{Line, Scale};
pub(crate) use local::{along, along_layout};
pub(crate) use pencil::{return_to, whole, whole_layout};

pub use conv::spectral_conv;
pub use fft::{FftNorm, dct, fft, idct, ifft, irfft, rfft};
pub use modes::mode_product;
pub(crate) use modes::{check_channels, check_modes, harmonic_product, own_modes};
pub use power::power_spectrum;

use crate::field::{Field, WithDims, run};
use crate::operand::Operand;

/// Spectral transforms as methods.
pub trait SpectralField<const D: usize>: Field<D> {
    /// Computes the Fourier transform of a real tensor; the result has `E = D + 1` dims. See
    /// [`rfft`](fn@rfft).
    ///
    /// # Panics
    /// Panics where [`rfft`](fn@rfft) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{FftNorm, SpectralField};
    ///
    /// let x = Tensor::<4>::ones([2, 3, 6, 9], &Default::default());
    /// let y: Tensor<5> = SpectralField::rfft(x, &[2, 3], FftNorm::Backward);
    /// assert_eq!(y.dims(), [2, 3, 6, 5, 2]);
    /// ```
    #[must_use]
    #[track_caller]
    fn rfft<const E: usize>(self, dims: &[usize], norm: FftNorm) -> WithDims<Self, E> {
        run(self, |x| rfft::<D, E>(x, dims, norm))
    }

    /// Computes the inverse of [`rfft`](Self::rfft), with `size` cells in the last of `dims`; the
    /// result has `E = D − 1` dims. See [`irfft`](fn@irfft).
    ///
    /// # Panics
    /// Panics where [`irfft`](fn@irfft) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{FftNorm, SpectralField};
    ///
    /// let y = Tensor::<4>::ones([3, 6, 5, 2], &Default::default());
    /// let x: Tensor<3> = SpectralField::irfft(y, &[1, 2], 9, FftNorm::Backward);
    /// assert_eq!(x.dims(), [3, 6, 9]);
    /// ```
    #[must_use]
    #[track_caller]
    fn irfft<const E: usize>(
        self,
        dims: &[usize],
        size: usize,
        norm: FftNorm,
    ) -> WithDims<Self, E> {
        run(self, |x| irfft::<D, E>(x, dims, size, norm))
    }

    /// Computes the Fourier transform of a complex tensor. See [`fft`](fn@fft) for an example.
    ///
    /// # Panics
    /// Panics where [`fft`](fn@fft) returns an error.
    #[must_use]
    #[track_caller]
    fn fft(self, dims: &[usize], norm: FftNorm) -> Self {
        run(self, |x| fft(x, dims, norm))
    }

    /// Computes the inverse of [`fft`](Self::fft). See [`ifft`](fn@ifft) for an example.
    ///
    /// # Panics
    /// Panics where [`ifft`](fn@ifft) returns an error.
    #[must_use]
    #[track_caller]
    fn ifft(self, dims: &[usize], norm: FftNorm) -> Self {
        run(self, |x| ifft(x, dims, norm))
    }

    /// Computes the cosine transform. See [`dct`](fn@dct) for an example.
    ///
    /// # Panics
    /// Panics where [`dct`](fn@dct) returns an error.
    #[must_use]
    #[track_caller]
    fn dct(self, dims: &[usize], norm: FftNorm) -> Self {
        run(self, |x| dct(x, dims, norm))
    }

    /// Computes the inverse of [`dct`](Self::dct). See [`idct`](fn@idct) for an example.
    ///
    /// # Panics
    /// Panics where [`idct`](fn@idct) returns an error.
    #[must_use]
    #[track_caller]
    fn idct(self, dims: &[usize], norm: FftNorm) -> Self {
        run(self, |x| idct(x, dims, norm))
    }

    /// Computes the power of each mode along a dim; `E = D + 1`. See [`power_spectrum`] for an
    /// example.
    ///
    /// # Panics
    /// Panics where [`power_spectrum`] returns an error.
    #[must_use]
    #[track_caller]
    fn power_spectrum<const E: usize>(self, dim: usize) -> WithDims<Self, 1> {
        run(self, |x| power_spectrum::<D, E>(x, dim))
    }

    /// Multiplies the channels of each mode by a complex matrix. See [`modes`], and
    /// [`mode_product`](fn@mode_product) for an example.
    ///
    /// # Panics
    /// Panics where [`mode_product`](fn@mode_product) returns an error.
    #[must_use]
    #[track_caller]
    fn mode_product(self, weight: impl Into<Operand<D>>) -> Self {
        run(self, |x| mode_product(x, weight))
    }

    /// Convolves with a kernel given by its lowest modes; the weight has `E = D + 1` dims. See
    /// [`conv`].
    ///
    /// # Panics
    /// Panics where [`spectral_conv`](fn@spectral_conv) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::SpectralField;
    ///
    /// let device = Default::default();
    /// let weight = Tensor::<4>::ones([3, 2, 4, 2], &device);
    /// let y = Tensor::<3>::ones([1, 3, 8], &device).spectral_conv(weight);
    /// assert_eq!(y.dims(), [1, 2, 8]);
    /// ```
    #[must_use]
    #[track_caller]
    fn spectral_conv<const E: usize>(self, weight: impl Into<Operand<E>>) -> Self {
        run(self, |x| spectral_conv(x, weight))
    }
}

impl<const D: usize, X: Field<D>> SpectralField<D> for X {}
