//! Filling of tiles with the cells of a field.

use std::ops::Range;

use pulp::Simd;

use super::geometry::Dims;
use super::tile::{Piece, Pieces, TileLayout};
use crate::kernel::memory::prefetch_run;
use crate::kernel::simd::Element;

/// Most cells of a row that are copied one by one.
const FEW: usize = 4;

/// The pieces that cover cells of a tile, with these cells.
pub(crate) struct Met<'p, 'a, E> {
    layout: &'p TileLayout,
    pieces: Vec<(&'p Piece<'a, E>, [Range<usize>; 3])>,
    origin: Dims,
}

impl<E: Element> Met<'_, '_, E> {
    /// Copies the cells that taps meet; cells that no piece covers are zero.
    #[inline(always)]
    pub(crate) fn fill<S: Simd>(
        &self,
        simd: S,
        tile: &mut [E],
        batch: usize,
        channels: Range<usize>,
    ) {
        let Self {
            layout,
            pieces,
            origin,
        } = self;
        let tile = &mut tile[layout.lead..][..layout.channel * channels.len()];
        // Clearing the whole tile first costs 6 % with few channels. With one piece, only the edges of its rows, and rows and
        // planes without it, are cleared; where several cover all cells, what is behind these; else the whole planes.
        let alone = pieces.len() == 1 && layout.step[2] == 1;
        let volume = |cells: &[Range<usize>; 3]| cells.iter().map(Range::len).product::<usize>();
        let covered: usize = pieces.iter().map(|(_, cells)| volume(cells)).sum();
        let whole = covered == layout.cells.iter().product::<usize>() && layout.step[2] == 1;
        for (index, lines) in tile.chunks_exact_mut(layout.plane).enumerate() {
            let (channel, plane) = (
                channels.start + index / layout.cells[0],
                index % layout.cells[0],
            );
            let [planes, wanted] = &layout.met;
            if !planes[plane] {
                continue;
            }
            let covers = |planes: &Range<usize>| planes.contains(&plane);
            if whole && !alone {
                for line in lines.chunks_exact_mut(layout.row) {
                    clear_around(simd, line, &(0..layout.cells[2]));
                }
            } else if !alone || !covers(&pieces[0].1[0]) {
                lines.fill(E::default());
            }
            for (piece, [_, rows, columns]) in
                pieces.iter().filter(|(_, [planes, ..])| covers(planes))
            {
                let start = [plane, rows.start, columns.start];
                let mut source = layout.source(piece, [batch, channel], *origin, start);
                let [.., down, across] = piece.cells.strides();
                if alone {
                    lines[..rows.start * layout.row].fill(E::default());
                    lines[rows.end * layout.row..].fill(E::default());
                }
                let lines = lines.chunks_exact_mut(layout.row).zip(wanted);
                for (line, wanted) in lines.take(rows.end).skip(rows.start) {
                    if *wanted {
                        if alone {
                            clear_around(simd, line, columns);
                        }
                        // SAFETY: the columns are within the piece, whose elements may be read.
                        unsafe {
                            if layout.step[2] == 1 && across == 1 {
                                copy(simd, &mut line[columns.clone()], source);
                            } else {
                                layout.copy_row(line, columns.start, source, across, columns.len());
                            }
                        }
                    }
                    source = source.wrapping_offset(down);
                }
            }
        }
    }

    /// Prefetches the cells of a channel.
    pub(crate) fn prefetch(&self, batch: usize, channel: usize) {
        for (piece, [planes, rows, columns]) in &self.pieces {
            let [.., down, across] = piece.cells.strides();
            if across != 1 {
                continue;
            }
            for plane in planes.clone() {
                let start = [plane, rows.start, columns.start];
                let source = (self.layout).source(piece, [batch, channel], self.origin, start);
                for row in 0..rows.len() {
                    prefetch_run(source.wrapping_offset(row as isize * down), columns.len());
                }
            }
        }
    }
}

impl TileLayout {
    /// The pieces that cover cells of the tile at `origin`.
    pub(crate) fn met<'p, 'a, E>(
        &'p self,
        pieces: &'p Pieces<'a, E>,
        origin: Dims,
    ) -> Met<'p, 'a, E> {
        let met = pieces.0.iter();
        let met = met.filter_map(|piece| Some((piece, self.covered(piece, origin)?)));
        Met {
            layout: self,
            pieces: met.collect(),
            origin,
        }
    }

    /// Copies the cells that taps meet in the tile at `origin`; cells that no piece covers are
    /// zero, and so is what strips of vectors may read beyond the last row.
    #[inline(always)]
    pub(crate) fn fill<S: Simd, E: Element>(
        &self,
        simd: S,
        tile: &mut [E],
        pieces: &Pieces<'_, E>,
        batch: usize,
        channels: Range<usize>,
        origin: Dims,
    ) {
        tile[self.lead + self.channel * channels.len()..self.len(channels.len())]
            .fill(E::default());
        self.met(pieces, origin).fill(simd, tile, batch, channels);
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
            // A loop over pairs compiles to shuffles.
            // SAFETY: the caller's; a tile does not overlap a field.
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
            let places = even[column..].iter_mut().zip(&mut odd[column..]);
            for ((even, odd), [first, second]) in places.zip(pairs) {
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

/// Clears a row outside of `columns`, and perhaps some of these.
#[inline(always)]
fn clear_around<S: Simd, E: Element>(simd: S, row: &mut [E], columns: &Range<usize>) {
    let (lanes, zero) = (E::lanes::<S>(), E::splat(simd, E::default()));
    let last = row.len() - lanes;
    let row = row.as_mut_ptr();
    // SAFETY: rows are whole vectors long, and these begin early enough to end with the row.
    unsafe {
        for column in (0..columns.start).step_by(lanes) {
            E::store::<S>(row.add(column), zero);
        }
        for column in (columns.end..last + lanes).step_by(lanes) {
            E::store::<S>(row.add(column.min(last)), zero);
        }
    }
}

/// Fills a slice with neighbouring elements.
///
/// # Safety
/// As many elements must be readable from `source` on, outside of the slice.
#[inline(always)]
unsafe fn copy<S: Simd, E: Element>(simd: S, cells: &mut [E], source: *const E) {
    let lanes = E::lanes::<S>();
    // SAFETY: the caller's; the last vector begins early enough to end with the slice.
    unsafe {
        if cells.len() <= FEW {
            // `load_part` is a call.
            for (column, cell) in cells.iter_mut().enumerate() {
                *cell = *source.add(column);
            }
            return;
        }
        let Some(last) = cells.len().checked_sub(lanes) else {
            let source = std::slice::from_raw_parts(source, cells.len());
            let vector = E::load_part(simd, source, E::splat(simd, E::default()));
            return E::store_part(simd, cells, vector);
        };
        let cells = cells.as_mut_ptr();
        E::store::<S>(cells, E::load::<S>(source));
        // From the next multiple of a vector's bytes on, so that stores do not cross cache lines.
        let vector = lanes * size_of::<E>();
        let mut column = (vector - cells.addr() % vector) / size_of::<E>();
        while column < last {
            E::store::<S>(cells.add(column), E::load::<S>(source.add(column)));
            column += lanes;
        }
        E::store::<S>(cells.add(last), E::load::<S>(source.add(last)));
    }
}

/// Fills a slice with elements that are `stride` apart.
///
/// # Safety
/// As many elements, `stride` apart, must be readable from `source` on, outside of the slice.
#[inline(always)]
pub(crate) unsafe fn copy_strided<E: Copy>(cells: &mut [E], source: *const E, stride: isize) {
    if stride == 1 {
        // SAFETY: the caller's.
        unsafe { source.copy_to_nonoverlapping(cells.as_mut_ptr(), cells.len()) };
    } else {
        for (index, cell) in cells.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *cell = unsafe { *source.offset(index as isize * stride) };
        }
    }
}
