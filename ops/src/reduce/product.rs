//! Cumulative products along a whole dim of one shard: kernels, and a node of the graph.

use std::array;
use std::ops::Range;

use burn::tensor::Tensor;
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::lanes::{CHUNK, load, store};
use crate::kernel::lines::{Columns as Place, Lines, slice, vectors};
use crate::kernel::local::LocalOperator;
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// The products up to each cell of a dim.
#[derive(Clone, Copy, Debug)]
pub(super) struct CumulativeProduct {
    pub(super) dim: usize,
}

impl LocalOperator for CumulativeProduct {
    const NAMES: [&'static str; 2] = ["cumprod", "cumprod (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        let lines = Lines::along(shape, self.dim..self.dim + 1);
        (products(isa, lines, x, None), shape.to_vec())
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E> {
        let lines = Lines::along(shape, self.dim..self.dim + 1);
        products(isa, lines, x, Some(cotangent))
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        x.cumprod(self.dim)
    }
}

/// Products of lines or, for a cotangent, their gradient: that of cell `i` is `(Π_{j < i} x[j]) · s[i]` with
/// `s[i] = ȳ[i] + x[i + 1] · s[i + 1]`, without a quotient, so that cells may be zero.
fn products<E: Element>(isa: Isa, lines: Lines, x: &[E], cotangent: Option<&[E]>) -> Buffer<E> {
    assert_eq!(x.len(), lines.len());
    if lines.inner == 1 {
        return rows(lines, x, cotangent);
    }
    let run = |place, result| {
        isa.run(Columns {
            lines,
            place,
            x,
            cotangent,
            result,
        })
    };
    // SAFETY: a task writes its lines and no others.
    unsafe { lines.filled(lines.len(), run) }
}

/// Lines whose cells lie side by side, several at a time: a product waits for the one before.
fn rows<E: Element>(lines: Lines, x: &[E], cotangent: Option<&[E]>) -> Buffer<E> {
    const TOGETHER: usize = 8;
    let Lines { outer, cells, .. } = lines;
    // SAFETY: the tasks write all elements of their lines, which are all.
    unsafe {
        Buffer::filled(lines.len(), |result| {
            let few = (CHUNK / (TOGETHER * cells).max(1)).max(1);
            tasks::for_each(outer.div_ceil(TOGETHER), few, |task| {
                let all = task * TOGETHER..outer.min((task + 1) * TOGETHER);
                let part = |lines: Range<usize>| {
                    let range = lines.start * cells..lines.end * cells;
                    let cotangent = cotangent.map(|cotangent| &cotangent[range.clone()]);
                    (&x[range.clone()], cotangent, slice(result, range))
                };
                if all.len() == TOGETHER {
                    lines_of::<E, TOGETHER>(part(all), cells);
                } else {
                    all.for_each(|line| lines_of::<E, 1>(part(line..line + 1), cells));
                }
            });
        })
    }
}

fn apart<E, const N: usize>(all: &[E], cells: usize) -> [&[E]; N] {
    array::from_fn(|line| &all[line * cells..][..cells])
}

/// In f64: products of many numbers of f32 are soon too small for its exponent, where arithmetic is slow.
fn lines_of<E: Element, const N: usize>(
    (x, cotangent, result): (&[E], Option<&[E]>, &mut [E]),
    cells: usize,
) {
    let x = apart::<E, N>(x, cells);
    let mut products = [1.0; N];
    for cell in 0..cells {
        for line in 0..N {
            let next = products[line] * x[line][cell].to_f64();
            let kept = if cotangent.is_some() {
                products[line]
            } else {
                next
            };
            result[line * cells + cell] = E::from_f64(kept);
            products[line] = next;
        }
    }
    let Some(cotangent) = cotangent.map(|cotangent| apart::<E, N>(cotangent, cells)) else {
        return;
    };
    let mut sums = [0.0; N];
    for cell in (0..cells).rev() {
        for line in 0..N {
            let all = cotangent[line][cell].to_f64() + sums[line];
            let gradient = &mut result[line * cells + cell];
            *gradient = E::from_f64(gradient.to_f64() * all);
            sums[line] = x[line][cell].to_f64() * all;
        }
    }
}

/// Lines beside each other.
struct Columns<'a, E> {
    lines: Lines,
    place: Place,
    x: &'a [E],
    cotangent: Option<&'a [E]>,
    result: Shared<E>,
}

impl<E: Element> WithSimd for Columns<'_, E> {
    type Output = ();

    /// A vector of lines at a time.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            lines,
            place,
            x,
            cotangent,
            result,
        } = self;
        let first = place.columns.start;
        for part in vectors::<S, E>(place.columns.len()) {
            let place = Place {
                outer: place.outer,
                columns: first + part.start..first + part.end,
            };
            // SAFETY: of the lines of this task.
            let row = |cell: usize| unsafe { slice(result, lines.part(&place, cell)) };
            let mut product = E::splat(simd, E::from_f64(1.0));
            for cell in 0..lines.cells {
                let next = E::times(simd, product, load(simd, &x[lines.part(&place, cell)]));
                let kept = if cotangent.is_some() { product } else { next };
                store(simd, row(cell), kept);
                product = next;
            }
            let Some(cotangent) = cotangent else {
                continue;
            };
            let mut sum = E::splat(simd, E::default());
            for cell in (0..lines.cells).rev() {
                let range = lines.part(&place, cell);
                let all = E::plus(simd, load(simd, &cotangent[range.clone()]), sum);
                let row = row(cell);
                let gradient = E::times(simd, load(simd, row), all);
                store(simd, row, gradient);
                sum = E::times(simd, load(simd, &x[range]), all);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::local::check_composed;
    use crate::kernel::testing::random;

    #[test]
    fn kernels_and_burns_operators_agree() {
        (0..4).for_each(|dim| check_composed(CumulativeProduct { dim }));
    }

    #[test]
    fn lines_together_are_those_apart() {
        let x = random(19 * 7, 1);
        let cotangent = random(19 * 7, 2);
        let along = |outer| Lines {
            outer,
            cells: 7,
            inner: 1,
        };
        for cotangent in [None, Some(&cotangent[..])] {
            let all = rows(along(19), &x, cotangent);
            for line in 0..19 {
                let range = 7 * line..7 * line + 7;
                let cotangent = cotangent.map(|cotangent| &cotangent[range.clone()]);
                assert_eq!(*rows(along(1), &x[range.clone()], cotangent), all[range]);
            }
        }
    }
}
