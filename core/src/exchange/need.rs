//! The cells that ranks need, and the owners of cells.

use std::ops::Range;

use crate::mesh::unravel;
use crate::region::{Segment, segments};
use crate::{Boundary, IndexBox, Layout};

/// Box of global cells that a rank needs, with its position in the tensor that the rank assembles;
/// see the example of [`Need`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The start of the box in the assembled tensor.
    pub dst: Vec<usize>,
    /// The global indices of the cells.
    pub src: IndexBox,
    /// Whether the cells are in reverse order, per dim.
    pub flip: Vec<bool>,
}

/// Need of one rank in an exchange: the shape of the tensor that it assembles, and its pieces.
///
/// Pieces do not overlap in the assembled tensor; cells without a piece get the plan's fill value.
/// The same global cells may be needed several times (a periodic wrap longer than the domain, a
/// replicated edge).
///
/// # Example
/// ```
/// use halocline_core::plan::{Need, segments};
/// use halocline_core::{Boundary, IndexBox};
///
/// let rows = segments(-1..4, 8, Boundary::Periodic, Boundary::Periodic);
/// let columns = segments(0..6, 6, Boundary::Zeros, Boundary::Zeros);
/// let need = Need::product(vec![5, 6], &[rows, columns]);
/// let boxes: Vec<String> = need.pieces.iter().map(|piece| piece.src.to_string()).collect();
/// assert_eq!(boxes, ["[7..8, 0..6]", "[0..4, 0..6]"]);
/// assert_eq!(Need::of(IndexBox::whole(&[2, 3])).shape, [2, 3]);
/// assert!(Need::nothing(vec![0, 6]).pieces.is_empty());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The shape of the assembled tensor.
    pub shape: Vec<usize>,
    /// The pieces.
    pub pieces: Vec<Piece>,
}

impl Need {
    /// Makes a need of one box.
    pub fn of(cells: IndexBox) -> Self {
        let shape = cells.shape();
        let pieces = if cells.volume() == 0 {
            Vec::new()
        } else {
            vec![Piece {
                dst: vec![0; shape.len()],
                flip: vec![false; shape.len()],
                src: cells,
            }]
        };
        Self { shape, pieces }
    }

    /// Makes a need from the product of the runs of every dim: one piece per combination of one run
    /// per dim.
    pub fn product(shape: Vec<usize>, dims: &[Vec<Segment>]) -> Self {
        let counts: Vec<usize> = dims.iter().map(Vec::len).collect();
        let pieces = (0..counts.iter().product())
            .map(|index| {
                let choice = unravel(index, &counts);
                let runs = || dims.iter().zip(&choice).map(|(runs, &i)| &runs[i]);
                Piece {
                    dst: runs().map(|run| run.dst).collect(),
                    src: IndexBox::new(runs().map(|run| run.src.clone()).collect()),
                    flip: runs().map(|run| run.flip).collect(),
                }
            })
            .collect();
        Self { shape, pieces }
    }

    /// Makes a need of a range of cells in every dim of a field of this shape. Ranges may reach
    /// beyond the ends of a dim, where its boundaries supply the values.
    ///
    /// Across a pole, rows come from the opposite meridian; shape and padding must be accepted by
    /// [`check_poles`](crate::plan::check_poles).
    ///
    /// # Example
    /// ```
    /// use halocline_core::Boundary;
    /// use halocline_core::plan::Need;
    ///
    /// let boundaries = [[Boundary::PoleEdge; 2], [Boundary::Periodic; 2]];
    /// let need = Need::within(&[4, 6], &[-1..2, 0..2], &boundaries);
    /// let boxes: Vec<String> = need.pieces.iter().map(|piece| piece.src.to_string()).collect();
    /// assert_eq!(boxes, ["[0..1, 3..5]", "[0..2, 0..2]"]);
    /// ```
    pub fn within(field: &[usize], ranges: &[Range<isize>], boundaries: &[[Boundary; 2]]) -> Self {
        let shape: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
        let runs = |dim: usize, range: Range<isize>| {
            let [low, high] = boundaries[dim];
            segments(range, field[dim], low, high)
        };
        // Whether the range of a dim reaches beyond a pole.
        let poles = |dim: &usize| {
            let beyond = ranges[*dim].start < 0 || ranges[*dim].end > field[*dim] as isize;
            beyond && boundaries[*dim].iter().any(|boundary| boundary.is_pole())
        };
        let Some(rows) = (0..ranges.len()).find(poles) else {
            let runs: Vec<_> = (0..)
                .zip(ranges)
                .map(|(dim, range)| runs(dim, range.clone()))
                .collect();
            return Self::product(shape, &runs);
        };
        let (range, size) = (&ranges[rows], field[rows] as isize);
        let within = |cell: isize| cell.clamp(range.start, range.end);
        let [low, high] = boundaries[rows];
        let parts = [
            (range.start..within(0), low.is_pole()),
            (within(0)..within(size), false),
            (within(size)..range.end, high.is_pole()),
        ];
        let mut need = Self::nothing(shape);
        for (part, across) in parts {
            let start = (part.start - range.start) as usize;
            let runs = (0..).zip(ranges).map(|(dim, range)| {
                if dim == rows {
                    let mut runs = runs(dim, part.clone());
                    runs.iter_mut().for_each(|run| run.dst += start);
                    runs
                } else if across && dim == rows + 1 {
                    let half = (field[dim] / 2) as isize;
                    let [low, high] = [Boundary::Periodic; 2];
                    segments(range.start + half..range.end + half, field[dim], low, high)
                } else {
                    runs(dim, range.clone())
                }
            });
            let runs: Vec<_> = runs.collect();
            need.pieces.extend(Self::product(Vec::new(), &runs).pieces);
        }
        need
    }

    /// Makes an empty need, assembled into a tensor of `shape` that holds only the fill value.
    pub fn nothing(shape: Vec<usize>) -> Self {
        Self {
            shape,
            pieces: Vec::new(),
        }
    }
}

/// Owners of the field before an exchange; see the example of
/// [`ExchangePlan`](super::ExchangePlan).
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The ranks of a layout.
    Layout(&'a Layout),
    /// One position holds the whole field of this shape.
    Single(usize, &'a [usize]),
}

impl Source<'_> {
    pub(super) fn local_box(&self, position: usize) -> IndexBox {
        match self {
            Self::Layout(layout) => layout.local_box(position),
            Self::Single(owner, shape) if *owner == position => IndexBox::whole(shape),
            Self::Single(_, shape) => IndexBox::new(vec![0..0; shape.len()]),
        }
    }

    pub(super) fn owners(&self, cells: &IndexBox, near: usize) -> Vec<(usize, IndexBox)> {
        match self {
            Self::Layout(layout) => layout.owners(cells, near),
            Self::Single(owner, _) => vec![(*owner, cells.clone())],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The half turn applies to the dim whose range reaches beyond its poles, not to another dim
    /// with poles.
    #[test]
    fn only_rows_beyond_a_pole_are_mirrored() {
        let pole = [Boundary::PoleEdge; 2];
        let boundaries = [pole, pole, [Boundary::Periodic; 2]];
        let need = Need::within(&[4, 6, 8], &[0..4, -1..6, 0..8], &boundaries);
        let boxes: Vec<String> = need
            .pieces
            .iter()
            .map(|piece| piece.src.to_string())
            .collect();
        assert_eq!(
            boxes,
            [
                "[0..4, 0..1, 4..8]",
                "[0..4, 0..1, 0..4]",
                "[0..4, 0..6, 0..8]"
            ]
        );
    }
}
