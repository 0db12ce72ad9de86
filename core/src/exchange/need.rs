//! Cells that ranks need, and the ranks that hold them.

use crate::mesh::unravel;
use crate::{IndexBox, Layout, Segment};

/// A box of global cells that a rank needs, and where they go in what it assembles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where the box begins in the assembled tensor.
    pub dst: Vec<usize>,
    /// The global cells.
    pub src: IndexBox,
    /// The dims in which the cells come in reverse order.
    pub flip: Vec<bool>,
}

/// All that one rank needs: the shape of the tensor that it assembles, and the pieces of it.
///
/// Pieces do not overlap where they go; cells that none covers get the plan's fill value. The same global cells may be
/// needed several times (a periodic wrap longer than the domain, a replicated edge).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The shape of the assembled tensor.
    pub shape: Vec<usize>,
    /// The pieces.
    pub pieces: Vec<Piece>,
}

impl Need {
    /// A need of exactly one box.
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

    /// The product of the runs of every dim.
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

    /// A need of nothing, assembled to a tensor of `shape` that holds the fill value only.
    pub fn nothing(shape: Vec<usize>) -> Self {
        Self {
            shape,
            pieces: Vec::new(),
        }
    }
}

/// Who holds the field before an exchange.
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
