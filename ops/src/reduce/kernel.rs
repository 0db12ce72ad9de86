//! Kernels for sums along lines: of cells, of their squared distances from a middle value, or of
//! products.
//!
//! Blocks of cells are summed in the precision of the cells, and the block sums in double
//! precision. Blocks depend on the shape alone, so results have the same bits for any number of
//! threads.

use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{CHUNK, load, store, sums};
use crate::kernel::lines::{Columns, Lines, vectors};
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Cells per block of a sum: for contiguous lines, and for adjacent lines with strided cells.
const BLOCKS: [usize; 2] = [2048, 256];

/// Terms of a sum.
#[derive(Clone, Copy, Debug)]
pub(super) enum Term<'a, E> {
    /// Cells.
    Cell,
    /// Squares of cells.
    Square,
    /// Squared distances from a value per line.
    Distance(&'a [E]),
    /// Products with the cells of another tensor.
    Product(&'a [E]),
}

impl<E: Element> Term<'_, E> {
    /// Adds the terms of a vector of cells to a sum; `others` are their middle values or factors.
    #[inline(always)]
    fn add<S: Simd>(
        self,
        simd: S,
        sum: E::Vector<S>,
        x: E::Vector<S>,
        others: E::Vector<S>,
    ) -> E::Vector<S> {
        match self {
            Self::Cell => E::plus(simd, sum, x),
            Self::Square => E::mul_add(simd, x, x, sum),
            Self::Distance(_) => {
                let away = E::minus(simd, x, others);
                E::mul_add(simd, away, away, sum)
            }
            Self::Product(_) => E::mul_add(simd, x, others, sum),
        }
    }

    /// Computes the gradient of a vector of cells from that of their sums.
    #[inline(always)]
    fn pull<S: Simd>(
        self,
        simd: S,
        x: &[E],
        cells: Range<usize>,
        [middles, cotangents]: [E::Vector<S>; 2],
    ) -> E::Vector<S> {
        match self {
            Self::Cell | Self::Product(_) => {
                unreachable!("these gradients are lines of one number, and scaled lines")
            }
            Self::Square | Self::Distance(_) => {
                let away = E::minus(simd, load(simd, &x[cells]), middles);
                E::times(simd, away, cotangents)
            }
        }
    }

    fn middle(self, line: usize) -> E {
        match self {
            Self::Distance(middles) => middles[line],
            _ => E::default(),
        }
    }
}

/// Computes the sum of each line, times `scale`.
pub(super) fn forward<E: Element>(
    isa: Isa,
    lines: Lines,
    x: &[E],
    term: Term<'_, E>,
    scale: f64,
) -> Vec<E> {
    assert_eq!(x.len(), lines.len());
    let run = |place, cells, sums: &mut [E]| {
        isa.run(Sum {
            lines,
            place,
            x,
            term,
            cells,
            sums,
        });
    };
    let (partial, blocks) = of_blocks(lines, BLOCKS, E::default(), run);
    if blocks.cells == 1 && scale == 1.0 {
        return partial;
    }
    let total = |line| {
        let sums = blocks.of_line(line).map(|place| partial[place].to_f64());
        E::from_f64(sums.sum::<f64>() * scale)
    };
    of_lines(lines, total)
}

/// Computes a value for each line.
pub(super) fn of_lines<E: Element>(lines: Lines, value: impl Fn(usize) -> E + Sync) -> Vec<E> {
    let mut values = vec![E::default(); lines.count()];
    tasks::for_each_part(&mut values, CHUNK, 1, |part, values| {
        for (line, place) in (part * CHUNK..).zip(values) {
            *place = value(line);
        }
    });
    values
}

/// Computes a value for each block of cells of each line, and returns these as lines of values.
/// `block` has the cells per block for contiguous lines, and for adjacent lines with strided cells.
/// `run` combines cells of some columns with the values passed to it, which are initially `first`,
/// the value of no cells.
pub(super) fn of_blocks<E: Element>(
    lines: Lines,
    block: [usize; 2],
    first: E,
    run: impl Fn(Columns, Range<usize>, &mut [E]) + Sync,
) -> (Vec<E>, Lines) {
    let Lines { cells, inner, .. } = lines;
    let block = block[usize::from(inner > 1)];
    let blocks = cells.div_ceil(block).max(1);
    let mut partial = vec![first; lines.count() * blocks];
    let together = (CHUNK / (block.min(cells.max(1)) * inner.max(1))).max(1);
    let width = (CHUNK / block.min(cells.max(1))).max(64);
    tasks::for_each_part(&mut partial, inner, together, |number, values| {
        let (outer, start) = (number / blocks, number % blocks * block);
        let cells = start..cells.min(start + block);
        tasks::for_each_part(values, width, 1, |piece, values| {
            let start = piece * width;
            let place = Columns {
                outer,
                columns: start..start + values.len(),
            };
            run(place, cells.clone(), values);
        });
    });
    let blocks = Lines {
        cells: blocks,
        ..lines
    };
    (partial, blocks)
}

/// Multiplies each line by its factor: the gradient of half the sum of its squares.
pub(super) fn scaled<E: Element>(isa: Isa, lines: Lines, x: &[E], factors: &[E]) -> Buffer<E> {
    backward(isa, lines, x, Term::Square, factors, 0.5)
}

/// Computes the gradient of the cells for a sum of squares.
pub(super) fn backward<E: Element>(
    isa: Isa,
    lines: Lines,
    x: &[E],
    term: Term<'_, E>,
    cotangent: &[E],
    scale: f64,
) -> Buffer<E> {
    let scale = E::from_f64(2.0 * scale);
    let run = |place, gradient| {
        isa.run(Gradient {
            lines,
            place,
            x,
            term,
            cotangent,
            scale,
            gradient,
        });
    };
    // SAFETY: a task writes its lines and no others.
    unsafe { lines.filled(lines.len(), run) }
}

struct Sum<'a, E> {
    lines: Lines,
    place: Columns,
    x: &'a [E],
    term: Term<'a, E>,
    cells: Range<usize>,
    sums: &'a mut [E],
}

impl<E: Element> WithSimd for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            term,
            cells,
            sums: totals,
        } = self;
        if lines.inner == 1 {
            let start = place.outer * lines.cells;
            let x = &x[start..][cells.clone()];
            if let Term::Product(others) = term {
                let zero = E::splat(simd, E::default());
                [totals[0]] = sums(
                    simd,
                    [x, &others[start..][cells]],
                    [zero, zero],
                    #[inline(always)]
                    |[sum], [x, other]| [term.add(simd, sum, x, other)],
                );
                return;
            }
            let middle = E::splat(simd, term.middle(place.outer));
            [totals[0]] = sums(
                simd,
                [x],
                [middle],
                #[inline(always)]
                |[sum], [x]| [term.add(simd, sum, x, middle)],
            );
            return;
        }
        for cell in cells {
            let columns = lines.part(&place, cell);
            let x = &x[columns.clone()];
            for part in vectors::<S, E>(totals.len()) {
                let others = match term {
                    Term::Distance(middles) => {
                        load(simd, &middles[lines.of_columns(&place)][part.clone()])
                    }
                    Term::Product(others) => load(simd, &others[columns.clone()][part.clone()]),
                    _ => E::splat(simd, E::default()),
                };
                let sum = load(simd, &totals[part.clone()]);
                let sum = term.add(simd, sum, load(simd, &x[part.clone()]), others);
                store(simd, &mut totals[part], sum);
            }
        }
    }
}

struct Gradient<'a, E> {
    lines: Lines,
    place: Columns,
    x: &'a [E],
    term: Term<'a, E>,
    cotangent: &'a [E],
    scale: E,
    gradient: Shared<E>,
}

impl<E: Element> WithSimd for Gradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            term,
            cotangent,
            scale,
            gradient,
        } = self;
        let scales = E::splat(simd, scale);
        if lines.inner == 1 {
            let range = place.outer * lines.cells..(place.outer + 1) * lines.cells;
            let start = range.start;
            // SAFETY: the line of this task.
            let gradient = unsafe { gradient.slice(range) };
            let cotangent = E::splat(simd, scale * cotangent[place.outer]);
            let middle = E::splat(simd, term.middle(place.outer));
            for part in vectors::<S, E>(lines.cells) {
                let cells = start + part.start..start + part.end;
                let found = term.pull(simd, x, cells, [middle, cotangent]);
                store(simd, &mut gradient[part], found);
            }
            return;
        }
        let of_columns = lines.of_columns(&place);
        for cell in 0..lines.cells {
            let range = lines.part(&place, cell);
            let start = range.start;
            // SAFETY: within the lines of this task.
            let gradient = unsafe { gradient.slice(range) };
            for part in vectors::<S, E>(gradient.len()) {
                let cotangent = load(simd, &cotangent[of_columns.clone()][part.clone()]);
                let middles = match term {
                    Term::Distance(middles) => {
                        load(simd, &middles[of_columns.clone()][part.clone()])
                    }
                    _ => E::splat(simd, E::default()),
                };
                let cotangent = E::times(simd, cotangent, scales);
                let cells = start + part.start..start + part.end;
                let found = term.pull(simd, x, cells, [middles, cotangent]);
                store(simd, &mut gradient[part], found);
            }
        }
    }
}
