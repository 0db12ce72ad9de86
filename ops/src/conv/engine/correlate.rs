//! Driver of forward passes and input gradients: tiles, blocks of channels, panels of outputs.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::ahead::Stretch;
use super::geometry::{Correlation, Dims};
use super::job::{Job, OUTPUTS, SERIAL, STRIPS};
use super::rows::{self, ROWS, Recipe, RowStrip};
use super::strip::{self, Strip, Terms, panels};
use super::tile::{TileLayout, tile_box, tile_extents};
use super::winograd::{RowTiles, correlate};
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::products::{Halved, Numbers, Pairs};
use crate::kernel::simd::{Element, Isa};

/// Most bytes of a tile, which stays in the second-level cache beside a block of weights.
const TILE_BYTES: usize = 512 << 10;
/// Most bytes of a tile with the rows between dilated taps, which are not copied.
const SCRATCH_BYTES: usize = 2 << 20;
/// Most terms of a block of channels, whose weights for a panel stay in the first-level cache.
const TERMS: usize = 640;

/// A correlation with the data that its tasks share.
struct Part<'a, E> {
    correlation: &'a Correlation,
    layout: TileLayout,
    /// Extents of a tile, in results.
    tile: Dims,
    /// Vectors of a tile's rows.
    vectors: usize,
    /// Number of tiles of a field.
    tiles: usize,
    /// Number of ranges that the outputs are divided into.
    ranges: usize,
    /// Channels of the source in a block.
    block: usize,
    offsets: Vec<u32>,
    /// `[group][block][panel][term][channel]`.
    weights: Buffer<E>,
    /// Recipe for rows computed together, if channels do not mix, and its weights,
    /// `[group][element]`.
    rows: Option<(Recipe, Vec<E>)>,
}

impl<E: Halved> Job<'_, E> {
    /// Computes the output, `[batch, groups · outputs, *shape]`. `weight` gives the weight of
    /// (group, output, input, element).
    pub(crate) fn run(&self, isa: Isa, weight: impl Fn([usize; 4]) -> E + Sync) -> Buffer<E> {
        // SAFETY: the lattices of all parts cover the output.
        unsafe { Buffer::filled(self.len(), |output| self.run_into(isa, &weight, output)) }
    }

    /// Writes the results of the parts into a buffer with room for the whole output.
    pub(crate) fn run_into(
        &self,
        isa: Isa,
        weight: &(impl Fn([usize; 4]) -> E + Sync),
        output: Shared<E>,
    ) {
        isa.run(Whole {
            job: self,
            weight,
            output,
        });
    }
}

struct Whole<'a, E, W> {
    job: &'a Job<'a, E>,
    weight: &'a W,
    output: Shared<E>,
}

impl<E: Halved, W: Fn([usize; 4]) -> E + Sync> WithSimd for Whole<'_, E, W> {
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            job,
            weight,
            output,
        } = self;
        let len = job.len();
        if len == 0 {
            return;
        }
        if job.parts.iter().any(|part| part.taps.is_empty()) {
            // SAFETY: the buffer has room for `len` elements.
            unsafe { std::slice::from_raw_parts_mut(output.at(0), len) }.fill(E::default());
        }
        for correlation in job.parts.iter().filter(|part| !part.taps.is_empty()) {
            let transformed = job
                .method
                .transforms([job.inputs, job.outputs, job.shape[1]]);
            if let Some(rows) = RowTiles::new(correlation).filter(|_| transformed) {
                if job.halves && Pairs::run_on::<S>() {
                    correlate::<S, E, E::Halves>(simd, job, correlation, rows, weight, output);
                } else {
                    correlate::<S, E, Numbers>(simd, job, correlation, rows, weight, output);
                }
                continue;
            }
            let part = Part::new::<S>(job, correlation, weight);
            let tasks = 0..job.batch * job.groups * part.tiles * part.ranges;
            job.run_tasks(correlation, tasks, |index| {
                simd.vectorize(Task::new(job, &part, index, output));
            });
        }
    }
}

impl<'a, E: Element> Part<'a, E> {
    fn new<S: Simd>(
        job: &Job<'_, E>,
        correlation: &'a Correlation,
        weight: &(impl Fn([usize; 4]) -> E + Sync),
    ) -> Self {
        let mut block = (TERMS / correlation.terms.max(1)).clamp(1, job.inputs);
        let lanes = E::lanes::<S>();
        let strip = strip::width::<S>(strip::height::<S>(usize::MAX, 3)) * lanes;
        // From the correlation alone, not from the box of results: the order of sums, and so their
        // bits, are the same in any box.
        let smallest = TileLayout::new(correlation, [1, 1, strip]);
        while block > 1 && smallest.len(block) > SCRATCH_BYTES / size_of::<E>() {
            block /= 2;
        }
        let room = TILE_BYTES / size_of::<E>() / block;
        let most_room = SCRATCH_BYTES / size_of::<E>();
        let fits = |layout: &TileLayout, _: Dims| {
            layout.copied() <= room && layout.len(block) <= most_room
        };
        let tasks = job.tasks(correlation);
        let most = job.outputs.div_ceil(OUTPUTS);
        let tile = tile_extents(correlation, [strip, STRIPS], tasks.div_ceil(most), fits);
        let tiles = (0..3)
            .map(|dim| correlation.count[dim].div_ceil(tile[dim]))
            .product();
        let layout = TileLayout::new(correlation, tile);
        let vectors = tile[2].div_ceil(lanes);
        let alone = (job.inputs, job.outputs) == (1, 1) && tile[1] >= ROWS;
        let recipe = alone.then(|| Recipe::new(correlation, &layout)).flatten();
        Self {
            rows: recipe.map(|recipe| {
                let weights = (0..job.groups).flat_map(|group| {
                    let elements = recipe.elements.iter();
                    elements.map(move |element| weight([group, 0, 0, *element]))
                });
                let weights = weights.collect();
                (recipe, weights)
            }),
            offsets: layout.offsets(correlation, block),
            ranges: tasks.div_ceil(tiles).min(most),
            tiles,
            weights: pack::<S, E>(job, correlation, block, vectors, weight),
            vectors,
            correlation,
            layout,
            tile,
            block,
        }
    }
}

/// Packs the weights in the order in which strips read them.
fn pack<S: Simd, E: Element>(
    job: &Job<'_, E>,
    correlation: &Correlation,
    block: usize,
    vectors: usize,
    weight: &(impl Fn([usize; 4]) -> E + Sync),
) -> Buffer<E> {
    let taps = &correlation.taps;
    let len = job.groups * job.inputs * job.outputs * taps.len();
    let fill = |packed: Shared<E>| {
        let panels: Vec<(usize, usize)> = panels::<S>(job.outputs, vectors).collect();
        let blocks = job.inputs.div_ceil(block);
        let panel = |index: usize| {
            let (rest, (start, height)) = (index / panels.len(), panels[index % panels.len()]);
            let (group, first) = (rest / blocks, rest % blocks * block);
            let inputs = first..job.inputs.min(first + block);
            let before = (group * job.inputs + first) * job.outputs + inputs.len() * start;
            let mut place = before * taps.len();
            for input in inputs {
                for tap in taps {
                    for output in start..start + height {
                        // SAFETY: places are consecutive, panel by panel, and below `len`.
                        unsafe { *packed.at(place) = weight([group, output, input, tap.element]) };
                        place += 1;
                    }
                }
            }
        };
        let all = 0..job.groups * blocks * panels.len();
        if len < SERIAL {
            all.for_each(panel);
        } else {
            all.into_par_iter().for_each(panel);
        }
    };
    // SAFETY: the panels of all blocks and groups write every weight once.
    unsafe { Buffer::filled(len, fill) }
}

/// One tile of one group of one sample, for a range of outputs.
struct Task<'a, E> {
    job: &'a Job<'a, E>,
    part: &'a Part<'a, E>,
    index: usize,
    batch: usize,
    group: usize,
    tile: usize,
    range: usize,
    output: Shared<E>,
}

impl<'a, E: Element> Task<'a, E> {
    /// The task of an index. Indices go over samples, groups, tiles and ranges of outputs, from
    /// slow to fast.
    fn new(job: &'a Job<'a, E>, part: &'a Part<'a, E>, index: usize, output: Shared<E>) -> Self {
        let (rest, range) = (index / part.ranges, index % part.ranges);
        let (field, tile) = (rest / part.tiles, rest % part.tiles);
        Self {
            job,
            part,
            index,
            batch: field / job.groups,
            group: field % job.groups,
            tile,
            range,
            output,
        }
    }

    /// The blocks of channels.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let (inputs, block) = (self.job.inputs, self.part.block);
        (0..inputs)
            .step_by(block)
            .map(move |first| first..inputs.min(first + block))
    }

    /// Copies a block of channels into the tile.
    #[inline(always)]
    fn fill<S: Simd>(&self, simd: S, buffer: &mut [E], block: &Range<usize>) {
        let [origin, _] = tile_box(self.tile, self.part.tile, self.part.correlation.count);
        let (layout, pieces) = (&self.part.layout, self.job.pieces);
        layout.fill(
            simd,
            buffer,
            pieces,
            self.batch,
            self.channels(block),
            origin,
        );
    }

    /// The cells that the thread will probably copy after a block of channels: those of the next
    /// block, or of the first one of the next tile.
    fn ahead(&self, block: &Range<usize>) -> Vec<Stretch> {
        let stretches = |task: &Self, block: &Range<usize>| {
            let [origin, _] = tile_box(task.tile, self.part.tile, self.part.correlation.count);
            let (layout, pieces) = (&self.part.layout, self.job.pieces);
            layout.stretches(pieces, task.batch, task.channels(block), origin)
        };
        if let Some(next) = self.blocks().find(|next| next.start == block.end) {
            return stretches(self, &next);
        }
        let next = Self::new(self.job, self.part, self.index + 1, self.output);
        let first = next
            .blocks()
            .next()
            .filter(|_| next.range == 0 && next.batch < self.job.batch);
        first.map_or_else(Vec::new, |first| stretches(&next, &first))
    }

    /// The channels of the field in a block of this task's group.
    fn channels(&self, block: &Range<usize>) -> Range<usize> {
        let first = self.group * self.job.inputs;
        first + block.start..first + block.end
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { part, .. } = self;
        let [origin, size] = tile_box(self.tile, part.tile, part.correlation.count);
        // Blocks of channels are outermost: each is copied once, and their partial sums add up in
        // the output, which is in the cache. So every sum goes over (block, channel, tap), in any
        // tile and on any number of threads.
        with_scratch(
            part.layout.len(part.block),
            #[inline(always)]
            |buffer| {
                for block in self.blocks() {
                    self.fill(simd, buffer, &block);
                    self.block(simd, buffer, block, origin, size);
                }
            },
        );
    }
}

impl<E: Element> Task<'_, E> {
    /// Adds the terms of a block of channels to the tile's results.
    #[inline(always)]
    fn block<S: Simd>(&self, simd: S, buffer: &[E], block: Range<usize>, origin: Dims, size: Dims) {
        let Self { job, part, .. } = self;
        let taps = part.correlation.taps.len();
        let terms = block.len() * taps;
        let [_, rows, columns] = job.shape;
        let cells = job.cells();
        let first_weight = (self.group * job.inputs + block.start) * job.outputs * taps;
        let last = block.end == job.inputs;
        // Every strip prefetches its share of the next cells.
        let ahead = self.ahead(&block);
        let across = |vectors: usize| size[2].div_ceil(vectors * E::lanes::<S>());
        let strips = match part.rows {
            Some(_) => size[0] * (size[1] / ROWS) * across(rows::width::<S>()),
            None => {
                let widths = self
                    .panels::<S>()
                    .map(|(_, height)| strip::width::<S>(height));
                size[0] * size[1] * widths.map(across).sum::<usize>()
            }
        };
        let mut shares = (0..strips)
            .map(|strip| &ahead[ahead.len() * strip / strips..ahead.len() * (strip + 1) / strips]);
        // Panels are outside of cells: a panel's weights stay in the first-level cache while all
        // cells of the tile go by, from the second-level cache. Planes, rows and columns go in the
        // order of memory.
        for (start, height) in self.panels::<S>() {
            let weights = &part.weights[first_weight + start * terms..][..terms * height];
            let channel = self.group * job.outputs + start;
            let bias = job
                .bias
                .filter(|_| last)
                .map(|bias| &bias[channel..channel + height]);
            for plane in 0..size[0] {
                let together = self.rows(simd, buffer, [origin, size], plane, &mut shares);
                for row in together..size[1] {
                    let cell = |dim: usize, index: usize| {
                        part.correlation.start[dim]
                            + part.correlation.out_step[dim] * (origin[dim] + index)
                    };
                    let line = (cell(0, plane) * rows + cell(1, row)) * columns;
                    let output = ((self.batch * job.groups * job.outputs) + channel) * cells + line;
                    let from = part.layout.row(plane, row);
                    let mut column = 0;
                    while column < size[2] {
                        let lanes = E::lanes::<S>();
                        let vectors = (size[2] - column)
                            .div_ceil(lanes)
                            .min(strip::width::<S>(height));
                        let left = (size[2] - column).min(vectors * lanes);
                        // SAFETY: the lattice lies in the output, its channels are `cells` apart,
                        // and tasks have disjoint parts of it. The tile has room for all offsets
                        // from any of its cells, and a margin for the widest strip.
                        unsafe {
                            let strip = Strip {
                                terms: Terms {
                                    tile: buffer.as_ptr().add(from + column),
                                    offsets: part.offsets.as_ptr(),
                                    count: terms,
                                    weights: weights.as_ptr(),
                                    ahead: shares.next().unwrap_or_default(),
                                },
                                bias: bias.map_or(std::ptr::null(), <[E]>::as_ptr),
                                add: block.start > 0,
                                output: self.output.at(output + cell(2, column)),
                                channel: cells,
                                step: part.correlation.out_step[2],
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

    /// Computes rows of a plane in groups of [`ROWS`], if channels do not mix; returns the number
    /// of rows done.
    #[inline(always)]
    fn rows<'s, S: Simd>(
        &self,
        simd: S,
        buffer: &[E],
        [origin, size]: [Dims; 2],
        plane: usize,
        shares: &mut impl Iterator<Item = &'s [Stretch]>,
    ) -> usize {
        let Self { job, part, .. } = self;
        let Some((recipe, weights)) = &part.rows else {
            return 0;
        };
        let Correlation {
            start, out_step, ..
        } = part.correlation;
        let [_, rows, columns] = job.shape;
        let elements = recipe.elements.len();
        let field = (self.batch * job.groups + self.group) * job.cells();
        let cell = |dim: usize, index: usize| start[dim] + out_step[dim] * (origin[dim] + index);
        let together = size[1] / ROWS * ROWS;
        let wide = rows::width::<S>() * E::lanes::<S>();
        for row in (0..together).step_by(ROWS) {
            for column in (0..size[2]).step_by(wide) {
                let left = wide.min(size[2] - column);
                let line = (cell(0, plane) * rows + cell(1, row)) * columns;
                // SAFETY: the lattice lies in the output, and tasks have disjoint parts of it. The
                // tile has room for all reads from any of its cells, and a margin for the widest
                // strip.
                unsafe {
                    let strip = RowStrip {
                        tile: buffer.as_ptr().add(part.layout.row(plane, row) + column),
                        recipe,
                        weights: weights[self.group * elements..][..elements].as_ptr(),
                        bias: job.bias.map_or(E::default(), |bias| bias[self.group]),
                        output: self.output.at(field + line + cell(2, column)),
                        row: out_step[1] * columns,
                        columns: left,
                        ahead: shares.next().unwrap_or_default(),
                    };
                    strip.run(simd, left.div_ceil(E::lanes::<S>()));
                }
            }
        }
        together
    }

    /// The panels of this task's range of outputs.
    #[inline(always)]
    fn panels<S: Simd>(&self) -> impl Iterator<Item = (usize, usize)> {
        let (ranges, outputs, range) = (self.part.ranges, self.job.outputs, self.range);
        panels::<S>(outputs, self.part.vectors)
            .filter(move |(start, _)| start * ranges / outputs == range)
    }
}
