//! Factors of squares of four by four results, F(4 × 4, 3 × 3): rows are transformed as in
//! [`factors`](super::factors), then columns in the same way; 36 products for sixteen results.
//!
//! Lanes are channels: blocks of channels × columns of transformed rows are transposed, so that any
//! number of squares fills vectors.

use std::ops::Range;

use pulp::Simd;

use super::{PRODUCTS, RESULTS, TAPS, oblongs, of_cotangent, of_source};
use crate::conv::engine::ahead::Stretch;
use crate::conv::engine::geometry::{Correlation, Dims};
use crate::conv::engine::pieces::Pieces;
use crate::conv::engine::tile::{SKEW, TileLayout, tile_count};
use crate::kernel::lanes::WIDEST;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;
use crate::kernel::transpose::transpose;

/// Number of products of a square.
pub(super) const ALL: usize = products(RESULTS);
/// Channels of a panel.
pub(super) const PANEL: usize = 64;

/// Number of products of four rows of `columns` columns of results.
pub(super) const fn products(columns: usize) -> usize {
    PRODUCTS * (columns + TAPS - 1)
}

/// Number of channels, padded to whole vectors.
pub(super) fn padded<S: Simd, E: Element>(channels: usize) -> usize {
    channels.next_multiple_of(E::lanes::<S>())
}

/// Extents of the boxes of a field of `count` squares, in one plane, whose factors of `channels`
/// channels take about `bytes` bytes, and the number of boxes. Extents are about equal, and columns
/// fill vectors.
pub(super) fn boxes<E, const COLUMNS: usize>(
    count: Dims,
    channels: usize,
    bytes: usize,
    limits: Range<usize>,
) -> (Dims, usize) {
    let squares = bytes / (products(COLUMNS) * channels * size_of::<E>());
    let squares = squares.clamp(limits.start, limits.end);
    let even = |count: usize, most: usize| count.div_ceil(count.div_ceil(most));
    let columns = even(count[2], squares).next_multiple_of(WIDEST / COLUMNS);
    let columns = columns.min(count[2]);
    let extents = [1, even(count[1], (squares / columns).max(1)), columns];
    (extents, tile_count(extents, count))
}

/// A block of each row of products, `[channel][column]`, and the same transposed, after the last
/// columns of the previous block.
type Rows<E> = [[[E; WIDEST]; WIDEST]; PRODUCTS];
type Columns<E> = [[[E; WIDEST]; RESULTS + WIDEST]; PRODUCTS];

/// Boxes of squares of a field, or of [oblongs], with `COLUMNS` columns of results. Each meets
/// `CELLS` rows: six of a source, four of a cotangent.
///
/// The factors of a box are `[product][panel][square][channel]`: those of a panel begin (its first
/// channel) × (number of squares) elements after those of the product.
pub(super) struct Squares<const CELLS: usize, const COLUMNS: usize> {
    /// Layout of a channel's cells.
    cells: TileLayout,
    /// Maximum squares of a box.
    most: usize,
}

impl<const CELLS: usize, const COLUMNS: usize> Squares<CELLS, COLUMNS> {
    /// Creates boxes of at most this number of rows and columns of squares, for a correlation on
    /// whole squares.
    pub(super) fn new(correlation: &Correlation, [rows, columns]: [usize; 2]) -> Self {
        Self {
            cells: TileLayout::new(correlation, [1, RESULTS * rows, COLUMNS * columns]),
            most: rows * columns,
        }
    }

    /// Elements of the cells of a vector of channels.
    pub(super) fn cells<S: Simd, E: Element>(&self) -> usize {
        self.cells.len(E::lanes::<S>())
    }

    /// Elements from one product of `padded` channels to the next, chosen so that products begin at
    /// different places of a cache.
    pub(super) fn of_product(&self, padded: usize) -> usize {
        self.most * padded + SKEW
    }

    /// Elements of the factors of `padded` channels.
    pub(super) fn len(&self, padded: usize) -> usize {
        products(COLUMNS) * self.of_product(padded)
    }

    /// Memory of the first vector of channels that [`fill`](Self::fill) reads, to be prefetched.
    pub(super) fn ahead<S: Simd, E: Element, N>(
        &self,
        pieces: &Pieces<'_, N>,
        batch: usize,
        channels: Range<usize>,
        [plane, row, column]: Dims,
    ) -> Vec<Stretch> {
        let first = channels.start..channels.end.min(channels.start + E::lanes::<S>());
        let origin = [plane, RESULTS * row, COLUMNS * column];
        self.cells.stretches(pieces, batch, first, origin)
    }

    /// Writes the factors of some channels of the box at `origin`, of `size` rows and columns of
    /// squares. Calls `add` with each channel and, for a cotangent, the sum of its cells.
    #[inline(always)]
    pub(super) fn fill<S: Simd, E: Element, P: Products<E>>(
        &self,
        simd: S,
        [scratch, factors]: [&mut [E]; 2],
        pieces: &Pieces<'_, P::Number>,
        (batch, channels): (usize, Range<usize>),
        (origin, size): (Dims, [usize; 2]),
        mut add: impl FnMut(usize, E),
    ) {
        let lanes = E::lanes::<S>();
        let padded = padded::<S, E>(channels.len());
        let squares = size[0] * size[1];
        let of_product = self.of_product(padded);
        let origin = [origin[0], RESULTS * origin[1], COLUMNS * origin[2]];
        let met = self.cells.met_by(pieces, origin);
        // Lanes without a channel hold values of others, which nothing reads.
        let mut rows: Rows<E> = [[[E::default(); WIDEST]; WIDEST]; PRODUCTS];
        let mut columns: Columns<E> = [[[E::default(); WIDEST]; RESULTS + WIDEST]; PRODUCTS];
        for first in (0..padded).step_by(lanes) {
            let start = channels.start + first;
            let held = start..channels.end.min(start + lanes);
            (held.end..channels.end)
                .take(lanes)
                .for_each(|next| self.cells.ask_for(&met, [batch, next], origin));
            let present = held.len();
            self.cells
                .fill_from::<S, E, P>(simd, scratch, &met, batch, held.clone(), origin);
            let panel = first / PANEL * PANEL;
            let width = PANEL.min(padded - panel);
            let to = factors[panel * squares + first - panel..].as_mut_ptr();
            let mut sums = [E::splat(simd, E::default()); WIDEST];
            for row in 0..size[0] {
                // SAFETY: the cells of these channels are present, in rows of whole vectors; the
                // factors have room for all products of the box's squares.
                unsafe {
                    let to = to.add(row * size[1] * width);
                    let cells = (scratch.as_ptr(), present, RESULTS * row);
                    let to = (to, of_product, width);
                    let turned = (&mut rows, &mut columns);
                    self.row::<S, E>(simd, cells, size[1], to, turned, &mut sums);
                }
            }
            for (channel, sum) in held.zip(sums) {
                add(channel, E::sum(simd, sum));
            }
        }
    }

    /// Writes the factors of a row of squares, for a vector of channels of which some are present,
    /// and adds their cells to sums.
    ///
    /// # Safety
    /// The cells must be readable, and there must be room for the factors at the given distances
    /// between products and between squares.
    #[inline(always)]
    unsafe fn row<S: Simd, E: Element>(
        &self,
        simd: S,
        (cells, present, first): (*const E, usize, usize),
        squares: usize,
        (to, of_product, of_square): (*mut E, usize, usize),
        (rows, columns): (&mut Rows<E>, &mut Columns<E>),
        sums: &mut [E::Vector<S>; WIDEST],
    ) {
        let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
        let pitch = self.cells.line(0, 0, 1) - self.cells.line(0, 0, 0);
        // Columns that a square shares with the next one: blocks keep the last columns of the
        // previous block.
        let late = usize::from(CELLS > RESULTS);
        let in_block = lanes / COLUMNS;
        let blocks = (COLUMNS * squares + CELLS - RESULTS).div_ceil(lanes);
        // SAFETY: guaranteed by the caller; rows and columns have room for vectors.
        unsafe {
            for block in 0..blocks {
                for (channel, sum) in sums.iter_mut().enumerate().take(present) {
                    let cells = cells.add(self.cells.line(channel, 0, first) + block * lanes);
                    let mut x = [zero; PRODUCTS];
                    for (line, x) in x.iter_mut().enumerate().take(CELLS) {
                        *x = E::load::<S>(cells.add(line * pitch));
                        if const { CELLS == RESULTS } {
                            *sum = E::plus(simd, *sum, *x);
                        }
                    }
                    let x = transformed::<S, E, CELLS>(simd, x);
                    for (rows, x) in rows.iter_mut().zip(x) {
                        E::store::<S>(rows[channel].as_mut_ptr(), x);
                    }
                }
                for (rows, columns) in rows.iter().zip(&mut *columns) {
                    if late > 0 {
                        columns.copy_within(lanes..lanes + RESULTS, 0);
                    }
                    let to = columns[RESULTS..].as_mut_ptr();
                    transpose::<S, E>(
                        |run| rows[run].as_ptr(),
                        None,
                        |run| to.wrapping_add(run).cast(),
                    );
                }
                let start = (block * in_block).saturating_sub(late);
                let end = ((block + 1) * in_block - late).min(squares);
                for square in start..end {
                    let column = RESULTS + COLUMNS * square - block * lanes;
                    let to = to.add(square * of_square);
                    for (k, columns) in columns.iter().enumerate() {
                        let mut x = [zero; PRODUCTS];
                        let cells = &columns[column..][..CELLS - RESULTS + COLUMNS];
                        for (x, cells) in x.iter_mut().zip(cells) {
                            *x = E::load::<S>(cells.as_ptr());
                        }
                        let x = match const { COLUMNS == RESULTS } {
                            true => transformed::<S, E, CELLS>(simd, x),
                            false => oblongs::transformed::<S, E, CELLS>(simd, x),
                        };
                        let across = const { COLUMNS + TAPS - 1 };
                        for (j, x) in x.into_iter().enumerate().take(across) {
                            E::store::<S>(to.add((across * k + j) * of_product), x);
                        }
                    }
                }
            }
        }
    }
}

/// Factors of six cells of a source, or of the first four of a cotangent.
#[inline(always)]
fn transformed<S: Simd, E: Element, const CELLS: usize>(
    simd: S,
    x: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; PRODUCTS] {
    if const { CELLS == PRODUCTS } {
        of_source::<S, E>(simd, x)
    } else {
        of_cotangent::<S, E>(simd, [x[0], x[1], x[2], x[3]])
    }
}
