//! Gradient of the weights: `Σ_cells cotangent[o] · source[c, cell + tap]`, for all outputs,
//! channels and taps.
//!
//! A block of outputs × (channel, tap) stays in registers for all cells of a tile, vector by
//! vector; the lanes are summed once per tile. The grid is divided into chunks with separate sums,
//! added in order at the end. The number of chunks follows from the shapes alone, so that the
//! result does not depend on the number of threads.
//!
//! With [`winograd`](super::winograd) the sums are products of transformed rows, from which the
//! gradients are computed at the end.

use std::marker::PhantomData;
use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::cells::{copy, copy_strided, join};
use super::dot::Dot;
use super::geometry::{Conv, Dims};
use super::matrices::gradient;
use super::plan::{OUTPUTS, Plan, WeightGradient, WeightJob, block, place_of};
use super::source::{Source, transform};
use super::tile::tile_box;
use super::winograd;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::products::{self, Products, matrices_multiply};
use crate::kernel::simd::{Element, Isa};

/// Sums that a thread adds at a time.
const TOGETHER: usize = 1 << 13;

/// Sums of a chunk: weights of all groups, then biases.
struct Sums<E> {
    weights: Shared<E>,
    biases: Shared<E>,
}

impl<N: Send + Sync> WeightJob<'_, N> {
    /// Computes the gradients.
    pub(crate) fn run<E: Element, P: Products<E, Number = N>>(
        &self,
        isa: Isa,
    ) -> WeightGradient<E> {
        let matrices = isa.has_matrices() && gradient::applies::<E, P>(self);
        products::run::<E, P, _>(
            isa,
            Whole::<E, P> {
                job: self,
                matrices,
                sums: PhantomData,
            },
        )
    }
}

struct Whole<'a, E: Element, P: Products<E>> {
    job: &'a WeightJob<'a, P::Number>,
    matrices: bool,
    sums: PhantomData<E>,
}

impl<E: Element, P: Products<E>> WithSimd for Whole<'_, E, P> {
    type Output = WeightGradient<E>;

    fn with_simd<S: Simd>(self, simd: S) -> WeightGradient<E> {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *self.job.conv;
        let weights = groups * outputs * inputs * self.job.conv.elements();
        let [batch, _, count @ ..] = self.job.cotangent.shape();
        if weights == 0 || batch == 0 || count.contains(&0) {
            return WeightGradient {
                weight: vec![E::default(); weights],
                bias: vec![E::default(); groups * outputs],
            };
        }
        if const { matrices_multiply::<S, E, P>() } && self.matrices {
            return gradient::run::<S, E, P>(simd, self.job);
        }
        let WeightJob { conv, method, .. } = *self.job;
        let (channels, [planes, rows, columns]) = ([inputs, outputs], count);
        let fields = [batch * planes, rows, columns];
        if const { winograd::may_have_squares::<S, E, P>() } {
            let (forward, least) = (conv.forward(count), winograd::gradient::CELLS);
            if let Some(squares) =
                winograd::squares::<S, E, 4>(method, &forward, channels, fields, least)
            {
                return winograd::gradient::run::<S, E, P, 4>(simd, self.job, &squares);
            }
            let least = winograd::gradient::OBLONG_CELLS;
            if let Some(oblongs) =
                winograd::squares::<S, E, 2>(method, &forward, channels, fields, least)
            {
                return winograd::gradient::run::<S, E, P, 2>(simd, self.job, &oblongs);
            }
        }
        match self.job.rows() {
            // Pairs are of adjacent tiles of rows.
            Some(_) => with_products::<S, E, P>(simd, self.job),
            None => with_products::<S, E, P::Single>(simd, self.job),
        }
    }
}

/// Gradients of a convolution that has outputs and weights.
fn with_products<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    job: &WeightJob<'_, P::Number>,
) -> WeightGradient<E> {
    let plan = Plan::new::<S, E, P>(job);
    let Conv {
        groups, outputs, ..
    } = *job.conv;
    let zeros = || WeightGradient {
        weight: vec![E::default(); plan.sums()],
        bias: vec![E::default(); groups * outputs],
    };
    let chunks = plan.chunks.iter();
    let mut sums: Vec<WeightGradient<E>> = chunks.map(|_| zeros()).collect();
    let shared: Vec<Sums<E>> = sums
        .iter_mut()
        .map(|sums| Sums {
            weights: Shared::new(&mut sums.weight),
            biases: Shared::new(&mut sums.bias),
        })
        .collect();
    let tasks = plan.chunks.len() * groups * plan.ranges;
    let run = |task: usize| {
        let [chunk, group, range] = place_of(task, [groups, plan.ranges]);
        simd.vectorize(Task::<E, P> {
            plan: &plan,
            sums: &shared[chunk],
            chunk,
            group,
            range,
        });
    };
    tasks::for_each(tasks, 1, run);
    let mut total = sums.remove(0);
    // Every element is summed in the order of chunks.
    tasks::for_each_part(&mut total.weight, TOGETHER, 1, |part, total| {
        for more in &sums {
            let more = &more.weight[part * TOGETHER..];
            total
                .iter_mut()
                .zip(more)
                .for_each(|(sum, value)| *sum += *value);
        }
    });
    for more in sums {
        let biases = total.bias.iter_mut().zip(more.bias);
        biases.for_each(|(sum, value)| *sum += value);
    }
    WeightGradient {
        weight: plan.source.weights(total.weight, job.conv.elements()),
        bias: total.bias,
    }
}

/// A range of outputs of one group, over the tiles of a chunk.
struct Task<'a, E: Element, P: Products<E>> {
    plan: &'a Plan<'a, P::Number>,
    sums: &'a Sums<E>,
    chunk: usize,
    group: usize,
    range: usize,
}

impl<E: Element, P: Products<E>> WithSimd for Task<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { plan, .. } = self;
        let Plan {
            job,
            source,
            tile: extents,
            tiles,
            ..
        } = plan;
        let Conv {
            inputs, outputs, ..
        } = *job.conv;
        let first = self.range * OUTPUTS;
        let range = first..outputs.min(first + OUTPUTS);
        let room = range.len() * plan.output + plan.spare();
        with_scratch(
            room + source.len(plan.block),
            #[inline(always)]
            |scratch| {
                let (cotangent, tile) = scratch.split_at_mut(room);
                for field in plan.chunks[self.chunk].clone() {
                    let (batch, index) = (field / tiles, field % tiles);
                    let [origin, size] = tile_box(index, *extents, plan.grid.count);
                    self.fill_cotangent(simd, cotangent, range.clone(), batch, origin, size);
                    for first in (0..inputs).step_by(plan.block) {
                        let channels = first..inputs.min(first + plan.block);
                        let base = self.group * inputs;
                        let held = base + channels.start..base + channels.end;
                        let tile = match source {
                            Source::Cells(layout) => {
                                let pieces = job.pieces;
                                layout.fill::<S, E, P>(simd, tile, pieces, batch, held, origin);
                                &*tile
                            }
                            Source::Factors(factors, _) => {
                                factors.fill::<S, E, P>(simd, tile, job.pieces, batch, held, origin)
                            }
                        };
                        self.products(simd, cotangent, tile, range.clone(), channels, size);
                    }
                }
            },
        );
    }
}

impl<E: Element, P: Products<E>> Task<'_, E, P> {
    /// Copies a tile of the cotangent, `[output][plane][row][product][column]`, with rows padded
    /// with zeros, and transforms it to factors if the source is transformed; adds to the bias
    /// gradients.
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
        let plan = self.plan;
        let (buffer, spare) = buffer.split_at_mut(buffer.len() - plan.spare());
        for (output, buffer) in outputs.zip(buffer.chunks_exact_mut(plan.output)) {
            let mut tiles = buffer.chunks_exact_mut(plan.spare());
            let channel = self.group * plan.job.conv.outputs + output;
            let mut sum = E::splat(simd, E::default());
            for plane in 0..size[0] {
                for line in (0..size[1]).step_by(P::NUMBERS) {
                    let tile = tiles.next().expect("room for every row");
                    let first = [
                        batch,
                        channel,
                        origin[0] + plane,
                        origin[1] + line,
                        origin[2],
                    ];
                    self.fill_rows(simd, tile, first, size[2], &mut sum);
                    if P::NUMBERS == 2 {
                        match line + 1 < size[1] {
                            true => {
                                let mut second = first;
                                second[3] += 1;
                                self.fill_rows(simd, spare, second, size[2], &mut sum);
                            }
                            false => spare.fill(E::default()),
                        }
                        // SAFETY: both have the same length, in whole vectors.
                        unsafe {
                            let cells = [tile.as_ptr(), spare.as_ptr()];
                            join::<S, E, P>(simd, (tile.as_mut_ptr(), 0), cells, tile.len());
                        }
                    }
                }
            }
            // SAFETY: only this task adds to these outputs of its chunk.
            unsafe { *self.sums.biases.at(channel) += E::sum(simd, sum) };
        }
    }

    /// Copies a row of the plan's tile of the cotangent, or the rows whose factors it holds, and
    /// adds their cells to a sum.
    #[inline(always)]
    fn fill_rows<S: Simd>(
        &self,
        simd: S,
        tile: &mut [E],
        [batch, channel, plane, line, column]: [usize; 5],
        columns: usize,
        sum: &mut E::Vector<S>,
    ) {
        let Plan {
            job, row, source, ..
        } = self.plan;
        let (stride, [.., height, _]) = (job.cotangent.strides()[4], job.cotangent.shape());
        let rows = tile.chunks_exact_mut(*row).take(source.results());
        for (line, cells) in (line * source.results()..).zip(rows) {
            if line >= height {
                cells.fill(E::default());
                continue;
            }
            let source = job.cotangent.at([batch, channel, plane, line, column]);
            // SAFETY: the tile lies within the cotangent.
            unsafe {
                match stride {
                    1 => copy::<S, E, P>(&mut cells[..columns], source),
                    _ => copy_strided::<E, P>(&mut cells[..columns], source, stride),
                }
            }
            cells[columns..].fill(E::default());
            for vector in cells.chunks_exact(E::lanes::<S>()) {
                // SAFETY: the chunk is a vector long.
                *sum = E::plus(simd, *sum, unsafe { E::load::<S>(vector.as_ptr()) });
            }
        }
        if let Source::Factors(..) = source {
            transform(simd, tile, *row);
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
            source,
            row,
            offsets,
            ..
        } = self.plan;
        let Conv {
            inputs,
            outputs: all,
            ..
        } = *job.conv;
        let elements = self.plan.grid.taps.len();
        let terms = channels.len() * elements;
        let cells = self.plan.output;
        // Outputs are outside terms: the cotangent of a few outputs stays in the first-level cache,
        // while each group of terms reads the tile of the source from the second-level cache.
        let mut output = outputs.start;
        while output < outputs.end {
            let height = [4, 2, 1]
                .into_iter()
                .find(|&height| height <= block::<S>() && height <= outputs.end - output)
                .unwrap_or(1);
            let first = ((self.group * all + output) * inputs + channels.start) * elements;
            for product in 0..source.products() {
                let first = product * self.plan.of_product() + first;
                let mut term = 0;
                while term < terms {
                    let width = [6, 3, 2, 1]
                        .into_iter()
                        .find(|&width| width <= terms - term)
                        .unwrap_or(1);
                    // SAFETY: rows of the cotangent's tile are padded to whole vectors. Only this
                    // task adds to these sums of its chunk, which are `inputs · elements` apart.
                    unsafe {
                        let dot = Dot {
                            cotangent: cotangent.as_ptr().add((output - outputs.start) * cells),
                            channel: cells,
                            tile: tile.as_ptr(),
                            offsets: offsets.as_ptr().add(term),
                            layout: source.layout(),
                            planes: size[0],
                            rows: size[1].div_ceil(P::NUMBERS),
                            every: [product, source.products()],
                            columns: size[2],
                            row: *row,
                            sums: self.sums.weights.at(first + term),
                            output: inputs * elements,
                        };
                        dot.run::<S, P>(simd, height, width);
                    }
                    term += width;
                }
            }
            output += height;
        }
    }
}
