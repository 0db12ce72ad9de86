//! A field in pieces: parts of shards, boxes of other ranks, fields concatenated along channels.

use super::geometry::Dims;
use crate::kernel::memory::View;

/// A box of a field: part of a shard, or cells from another rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a, E> {
    /// First channel of the box in the field.
    pub channel: usize,
    /// First cell of the box in the field.
    pub at: Dims,
    /// The cells, `[batch, channels, depth, rows, columns]`.
    pub cells: View<'a, E>,
}

impl<E> Piece<'_, E> {
    /// Whether the box has cells of a channel.
    pub(super) fn holds(&self, channel: usize) -> bool {
        let [_, channels, ..] = self.cells.shape();
        (self.channel..self.channel + channels).contains(&channel)
    }
}

/// Pieces of a field, which do not overlap, sorted by their first columns.
#[derive(Clone, Debug)]
pub(crate) struct Pieces<'a, E>(pub(super) Vec<Piece<'a, E>>);

impl<'a, E> Pieces<'a, E> {
    /// Creates a field of pieces. Cells that no piece covers are zero.
    pub(crate) fn new(mut pieces: Vec<Piece<'a, E>>) -> Self {
        pieces.sort_by_key(|piece| piece.at[2]);
        Self(pieces)
    }

    /// Creates a field of one piece.
    pub(crate) fn whole(cells: View<'a, E>) -> Self {
        Self(vec![Piece {
            channel: 0,
            at: [0; 3],
            cells,
        }])
    }
}
