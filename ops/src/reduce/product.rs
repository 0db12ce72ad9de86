//! Cumulative products along a whole dim of one shard: kernel and node of the graph.

use burn::tensor::Tensor;
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::lanes::CHUNK;
use crate::kernel::lines::Lines;
use crate::kernel::local::LocalOperator;
use crate::kernel::memory::Shared;
use crate::kernel::simd::{Element, Isa};

/// Cumulative product along a dim.
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

/// Computes products of lines or, given a cotangent, their gradient: that of cell `i` is
/// `(Π_{j < i} x[j]) · s[i]` with `s[i] = ȳ[i] + x[i + 1] · s[i + 1]`, free of divisions, so that
/// cells may be zero. Everything is in f64: products of a few hundred numbers become subnormal in
/// f32, where arithmetic is slow.
fn products<E: Element>(isa: Isa, lines: Lines, x: &[E], cotangent: Option<&[E]>) -> Buffer<E> {
    assert_eq!(x.len(), lines.len());
    assert!(cotangent.is_none_or(|cotangent| cotangent.len() == x.len()));
    let Lines {
        cells,
        inner,
        outer,
    } = lines;
    let run = |first: [usize; 2], count: usize, result: Shared<E>| {
        isa.run(Task {
            lines,
            first: first[0] * cells * inner + first[1],
            count,
            x,
            cotangent,
            result,
        });
    };
    // SAFETY: a task writes its lines and no others.
    unsafe {
        if inner > 1 {
            return lines.filled(lines.len(), |place, result| {
                let columns = place.columns;
                run([place.outer, columns.start], columns.len(), result);
            });
        }
        Buffer::filled(lines.len(), |result| {
            let few = (CHUNK / (ROWS * cells).max(1)).max(1);
            tasks::for_each(outer.div_ceil(ROWS), few, |task| {
                let first = task * ROWS;
                run([first, 0], ROWS.min(outer - first), result);
            });
        })
    }
}

/// Lines processed together, because each product waits for the one before: [`ROWS`] lines with
/// contiguous cells, or [`COLUMNS`] adjacent lines with strided cells.
const ROWS: usize = 8;
const COLUMNS: usize = 16;

/// Some lines, adjacent or one after the other.
struct Task<'a, E> {
    lines: Lines,
    /// Index of the first cell of the first line.
    first: usize,
    count: usize,
    x: &'a [E],
    cotangent: Option<&'a [E]>,
    result: Shared<E>,
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut before = Vec::new();
        let (together, apart) = match self.lines.inner {
            1 => (ROWS, self.lines.cells),
            _ => (COLUMNS, 1),
        };
        let whole = self.count / together * together;
        // SAFETY: the lines of this task.
        unsafe {
            for line in (0..whole).step_by(together) {
                let first = self.first + line * apart;
                match self.lines.inner {
                    1 => self.lines_from::<ROWS, false>(first, &mut before),
                    _ => self.lines_from::<COLUMNS, true>(first, &mut before),
                }
            }
            for line in whole..self.count {
                self.lines_from::<1, true>(self.first + line * apart, &mut before);
            }
        }
    }
}

impl<E: Element> Task<'_, E> {
    /// Writes the results of `N` lines; `before` keeps the products before each cell for the
    /// backward pass.
    ///
    /// # Safety
    /// They must be lines of this task.
    #[inline(always)]
    unsafe fn lines_from<const N: usize, const BESIDE: bool>(
        &self,
        first: usize,
        before: &mut Vec<f64>,
    ) {
        let Lines { cells, inner, .. } = self.lines;
        let apart = if BESIDE { 1 } else { cells };
        let place = |cell: usize, line: usize| first + cell * inner + line * apart;
        let number = |all: &[E], cell: usize, line: usize| {
            // SAFETY: a cell of one of these lines, which are within the tensor.
            unsafe { *all.as_ptr().add(place(cell, line)) }.to_f64()
        };
        let write = |cell: usize, line: usize, value: f64| {
            // SAFETY: as above, and written by this task alone.
            unsafe { *self.result.at(place(cell, line)) = E::from_f64(value) };
        };
        let mut products = [1.0; N];
        before.clear();
        for cell in 0..cells {
            if self.cotangent.is_some() {
                before.extend(products);
            }
            for (line, product) in products.iter_mut().enumerate() {
                *product *= number(self.x, cell, line);
                if self.cotangent.is_none() {
                    write(cell, line, *product);
                }
            }
        }
        let Some(cotangent) = self.cotangent else {
            return;
        };
        let mut sums = [0.0; N];
        for cell in (0..cells).rev() {
            let before = &before[cell * N..][..N];
            for (line, (sum, before)) in sums.iter_mut().zip(before).enumerate() {
                let all = number(cotangent, cell, line) + *sum;
                write(cell, line, before * all);
                *sum = number(self.x, cell, line) * all;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::kernel::local::check_composed_as;
    use crate::kernel::testing::random;

    #[test]
    fn kernels_and_burns_operators_agree() {
        for dim in 0..4 {
            check_composed_as([2, 3, 8, 6], DType::F64, CumulativeProduct { dim });
        }
    }

    /// Lines have the same bits together, alone, contiguous or strided, and products that f32
    /// cannot hold are not lost on the way.
    #[test]
    fn lines_have_the_same_bits_however_they_lie() {
        const CELLS: usize = 7;
        let small = [1e-30, 1e-30, 1.0, 1e30, 1e30, 3.0, 0.5];
        for count in [1, 8, 19, 35] {
            let numbers = |seed| random(count * CELLS, seed).into_iter().map(|x| x as f32);
            let mut x: Vec<f32> = numbers(1).collect();
            x[..CELLS].copy_from_slice(&small);
            let cotangent: Vec<f32> = numbers(2).collect();
            let turned = |rows: &[f32]| -> Vec<f32> {
                let place = |place: usize| rows[place % count * CELLS + place / count];
                (0..rows.len()).map(place).collect()
            };
            let rows = Lines {
                outer: count,
                cells: CELLS,
                inner: 1,
            };
            let columns = Lines {
                outer: 1,
                cells: CELLS,
                inner: count,
            };
            for isa in Isa::available() {
                for cotangent in [None, Some(&cotangent)] {
                    let all = products(isa, rows, &x, cotangent.map(|all| &all[..]));
                    let of_columns = cotangent.map(|all| turned(all));
                    let beside = products(isa, columns, &turned(&x), of_columns.as_deref());
                    assert_eq!(*beside, *turned(&all));
                    for line in 0..count {
                        let range = line * CELLS..(line + 1) * CELLS;
                        let one = Lines { outer: 1, ..rows };
                        let cotangent = cotangent.map(|all| &all[range.clone()]);
                        let alone = products(isa, one, &x[range.clone()], cotangent);
                        assert_eq!(*alone, all[range]);
                    }
                    if cotangent.is_none() {
                        assert!((all[4] - 1.0).abs() < 1e-5, "{}", all[4]);
                    }
                }
            }
        }
    }
}
