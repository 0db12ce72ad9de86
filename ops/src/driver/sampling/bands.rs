//! Sums with weights along the last dim, or along the last two, of a shard on the CPU.
//!
//! Lanes are rows of results: the cells of as many rows as a vector has lanes are transposed, so that a sum along a row is one
//! of vectors, whichever cells it has. A task has some rows and a block of their outputs.

use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::Map;
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{CHUNK, WIDEST, load, store};
use crate::kernel::lines::vectors;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::simd::{Element, Isa};
use crate::kernel::transpose::{pack, unpack};

/// Outputs of a row that a task computes.
const BLOCK: usize = 128;
/// Cells of a row that are summed up before they are transposed.
const PIECE: usize = 128;

/// A [`Map`] as kernels read it: the cells and weights of all outputs, one after the other.
pub(super) struct Sums<E> {
    taps: Vec<(usize, E)>,
    /// Where those of each output end.
    ends: Vec<usize>,
}

impl<E: Element> Sums<E> {
    pub(super) fn new(map: &Map) -> Self {
        let taps = map.iter().flatten();
        let ends = map.iter().scan(0, |end, taps| {
            *end += taps.len();
            Some(*end)
        });
        Self {
            taps: taps
                .map(|(cell, weight)| (*cell, E::from_f64(*weight)))
                .collect(),
            ends: ends.collect(),
        }
    }

    fn outputs(&self) -> usize {
        self.ends.len()
    }

    #[inline(always)]
    pub(super) fn of(&self, output: usize) -> &[(usize, E)] {
        let start = output.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.taps[start..self.ends[output]]
    }

    /// The cells from the first to the last that some outputs have.
    fn reach(&self, outputs: Range<usize>) -> Range<usize> {
        let cells = || {
            outputs
                .clone()
                .flat_map(|output| self.of(output))
                .map(|tap| tap.0)
        };
        cells().min().unwrap_or(0)..cells().max().map_or(0, |last| last + 1)
    }
}

/// `[planes, down, across]` from `[planes, rows, columns]`; without `down` rows stay.
pub(super) fn of_bands<E: Element>(
    isa: Isa,
    x: &[E],
    [planes, rows, columns]: [usize; 3],
    down: Option<&Sums<E>>,
    across: &Sums<E>,
) -> Buffer<E> {
    assert_eq!(x.len(), planes * rows * columns);
    let (height, outputs) = (down.map_or(rows, Sums::outputs), across.outputs());
    let blocks: Vec<[Range<usize>; 2]> = (0..outputs)
        .step_by(BLOCK)
        .map(|start| start..outputs.min(start + BLOCK))
        .map(|block| [block.clone(), across.reach(block)])
        .collect();
    let widest = blocks.iter().map(|[_, cells]| cells.len()).max();
    let room = WIDEST * (widest.unwrap_or(0) + PIECE + WIDEST);
    let (all, len) = (planes * height, planes * height * outputs);
    let count = all.div_ceil(WIDEST) * blocks.len();
    let together = (CHUNK * count / x.len().max(len).max(1)).max(1);
    let run = |task: usize, y: Shared<E>| {
        let first = task / blocks.len() * WIDEST;
        let [block, cells] = blocks[task % blocks.len()].clone();
        with_scratch(room, |scratch| {
            isa.run(Band {
                x,
                plane: [rows, columns],
                height,
                down,
                across,
                rows: first..all.min(first + WIDEST),
                block,
                cells,
                scratch,
                y,
            });
        });
    };
    // SAFETY: tasks write all blocks of all rows, each its own.
    unsafe {
        Buffer::filled(len, |y| {
            tasks::for_each(count, together, |task| run(task, y))
        })
    }
}

/// A block of outputs of some rows of results.
struct Band<'a, E> {
    x: &'a [E],
    /// Rows and columns of a plane of cells.
    plane: [usize; 2],
    /// Rows of results of a plane.
    height: usize,
    down: Option<&'a Sums<E>>,
    across: &'a Sums<E>,
    /// The rows, counted through all planes.
    rows: Range<usize>,
    block: Range<usize>,
    /// The columns that the block has cells in.
    cells: Range<usize>,
    scratch: &'a mut [E],
    y: Shared<E>,
}

impl<E: Element> WithSimd for Band<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            x,
            plane: [height_of_cells, columns],
            height,
            down,
            across,
            rows,
            block,
            cells,
            scratch,
            y,
        } = self;
        let lanes = E::lanes::<S>();
        let (one, ones) = (E::from_f64(1.0), E::splat(simd, E::from_f64(1.0)));
        let (turned, rest) = scratch.split_at_mut(lanes * cells.len());
        let (sums, results) = rest.split_at_mut(lanes * PIECE);
        for first in rows.clone().step_by(lanes) {
            let count = lanes.min(rows.end - first);
            let of_plane = |row: usize| {
                let plane = row / height * height_of_cells * columns;
                (&x[plane..][..height_of_cells * columns], row % height)
            };
            for start in cells.clone().step_by(PIECE) {
                let width = PIECE.min(cells.end - start);
                if let Some(down) = down {
                    for lane in 0..count {
                        let (cells, row) = of_plane(first + lane);
                        let sum = &mut sums[lane * PIECE..][..width];
                        sum_rows(simd, (cells, columns), start, down.of(row), sum);
                    }
                }
                let mut from = [std::ptr::null(); WIDEST];
                for (lane, from) in from[..count].iter_mut().enumerate() {
                    let (cells, row) = of_plane(first + lane);
                    *from = match down {
                        Some(_) => sums[lane * PIECE..][..width].as_ptr(),
                        None => cells[row * columns + start..][..width].as_ptr(),
                    };
                }
                let to = turned[lanes * (start - cells.start)..][..lanes * width].as_mut_ptr();
                // SAFETY: all rows have so many cells, and there is room for as many vectors.
                unsafe { pack(simd, &from[..count], width, one, (to, lanes)) };
            }
            for start in block.clone().step_by(lanes) {
                let width = lanes.min(block.end - start);
                for number in 0..width {
                    let mut sum = E::splat(simd, E::default());
                    for (cell, weight) in across.of(start + number) {
                        let cell = load(simd, &turned[lanes * (cell - cells.start)..][..lanes]);
                        sum = E::mul_add(simd, cell, E::splat(simd, *weight), sum);
                    }
                    store(simd, &mut results[lanes * number..][..lanes], sum);
                }
                let mut to = [std::ptr::null_mut(); WIDEST];
                // SAFETY: outputs of this task; there are so many vectors, and room for as many elements in each row.
                unsafe {
                    for (lane, to) in to[..count].iter_mut().enumerate() {
                        *to = y.at((first + lane) * across.outputs() + start);
                    }
                    unpack(simd, results.as_mut_ptr(), width, ones, &to[..count]);
                }
            }
        }
    }
}

/// Adds up rows of `columns` cells, times weights: some cells of each, from `start` on.
#[inline(always)]
fn sum_rows<S: Simd, E: Element>(
    simd: S,
    (cells, columns): (&[E], usize),
    start: usize,
    taps: &[(usize, E)],
    output: &mut [E],
) {
    for part in vectors::<S, E>(output.len()) {
        let mut sum = E::splat(simd, E::default());
        for (row, weight) in taps {
            let cells = &cells[row * columns + start..][part.clone()];
            sum = E::mul_add(simd, load(simd, cells), E::splat(simd, *weight), sum);
        }
        store(simd, &mut output[part], sum);
    }
}

/// One output of many lines side by side.
pub(super) struct Row<'a, E> {
    pub(super) cells: &'a [E],
    pub(super) taps: &'a [(usize, E)],
    pub(super) output: &'a mut [E],
}

impl<E: Element> WithSimd for Row<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let columns = self.output.len();
        sum_rows(simd, (self.cells, columns), 0, self.taps, self.output);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Taps;
    use super::*;
    use crate::kernel::testing::{random, rounded, same_for_all_pools};

    /// Sums of up to four cells, some of none, at places that rise.
    fn map(size: usize, outputs: usize) -> Map {
        let taps = |output: usize| -> Taps {
            let first = output * size / outputs;
            let cells = first..size.min(first + output % 5);
            cells
                .map(|cell| (cell, ((cell + output) % 7) as f64 * 0.25 - 0.7))
                .collect()
        };
        (0..outputs).map(taps).collect()
    }

    fn check<E: Element>() {
        for (shape, [height, outputs]) in [
            ([2, 37, 300], [11, 411]),
            ([1, 16, 5], [33, 7]),
            ([3, 1, 600], [1, 130]),
            ([40, 3, 1], [2, 1]),
        ] {
            let [planes, rows, columns] = shape;
            let x = rounded::<E>(&random(shape.iter().product(), 1));
            let across = map(columns, outputs);
            for down in [None, Some(map(rows, height))] {
                let expected = |plane: usize, row: usize, output: usize| {
                    let alone = vec![(row, 1.0)];
                    let rows_of = down.as_ref().map_or(&alone, |down| &down[row]);
                    let terms = rows_of.iter().flat_map(|(row, weight)| {
                        let cells = &x[(plane * rows + row) * columns..][..columns];
                        let terms = across[output].iter();
                        terms.map(move |(cell, other)| weight * other * cells[*cell].to_f64())
                    });
                    terms.sum::<f64>()
                };
                for isa in Isa::available() {
                    let sums = [down.as_ref(), Some(&across)].map(|map| map.map(Sums::<E>::new));
                    let [down, Some(across)] = &sums else {
                        unreachable!("both are there")
                    };
                    let y = same_for_all_pools(|| {
                        of_bands(isa, &x, shape, down.as_ref(), across).to_vec()
                    });
                    let height = down.as_ref().map_or(rows, Sums::outputs);
                    assert_eq!(y.len(), planes * height * outputs);
                    for (index, y) in y.into_iter().enumerate() {
                        let (row, output) = (index / outputs, index % outputs);
                        let expected = expected(row / height, row % height, output);
                        let off = (y.to_f64() - expected).abs();
                        assert!(off <= 1e-5, "{shape:?}: {off}");
                    }
                }
            }
        }
    }

    #[test]
    fn sums_are_those_of_the_map_along_one_dim_and_two() {
        check::<f32>();
        check::<f64>();
    }
}
