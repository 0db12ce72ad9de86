//! Gradients across the ends of periodic dims that a rank holds whole.
//!
//! Cells beyond an end are copies of cells at the other end. Their gradients would be a few
//! columns, which fill a small part of each vector. The gradients of the cells themselves are
//! computed instead, from a cotangent that is periodic, too.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::Element;
use halocline_core::IndexBox;
use halocline_core::plan::{ExchangePlan, Transfer};

use super::engine::geometry::{Conv, Dims};
use super::engine::pieces::{Piece, Pieces};
use super::run::spatial;
use crate::kernel::flex;

/// Returns how far the cotangent of results of this shape continues beyond each end of every
/// spatial dim, and the copies of the plan whose gradients remain to be computed.
pub(super) fn continued(
    conv: &Conv,
    plan: &ExchangePlan,
    output: &[usize],
) -> (Dims, Vec<Transfer>) {
    let (mut margin, mut copies) = ([0; 3], plan.copies.clone());
    for dim in 2..output.len() {
        let place = dim + 3 - output.len();
        let size = plan.source_shape[dim];
        let reach = conv.span(place) - 1;
        let keeps_size = conv.stride[place] == 1 && output[dim] == size;
        let flips = copies.iter().any(|copy| copy.flip[dim]);
        if !keeps_size || flips || !(1..size).contains(&reach) {
            continue;
        }
        let whole = |copy: &&Transfer| copy.src.ranges()[dim] == (0..size);
        let Some(cells) = copies.iter().find(whole) else {
            continue;
        };
        let cells = cells.dst.ranges()[dim].clone();
        let (end, period) = (plan.output_shape[dim], size as isize);
        let parts = |range: Range<usize>, by: isize| {
            let parts = copies.iter();
            parts.filter_map(move |copy| moved(copy, dim, &range, by))
        };
        let inner: Vec<_> = parts(cells.clone(), 0).collect();
        let beyond = parts(0..cells.start, 0).chain(parts(cells.end..end, 0));
        let beyond: Vec<_> = beyond.collect();
        // Cells near the ends, one period further.
        let before = parts(size..cells.end, -period);
        let expected: Vec<_> = before
            .chain(parts(cells.start..end - size, period))
            .collect();
        if expected.len() == beyond.len() && expected.iter().all(|copy| beyond.contains(copy)) {
            margin[place] = reach;
            copies = inner;
        }
    }
    (margin, copies)
}

/// Gradient of results, which may continue beyond their ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cotangent<'a> {
    pub cells: &'a FlexTensor,
    /// Number of cells beyond each end of every spatial dim.
    pub margin: Dims,
}

impl<'a> Cotangent<'a> {
    /// Extents, including the cells beyond the ends.
    pub(super) fn extents(&self) -> Dims {
        let extents = spatial(&self.cells.shape());
        std::array::from_fn(|dim| extents[dim] + 2 * self.margin[dim])
    }

    /// All cells.
    pub(super) fn pieces<N: Element + bytemuck::Pod>(&self) -> Pieces<'a, N> {
        let shape = self.cells.shape();
        let dims = shape.len();
        let mut boxes = vec![(IndexBox::whole(&shape), [0; 3])];
        for dim in 2..dims {
            let place = dim + 3 - dims;
            let (size, margin) = (shape[dim], self.margin[place]);
            let ends = [
                (size - margin..size, 0),
                (0..size, margin),
                (0..margin, margin + size),
            ];
            let parts = |(cells, at): (IndexBox, Dims)| {
                let part = move |(range, first): (Range<usize>, usize)| {
                    let mut at = at;
                    at[place] = first;
                    (cells.with_range(dim, range), at)
                };
                ends.clone().map(part)
            };
            boxes = boxes.into_iter().flat_map(parts).collect();
        }
        let boxes = boxes.into_iter().filter(|(cells, _)| cells.volume() > 0);
        let pieces = boxes.map(|(cells, at)| Piece {
            channel: 0,
            at,
            cells: flex::field_box(self.cells, &cells, &[]),
        });
        Pieces::new(pieces.collect())
    }

    /// Position of a box of the cells that windows reach, counted from the first cell of all.
    pub(super) fn place(&self, cells: &[Range<usize>; 3]) -> [Range<usize>; 3] {
        std::array::from_fn(|dim| {
            let margin = self.margin[dim];
            cells[dim].start + margin..cells[dim].end + margin
        })
    }
}

/// Part of a copy whose cells lie in a range of a dim, moved along it; `None` if there is none.
fn moved(copy: &Transfer, dim: usize, range: &Range<usize>, by: isize) -> Option<Transfer> {
    let (src, dst) = (&copy.src.ranges()[dim], &copy.dst.ranges()[dim]);
    let (start, end) = (dst.start.max(range.start), dst.end.min(range.end));
    let first = src.start + start - dst.start;
    let place = |cell: usize| cell.strict_add_signed(by);
    (start < end).then(|| Transfer {
        src: copy.src.with_range(dim, first..first + end - start),
        dst: copy.dst.with_range(dim, place(start)..place(end)),
        flip: copy.flip.clone(),
    })
}

#[cfg(test)]
mod tests {
    use halocline_core::plan::{Need, Source};
    use halocline_core::{Boundary, Layout, MeshShape, Replicate};

    use super::*;

    /// Plan of one rank for a 3 × 3 kernel, with the cells beyond the ends of the last dim.
    fn plan(rows: Boundary, columns: Boundary, [low, high]: [isize; 2]) -> ExchangePlan {
        let field = [1, 2, 4, 6];
        let mesh = MeshShape::new(&[("all", 1)], vec![0]).unwrap().into();
        let layout = Layout::new(&mesh, &field, &[Replicate]).unwrap();
        let boundaries = [
            [Boundary::Zeros; 2],
            [Boundary::Zeros; 2],
            [rows; 2],
            [columns; 2],
        ];
        let ranges = [0..1, 0..2, -1..5, -low..6 + high];
        let need = |_| Need::within(&field, &ranges, &boundaries);
        ExchangePlan::new(Source::Layout(&layout), 0, 1, need)
    }

    fn of_stride(stride: usize, plan: &ExchangePlan) -> (Dims, Vec<Transfer>) {
        let conv = Conv {
            groups: 1,
            inputs: 2,
            outputs: 3,
            kernel: [1, 3, 3],
            stride: [1, 1, stride],
            dilation: [1; 3],
        };
        let columns = (plan.output_shape[3] - 3) / stride + 1;
        continued(&conv, plan, &[1, 3, 4, columns])
    }

    #[test]
    fn gradients_across_a_periodic_end_are_those_of_a_periodic_cotangent() {
        use Boundary::{Periodic, PoleEdge, Reflect, Replicate, Zeros};
        let copies = |rows, columns, widths, stride| {
            let (margin, copies) = of_stride(stride, &plan(rows, columns, widths));
            (margin, copies.len())
        };
        assert_eq!(copies(Zeros, Periodic, [1, 1], 1), ([0, 0, 2], 1));
        assert_eq!(copies(Zeros, Periodic, [2, 0], 1), ([0, 0, 2], 1));
        assert_eq!(copies(Periodic, Periodic, [1, 1], 1), ([0, 2, 2], 1));
        assert_eq!(copies(Replicate, Periodic, [1, 1], 1), ([0, 0, 2], 3));
        // Rows across a pole are turned by half a circle, in two parts each.
        assert_eq!(copies(PoleEdge, Periodic, [1, 1], 1), ([0, 0, 2], 5));
        assert_eq!(copies(Zeros, Reflect, [1, 1], 1), ([0, 0, 0], 3));
        assert_eq!(copies(Zeros, Periodic, [1, 1], 2), ([0, 0, 0], 3));
        assert_eq!(copies(Zeros, Periodic, [2, 2], 1), ([0, 0, 0], 3));
    }
}
