//! Columns of a row regrouped so that the cells of one tap in adjacent windows are contiguous.

use pulp::Simd;

use super::slide::Slide;
use crate::kernel::lanes::{WIDEST, load, load_pairs, store};
use crate::kernel::simd::Element;

/// A row split by column modulo the stride, so that the cells of one tap in adjacent windows are
/// contiguous.
pub(super) struct Phases<'a, E> {
    cells: &'a [E],
    /// Number of elements of a phase.
    length: usize,
    across: Slide,
    /// The dilation as whole strides and remaining columns.
    dilation: [usize; 2],
}

/// Position of one tap in the phases, for adjacent windows.
#[derive(Clone, Copy)]
pub(super) struct Tap {
    phase: usize,
    /// Index of the first cell in the phase.
    start: usize,
}

impl Tap {
    /// First tap of the windows from `window` on.
    #[inline(always)]
    pub(super) fn first(window: usize) -> Self {
        Self {
            phase: 0,
            start: window,
        }
    }
}

impl<'a, E: Element> Phases<'a, E> {
    /// Elements of scratch for a row of `columns` and its phases, each with room for whole vectors
    /// behind it.
    pub(super) fn room(columns: usize, across: Slide) -> usize {
        let phases = match across.stride {
            1 => 0,
            stride => stride * Self::length(columns, stride),
        };
        Self::row(columns) + phases
    }

    fn row(columns: usize) -> usize {
        columns + 2 * WIDEST
    }

    fn length(columns: usize, stride: usize) -> usize {
        columns.div_ceil(stride) + WIDEST
    }

    /// Splits scratch into that of a row and that of its phases.
    #[inline(always)]
    pub(super) fn divided(columns: usize, scratch: &'a mut [E]) -> (&'a mut [E], &'a mut [E]) {
        scratch.split_at_mut(Self::row(columns))
    }

    /// Computes the phases of a row, which has more room than columns.
    #[inline(always)]
    pub(super) fn of<S: Simd>(simd: S, row: &'a [E], across: Slide, phases: &'a mut [E]) -> Self {
        let (columns, stride, lanes) = (row.len() - 2 * WIDEST, across.stride, E::lanes::<S>());
        let length = Self::length(columns, stride);
        if stride == 2 {
            let (even, odd) = phases.split_at_mut(length);
            for start in (0..columns.div_ceil(2)).step_by(lanes) {
                let pair = load_pairs(simd, &row[2 * start..][..2 * lanes]);
                store(simd, &mut even[start..][..lanes], pair[0]);
                store(simd, &mut odd[start..][..lanes], pair[1]);
            }
        } else if stride > 2 {
            for (phase, cells) in phases.chunks_exact_mut(length).enumerate() {
                let row = row[..columns].iter().skip(phase).step_by(stride);
                cells.iter_mut().zip(row).for_each(|(cell, x)| *cell = *x);
            }
        }
        Self {
            cells: if stride == 1 { row } else { phases },
            length,
            across,
            dilation: [across.dilation / stride, across.dilation % stride],
        }
    }

    /// Returns the next tap.
    #[inline(always)]
    pub(super) fn after(&self, tap: Tap) -> Tap {
        let [strides, columns] = self.dilation;
        let (phase, start) = (tap.phase + columns, tap.start + strides);
        if phase >= self.across.stride {
            Tap {
                phase: phase - self.across.stride,
                start: start + 1,
            }
        } else {
            Tap { phase, start }
        }
    }

    /// Loads the cells of a tap; their values are arbitrary behind the last window.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, simd: S, tap: Tap) -> E::Vector<S> {
        let first = tap.phase * self.length + tap.start;
        load(simd, &self.cells[first..][..E::lanes::<S>()])
    }
}
