//! Innermost kernel: sums of all products of a tile for a block of channels × columns, and their
//! results.

use std::mem::MaybeUninit;

use pulp::Simd;

use super::super::strip::{Kernel, Terms};
use super::{COLUMN_PRODUCTS, PAIR, PRODUCTS, RESULTS, to_pair, to_results};
use crate::kernel::interleave::interleave;
use crate::kernel::memory::prefetch_to_write;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Arguments of one call of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip<'a, E: Element, P: Products<E>> {
    /// The terms of the first product.
    pub terms: Terms<'a, E>,
    /// Elements from a row of factors to the next.
    pub row: usize,
    /// The bias of every channel; null without bias.
    pub bias: *const E,
    /// Whether results are added to the output's values.
    pub add: bool,
    /// The place of the first column of the strip, which may be none of the results, in their first row.
    pub output: *mut P::Number,
    /// Elements between channels of the output.
    pub channel: usize,
    /// Elements between rows of the output.
    pub line: usize,
    /// The rows of the tile that are results: the first and their number.
    pub rows: [usize; 2],
    /// The columns of the strip that are results: the first and the end.
    pub columns: [usize; 2],
}

impl<E: Element, P: Products<E>> Kernel for Strip<'_, E, P> {
    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let lanes = E::lanes::<S>();
        let mut sums = [const { MaybeUninit::uninit() }; PRODUCTS];
        // SAFETY: the caller of `strip::run` promises that the pointers are valid. All sums are written.
        unsafe {
            for (k, sums) in sums.iter_mut().enumerate() {
                self.prefetch(k, [M, N * lanes]);
                sums.write(self.product::<S, M, N>(simd, k));
            }
            for index in 0..M * N {
                let (m, n) = (index / N, index % N);
                let mut of_cells = [E::splat(simd, E::default()); PRODUCTS];
                for (of_cell, sums) in of_cells.iter_mut().zip(&sums) {
                    *of_cell = sums.assume_init_ref()[m][n];
                }
                let results = to_results::<S, E>(simd, of_cells);
                self.store(simd, results, m, n * lanes);
            }
        }
    }
}

/// A [`Strip`] whose columns are transformed, too: of pairs.
#[derive(Clone, Copy)]
pub(super) struct WideStrip<'a, E: Element, P: Products<E>>(pub Strip<'a, E, P>);

impl<E: Element, P: Products<E>> Kernel for WideStrip<'_, E, P> {
    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let (strip, lanes) = (self.0, E::lanes::<S>());
        let zero = E::splat(simd, E::default());
        let mut pairs =
            [const { MaybeUninit::<[[[E::Vector<S>; PAIR]; N]; M]>::uninit() }; PRODUCTS];
        // SAFETY: the caller of `strip::run_narrow` promises that the pointers are valid. All sums and pairs are written.
        unsafe {
            for (k, pairs) in pairs.iter_mut().enumerate() {
                strip.prefetch(k, [M, PAIR * N * lanes]);
                let mut sums = [const { MaybeUninit::uninit() }; COLUMN_PRODUCTS];
                for (column, sums) in sums.iter_mut().enumerate() {
                    sums.write(strip.product::<S, M, N>(simd, COLUMN_PRODUCTS * k + column));
                }
                let pairs = pairs.as_mut_ptr();
                for index in 0..M * N {
                    let (m, n) = (index / N, index % N);
                    let mut of_pair = [zero; COLUMN_PRODUCTS];
                    for (of_pair, sums) in of_pair.iter_mut().zip(&sums) {
                        *of_pair = sums.assume_init_ref()[m][n];
                    }
                    (&raw mut (*pairs)[m][n]).write(to_pair::<S, E>(simd, of_pair));
                }
            }
            for index in 0..M * N {
                let (m, n) = (index / N, index % N);
                let mut columns = [[zero; RESULTS]; PAIR];
                for (column, results) in columns.iter_mut().enumerate() {
                    let mut of_cells = [zero; PRODUCTS];
                    for (of_cell, pairs) in of_cells.iter_mut().zip(&pairs) {
                        *of_cell = pairs.assume_init_ref()[m][n][column];
                    }
                    *results = to_results::<S, E>(simd, of_cells);
                }
                let mut halves = [[zero; RESULTS]; PAIR];
                for row in 0..RESULTS {
                    let turns = interleave::<S, E>([columns[0][row], columns[1][row]]);
                    for (half, turn) in halves.iter_mut().zip(turns) {
                        half[row] = turn;
                    }
                }
                for (half, results) in halves.into_iter().enumerate() {
                    strip.store(simd, results, m, (PAIR * n + half) * lanes);
                }
            }
        }
    }
}

impl<E: Element, P: Products<E>> Strip<'_, E, P> {
    /// The sums of a product.
    ///
    /// # Safety
    /// The pointers must be valid for the block.
    #[inline(always)]
    unsafe fn product<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        product: usize,
    ) -> [[E::Vector<S>; N]; M] {
        // SAFETY: the caller's.
        unsafe {
            let terms = Terms {
                tile: self.terms.tile.add(product * self.row),
                weights: self.terms.weights.add(product * self.terms.count * M),
                ..self.terms
            };
            terms.sums::<S, P, M, N>(simd)
        }
    }

    /// Asks for the lines that results of so many channels and columns are stored in: before the first row of products, and
    /// again before the last, as factors have taken their place in the first-level cache.
    #[inline(always)]
    fn prefetch(&self, product: usize, block: [usize; 2]) {
        if product != 0 && product != PRODUCTS - 1 {
            return;
        }
        for row in 0..self.rows[1] {
            let line = self.output.wrapping_add(row * self.line);
            prefetch_to_write(line, block, self.channel);
        }
    }

    /// Adds the output's values, if asked for, and the bias, and writes a vector of columns of rows.
    #[inline(always)]
    unsafe fn store<S: Simd>(
        &self,
        simd: S,
        results: [E::Vector<S>; RESULTS],
        channel: usize,
        column: usize,
    ) {
        let lanes = E::lanes::<S>();
        let [first, rows] = self.rows;
        let [start, end] = self
            .columns
            .map(|end| end.saturating_sub(column).min(lanes));
        let whole = end - start == lanes;
        let output = self.output.wrapping_add(channel * self.channel + column);
        for (row, mut result) in results.into_iter().enumerate() {
            if row < first || row >= first + rows {
                continue;
            }
            // SAFETY: the caller of `strip::run` promises that the pointers are valid.
            unsafe {
                let place = output.wrapping_add((row - first) * self.line);
                if self.add {
                    let mut old = result;
                    if whole {
                        old = P::load::<S>(place);
                    } else {
                        let old = (&raw mut old).cast::<E>();
                        for column in start..end {
                            *old.add(column) = P::widened(*place.wrapping_add(column));
                        }
                    }
                    result = E::plus(simd, result, old);
                }
                if !self.bias.is_null() {
                    result = E::plus(simd, result, E::splat(simd, *self.bias.add(channel)));
                }
                if whole {
                    P::store::<S>(place, result);
                } else {
                    let result = (&raw const result).cast::<E>();
                    for column in start..end {
                        *place.wrapping_add(column) = P::number(*result.add(column));
                    }
                }
            }
        }
    }
}
