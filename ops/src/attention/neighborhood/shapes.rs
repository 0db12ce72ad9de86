//! Sizes of a rank's queries, in the form that kernels need.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;

use super::heads::piece;
use super::places::spatial;
use super::run::NeighborhoodRun;
use crate::attention::engine::rows::{Piece, Rows};
use crate::attention::engine::windows::{Results, Windows};
use crate::kernel::flex::Float;
use crate::kernel::memory::Shared;

/// Sizes of queries, in the form that kernels need.
pub(super) struct Shapes {
    batch: usize,
    cells: [usize; 3],
    heads: usize,
    shared: usize,
    shape: Vec<usize>,
}

impl Shapes {
    pub(super) fn new(run: &NeighborhoodRun, q: &FlexTensor, k: &FlexTensor) -> Self {
        let shape = q.shape().to_vec();
        let heads = shape[shape.len() - 2];
        let key_heads = k.shape()[shape.len() - 2];
        debug_assert_eq!(
            spatial(&shape),
            run.dims.each_ref().map(|dim| dim.queries.len())
        );
        Self {
            batch: shape[0],
            cells: spatial(&shape),
            heads,
            shared: heads.checked_div(key_heads).unwrap_or(1),
            shape,
        }
    }

    /// Number of queries of all heads.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.cells.iter().product::<usize>() * self.heads
    }

    /// Shape of queries with another width.
    pub(super) fn shape(&self, width: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        *shape.last_mut().expect("a width") = width;
        shape
    }

    fn sizes(&self, width: usize) -> [usize; 3] {
        [self.cells.iter().product(), self.heads, width]
    }

    pub(super) fn reading<'a, E>(&self, elements: &'a [E], width: usize) -> Rows<'a, E> {
        Rows::whole(self.cells, Piece::reading(elements, self.sizes(width), 0))
    }

    /// # Safety
    /// The elements must outlive the rows, and every task must write other queries.
    pub(super) unsafe fn writing<'a, E>(&self, elements: Shared<E>, width: usize) -> Rows<'a, E> {
        // SAFETY: guaranteed by the caller.
        Rows::whole(self.cells, unsafe {
            Piece::writing(elements, self.sizes(width), 0)
        })
    }

    pub(super) fn windows<'a, E: Float>(
        &self,
        run: &NeighborhoodRun,
        q: &'a FlexTensor,
        keys: Rows<'a, E>,
        values: Rows<'a, E>,
        results: Results<'a, E>,
    ) -> Windows<'a, E> {
        Windows {
            dims: run.dims.clone(),
            batch: self.batch,
            heads: self.heads,
            shared: self.shared,
            widths: run.widths,
            scale: run.scale,
            queries: Rows::whole(self.cells, piece(q)),
            keys,
            values,
            results,
        }
    }
}
