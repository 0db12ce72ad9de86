//! Window of a stencil operator in one dim: the map from outputs to inputs, and the owners of
//! outputs.

use std::ops::Range;

use halocline_core::plan::Sides;
use halocline_core::{Boundary, Error, Result};

use super::place::extents_by;

/// Padding of one dim: the number of cells on each side, and their values.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::Padding;
///
/// let padding = Padding::zeros(1, 2).with_boundary(Boundary::Reflect);
/// assert_eq!((padding.low, padding.high), (1, 2));
/// assert_eq!(padding.boundary, [Boundary::Reflect; 2]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Padding {
    /// Cells before the first.
    pub low: usize,
    /// Cells after the last.
    pub high: usize,
    /// Values of these cells, before and after.
    pub boundary: [Boundary; 2],
}

impl Padding {
    /// Equal padding on both sides.
    pub fn new(width: usize, boundary: Boundary) -> Self {
        Self::zeros(width, width).with_boundary(boundary)
    }

    /// Zeros on both sides.
    pub fn zeros(low: usize, high: usize) -> Self {
        Self {
            low,
            high,
            boundary: [Boundary::Zeros; 2],
        }
    }

    /// Sets the values of the padding.
    #[must_use]
    pub fn with_boundary(self, boundary: Boundary) -> Self {
        Self {
            boundary: [boundary; 2],
            ..self
        }
    }

    /// Widths and values of both sides.
    pub(crate) fn sides(&self) -> Sides {
        ([self.low, self.high], self.boundary)
    }
}

/// Treatment of a last window that does not fit; [`Window`] has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Leaves the window out.
    #[default]
    Floor,
    /// Keeps the window if it begins in the field or its low padding.
    Ceil,
}

/// Window of an operator in one dim.
///
/// # Example
/// ```
/// use halocline_core::Boundary;
/// use halocline_ops::{Padding, Rounding, Window};
///
/// let window = Window::new(3).with_padding(Padding::new(1, Boundary::Periodic));
/// assert_eq!(window.output_size("blur", 2, 10)?, 10);
/// assert_eq!(window.input_range(&(4..6)), 3..7);
/// let halves = Window { stride: 2, rounding: Rounding::Ceil, ..Window::new(2) };
/// assert_eq!(halves.output_size("halve", 2, 5)?, 3); // the last of one cell
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Number of cells in the window.
    pub kernel: usize,
    /// Distance from one window to the next, in cells.
    pub stride: usize,
    /// Distance from one cell of a window to the next, in cells.
    pub dilation: usize,
    /// Padding.
    pub padding: Padding,
    /// Treatment of a last window that does not fit.
    pub rounding: Rounding,
}

impl Window {
    /// Windows of `kernel` adjacent cells with a stride of one, without padding.
    pub fn new(kernel: usize) -> Self {
        Self {
            kernel,
            stride: 1,
            dilation: 1,
            padding: Padding::default(),
            rounding: Rounding::Floor,
        }
    }

    /// Sets the padding.
    #[must_use]
    pub fn with_padding(self, padding: Padding) -> Self {
        Self { padding, ..self }
    }

    /// Number of cells from the window's first to its last, both included.
    pub fn span(&self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }

    /// Global output size for an input of `size` cells. This arithmetic exists only here.
    ///
    /// # Errors
    /// A kernel, stride or dilation of zero, a window that fits nowhere, a dim without cells, or
    /// padding wider than its boundary can fill.
    pub fn output_size(&self, operator: &str, dim: usize, size: usize) -> Result<usize> {
        let fail = |what: String| Err(Error::operator(operator, format!("dim {dim}: {what}")));
        if self.kernel == 0 || self.stride == 0 || self.dilation == 0 {
            return fail(format!(
                "kernel, stride and dilation must not be zero, got {self:?}"
            ));
        }
        let Padding {
            low,
            high,
            boundary,
        } = self.padding;
        if size == 0 {
            return fail("no cells; a window needs a field with at least one".into());
        }
        // Sizes near the largest integer would wrap around.
        let count = |number: usize| number as u128;
        let all = (count(self.kernel) - 1) * count(self.dilation) + 1;
        let most = all.max(count(size) + count(low) + count(high) + count(self.stride));
        if most > isize::MAX as u128 {
            return fail(format!(
                "{self:?} over {size} cells, more than {} cells",
                isize::MAX
            ));
        }
        let padded = size + low + high;
        // The last window may begin inside and end beyond the field.
        let over = match self.rounding {
            Rounding::Floor => 0,
            Rounding::Ceil => self.stride - 1,
        };
        if padded + over < self.span() {
            return fail(format!(
                "a window of {} cells does not fit into {size} cells with padding {low} and {high}",
                self.span()
            ));
        }
        for (width, boundary) in [(low, boundary[0]), (high, boundary[1])] {
            if width > 0 && boundary == Boundary::Reflect && width >= size {
                return fail(format!(
                    "reflecting {width} cells needs more than {width} cells, got {size}"
                ));
            }
        }
        let outputs = (padded + over - self.span()) / self.stride + 1;
        Ok(match self.rounding {
            Rounding::Floor => outputs,
            Rounding::Ceil => {
                let begins_inside = (outputs - 1) * self.stride < size + low;
                outputs - usize::from(!begins_inside)
            }
        })
    }

    /// Distance from the first cell of an output's window to the first that comes from a field of
    /// `size` cells rather than from zero padding; `None` if there is no such cell.
    pub(crate) fn first_cell(&self, output: usize, size: usize) -> Option<usize> {
        let window = self.input_range(&(output..output + 1));
        let boundary = |cell: isize| self.padding.boundary[usize::from(cell >= 0)];
        let mut taps = window.step_by(self.dilation);
        let tap = taps.position(|cell| boundary(cell).source(cell, size).is_some());
        tap.map(|tap| tap * self.dilation)
    }

    /// Range of input cells, padding included, that a range of outputs is computed from.
    pub fn input_range(&self, outputs: &Range<usize>) -> Range<isize> {
        let first = |output: usize| (output * self.stride) as isize - self.padding.low as isize;
        if outputs.is_empty() {
            return 0..0;
        }
        first(outputs.start)..first(outputs.end - 1) + self.span() as isize
    }

    /// Extents of the output: a window belongs to the part that holds its middle cell.
    pub(crate) fn output_extents(&self, extents: &[usize], outputs: usize) -> Vec<usize> {
        let size: usize = extents.iter().sum();
        let middle = (self.span() - 1) / 2;
        // First output whose middle lies at or after a cell.
        extents_by(extents, |cell| match cell {
            0 => 0,
            cell if cell == size => outputs,
            cell => {
                let reach = (cell + self.padding.low).saturating_sub(middle);
                reach.div_ceil(self.stride).min(outputs)
            }
        })
    }
}

/// Range of the windows that lie in a range of cells, of `count` windows of `span` cells, `stride`
/// apart, the first of which begins at cell zero.
pub(crate) fn windows_within(
    cells: &Range<usize>,
    stride: usize,
    span: usize,
    count: usize,
) -> Range<usize> {
    let first = cells.start.div_ceil(stride);
    let end = (cells.end + stride).saturating_sub(span) / stride;
    first..end.min(count).max(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn window() -> impl Strategy<Value = Window> {
        let sizes = (
            1..6_usize,
            1..5_usize,
            1..4_usize,
            0..6_usize,
            0..6_usize,
            any::<bool>(),
        );
        sizes.prop_map(|(kernel, stride, dilation, low, high, ceil)| Window {
            kernel,
            stride,
            dilation,
            padding: Padding::zeros(low, high),
            rounding: if ceil {
                Rounding::Ceil
            } else {
                Rounding::Floor
            },
        })
    }

    proptest! {
        #[test]
        fn output_extents_sum_to_the_output(window in window(), extents in prop::collection::vec(0..9_usize, 1..6)) {
            let size: usize = extents.iter().sum();
            if let Ok(outputs) = window.output_size("test", 2, size) {
                let parts = window.output_extents(&extents, outputs);
                prop_assert_eq!(parts.iter().sum::<usize>(), outputs, "{:?}", parts);
                let low = (window.span() - 1) / 2;
                if window.stride == 1 && window.padding == Padding::zeros(low, window.span() - 1 - low) {
                    prop_assert_eq!(parts, extents);
                }
            }
        }

        #[test]
        fn floor_windows_stay_within_the_padded_field(window in window(), size in 1..40_usize) {
            let window = Window { rounding: Rounding::Floor, ..window };
            if let Ok(outputs) = window.output_size("test", 2, size) {
                let reach = window.input_range(&(0..outputs));
                prop_assert_eq!(reach.start, -(window.padding.low as isize));
                prop_assert!(reach.end <= (size + window.padding.high) as isize);
                prop_assert!(reach.end + window.stride as isize > (size + window.padding.high) as isize);
            }
        }
    }

    #[test]
    fn a_window_that_fits_nowhere_is_an_error_with_its_numbers() {
        let window = Window {
            kernel: 5,
            stride: 1,
            dilation: 2,
            padding: Padding::zeros(1, 1),
            rounding: Rounding::Floor,
        };
        let error = window.output_size("conv2d", 3, 4).unwrap_err().to_string();
        assert_eq!(
            error,
            "conv2d: dim 3: a window of 9 cells does not fit into 4 cells with padding 1 and 1"
        );
    }
}
