//! Lines of cells along a dim of `[outer, cells, inner]`, divided among tasks by columns.

use std::ops::Range;

use halocline_core::tasks;
use pulp::Simd;

use super::buffer::Buffer;
use super::lanes::{CHUNK, WIDEST, load, store};
use super::memory::Shared;
use super::simd::Element;

/// Lines along one dim of a tensor: `outer · inner` of them, whose cells lie `inner` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    pub(crate) outer: usize,
    pub(crate) cells: usize,
    pub(crate) inner: usize,
}

/// Range of columns of one `[cells, inner]` slice.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    pub(crate) outer: usize,
    pub(crate) columns: Range<usize>,
}

impl Lines {
    /// Lines along a range of dims, taken as one.
    pub(crate) fn along(shape: &[usize], dims: Range<usize>) -> Self {
        Self {
            outer: shape[..dims.start].iter().product(),
            cells: shape[dims.clone()].iter().product(),
            inner: shape[dims.end..].iter().product(),
        }
    }

    /// Number of lines.
    pub(crate) fn count(self) -> usize {
        self.outer * self.inner
    }

    /// Number of elements.
    pub(crate) fn len(self) -> usize {
        self.count() * self.cells
    }

    /// Range of elements of one cell, in all lines of an outer index.
    pub(crate) fn row(self, outer: usize, cell: usize) -> Range<usize> {
        let start = (outer * self.cells + cell) * self.inner;
        start..start + self.inner
    }

    /// Range of elements of one cell, in the lines of these columns.
    pub(crate) fn part(self, place: &Columns, cell: usize) -> Range<usize> {
        let start = (place.outer * self.cells + cell) * self.inner;
        start + place.columns.start..start + place.columns.end
    }

    /// Range of these columns in a tensor with one element per line.
    pub(crate) fn of_columns(self, place: &Columns) -> Range<usize> {
        let start = place.outer * self.inner;
        start + place.columns.start..start + place.columns.end
    }

    /// Elements of a line, in the order of its cells.
    pub(crate) fn of_line(self, line: usize) -> impl Iterator<Item = usize> {
        let (outer, column) = (line / self.inner, line % self.inner);
        (0..self.cells).map(move |cell| (outer * self.cells + cell) * self.inner + column)
    }

    /// Runs a task for each range of columns; the ranges follow from the shape alone.
    pub(crate) fn for_each(self, run: impl Fn(Columns) + Sync) {
        if self.count() == 0 {
            return;
        }
        let vector = 4 * WIDEST;
        let width = (CHUNK / self.cells.max(1)).max(1).div_ceil(vector) * vector;
        let pieces = self.inner.div_ceil(width);
        let together = (CHUNK / (self.cells * width.min(self.inner)).max(1)).max(1);
        tasks::for_each(self.outer * pieces, together, |task| {
            let start = task % pieces * width;
            run(Columns {
                outer: task / pieces,
                columns: start..self.inner.min(start + width),
            });
        });
    }

    /// Creates a buffer of `len` elements, filled by tasks that each write the elements of their
    /// columns.
    ///
    /// # Safety
    /// `run` must write all elements of the lines of its columns and no others; over all columns
    /// these must be `len` elements.
    pub(crate) unsafe fn filled<E: Element>(
        self,
        len: usize,
        run: impl Fn(Columns, Shared<E>) + Sync,
    ) -> Buffer<E> {
        // SAFETY: the tasks cover all columns.
        unsafe {
            Buffer::filled(len, |elements| {
                self.for_each(|columns| run(columns, elements))
            })
        }
    }
}

/// Splits columns into ranges of at most one vector.
#[inline(always)]
pub(crate) fn vectors<S: Simd, E: Element>(columns: usize) -> impl Iterator<Item = Range<usize>> {
    let lanes = E::lanes::<S>();
    (0..columns)
        .step_by(lanes)
        .map(move |start| start..columns.min(start + lanes))
}

/// Applies a function to each lane of a vector.
#[inline(always)]
pub(crate) fn by_lane<S: Simd, E: Element>(
    simd: S,
    vector: E::Vector<S>,
    f: impl Fn(E) -> E,
) -> E::Vector<S> {
    let mut lanes = [E::default(); WIDEST];
    let lanes = &mut lanes[..E::lanes::<S>()];
    store(simd, lanes, vector);
    // Not `for_each`, which may not be inlined and would lack the instructions of `S`.
    for lane in &mut *lanes {
        *lane = f(*lane);
    }
    load(simd, lanes)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn tasks_have_every_line_once() {
        for (outer, cells, inner) in [
            (3, 2 * CHUNK, 1),
            (2, CHUNK + 1, 70),
            (4, 5, 300),
            (1, 0, 9),
        ] {
            let lines = Lines {
                outer,
                cells,
                inner,
            };
            let visits: Vec<_> = (0..lines.count()).map(|_| AtomicUsize::new(0)).collect();
            lines.for_each(|place| {
                for line in &visits[lines.of_columns(&place)] {
                    line.fetch_add(1, Ordering::Relaxed);
                }
            });
            let once = visits.iter().all(|line| line.load(Ordering::Relaxed) == 1);
            assert!(once, "{outer} × {cells} × {inner}");
        }
    }
}
