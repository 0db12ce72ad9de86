//! Maps from outputs to the inputs that they are computed from, in one dim, as data.
//!
//! The maps of all dims determine the extents of the output, the cells that each rank needs, and
//! whether anything must be sent at all. A new map is a new variant here; planning stays the same.

use std::ops::Range;

use halocline_core::plan::Sides;
use halocline_core::{Boundary, Result};

use super::neighborhood::Neighborhood;
use super::window::{Rounding, Window};

/// Map from the outputs of an operator to its inputs, in one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reach {
    /// Windows of one size at equal distances, with padding.
    Window(Window),
    /// Windows that are shifted at the ends of the field to stay inside.
    Neighborhood(Neighborhood),
}

impl From<Window> for Reach {
    fn from(window: Window) -> Self {
        Self::Window(window)
    }
}

impl Reach {
    /// Extents of the output, for an input of these extents.
    ///
    /// # Errors
    /// A window that does not fit.
    pub(crate) fn output_extents(
        &self,
        operator: &str,
        dim: usize,
        extents: &[usize],
    ) -> Result<Vec<usize>> {
        let size = extents.iter().sum();
        match self {
            Self::Window(window) => {
                let outputs = window.output_size(operator, dim, size)?;
                Ok(window.output_extents(extents, outputs))
            }
            Self::Neighborhood(neighborhood) => {
                neighborhood.check(operator, dim, size)?;
                Ok(extents.to_vec())
            }
        }
    }

    /// Range of cells, in a dim of `size`, that a range of outputs is computed from.
    /// [`boundary`](Self::boundary) defines the cells beyond the field.
    pub(crate) fn input_range(&self, outputs: &Range<usize>, size: usize) -> Range<isize> {
        match self {
            Self::Window(window) => window.input_range(outputs),
            Self::Neighborhood(neighborhood) => neighborhood.input_range(outputs, size),
        }
    }

    /// End of the cells that the boundary defines; cells that a window reaches beyond it are fill.
    pub(super) fn padded_end(&self, size: usize) -> isize {
        match self {
            Self::Window(window) => (size + window.padding.high) as isize,
            Self::Neighborhood(_) => isize::MAX,
        }
    }

    /// Boundaries before the first cell and after the last.
    pub(super) fn boundary(&self) -> [Boundary; 2] {
        match self {
            Self::Window(window) => window.padding.boundary,
            Self::Neighborhood(_) => [Boundary::Periodic; 2],
        }
    }

    /// Padding of the field.
    pub(super) fn sides(&self) -> Sides {
        match self {
            Self::Window(window) => window.padding.sides(),
            Self::Neighborhood(_) => Sides::default(),
        }
    }

    /// Number of cells that a rank without outputs assembles, so that its kernel has an input.
    pub(super) fn least(&self) -> usize {
        match self {
            Self::Window(window) => window.span(),
            Self::Neighborhood(_) => 0,
        }
    }

    /// Whether the inputs of all outputs are exactly the cells of the dim, so that a rank that
    /// holds the whole dim needs no exchange.
    pub(super) fn stays_inside(&self) -> bool {
        match self {
            Self::Window(Window {
                padding, rounding, ..
            }) => padding.low == 0 && padding.high == 0 && *rounding == Rounding::Floor,
            Self::Neighborhood(neighborhood) => !neighborhood.periodic,
        }
    }
}
