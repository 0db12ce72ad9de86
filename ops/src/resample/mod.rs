//! Interpolation to any size, sampling at displaced points, and nearest and bilinear upsampling
//! with dedicated kernels.
//!
//! Semantics follow PyTorch's `interpolate`. For upsampling, cells are areas
//! (`align_corners=False`), and each new cell covers part of one input cell.
//!
//! # Placement
//! All dims may be sharded; values must be resolved for `upsample_bilinear`.
//!
//! # Communication
//! `upsample_nearest` sends nothing, `upsample_bilinear` a halo of one cell. See the modules
//! [`interpolate`](mod@interpolate) and [`displace`](mod@displace) for the other operators.
//!
//! # Adjoint
//! The gradient of a cell is the sum over the new cells it contributes to, with the interpolation
//! weights. The gradient of a halo cell is added to that of its owner.

pub mod displace;
mod double;
pub mod interpolate;
mod kernel;
mod rules;

pub use displace::{OutOfBounds, SampleOptions, displace, grid_sample};
pub use interpolate::interpolate;
pub use rules::{Antialias, Corners, Interpolation, Mode};

use burn::tensor::Tensor;
use halocline_core::{Boundary, Error, Halo, Layout, Result, ShardTensor};

use crate::driver::empty::{drop_empty, fill_all, fill_empty, fill_up_to, without_fill};
use crate::field::{Field, run};
use crate::golden::Golden;
use crate::kernel::flex;
use crate::kernel::local::LocalOperator;

/// Registry entries of interpolation and sampling.
pub(crate) const OPERATORS: &[Golden] = {
    let [one, two, three] = interpolate::GOLDEN;
    &[one, two, three, displace::GOLDEN]
};

/// Repeats every cell of the spatial dims `factor` times: nearest-neighbour upsampling.
///
/// # Adjoint
/// Sums over the copies of each cell.
///
/// # Errors
/// A factor of zero, or one that makes a dim too large.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::resample::upsample_nearest;
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 2.0]]]));
/// let y = upsample_nearest(x, 2)?.into_local();
/// y.into_data().assert_eq(&[[[1.0_f32, 1.0, 2.0, 2.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn upsample_nearest<const D: usize>(
    x: ShardTensor<D>,
    factor: usize,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "upsample_nearest";
    let mut sizes = x.dims().into_iter().skip(2);
    let most = isize::MAX as usize;
    let beyond = |size: usize| size.checked_mul(factor).is_none_or(|cells| cells > most);
    if factor == 0 || sizes.any(beyond) {
        let message = format!(
            "a factor of {factor} for {:?}; expected at least one, and at most {} cells in a dim",
            x.dims(),
            most
        );
        return Err(Error::operator(NAME, message));
    }
    let (local, from, mesh) = x.into_parts();
    let layout = enlarged(&from, factor);
    let mut local = fill_all(local, &from, NAME, 0.0)?;
    let mut repeated = 2..D;
    if factor == 2 && D >= 4 {
        local = double::Nearest.run(local);
        repeated.end -= 2;
    }
    for dim in repeated {
        local = repeat_cells(local, dim, factor);
    }
    without_fill(local, layout, mesh, NAME)
}

/// Layout with `factor` times as many cells in each spatial dim.
fn enlarged(layout: &Layout, factor: usize) -> Layout {
    let mut extents = layout.all_extents().to_vec();
    for extent in extents.iter_mut().skip(2).flatten() {
        *extent *= factor;
    }
    layout.derive(layout.placements().to_vec(), extents)
}

/// Repeats the cells along one dim.
fn repeat_cells<const D: usize>(x: Tensor<D>, dim: usize, factor: usize) -> Tensor<D> {
    let mut shape = x.dims();
    let outer: usize = shape[..dim].iter().product();
    let inner: usize = shape[dim + 1..].iter().product();
    let copies =
        x.reshape([outer * shape[dim], 1, inner])
            .expand([outer * shape[dim], factor, inner]);
    shape[dim] *= factor;
    copies.reshape(shape)
}

/// Doubles the resolution of rows and columns, `[batch, channels, rows, columns]`, by bilinear
/// interpolation.
///
/// `boundary` defines the cells beyond the ends of dims 2 and 3: `Replicate` as in PyTorch,
/// `Periodic` for longitude.
///
/// # Errors
/// Another number of dims; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Boundary, ShardTensor};
/// use halocline_ops::resample::upsample_bilinear;
///
/// let x = ShardTensor::solo(Tensor::<4>::from([[[[0.0, 2.0]]]]));
/// let y = upsample_bilinear(x, [Boundary::Replicate; 2])?.into_local();
/// y.into_data().assert_eq(&[[[[0.0_f32, 0.5, 1.5, 2.0]; 2]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn upsample_bilinear<const D: usize>(
    x: ShardTensor<D>,
    boundary: [Boundary; 2],
) -> Result<ShardTensor<D>> {
    const NAME: &str = "upsample_bilinear";
    if D != 4 {
        let message = format!("{:?}; expected [batch, channels, rows, columns]", x.dims());
        return Err(Error::operator(NAME, message));
    }
    let halos = [Halo::new(2, 1, boundary[0]), Halo::new(3, 1, boundary[1])];
    let haloed = x.with_halo_for(NAME, &halos)?;
    let (_, from, mesh) = x.into_parts();
    let layout = enlarged(&from, 2);
    let local = if flex::runs_on(&haloed.device()) {
        double::Bilinear.run(haloed)
    } else {
        let filled = fill_empty(haloed, &from, &[0, 1], NAME, 0.0)?;
        let filled = fill_up_to(3, filled, &from, &[2, 3], NAME, 0.0)?;
        let doubled = double::Bilinear.run(filled);
        drop_empty(doubled, &layout, mesh.position(), NAME)?
    };
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Resampling as methods.
pub trait ResampleField<const D: usize>: Field<D> {
    /// Interpolates the spatial dims to these sizes. See [`interpolate`](fn@interpolate).
    ///
    /// # Panics
    /// Panics where [`interpolate`](fn@interpolate) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ResampleField;
    /// use halocline_ops::resample::{Corners, Interpolation, Mode};
    ///
    /// let linear = Interpolation::new(Mode::Linear).with_corners(Corners::Centers);
    /// let y = Tensor::<3>::from([[[0.0, 2.0]]]).interpolate([3], linear);
    /// y.into_data().assert_eq(&[[[0.0_f32, 1.0, 2.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn interpolate<const N: usize>(
        self,
        output_size: [usize; N],
        interpolation: Interpolation<N>,
    ) -> Self {
        run(self, |x| interpolate(x, output_size, interpolation))
    }

    /// Samples the field at displaced points: a step of semi-Lagrangian advection. See
    /// [`displace`](fn@displace).
    ///
    /// # Panics
    /// Panics where [`displace`](fn@displace) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ResampleField;
    /// use halocline_ops::resample::SampleOptions;
    ///
    /// let x = Tensor::<3>::from([[[1.0, 2.0, 4.0]]]);
    /// let y = x.displace(Tensor::<3>::from([[[0.5, 0.5, -2.0]]]), &SampleOptions::new([2]));
    /// y.into_data().assert_eq(&[[[1.5_f32, 3.0, 1.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn displace<const N: usize>(self, displacement: Self, options: &SampleOptions<N>) -> Self {
        let displacement = displacement.into_shard();
        run(self, |x| displace(x, displacement, options))
    }

    /// Samples the field at points near each cell. See [`grid_sample`].
    ///
    /// # Panics
    /// Panics where [`grid_sample`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ResampleField;
    /// use halocline_ops::resample::SampleOptions;
    ///
    /// let x = Tensor::<3>::from([[[2.0, 4.0]]]);
    /// let y = x.grid_sample(Tensor::<3>::from([[[-0.5], [0.0]]]), &SampleOptions::new([1]));
    /// y.into_data().assert_eq(&[[[2.0_f32, 3.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn grid_sample<const N: usize>(self, grid: Self, options: &SampleOptions<N>) -> Self {
        let grid = grid.into_shard();
        run(self, |x| grid_sample(x, grid, options))
    }

    /// Repeats every cell of the spatial dims `factor` times: nearest-neighbour upsampling.
    ///
    /// # Panics
    /// Panics where [`upsample_nearest`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ResampleField;
    ///
    /// let y = Tensor::<3>::from([[[1.0, 2.0]]]).upsample_nearest(3);
    /// y.into_data().assert_eq(&[[[1.0_f32, 1.0, 1.0, 2.0, 2.0, 2.0]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn upsample_nearest(self, factor: usize) -> Self {
        run(self, |x| upsample_nearest(x, factor))
    }

    /// Doubles the resolution of rows and columns, `[batch, channels, rows, columns]`, by bilinear
    /// interpolation. See [`upsample_bilinear`].
    ///
    /// # Panics
    /// Panics where [`upsample_bilinear`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::Boundary;
    /// use halocline_ops::ResampleField;
    ///
    /// let x = Tensor::<4>::from([[[[0.0, 2.0]]]]);
    /// let y = x.upsample_bilinear([Boundary::Replicate, Boundary::Periodic]);
    /// y.into_data().assert_eq(&[[[[0.5_f32, 0.5, 1.5, 1.5]; 2]]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn upsample_bilinear(self, boundary: [Boundary; 2]) -> Self {
        run(self, |x| upsample_bilinear(x, boundary))
    }
}

impl<const D: usize, X: Field<D>> ResampleField<D> for X {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Bilinear([Boundary; 2]);

    impl Operator<4, 4> for Bilinear {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 4> {
            inputs.remove(0).upsample_bilinear(self.0)
        }
    }

    #[test]
    fn bilinear_interpolation_crosses_shards_and_the_date_line() {
        for columns in [Boundary::Replicate, Boundary::Periodic] {
            let operator = Bilinear([Boundary::Replicate, columns]);
            check_op(&operator, &[[2, 2, 5, 7]], &[], &[0, 2, 3], 1e-5);
        }
    }

    #[test]
    fn a_linear_field_stays_linear() {
        let x = Tensor::<1>::from_floats([0.0, 2.0, 4.0], &Default::default());
        let x = x.reshape([1, 1, 1, 3]).expand([1, 1, 2, 3]);
        let y = x.upsample_bilinear([Boundary::Replicate; 2]);
        let row = [0.0, 0.5, 1.5, 2.5, 3.5, 4.0];
        let expected = [[[row; 4]]];
        y.into_data().assert_eq(&expected.into(), false);
    }

    #[test]
    fn factors_of_zero_and_too_large_are_refused() {
        for factor in [0, usize::MAX] {
            let x = ShardTensor::solo(Tensor::<3>::ones([1, 1, 3], &Default::default()));
            let error = upsample_nearest(x, factor).unwrap_err().to_string();
            assert!(error.contains("for [1, 1, 3]; expected"), "{error}");
        }
    }

    struct Nearest(usize);

    impl<const D: usize> Operator<D, D> for Nearest {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<D>>) -> X {
            inputs.remove(0).upsample_nearest(self.0)
        }
    }

    #[test]
    fn cells_are_repeated_in_all_spatial_dims() {
        check_op(&Nearest(2), &[[2, 2, 5]], &[], &[0, 2], 1e-6);
        check_op(&Nearest(2), &[[1, 2, 5, 3]], &[], &[2, 3], 1e-6);
        check_op(&Nearest(3), &[[1, 2, 5, 3]], &[], &[2, 3], 1e-6);
        check_op(&Nearest(2), &[[1, 2, 3, 2, 5]], &[], &[2, 4], 1e-6);
    }
}
