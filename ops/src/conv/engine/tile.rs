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
}

/// A row's room is a multiple of this, plus [`SKEW`], so that rows do not meet in the same cache set.
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
        Self {
            cells,
            low: reach.map(|reach| reach.start),
            step,
            residue,
            row,
            plane,
            channel: plane * cells[0],
        }
    }

    /// Elements of a channel.
    pub(crate) fn channel(&self) -> usize {
        self.channel
    }

    /// Elements of a tile of so many channels.
    pub(crate) fn len(&self, channels: usize) -> usize {
        self.channel * channels + MARGIN
    }

    /// The offset of every (channel, tap), channels first.
    pub(crate) fn offsets(&self, correlation: &Correlation, channels: usize) -> Vec<u32> {
        let of = |offset: [isize; 3]| {
            let [d, h, w]: Dims = std::array::from_fn(|dim| (offset[dim] - self.low[dim]) as usize);
            let column = w % self.step[2] * self.residue + w / self.step[2];
            d * self.plane + h * self.row + column
        };
        (0..channels)
            .flat_map(|channel| {
                let taps = correlation.taps.iter();
                taps.map(move |tap| (channel * self.channel + of(tap.offset)) as u32)
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
        pieces: &[Piece<'_, E>],
        batch: usize,
        channels: Range<usize>,
        at: Dims,
    ) {
        // The field's cells that the buffer has room for. A tile at the end of the lattice needs fewer, but then there
        // are no more, or they do no harm.
        let first: [isize; 3] =
            std::array::from_fn(|dim| (at[dim] * self.step[dim]) as isize + self.low[dim]);
        let (tile, margin) =
            tile[..self.len(channels.len())].split_at_mut(self.channel * channels.len());
        margin.fill(E::default());
        let covered = |piece: &Piece<'_, E>, dim: usize| {
            let (from, size) = (
                piece.at[dim] as isize,
                piece.cells.shape()[dim + 2] as isize,
            );
            let low = from.max(first[dim]);
            let high = (from + size).min(first[dim] + self.cells[dim] as isize);
            low..high.max(low)
        };
        let whole =
            |piece: &Piece<'_, E>| (0..3).all(|dim| covered(piece, dim).len() == self.cells[dim]);
        let padded = self.row != self.cells[2];
        if !pieces.iter().any(whole) || (padded && self.step[2] > 1) {
            tile.fill(E::default());
        } else if padded {
            for row in tile.chunks_exact_mut(self.row) {
                row[self.cells[2]..].fill(E::default());
            }
        }
        for piece in pieces {
            let [planes, rows, columns] = std::array::from_fn(|dim| covered(piece, dim));
            if columns.is_empty() {
                continue;
            }
            let stride = piece.cells.strides()[4];
            let to_column = (columns.start - first[2]) as usize;
            for (c, channel) in channels.clone().enumerate() {
                for plane in planes.clone() {
                    for row in rows.clone() {
                        let source = piece.cells.at([
                            batch,
                            channel,
                            (plane - piece.at[0] as isize) as usize,
                            (row - piece.at[1] as isize) as usize,
                            (columns.start - piece.at[2] as isize) as usize,
                        ]);
                        let start = c * self.channel
                            + (plane - first[0]) as usize * self.plane
                            + (row - first[1]) as usize * self.row;
                        let to = &mut tile[start..start + self.row];
                        // SAFETY: the columns are within the piece, whose elements may be read.
                        unsafe { self.copy_row(to, to_column, source, stride, columns.len()) };
                    }
                }
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
