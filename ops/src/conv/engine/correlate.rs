//! Driver of forward passes and input gradients: tiles, blocks of channels, panels of outputs.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::ahead::{Stretch, ask_for, shares};
use super::geometry::{Correlation, Dims};
use super::job::Job;
use super::matrices;
use super::part::{Part, Weights, holds_matrices};
use super::rows::{self, ROWS, RowStrip};
use super::strip::{self, Strip, Terms, panels};
use super::tile::tile_box;
use super::winograd::{self, RowTiles};
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::products::{self, NO_MATRICES, Products, matrices_multiply};
use crate::kernel::simd::{Element, Isa};

/// Minimum channels for which matrices of three parts replace Winograd's method in computing
/// results.
const MANY_CHANNELS: usize = 128;

impl<E: Element, N: Copy + Default + Send + Sync> Job<'_, E, N> {
    /// Computes the output, `[batch, groups · outputs, *shape]`. `weight` returns the weight of
    /// (group, output, input, element).
    pub(crate) fn run<P: Products<E, Number = N>>(
        &self,
        isa: Isa,
        weight: impl Fn([usize; 4]) -> N + Sync,
    ) -> Buffer<N> {
        let fill = |output| self.run_into::<P>(isa, &weight, output);
        // SAFETY: the lattices of all parts cover the output.
        unsafe { Buffer::filled(self.len(), fill) }
    }

    /// Writes the results of the parts into a buffer with room for the whole output.
    pub(crate) fn run_into<P: Products<E, Number = N>>(
        &self,
        isa: Isa,
        weight: &(impl Fn([usize; 4]) -> N + Sync),
        output: Shared<N>,
    ) {
        products::run::<E, P, _>(
            isa,
            Whole::<E, P, _> {
                job: self,
                weight,
                output,
                has_matrices: isa.has_matrices(),
            },
        );
    }
}

struct Whole<'a, E: Element, P: Products<E>, W> {
    job: &'a Job<'a, E, P::Number>,
    weight: &'a W,
    output: Shared<P::Number>,
    /// Whether the instruction set has matrices.
    has_matrices: bool,
}

impl<E: Element, P: Products<E>, W: Fn([usize; 4]) -> P::Number + Sync> WithSimd
    for Whole<'_, E, P, W>
{
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            job,
            weight,
            output,
            has_matrices,
        } = self;
        let len = job.len();
        if len == 0 {
            return;
        }
        if job.parts.iter().any(|part| part.taps.is_empty()) {
            // SAFETY: the buffer has room for `len` elements.
            unsafe { output.slice(0..len) }.fill(P::Number::default());
        }
        for correlation in job.parts.iter().filter(|part| !part.taps.is_empty()) {
            let sizes = [job.inputs, job.outputs, job.shape[1]];
            let transformed = job.method.transforms(sizes);
            let rows = RowTiles::new(correlation).filter(|_| transformed);
            let channels = [job.inputs, job.outputs];
            let fields = [job.batch * job.shape[0], job.shape[1], job.shape[2]];
            let instead = rows.as_ref().map(|_| MANY_CHANNELS);
            if const { matrices_multiply::<S, E, P>() }
                && has_matrices
                && matrices::pay::<E, P>(job.method, channels, instead)
                && holds_matrices::<E, P>(correlation, job.inputs)
            {
                directly::<S, E, P>(simd, job, correlation, weight, output, true);
            } else if const { winograd::may_have_squares::<S, E, P>() }
                && job.method.fills_lanes(job.outputs)
                && let Some(squares) = winograd::squares::<S, E, 4>(
                    job.method,
                    correlation,
                    channels,
                    fields,
                    winograd::results::CELLS,
                )
            {
                let squares = &squares;
                winograd::results::correlate::<S, E, P>(
                    simd,
                    job,
                    correlation,
                    squares,
                    weight,
                    output,
                );
            } else if let Some(rows) = rows {
                winograd::correlate::<S, E, P>(simd, job, correlation, rows, weight, output);
            } else if job.inputs == 1 || has_matrices {
                // On processors with matrices, pairs are multiplied no faster than numbers.
                directly::<S, E, P::Single>(simd, job, correlation, weight, output, false);
            } else {
                directly::<S, E, P>(simd, job, correlation, weight, output, false);
            }
        }
    }
}

/// Computes the results of a part, term by term.
fn directly<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    job: &Job<'_, E, P::Number>,
    correlation: &Correlation,
    weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    output: Shared<P::Number>,
    matrices: bool,
) {
    let part = Part::<E, P>::new::<S>(simd, job, correlation, weight, matrices);
    let tasks = job.batch * job.groups * part.tiles * part.ranges;
    job.run_tasks(correlation, tasks, |index| {
        simd.vectorize(Task::new(job, &part, index, output));
    });
}

/// One tile of one group of one sample, for a range of outputs.
struct Task<'a, E: Element, P: Products<E>> {
    job: &'a Job<'a, E, P::Number>,
    part: &'a Part<'a, E, P>,
    index: usize,
    batch: usize,
    group: usize,
    tile: usize,
    range: usize,
    output: Shared<P::Number>,
}

impl<'a, E: Element, P: Products<E>> Task<'a, E, P> {
    /// Creates the task with this index.
    fn new(
        job: &'a Job<'a, E, P::Number>,
        part: &'a Part<'a, E, P>,
        index: usize,
        output: Shared<P::Number>,
    ) -> Self {
        let [batch, group, tile, range] = job.place(index, [part.tiles, part.ranges]);
        Self {
            job,
            part,
            index,
            batch,
            group,
            tile,
            range,
            output,
        }
    }

    /// Blocks of channels.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let (inputs, block) = (self.job.inputs, self.part.block);
        (0..inputs)
            .step_by(block)
            .map(move |first| first..inputs.min(first + block))
    }

    /// Copies a block of channels into the tile, as factors.
    #[inline(always)]
    fn fill<S: Simd>(&self, simd: S, buffer: &mut [E], block: &Range<usize>) {
        let [origin, _] = tile_box(self.tile, self.part.tile, self.part.correlation.count);
        let (layout, pieces) = (&self.part.layout, self.job.pieces);
        let (batch, channels) = (self.batch, self.channels(block));
        if self.part.in_pairs() {
            let buffer = (buffer, self.part.held);
            layout.fill_pairs::<S, E, P>(simd, buffer, pieces, batch, channels, origin);
        } else {
            layout.fill::<S, E, P>(simd, buffer, pieces, batch, channels, origin);
        }
    }

    /// Cells that the thread will probably copy after a block of channels: those of the next block,
    /// or of the first block of the next tile.
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

    /// Channels of the field in a block of this task's group.
    fn channels(&self, block: &Range<usize>) -> Range<usize> {
        let first = self.group * self.job.inputs;
        first + block.start..first + block.end
    }
}

impl<E: Element, P: Products<E>> WithSimd for Task<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { part, .. } = self;
        let [origin, size] = tile_box(self.tile, part.tile, part.correlation.count);
        // Blocks of channels are the outermost loop: each is copied once, and its partial sums are
        // added to the output, which is in the cache. Every sum thus runs over (block, channel,
        // tap), in any tile and on any number of threads.
        let cells = if part.in_pairs() {
            part.layout.len(2)
        } else {
            0
        };
        with_scratch(
            matrices::SUMS + part.layout.len(part.held) + cells,
            #[inline(always)]
            |scratch| {
                let (sums, buffer) = scratch.split_at_mut(matrices::SUMS);
                for block in self.blocks() {
                    self.fill(simd, buffer, &block);
                    match &part.weights {
                        Weights::Strips(weights, offsets) => {
                            self.block(simd, (buffer, weights, offsets), block, origin, size);
                        }
                        Weights::Matrices(weights) if const { matrices_multiply::<S, E, P>() } => {
                            let ahead = self.ahead(&block);
                            self.matrices(simd, (buffer, weights), (sums, &ahead), origin, size);
                        }
                        Weights::Matrices(_) => unreachable!("{NO_MATRICES}"),
                    }
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
        (buffer, weights, offsets): (&[E], &[E], &[u32]),
        block: Range<usize>,
        origin: Dims,
        size: Dims,
    ) {
        let Self { job, part, .. } = self;
        let taps = part.correlation.taps.len();
        let terms = block.len().div_ceil(P::NUMBERS) * taps;
        let [_, rows, columns] = job.shape;
        let cells = job.cells();
        let held = self.group * job.inputs.div_ceil(P::NUMBERS) + block.start / P::NUMBERS;
        let first_weight = held * job.outputs * taps;
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
        let mut shares = shares(&ahead, strips);
        // Panels are outside cells: a panel's weights stay in the first-level cache while all cells
        // of the tile stream in from the second-level cache. Planes, rows and columns follow the
        // order of memory.
        for (start, height) in self.panels::<S>() {
            let weights = &weights[first_weight + start * terms..][..terms * height];
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
                            let strip = Strip::<E, P> {
                                terms: Terms {
                                    tile: buffer.as_ptr().add(from + column),
                                    offsets: offsets.as_ptr(),
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

    /// Computes the tile's results as products of matrices.
    #[inline(always)]
    fn matrices<S: Simd>(
        &self,
        simd: S,
        (buffer, weights): (&[E], &matrices::Weights<E>),
        (sums, ahead): (&mut [E], &[Stretch]),
        [depth, line, column]: Dims,
        size: Dims,
    ) {
        let Self { job, part, .. } = self;
        let Correlation {
            start, out_step, ..
        } = part.correlation;
        let [_, rows, columns] = job.shape;
        let cells = job.cells();
        let outputs = self.group * job.outputs..(self.group + 1) * job.outputs;
        let field = (self.batch * job.groups * job.outputs + outputs.start) * cells;
        let place = |plane: usize, row: usize, across: usize| {
            let plane = start[0] + out_step[0] * (depth + plane);
            let row = start[1] + out_step[1] * (line + row);
            (plane * rows + row) * columns + start[2] + out_step[2] * (column + across)
        };
        let registers = weights.registers();
        // Every strip prefetches its share of the next cells.
        let panels = weights.panels().len();
        let strips = panels * size[0] * size[1] * size[2].div_ceil(matrices::COLUMNS);
        let mut shares = shares(ahead, strips);
        // Weights are outside cells, as above.
        for first in weights.panels() {
            for (plane, row) in
                (0..size[0]).flat_map(|plane| (0..size[1]).map(move |row| (plane, row)))
            {
                let from = part.layout.row(plane, row);
                for across in (0..size[2]).step_by(matrices::COLUMNS) {
                    ask_for(shares.next().unwrap_or_default());
                    // SAFETY: the lattice lies in the output, and tasks have disjoint parts of it.
                    // The tile has room for all reads from any of its cells, and a margin for the
                    // widest strip.
                    unsafe {
                        let to = matrices::Results {
                            output: self.output.at(field + place(plane, row, across)),
                            channel: cells,
                            step: out_step[2],
                            columns: (size[2] - across).min(matrices::COLUMNS),
                            bias: job.bias.map(|bias| &bias[outputs.clone()]),
                        };
                        let tile = buffer.as_ptr().add(from + across);
                        let outputs = [self.group, first];
                        weights.strip::<S, P>(simd, &registers, outputs, tile, sums, to);
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
                    let strip = RowStrip::<E, P> {
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

    /// Panels of this task's range of outputs.
    #[inline(always)]
    fn panels<S: Simd>(&self) -> impl Iterator<Item = (usize, usize)> {
        let (ranges, outputs, range) = (self.part.ranges, self.job.outputs, self.range);
        panels::<S>(outputs, self.part.vectors)
            .filter(move |(start, _)| start * ranges / outputs == range)
    }
}
