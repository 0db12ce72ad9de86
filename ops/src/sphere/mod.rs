//! Spherical-harmonic transforms of scalar and vector fields, and regridding
//! ([`regrid`](fn@regrid)).
//!
//! `x(θ, λ) = Σ_lm y_lm P_l^m(cos θ) e^{imλ}` and `y_lm = ∫ x P_l^m e^{−imλ}` over the sphere, by
//! the quadrature of the [grid](SphereGrid). Semantics, norms and truncation follow torch-harmonics
//! 0.9. Fields are real, so only orders `m ≥ 0` are stored.
//!
//! # Shapes
//! `[.., lat, lon]` ↔ `[.., degrees, orders, 2]`, with real and imaginary parts last. Vector fields
//! and vector harmonics have a dim of two components before these: colatitude and longitude
//! components of a field, spheroidal and toroidal components of harmonics.
//!
//! # Placement
//! All dims may be sharded, degrees and orders included, except the dim of real and imaginary
//! parts. The Fourier transform makes longitude (orders) whole; the Legendre sum of each order
//! makes latitude (degrees) whole, while orders may stay sharded, and each rank stores the Legendre
//! functions of its own orders only. The exchange chooses dims as for [`rfft`](crate::spectral):
//!
//! | `[batch, channels, lat, lon]` | `sht` | its `isht` | communication each way |
//! |---|---|---|---|
//! | `Shard(2)` | `Shard(3)`: orders | `Shard(2)` | an all-to-all of the kept orders |
//! | `Shard(3)` | `Shard(1)` | `Shard(1)` | an all-to-all, then none |
//! | `Shard(0)`, `Partial(Sum)`, `Fan`, `Replicate` | the same | the same | – |
//!
//! The vector transforms do not accept `Partial(Sum)`: resolve first.
//!
//! # Adjoint
//! The transposes of the Legendre sum and the Fourier transform, with the exchanges reversed.
//!
//! Legendre functions are computed in f64 by a recursion that does not underflow. The sums exploit
//! that each function is even or odd in latitude, and zero where the degree is below the order: a
//! quarter of the work of full matrices.

mod angles;
mod contraction;
mod conv;
mod coordinates;
mod golden;
mod grid;
mod legendre;
mod regrid;
mod sht;
mod table;
#[cfg(test)]
mod tests;
mod transform;

pub(crate) use golden::{OPERATORS, grids_of};

pub use conv::{sphere_conv, sphere_conv_between, sphere_resample};
pub use grid::SphereGrid;
pub use regrid::{Regrid, RegridMode, regrid};
pub use sht::{Sht, ShtNorm, ShtPhase};
pub use transform::{isht, sht, vector_isht, vector_sht};

use crate::field::{Field, WithDims, run};
use crate::operand::Operand;
use crate::precision::in_f32;
use crate::rearrange::profile;
use crate::reduce::sum_dims;

/// Transforms on the sphere as methods.
pub trait SphereField<const D: usize>: Field<D> {
    /// Transforms a field to spherical harmonics; the result has `E = D + 1` dims. See
    /// [`sht`](fn@sht), and [`Sht`] for an example.
    ///
    /// # Panics
    /// Panics where [`sht`](fn@sht) returns an error.
    #[must_use]
    #[track_caller]
    fn sht<const E: usize>(self, transform: &Sht) -> WithDims<Self, E> {
        run(self, |x| sht::<D, E>(x, transform))
    }

    /// Transforms spherical harmonics to a field; the result has `E = D − 1` dims. See
    /// [`isht`](fn@isht), and [`Sht`] for an example.
    ///
    /// # Panics
    /// Panics where [`isht`](fn@isht) returns an error.
    #[must_use]
    #[track_caller]
    fn isht<const E: usize>(self, transform: &Sht) -> WithDims<Self, E> {
        run(self, |x| isht::<D, E>(x, transform))
    }

    /// Transforms a vector field to vector spherical harmonics; the result has `E = D + 1` dims.
    /// See [`vector_sht`](fn@vector_sht) for an example.
    ///
    /// # Panics
    /// Panics where [`vector_sht`](fn@vector_sht) returns an error.
    #[must_use]
    #[track_caller]
    fn vector_sht<const E: usize>(self, transform: &Sht) -> WithDims<Self, E> {
        run(self, |x| vector_sht::<D, E>(x, transform))
    }

    /// Transforms vector spherical harmonics to a vector field; the result has `E = D − 1` dims.
    /// See [`vector_isht`](fn@vector_isht) for an example.
    ///
    /// # Panics
    /// Panics where [`vector_isht`](fn@vector_isht) returns an error.
    #[must_use]
    #[track_caller]
    fn vector_isht<const E: usize>(self, transform: &Sht) -> WithDims<Self, E> {
        run(self, |x| vector_isht::<D, E>(x, transform))
    }

    /// Convolves with a kernel given by its spherical harmonics; the weight has `E = D + 1` dims.
    /// See [`sphere_conv`](fn@sphere_conv) for an example.
    ///
    /// # Panics
    /// Panics where [`sphere_conv`](fn@sphere_conv) returns an error.
    #[must_use]
    #[track_caller]
    fn sphere_conv<const E: usize>(self, weight: impl Into<Operand<E>>, transform: &Sht) -> Self {
        run(self, |x| sphere_conv(x, weight, transform))
    }

    /// [`sphere_conv`](Self::sphere_conv) from the grid of the first transform to that of the
    /// second. See [`sphere_conv_between`](fn@sphere_conv_between) for an example.
    ///
    /// # Panics
    /// Panics where [`sphere_conv_between`](fn@sphere_conv_between) returns an error.
    #[must_use]
    #[track_caller]
    fn sphere_conv_between<const E: usize>(
        self,
        weight: impl Into<Operand<E>>,
        transforms: [&Sht; 2],
    ) -> Self {
        run(self, |x| sphere_conv_between(x, weight, transforms))
    }

    /// Interpolates a field by its harmonics, from the grid of the first transform to that of the
    /// second; `E = D + 1`. See [`sphere_resample`](fn@sphere_resample) for an example.
    ///
    /// # Panics
    /// Panics where [`sphere_resample`](fn@sphere_resample) returns an error.
    #[must_use]
    #[track_caller]
    fn sphere_resample<const E: usize>(self, transforms: [&Sht; 2]) -> Self {
        run(self, |x| sphere_resample::<D, E>(x, transforms))
    }

    /// Interpolates a field `[.., lat, lon]` to another grid. [`Regrid`] has an example.
    ///
    /// # Panics
    /// Panics where [`regrid`](fn@regrid) returns an error.
    #[must_use]
    #[track_caller]
    fn regrid(self, weights: &Regrid) -> Self {
        run(self, |x| regrid(x, weights))
    }

    /// Power of each degree, `Σ_m |y_lm|²` over all orders, negative ones included: harmonics
    /// `[.., degrees, orders, 2]` → `[.., degrees, 1, 1]`. The result is `Partial(Sum)` where
    /// orders are sharded (resolved in f16 and bf16). With orthonormal harmonics its sum over
    /// degrees is the integral of the squared field, except that an order of half the number of
    /// longitudes counts twice.
    ///
    /// # Panics
    /// Panics for partial values and for fewer than three dims.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::SphereField;
    ///
    /// // Degree 1, orders 0 and 1; the latter counts again as order −1.
    /// let y = Tensor::<3>::from([[[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]]);
    /// let power = y.sphere_power().into_data();
    /// power.assert_eq(&[[[0.0_f32]], [[9.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn sphere_power(self) -> Self {
        let shape = self.dims();
        assert!(
            D >= 3,
            "sphere_power: {shape:?}; expected [.., degrees, orders, 2]"
        );
        let mut twice = vec![2.0; shape[D - 2]];
        twice.iter_mut().take(1).for_each(|factor| *factor = 1.0);
        run(self, |x| {
            in_f32(x, |x| {
                let squares = x.square();
                let weights = profile(&squares, D - 2, &twice)?;
                sum_dims(squares * weights, &[D - 2, D - 1])
            })
        })
    }
}

impl<const D: usize, X: Field<D>> SphereField<D> for X {}
