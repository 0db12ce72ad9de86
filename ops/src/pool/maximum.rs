//! The adjoint of maxima over windows of any kernel, stride and dilation.
//!
//! The cells that windows take are found again from the input: the forward pass saves no indices.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::combine::larger;
use super::field::{Planes, Section, Together};
use super::slide::{Slide, Slides, pooled};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{filled_bands, load, load_every, store, store_pairs};
use crate::kernel::lines::vectors;
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};

/// Rows of an input that one task fills.
const BAND: usize = 16;

/// The adjoint of the maximum at `x`, in a section: the cotangent of a window goes to the first of its largest cells, and to
/// the last NaN.
pub(super) fn max_adjoint<E: Element>(
    isa: Isa,
    x: &Planes<'_, E>,
    cotangent: &[E],
    section: &Section,
    slides: Slides,
) -> Buffer<E> {
    let [_, outputs, all] = pooled(x.shape, slides);
    let [down, across] = slides;
    let (near, columns) = across.around(&section.columns, x.shape[2]);
    let across = Slide {
        outside: across.outside.saturating_sub(columns.start),
        ..across
    };
    let x = &x.within(&columns);
    let section = section.seen_from(columns.start);
    let (columns, width) = (columns.len(), near.len());
    let shape @ [_, _, kept] = section.shape(x.shape[0]);
    // Columns of the gradient that lie a stride apart are beside each other in a phase.
    let phase = (width + across.reach() / across.stride).max(1);
    let run = |[plane, band]: [usize; 2], gradient: &mut [E]| {
        let first = section.rows.start + band * BAND;
        let held = first..first + gradient.len() / kept;
        let sums = held.len() * across.stride * phase;
        with_scratch(3 * columns + width + sums, |scratch| {
            let (lines, sums) = scratch.split_at_mut(3 * columns + width);
            sums.fill(E::default());
            let (joined, lines) = lines.split_at_mut(columns);
            for window in down.meeting(&held, outputs) {
                let start = window * down.stride;
                let taken = (0..down.kernel).filter_map(|tap| {
                    let row = start + tap * down.dilation;
                    held.contains(&row).then(|| (tap, row - first))
                });
                isa.run(Pulled {
                    x,
                    place: [plane, start],
                    slides: [down, across],
                    first: down.first(window),
                    taken,
                    cotangent: &cotangent[(plane * outputs + window) * all..][near.clone()],
                    phase,
                    lines,
                    sums,
                });
            }
            isa.run(Joined {
                sums,
                phase,
                stride: across.stride,
                columns: section.columns.clone(),
                joined,
                rows: gradient.chunks_mut(kept.max(1)),
            });
        });
    };
    // SAFETY: the task writes all columns of its rows.
    unsafe { filled_bands(shape, BAND, run) }
}

/// The cotangents of a row of windows, added to the phases of the rows that they meet.
struct Pulled<'a, E, T> {
    x: &'a Planes<'a, E>,
    /// The plane, and the first row of the windows.
    place: [usize; 2],
    slides: Slides,
    /// The first row of the windows that is one of the field.
    first: usize,
    /// Those of the windows' rows whose gradients are wanted, and their numbers among these.
    taken: T,
    cotangent: &'a [E],
    phase: usize,
    /// Scratch for largest cells of columns and their rows, and for the numbers of the cells that windows take.
    lines: &'a mut [E],
    /// `[row, phase, column]`.
    sums: &'a mut [E],
}

impl<E: Element, T: Iterator<Item = (usize, usize)>> WithSimd for Pulled<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            x,
            place: [plane, start],
            slides: [down, across],
            first,
            taken,
            cotangent,
            phase,
            lines,
            sums,
        } = self;
        let columns = (lines.len() - cotangent.len()) / 2;
        let (line, rest) = lines.split_at_mut(columns);
        let (numbers, places) = rest.split_at_mut(columns);
        let lowest = E::from_f64(f64::NEG_INFINITY);
        for band in &x.bands {
            let (line, numbers) = (&mut line[band.clone()], &mut numbers[band.clone()]);
            line.fill(lowest);
            numbers.fill(E::default());
            let mut rows = x.rows([plane, start], down, band);
            while let Some(together) = Together::next(&mut rows) {
                for part in vectors::<S, E>(line.len()) {
                    let mut best = load(simd, &line[part.clone()]);
                    let mut place = load(simd, &numbers[part.clone()]);
                    for &(tap, row) in together.rows() {
                        let cell = load(simd, &row[part.clone()]);
                        let here = number::<S, E>(simd, tap * across.kernel);
                        let larger_place = E::select_less(simd, [best, cell], here, place);
                        place = if_nan::<S, E>(simd, cell, here, larger_place);
                        best = larger::<S, E>(simd, best, cell);
                    }
                    store(simd, &mut numbers[part.clone()], place);
                    store(simd, &mut line[part], best);
                }
            }
        }
        // Padding is minus infinity, too, but is never taken.
        let is_padded = first > 0 || across.outside > 0;
        for part in vectors::<S, E>(places.len()) {
            let every = Every {
                simd,
                start: part.start * across.stride,
                across,
                count: part.len(),
            };
            let (mut best, mut place) = (every.load(line, 0), every.load(numbers, 0));
            for tap in 1..across.kernel {
                let cell = every.load(line, tap);
                let here = E::plus(simd, every.load(numbers, tap), number::<S, E>(simd, tap));
                let lower = E::select_less(simd, [here, place], here, place);
                let higher = E::select_less(simd, [place, here], here, place);
                let larger_place = E::select_less(simd, [best, cell], here, place);
                let of_numbers = E::select_equal(simd, [best, cell], lower, larger_place);
                place = if_nan::<S, E>(
                    simd,
                    cell,
                    if_nan::<S, E>(simd, best, higher, here),
                    of_numbers,
                );
                best = larger::<S, E>(simd, best, cell);
            }
            store(simd, &mut places[part.clone()], place);
            if is_padded {
                store(simd, &mut line[part.clone()], best);
            }
        }
        if is_padded {
            for (output, (largest, place)) in line.iter().zip(&mut *places).enumerate() {
                if *largest == lowest {
                    let tap = first * across.kernel + across.first(output);
                    *place = E::from_f64(tap as f64);
                }
            }
        }
        let zero = E::splat(simd, E::default());
        for (row_tap, row) in taken {
            for tap in 0..across.kernel {
                let column = tap * across.dilation;
                let (number_of_phase, shift) = (column % across.stride, column / across.stride);
                let sums = &mut sums[(row * across.stride + number_of_phase) * phase + shift..];
                let here = number::<S, E>(simd, row_tap * across.kernel + tap);
                for part in vectors::<S, E>(places.len()) {
                    let place = load(simd, &places[part.clone()]);
                    let cotangent = load(simd, &cotangent[part.clone()]);
                    let share = E::select_equal(simd, [place, here], cotangent, zero);
                    let sum = E::plus(simd, load(simd, &sums[part.clone()]), share);
                    store(simd, &mut sums[part], sum);
                }
            }
        }
    }
}

/// The number of a cell in a window.
#[inline(always)]
fn number<S: Simd, E: Element>(simd: S, number: usize) -> E::Vector<S> {
    E::splat(simd, E::from_f64(number as f64))
}

/// `yes` where a cell is not a number.
#[inline(always)]
fn if_nan<S: Simd, E: Element>(
    simd: S,
    cell: E::Vector<S>,
    yes: E::Vector<S>,
    no: E::Vector<S>,
) -> E::Vector<S> {
    E::select_equal(simd, [cell, cell], no, yes)
}

/// The columns of some windows.
struct Every<S> {
    simd: S,
    /// The first column.
    start: usize,
    across: Slide,
    count: usize,
}

impl<S: Simd> Every<S> {
    /// The cells that a tap of the windows meets.
    #[inline(always)]
    fn load<E: Element>(&self, line: &[E], tap: usize) -> E::Vector<S> {
        let cells = &line[self.start + tap * self.across.dilation..];
        load_every(self.simd, cells, self.across.stride, self.count)
    }
}

/// The phases of rows, joined.
struct Joined<'a, E, R> {
    /// `[row, phase, column]`.
    sums: &'a [E],
    phase: usize,
    stride: usize,
    /// The columns that the rows are of.
    columns: Range<usize>,
    /// Scratch for a row of all columns.
    joined: &'a mut [E],
    rows: R,
}

impl<'b, E: Element, R: Iterator<Item = &'b mut [E]>> WithSimd for Joined<'_, E, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            sums,
            phase,
            stride,
            columns,
            joined: line,
            rows,
        } = self;
        // Cells behind the last window have no gradient.
        let joined = line.len().min(stride * phase);
        line[joined..].fill(E::default());
        for (row, phases) in rows.zip(sums.chunks(stride * phase)) {
            match stride {
                1 => line[..joined].copy_from_slice(&phases[..joined]),
                2 => {
                    let (even, odd) = phases.split_at(phase);
                    for part in vectors::<S, E>(joined.div_ceil(2)) {
                        let pair = [
                            load(simd, &even[part.clone()]),
                            load(simd, &odd[part.clone()]),
                        ];
                        let cells = 2 * part.start..joined.min(2 * part.end);
                        store_pairs(simd, &mut line[cells], pair);
                    }
                }
                _ => {
                    for (number, phase) in phases.chunks(phase).enumerate() {
                        let cells = line[..joined].iter_mut().skip(number).step_by(stride);
                        cells.zip(phase).for_each(|(cell, sum)| *cell = *sum);
                    }
                }
            }
            row.copy_from_slice(&line[columns.clone()]);
        }
    }
}
