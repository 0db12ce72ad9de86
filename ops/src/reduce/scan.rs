//! Cumulative sums along a whole dim of one shard: kernel, and a node of the graph.

use burn::tensor::Tensor;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::lanes::{load, store};
use crate::kernel::lines::{Columns, Lines, slice, vectors};
use crate::kernel::local::LocalOperator;
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// The sums up to each cell of a dim.
#[derive(Clone, Copy, Debug)]
pub(super) struct CumulativeSum {
    pub(super) dim: usize,
}

impl CumulativeSum {
    fn lines(self, shape: &[usize]) -> Lines {
        Lines::along(shape, self.dim..self.dim + 1)
    }
}

impl LocalOperator for CumulativeSum {
    const NAMES: [&'static str; 2] = ["cumsum", "cumsum (backward)"];
    const KEEPS_INPUT: bool = false;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        (scanned(isa, self.lines(shape), x, false), shape.to_vec())
    }

    /// The sums from each cell on.
    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        scanned(isa, self.lines(shape), cotangent, true)
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        x.cumsum(self.dim)
    }
}

/// Adds up the cells of lines, from the last one if they are `reversed`.
fn scanned<E: Element>(isa: Isa, lines: Lines, x: &[E], reversed: bool) -> Buffer<E> {
    assert_eq!(x.len(), lines.len());
    let run = |place, y| {
        isa.run(Scan {
            lines,
            place,
            x,
            y,
            reversed,
        })
    };
    // SAFETY: a task writes its lines and no others.
    unsafe { lines.filled(lines.len(), run) }
}

struct Scan<'a, E> {
    lines: Lines,
    place: Columns,
    x: &'a [E],
    y: Shared<E>,
    reversed: bool,
}

impl<E: Element> WithSimd for Scan<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            y,
            reversed,
        } = self;
        let cells = lines.cells;
        if lines.inner == 1 {
            let line = place.outer * cells..(place.outer + 1) * cells;
            // SAFETY: the line of this task.
            let y = unsafe { slice(y, line.clone()) };
            let mut sum = E::default();
            let mut add = |(y, x): (&mut E, &E)| {
                sum += *x;
                *y = sum;
            };
            let pairs = y.iter_mut().zip(&x[line]);
            match reversed {
                true => pairs.rev().for_each(&mut add),
                false => pairs.for_each(&mut add),
            }
            return;
        }
        let first = place.columns.start;
        for part in vectors::<S, E>(place.columns.len()) {
            let columns = first + part.start..first + part.end;
            let place = Columns {
                outer: place.outer,
                columns,
            };
            let mut sum = E::splat(simd, E::default());
            for turn in 0..cells {
                let cell = if reversed { cells - 1 - turn } else { turn };
                let range = lines.part(&place, cell);
                sum = E::plus(simd, sum, load(simd, &x[range.clone()]));
                // SAFETY: of the lines of this task.
                store(simd, unsafe { slice(y, range) }, sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::check_composed;

    #[test]
    fn kernels_and_burns_operators_agree() {
        (0..4).for_each(|dim| check_composed(CumulativeSum { dim }));
    }
}
