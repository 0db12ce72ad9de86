//! Weighted sums along the last dim of a shard on the CPU.
//!
//! Lanes are rows of results: the cells of as many rows as a vector has lanes are transposed, so
//! that a sum along a row is a sum of vectors, whatever its cells. A task covers some rows and a
//! block of their outputs.

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

/// Outputs per row and task.
const BLOCK: usize = 128;

/// A [`Map`] in the form that kernels read: the cells and weights of all outputs, one after
/// another.
#[derive(Debug)]
pub(super) struct Sums<E> {
    taps: Vec<(usize, E)>,
    /// End of the taps of each output.
    ends: Vec<usize>,
}

impl Sums<f64> {
    pub(super) fn new(map: &Map) -> Self {
        let ends = map.iter().scan(0, |end, taps| {
            *end += taps.len();
            Some(*end)
        });
        Self {
            taps: map.iter().flatten().copied().collect(),
            ends: ends.collect(),
        }
    }

    /// Adjoint of a map from `size` cells. A cell that no output uses becomes an empty sum.
    pub(super) fn transposed(&self, size: usize) -> Self {
        let mut ends = vec![0; size];
        for (cell, _) in &self.taps {
            ends[*cell] += 1;
        }
        let mut start = 0;
        for end in &mut ends {
            (start, *end) = (start + *end, start);
        }
        // Each end moves from the first tap of its cell to the last.
        let mut taps = vec![(0, 0.0); self.taps.len()];
        for output in 0..self.outputs() {
            for (cell, weight) in self.of(output) {
                taps[ends[*cell]] = (output, *weight);
                ends[*cell] += 1;
            }
        }
        Self { taps, ends }
    }

    /// The sums with weights of another dtype.
    pub(super) fn to<E: Element>(&self) -> Sums<E> {
        let taps = self.taps.iter();
        Sums {
            taps: taps
                .map(|(cell, weight)| (*cell, E::from_f64(*weight)))
                .collect(),
            ends: self.ends.clone(),
        }
    }
}

impl<E: Copy> Sums<E> {
    pub(super) fn outputs(&self) -> usize {
        self.ends.len()
    }

    #[inline(always)]
    pub(super) fn of(&self, output: usize) -> &[(usize, E)] {
        let start = output.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.taps[start..self.ends[output]]
    }

    /// Range from the first to the last cell that a range of outputs uses.
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

/// Computes `[rows, outputs]` from `[rows, columns]`.
pub(super) fn of_rows<E: Element>(
    isa: Isa,
    x: &[E],
    [rows, columns]: [usize; 2],
    sums: &Sums<E>,
) -> Buffer<E> {
    assert_eq!(x.len(), rows * columns);
    let outputs = sums.outputs();
    let blocks: Vec<[Range<usize>; 2]> = (0..outputs)
        .step_by(BLOCK)
        .map(|start| start..outputs.min(start + BLOCK))
        .map(|block| [block.clone(), sums.reach(block)])
        .collect();
    let widest = blocks.iter().map(|[_, cells]| cells.len()).max();
    let room = WIDEST * (widest.unwrap_or(0) + WIDEST);
    let len = rows * outputs;
    let count = rows.div_ceil(WIDEST) * blocks.len();
    let together = (CHUNK * count / x.len().max(len).max(1)).max(1);
    let run = |task: usize, y: Shared<E>| {
        let first = task / blocks.len() * WIDEST;
        let [block, cells] = blocks[task % blocks.len()].clone();
        with_scratch(room, |scratch| {
            isa.run(Band {
                x,
                columns,
                sums,
                rows: first..rows.min(first + WIDEST),
                block,
                cells,
                scratch,
                y,
            });
        });
    };
    // SAFETY: together, the tasks write all blocks of all rows, and each writes only its own.
    unsafe {
        Buffer::filled(len, |y| {
            tasks::for_each(count, together, |task| run(task, y))
        })
    }
}

/// A block of outputs of some rows.
struct Band<'a, E> {
    x: &'a [E],
    /// Number of cells of a row.
    columns: usize,
    sums: &'a Sums<E>,
    rows: Range<usize>,
    block: Range<usize>,
    /// Range of columns that the block reads.
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
            columns,
            sums,
            rows,
            block,
            cells,
            scratch,
            y,
        } = self;
        let lanes = E::lanes::<S>();
        let (one, ones) = (E::from_f64(1.0), E::splat(simd, E::from_f64(1.0)));
        let (turned, results) = scratch.split_at_mut(lanes * cells.len());
        for first in rows.clone().step_by(lanes) {
            let count = lanes.min(rows.end - first);
            let mut from = [std::ptr::null(); WIDEST];
            for (lane, from) in from[..count].iter_mut().enumerate() {
                *from = x[(first + lane) * columns..][cells.clone()].as_ptr();
            }
            let to = (turned.as_mut_ptr(), lanes);
            // SAFETY: all rows have `cells.len()` cells, and there is room for as many vectors.
            unsafe { pack(simd, &from[..count], cells.len(), one, to) };
            for start in block.clone().step_by(lanes) {
                let width = lanes.min(block.end - start);
                for number in 0..width {
                    let mut sum = E::splat(simd, E::default());
                    for (cell, weight) in sums.of(start + number) {
                        let cell = load(simd, &turned[lanes * (cell - cells.start)..][..lanes]);
                        sum = E::mul_add(simd, cell, E::splat(simd, *weight), sum);
                    }
                    store(simd, &mut results[lanes * number..][..lanes], sum);
                }
                let mut to = [std::ptr::null_mut(); WIDEST];
                // SAFETY: these outputs belong to this task; there are `width` vectors, and each
                // row has room for `width` elements.
                unsafe {
                    for (lane, to) in to[..count].iter_mut().enumerate() {
                        *to = y.at((first + lane) * sums.outputs() + start);
                    }
                    unpack(simd, results.as_mut_ptr(), width, ones, &to[..count]);
                }
            }
        }
    }
}

/// One output of many adjacent lines.
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
        for part in vectors::<S, E>(columns) {
            let mut sum = E::splat(simd, E::default());
            for (row, weight) in self.taps {
                let cells = &self.cells[row * columns..][part.clone()];
                sum = E::mul_add(simd, load(simd, cells), E::splat(simd, *weight), sum);
            }
            store(simd, &mut self.output[part], sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Taps;
    use super::*;
    use crate::kernel::testing::{random, rounded, same_for_all_pools};

    /// Sums of zero to four cells at increasing positions.
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
        for ([rows, columns], outputs) in [
            ([74, 300], 411),
            ([16, 5], 7),
            ([3, 600], 130),
            ([120, 1], 1),
        ] {
            let x = rounded::<E>(&random(rows * columns, 1));
            let map = map(columns, outputs);
            let sums = Sums::new(&map).to::<E>();
            for isa in Isa::available() {
                let y = same_for_all_pools(|| of_rows(isa, &x, [rows, columns], &sums).to_vec());
                assert_eq!(y.len(), rows * outputs);
                for (index, y) in y.into_iter().enumerate() {
                    let (row, output) = (index / outputs, index % outputs);
                    let terms = map[output].iter();
                    let terms =
                        terms.map(|(cell, weight)| weight * x[row * columns + cell].to_f64());
                    let off = (y.to_f64() - terms.sum::<f64>()).abs();
                    assert!(off <= 1e-5, "{rows} rows of {columns}: {off}");
                }
            }
        }
    }

    /// The adjoint of the adjoint is the map itself, up to the order of taps.
    #[test]
    fn adjoints_have_the_same_weights() {
        let map = map(12, 30);
        let sums = Sums::new(&map);
        let adjoint = sums.transposed(12);
        assert_eq!(adjoint.outputs(), 12);
        for (output, taps) in map.iter().enumerate() {
            for (cell, weight) in taps {
                assert!(adjoint.of(*cell).contains(&(output, *weight)));
            }
        }
        let again = adjoint.transposed(30);
        assert!((0..30).all(|output| again.of(output) == sums.of(output)));
    }

    #[test]
    fn sums_are_those_of_the_map() {
        check::<f32>();
        check::<f64>();
    }
}
