//! Windows that slide along the dims of planes.

use std::ops::Range;

use crate::driver::Window;

/// Windows along one dim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slide {
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) dilation: usize,
    /// Number of cells at the beginning of the dim that are padding and never taken by a maximum.
    pub(super) outside: usize,
}

impl Slide {
    /// Creates windows of adjacent cells, without padding.
    pub(super) fn new(kernel: usize, stride: usize) -> Self {
        Self {
            kernel,
            stride,
            dilation: 1,
            outside: 0,
        }
    }

    /// Number of cells that a window spans, from its first cell to its last.
    pub(super) fn reach(self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }

    /// Number of windows.
    fn outputs(self, cells: usize) -> usize {
        (cells + self.stride).saturating_sub(self.reach()) / self.stride
    }

    /// First tap of an output's window that is a cell of the field.
    pub(super) fn first(self, output: usize) -> usize {
        let outside = self.outside.saturating_sub(output * self.stride);
        outside.div_ceil(self.dilation).min(self.kernel - 1)
    }

    /// Returns the windows around a range of a dim with `cells` cells, and the cells from the start
    /// of the first window that these windows and the range cover.
    pub(super) fn around(self, range: &Range<usize>, cells: usize) -> (Range<usize>, Range<usize>) {
        let outputs = self.outputs(cells);
        let meeting = self.meeting(range, outputs);
        let first = meeting.start.min(range.start / self.stride).min(outputs);
        let start = first * self.stride;
        let last = meeting
            .end
            .checked_sub(1)
            .filter(|last| *last >= meeting.start);
        let end = last.map_or(0, |last| last * self.stride + self.reach());
        let cells = start..range.end.max(end);
        (first..first + self.outputs(cells.len()), cells)
    }

    /// Iterates over the windows that contain a cell, of `outputs` windows, each with the tap at
    /// the cell.
    pub(super) fn taps_at(
        self,
        cell: usize,
        outputs: usize,
    ) -> impl Iterator<Item = (usize, usize)> {
        let windows = self.meeting(&(cell..cell + 1), outputs);
        windows.filter_map(move |window| {
            let cells = cell - window * self.stride;
            let meets = cells.is_multiple_of(self.dilation);
            meets.then_some((window, cells / self.dilation))
        })
    }

    /// Returns the windows that have a cell in a range, of `outputs` windows.
    pub(super) fn meeting(self, cells: &Range<usize>, outputs: usize) -> Range<usize> {
        let first = (cells.start + 1).saturating_sub(self.reach());
        let end = cells.end.div_ceil(self.stride).min(outputs);
        first.div_ceil(self.stride).min(end)..end
    }
}

/// Windows of rows and columns.
pub(super) type Slides = [Slide; 2];

/// Shape `[planes, rows, columns]` after pooling.
pub(super) fn pooled([planes, rows, columns]: [usize; 3], [down, across]: Slides) -> [usize; 3] {
    [planes, down.outputs(rows), across.outputs(columns)]
}

impl From<Window> for Slide {
    fn from(window: Window) -> Self {
        Self {
            dilation: window.dilation,
            ..Self::new(window.kernel, window.stride)
        }
    }
}
