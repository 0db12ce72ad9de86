//! Sums of products with a panel by the matrices of AMX.

use std::ops::Range;

use pulp::Simd;

use crate::kernel::amx::{self, Factor, SIDE};
use crate::kernel::matrices::Matrix;
use crate::kernel::memory::prefetch_to_write;
use crate::kernel::products::{MOST_PARTS, Products};
use crate::kernel::simd::Element;
use crate::kernel::transpose::transpose;

/// Columns of a panel: two matrices.
pub(super) const COLUMNS: usize = 2 * SIDE;
/// Pairs of a matrix of factors.
const MATRIX: usize = SIDE * SIDE;

/// Factors of so many numbers, with those that fill up matrices: for each matrix one of each part.
pub(crate) fn whole(numbers: usize, parts: usize) -> usize {
    numbers.div_ceil(2 * SIDE) * SIDE * parts
}

/// The elements that the packed factors of so many rows and numbers take at most.
pub(crate) fn room(rows: usize, numbers: usize, parts: usize) -> usize {
    rows.next_multiple_of(SIDE) * whole(numbers, parts)
}

/// A vector's numbers of a matrix from a place on, `step` elements apart, and zeros for those that are not `there`.
///
/// # Safety
/// They must be numbers of the matrix.
#[inline(always)]
unsafe fn load<S: Simd, E: Element, P: Products<E>>(
    from: *const P::Number,
    step: usize,
    there: usize,
) -> E::Vector<S> {
    // SAFETY: the caller's.
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

/// The factors of rows: the first one, and the distances to the next row, to the next [`SIDE`] rows, and to the next matrix of the
/// same rows.
#[derive(Clone, Copy)]
pub(crate) struct Rows<E> {
    first: *const E,
    row: usize,
    block: usize,
    term: usize,
}

impl<E: Element> Rows<E> {
    /// The factors of a matrix's rows, written to scratch if they do not lie in memory so.
    ///
    /// # Safety
    /// There must be [`room`] for all factors.
    #[inline(always)]
    pub(crate) unsafe fn new<S: Simd, P: Products<E>>(
        simd: S,
        a: Matrix<'_, P::Number>,
        scratch: *mut E,
    ) -> Self {
        let ([rows, summed], [row, column]) = (a.size(), a.strides());
        // Those of bf16 numbers are pairs of neighbours.
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
        let block = SIDE * whole(summed, P::PARTS);
        // In the order of memory: all rows of some numbers if numbers lie in columns.
        let (blocks, terms) = (rows.div_ceil(SIDE), summed.div_ceil(2 * SIDE));
        for index in 0..blocks * terms {
            let (number, term) = match column {
                1 => (index / terms, index % terms),
                _ => (index % blocks, index / blocks),
            };
            let (first, summed) = (number * SIDE, summed - term * 2 * SIDE);
            let size = [(rows - first).min(SIDE), summed.min(2 * SIDE)];
            // SAFETY: numbers of the matrix, and the caller's room.
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

    /// Factors of so many numbers of each row, in matrices one after the other.
    pub(crate) fn packed<P: Products<E>>(first: *mut E, summed: usize) -> Self {
        Self {
            first,
            row: SIDE,
            block: SIDE * whole(summed, P::PARTS),
            term: P::PARTS * MATRIX,
        }
    }

    /// Where a row's packed factors of a matrix and part lie.
    #[inline(always)]
    pub(crate) fn place(self, row: usize, term: usize, part: usize) -> *mut E {
        let place = row / SIDE * self.block + term * self.term + part * MATRIX;
        self.first
            .cast_mut()
            .wrapping_add(place + row % SIDE * SIDE)
    }

    /// Those from a block of [`SIDE`] rows on, as matrices multiply them.
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

/// Writes the parts of a matrix of factors, of `rows` rows of so many `numbers`, which are beside each other.
///
/// # Safety
/// There must be such rows, and room for all parts.
#[inline(always)]
unsafe fn pack_rows<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    (from, row): (*const P::Number, usize),
    [rows, numbers]: [usize; 2],
    to: *mut E,
) {
    for place in 0..rows {
        // SAFETY: the caller's.
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
            let parts = P::split(simd, E::deinterleave::<S>(vectors));
            for (part, pairs) in parts.iter().enumerate().take(P::PARTS) {
                E::store::<S>(to.add(part * MATRIX), *pairs);
            }
        }
    }
}

/// [`pack_rows`] of numbers that lie in columns.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn pack_columns<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    (from, [row, column]): (*const P::Number, [usize; 2]),
    [rows, numbers]: [usize; 2],
    to: *mut E,
) {
    let mut joined = [[[E::default(); SIDE]; SIDE]; MOST_PARTS];
    // SAFETY: the caller's.
    unsafe {
        for pair in 0..SIDE {
            let from = from.wrapping_add(2 * pair * column);
            let there = [2 * pair, 2 * pair + 1].map(|number| match number < numbers {
                true => rows,
                false => 0,
            });
            let vectors = [
                load::<S, E, P>(from, row, there[0]),
                load::<S, E, P>(from.wrapping_add(column), row, there[1]),
            ];
            for (joined, pairs) in joined.iter_mut().zip(P::split(simd, vectors)) {
                E::store::<S>(joined[pair].as_mut_ptr(), pairs);
            }
        }
        for (part, joined) in joined.iter().enumerate().take(P::PARTS) {
            let to = to.add(part * MATRIX);
            let turned = |row: usize| to.wrapping_add(row * SIDE);
            transpose::<S, E>(|pair| joined[pair].as_ptr(), None, turned);
        }
    }
}

/// Writes the factors of columns: for every matrix of 32 numbers of each column, the first parts of pairs, `width` of a row,
/// then the others.
///
/// # Safety
/// There must be room for [`whole`] factors of each column.
#[inline(always)]
pub(crate) unsafe fn pack_panel<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    b: Matrix<'_, P::Number>,
    columns: Range<usize>,
    width: usize,
    to: *mut E,
) {
    let ([summed, _], [row, column]) = (b.size(), b.strides());
    // SAFETY: the caller's; numbers of the matrix.
    unsafe {
        for pair in 0..whole(summed, 1) {
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
                for (part, pairs) in P::split(simd, vectors).iter().enumerate().take(P::PARTS) {
                    E::store::<S>(to.add(part * SIDE * width + vector), *pairs);
                }
            }
        }
    }
}

/// Sums of products of some rows with a panel.
#[derive(Clone, Copy)]
pub(super) struct Sums<E> {
    pub a: Rows<E>,
    pub rows: usize,
    /// A panel of one or two matrices' columns.
    pub b: *const E,
    pub width: usize,
    /// Factors of a row.
    pub steps: usize,
    /// Sums so far, and sums with the products, each with the distance from a row to the next.
    pub from: (*const E, usize),
    pub to: (*mut E, usize),
}

impl<E: Element> Sums<E> {
    /// Computes the sums.
    ///
    /// # Safety
    /// All pointers must be good for so many rows, columns and steps, and the instruction set must have matrices.
    #[inline(always)]
    pub(super) unsafe fn run<P: Products<E>>(&self) {
        let whole = self.rows / SIDE;
        // SAFETY: the caller's.
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

    /// Sums of one or two blocks of rows.
    #[inline(always)]
    unsafe fn blocks<P: Products<E>>(&self, registers: &amx::Matrices, blocks: Range<usize>) {
        let (bytes, first) = (size_of::<E>(), blocks.start * SIDE);
        let rows = (blocks.len() * SIDE).min(self.rows - first);
        let to = self.to.0.wrapping_add(first * self.to.1);
        prefetch_to_write(to, [rows, self.width], self.to.1);
        let left = self.a.factor(blocks.start);
        let right = Factor {
            at: |term: usize, n: usize| {
                let place = term * P::PARTS * SIDE * self.width + n * SIDE;
                self.b.wrapping_add(place).cast::<u8>()
            },
            row: bytes * self.width,
            part: bytes * SIDE * self.width,
        };
        let from = self.from.0.wrapping_add(first * self.from.1);
        let place = |m: usize, n: usize, pitch: usize| m * SIDE * pitch + n * SIDE;
        let from = |m, n| from.wrapping_add(place(m, n, self.from.1)).cast::<u8>();
        let to = |m, n| to.wrapping_add(place(m, n, self.to.1)).cast::<u8>();
        let (from, to) = ((from, bytes * self.from.1), (to, bytes * self.to.1));
        let sizes = [blocks.len(), self.width / SIDE];
        let terms = self.steps / SIDE / P::PARTS;
        // SAFETY: the caller's.
        unsafe { registers.sums::<true>(sizes, [terms, P::PARTS], left, right, from, to) };
    }
}
