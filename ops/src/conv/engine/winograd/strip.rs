//! Innermost kernel: sums of all products of a tile for a block of channels × columns, and their
//! results.

use std::mem::MaybeUninit;

use pulp::Simd;

use super::super::strip::{Kernel, Terms};
use super::{PRODUCTS, RESULTS, to_results};
use crate::kernel::memory::prefetch_to_write;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Arguments of one call of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip<'a, E: Element, P: Products<E>> {
    /// The terms of the first product.
    pub terms: Terms<'a, E>,
    /// Elements from one row of factors to the next.
    pub row: usize,
    /// The bias of every channel; null without bias.
    pub bias: *const E,
    /// Whether results are added to the output's values.
    pub add: bool,
    /// The first result.
    pub output: *mut P::Number,
    /// Elements between channels of the output.
    pub channel: usize,
    /// Elements between rows of the output.
    pub line: usize,
    /// The rows of the tile that are results: the first and their number.
    pub rows: [usize; 2],
    /// The columns of the strip that are results.
    pub columns: usize,
}

impl<E: Element, P: Products<E>> Kernel for Strip<'_, E, P> {
    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let lanes = E::lanes::<S>();
        let mut sums = [const { MaybeUninit::uninit() }; PRODUCTS];
        // SAFETY: the caller of `strip::run` promises that the pointers are valid. All sums are
        // written.
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

impl<E: Element, P: Products<E>> Strip<'_, E, P> {
    /// Sums of a product.
    ///
    /// # Safety
    /// The pointers must be valid for the block.
    #[inline(always)]
    unsafe fn product<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        product: usize,
    ) -> [[E::Vector<S>; N]; M] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let terms = Terms {
                tile: self.terms.tile.add(product * self.row),
                weights: self.terms.weights.add(product * self.terms.count * M),
                ..self.terms
            };
            terms.sums::<S, P, M, N>(simd)
        }
    }

    /// Prefetches the lines in which results of these channels and columns are stored: before the
    /// first row of products, and again before the last, because factors have displaced them in the
    /// first-level cache.
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

    /// Adds the output's values, if requested, and the bias, and writes a vector of columns of
    /// rows.
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
        let present = self.columns.saturating_sub(column).min(lanes);
        let whole = present == lanes;
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
                        for column in 0..present {
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
                    for column in 0..present {
                        *place.wrapping_add(column) = P::number(*result.add(column));
                    }
                }
            }
        }
    }
}
