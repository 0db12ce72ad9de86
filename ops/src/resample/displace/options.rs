//! Options for sampling.

use halocline_core::Boundary;

use crate::resample::rules::{Corners, Mode};

/// Treatment of a displacement beyond the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutOfBounds {
    /// Reports an error on all ranks, before anything but the largest displacement of each rank is
    /// sent.
    #[default]
    Fail,
    /// Clamps it to the bound; its gradient is zero.
    Clamp,
}

/// Options for sampling at displaced points in `N` spatial dims.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::resample::{OutOfBounds, Mode, SampleOptions};
///
/// // Winds of up to three rows and five columns a step; longitude is periodic.
/// let options = SampleOptions::new([3, 5])
///     .with_mode(Mode::Cubic)
///     .with_boundary([Boundary::Replicate, Boundary::Periodic])
///     .with_out_of_bounds(OutOfBounds::Clamp);
/// assert_eq!(options.bound, [3, 5]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleOptions<const N: usize> {
    /// Largest displacement in cells, per dim; sets the halo width.
    pub bound: [usize; N],
    /// Treatment of displacements beyond `bound`.
    pub beyond: OutOfBounds,
    /// Kernel that interpolates between cells: nearest, linear or cubic.
    pub mode: Mode,
    /// Values beyond the field, per dim.
    pub boundary: [Boundary; N],
    /// Whether cells are areas (`align_corners=False`) or points. Applies to the coordinates of a
    /// grid and to where a field is mirrored.
    pub corners: Corners,
}

impl<const N: usize> SampleOptions<N> {
    /// Creates options for linear interpolation of areas, with zeros beyond the field; a
    /// displacement beyond the bound is an error.
    pub fn new(bound: [usize; N]) -> Self {
        Self {
            bound,
            beyond: OutOfBounds::default(),
            mode: Mode::Linear,
            boundary: [Boundary::Zeros; N],
            corners: Corners::default(),
        }
    }

    /// Sets the treatment of displacements beyond the bound.
    #[must_use]
    pub fn with_out_of_bounds(self, beyond: OutOfBounds) -> Self {
        Self { beyond, ..self }
    }

    /// Sets the interpolation mode.
    #[must_use]
    pub fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Sets the values beyond the field.
    #[must_use]
    pub fn with_boundary(self, boundary: [Boundary; N]) -> Self {
        Self { boundary, ..self }
    }

    /// Sets whether cells are areas or points.
    #[must_use]
    pub fn with_corners(self, corners: Corners) -> Self {
        Self { corners, ..self }
    }

    /// Numbers of cells below and above its own cell that a value may depend on, in one dim.
    pub(super) fn reach(&self, dim: usize) -> [usize; 2] {
        let bound = self.bound[dim];
        match self.mode {
            Mode::Cubic => [bound.saturating_add(1), bound.saturating_add(2)],
            Mode::Linear => [bound, bound.saturating_add(1)],
            _ => [bound, bound],
        }
    }
}
