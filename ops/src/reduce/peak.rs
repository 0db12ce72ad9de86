//! Kernels for maxima and minima along lines, and for the cells that hold them. NaN is the extremum
//! where it occurs.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::kernel::{of_blocks, of_lines};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{CHUNK, WIDEST, load, store};
use crate::kernel::lines::{Columns, Lines, vectors};
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Independent accumulators of a loop, so that a comparison does not wait for the one before.
const UNROLL: usize = 4;
/// Cells per block: for contiguous lines, and for adjacent lines with strided cells.
const BLOCKS: [usize; 2] = [CHUNK, 256];

/// Computes the largest cell of each line, or the smallest.
pub(super) fn forward<E: Element>(isa: Isa, lines: Lines, x: &[E], least: bool) -> Vec<E> {
    assert_eq!(x.len(), lines.len());
    let nothing = E::from_f64(if least {
        f64::INFINITY
    } else {
        f64::NEG_INFINITY
    });
    let run = |place, cells, peaks: &mut [E]| {
        isa.run(Peak {
            lines,
            place,
            x,
            cells,
            least,
            nothing,
            peaks,
        });
    };
    let (partial, blocks) = of_blocks(lines, BLOCKS, nothing, run);
    let peak = |line| {
        let peaks = blocks.of_line(line).map(|place| partial[place]);
        peaks.fold(nothing, |a, b| pick_one(least, a, b))
    };
    of_lines(lines, peak)
}

/// Counts the cells of each line that hold its extremum.
pub(super) fn holders<E: Element>(isa: Isa, lines: Lines, x: &[E], extrema: &[E]) -> Vec<E> {
    assert_eq!([x.len(), extrema.len()], [lines.len(), lines.count()]);
    let run = |place, cells, counts: &mut [E]| {
        isa.run(Count {
            lines,
            place,
            x,
            extrema,
            cells,
            counts,
        });
    };
    let (partial, blocks) = of_blocks(lines, BLOCKS, E::default(), run);
    let count = |line| {
        let counts = blocks.of_line(line).map(|place| partial[place].to_f64());
        E::from_f64(counts.sum())
    };
    of_lines(lines, count)
}

/// Assigns its line's share to each cell that holds the extremum, and zero to other cells.
pub(super) fn shared_out<E: Element>(
    isa: Isa,
    lines: Lines,
    x: &[E],
    [extrema, shares]: [&[E]; 2],
) -> Buffer<E> {
    let run = |place, gradient| {
        isa.run(Share {
            lines,
            place,
            x,
            extrema,
            shares,
            gradient,
        });
    };
    // SAFETY: a task writes its lines and no others.
    unsafe { lines.filled(lines.len(), run) }
}

fn pick_one<E: Element>(least: bool, a: E, b: E) -> E {
    let (first, second) = (a.to_f64(), b.to_f64());
    let beyond = if least {
        second < first
    } else {
        first < second
    };
    if beyond || second.is_nan() { b } else { a }
}

#[inline(always)]
fn pick<S: Simd, E: Element>(
    simd: S,
    least: bool,
    a: E::Vector<S>,
    b: E::Vector<S>,
) -> E::Vector<S> {
    let order = if least { [b, a] } else { [a, b] };
    let beyond = E::select_less(simd, order, b, a);
    E::select_equal(simd, [b, b], beyond, b)
}

/// Returns `yes` where a cell holds the extremum, else zero.
#[inline(always)]
fn if_held<S: Simd, E: Element>(
    simd: S,
    x: E::Vector<S>,
    extremum: E::Vector<S>,
    yes: E::Vector<S>,
) -> E::Vector<S> {
    let no = E::splat(simd, E::default());
    let held = E::select_equal(simd, [x, extremum], yes, no);
    E::select_equal(simd, [x, x], held, yes)
}

struct Peak<'a, E> {
    lines: Lines,
    place: Columns,
    x: &'a [E],
    cells: Range<usize>,
    least: bool,
    /// Extremum of no cells.
    nothing: E,
    peaks: &'a mut [E],
}

impl<E: Element> WithSimd for Peak<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            cells,
            least,
            nothing,
            peaks,
        } = self;
        if lines.inner > 1 {
            for cell in cells {
                let x = &x[lines.part(&place, cell)];
                for part in vectors::<S, E>(peaks.len()) {
                    let peak = load(simd, &peaks[part.clone()]);
                    let peak = pick::<S, E>(simd, least, peak, load(simd, &x[part.clone()]));
                    store(simd, &mut peaks[part], peak);
                }
            }
            return;
        }
        let x = &x[place.outer * lines.cells..][cells];
        let nothings = E::splat(simd, nothing);
        let mut best = [nothings; UNROLL];
        let lanes = E::lanes::<S>();
        let mut blocks = x.chunks_exact(UNROLL * lanes);
        for block in &mut blocks {
            for (best, cells) in best.iter_mut().zip(block.chunks_exact(lanes)) {
                *best = pick::<S, E>(simd, least, *best, load(simd, cells));
            }
        }
        for cells in blocks.remainder().chunks(lanes) {
            let cells = E::load_part(simd, cells, nothings);
            best[0] = pick::<S, E>(simd, least, best[0], cells);
        }
        let [a, b, c, d] = best;
        let low = pick::<S, E>(simd, least, a, b);
        let high = pick::<S, E>(simd, least, c, d);
        let mut of_lanes = [nothing; WIDEST];
        let of_lanes = &mut of_lanes[..lanes];
        store(simd, of_lanes, pick::<S, E>(simd, least, low, high));
        let peak = of_lanes.iter();
        peaks[0] = peak.fold(peaks[0], |a, b| pick_one(least, a, *b));
    }
}

struct Count<'a, E> {
    lines: Lines,
    place: Columns,
    x: &'a [E],
    extrema: &'a [E],
    cells: Range<usize>,
    counts: &'a mut [E],
}

impl<E: Element> WithSimd for Count<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            extrema,
            cells,
            counts,
        } = self;
        let one = E::splat(simd, E::from_f64(1.0));
        let extrema = &extrema[lines.of_columns(&place)];
        if lines.inner > 1 {
            for cell in cells {
                let x = &x[lines.part(&place, cell)];
                for part in vectors::<S, E>(counts.len()) {
                    let [x, extremum, count] = [
                        &x[part.clone()],
                        &extrema[part.clone()],
                        &counts[part.clone()],
                    ]
                    .map(|cells| load(simd, cells));
                    let held = if_held::<S, E>(simd, x, extremum, one);
                    store(simd, &mut counts[part], E::plus(simd, count, held));
                }
            }
            return;
        }
        let x = &x[place.outer * lines.cells..][cells];
        let extremum = E::splat(simd, extrema[0]);
        let mut sum = E::splat(simd, E::default());
        let whole = x.chunks_exact(E::lanes::<S>());
        for cell in whole.remainder() {
            if *cell == extrema[0] || cell.to_f64().is_nan() {
                counts[0] += E::from_f64(1.0);
            }
        }
        for cells in whole {
            let held = if_held::<S, E>(simd, load(simd, cells), extremum, one);
            sum = E::plus(simd, sum, held);
        }
        counts[0] += E::sum(simd, sum);
    }
}

struct Share<'a, E> {
    lines: Lines,
    place: Columns,
    x: &'a [E],
    extrema: &'a [E],
    shares: &'a [E],
    gradient: Shared<E>,
}

impl<E: Element> WithSimd for Share<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            extrema,
            shares,
            gradient,
        } = self;
        let columns = lines.of_columns(&place);
        let of_lines = [&extrema[columns.clone()], &shares[columns]];
        if lines.inner > 1 {
            for cell in 0..lines.cells {
                let range = lines.part(&place, cell);
                let x = &x[range.clone()];
                // SAFETY: within the lines of this task.
                let gradient = unsafe { gradient.slice(range) };
                for part in vectors::<S, E>(gradient.len()) {
                    let [extremum, share] =
                        of_lines.map(|values| load(simd, &values[part.clone()]));
                    let found =
                        if_held::<S, E>(simd, load(simd, &x[part.clone()]), extremum, share);
                    store(simd, &mut gradient[part], found);
                }
            }
            return;
        }
        let [extremum, share] = of_lines.map(|values| E::splat(simd, values[0]));
        let range = place.outer * lines.cells..(place.outer + 1) * lines.cells;
        let x = &x[range.clone()];
        // SAFETY: the line of this task.
        let gradient = unsafe { gradient.slice(range) };
        for part in vectors::<S, E>(lines.cells) {
            let found = if_held::<S, E>(simd, load(simd, &x[part.clone()]), extremum, share);
            store(simd, &mut gradient[part], found);
        }
    }
}
