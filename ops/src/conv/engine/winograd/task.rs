//! Driver: tiles, blocks of channels, panels of outputs.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Scalar, Simd, WithSimd};

use super::super::geometry::{Correlation, Dims};
use super::super::job::{Job, OUTPUTS, STRIPS, block};
use super::super::pack::pack;
use super::super::strip::{self, Terms, panels};
use super::super::tile::{tile_box, tile_count, tile_extents};
use super::strip::Strip;
use super::{Factors, PRODUCTS, RESULTS, RowTiles, TAPS, of_taps};
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Maximum bytes of a tile, which stays in the second-level cache.
const TILE_BYTES: usize = 512 << 10;
/// Maximum terms of a block of channels for every product.
const TERMS: usize = 192;
/// Vectors of strips that tiles are made for.
const WIDTH: usize = 3;

/// Computes the results of a part.
pub(crate) fn correlate<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    job: &Job<'_, E, P::Number>,
    correlation: &Correlation,
    rows: RowTiles,
    weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    output: Shared<P::Number>,
) {
    let part = Part::<E, P>::new::<S>(job, correlation, rows, weight);
    let tasks = job.batch * job.groups * part.tiles * part.ranges;
    job.run_tasks(correlation, tasks, |index| {
        let [batch, group, tile, range] = job.place(index, [part.tiles, part.ranges]);
        simd.vectorize(Task {
            job,
            part: &part,
            batch,
            group,
            tile,
            range,
            output,
        });
    });
}

/// A correlation with the data that its tasks share.
struct Part<'a, E, P> {
    correlation: &'a Correlation,
    rows: RowTiles,
    factors: Factors,
    /// Planes, tiles of rows, and columns of a task.
    tile: Dims,
    /// Number of vectors of a tile's rows.
    vectors: usize,
    /// Number of task tiles of a field.
    tiles: usize,
    /// Number of ranges that the outputs are divided into.
    ranges: usize,
    /// Channels of the source in a block.
    block: usize,
    offsets: Vec<u32>,
    /// `[group][block][panel][product][term][channel]`.
    weights: Buffer<E>,
    products: PhantomData<P>,
}

impl<'a, E: Element, P: Products<E>> Part<'a, E, P> {
    fn new<S: Simd>(
        job: &Job<'_, E, P::Number>,
        correlation: &'a Correlation,
        rows: RowTiles,
        weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    ) -> Self {
        let lanes = E::lanes::<S>();
        let strip = WIDTH * lanes;
        // Determined by the taps alone: the order of sums, and so their bits, are the same in any
        // box.
        let block = block::<E, P>(TERMS / (correlation.terms() / TAPS), job.inputs);
        let room = TILE_BYTES / size_of::<E>();
        let tasks = job.tasks(correlation);
        let most = job.outputs.div_ceil(OUTPUTS);
        let held = [P::NUMBERS, 1];
        let fits = |_: &_, tile: Dims| Factors::new(&rows, tile, held).len(block) <= room;
        let tile = tile_extents(&rows.flat, [strip, STRIPS], tasks.div_ceil(most), fits);
        let tiles = tile_count(tile, rows.flat.count);
        let factors = Factors::new(&rows, tile, held);
        let vectors = tile[2].div_ceil(lanes);
        Self {
            offsets: factors
                .layout
                .offsets(&rows.flat, block.div_ceil(P::NUMBERS)),
            ranges: tasks.div_ceil(tiles).min(most),
            weights: packed::<S, E, P>(job, &rows, [block, vectors], weight),
            correlation,
            rows,
            factors,
            tile,
            vectors,
            tiles,
            block,
            products: PhantomData,
        }
    }
}

/// The factors of the taps, packed.
fn packed<S: Simd, E: Element, P: Products<E>>(
    job: &Job<'_, E, P::Number>,
    rows: &RowTiles,
    [block, vectors]: [usize; 2],
    weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
) -> Buffer<E> {
    let sizes = [rows.flat.taps.len(), block, vectors];
    let of_rows = |[group, output]: [usize; 2], input, tap: usize| {
        let number = |element| P::widened(weight([group, output, input, element]));
        let taps = rows.elements[tap].map(|element| E::splat(Scalar, number(element)));
        of_taps::<_, E>(Scalar, taps).map(|factor| E::sum(Scalar, factor))
    };
    pack::<S, E, P, PRODUCTS>(job, sizes, |place, inputs, tap| {
        let of_input = |input| of_rows(place, input, tap);
        let [first, second] = inputs.map(|input| input.map_or([E::default(); PRODUCTS], of_input));
        std::array::from_fn(|product| P::join_one([first[product], second[product]]))
    })
}

/// One tile of one group of one sample, for a range of outputs.
struct Task<'a, E: Element, P: Products<E>> {
    job: &'a Job<'a, E, P::Number>,
    part: &'a Part<'a, E, P>,
    batch: usize,
    group: usize,
    tile: usize,
    range: usize,
    output: Shared<P::Number>,
}

impl<E: Element, P: Products<E>> WithSimd for Task<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { job, part, .. } = self;
        let [origin, size] = tile_box(self.tile, part.tile, part.rows.flat.count);
        let held = self.group * job.inputs;
        with_scratch(
            part.factors.len(part.block),
            #[inline(always)]
            |scratch| {
                for first in (0..job.inputs).step_by(part.block) {
                    let block = first..job.inputs.min(first + part.block);
                    let channels = held + block.start..held + block.end;
                    let (pieces, batch) = (job.pieces, self.batch);
                    let factors = part
                        .factors
                        .fill::<S, E, P>(simd, scratch, pieces, batch, channels, origin);
                    self.block(simd, factors, block, origin, size);
                }
            },
        );
    }
}

impl<E: Element, P: Products<E>> Task<'_, E, P> {
    /// Adds the terms of a block of channels to the tile's results.
    #[inline(always)]
    fn block<S: Simd>(
        &self,
        simd: S,
        factors: &[E],
        block: Range<usize>,
        origin: Dims,
        size: Dims,
    ) {
        let Self { job, part, .. } = self;
        let Correlation { start, count, .. } = *part.correlation;
        let layout = &part.factors.layout;
        let taps = part.rows.flat.taps.len();
        let [rows_before, _] = part.rows.before;
        let terms = block.len().div_ceil(P::NUMBERS) * taps;
        let [_, rows, columns] = job.shape;
        let cells = job.cells();
        let held = self.group * job.inputs.div_ceil(P::NUMBERS) + block.start / P::NUMBERS;
        let first_weight = held * job.outputs * taps * PRODUCTS;
        let last = block.end == job.inputs;
        let lanes = E::lanes::<S>();
        let range = |(start, _): &(usize, usize)| start * part.ranges / job.outputs == self.range;
        for (output, height) in panels::<S>(job.outputs, part.vectors).filter(range) {
            let weights = &part.weights[first_weight + output * terms * PRODUCTS..];
            let channel = self.group * job.outputs + output;
            let bias = job.bias.filter(|_| last);
            let bias = bias.map(|bias| &bias[channel..channel + height]);
            for (plane, tile) in
                (0..size[0]).flat_map(|plane| (0..size[1]).map(move |tile| (plane, tile)))
            {
                // Rows of the tile before the first result and after the last one are not results.
                let row = RESULTS * (origin[1] + tile);
                let skipped = rows_before.saturating_sub(row);
                let row = row + skipped - rows_before;
                let results = (RESULTS - skipped).min(count[1] - row);
                let line = ((start[0] + origin[0] + plane) * rows + start[1] + row) * columns;
                let field = (self.batch * job.groups * job.outputs + channel) * cells;
                let from = layout.row(plane, PRODUCTS * tile);
                let mut column = 0;
                while column < size[2] {
                    let left = size[2] - column;
                    let vectors = left.div_ceil(lanes).min(strip::width::<S>(height));
                    let left = left.min(vectors * lanes);
                    let place = field + line + start[2] + origin[2] + column;
                    // SAFETY: the lattice lies in the output, its channels are `cells` apart, and
                    // tasks have disjoint parts of it. The tile has room for all offsets from any
                    // of its columns, and a margin for the widest strip.
                    unsafe {
                        let strip = Strip::<E, P> {
                            terms: Terms {
                                tile: factors.as_ptr().add(from + column),
                                offsets: part.offsets.as_ptr(),
                                count: terms,
                                weights: weights.as_ptr(),
                                ahead: &[],
                            },
                            row: layout.row(0, 1) - layout.row(0, 0),
                            bias: bias.map_or(std::ptr::null(), <[E]>::as_ptr),
                            add: block.start > 0,
                            output: self.output.at(place),
                            channel: cells,
                            line: columns,
                            rows: [skipped, results],
                            columns: left,
                        };
                        strip::run(simd, strip, height, vectors);
                    }
                    column += left;
                }
            }
        }
    }
}
