//! Positions of the keys and values that a rank assembles from its own and from boxes of others;
//! nothing is copied.

use std::ops::Range;

use halocline_core::{ExchangePlan, IndexBox, Transfer};

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

/// Spatial extents of `[batch, *spatial, heads, width]`, as three.
pub(super) fn spatial(shape: &[usize]) -> [usize; 3] {
    let mut dims = [1; 3];
    let count = shape.len() - 3;
    dims[3 - count..].copy_from_slice(&shape[1..=count]);
    dims
}

/// Spatial ranges of a box, as three.
pub(super) fn three_ranges(cells: &IndexBox) -> [Range<usize>; 3] {
    let mut ranges = [const { 0..1 }; 3];
    let count = cells.ranges().len() - 3;
    ranges[3 - count..].clone_from_slice(&cells.ranges()[1..=count]);
    ranges
}

/// Replaces the range of a box in the last dim.
pub(super) fn with_width(cells: &IndexBox, width: Range<usize>) -> IndexBox {
    let mut ranges = cells.ranges().to_vec();
    *ranges.last_mut().expect("a width") = width;
    IndexBox::new(ranges)
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
    match copies.split_first() {
        Some((first, rest)) => (Some(first), rest.to_vec()),
        None => (None, Vec::new()),
    }
}

/// Spatial dims that a transfer reverses, as three.
pub(super) fn flips(transfer: &Transfer) -> [bool; 3] {
    let mut flips = [false; 3];
    let count = transfer.flip.len() - 3;
    flips[3 - count..].copy_from_slice(&transfer.flip[1..=count]);
    flips
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
