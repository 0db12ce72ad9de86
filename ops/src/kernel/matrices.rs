//! Matrix products.

use std::ops::Range;

use gemm::Parallelism;

use super::memory::prefetch_run;
use super::simd::Element;

/// Strided matrix in memory, with the strides from row to row and from column to column.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    elements: &'a [E],
    size: [usize; 2],
    strides: [usize; 2],
}

impl<'a, E: Copy> Matrix<'a, E> {
    /// Creates a matrix of contiguous rows.
    pub(crate) fn new(elements: &'a [E], size: [usize; 2]) -> Self {
        Self::strided(elements, size, [size[1], 1])
    }

    /// Creates a matrix with these strides.
    ///
    /// # Panics
    /// Panics if an element would lie outside `elements`.
    pub(crate) fn strided(elements: &'a [E], size: [usize; 2], strides: [usize; 2]) -> Self {
        let last: usize = (0..2)
            .map(|dim| size[dim].max(1) * strides[dim] - strides[dim])
            .sum();
        assert!(
            size.contains(&0) || last < elements.len(),
            "{size:?} with strides {strides:?} of {} elements",
            elements.len()
        );
        Self {
            elements,
            size,
            strides,
        }
    }

    pub(crate) fn strides(self) -> [usize; 2] {
        self.strides
    }

    /// Address of the first element.
    pub(crate) fn first(self) -> *const E {
        self.elements.as_ptr()
    }

    /// Reads the element at an offset from the first.
    ///
    /// # Safety
    /// The offset must lie within the elements.
    #[inline(always)]
    pub(crate) unsafe fn at(self, offset: usize) -> E {
        debug_assert!(offset < self.elements.len());
        // SAFETY: guaranteed by the caller.
        unsafe { *self.elements.get_unchecked(offset) }
    }

    pub(crate) fn size(self) -> [usize; 2] {
        self.size
    }

    /// Range of the rows.
    pub(crate) fn rows(self, range: Range<usize>) -> Self {
        let first = (range.start * self.strides[0]).min(self.elements.len());
        let size = [range.len(), self.size[1]];
        Self::strided(&self.elements[first..], size, self.strides)
    }

    /// Prefetches a range of columns of contiguous rows.
    #[inline(always)]
    pub(crate) fn prefetch(self, columns: Range<usize>) {
        for row in 0..self.size[0] {
            let first = row * self.strides[0] + columns.start;
            prefetch_run(self.elements.as_ptr().wrapping_add(first), columns.len());
        }
    }

    pub(crate) fn transposed(mut self) -> Self {
        self.size.reverse();
        self.strides.reverse();
        self
    }
}

/// Writes `a · b` to rows that start at `y` and lie `y_row` elements apart, on this thread.
///
/// # Safety
/// The rows must lie in one allocation that nothing else accesses meanwhile.
pub(crate) unsafe fn multiply<E: Element>(
    (y, y_row): (*mut E, usize),
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
) {
    let ([rows, summed], [_, columns]) = (a.size, b.size);
    assert_eq!(b.size[0], summed);
    let [a_row, a_column] = a.strides.map(|stride| stride as isize);
    let [b_row, b_column] = b.strides.map(|stride| stride as isize);
    let one = E::from_f64(1.0);
    // SAFETY: operands lie in their slices, as asserted on construction; the result is guaranteed
    // by the caller.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            summed,
            y,
            1,
            y_row as isize,
            false,
            a.elements.as_ptr(),
            a_column,
            a_row,
            b.elements.as_ptr(),
            b_column,
            b_row,
            one,
            one,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
