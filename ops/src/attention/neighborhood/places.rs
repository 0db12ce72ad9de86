//! Positions of the keys and values that a rank assembles from its own and from boxes of others;
//! nothing is copied.

use std::ops::Range;

use halocline_core::IndexBox;
use halocline_core::plan::{ExchangePlan, Transfer};

/// Position of a box of the assembled field: in a piece of this shape, from a cell on, with some
/// dims reversed.
pub(super) struct Placed {
    piece: u32,
    dst: [Range<usize>; 3],
    start: [usize; 3],
    flip: [bool; 3],
    shape: [usize; 3],
}

impl Placed {
    /// Positions in the piece, in one dim, of the cells of the box.
    fn cells(&self, dim: usize) -> impl Iterator<Item = usize> + Clone {
        let (count, first, flip) = (self.dst[dim].len(), self.start[dim], self.flip[dim]);
        (0..count).map(move |cell| first + if flip { count - 1 - cell } else { cell })
    }
}

/// Values of the spatial dims of `[batch, *spatial, heads, width]`, preceded by `one` where there
/// are fewer than three.
fn three<T: Clone>(values: &[T], one: T) -> [T; 3] {
    let mut three = [one.clone(), one.clone(), one];
    let count = values.len() - 3;
    three[3 - count..].clone_from_slice(&values[1..=count]);
    three
}

/// Spatial extents of `[batch, *spatial, heads, width]`, as three.
pub(super) fn spatial(shape: &[usize]) -> [usize; 3] {
    three(shape, 1)
}

/// Spatial ranges of a box, as three.
pub(super) fn three_ranges(cells: &IndexBox) -> [Range<usize>; 3] {
    three(cells.ranges(), 0..1)
}

/// Replaces the range of a box in the last dim.
pub(super) fn with_width(cells: &IndexBox, width: Range<usize>) -> IndexBox {
    cells.with_range(cells.ranges().len() - 1, width)
}

/// For every cell of the assembled field, its piece and its index there.
pub(super) fn places(shape: [usize; 3], boxes: &[Placed]) -> Vec<[u32; 2]> {
    let mut places = vec![[0; 2]; shape.iter().product()];
    for placed in boxes {
        let (dst, from) = (&placed.dst, placed.shape);
        for (to_plane, plane) in dst[0].clone().zip(placed.cells(0)) {
            for (to_row, row) in dst[1].clone().zip(placed.cells(1)) {
                let to = (to_plane * shape[1] + to_row) * shape[2] + dst[2].start;
                let first = (plane * from[1] + row) * from[2];
                for (place, column) in places[to..].iter_mut().zip(placed.cells(2)) {
                    *place = [placed.piece, (first + column) as u32];
                }
            }
        }
    }
    places
}

/// Splits the boxes that stay on this rank into the largest and the others.
pub(super) fn own_copies(plan: &ExchangePlan) -> (Option<&Transfer>, Vec<&Transfer>) {
    let mut copies: Vec<&Transfer> = plan.copies.iter().collect();
    copies.sort_by_key(|copy| std::cmp::Reverse(copy.src.volume()));
    let mut copies = copies.into_iter();
    (copies.next(), copies.collect())
}

/// Spatial dims that a transfer reverses, as three.
pub(super) fn flips(transfer: &Transfer) -> [bool; 3] {
    three(&transfer.flip, false)
}

/// A box at its place on its owner, in a tensor of this shape.
pub(super) fn of_owner(piece: usize, transfer: &Transfer, shape: [usize; 3]) -> Placed {
    Placed {
        piece: piece as u32,
        dst: three_ranges(&transfer.dst),
        start: three_ranges(&transfer.src).map(|range| range.start),
        flip: flips(transfer),
        shape,
    }
}

/// A box that is a tensor by itself: oriented as on its owner, or as where it is needed.
pub(super) fn alone(piece: usize, transfer: &Transfer, flip: [bool; 3]) -> Placed {
    Placed {
        piece: piece as u32,
        dst: three_ranges(&transfer.dst),
        start: [0; 3],
        flip,
        shape: three_ranges(&transfer.src).map(|range| range.len()),
    }
}
