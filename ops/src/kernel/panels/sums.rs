//! Packed factors of rows and panels, and sums of their products in registers.

use std::ops::Range;

use pulp::Simd;

use crate::kernel::lanes::WIDEST;
use crate::kernel::matrices::Matrix;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Maximum number of rows of a block of sums.
const BLOCK: usize = 6;
/// Number of adjacent row factors copied at a time: those of one block and some of the next, so
/// that the copy is a whole vector.
const COPIED: usize = 8;

/// Factors of rows: the address of the first, and the strides to the next row, to the next block of
/// rows, and to the next factor of the same row.
#[derive(Clone, Copy)]
pub(crate) struct Factors<E> {
    first: *const E,
    row: usize,
    block: usize,
    step: usize,
}

impl<E> Factors<E> {
    /// Factors in contiguous rows, `row` apart.
    pub(crate) fn new(first: *const E, row: usize) -> Self {
        Self {
            first,
            row,
            block: BLOCK * row,
            step: 1,
        }
    }

    /// Factors whose rows are adjacent in memory, with `step` between the factors of one row.
    pub(crate) fn across(first: *const E, step: usize) -> Self {
        Self {
            first,
            row: 1,
            block: BLOCK,
            step,
        }
    }

    /// Maximum number of elements for the packed factors of `rows` rows and `steps` steps.
    pub(super) fn room(rows: usize, steps: usize) -> usize {
        rows.div_ceil(BLOCK) * Self::packed_block(steps)
    }

    /// Number of elements of one packed block, padded so that consecutive blocks map to different
    /// cache sets.
    fn packed_block(steps: usize) -> usize {
        BLOCK * steps + WIDEST
    }

    fn at(&self, row: usize) -> *const E {
        let place = row / BLOCK * self.block + row % BLOCK * self.row;
        self.first.wrapping_add(place)
    }
}

/// Writes the factors of columns, `width` per step.
///
/// # Safety
/// `to` must have room for them.
#[inline(always)]
pub(super) unsafe fn pack_panel<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    b: Matrix<'_, P::Number>,
    columns: Range<usize>,
    [steps, width]: [usize; 2],
    to: *mut E,
) {
    let ([summed, _], [row, column]) = (b.size(), b.strides());
    let vectors = match column {
        1 => columns.len() / E::lanes::<S>(),
        _ => 0,
    };
    let packed = vectors * E::lanes::<S>();
    // SAFETY: guaranteed by the caller; the reads stay within the matrix.
    unsafe {
        for step in 0..steps {
            let numbers = [step * P::NUMBERS, (step + 1) * P::NUMBERS - 1];
            let rows = numbers.map(|number| b.first().wrapping_add(number * row + columns.start));
            for vector in (0..packed).step_by(E::lanes::<S>()) {
                let mut vectors = [E::splat(simd, E::default()); 2];
                for (index, vector_of) in vectors.iter_mut().enumerate() {
                    if numbers[index] < summed {
                        *vector_of = P::load::<S>(rows[index].add(vector));
                    }
                }
                E::store::<S>(to.add(step * width + vector), P::join(simd, vectors));
            }
        }
        if packed < width {
            match column {
                1 => pack_columns::<E, P>(b, 1, columns, packed, [steps, width], to),
                _ => pack_columns::<E, P>(b, column, columns, packed, [steps, width], to),
            }
        }
    }
}

/// [`pack_panel`] for the columns from `packed` on. `column` is the stride between columns, which
/// may be a constant after inlining.
#[inline(always)]
unsafe fn pack_columns<E: Element, P: Products<E>>(
    b: Matrix<'_, P::Number>,
    column: usize,
    columns: Range<usize>,
    packed: usize,
    [steps, width]: [usize; 2],
    to: *mut E,
) {
    let ([summed, _], [row, _]) = (b.size(), b.strides());
    for step in 0..steps {
        let rows = [step * P::NUMBERS, (step + 1) * P::NUMBERS - 1];
        for lane in packed..width {
            let numbers = rows.map(|number| {
                let there = number < summed && lane < columns.len();
                let offset = number * row + (columns.start + lane) * column;
                match there {
                    // SAFETY: an element of the matrix.
                    true => unsafe { b.at(offset) },
                    false => P::Number::default(),
                }
            });
            // SAFETY: guaranteed by the caller.
            unsafe { *to.add(step * width + lane) = P::factor(numbers) };
        }
    }
}

/// Whether the factors of rows can be read in place: a row's factors are contiguous, so that few
/// cache lines are read at a time.
pub(super) fn as_they_lie<E: Element, P: Products<E>>(a: Matrix<'_, P::Number>) -> bool {
    let ([_, summed], [row, column]) = (a.size(), a.strides());
    let aligned = a.first().cast::<E>().is_aligned();
    aligned && column == 1 && summed.is_multiple_of(P::NUMBERS) && row.is_multiple_of(P::NUMBERS)
}

/// Factors of rows, packed to scratch if they cannot be read in place.
///
/// # Safety
/// There must be [room](Factors::room) for them.
#[inline(always)]
pub(super) unsafe fn factors<E: Element, P: Products<E>>(
    a: Matrix<'_, P::Number>,
    scratch: *mut E,
) -> Factors<E> {
    let ([rows, summed], [row, column]) = (a.size(), a.strides());
    if as_they_lie::<E, P>(a) {
        return Factors::new(a.first().cast(), row / P::NUMBERS);
    }
    let steps = summed.div_ceil(P::NUMBERS);
    let factor = |place: usize, step: usize| {
        let numbers = [0, 1].map(|number| step * P::NUMBERS + number);
        P::factor(numbers.map(|number| match number < summed {
            // SAFETY: an element of the matrix.
            true => unsafe { a.at(place * row + number * column) },
            false => P::Number::default(),
        }))
    };
    // By rows, or by blocks of rows step by step, whichever is closer to the order in memory.
    if column == 1 {
        for place in 0..rows {
            for step in 0..steps {
                // SAFETY: guaranteed by the caller.
                unsafe { *scratch.add(place * steps + step) = factor(place, step) };
            }
        }
        return Factors::new(scratch, steps);
    }
    let block = Factors::<E>::packed_block(steps);
    let beside = row == 1 && P::NUMBERS == 1;
    for step in 0..steps {
        for (number, first) in (0..rows).step_by(BLOCK).enumerate() {
            let to = scratch.wrapping_add(number * block + step * BLOCK);
            if beside && first + COPIED <= rows {
                let from = a.first().wrapping_add(step * column + first);
                // SAFETY: elements of the matrix, and room guaranteed by the caller; elements
                // beyond a block are overwritten later, or never read.
                unsafe { from.cast::<E>().copy_to_nonoverlapping(to, COPIED) };
                continue;
            }
            for member in 0..BLOCK.min(rows - first) {
                // SAFETY: guaranteed by the caller.
                unsafe { *to.add(member) = factor(first + member, step) };
            }
        }
    }
    Factors {
        first: scratch,
        row: 1,
        block,
        step: BLOCK,
    }
}

/// Sums of products of rows with a panel: by vectors or, with other row factors, by matrices.
#[derive(Clone, Copy)]
pub(crate) struct Sums<E, A = Factors<E>> {
    pub a: A,
    pub rows: usize,
    /// Panel of `width` columns.
    pub b: *const E,
    pub width: usize,
    pub steps: usize,
    /// Previous sums and new sums, each with its row stride.
    pub from: (*const E, usize),
    pub to: (*mut E, usize),
}

impl<E> Sums<E, ()> {
    /// Sets the row factors.
    pub(super) fn with_rows<A>(self, a: A) -> Sums<E, A> {
        Sums {
            a,
            rows: self.rows,
            b: self.b,
            width: self.width,
            steps: self.steps,
            from: self.from,
            to: self.to,
        }
    }
}

impl<E: Element> Sums<E> {
    /// Adds the products to the previous sums.
    ///
    /// # Safety
    /// All pointers must be valid for these rows, columns and steps.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd, P: Products<E>>(&self, simd: S) {
        let vectors = self.width / E::lanes::<S>();
        // As many as 32 registers permit, or 16.
        let most = if size_of::<E::Vector<S>>() >= 64 {
            4
        } else {
            2
        };
        let mut first = 0;
        while first < vectors {
            let count = most.min(vectors - first);
            // SAFETY: guaranteed by the caller.
            unsafe {
                match count {
                    4 => self.columns::<S, P, 4>(simd, first),
                    2 | 3 => self.columns::<S, P, 2>(simd, first),
                    _ => self.columns::<S, P, 1>(simd, first),
                }
            }
            first += if count == 3 { 2 } else { count };
        }
    }

    #[inline(always)]
    unsafe fn columns<S: Simd, P: Products<E>, const C: usize>(&self, simd: S, first: usize) {
        let mut row = 0;
        // SAFETY: guaranteed by the caller.
        unsafe {
            while row + BLOCK <= self.rows {
                self.block::<S, P, BLOCK, C>(simd, row, first);
                row += BLOCK;
            }
            while row + 3 <= self.rows {
                self.block::<S, P, 3, C>(simd, row, first);
                row += 3;
            }
            while row < self.rows {
                self.block::<S, P, 1, C>(simd, row, first);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, P: Products<E>, const R: usize, const C: usize>(
        &self,
        simd: S,
        row: usize,
        first: usize,
    ) {
        let lanes = E::lanes::<S>();
        let at = |row: usize, pitch: usize, vector: usize| row * pitch + (first + vector) * lanes;
        // SAFETY: guaranteed by the caller.
        unsafe {
            // The previous sums are added to the sum of the products, which is smaller: fewer bits
            // of each product are lost.
            let mut sums = [[E::splat(simd, E::default()); C]; R];
            let a: [*const E; R] = std::array::from_fn(
                #[inline(always)]
                |member| self.a.at(row + member),
            );
            for step in 0..self.steps {
                let b = self.b.add(step * self.width + first * lanes);
                let b: [E::Vector<S>; C] = std::array::from_fn(
                    #[inline(always)]
                    |vector| E::load::<S>(b.add(vector * lanes)),
                );
                for (sums, a) in sums.iter_mut().zip(&a) {
                    // Pairs may begin at any bf16 number.
                    let a = E::splat(simd, a.add(step * self.a.step).read_unaligned());
                    for (sum, b) in sums.iter_mut().zip(&b) {
                        *sum = P::mul_add(simd, a, *b, *sum);
                    }
                }
            }
            for (member, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    let from = E::load::<S>(self.from.0.add(at(row + member, self.from.1, vector)));
                    let to = self.to.0.add(at(row + member, self.to.1, vector));
                    E::store::<S>(to, E::plus(simd, from, *sum));
                }
            }
        }
    }
}
