//! Tiles: parts of a field, each copied to a buffer that stays in the cache while a task works on
//! it.
//!
//! Copying costs a few percent of the arithmetic. A tile has no pieces, boundaries, padding,
//! strides or views; the distance between its rows suits the cache; with a step in the last dim,
//! columns are sorted by residue, so that kernels read adjacent elements.

use std::ops::Range;

use pulp::Simd;

use super::ahead::Stretch;
use super::cells::{clear_around, copy, copy_strided};
use super::geometry::{Correlation, Dims, reach, unravel};
use super::pieces::{Piece, Pieces};
use crate::kernel::memory::prefetch_run;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// A piece, and the cells of a tile that it covers.
pub(crate) type Met<'p, 'a, N> = (&'p Piece<'a, N>, [Range<usize>; 3]);

/// Layout of a tile's source cells in the buffer: `[channel][plane][row][residue][column]`.
#[derive(Clone, Debug)]
pub(crate) struct TileLayout {
    /// Source cells of the largest tile, per dim.
    cells: Dims,
    /// First source cell relative to `step · lattice index`, per dim.
    low: [isize; 3],
    step: Dims,
    /// Elements from one residue to the next.
    residue: usize,
    /// Elements from one row to the next.
    row: usize,
    plane: usize,
    channel: usize,
    /// Whether taps meet each plane, and each row of a plane: with a dilation, they meet few.
    met: [Vec<bool>; 2],
    /// Elements before the first row, so that the column of offset zero begins at a cache line.
    lead: usize,
}

/// Elements of a row are a multiple of this, plus [`SKEW`] where rows would fall into the same
/// cache sets.
const ALIGN: usize = 16;
pub(crate) const SKEW: usize = 16;
/// Size in bytes from which on no row is joined to a stretch, so that strips have about equal
/// shares.
const STRETCH: usize = 4096;
/// Maximum bytes of a tile, including the rows between dilated taps, which are not copied. It does
/// not limit bf16 tiles, whose channels are not divided into blocks.
pub(super) const SCRATCH_BYTES: usize = 2 << 20;
/// Elements beyond a row that a strip of vectors may read.
pub(crate) const MARGIN: usize = 256;

/// Extents of tiles, in results: rows of up to `strips` strips of `strip` columns, then doubled in
/// the dim where that saves the most copying, as long as they `fit` and at least `tasks` tiles
/// remain.
pub(crate) fn tile_extents(
    correlation: &Correlation,
    [strip, strips]: [usize; 2],
    tasks: usize,
    fits: impl Fn(&TileLayout, Dims) -> bool,
) -> Dims {
    let count = correlation.count;
    let good = |tile: Dims| {
        fits(&TileLayout::new(correlation, tile), tile) && tile_count(tile, count) >= tasks
    };
    // Copied cells for each cell that no other tile needs.
    let overhead = |tile: Dims, dim: usize| {
        let inner = tile[dim] * correlation.step[dim];
        let around = correlation
            .reach(dim)
            .len()
            .saturating_sub(correlation.step[dim]);
        (inner + around) as f64 / inner as f64
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
    // Same number of tiles, with even extents: no small tile at the end.
    std::array::from_fn(|dim| {
        let even = count[dim].div_ceil(count[dim].div_ceil(tile[dim]));
        let unit = if dim == 2 { strip } else { 1 };
        even.next_multiple_of(unit).min(count[dim])
    })
}

/// Reduces the rows of a tile if tasks are few, so that two or four threads get equal numbers of
/// tasks. A field of `count` results has `others` tasks for each tile.
pub(crate) fn balanced(tile: Dims, count: Dims, others: usize) -> Dims {
    const MANY: usize = 16;
    const THREADS: usize = 4;
    let with_rows = |rows: usize| [tile[0], rows, tile[2]];
    let good = |tile: &Dims| {
        let tasks = others * tile_count(*tile, count);
        tasks >= MANY || tasks.is_multiple_of(THREADS)
    };
    let mut lower = (1..=tile[1]).rev().map(with_rows);
    let found = lower.find(good).unwrap_or(tile);
    // The same number of tiles, of about equal height.
    with_rows(count[1].div_ceil(count[1].div_ceil(found[1])))
}

/// Number of tiles of `extents` in a lattice of `count`.
pub(crate) fn tile_count(extents: Dims, count: Dims) -> usize {
    (0..3)
        .map(|dim| count[dim].div_ceil(extents[dim]))
        .product()
}

/// First result of a tile and its size in every dim, in a lattice of `count` with tiles of
/// `extents`.
pub(crate) fn tile_box(index: usize, extents: Dims, count: Dims) -> [Dims; 2] {
    let tiles: Dims = std::array::from_fn(|dim| count[dim].div_ceil(extents[dim]));
    let place = unravel(index, tiles);
    let origin: Dims = std::array::from_fn(|dim| place[dim] * extents[dim]);
    [
        origin,
        std::array::from_fn(|dim| extents[dim].min(count[dim] - origin[dim])),
    ]
}

impl TileLayout {
    /// Layout of tiles of `lattice` results.
    pub(crate) fn new(correlation: &Correlation, lattice: Dims) -> Self {
        Self::of_taps(&correlation.places(), correlation.step, lattice)
    }

    /// Layout of the smallest tiles, with `columns` results. It is the same for any box of results:
    /// taps that meet no cell have their place, too.
    pub(super) fn smallest(correlation: &Correlation, columns: usize) -> Self {
        Self::of_taps(&correlation.offsets, correlation.step, [1, 1, columns])
    }

    /// Layout for taps with these offsets.
    fn of_taps(offsets: &[Vec<isize>; 3], step: Dims, lattice: Dims) -> Self {
        let reach = offsets.each_ref().map(|offsets| reach(offsets));
        let cells: Dims =
            std::array::from_fn(|dim| (lattice[dim] - 1) * step[dim] + reach[dim].len());
        let residue = cells[2].div_ceil(step[2]).next_multiple_of(ALIGN);
        let mut row = residue * step[2];
        if row.is_multiple_of(64) {
            row += SKEW;
        }
        let plane = row * cells[1];
        Self {
            // Taps are the product of their offsets in each dim, so dims can be marked separately.
            met: [0, 1].map(|dim| {
                let mut met = vec![false; cells[dim]];
                for offset in &offsets[dim] {
                    let first = (offset - reach[dim].start) as usize;
                    let lines = met[first..].iter_mut().step_by(step[dim]);
                    lines.take(lattice[dim]).for_each(|met| *met = true);
                }
                met
            }),
            cells,
            lead: match step[2] {
                1 => reach[2].start.rem_euclid(ALIGN as isize) as usize,
                _ => 0,
            },
            low: reach.map(|reach| reach.start),
            step,
            residue,
            row,
            plane,
            channel: plane * cells[0],
        }
    }

    /// Number of elements copied per channel.
    pub(crate) fn copied(&self) -> usize {
        let count = |met: &Vec<bool>| met.iter().filter(|met| **met).count();
        self.row * self.met.iter().map(count).product::<usize>()
    }

    /// Whether most rows of a channel are copied, because no taps lie far apart.
    pub(super) fn is_dense(&self) -> bool {
        2 * self.copied() > self.channel
    }

    /// Elements of a tile of this number of channels, with room for any lead.
    pub(crate) fn len(&self, channels: usize) -> usize {
        ALIGN + self.channel * channels + MARGIN
    }

    /// Position of the source cell that a tap with this offset meets at the tile's origin.
    pub(crate) fn offset(&self, offset: [isize; 3]) -> usize {
        let [d, h, w]: Dims = std::array::from_fn(|dim| (offset[dim] - self.low[dim]) as usize);
        let column = w % self.step[2] * self.residue + w / self.step[2];
        d * self.plane + h * self.row + column
    }

    /// Offset of every (channel, tap), channels first.
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

    /// Position of the first element of a row of the lattice.
    pub(crate) fn row(&self, plane: usize, row: usize) -> usize {
        self.lead + plane * self.step[0] * self.plane + row * self.step[1] * self.row
    }

    /// Elements from one channel to the next.
    pub(crate) fn channel(&self) -> usize {
        self.channel
    }

    /// Number of planes of a channel.
    pub(crate) fn planes(&self) -> usize {
        self.cells[0]
    }

    /// Position of the first element of a row of source cells, which are contiguous.
    pub(crate) fn line(&self, channel: usize, plane: usize, row: usize) -> usize {
        self.lead + channel * self.channel + plane * self.plane + row * self.row
    }

    /// Elements of a row that hold cells, as whole vectors.
    pub(crate) fn width(&self) -> usize {
        self.residue * self.step[2]
    }

    /// Cells of the tile at `origin` that a piece covers, if there are any.
    fn covered<N>(&self, piece: &Piece<'_, N>, origin: Dims) -> Option<[Range<usize>; 3]> {
        let covered = std::array::from_fn(|dim| {
            let first = self.first(origin, dim);
            let from = piece.at[dim] as isize - first;
            let size = piece.cells.shape()[dim + 2] as isize;
            let high = (from + size).min(self.cells[dim] as isize);
            let low = from.max(0);
            low as usize..high.max(low) as usize
        });
        (!covered.iter().any(Range::is_empty)).then_some(covered)
    }

    /// First cell of the field in the tile at `origin`. A tile at the end of the lattice has room
    /// for more cells than its taps meet; these are copied if the field has them, but not read.
    fn first(&self, origin: Dims, dim: usize) -> isize {
        (origin[dim] * self.step[dim]) as isize + self.low[dim]
    }

    /// Address of the cell of a piece that lies at `start` in the tile at `origin`.
    fn source<N>(
        &self,
        piece: &Piece<'_, N>,
        [batch, channel]: [usize; 2],
        origin: Dims,
        start: Dims,
    ) -> *const N {
        let cell =
            |dim: usize| (self.first(origin, dim) + start[dim] as isize) as usize - piece.at[dim];
        let channel = channel - piece.channel;
        piece.cells.at([batch, channel, cell(0), cell(1), cell(2)])
    }

    /// Copies the cells that taps meet in the tile at `origin`; cells that no piece covers are
    /// zero.
    #[inline(always)]
    pub(crate) fn fill<S: Simd, E: Element, P: Products<E>>(
        &self,
        simd: S,
        tile: &mut [E],
        pieces: &Pieces<'_, P::Number>,
        batch: usize,
        channels: Range<usize>,
        origin: Dims,
    ) {
        let met = self.met_by(pieces, origin);
        let margin = self.lead + self.channel * channels.len();
        tile[margin..self.len(channels.len())].fill(E::default());
        self.fill_from::<S, E, P>(simd, tile, &met, batch, channels, origin);
    }

    /// Prefetches the cells of a channel that [`fill_from`](Self::fill_from) reads.
    #[inline(always)]
    pub(crate) fn ask_for<N>(&self, met: &[Met<'_, '_, N>], place: [usize; 2], origin: Dims) {
        for (piece, [planes, rows, columns]) in met {
            let [.., down, across] = piece.cells.strides();
            if across != 1 || !piece.holds(place[1]) {
                continue;
            }
            for plane in planes.clone() {
                let start = [plane, rows.start, columns.start];
                let mut row = self.source(piece, place, origin, start);
                for _ in rows.clone() {
                    prefetch_run(row, columns.len());
                    row = row.wrapping_offset(down);
                }
            }
        }
    }

    /// Pieces that the tile at `origin` meets, each with the cells of the tile that it covers.
    pub(crate) fn met_by<'p, 'a, N>(
        &self,
        pieces: &'p Pieces<'a, N>,
        origin: Dims,
    ) -> Vec<Met<'p, 'a, N>> {
        let met = pieces.0.iter();
        met.filter_map(|piece| Some((piece, self.covered(piece, origin)?)))
            .collect()
    }

    /// [`fill`](Self::fill) from the pieces that the tile meets, except for the margin.
    #[inline(always)]
    pub(crate) fn fill_from<S: Simd, E: Element, P: Products<E>>(
        &self,
        simd: S,
        tile: &mut [E],
        met: &[Met<'_, '_, P::Number>],
        batch: usize,
        channels: Range<usize>,
        origin: Dims,
    ) {
        let tile = &mut tile[self.lead..][..self.channel * channels.len()];
        // Clearing the whole tile first costs 6 % with few channels. With one piece, only the edges
        // of its rows, and rows and planes without it, are cleared; with several, whole planes.
        for (index, lines) in tile.chunks_exact_mut(self.plane).enumerate() {
            let (channel, plane) = (
                channels.start + index / self.cells[0],
                index % self.cells[0],
            );
            let [planes, wanted] = &self.met;
            if !planes[plane] {
                continue;
            }
            let of_channel = || met.iter().filter(|(piece, _)| piece.holds(channel));
            let alone = self.step[2] == 1 && of_channel().count() == 1;
            let here = || of_channel().filter(|(_, [planes, ..])| planes.contains(&plane));
            if !alone || here().next().is_none() {
                lines.fill(E::default());
            }
            for (piece, [_, rows, columns]) in here() {
                let start = [plane, rows.start, columns.start];
                let mut source = self.source(piece, [batch, channel], origin, start);
                let [.., down, across] = piece.cells.strides();
                if alone {
                    lines[..rows.start * self.row].fill(E::default());
                    lines[rows.end * self.row..].fill(E::default());
                }
                let lines = lines.chunks_exact_mut(self.row).zip(wanted);
                for (line, wanted) in lines.take(rows.end).skip(rows.start) {
                    if *wanted {
                        if alone {
                            clear_around(simd, line, columns);
                        }
                        // SAFETY: the columns are within the piece, whose elements may be read.
                        unsafe {
                            if self.step[2] == 1 && across == 1 {
                                copy::<S, E, P>(&mut line[columns.clone()], source);
                            } else {
                                let first = columns.start;
                                self.copy_row::<E, P>(line, first, source, across, columns.len());
                            }
                        }
                    }
                    source = source.wrapping_offset(down);
                }
            }
        }
    }

    /// Memory that [`fill`](Self::fill) reads, to be prefetched.
    pub(crate) fn stretches<N>(
        &self,
        pieces: &Pieces<'_, N>,
        batch: usize,
        channels: Range<usize>,
        origin: Dims,
    ) -> Vec<Stretch> {
        let mut stretches = Vec::new();
        for piece in &pieces.0 {
            let Some([planes, rows, columns]) = self.covered(piece, origin) else {
                continue;
            };
            let [.., down, across] = piece.cells.strides();
            if across != 1 {
                continue;
            }
            // Rows without a gap between them are joined.
            let row = columns.len() * size_of::<N>();
            let joined = down == columns.len() as isize;
            let lines = if joined {
                STRETCH.div_ceil(row).min(rows.len())
            } else {
                1
            };
            let bytes = lines * row;
            for channel in channels.clone().filter(|channel| piece.holds(*channel)) {
                for plane in planes.clone() {
                    let start = [plane, rows.start, columns.start];
                    let source = self.source(piece, [batch, channel], origin, start);
                    let starts = (0..rows.len()).step_by(lines);
                    stretches.extend(starts.map(|row| Stretch {
                        start: source.wrapping_offset(row as isize * down).cast(),
                        bytes,
                    }));
                }
            }
        }
        stretches
    }

    /// Copies adjacent cells of a row.
    ///
    /// # Safety
    /// `cells` elements, `stride` apart, must be readable from `source` on.
    #[inline(always)]
    unsafe fn copy_row<E: Element, P: Products<E>>(
        &self,
        row: &mut [E],
        first: usize,
        source: *const P::Number,
        stride: isize,
        cells: usize,
    ) {
        let step = self.step[2];
        if (step, stride) == (2, 1) {
            // A loop over pairs compiles to shuffles.
            // SAFETY: guaranteed by the caller; a tile does not overlap a field.
            let mut cells = unsafe { std::slice::from_raw_parts(source, cells) };
            let (even, odd) = row.split_at_mut(self.residue);
            let mut column = first / 2;
            if first % 2 == 1
                && let Some((cell, rest)) = cells.split_first()
            {
                odd[column] = P::widened(*cell);
                column += 1;
                cells = rest;
            }
            let (pairs, last) = cells.as_chunks();
            let places = even[column..].iter_mut().zip(&mut odd[column..]);
            for ((even, odd), [first, second]) in places.zip(pairs) {
                (*even, *odd) = (P::widened(*first), P::widened(*second));
            }
            if let [cell] = last {
                even[column + pairs.len()] = P::widened(*cell);
            }
            return;
        }
        for skipped in 0..step.min(cells) {
            let column = first + skipped;
            let start = column % step * self.residue + column / step;
            let row = &mut row[start..start + (cells - skipped).div_ceil(step)];
            // SAFETY: guaranteed by the caller.
            unsafe {
                let source = source.offset(skipped as isize * stride);
                copy_strided::<E, P>(row, source, step as isize * stride);
            }
        }
    }
}
