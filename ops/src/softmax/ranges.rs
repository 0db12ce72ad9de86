//! Softmax over ranges of cells of a dim, such as the edges of each target of a graph.

use std::ops::Range;

use halocline_core::tasks;

use super::kernel::{Backward, Forward, Kind};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::CHUNK;
use crate::kernel::lines::{Columns, Lines};
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Computes the softmax over each of the ranges of cells, which follow one another and cover all.
pub(crate) fn forward_of_ranges<E: Element>(
    isa: Isa,
    lines: Lines,
    ranges: &[Range<usize>],
    x: &[E],
) -> Buffer<E> {
    assert_eq!(x.len(), lines.len());
    by_range(lines, ranges, |lines, elements, y| {
        isa.run(Forward {
            kind: Kind::Softmax,
            lines,
            place: whole(lines),
            x: &x[elements],
            y,
        });
    })
}

/// Computes the gradient of the input of [`forward_of_ranges`] from the result.
pub(crate) fn backward_of_ranges<E: Element>(
    isa: Isa,
    lines: Lines,
    ranges: &[Range<usize>],
    [y, cotangent]: [&[E]; 2],
) -> Buffer<E> {
    by_range(lines, ranges, |lines, elements, gradient| {
        isa.run(Backward {
            kind: Kind::Softmax,
            lines,
            place: whole(lines),
            x: &[],
            y: &y[elements.clone()],
            cotangent: &cotangent[elements],
            gradient,
        });
    })
}

/// Creates a buffer of all elements; `run` writes those of the lines of one range of cells, for
/// which it receives their place in the whole.
fn by_range<E: Element>(
    lines: Lines,
    ranges: &[Range<usize>],
    run: impl Fn(Lines, Range<usize>, Shared<E>) + Sync,
) -> Buffer<E> {
    let end = ranges.iter().fold(0, |end, range| {
        assert_eq!(range.start, end, "ranges that follow one another");
        range.end
    });
    assert_eq!(end, lines.cells, "ranges that cover all cells");
    let average = lines.cells * lines.inner / ranges.len().max(1);
    let together = (CHUNK / average.max(1)).max(1);
    // SAFETY: the ranges cover all cells without overlap, and a task writes those of one.
    unsafe {
        Buffer::filled(lines.len(), |all| {
            tasks::for_each(lines.outer * ranges.len(), together, |task| {
                let range = &ranges[task % ranges.len()];
                let first = lines.row(task / ranges.len(), range.start).start;
                let part = Lines {
                    outer: 1,
                    cells: range.len(),
                    ..lines
                };
                if part.len() > 0 {
                    run(part, first..first + part.len(), all.starting_at(first));
                }
            });
        })
    }
}

/// Returns all columns of lines with one outer index.
fn whole(lines: Lines) -> Columns {
    Columns {
        outer: 0,
        columns: 0..lines.inner,
    }
}
