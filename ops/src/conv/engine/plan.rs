//! Gradient of the weights, and its division into tiles, chunks and blocks.

use std::ops::Range;

use pulp::Simd;

use super::geometry::{Conv, Correlation, Dims};
use super::method::Method;
use super::pieces::Pieces;
use super::source::Source;
use super::tile::{SKEW, TileLayout, balanced, tile_count, tile_extents};
use super::winograd::{Factors, RowTiles};
use crate::kernel::memory::View;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Bytes of the cotangent that a block of outputs reads for every group of terms: about the size of
/// a first-level cache.
const CELLS_BYTES: usize = 48 << 10;
/// The same with factors, for each of their products.
const FACTORS_BYTES: usize = 32 << 10;
/// Maximum bytes of a tile of the source.
const TILE_BYTES: usize = 384 << 10;
/// Maximum outputs of a task.
pub(super) const OUTPUTS: usize = 64;
/// Number of tasks of a call with enough work.
pub(super) const TASKS: usize = 32;
/// Maximum bytes of the sums of all chunks.
const SUMS_BYTES: usize = 8 << 20;

/// Divides fields into about `wanted` ranges, or fewer, so that their sums of `bytes` each fit.
pub(super) fn chunks(fields: usize, wanted: usize, bytes: usize) -> Vec<Range<usize>> {
    let most = (SUMS_BYTES / bytes).max(1);
    let size = fields.div_ceil(wanted.min(fields).min(most));
    let firsts = (0..fields).step_by(size);
    firsts
        .map(|first| first..fields.min(first + size))
        .collect()
}

/// Chunk, group and range of outputs of a task; the index runs over them from slow to fast.
pub(super) fn place_of(task: usize, [groups, ranges]: [usize; 2]) -> [usize; 3] {
    let (chunk, rest) = (task / (groups * ranges), task % (groups * ranges));
    [chunk, rest / ranges, rest % ranges]
}

/// Bias gradients: the sums of all chunks for every channel, in the order of chunks.
pub(super) fn biases<E: Element>(of_chunks: &[E], channels: usize) -> Vec<E> {
    let of_channel = |channel: usize| of_chunks[channel..].iter().step_by(channels);
    let total = |channel| of_channel(channel).fold(E::default(), |sum, part| sum + *part);
    (0..channels).map(total).collect()
}

/// Job that computes a gradient with respect to weights.
#[derive(Debug)]
pub(crate) struct WeightJob<'a, N> {
    /// The convolution.
    pub conv: &'a Conv,
    /// Input of the convolution.
    pub pieces: &'a Pieces<'a, N>,
    /// Gradient of the output, `[batch, channels, *cells]`.
    pub cotangent: View<'a, N>,
    /// Method of computing sums.
    pub method: Method,
}

/// Gradients of weight and bias.
#[derive(Debug)]
pub(crate) struct WeightGradient<E> {
    /// `[outputs, inputs / groups, *kernel]`.
    pub weight: Vec<E>,
    /// `[outputs]`.
    pub bias: Vec<E>,
}

impl<N: Send + Sync> WeightJob<'_, N> {
    /// Tiles of rows, if rows are transformed.
    pub(super) fn rows(&self) -> Option<RowTiles> {
        let Conv {
            inputs, outputs, ..
        } = *self.conv;
        let [_, _, count @ ..] = self.cotangent.shape();
        let transformed = self.method.transforms([inputs, outputs, count[1]]);
        RowTiles::new(&self.conv.forward(count)).filter(|_| transformed)
    }
}

/// Data shared by all tasks.
pub(super) struct Plan<'a, N> {
    pub job: &'a WeightJob<'a, N>,
    pub source: Source,
    /// Correlation whose lattice is divided into tiles: of cells, or of tiles of rows.
    pub grid: Correlation,
    pub tile: Dims,
    /// Number of tiles of a sample.
    pub tiles: usize,
    /// Channels of the source in a block.
    pub block: usize,
    pub offsets: Vec<u32>,
    /// Elements from one row of a tile of the cotangent to the next.
    pub row: usize,
    /// Elements from one output of a tile of the cotangent to the next.
    pub output: usize,
    /// (sample, tile) pairs of every chunk.
    pub chunks: Vec<Range<usize>>,
    /// Ranges of outputs of a group.
    pub ranges: usize,
}

impl<'a, N: Send + Sync> Plan<'a, N> {
    pub(super) fn new<S: Simd, E: Element, P: Products<E>>(job: &'a WeightJob<'a, N>) -> Self {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *job.conv;
        let [batch, _, count @ ..] = job.cotangent.shape();
        let correlation = job.conv.forward(count);
        let rows = job.rows();
        let source_of = |tile: Dims| match &rows {
            None => Source::Cells(TileLayout::new(&correlation, tile)),
            Some(rows) => {
                let factors = Factors::new(rows, tile, [1, P::NUMBERS]);
                Source::Factors(Box::new(factors), rows.elements.clone())
            }
        };
        let (grid, bytes) = match &rows {
            None => (correlation.clone(), CELLS_BYTES),
            Some(rows) => (rows.flat.clone(), FACTORS_BYTES),
        };
        let (count, lanes) = (grid.count, E::lanes::<S>());
        let cells = bytes / size_of::<E>() / block::<S>();
        let room = TILE_BYTES / size_of::<E>();
        let fits = |_: &TileLayout, tile: Dims| {
            let len = tile[0] * tile[1].div_ceil(P::NUMBERS) * tile[2].next_multiple_of(lanes);
            source_of(tile).len(1) <= room && len <= cells
        };
        let ranges = outputs.div_ceil(OUTPUTS);
        let tile = tile_extents(&grid, [4 * lanes, 8], 1, fits);
        let tile = balanced(tile, count, batch * groups * ranges);
        let source = source_of(tile);
        let tiles = tile_count(tile, count);
        let block = (room / source.len(1)).clamp(1, inputs);
        let fields = batch * tiles;
        let wanted = TASKS.div_ceil(groups * ranges);
        let row = tile[2].next_multiple_of(lanes);
        let mut plan = Self {
            job,
            offsets: source.layout().offsets(&grid, block),
            tile,
            tiles,
            block,
            output: tile[0] * tile[1].div_ceil(P::NUMBERS) * source.products() * row + SKEW,
            row,
            chunks: Vec::new(),
            ranges,
            source,
            grid,
        };
        plan.chunks = chunks(fields, wanted, plan.sums() * size_of::<E>());
        plan
    }

    /// Number of sums of one product, over all taps and pairs of channels.
    pub(super) fn of_product(&self) -> usize {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *self.job.conv;
        groups * outputs * inputs * self.grid.taps.len()
    }

    /// Elements of a cotangent tile that is joined with another.
    pub(super) fn spare(&self) -> usize {
        self.source.products() * self.row
    }

    /// Number of sums of a chunk, `[product][output][input][tap]`.
    pub(super) fn sums(&self) -> usize {
        self.source.products() * self.of_product()
    }
}

/// Number of outputs of a block, by the number of registers.
pub(super) fn block<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 4 } else { 2 }
}
