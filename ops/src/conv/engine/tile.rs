//! Tiles: the part of a field that a task works on, copied to a buffer that stays in the cache.
//!
//! Copying costs a few per cent of the arithmetic and makes everything else simple: pieces, boundaries, padding, strides
//! and views end here; rows are as far apart as the cache likes; with a step in the last dim, columns are sorted by
//! residue, so that every kernel reads neighbours.

use std::ops::Range;

use super::geometry::{Correlation, Dims};
use crate::kernel::memory::View;

/// A box of a field: part of a shard, or cells from another rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a, E> {
    /// The first cell of the box in the field.
    pub at: Dims,
    /// The cells, `[batch, channels, depth, rows, columns]`.
    pub cells: View<'a, E, 5>,
}

/// The pieces of a field, none of which overlap, in the order of their first columns.
#[derive(Clone, Debug)]
pub(crate) struct Pieces<'a, E>(Vec<Piece<'a, E>>);

impl<'a, E> Pieces<'a, E> {
    /// A field of pieces; what none covers is zero.
    pub(crate) fn new(mut pieces: Vec<Piece<'a, E>>) -> Self {
        pieces.sort_by_key(|piece| piece.at[2]);
        Self(pieces)
    }

    /// A field in one piece.
    pub(crate) fn whole(cells: View<'a, E, 5>) -> Self {
        Self(vec![Piece { at: [0; 3], cells }])
    }
}

/// How a tile's source cells lie in the buffer: `[channel][plane][row][residue][column]`.
#[derive(Clone, Debug)]
pub(crate) struct TileLayout {
    /// Source cells of the largest tile, per dim.
    cells: Dims,
    /// The first source cell relative to `step · lattice index`, per dim.
    low: [isize; 3],
    step: Dims,
    /// Elements from one residue to the next.
    residue: usize,
    /// Elements from one row to the next.
    row: usize,
    plane: usize,
    channel: usize,
    /// The rows of a channel that taps meet: with a dilation, far fewer than there are.
    met: Vec<bool>,
}

/// A row's room is a multiple of this, plus [`SKEW`] where rows would meet in the same cache set.
const ALIGN: usize = 16;
pub(crate) const SKEW: usize = 16;
/// A strip of vectors may read so far beyond a row.
pub(crate) const MARGIN: usize = 256;

/// The extents of tiles, in results: rows of up to `strips` strips of `strip` columns, then grown where that saves most
/// copying, while they `fit` and leave `tasks` of them.
pub(crate) fn tile_extents(
    correlation: &Correlation,
    [strip, strips]: [usize; 2],
    tasks: usize,
    fits: impl Fn(&TileLayout, Dims) -> bool,
) -> Dims {
    let count = correlation.count;
    let tiles =
        |tile: Dims| -> usize { (0..3).map(|dim| count[dim].div_ceil(tile[dim])).product() };
    let good = |tile: Dims| fits(&TileLayout::new(correlation, tile), tile) && tiles(tile) >= tasks;
    // Cells copied per cell of its own.
    let overhead = |tile: Dims, dim: usize| {
        let own = tile[dim] * correlation.step[dim];
        let around = correlation
            .reach(dim)
            .len()
            .saturating_sub(correlation.step[dim]);
        (own + around) as f64 / own as f64
    };
    let mut tile = [1, 1, (strips * strip).min(count[2])];
    while tile[2] > strip && !good(tile) {
        tile[2] = (tile[2] / 2).next_multiple_of(strip);
    }
    loop {
        let grown = (0..3).filter(|&dim| tile[dim] < count[dim]).map(|dim| {
            let mut grown = tile;
            grown[dim] = (2 * tile[dim]).min(count[dim]);
            (overhead(tile, dim), grown)
        });
        let best = grown
            .filter(|(_, grown)| good(*grown))
            .max_by(|(a, _), (b, _)| a.total_cmp(b));
        match best {
            Some((_, grown)) => tile = grown,
            None => break,
        }
    }
    // As many tiles, but of even extents.
    std::array::from_fn(|dim| {
        let even = count[dim].div_ceil(count[dim].div_ceil(tile[dim]));
        let unit = if dim == 2 { strip } else { 1 };
        even.next_multiple_of(unit).min(count[dim])
    })
}

/// The first result of a tile, and how many it has in every dim, of a lattice of `count` cut into tiles of `extents`.
pub(crate) fn tile_box(index: usize, extents: Dims, count: Dims) -> [Dims; 2] {
    let tiles: Dims = std::array::from_fn(|dim| count[dim].div_ceil(extents[dim]));
    let place = [
        index / (tiles[1] * tiles[2]),
        index / tiles[2] % tiles[1],
        index % tiles[2],
    ];
    let at: Dims = std::array::from_fn(|dim| place[dim] * extents[dim]);
    [
        at,
        std::array::from_fn(|dim| extents[dim].min(count[dim] - at[dim])),
    ]
}

impl TileLayout {
    /// The layout of tiles of `lattice` results.
    pub(crate) fn new(correlation: &Correlation, lattice: Dims) -> Self {
        let reach: [_; 3] = std::array::from_fn(|dim| correlation.reach(dim));
        let step = correlation.step;
        let cells: Dims =
            std::array::from_fn(|dim| (lattice[dim] - 1) * step[dim] + reach[dim].len());
        let residue = cells[2].div_ceil(step[2]).next_multiple_of(ALIGN);
        let mut row = residue * step[2];
        if row.is_multiple_of(64) {
            row += SKEW;
        }
        let plane = row * cells[1];
        let mut met = vec![false; cells[0] * cells[1]];
        // Taps are a product: those of one column stand for all.
        let column = correlation.taps.first().map(|tap| tap.offset[2]);
        for tap in correlation
            .taps
            .iter()
            .filter(|tap| Some(tap.offset[2]) == column)
        {
            let line = |dim: usize, index: usize| {
                index * step[dim] + (tap.offset[dim] - reach[dim].start) as usize
            };
            for plane in 0..lattice[0] {
                for row in 0..lattice[1] {
                    met[line(0, plane) * cells[1] + line(1, row)] = true;
                }
            }
        }
        Self {
            met,
            cells,
            low: reach.map(|reach| reach.start),
            step,
            residue,
            row,
            plane,
            channel: plane * cells[0],
        }
    }

    /// Elements of a channel that are copied.
    pub(crate) fn copied(&self) -> usize {
        self.row * self.met.iter().filter(|met| **met).count()
    }

    /// Elements of a tile of so many channels.
    pub(crate) fn len(&self, channels: usize) -> usize {
        self.channel * channels + MARGIN
    }

    /// Where the source cell lies that a tap's offset meets at the tile's origin.
    pub(crate) fn offset(&self, offset: [isize; 3]) -> usize {
        let [d, h, w]: Dims = std::array::from_fn(|dim| (offset[dim] - self.low[dim]) as usize);
        let column = w % self.step[2] * self.residue + w / self.step[2];
        d * self.plane + h * self.row + column
    }

    /// The offset of every (channel, tap), channels first.
    pub(crate) fn offsets(&self, correlation: &Correlation, channels: usize) -> Vec<u32> {
        (0..channels)
            .flat_map(|channel| {
                let taps = correlation.taps.iter();
                taps.map(move |tap| {
                    let offset = channel * self.channel + self.offset(tap.offset);
                    u32::try_from(offset).expect("a tile of fewer elements")
                })
            })
            .collect()
    }

    /// Where a row of the lattice begins.
    pub(crate) fn row(&self, plane: usize, row: usize) -> usize {
        plane * self.step[0] * self.plane + row * self.step[1] * self.row
    }

    /// Copies what the lattice box `at`, of `lattice` results, meets; cells that no piece covers are zero.
    pub(crate) fn fill<E: Copy + Default>(
        &self,
        tile: &mut [E],
        pieces: &Pieces<'_, E>,
        batch: usize,
        channels: Range<usize>,
        at: Dims,
    ) {
        // The field's cells that the buffer has room for. A tile at the end of the lattice needs fewer, but then there
        // are no more, or they do no harm.
        let first: [isize; 3] =
            std::array::from_fn(|dim| (at[dim] * self.step[dim]) as isize + self.low[dim]);
        let covered = |piece: &Piece<'_, E>| {
            std::array::from_fn(|dim| {
                let (from, size) = (
                    piece.at[dim] as isize,
                    piece.cells.shape()[dim + 2] as isize,
                );
                let low = from.max(first[dim]) - first[dim];
                let high = (from + size - first[dim]).min(self.cells[dim] as isize);
                low as usize..high.max(low) as usize
            })
        };
        let met = pieces.0.iter().map(|piece| (piece, covered(piece)));
        let met: Vec<(&Piece<'_, E>, [Range<usize>; 3])> = met
            .filter(|(_, cells)| cells.iter().all(|range| !range.is_empty()))
            .collect();
        let (tile, margin) =
            tile[..self.len(channels.len())].split_at_mut(self.channel * channels.len());
        margin.fill(E::default());
        for (index, to) in tile.chunks_exact_mut(self.row).enumerate() {
            let (channel, line) = (
                index / (self.channel / self.row),
                index % (self.channel / self.row),
            );
            if !self.met[line] {
                continue;
            }
            let (plane, row) = (line / self.cells[1], line % self.cells[1]);
            if self.step[2] > 1 {
                to.fill(E::default());
            }
            let mut filled = 0;
            for (piece, [planes, rows, columns]) in &met {
                if !planes.contains(&plane) || !rows.contains(&row) {
                    continue;
                }
                let cell = |dim: usize, index: usize| {
                    (first[dim] + index as isize) as usize - piece.at[dim]
                };
                let source = piece.cells.at([
                    batch,
                    channels.start + channel,
                    cell(0, plane),
                    cell(1, row),
                    cell(2, columns.start),
                ]);
                if self.step[2] == 1 {
                    to[filled..columns.start].fill(E::default());
                }
                // SAFETY: the columns are within the piece, whose elements may be read.
                unsafe {
                    self.copy_row(
                        to,
                        columns.start,
                        source,
                        piece.cells.strides()[4],
                        columns.len(),
                    );
                }
                filled = columns.end;
            }
            if self.step[2] == 1 {
                to[filled..].fill(E::default());
            }
        }
    }

    /// Copies neighbouring cells of a row.
    ///
    /// # Safety
    /// `cells` elements, `stride` apart, must be readable from `source` on.
    #[inline(always)]
    unsafe fn copy_row<E: Copy>(
        &self,
        row: &mut [E],
        first: usize,
        source: *const E,
        stride: isize,
        cells: usize,
    ) {
        let step = self.step[2];
        if (step, stride) == (2, 1) {
            // In pairs, which compiles to shuffles.
            // SAFETY: the caller's; a tile is never part of a field.
            let mut cells = unsafe { std::slice::from_raw_parts(source, cells) };
            let (even, odd) = row.split_at_mut(self.residue);
            let mut column = first / 2;
            if first % 2 == 1
                && let Some((cell, rest)) = cells.split_first()
            {
                odd[column] = *cell;
                column += 1;
                cells = rest;
            }
            let (pairs, last) = cells.as_chunks();
            let to = even[column..].iter_mut().zip(&mut odd[column..]);
            for ((even, odd), [first, second]) in to.zip(pairs) {
                (*even, *odd) = (*first, *second);
            }
            if let [cell] = last {
                even[column + pairs.len()] = *cell;
            }
            return;
        }
        for skipped in 0..step.min(cells) {
            let column = first + skipped;
            let start = column % step * self.residue + column / step;
            let row = &mut row[start..start + (cells - skipped).div_ceil(step)];
            // SAFETY: the caller's.
            unsafe {
                let source = source.offset(skipped as isize * stride);
                copy_strided(row, source, step as isize * stride);
            }
        }
    }
}

/// Fills a slice with elements that are `stride` apart.
///
/// # Safety
/// So many elements must be readable from `source` on, and none of them lie in the slice.
#[inline(always)]
pub(crate) unsafe fn copy_strided<E: Copy>(to: &mut [E], source: *const E, stride: isize) {
    if stride == 1 {
        // SAFETY: the caller's.
        unsafe { source.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    } else {
        for (index, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *to = unsafe { *source.offset(index as isize * stride) };
        }
    }
}
