//! Cumulative sums along a dim: kernel and nodes of the graph.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Exchange, Operator};
use pulp::{Simd, WithSimd};

use super::kernel::{Term, forward};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::{load, store};
use crate::kernel::lines::{Columns, Lines, vectors};
use crate::kernel::local::LocalOperator;
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Cumulative sum along a whole dim.
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
        let y = scanned(isa, self.lines(shape), x, &[], false);
        (y, shape.to_vec())
    }

    /// Sums the cotangents from each cell on.
    fn backward<E: Float>(self, isa: Isa, _: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        scanned(isa, self.lines(shape), cotangent, &[], true)
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        x.cumsum(self.dim)
    }
}

/// Computes cumulative sums of lines, starting at the last cell if `reversed`. `carried` is the
/// initial sum of each line, or empty.
fn scanned<E: Element>(
    isa: Isa,
    lines: Lines,
    x: &[E],
    carried: &[E],
    reversed: bool,
) -> Buffer<E> {
    assert_eq!(x.len(), lines.len());
    assert!(carried.is_empty() || carried.len() == lines.count());
    let run = |place, y| {
        isa.run(Scan {
            lines,
            place,
            x,
            carried,
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
    carried: &'a [E],
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
            carried,
            y,
            reversed,
        } = self;
        let cells = lines.cells;
        if lines.inner == 1 {
            let line = place.outer * cells..(place.outer + 1) * cells;
            // SAFETY: the line of this task.
            let y = unsafe { y.slice(line.clone()) };
            let mut sum = carried.get(place.outer).map_or(0.0, |sum| sum.to_f64());
            let mut add = |(y, x): (&mut E, &E)| {
                sum += x.to_f64();
                *y = E::from_f64(sum);
            };
            let pairs = y.iter_mut().zip(&x[line]);
            if reversed {
                pairs.rev().for_each(&mut add)
            } else {
                pairs.for_each(&mut add)
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
            let mut sum = match carried {
                [] => E::splat(simd, E::default()),
                carried => load(simd, &carried[lines.of_columns(&place)]),
            };
            // The rounding error of each addition is carried into the next term, as if sums had
            // twice as many digits (Knuth's two-sum).
            let zero = E::splat(simd, E::default());
            let mut lost = zero;
            for turn in 0..cells {
                let cell = if reversed { cells - 1 - turn } else { turn };
                let range = lines.part(&place, cell);
                let term = E::plus(simd, load(simd, &x[range.clone()]), lost);
                let next = E::plus(simd, sum, term);
                let added = E::minus(simd, next, sum);
                let of_sum = E::minus(simd, sum, E::minus(simd, next, added));
                lost = E::plus(simd, of_sum, E::minus(simd, term, added));
                // An infinite sum has no rounding error.
                let is_finite = [E::minus(simd, lost, lost), zero];
                lost = E::select_equal(simd, is_finite, lost, zero);
                sum = next;
                // SAFETY: within the lines of this task.
                store(simd, unsafe { y.slice(range) }, sum);
            }
        }
    }
}

/// Cumulative sum along a dim that is sharded over ranks.
#[derive(Debug)]
pub(super) struct CarriedSum {
    pub(super) dim: usize,
    /// Fetches the totals of the ranks before this one: one cell of each line per rank along the
    /// dim.
    pub(super) totals: Exchange,
}

impl CarriedSum {
    /// Computes the sums of a shard and of the ranks before it; if `reversed`, and with the
    /// reversed exchange, of the ranks behind it.
    fn sums(
        &self,
        exchange: &Exchange,
        x: DispatchTensor,
        reversed: bool,
    ) -> Result<DispatchTensor> {
        let (dtype, shape, isa) = (x.dtype(), x.shape(), Isa::chosen()?);
        Ok(with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let (x, lines) = (flex::elements::<E>(&x), Lines::along(&shape, self.dim..self.dim + 1));
            let total = |lines, x| forward(isa, lines, x, Term::Cell, 1.0);
            let mut totals = total(lines, x);
            let mut of_totals = shape.to_vec();
            of_totals[self.dim] = 1;
            if reversed {
                // This is the gradient of every rank's cell.
                let ranks = exchange.backward.plan.output_shape[self.dim];
                let outer = totals.chunks(lines.inner.max(1));
                totals = outer.flat_map(|of_outer| of_outer.repeat(ranks)).collect();
                of_totals[self.dim] = ranks;
            }
            let totals = flex::small_result(totals, &of_totals, dtype);
            let received = exchange.send_all(&totals)?.finish()?;
            let others = exchange.assemble(totals, received);
            let of_others = Lines::along(&others.shape(), self.dim..self.dim + 1);
            let others = flex::operand::<E>(others)?;
            let carried = total(of_others, flex::elements(&others));
            flex::result(scanned(isa, lines, x, &carried, reversed), &shape, dtype)
        }))
    }
}

impl Operator for CarriedSum {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(CumulativeSum::NAMES)
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((self.sums(&self.totals, inputs.remove(0), false)?, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let exchange = self.totals.clone().reversed();
        Ok(vec![Some(self.sums(&exchange, pass.cotangent, true)?)])
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

    #[test]
    fn long_sums_are_rounded_once() {
        for inner in [1, 3] {
            let (cells, isa) = (200_000, Isa::chosen().unwrap());
            let mut x = vec![0.1_f32; cells * inner];
            let shape = [cells, inner];
            let lines = Lines::along(&shape, 0..1);
            let y = scanned(isa, lines, &x, &[], false);
            let expected = (f64::from(0.1_f32) * cells as f64) as f32;
            assert_eq!(y.last(), Some(&expected));
            x[5 * inner] = f32::INFINITY;
            let y = scanned(isa, lines, &x, &[], false);
            assert!(y[4 * inner] < 1.0 && y[(cells - 1) * inner] == f32::INFINITY);
        }
    }
}
