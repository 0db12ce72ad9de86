//! Sums with weights along the last dim, or along the last two, of a shard on the CPU.
//!
//! Lanes are rows: the cells of as many rows as a vector has lanes are transposed, so that a sum along a row is one of vectors,
//! whichever cells it has.

use pulp::{Simd, WithSimd};

use super::Map;
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::{WIDEST, filled_bands, load, store};
use crate::kernel::memory::with_scratch;
use crate::kernel::simd::{Element, Isa};
use crate::kernel::transpose::{pack, unpack};

/// Cells of a row that are summed up before they are transposed.
const PIECE: usize = 128;
/// Vectors of sums that each weight is used for at a time.
const TOGETHER: usize = 4;

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

    pub(super) fn outputs(&self) -> usize {
        self.ends.len()
    }

    #[inline(always)]
    pub(super) fn of(&self, output: usize) -> &[(usize, E)] {
        let start = output.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.taps[start..self.ends[output]]
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
    let shape = [planes, down.map_or(rows, Sums::outputs), across.outputs()];
    let run = |[plane, band]: [usize; 2], output: &mut [E]| {
        with_scratch(WIDEST * (columns + PIECE + WIDEST), |scratch| {
            isa.run(Band {
                cells: &x[plane * rows * columns..][..rows * columns],
                columns,
                down,
                across,
                first: band * WIDEST,
                scratch,
                output,
            });
        });
    };
    // SAFETY: the task writes all rows of its band.
    unsafe { filled_bands(shape, WIDEST, run) }
}

/// Some rows of results.
struct Band<'a, E> {
    /// The cells of their plane.
    cells: &'a [E],
    columns: usize,
    down: Option<&'a Sums<E>>,
    across: &'a Sums<E>,
    /// The first of the rows.
    first: usize,
    scratch: &'a mut [E],
    output: &'a mut [E],
}

impl<E: Element> WithSimd for Band<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            cells,
            columns,
            down,
            across,
            mut first,
            scratch,
            output,
        } = self;
        let (lanes, outputs) = (E::lanes::<S>(), across.outputs());
        let one = E::from_f64(1.0);
        let (turned, rest) = scratch.split_at_mut(lanes * columns);
        let (sums, results) = rest.split_at_mut(lanes * PIECE);
        for output in output.chunks_mut(lanes * outputs) {
            let count = output.len() / outputs;
            for start in (0..columns).step_by(PIECE) {
                let width = PIECE.min(columns - start);
                let mut rows = [std::ptr::null(); WIDEST];
                for (lane, place) in rows[..count].iter_mut().enumerate() {
                    let row = first + lane;
                    *place = match down {
                        None => cells[row * columns + start..].as_ptr(),
                        Some(down) => {
                            let sum = &mut sums[lane * PIECE..][..width];
                            sum_rows(simd, (cells, columns), start, down.of(row), sum);
                            sum.as_ptr()
                        }
                    };
                }
                let to = turned[lanes * start..][..lanes * width].as_mut_ptr();
                // SAFETY: all rows have so many cells, and there is room for as many vectors.
                unsafe { pack(simd, &rows[..count], width, one, (to, lanes)) };
            }
            for start in (0..outputs).step_by(lanes) {
                let width = lanes.min(outputs - start);
                for number in 0..width {
                    let mut sum = E::splat(simd, E::default());
                    for (cell, weight) in across.of(start + number) {
                        let cell = load(simd, &turned[lanes * cell..][..lanes]);
                        sum = E::mul_add(simd, cell, E::splat(simd, *weight), sum);
                    }
                    store(simd, &mut results[lanes * number..][..lanes], sum);
                }
                let mut rows = [std::ptr::null_mut(); WIDEST];
                for (lane, place) in rows[..count].iter_mut().enumerate() {
                    *place = output[lane * outputs + start..][..width].as_mut_ptr();
                }
                let (results, ones) = (results.as_mut_ptr(), E::splat(simd, one));
                // SAFETY: there are so many vectors, and room for as many elements in each row.
                unsafe { unpack(simd, results, width, ones, &rows[..count]) };
            }
            first += count;
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
    let lanes = E::lanes::<S>();
    let (mut start, zero) = (start, E::splat(simd, E::default()));
    for output in output.chunks_mut(TOGETHER * lanes) {
        let mut sums = [zero; TOGETHER];
        for (row, weight) in taps {
            let cells = &cells[row * columns + start..][..output.len()];
            let weight = E::splat(simd, *weight);
            for (sum, cells) in sums.iter_mut().zip(cells.chunks(lanes)) {
                *sum = E::mul_add(simd, load(simd, cells), weight, *sum);
            }
        }
        for (sum, output) in sums.iter().zip(output.chunks_mut(lanes)) {
            store(simd, output, *sum);
        }
        start += TOGETHER * lanes;
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
