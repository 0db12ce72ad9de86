//! Gradient of the weights: `Σ_cells cotangent[o] · source[c, cell + tap]`, for all outputs,
//! channels and taps.
//!
//! A block of outputs × (channel, tap) stays in registers while the cells of a tile go by, vector
//! by vector; the lanes are summed once per tile. The grid is divided into chunks with
//! separate sums, added in order at the end. The number of chunks follows from the shapes alone, so
//! that the result does not depend on the number of threads.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::geometry::{Conv, Dims};
use super::tile::{Pieces, SKEW, TileLayout, copy_strided, tile_box, tile_extents};
use crate::kernel::memory::{Shared, View, with_scratch};
use crate::kernel::simd::{Element, Isa};

/// Bytes of the cotangent that a block of outputs reads for every group of terms: about a
/// first-level cache.
const CELLS_BYTES: usize = 48 << 10;
/// Most bytes of a tile of the source.
const TILE_BYTES: usize = 384 << 10;
/// Most outputs of a task.
const OUTPUTS: usize = 64;
/// Tasks of a call, if it has work for as many.
const TASKS: usize = 32;
/// Most bytes of the sums of all chunks.
const SUMS_BYTES: usize = 8 << 20;

/// A gradient with respect to weights.
#[derive(Debug)]
pub(crate) struct WeightJob<'a, E> {
    /// The convolution.
    pub conv: &'a Conv,
    /// Its input.
    pub pieces: &'a Pieces<'a, E>,
    /// The gradient of its output, `[batch, channels, *cells]`.
    pub cotangent: View<'a, E, 5>,
}

/// The gradients of weight and bias.
#[derive(Debug)]
pub(crate) struct WeightGradient<E> {
    /// `[outputs, inputs / groups, *kernel]`.
    pub weight: Vec<E>,
    /// `[outputs]`.
    pub bias: Vec<E>,
}

/// Data shared by all tasks.
struct Plan<'a, E> {
    job: &'a WeightJob<'a, E>,
    layout: TileLayout,
    tile: Dims,
    /// Tiles of a sample.
    tiles: usize,
    /// Channels of the source in a block.
    block: usize,
    offsets: Vec<u32>,
    /// Elements from one row of a tile of the cotangent to the next.
    row: usize,
    /// Elements from one output of a tile of the cotangent to the next.
    output: usize,
    /// (sample, tile) pairs of every chunk.
    chunks: Vec<Range<usize>>,
    /// Ranges of outputs of a group.
    ranges: usize,
}

/// A chunk's sums: weights of all groups, then biases.
struct Sums<E> {
    weights: Shared<E>,
    biases: Shared<E>,
}

impl<E: Element> WeightJob<'_, E> {
    /// Computes the gradients.
    pub(crate) fn run(&self, isa: Isa) -> WeightGradient<E> {
        isa.run(Whole(self))
    }
}

struct Whole<'a, E>(&'a WeightJob<'a, E>);

impl<E: Element> WithSimd for Whole<'_, E> {
    type Output = WeightGradient<E>;

    fn with_simd<S: Simd>(self, simd: S) -> WeightGradient<E> {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *self.0.conv;
        let weights = groups * outputs * inputs * self.0.conv.elements();
        let biases = groups * outputs;
        let zeros = || WeightGradient {
            weight: vec![E::default(); weights],
            bias: vec![E::default(); biases],
        };
        let [batch, _, count @ ..] = self.0.cotangent.shape();
        if weights == 0 || batch == 0 || count.contains(&0) {
            return zeros();
        }
        let plan = Plan::new::<S>(self.0, weights * size_of::<E>());
        let mut sums: Vec<WeightGradient<E>> = plan.chunks.iter().map(|_| zeros()).collect();
        let shared: Vec<Sums<E>> = sums
            .iter_mut()
            .map(|sums| Sums {
                weights: Shared::new(&mut sums.weight),
                biases: Shared::new(&mut sums.bias),
            })
            .collect();
        let tasks = 0..plan.chunks.len() * groups * plan.ranges;
        let run = |task: usize| {
            let (chunk, rest) = (task / (groups * plan.ranges), task % (groups * plan.ranges));
            let (group, range) = (rest / plan.ranges, rest % plan.ranges);
            simd.vectorize(Task {
                plan: &plan,
                sums: &shared[chunk],
                chunk,
                group,
                range,
            });
        };
        if tasks.len() == 1 {
            tasks.for_each(run);
        } else {
            tasks.into_par_iter().with_max_len(1).for_each(run);
        }
        let mut sums = sums.into_iter();
        let mut total = sums.next().unwrap_or_else(zeros);
        for more in sums {
            for (sum, value) in total.weight.iter_mut().zip(more.weight) {
                *sum += value;
            }
            for (sum, value) in total.bias.iter_mut().zip(more.bias) {
                *sum += value;
            }
        }
        total
    }
}

impl<'a, E: Element> Plan<'a, E> {
    fn new<S: Simd>(job: &'a WeightJob<'a, E>, bytes: usize) -> Self {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *job.conv;
        let [batch, _, count @ ..] = job.cotangent.shape();
        let correlation = job.conv.forward(count);
        let lanes = E::lanes::<S>();
        let cells = CELLS_BYTES / size_of::<E>() / block::<S>();
        let room = TILE_BYTES / size_of::<E>();
        let fits = |layout: &TileLayout, tile: Dims| {
            layout.len(1) <= room && tile[0] * tile[1] * tile[2].next_multiple_of(lanes) <= cells
        };
        let tile = tile_extents(&correlation, [4 * lanes, 8], 1, fits);
        let layout = TileLayout::new(&correlation, tile);
        let tiles: usize = (0..3).map(|dim| count[dim].div_ceil(tile[dim])).product();
        let block = (room / layout.len(1)).clamp(1, inputs);
        let ranges = outputs.div_ceil(OUTPUTS);
        let fields = batch * tiles;
        let wanted = TASKS.div_ceil(groups * ranges);
        let chunks = wanted.min(fields).min((SUMS_BYTES / bytes).max(1));
        let size = fields.div_ceil(chunks);
        let row = tile[2].next_multiple_of(lanes);
        Self {
            job,
            offsets: layout.offsets(&correlation, block),
            layout,
            tile,
            tiles,
            block,
            output: tile[0] * tile[1] * row + SKEW,
            row,
            chunks: (0..fields)
                .step_by(size)
                .map(|first| first..fields.min(first + size))
                .collect(),
            ranges,
        }
    }
}

/// The outputs of a block, by the number of registers.
fn block<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 4 } else { 2 }
}

/// A range of outputs of one group, over the tiles of a chunk.
struct Task<'a, E> {
    plan: &'a Plan<'a, E>,
    sums: &'a Sums<E>,
    chunk: usize,
    group: usize,
    range: usize,
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { plan, .. } = self;
        let Plan {
            job,
            layout,
            tile: extents,
            tiles,
            ..
        } = plan;
        let Conv {
            inputs, outputs, ..
        } = *job.conv;
        let [_, _, count @ ..] = job.cotangent.shape();
        let first = self.range * OUTPUTS;
        let range = first..outputs.min(first + OUTPUTS);
        let room = range.len() * plan.output;
        with_scratch(room + layout.len(plan.block), |scratch| {
            let (cotangent, tile) = scratch.split_at_mut(room);
            for field in plan.chunks[self.chunk].clone() {
                let (batch, index) = (field / tiles, field % tiles);
                let [origin, size] = tile_box(index, *extents, count);
                self.fill_cotangent(simd, cotangent, range.clone(), batch, origin, size);
                for first in (0..inputs).step_by(plan.block) {
                    let channels = first..inputs.min(first + plan.block);
                    let base = self.group * inputs;
                    let held = base + channels.start..base + channels.end;
                    layout.fill(simd, tile, job.pieces, batch, held, origin);
                    self.products(simd, cotangent, tile, range.clone(), channels, size);
                }
            }
        });
    }
}

impl<E: Element> Task<'_, E> {
    /// Copies a tile of the cotangent, `[output][plane][row][column]`, rows padded with zeros; adds
    /// to the gradients of biases.
    #[inline(always)]
    fn fill_cotangent<S: Simd>(
        &self,
        simd: S,
        buffer: &mut [E],
        outputs: Range<usize>,
        batch: usize,
        origin: Dims,
        size: Dims,
    ) {
        let Plan { job, row, .. } = self.plan;
        let stride = job.cotangent.strides()[4];
        for (output, buffer) in outputs.zip(buffer.chunks_exact_mut(self.plan.output)) {
            let mut rows = buffer.chunks_exact_mut(*row);
            let channel = self.group * job.conv.outputs + output;
            let mut sum = E::splat(simd, E::default());
            for plane in 0..size[0] {
                for line in 0..size[1] {
                    let [depth, height, width] = origin;
                    let first = [batch, channel, depth + plane, height + line, width];
                    let source = job.cotangent.at(first);
                    let cells = rows.next().expect("room for every row");
                    // SAFETY: the tile lies within the cotangent.
                    unsafe { copy_strided(&mut cells[..size[2]], source, stride) };
                    cells[size[2]..].fill(E::default());
                    for vector in cells.chunks_exact(E::lanes::<S>()) {
                        // SAFETY: the chunk is a vector long.
                        sum = E::plus(simd, sum, unsafe { E::load::<S>(vector.as_ptr()) });
                    }
                }
            }
            // SAFETY: this task alone adds to these outputs of its chunk.
            unsafe { *self.sums.biases.at(channel) += E::sum(simd, sum) };
        }
    }

    /// Adds the products over a tile to the gradients of a range of outputs and channels.
    #[inline(always)]
    fn products<S: Simd>(
        &self,
        simd: S,
        cotangent: &[E],
        tile: &[E],
        outputs: Range<usize>,
        channels: Range<usize>,
        size: Dims,
    ) {
        let Plan {
            job,
            layout,
            row,
            offsets,
            ..
        } = self.plan;
        let Conv {
            inputs,
            outputs: all,
            ..
        } = *job.conv;
        let elements = job.conv.elements();
        let terms = channels.len() * elements;
        let cells = self.plan.output;
        // Outputs are outside of terms: the cotangent of a few outputs stays in the first-level
        // cache, while each group of terms reads the tile of the source from the second-level
        // cache.
        let mut output = outputs.start;
        while output < outputs.end {
            let height = [4, 2, 1]
                .into_iter()
                .find(|&height| height <= block::<S>() && height <= outputs.end - output)
                .unwrap_or(1);
            let first = ((self.group * all + output) * inputs + channels.start) * elements;
            let mut term = 0;
            while term < terms {
                let width = [6, 3, 2, 1]
                    .into_iter()
                    .find(|&width| width <= terms - term)
                    .unwrap_or(1);
                // SAFETY: rows of the cotangent's tile are padded to whole vectors. This task alone
                // adds to these weights of its chunk, which are `inputs · elements` apart.
                unsafe {
                    let dot = Dot {
                        cotangent: cotangent.as_ptr().add((output - outputs.start) * cells),
                        channel: cells,
                        tile: tile.as_ptr(),
                        offsets: offsets.as_ptr().add(term),
                        layout,
                        planes: size[0],
                        rows: size[1],
                        columns: size[2],
                        row: *row,
                        sums: self.sums.weights.at(first + term),
                        output: inputs * elements,
                    };
                    dot.run(simd, height, width);
                }
                term += width;
            }
            output += height;
        }
    }
}

/// Arguments of the innermost kernel, outputs × terms.
struct Dot<'a, E> {
    cotangent: *const E,
    /// Elements between outputs of the cotangent's tile.
    channel: usize,
    tile: *const E,
    offsets: *const u32,
    layout: &'a TileLayout,
    planes: usize,
    rows: usize,
    /// Columns of a row.
    columns: usize,
    /// Elements between rows of the cotangent's tile.
    row: usize,
    sums: *mut E,
    /// Elements between outputs of the sums.
    output: usize,
}

/// [`Dot`] with its block of `M` outputs × `K` terms.
struct Block<'a, E, const M: usize, const K: usize>(Dot<'a, E>);

impl<E: Element> Dot<'_, E> {
    /// Runs the block with this number of outputs and terms.
    ///
    /// # Safety
    /// The pointers must be valid for the block, and nothing else may use the sums.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S, height: usize, width: usize) {
        macro_rules! block {
            ($m:literal, $k:literal) => {
                simd.vectorize(Block::<E, $m, $k>(self))
            };
        }
        match (height, width) {
            (4, 6) => block!(4, 6),
            (4, 3) => block!(4, 3),
            (4, 2) => block!(4, 2),
            (4, _) => block!(4, 1),
            (2, 6) => block!(2, 6),
            (2, 3) => block!(2, 3),
            (2, 2) => block!(2, 2),
            (2, _) => block!(2, 1),
            (_, 6) => block!(1, 6),
            (_, 3) => block!(1, 3),
            (_, 2) => block!(1, 2),
            _ => block!(1, 1),
        }
    }
}

impl<E: Element, const M: usize, const K: usize> WithSimd for Block<'_, E, M, K> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Dot {
            cotangent,
            channel,
            tile,
            offsets,
            layout,
            planes,
            rows,
            columns,
            row: room,
            sums,
            output,
        } = self.0;
        let (zero, lanes) = (E::splat(simd, E::default()), E::lanes::<S>());
        let mut products = [[zero; K]; M];
        let whole = columns / lanes * lanes;
        // SAFETY: the caller of `run` promises that the pointers are valid.
        unsafe {
            let mut taps = [0; K];
            for (k, tap) in taps.iter_mut().enumerate() {
                *tap = *offsets.add(k) as usize;
            }
            // All cells inside of the sums, which stay in registers; their lanes are summed once,
            // at the end.
            for plane in 0..planes {
                for row in 0..rows {
                    let cells = cotangent.add((plane * rows + row) * room);
                    let source = tile.add(layout.row(plane, row));
                    for column in (0..whole).step_by(lanes) {
                        let from = source.add(column);
                        step::<S, E, M, K>(
                            simd,
                            cells.add(column),
                            channel,
                            from,
                            &taps,
                            lanes,
                            &mut products,
                        );
                    }
                    if whole < columns {
                        let (cells, from) = (cells.add(whole), source.add(whole));
                        let rest = columns - whole;
                        step::<S, E, M, K>(simd, cells, channel, from, &taps, rest, &mut products);
                    }
                }
            }
            for (m, products) in products.iter().enumerate() {
                for (k, product) in products.iter().enumerate() {
                    *sums.add(m * output + k) += E::sum(simd, *product);
                }
            }
        }
    }
}

/// Adds the products of a vector of cells, of which the first `present` belong to the row. The
/// cells after these are not loaded: no window meets them, and a value that is not finite would
/// reach the sum.
///
/// # Safety
/// A vector must be readable from every cotangent, and `present` elements from every place of the
/// source.
#[inline(always)]
unsafe fn step<S: Simd, E: Element, const M: usize, const K: usize>(
    simd: S,
    cotangent: *const E,
    channel: usize,
    source: *const E,
    taps: &[usize; K],
    present: usize,
    products: &mut [[E::Vector<S>; K]; M],
) {
    let zero = E::splat(simd, E::default());
    // SAFETY: the caller's.
    unsafe {
        let mut cotangents = [zero; M];
        for (m, value) in cotangents.iter_mut().enumerate() {
            *value = E::load::<S>(cotangent.add(m * channel));
        }
        for (k, tap) in taps.iter().enumerate() {
            let from = source.add(*tap);
            let value = if present == E::lanes::<S>() {
                E::load::<S>(from)
            } else {
                E::load_part(simd, std::slice::from_raw_parts(from, present), zero)
            };
            for m in 0..M {
                products[m][k] = E::mul_add(simd, cotangents[m], value, products[m][k]);
            }
        }
    }
}
