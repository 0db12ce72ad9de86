//! Neighborhood attention on one rank: sizes, and the sources of keys and values.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchTensor, TensorMetadata};
use halocline_core::ops::{Boxes, Exchange};
use halocline_core::plan::{ExchangePlan, Transfer};

use super::heads::piece;
use super::places::{alone, flips, of_owner, places, spatial, three_ranges};
use crate::attention::engine::rows::{Piece, Rows};
use crate::attention::engine::tiles::Dim;
use crate::kernel::flex::{self, Float};

/// Neighborhood attention on one rank.
#[derive(Clone, Debug)]
pub(crate) struct NeighborhoodRun {
    pub dims: [Dim; 3],
    /// Exchange that delivers the keys and values that queries reach; `None` if they are the shard.
    pub exchange: Option<Exchange>,
    /// Elements per head of queries and keys, and of values.
    pub widths: [usize; 2],
    pub scale: f64,
    /// Whether the result has the logarithms of the sums of exponentials as its last column.
    pub with_lse: bool,
}

/// Values that the backward pass needs in addition to queries, keys and values.
pub(crate) struct Saved {
    /// Boxes of keys and values received from other ranks, in the plan's order.
    pub received: Vec<DispatchTensor>,
    pub output: DispatchTensor,
    /// The logarithm of the sum of exponentials of every query and head.
    pub lse: DispatchTensor,
}

impl NeighborhoodRun {
    pub(super) fn plan(&self) -> Option<&ExchangePlan> {
        self.exchange
            .as_ref()
            .map(|exchange| &*exchange.forward.plan)
    }

    pub(super) fn received(&self) -> impl Iterator<Item = &Transfer> {
        let plan = self.plan().into_iter();
        plan.flat_map(|plan| &plan.receives)
            .flat_map(|(_, transfers)| transfers)
    }

    /// Rows of the keys, or values, that queries reach, read in place: `skip` elements into each
    /// head of a box.
    pub(super) fn rows<'a, E: Float>(
        &self,
        own: &'a FlexTensor,
        boxes: &'a [FlexTensor],
        skip: usize,
        places: &'a [[u32; 2]],
    ) -> Rows<'a, E> {
        let shape = own.shape();
        let heads = shape[shape.len() - 2];
        let own = piece(own);
        let Some(plan) = self.plan() else {
            return Rows::whole(spatial(&shape), own);
        };
        let both = self.widths[0] + self.widths[1];
        let pieces = boxes.iter().map(|cells| {
            let count = spatial(&cells.shape()).iter().product();
            Piece::reading(flex::elements(cells), [count, heads, both], skip)
        });
        let pieces = std::iter::once(own).chain(pieces).collect();
        Rows::scattered(spatial(&plan.output_shape), pieces, places)
    }

    /// Positions of keys in the forward pass: among this rank's own, and in received boxes.
    pub(super) fn places(&self, own: [usize; 3]) -> Vec<[u32; 2]> {
        let Some(plan) = self.plan() else {
            return Vec::new();
        };
        let copies = plan.copies.iter().map(|copy| of_owner(0, copy, own));
        let boxes = self.received().zip(1..);
        let boxes = boxes.map(|(transfer, piece)| alone(piece, transfer, flips(transfer)));
        places(
            spatial(&plan.output_shape),
            &copies.chain(boxes).collect::<Vec<_>>(),
        )
    }

    /// Queries that reach no key of another rank, if it pays to compute them before those keys
    /// arrive.
    pub(super) fn early(&self, boxes: &Boxes<'_>) -> Option<[Range<usize>; 3]> {
        let interior = three_ranges(&self.plan()?.interior()?);
        let ranges = [0, 1, 2].map(|dim| {
            let inside = &interior[dim];
            let dim = &self.dims[dim];
            let reach = |query: usize| {
                let cell = dim.queries.start + query;
                let keys = dim.neighborhood.input_range(&(cell..cell + 1), dim.size);
                [keys.start - dim.first_key, keys.end - dim.first_key]
            };
            let all = 0..dim.queries.len();
            let low = all
                .clone()
                .rev()
                .find(|query| reach(*query)[0] < inside.start as isize);
            let high = all
                .clone()
                .find(|query| reach(*query)[1] > inside.end as isize);
            let start = low.map_or(0, |query| query + 1);
            start..high.unwrap_or(all.end).max(start)
        });
        let early: usize = ranges.iter().map(Range::len).product();
        let all: usize = self.dims.iter().map(|dim| dim.queries.len()).product();
        (early > 0 && boxes.overlap(early as f64 / all as f64)).then_some(ranges)
    }
}
