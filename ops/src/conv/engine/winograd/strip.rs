//! Innermost kernel: sums of all products of a tile for a block of channels × columns, and their
//! results.

use std::ops::Range;

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
    /// Elements from a row of factors to the next.
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
    /// The number of columns of the output, from the first result on.
    pub columns: usize,
}

impl<E: Element, P: Products<E>> Kernel for Strip<'_, E, P> {
    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(self, simd: S) {
        let lanes = E::lanes::<S>();
        let [first, rows] = self.rows;
        let mut sums = [[[E::splat(simd, E::default()); N]; M]; PRODUCTS];
        // SAFETY: the caller of `strip::run` promises that the pointers are valid.
        unsafe {
            for row in 0..rows {
                let line = self.output.add(row * self.line);
                prefetch_to_write(line, [M, N * lanes], self.channel);
            }
            for (k, sums) in sums.iter_mut().enumerate() {
                let terms = Terms {
                    tile: self.terms.tile.add(k * self.row),
                    weights: self.terms.weights.add(k * self.terms.count * M),
                    ..self.terms
                };
                *sums = terms.sums::<S, P, M, N>(simd);
            }
            for index in 0..M * N {
                let (m, n) = (index / N, index % N);
                let mut of_cells = [sums[0][m][n]; PRODUCTS];
                for (of_cell, sums) in of_cells.iter_mut().zip(&sums) {
                    *of_cell = sums[m][n];
                }
                let results = to_results::<S, E>(simd, of_cells);
                let output = self.output.add(m * self.channel + n * lanes);
                let present = self.columns.saturating_sub(n * lanes).min(lanes);
                self.store(simd, results, m, output, first..first + rows, present);
            }
        }
    }
}

impl<E: Element, P: Products<E>> Strip<'_, E, P> {
    /// Adds the output's values, if asked for, and the bias, and writes columns of rows.
    #[inline(always)]
    unsafe fn store<S: Simd>(
        &self,
        simd: S,
        results: [E::Vector<S>; RESULTS],
        channel: usize,
        output: *mut P::Number,
        rows: Range<usize>,
        present: usize,
    ) {
        let whole = present == E::lanes::<S>();
        for (row, mut result) in results.into_iter().enumerate() {
            if !rows.contains(&row) {
                continue;
            }
            // SAFETY: the caller of `strip::run` promises that the pointers are valid.
            unsafe {
                let place = output.add((row - rows.start) * self.line);
                if self.add {
                    let mut old = result;
                    if whole {
                        old = P::load::<S>(place);
                    } else {
                        let old = (&raw mut old).cast::<E>();
                        for column in 0..present {
                            *old.add(column) = P::widened(*place.add(column));
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
                        *place.add(column) = P::number(*result.add(column));
                    }
                }
            }
        }
    }
}
