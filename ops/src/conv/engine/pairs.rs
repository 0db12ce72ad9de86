//! Tiles of pairs: of two channels, or of neighbors in a row.

use std::ops::Range;

use pulp::Simd;

use super::cells::join;
use super::geometry::Dims;
use super::pieces::Pieces;
use super::tile::TileLayout;
use crate::kernel::interleave::deinterleave;
use crate::kernel::products::{Products, store_parts};
use crate::kernel::simd::Element;

impl TileLayout {
    /// [`fill`](Self::fill) with pairs of two channels: the first parts of all numbers, then the
    /// other parts. The scratch has room for `held` of these, and after them for two channels.
    #[inline(always)]
    pub(crate) fn fill_pairs<S: Simd, E: Element, P: Products<E>>(
        &self,
        simd: S,
        (scratch, held): (&mut [E], usize),
        pieces: &Pieces<'_, P::Number>,
        batch: usize,
        channels: Range<usize>,
        origin: Dims,
    ) {
        let (tile, cells) = scratch.split_at_mut(self.len(held));
        let met = self.met_by(pieces, origin);
        let of_part = held / P::PARTS.max(1) * self.channel();
        let filled = self.channel() * channels.len().div_ceil(2);
        let tile = &mut tile[self.line(0, 0, 0)..];
        for part in 1..=P::PARTS {
            let end = if part < P::PARTS {
                part * of_part
            } else {
                tile.len()
            };
            tile[(part - 1) * of_part + filled..end].fill(E::default());
        }
        let places = (0..filled).step_by(self.channel());
        for (first, place) in channels.clone().step_by(2).zip(places) {
            let held = first..channels.end.min(first + 2);
            let alone = held.len() < 2;
            self.fill_from::<S, E, P>(simd, cells, &met, batch, held, origin);
            let (first, second) = cells[self.line(0, 0, 0)..].split_at_mut(self.channel());
            if alone {
                second[..self.channel()].fill(E::default());
            }
            // SAFETY: all have the cells of a channel, which are whole vectors.
            unsafe {
                let to = (tile[place..].as_mut_ptr(), of_part);
                let cells = [first.as_ptr(), second.as_ptr()];
                join::<S, E, P>(simd, to, cells, self.channel());
            }
        }
    }

    /// [`fill`](Self::fill) with bf16 numbers, one channel at a time, through its `cells`: all
    /// first parts, then, an even number `part` of numbers later, the others.
    ///
    /// # Safety
    /// There must be room for all channels, with [`len`](Self::len) numbers in each part.
    #[inline(always)]
    pub(crate) unsafe fn fill_halves<S: Simd, E: Element, P: Products<E>>(
        &self,
        simd: S,
        (tile, part, cells): (*mut u16, usize, &mut [E]),
        pieces: &Pieces<'_, P::Number>,
        batch: usize,
        channels: Range<usize>,
        origin: Dims,
    ) {
        let (met, lanes) = (self.met_by(pieces, origin), E::lanes::<S>());
        for (index, channel) in channels.enumerate() {
            self.fill_from::<S, E, P>(simd, cells, &met, batch, channel..channel + 1, origin);
            let tile = tile.wrapping_add(self.line(0, 0, 0) + index * self.channel());
            let cells = cells[self.line(0, 0, 0)..].as_ptr();
            // The second vector may be the first of the next channel, which is written later, or
            // lie in the margin.
            for place in (0..self.channel()).step_by(2 * lanes) {
                // SAFETY: guaranteed by the caller; channels are whole vectors, with a margin after
                // the last one.
                unsafe {
                    let cells = cells.add(place);
                    let cells = [E::load::<S>(cells), E::load::<S>(cells.add(lanes))];
                    let (pairs, to) = (deinterleave::<S, E>(cells), tile.add(place).cast());
                    store_parts::<S, E, P>(simd, pairs, to, part / 2);
                }
            }
        }
    }
}
