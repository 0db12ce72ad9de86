//! Counts of the cells that enter an average.

use super::PaddingCount;
use crate::driver::{Padding, Window};

/// Returns the ratio of kernel size to counted cells for every output of a range, or `None` if all
/// ratios of the whole field are one, so that all ranks decide alike.
pub(super) fn factors(
    window: &Window,
    count: PaddingCount,
    size: usize,
    outputs: usize,
    range: std::ops::Range<usize>,
) -> Option<Vec<f64>> {
    let Padding { low, high, .. } = window.padding;
    let padded = -(low as isize)..(size + high) as isize;
    let counts = |cell: &isize| {
        let boundary = window.padding.boundary[usize::from(*cell >= 0)];
        padded.contains(cell)
            && (count == PaddingCount::Included || boundary.source(*cell, size).is_some())
    };
    let counted = |output: usize| {
        let cells = window.input_range(&(output..output + 1));
        cells.filter(counts).count().max(1)
    };
    let factor = |output: usize| window.kernel as f64 / counted(output) as f64;
    if (0..outputs).all(|output| counted(output) == window.kernel) {
        return None;
    }
    let factors = range.map(|output| factor(output.min(outputs - 1)));
    Some(factors.collect())
}
