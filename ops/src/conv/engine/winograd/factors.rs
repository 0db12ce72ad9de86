//! Tiles of a field with transformed rows.

use std::ops::Range;

use pulp::Simd;

use super::super::geometry::{Correlation, Dims, Tap};
use super::super::pieces::Pieces;
use super::super::tile::TileLayout;
use super::{PRODUCTS, RESULTS, TAPS, of_source};
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// A correlation with three adjacent rows of taps, by tiles of four rows of results; with three
/// adjacent columns of taps also by squares (`COLUMNS` is four, otherwise one) or oblongs (two).
///
/// A tile begins where its first source row is a multiple of four, whichever box of results is
/// computed, and a square also where its first source column is. A result thus has the same bits in
/// any box.
#[derive(Debug)]
pub(crate) struct Tiles<const COLUMNS: usize> {
    /// Rows of the first tile, and columns of the first square, before the first result.
    pub before: [usize; 2],
    /// Correlation of every row of factors: the taps of the dims that are not transformed, on a
    /// lattice of tiles.
    pub flat: Correlation,
    /// Elements of the three taps that each of these stands for, from low to high rows; from low to
    /// high columns if those are transformed, too.
    pub elements: Vec<[usize; TAPS]>,
    /// Correlation on whole tiles.
    pub source: Correlation,
}

/// Tiles of rows.
pub(crate) type RowTiles = Tiles<1>;

/// Squares of results, with all columns of taps.
pub(crate) type SquareTiles = Tiles<RESULTS>;

impl<const COLUMNS: usize> Tiles<COLUMNS> {
    /// Creates the tiles; `None` for other taps, and for steps other than one.
    pub(crate) fn new(correlation: &Correlation) -> Option<Self> {
        let Correlation {
            step,
            out_step,
            count,
            ..
        } = *correlation;
        let [_, rows, columns] = correlation.places();
        let low = three_from(rows)?;
        let left = match COLUMNS {
            1 => 0,
            _ => three_from(columns)?,
        };
        if step != [1; 3] || out_step != [1; 3] {
            return None;
        }
        let before = [(low, RESULTS), (left, COLUMNS)];
        let before = before.map(|(first, size)| first.rem_euclid(size as isize));
        let taps = || correlation.taps.iter();
        let mut lowest: Vec<Tap> = taps().filter(|tap| tap.offset[1] == low).copied().collect();
        if COLUMNS > 1 {
            lowest.sort_unstable_by_key(|tap| tap.offset);
        }
        let elements = lowest.iter().map(|lowest| {
            let [plane, _, column] = lowest.offset;
            std::array::from_fn(|row| {
                let offset = [plane, low + row as isize, column];
                let tap = taps().find(|tap| tap.offset == offset);
                tap.expect("taps are the product of their offsets in each dim")
                    .element
            })
        });
        let elements = elements.collect();
        let moved = |by: [isize; 2]| {
            move |tap: &Tap| {
                let [plane, row, column] = tap.offset;
                let offset = [plane, row - by[0], column - by[1]];
                Tap { offset, ..*tap }
            }
        };
        let flat = lowest
            .iter()
            .filter(|tap| COLUMNS == 1 || tap.offset[2] == left);
        let flat: Vec<Tap> = flat.map(moved([low, left])).collect();
        let tiles = (count[1] + before[0] as usize).div_ceil(RESULTS);
        let across = (count[2] + before[1] as usize).div_ceil(COLUMNS);
        let with_taps = |taps: Vec<Tap>, rows: usize, columns: usize| Correlation {
            taps,
            count: [count[0], rows, columns],
            ..correlation.clone()
        };
        Some(Self {
            before: before.map(|before| before as usize),
            elements,
            flat: with_taps(flat, tiles, across),
            source: with_taps(
                taps().map(moved(before)).collect(),
                RESULTS * tiles,
                COLUMNS * across,
            ),
        })
    }
}

/// First of three consecutive offsets.
fn three_from(mut offsets: Vec<isize>) -> Option<isize> {
    offsets.sort_unstable();
    match offsets[..] {
        [low, _, high] if high - low == 2 => Some(low),
        _ => None,
    }
}

/// Factors of a tile of a field, `[channel][plane][tile][product][column]`, in scratch next to the
/// cells of a channel.
#[derive(Debug)]
pub(crate) struct Factors {
    /// Layout of a channel's cells.
    cells: TileLayout,
    /// Layout of factors, whose rows are the products of all tiles.
    pub layout: TileLayout,
    tiles: usize,
    /// Channels and tiles per factor.
    held: [usize; 2],
}

impl Factors {
    /// Creates the layout of the factors of tiles, given their planes, tiles of rows, and columns;
    /// a factor holds numbers of `held` channels and tiles.
    pub(crate) fn new(
        rows: &RowTiles,
        [planes, tiles, columns]: Dims,
        held @ [_, together]: [usize; 2],
    ) -> Self {
        let products = PRODUCTS * tiles.div_ceil(together);
        let cells = [planes, RESULTS * tiles, columns];
        Self {
            cells: TileLayout::new(&rows.source, cells),
            layout: TileLayout::new(&rows.flat, [planes, products, columns]),
            tiles,
            held,
        }
    }

    /// Elements of the scratch for `channels` channels.
    pub(crate) fn len(&self, channels: usize) -> usize {
        let [together, _] = self.held;
        self.cells.len(together) + self.layout.len(channels.div_ceil(together))
    }

    /// Fills the scratch with the factors of channels of the tile at `origin`, and returns the
    /// factors.
    #[inline(always)]
    pub(crate) fn fill<'s, S: Simd, E: Element, P: Products<E>>(
        &self,
        simd: S,
        scratch: &'s mut [E],
        pieces: &Pieces<'_, P::Number>,
        batch: usize,
        channels: Range<usize>,
        [plane, tile, column]: Dims,
    ) -> &'s [E] {
        let [channels_held, tiles_held] = self.held;
        let (cells, factors) = scratch.split_at_mut(self.cells.len(channels_held));
        let origin = [plane, RESULTS * tile, column];
        let lines = || {
            let tiles = (0..self.tiles).step_by(tiles_held);
            let planes = 0..self.cells.planes();
            planes.flat_map(move |plane| tiles.clone().map(move |tile| (plane, tile)))
        };
        let row = |layout: &TileLayout| layout.line(0, 0, 1) - layout.line(0, 0, 0);
        let rows = [row(&self.cells), row(&self.layout)];
        let met = self.cells.met_by(pieces, origin);
        for (index, first) in channels.clone().step_by(channels_held).enumerate() {
            let held = first..channels.end.min(first + channels_held);
            let present = held.len();
            let cells = &mut *cells;
            (held.end..channels.end)
                .take(channels_held)
                .for_each(|next| self.cells.ask_for(&met, [batch, next], origin));
            self.cells
                .fill_from::<S, E, P>(simd, cells, &met, batch, held, origin);
            for (plane, tile) in lines() {
                let line = |channel, tile| self.cells.line(channel, plane, RESULTS * tile);
                let lines = [
                    line(0, tile),
                    line(channels_held - 1, tile + tiles_held - 1),
                ];
                let both =
                    P::NUMBERS == 2 && present == channels_held && tile + tiles_held <= self.tiles;
                let place = self
                    .layout
                    .line(index, plane, PRODUCTS * (tile / tiles_held));
                for column in (0..self.layout.width()).step_by(E::lanes::<S>()) {
                    // SAFETY: rows of factors are whole vectors, and cells have as many columns, or
                    // a margin after them.
                    unsafe {
                        let cells = cells.as_ptr().add(column);
                        let factors = factors.as_mut_ptr().add(place + column);
                        let first = transformed::<S, E>(simd, cells.add(lines[0]), rows[0]);
                        let second = match both {
                            true => transformed::<S, E>(simd, cells.add(lines[1]), rows[0]),
                            false => [E::splat(simd, E::default()); PRODUCTS],
                        };
                        for (k, numbers) in first.into_iter().zip(second).enumerate() {
                            let numbers = [numbers.0, numbers.1];
                            E::store::<S>(factors.add(k * rows[1]), P::join(simd, numbers));
                        }
                    }
                }
            }
        }
        factors
    }
}

/// Factors of a tile's rows at a vector of columns. A closure would not be inlined.
///
/// # Safety
/// A vector must be readable from every row.
#[inline(always)]
unsafe fn transformed<S: Simd, E: Element>(
    simd: S,
    cells: *const E,
    row: usize,
) -> [E::Vector<S>; PRODUCTS] {
    let mut x = [E::splat(simd, E::default()); PRODUCTS];
    for (k, x) in x.iter_mut().enumerate() {
        // SAFETY: guaranteed by the caller.
        *x = unsafe { E::load::<S>(cells.add(k * row)) };
    }
    of_source::<S, E>(simd, x)
}
