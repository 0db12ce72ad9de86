//! Sums of products with a panel by the matrices of AMX.

use pulp::Simd;

use super::sums::{Factors, Sums};
use crate::kernel::amx::{self, SIDE};
use crate::kernel::matrices::Matrix;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;
use crate::kernel::transpose::transpose;

/// Steps that fill up matrices.
pub(super) fn whole(steps: usize) -> usize {
    steps.next_multiple_of(SIDE)
}

/// The registers for so many rows.
pub(super) fn registers(rows: usize) -> amx::Matrices {
    // SAFETY: kernels use matrices only where the instruction set has them.
    unsafe { amx::Matrices::of(rows.clamp(1, SIDE), SIDE) }
}

/// The factors of rows, `steps` for each and next to each other; written to scratch if they do not lie in memory so.
///
/// # Safety
/// There must be room for all factors.
#[inline(always)]
pub(super) unsafe fn factors<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    a: Matrix<'_, P::Number>,
    steps: usize,
    scratch: *mut E,
) -> Factors<E> {
    let ([rows, summed], [row, column]) = (a.size(), a.strides());
    if column == 1 && summed == P::NUMBERS * steps && row.is_multiple_of(P::NUMBERS) {
        return Factors::new(a.first().cast(), row / P::NUMBERS);
    }
    // SAFETY: the caller's.
    unsafe {
        if column == 1 {
            for place in 0..rows {
                let to = scratch.add(place * steps).cast::<P::Number>();
                a.first()
                    .add(place * row)
                    .copy_to_nonoverlapping(to, summed);
                for number in summed..P::NUMBERS * steps {
                    *to.add(number) = P::Number::default();
                }
            }
        } else {
            for first in (0..rows).step_by(SIDE) {
                for step in (0..steps).step_by(SIDE) {
                    block::<S, E, P>(simd, a, [first, step], scratch, steps);
                }
            }
        }
    }
    Factors::new(scratch, steps)
}

/// The factors of 16 rows and steps, of numbers that lie in columns.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn block<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    a: Matrix<'_, P::Number>,
    [first, step]: [usize; 2],
    scratch: *mut E,
    steps: usize,
) {
    let ([rows, summed], [row, column]) = (a.size(), a.strides());
    let mut joined = [[E::default(); SIDE]; SIDE];
    let mut turned = [[E::default(); SIDE]; SIDE];
    let there = (rows - first).min(SIDE);
    let whole = row == 1 && there == SIDE && E::lanes::<S>() == SIDE;
    // SAFETY: numbers of the matrix, and the caller's room.
    unsafe {
        for (index, joined) in joined.iter_mut().enumerate() {
            let numbers = [0, 1].map(|number| P::NUMBERS * (step + index) + number);
            if whole && numbers[1] < summed {
                let numbers = numbers.map(|number| a.first().add(number * column + first));
                let numbers = [P::load::<S>(numbers[0]), P::load::<S>(numbers[1])];
                E::store::<S>(joined.as_mut_ptr(), P::join(simd, numbers));
                continue;
            }
            for (place, joined) in joined.iter_mut().enumerate().take(there) {
                let numbers = numbers.map(|number| match number < summed {
                    true => a.at((first + place) * row + number * column),
                    false => P::Number::default(),
                });
                *joined = P::factor(numbers);
            }
        }
        let place = turned.as_mut_ptr().cast::<E>();
        let to = |run: usize| place.wrapping_add(run * SIDE);
        transpose::<S, E>(|run| joined[run].as_ptr(), None, to);
        for (place, turned) in turned.iter().enumerate().take(there) {
            let to = scratch.add((first + place) * steps + step);
            turned.as_ptr().copy_to_nonoverlapping(to, SIDE);
        }
    }
}

impl<E: Element> Sums<E> {
    /// Adds the products, of factors whose steps are next to each other.
    ///
    /// # Safety
    /// As for [`run`](Self::run); the registers must be those for so many rows.
    #[inline(always)]
    pub(super) unsafe fn by_matrices(&self, registers: &amx::Matrices) {
        let (blocks, columns) = (self.rows.div_ceil(SIDE), self.width / SIDE);
        let bytes = size_of::<E>();
        // The last block of rows ends with them, and has some of the one before again.
        let row = |block: usize| (block * SIDE).min(self.rows.saturating_sub(SIDE));
        for column in (0..columns).step_by(2) {
            for block in (0..blocks).step_by(2) {
                let left = |step: usize, m: usize| {
                    self.a
                        .at(row(block + m))
                        .wrapping_add(step * SIDE)
                        .cast::<u8>()
                };
                let right = |step: usize, n: usize| {
                    let place = step * SIDE * self.width + (column + n) * SIDE;
                    self.b.wrapping_add(place).cast::<u8>()
                };
                let place =
                    |m: usize, n: usize, pitch: usize| row(block + m) * pitch + (column + n) * SIDE;
                let from = |m, n| {
                    self.from
                        .0
                        .wrapping_add(place(m, n, self.from.1))
                        .cast::<u8>()
                };
                let to = |m, n| self.to.0.wrapping_add(place(m, n, self.to.1)).cast::<u8>();
                let (left, right) = ((left, bytes * self.a.pitch()), (right, bytes * self.width));
                let (from, to) = ((from, bytes * self.from.1), (to, bytes * self.to.1));
                let terms = self.steps / SIDE;
                // SAFETY: the caller's.
                unsafe {
                    let sizes = [(blocks - block).min(2), (columns - column).min(2)];
                    registers.sums::<true>(sizes, terms, left, right, from, to);
                }
            }
        }
    }
}
