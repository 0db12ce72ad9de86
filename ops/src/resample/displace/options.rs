//! Options of sampling.

use halocline_core::Boundary;

use crate::resample::rules::{Corners, Mode};

/// What becomes of a displacement beyond its bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Beyond {
    /// It is an error on all ranks, before anything is sent but the largest displacement of each rank.
    #[default]
    Fail,
    /// It becomes the bound, and has no gradient.
    Clamp,
}

/// How values at displaced places are made, in `N` spatial dims.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::resample::{Beyond, Mode, SampleOptions};
///
/// // Winds of up to three rows and five columns a step; poles end, longitude does not.
/// let options = SampleOptions::new([3, 5])
///     .with_mode(Mode::Cubic)
///     .with_boundary([Boundary::Replicate, Boundary::Periodic])
///     .with_beyond(Beyond::Clamp);
/// assert_eq!(options.bound, [3, 5]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleOptions<const N: usize> {
    /// The most cells that a place is away from its own cell, in every dim: the width of halos.
    pub bound: [usize; N],
    /// What becomes of a displacement beyond it.
    pub beyond: Beyond,
    /// How a value between cells is made: nearest, linear or cubic.
    pub mode: Mode,
    /// What lies beyond the field, in every dim.
    pub boundary: [Boundary; N],
    /// Whether cells are areas, `align_corners=False`, or points: for the places of a grid, and where a field is mirrored.
    pub corners: Corners,
}

impl<const N: usize> SampleOptions<N> {
    /// Linear interpolation of areas, with zeros beyond the field; a displacement beyond the bound is an error.
    pub fn new(bound: [usize; N]) -> Self {
        Self {
            bound,
            beyond: Beyond::default(),
            mode: Mode::Linear,
            boundary: [Boundary::Zeros; N],
            corners: Corners::default(),
        }
    }

    /// These options with another treatment of what is beyond the bound.
    #[must_use]
    pub fn with_beyond(self, beyond: Beyond) -> Self {
        Self { beyond, ..self }
    }

    /// These options with another mode.
    #[must_use]
    pub fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// These options with something else beyond the field.
    #[must_use]
    pub fn with_boundary(self, boundary: [Boundary; N]) -> Self {
        Self { boundary, ..self }
    }

    /// These options with other corners.
    #[must_use]
    pub fn with_corners(self, corners: Corners) -> Self {
        Self { corners, ..self }
    }

    /// The cells below and above its own that a value is made of, in one dim.
    pub(super) fn reach(&self, dim: usize) -> [usize; 2] {
        let bound = self.bound[dim];
        match self.mode {
            Mode::Cubic => [bound + 1, bound + 2],
            Mode::Linear => [bound, bound + 1],
            _ => [bound, bound],
        }
    }
}
