//! Sums of products with a panel, by the matrix instructions of AMX.

use std::ops::Range;

use pulp::Simd;

use super::sums::Sums;
use crate::kernel::amx::{self, Factor, Place, SIDE};
use crate::kernel::interleave::deinterleave;
use crate::kernel::matrices::Matrix;
use crate::kernel::memory::prefetch_to_write;
use crate::kernel::products::{MOST_PARTS, Products, store_parts};
use crate::kernel::simd::Element;
use crate::kernel::transpose::transpose;

/// Number of columns of a panel: two matrices.
pub(super) const COLUMNS: usize = 2 * SIDE;
/// Number of pairs of a matrix of factors.
const MATRIX: usize = SIDE * SIDE;

/// Number of matrices needed for `numbers` numbers of a row.
pub(crate) fn terms(numbers: usize) -> usize {
    numbers.div_ceil(2 * SIDE)
}

/// Number of factors for `numbers` numbers, padded to whole matrices: one matrix for each part.
pub(crate) fn factors(numbers: usize, parts: usize) -> usize {
    terms(numbers) * SIDE * parts
}

/// Maximum number of elements for the packed factors of `rows` rows of `numbers` numbers.
pub(crate) fn room(rows: usize, numbers: usize, parts: usize) -> usize {
    rows.next_multiple_of(SIDE) * factors(numbers, parts)
}

/// Loads a vector of numbers `step` elements apart, with zeros beyond the first `there`.
///
/// # Safety
/// They must be elements of the matrix.
#[inline(always)]
unsafe fn load<S: Simd, E: Element, P: Products<E>>(
    from: *const P::Number,
    step: usize,
    there: usize,
) -> E::Vector<S> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if step == 1 && there >= SIDE {
            return P::load::<S>(from);
        }
        let mut numbers = [P::Number::default(); SIDE];
        for (place, number) in numbers.iter_mut().enumerate().take(there) {
            *number = *from.add(place * step);
        }
        P::load::<S>(numbers.as_ptr())
    }
}

/// Factors of rows: the first one, and the strides to the next row, to the next [`SIDE`] rows, and
/// to the next matrix of the same rows.
#[derive(Clone, Copy)]
pub(crate) struct Rows<E> {
    first: *const E,
    row: usize,
    block: usize,
    term: usize,
}

impl<E: Element> Rows<E> {
    /// Factors of the rows of a matrix, packed to scratch if they cannot be read in place.
    ///
    /// # Safety
    /// `scratch` must have [`room`] for all factors.
    #[inline(always)]
    pub(crate) unsafe fn new<S: Simd, P: Products<E>>(
        simd: S,
        a: Matrix<'_, P::Number>,
        scratch: *mut E,
    ) -> Self {
        let ([rows, summed], [row, column]) = (a.size(), a.strides());
        // Factors of bf16 numbers are pairs of neighbours.
        if column == 1
            && P::NUMBERS == 2
            && summed.is_multiple_of(2 * SIDE)
            && row.is_multiple_of(2)
        {
            return Self {
                first: a.first().cast(),
                row: row / 2,
                block: SIDE * row / 2,
                term: SIDE,
            };
        }
        let block = SIDE * factors(summed, P::PARTS);
        // In memory order: if columns are contiguous, all rows of a few numbers at a time.
        let (blocks, terms) = (rows.div_ceil(SIDE), terms(summed));
        for index in 0..blocks * terms {
            let (number, term) = match column {
                1 => (index / terms, index % terms),
                _ => (index % blocks, index / blocks),
            };
            let (first, summed) = (number * SIDE, summed - term * 2 * SIDE);
            let size = [(rows - first).min(SIDE), summed.min(2 * SIDE)];
            // SAFETY: elements of the matrix, and room guaranteed by the caller.
            unsafe {
                let from = a.first().add(first * row + term * 2 * SIDE * column);
                let to = scratch.add(number * block + term * P::PARTS * MATRIX);
                match column {
                    1 => pack_rows::<S, E, P>(simd, (from, row), size, to),
                    _ => pack_columns::<S, E, P>(simd, (from, [row, column]), size, to),
                }
            }
        }
        Self::packed::<P>(scratch, summed)
    }

    /// Packed factors of `summed` numbers of each row, in consecutive matrices.
    pub(crate) fn packed<P: Products<E>>(first: *mut E, summed: usize) -> Self {
        Self {
            first,
            row: SIDE,
            block: SIDE * factors(summed, P::PARTS),
            term: P::PARTS * MATRIX,
        }
    }

    /// Writes the factors of a row in one matrix, from two vectors of neighbouring numbers.
    ///
    /// # Safety
    /// The rows must be [`packed`](Self::packed), with room for them.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd, P: Products<E>>(
        self,
        simd: S,
        [row, term]: [usize; 2],
        numbers: [E::Vector<S>; 2],
    ) {
        let place = row / SIDE * self.block + term * self.term + row % SIDE * SIDE;
        let to = self.first.cast_mut().wrapping_add(place);
        // SAFETY: guaranteed by the caller.
        unsafe { store_parts::<S, E, P>(simd, deinterleave::<S, E>(numbers), to, MATRIX) };
    }

    /// Factors from a block of [`SIDE`] rows on, in the layout of matrix instructions.
    #[inline(always)]
    pub(crate) fn factor(self, block: usize) -> Factor<impl Fn(usize, usize) -> *const u8> {
        let first = self.first.wrapping_add(block * self.block);
        Factor {
            at: move |term, m| {
                let place = m * self.block + term * self.term;
                first.wrapping_add(place).cast::<u8>()
            },
            row: size_of::<E>() * self.row,
            part: size_of::<E>() * MATRIX,
        }
    }
}

/// Writes the parts of a matrix of factors, from `rows` rows of `numbers` contiguous numbers.
///
/// # Safety
/// These rows must be readable, and `to` must have room for all parts.
#[inline(always)]
unsafe fn pack_rows<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    (from, row): (*const P::Number, usize),
    [rows, numbers]: [usize; 2],
    to: *mut E,
) {
    for place in 0..rows {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (from, to) = (from.add(place * row), to.add(place * SIDE));
            if P::NUMBERS == 2 && numbers == 2 * SIDE {
                E::store::<S>(to, E::load::<S>(from.cast()));
                continue;
            }
            let vectors = [
                load::<S, E, P>(from, 1, numbers),
                load::<S, E, P>(from.wrapping_add(SIDE), 1, numbers.saturating_sub(SIDE)),
            ];
            store_parts::<S, E, P>(simd, deinterleave::<S, E>(vectors), to, MATRIX);
        }
    }
}

/// [`pack_rows`] for numbers that are contiguous along columns.
///
/// # Safety
/// As for [`pack_rows`].
#[inline(always)]
unsafe fn pack_columns<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    (from, [row, column]): (*const P::Number, [usize; 2]),
    [rows, numbers]: [usize; 2],
    to: *mut E,
) {
    let mut joined = [[[E::default(); SIDE]; SIDE]; MOST_PARTS];
    // SAFETY: guaranteed by the caller.
    unsafe {
        for pair in 0..SIDE {
            let from = from.wrapping_add(2 * pair * column);
            let there =
                [2 * pair, 2 * pair + 1].map(|number| if number < numbers { rows } else { 0 });
            let vectors = [
                load::<S, E, P>(from, row, there[0]),
                load::<S, E, P>(from.wrapping_add(column), row, there[1]),
            ];
            let to = joined.as_mut_ptr().cast::<E>().add(pair * SIDE);
            store_parts::<S, E, P>(simd, vectors, to, MATRIX);
        }
        for (part, joined) in joined.iter().enumerate().take(P::PARTS) {
            let to = to.add(part * MATRIX);
            let turned = |row: usize| to.wrapping_add(row * SIDE);
            transpose::<S, E>(|pair| joined[pair].as_ptr(), None, turned);
        }
    }
}

/// Writes the factors of columns: for every matrix of 32 numbers of each column, the first parts of
/// the pairs in rows of `width`, then the other parts.
///
/// # Safety
/// `to` must have room for [`factors`] factors of each column.
#[inline(always)]
pub(crate) unsafe fn pack_panel<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    b: Matrix<'_, P::Number>,
    columns: Range<usize>,
    width: usize,
    to: *mut E,
) {
    let ([summed, _], [row, column]) = (b.size(), b.strides());
    // SAFETY: guaranteed by the caller; the reads stay within the matrix.
    unsafe {
        for pair in 0..terms(summed) * SIDE {
            let (term, place) = (pair / SIDE, pair % SIDE);
            let to = to.add((term * P::PARTS * SIDE + place) * width);
            let summed = [2 * pair < summed, 2 * pair + 1 < summed];
            let from = b.first().wrapping_add(2 * pair * row);
            for vector in (0..width).step_by(SIDE) {
                let there = columns.len().saturating_sub(vector);
                let there = summed.map(|is| if is { there } else { 0 });
                let from = from.wrapping_add((columns.start + vector) * column);
                let vectors = [
                    load::<S, E, P>(from, column, there[0]),
                    load::<S, E, P>(from.wrapping_add(row), column, there[1]),
                ];
                store_parts::<S, E, P>(simd, vectors, to.add(vector), SIDE * width);
            }
        }
    }
}

/// Factors of columns in `parts` parts, in rows of `width`, with matrices `next` elements apart.
#[inline(always)]
pub(crate) fn columns<E>(
    first: *const E,
    [width, next]: [usize; 2],
    parts: usize,
) -> Factor<impl Fn(usize, usize) -> *const u8> {
    Factor {
        at: move |term, n| {
            let place = term * parts * SIDE * width + n * next;
            first.wrapping_add(place).cast::<u8>()
        },
        row: size_of::<E>() * width,
        part: size_of::<E>() * SIDE * width,
    }
}

impl<E: Element> Sums<E, Rows<E>> {
    /// Adds the products to the previous sums. A panel has the columns of one or two matrices.
    ///
    /// # Safety
    /// All pointers must be valid for these rows, columns and steps, and the instruction set must
    /// have matrices.
    #[inline(always)]
    pub(super) unsafe fn run_by_matrices<P: Products<E>>(&self) {
        let whole = self.rows / SIDE;
        // SAFETY: guaranteed by the caller.
        unsafe {
            if whole > 0 {
                let registers = amx::Matrices::of(SIDE, SIDE);
                for block in (0..whole).step_by(2) {
                    self.blocks::<P>(&registers, block..whole.min(block + 2));
                }
            }
            if !self.rows.is_multiple_of(SIDE) {
                let registers = amx::Matrices::of(self.rows % SIDE, SIDE);
                self.blocks::<P>(&registers, whole..whole + 1);
            }
        }
    }

    /// Computes the sums of one or two blocks of rows.
    #[inline(always)]
    unsafe fn blocks<P: Products<E>>(&self, registers: &amx::Matrices, blocks: Range<usize>) {
        let (first, terms) = (blocks.start * SIDE, self.steps / SIDE / P::PARTS);
        let rows = (blocks.len() * SIDE).min(self.rows - first);
        let from = self.from.0.wrapping_add(first * self.from.1).cast_mut();
        let to = self.to.0.wrapping_add(first * self.to.1);
        prefetch_to_write(to, [rows, self.width], self.to.1);
        let sizes = [blocks.len(), self.width / SIDE];
        let left = self.a.factor(blocks.start);
        let right = columns(self.b, [self.width, SIDE], P::PARTS);
        let places = [(from, self.from.1), (to, self.to.1)];
        let places = places.map(|(first, row)| Place::new(first, row, SIDE));
        // SAFETY: guaranteed by the caller; previous sums are only read.
        unsafe { registers.add(sizes, [terms, P::PARTS], left, right, places) };
    }
}
