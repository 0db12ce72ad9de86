//! Products with few rows and columns that are contiguous along the summed dim: `a · b` as inner
//! products.

use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::filled;
use crate::kernel::matrices::Matrix;
use crate::kernel::memory::Shared;
use crate::kernel::products::{self, Products};
use crate::kernel::simd::{Element, Isa};

/// Maximum number of rows or columns; with more, packing pays off.
const FEW: usize = 16;
/// Number of summed elements of a task, few enough for a few rows and columns to stay in cache.
const PART: usize = 4096;
/// Numbers of rows and columns whose sums stay in registers.
const BLOCK: [usize; 2] = [2, 4];

/// Whether inner products suit these operands.
pub(crate) fn are_few<N: Copy>(a: Matrix<'_, N>, b: Matrix<'_, N>) -> bool {
    let ([rows, summed], [_, columns]) = (a.size(), b.size());
    a.strides()[1] == 1 && b.strides()[0] == 1 && rows.max(columns) <= FEW && summed > PART
}

/// Writes the product by inner products. The order of the sums follows from sizes alone.
///
/// # Safety
/// `to` must have room for it.
pub(crate) unsafe fn dots_to<E: Element, P: Products<E>>(
    isa: Isa,
    [a, b]: [Matrix<'_, P::Number>; 2],
    to: Shared<P::Number>,
) {
    let ([rows, summed], [_, columns]) = (a.size(), b.size());
    let (parts, size) = (summed.div_ceil(PART), rows * columns);
    let mut sums = filled::<E>(parts * size, 0.0);
    tasks::for_each_part(sums.elements_mut(), size, 1, |part, sums| {
        products::run::<E, P, _>(
            isa,
            Dots::<E, P> {
                a,
                b,
                range: part * PART..summed.min((part + 1) * PART),
                sums,
            },
        );
    });
    for place in 0..size {
        let parts = (0..parts).map(|part| sums[part * size + place]);
        let sum = parts.fold(E::default(), |sum, part| sum + part);
        // SAFETY: guaranteed by the caller.
        unsafe { *to.at(place) = P::number(sum) };
    }
}

/// Inner products over a range of the summed dim.
struct Dots<'a, E: Element, P: Products<E>> {
    a: Matrix<'a, P::Number>,
    b: Matrix<'a, P::Number>,
    range: Range<usize>,
    /// `[rows, columns]`
    sums: &'a mut [E],
}

impl<E: Element, P: Products<E>> WithSimd for Dots<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ([rows, _], [_, columns]) = (self.a.size(), self.b.size());
        let (lanes, len) = (E::lanes::<S>(), self.range.len());
        let whole = len / lanes * lanes;
        for row in (0..rows).step_by(BLOCK[0]) {
            for column in (0..columns).step_by(BLOCK[1]) {
                // Indices beyond the last row or column repeat it.
                let of_a: [*const P::Number; BLOCK[0]] = std::array::from_fn(|offset| {
                    let row = (row + offset).min(rows - 1) * self.a.strides()[0];
                    self.a.first().wrapping_add(row + self.range.start)
                });
                let of_b: [*const P::Number; BLOCK[1]] = std::array::from_fn(|offset| {
                    let column = (column + offset).min(columns - 1) * self.b.strides()[1];
                    self.b.first().wrapping_add(column + self.range.start)
                });
                let mut sums = [[E::splat(simd, E::default()); BLOCK[1]]; BLOCK[0]];
                for place in (0..whole).step_by(lanes) {
                    // SAFETY: elements of the range.
                    let (of_a, of_b) = unsafe {
                        (
                            of_a.map(
                                #[inline(always)]
                                |from| P::load::<S>(from.add(place)),
                            ),
                            of_b.map(
                                #[inline(always)]
                                |from| P::load::<S>(from.add(place)),
                            ),
                        )
                    };
                    for (sums, a) in sums.iter_mut().zip(of_a) {
                        for (sum, b) in sums.iter_mut().zip(of_b) {
                            *sum = E::mul_add(simd, a, b, *sum);
                        }
                    }
                }
                for (of_row, sums) in sums.into_iter().enumerate().take(rows - row) {
                    for (of_column, sum) in sums.into_iter().enumerate().take(columns - column) {
                        let mut sum = E::sum(simd, sum);
                        for place in whole..len {
                            // SAFETY: elements of the range.
                            let [a, b] = unsafe {
                                [of_a[of_row].add(place), of_b[of_column].add(place)]
                                    .map(|number| *number)
                            };
                            sum += P::widened(a) * P::widened(b);
                        }
                        self.sums[(row + of_row) * columns + column + of_column] = sum;
                    }
                }
            }
        }
    }
}
