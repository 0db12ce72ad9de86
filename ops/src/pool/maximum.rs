//! Maxima of windows of any kernel, stride and dilation, with the places of the cells taken, and
//! the adjoint.

use pulp::{Simd, WithSimd};

use super::combine::larger;
use super::field::{Planes, Section, Together};
use super::phases::{Phases, Tap};
use super::slide::{Slides, pooled};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{WIDEST, filled_bands, load, store, store_pairs};
use crate::kernel::lines::vectors;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::simd::{Element, Isa};

/// Computes the largest cell of every window, and its number in the window: of equal cells the
/// first, of several NaN the last.
pub(super) fn max_and_places<E: Element>(
    isa: Isa,
    x: &Planes<'_, E>,
    slides: Slides,
) -> [Buffer<E>; 2] {
    let (columns, shape @ [planes, rows, all]) = (x.shape[2], pooled(x.shape, slides));
    let mut largest = None;
    let fill = |numbers: Shared<E>| {
        let run = |place: [usize; 2], largest: &mut [E]| {
            let first = (place[0] * rows + place[1]) * all;
            // SAFETY: the numbers of this row, which only this task writes.
            let numbers = unsafe { numbers.slice(first..first + all) };
            let room = Phases::<E>::room(columns, slides[1]);
            with_scratch(2 * room, |scratch| {
                isa.run(Row {
                    x,
                    place,
                    slides,
                    scratch: scratch.split_at_mut(room).into(),
                    largest,
                    numbers,
                });
            });
        };
        // SAFETY: the task writes a result for every window of its row.
        largest = Some(unsafe { filled_bands(shape, 1, run) });
    };
    // SAFETY: the tasks write the numbers of all rows.
    let numbers = unsafe { Buffer::filled(planes * rows * all, fill) };
    [largest.expect("filled"), numbers]
}

/// A row of windows.
struct Row<'a, E> {
    x: &'a Planes<'a, E>,
    /// Plane, and index of the row of windows.
    place: [usize; 2],
    slides: Slides,
    /// Scratch for the [`Phases`] of column maxima, and for those of their numbers.
    scratch: [&'a mut [E]; 2],
    largest: &'a mut [E],
    numbers: &'a mut [E],
}

impl<E: Element> WithSimd for Row<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            x,
            place: [plane, window],
            slides: [down, across],
            scratch: [of_cells, of_numbers],
            largest,
            numbers,
        } = self;
        let (line, phases) = Phases::divided(x.shape[2], of_cells);
        let (line_numbers, phases_of_numbers) = Phases::divided(x.shape[2], of_numbers);
        let lowest = E::from_f64(f64::NEG_INFINITY);
        for band in &x.bands {
            let (line, numbers) = (&mut line[band.clone()], &mut line_numbers[band.clone()]);
            let mut rows = x.rows([plane, window * down.stride], down, band);
            let mut begun = false;
            while let Some(together) = Together::next(&mut rows) {
                let (first, others) = together.rows().split_first().expect("one or more");
                for part in vectors::<S, E>(line.len()) {
                    let here = number::<S, E>(simd, first.0 * across.kernel);
                    let mut best = (load(simd, &first.1[part.clone()]), here);
                    if begun {
                        let before = (
                            load(simd, &line[part.clone()]),
                            load(simd, &numbers[part.clone()]),
                        );
                        best = taken::<S, E>(simd, before, best);
                    }
                    for (tap, row) in others {
                        let here = number::<S, E>(simd, tap * across.kernel);
                        let next = (load(simd, &row[part.clone()]), here);
                        best = taken::<S, E>(simd, best, next);
                    }
                    store(simd, &mut line[part.clone()], best.0);
                    store(simd, &mut numbers[part], best.1);
                }
                begun = true;
            }
            if !begun {
                line.fill(lowest);
                numbers.fill(E::default());
            }
        }
        let cells = Phases::of(simd, line, across, phases);
        let before = Phases::of(simd, line_numbers, across, phases_of_numbers);
        for part in vectors::<S, E>(largest.len()) {
            let mut tap = Tap::first(part.start);
            let (mut best, mut place) = (cells.load(simd, tap), before.load(simd, tap));
            for number_of_tap in 1..across.kernel {
                tap = cells.after(tap);
                let cell = cells.load(simd, tap);
                let here = before.load(simd, tap);
                let here = E::plus(simd, here, number::<S, E>(simd, number_of_tap));
                let lower = E::select_less(simd, [here, place], here, place);
                let higher = E::select_less(simd, [place, here], here, place);
                let larger_place = E::select_less(simd, [best, cell], here, place);
                let of_numbers = E::select_equal(simd, [best, cell], lower, larger_place);
                let of_missing = if_nan::<S, E>(simd, best, higher, here);
                place = if_nan::<S, E>(simd, cell, of_missing, of_numbers);
                best = larger::<S, E>(simd, best, cell);
            }
            store(simd, &mut largest[part.clone()], best);
            store(simd, &mut numbers[part], place);
        }
        // Padding is also minus infinity, but must never be taken.
        let first = down.first(window);
        // A fold rather than `any`, which stops at the first hit and does not vectorise.
        let is_lowest = |found: bool, cell: &E| found | (*cell == lowest);
        if (first > 0 || across.outside > 0) && largest.iter().fold(false, is_lowest) {
            for (output, (largest, place)) in largest.iter().zip(numbers).enumerate() {
                if *largest == lowest {
                    let tap = first * across.kernel + across.first(output);
                    *place = E::from_f64(tap as f64);
                }
            }
        }
    }
}

/// Returns the larger of two cells with its number; of equal ones the first, of two NaN the second.
#[inline(always)]
fn taken<S: Simd, E: Element>(
    simd: S,
    (best, place): (E::Vector<S>, E::Vector<S>),
    (cell, here): (E::Vector<S>, E::Vector<S>),
) -> (E::Vector<S>, E::Vector<S>) {
    let larger_place = E::select_less(simd, [best, cell], here, place);
    let place = if_nan::<S, E>(simd, cell, here, larger_place);
    (larger::<S, E>(simd, best, cell), place)
}

/// Number of a cell in a window, as a vector.
#[inline(always)]
fn number<S: Simd, E: Element>(simd: S, number: usize) -> E::Vector<S> {
    E::splat(simd, E::from_f64(number as f64))
}

/// Returns `yes` where a cell is NaN, else `no`.
#[inline(always)]
fn if_nan<S: Simd, E: Element>(
    simd: S,
    cell: E::Vector<S>,
    yes: E::Vector<S>,
    no: E::Vector<S>,
) -> E::Vector<S> {
    E::select_equal(simd, [cell, cell], no, yes)
}

/// Adjoint of maxima in a section of planes of `shape`: the cotangent of a window goes to the cell
/// that it took.
pub(super) fn max_adjoint<E: Element>(
    isa: Isa,
    [places, cotangent]: [&[E]; 2],
    shape: [usize; 3],
    section: &Section,
    slides: Slides,
) -> Buffer<E> {
    let [_, outputs, all] = pooled(shape, slides);
    let [down, across] = slides;
    let (near, columns) = across.around(&section.columns, shape[2]);
    // Columns of the gradient that are a stride apart are adjacent in a phase.
    let margin = (across.reach() - 1) / across.stride;
    let phase = (near.len() + margin).max(1);
    let taps_of_phase = |number: usize| {
        let column = |tap: usize| tap * across.dilation;
        let taps = (0..across.kernel).filter(|tap| column(*tap) % across.stride == number);
        taps.map(|tap| {
            (
                E::from_f64(tap as f64),
                margin - column(tap) / across.stride,
            )
        })
        .collect()
    };
    let taps: Vec<Vec<(E, usize)>> = (0..across.stride).map(taps_of_phase).collect();
    let length = margin + phase + WIDEST;
    let run = |[plane, row]: [usize; 2], gradient: &mut [E]| {
        let row = section.rows.start + row;
        let windows = down.taps_at(row, outputs).map(|(window, tap)| {
            let first = (plane * outputs + window) * all + near.start;
            let sides = [places, cotangent].map(|side| &side[first..][..near.len()]);
            (E::from_f64((tap * across.kernel) as f64), sides)
        });
        let windows: Vec<(E, [&[E]; 2])> = windows.collect();
        with_scratch(
            2 * length * windows.len() + across.stride * phase,
            |scratch| {
                let (joined, lines) = scratch.split_at_mut(across.stride * phase);
                isa.run(Shares {
                    windows: &windows,
                    taps: &taps,
                    margin,
                    lines,
                    joined,
                    first: section.columns.start - columns.start,
                    gradient,
                });
            },
        );
    };
    // SAFETY: the task writes its row.
    unsafe { filled_bands(section.shape(shape[0]), 1, run) }
}

/// Sums of the windows' shares in a row of the gradient.
struct Sums<'a, E> {
    windows: &'a [(E, [&'a [E]; 2])],
    taps: &'a [Vec<(E, usize)>],
    /// Places and cotangents of each row of windows, with margins.
    lines: &'a [E],
    /// Number of elements of a line.
    length: usize,
}

impl<E: Element> Sums<'_, E> {
    /// Returns the sums of a phase from element `start` on.
    #[inline(always)]
    fn of<S: Simd>(&self, simd: S, phase: usize, start: usize) -> E::Vector<S> {
        let zero = E::splat(simd, E::default());
        let (mut sum, lanes) = (zero, E::lanes::<S>());
        for (number, (row, _)) in self.windows.iter().enumerate() {
            let lines = &self.lines[2 * number * self.length..][..2 * self.length];
            let (places, cotangent) = lines.split_at(self.length);
            for (tap, shift) in &self.taps[phase] {
                let place = load(simd, &places[start + shift..][..lanes]);
                let share = load(simd, &cotangent[start + shift..][..lanes]);
                let here = E::splat(simd, *row + *tap);
                let share = E::select_equal(simd, [place, here], share, zero);
                sum = E::plus(simd, sum, share);
            }
        }
        sum
    }
}

/// A row of the gradient.
struct Shares<'a, E> {
    /// Rows of windows that meet the row: number of the first cell in their windows, places, and
    /// cotangent.
    windows: &'a [(E, [&'a [E]; 2])],
    /// Taps of each phase: their numbers, and the first element of a line that they meet.
    taps: &'a [Vec<(E, usize)>],
    margin: usize,
    /// Scratch for places and cotangents, with margins.
    lines: &'a mut [E],
    /// Scratch for a row of all columns.
    joined: &'a mut [E],
    /// First column of the gradient within `joined`.
    first: usize,
    gradient: &'a mut [E],
}

impl<E: Element> WithSimd for Shares<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            windows,
            taps,
            margin,
            lines,
            joined,
            first,
            gradient,
        } = self;
        let (stride, phase) = (taps.len(), joined.len() / taps.len());
        let length = lines.len() / (2 * windows.len()).max(1);
        let sides = windows.iter().flat_map(|(_, sides)| sides);
        for (line, side) in lines.chunks_exact_mut(length.max(1)).zip(sides) {
            line[..margin].fill(E::default());
            line[margin..][..side.len()].copy_from_slice(side);
            line[margin + side.len()..].fill(E::default());
        }
        let sums = Sums {
            windows,
            taps,
            lines,
            length,
        };
        let lanes = E::lanes::<S>();
        let line = match first {
            0 => {
                // Cells behind the last window have no gradient.
                let (line, rest) = gradient.split_at_mut(gradient.len().min(joined.len()));
                rest.fill(E::default());
                line
            }
            _ => &mut *joined,
        };
        for start in (0..phase).step_by(lanes) {
            let cells =
                (stride * start).min(line.len())..(stride * (start + lanes)).min(line.len());
            let line = &mut line[cells];
            match stride {
                1 => store(simd, line, sums.of(simd, 0, start)),
                2 => {
                    let pair = [sums.of(simd, 0, start), sums.of(simd, 1, start)];
                    store_pairs(simd, line, pair);
                }
                _ => {
                    for number in 0..stride {
                        let mut sums_of_phase = [E::default(); WIDEST];
                        store(
                            simd,
                            &mut sums_of_phase[..lanes],
                            sums.of(simd, number, start),
                        );
                        let cells = line.iter_mut().skip(number).step_by(stride);
                        cells.zip(sums_of_phase).for_each(|(cell, sum)| *cell = sum);
                    }
                }
            }
        }
        if first > 0 {
            let cells = &joined[first.min(joined.len())..];
            let (line, rest) = gradient.split_at_mut(gradient.len().min(cells.len()));
            line.copy_from_slice(&cells[..line.len()]);
            rest.fill(E::default());
        }
    }
}
