//! Gradient of the weights as matrix products: channels × pairs of columns of the source, which lie
//! in a tile as they do in the field, times pairs of columns × outputs of the cotangent, which is
//! transposed once for all taps and channels.
//!
//! A product sums over 32 columns of a row. The last product of a row ends with the row and begins
//! with columns that it shares with the product before, for which its cotangent is zero. No cell
//! beyond the row's windows, which might not be finite, is read. An infinite cell in the shared
//! columns turns its sums into NaN.

use std::marker::PhantomData;
use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::{COLUMNS, dealt, pay};
use crate::conv::engine::geometry::{Conv, Correlation, Dims};
use crate::conv::engine::plan::{self, TASKS, WeightGradient, WeightJob, chunks, place_of};
use crate::conv::engine::tile::{SCRATCH_BYTES, TileLayout, balanced, tile_extents};
use crate::kernel::amx::{self, Factor, Place, SIDE};
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::interleave::deinterleave;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::panels::matrices::columns;
use crate::kernel::products::{MOST_PARTS, Products, store_parts};
use crate::kernel::simd::Element;
use crate::kernel::transpose::transpose;

/// Maximum bytes of the source tile of a block of channels, and of the cotangent tile.
const TILE_BYTES: usize = 512 << 10;
/// Channels of a block: two matrices.
const BLOCK: usize = 2 * SIDE;
/// Products added up at a time; their factors stay in the first-level cache.
const TERMS: usize = 12;
/// Maximum outputs of a task, and of a task whose weights have many sums: tasks are then ranges of
/// outputs rather than chunks, each of which has sums of its own.
const OUTPUTS: usize = 128;
const FEW_OUTPUTS: usize = 32;
const MANY_SUMS: usize = 1 << 18;

/// Minimum channels for which matrices of three parts replace Winograd's method in weight
/// gradients.
const MANY_CHANNELS: usize = 256;

/// Whether matrices compute the gradient of the weights.
pub(crate) fn applies<E: Element, P: Products<E>>(job: &WeightJob<'_, P::Number>) -> bool {
    let [_, _, count @ ..] = job.cotangent.shape();
    let instead = job.rows().map(|_| MANY_CHANNELS);
    let channels = [job.conv.inputs, job.conv.outputs];
    let smallest = || TileLayout::smallest(&job.conv.forward(count), COLUMNS);
    pay::<E, P>(job.method, channels, instead)
        && count[2] >= COLUMNS
        && holds::<E, P>(&smallest(), job.conv.inputs)
}

/// Whether the tiles of a layout have room for two matrices of channels.
pub(crate) fn holds<E: Element, P: Products<E>>(layout: &TileLayout, inputs: usize) -> bool {
    let [of_matrix, _] = dealt(inputs);
    let bytes = P::PARTS * layout.len(2 * of_matrix) * size_of::<u16>();
    layout.is_dense() || bytes <= SCRATCH_BYTES
}

/// Columns of tiles: parts of a row, each shorter than twice `most`; all but the last hold whole
/// products.
fn parts(columns: usize, most: usize) -> Vec<Range<usize>> {
    let count = (columns / most.max(COLUMNS)).max(1);
    let width = columns / count / COLUMNS * COLUMNS;
    let ends = (1..=count).map(|part| if part == count { columns } else { part * width });
    ends.enumerate()
        .map(|(part, end)| part * width..end)
        .collect()
}

/// Data shared by all tasks.
struct Plan<'a, N> {
    job: &'a WeightJob<'a, N>,
    correlation: Correlation,
    layout: TileLayout,
    /// Planes and rows of a tile, and the columns of all tiles.
    tile: [usize; 2],
    columns: Vec<Range<usize>>,
    /// Tiles per sample, and (sample, tile) pairs of every chunk.
    tiles: usize,
    chunks: Vec<Range<usize>>,
    /// Outputs per range, and number of ranges.
    together: usize,
    ranges: usize,
}

impl<'a, N: Send + Sync> Plan<'a, N> {
    fn new<E: Element, P: Products<E, Number = N>>(job: &'a WeightJob<'a, N>) -> Self {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *job.conv;
        let [batch, _, count @ ..] = job.cotangent.shape();
        let correlation = job.conv.forward(count);
        let room = TILE_BYTES / P::PARTS / size_of::<u16>();
        let held = inputs.min(BLOCK);
        let together = match groups * inputs * outputs * correlation.taps.len() {
            MANY_SUMS.. => FEW_OUTPUTS,
            _ => OUTPUTS,
        };
        let of_range = outputs.min(together).next_multiple_of(SIDE);
        let fits = |layout: &TileLayout, tile: Dims| {
            let cotangent = tile[0] * tile[1] * tile[2].next_multiple_of(COLUMNS) * of_range;
            held * layout.copied() <= room && cotangent <= room && holds::<E, P>(layout, inputs)
        };
        let tile = tile_extents(&correlation, [COLUMNS, count[2].div_ceil(COLUMNS)], 1, fits);
        let columns = parts(count[2], tile[2]);
        let ranges = outputs.div_ceil(together);
        let [planes, rows, _] = balanced(tile, count, batch * groups * ranges);
        let widest = columns.iter().map(ExactSizeIterator::len).max();
        let layout = TileLayout::new(&correlation, [planes, rows, widest.unwrap_or(COLUMNS)]);
        let tiles = count[0].div_ceil(planes) * count[1].div_ceil(rows) * columns.len();
        let mut plan = Self {
            job,
            correlation,
            layout,
            tile: [planes, rows],
            columns,
            tiles,
            chunks: Vec::new(),
            together,
            ranges,
        };
        let fields = batch * tiles;
        let wanted = TASKS.div_ceil(groups * ranges);
        plan.chunks = chunks(fields, wanted, plan.sums() * size_of::<E>());
        plan
    }

    /// Box of a tile.
    fn tile(&self, index: usize) -> [Range<usize>; 3] {
        let [planes, rows] = self.tile;
        let [_, _, count @ ..] = self.job.cotangent.shape();
        let across = self.columns.len();
        let down = count[1].div_ceil(rows);
        let (plane, row) = (index / across / down * planes, index / across % down * rows);
        [
            plane..count[0].min(plane + planes),
            row..count[1].min(row + rows),
            self.columns[index % across].clone(),
        ]
    }

    /// Channels and outputs of a group, padded to whole matrices.
    fn padded(&self) -> [usize; 2] {
        [self.job.conv.inputs, self.job.conv.outputs].map(|size| size.next_multiple_of(SIDE))
    }

    /// First columns of the products of a part of a row, each with the number of columns that it
    /// shares with the product before.
    fn products(columns: &Range<usize>) -> impl Iterator<Item = [usize; 2]> + Clone {
        let len = columns.len();
        let firsts = (0..len).step_by(COLUMNS);
        firsts.map(move |first| {
            let start = first.min(len - COLUMNS);
            [start, first - start]
        })
    }

    /// Number of sums of a chunk, `[group][tap][channel][output]`.
    fn sums(&self) -> usize {
        let [inputs, outputs] = self.padded();
        self.job.conv.groups * self.correlation.taps.len() * inputs * outputs
    }
}

/// Computes the gradients.
pub(crate) fn run<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    job: &WeightJob<'_, P::Number>,
) -> WeightGradient<E> {
    let plan = Plan::new::<E, P>(job);
    let Conv {
        groups,
        inputs,
        outputs,
        ..
    } = *job.conv;
    let (chunks, channels) = (plan.chunks.len(), groups * outputs);
    let mut sums: Buffer<E> = filled(chunks * plan.sums(), 0.0);
    let mut biases: Buffer<E> = filled(chunks * channels, 0.0);
    let (all, all_biases) = (sums.shared(), biases.shared());
    tasks::for_each(chunks * groups * plan.ranges, 1, |task| {
        let [chunk, group, range] = place_of(task, [groups, plan.ranges]);
        simd.vectorize(Task::<E, P> {
            plan: &plan,
            sums: all.starting_at(chunk * plan.sums()),
            biases: all_biases.starting_at(chunk * channels),
            chunk,
            group,
            range,
            products: PhantomData,
        });
    });
    let (taps, [held, room]) = (&plan.correlation.taps, plan.padded());
    let ([rows, _], kernel) = (dealt(inputs), job.conv.elements());
    let mut weight = vec![E::default(); groups * outputs * inputs * kernel];
    let to = Shared::new(&mut weight);
    // Every element is summed in the order of chunks. Sums of some outputs share a cache line; the
    // weights of an output are contiguous.
    let blocks = outputs.div_ceil(SIDE);
    tasks::for_each(groups * blocks, 1, |index| {
        let (group, first) = (index / blocks, index % blocks * SIDE);
        for input in 0..inputs {
            let channel = input / rows * SIDE + input % rows;
            for (tap, taken) in taps.iter().enumerate() {
                let place = ((group * taps.len() + tap) * held + channel) * room + first;
                let mut of_outputs = [E::default(); SIDE];
                for chunk in 0..chunks {
                    let part = &sums[chunk * plan.sums() + place..][..SIDE];
                    for (sum, part) in of_outputs.iter_mut().zip(part) {
                        *sum += *part;
                    }
                }
                for (output, sum) in (first..outputs).zip(of_outputs) {
                    let weight = ((group * outputs + output) * inputs + input) * kernel;
                    // SAFETY: only this task writes this element.
                    unsafe { *to.at(weight + taken.element) = sum };
                }
            }
        }
    });
    WeightGradient {
        weight,
        bias: plan::biases(&biases, channels),
    }
}

/// A range of outputs of one group, over the tiles of a chunk.
struct Task<'a, E: Element, P: Products<E>> {
    plan: &'a Plan<'a, P::Number>,
    /// Sums of a chunk, of which this task has those of its group and outputs.
    sums: Shared<E>,
    biases: Shared<E>,
    chunk: usize,
    group: usize,
    range: usize,
    products: PhantomData<P>,
}

impl<E: Element, P: Products<E>> WithSimd for Task<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { plan, .. } = self;
        let Conv {
            inputs, outputs, ..
        } = *plan.job.conv;
        let first = self.range * plan.together;
        let range = first..outputs.min(first + plan.together);
        let room = range.len().next_multiple_of(SIDE);
        let [planes, rows] = plan.tile;
        let widest = plan
            .columns
            .iter()
            .map(|columns| columns.len().div_ceil(COLUMNS));
        let terms = planes * rows * widest.max().unwrap_or(0);
        let [of_matrix, matrices] = dealt(inputs);
        let part = plan.layout.len(2 * of_matrix);
        let held = P::PARTS * part * size_of::<u16>() / size_of::<E>();
        // SAFETY: jobs run this code only where the instruction set has matrices.
        let registers = unsafe { amx::Matrices::of(of_matrix, SIDE) };
        with_scratch(
            terms * P::PARTS * SIDE * room + held + plan.layout.len(1),
            #[inline(always)]
            |scratch: &mut [E]| {
                let (cotangent, rest) = scratch.split_at_mut(terms * P::PARTS * SIDE * room);
                let (source, cells) = rest.split_at_mut(held);
                let source = source.as_mut_ptr().cast::<u16>();
                for field in plan.chunks[self.chunk].clone() {
                    let (batch, tile) = (field / plan.tiles, plan.tile(field % plan.tiles));
                    self.fill_cotangent(simd, cotangent, room, &range, batch, &tile);
                    let places = self.places(&tile);
                    for first in (0..matrices).step_by(2) {
                        let together = (matrices - first).min(2);
                        let channels =
                            first * of_matrix..inputs.min((first + together) * of_matrix);
                        let before = self.group * inputs;
                        let channels = before + channels.start..before + channels.end;
                        let origin = tile.each_ref().map(|range| range.start);
                        let (pieces, to) = (plan.job.pieces, (source, part, &mut *cells));
                        let right = (cotangent.as_ptr(), room, range.start);
                        // SAFETY: there is room for two matrices of channels; both factors have
                        // been written for these channels and outputs.
                        unsafe {
                            plan.layout
                                .fill_halves::<S, E, P>(simd, to, pieces, batch, channels, origin);
                            self.add_products(
                                &registers,
                                (source, part),
                                right,
                                [first, together],
                                &places,
                            );
                        }
                    }
                }
            },
        );
    }
}

impl<E: Element, P: Products<E>> Task<'_, E, P> {
    /// Positions of the products' first columns in the source tile, in the order of the cotangent.
    fn places(&self, [planes, rows, columns]: &[Range<usize>; 3]) -> Vec<usize> {
        let lines =
            (0..planes.len()).flat_map(|plane| (0..rows.len()).map(move |row| (plane, row)));
        let places = lines.flat_map(|(plane, row)| {
            let line = self.plan.layout.row(plane, row);
            Plan::<P::Number>::products(columns).map(move |[start, _]| line + start)
        });
        places.collect()
    }

    /// Writes pairs of columns × outputs of the cotangent, `[product][part][pair][output]`, and
    /// adds to the bias gradients.
    #[inline(always)]
    fn fill_cotangent<S: Simd>(
        &self,
        simd: S,
        to: &mut [E],
        room: usize,
        outputs: &Range<usize>,
        batch: usize,
        [planes, rows, columns]: &[Range<usize>; 3],
    ) {
        let job = self.plan.job;
        let stride = job.cotangent.strides()[4];
        let lines = || {
            planes
                .clone()
                .flat_map(|plane| rows.clone().map(move |row| (plane, row)))
        };
        for first in outputs.clone().step_by(SIDE) {
            let mut sums = [E::splat(simd, E::default()); SIDE];
            let mut joined = [[[E::default(); SIDE]; SIDE]; MOST_PARTS];
            let mut place = first - outputs.start;
            for (plane, row) in lines() {
                for [start, overlap] in Plan::<P::Number>::products(columns) {
                    let there = outputs.end.min(first + SIDE) - first;
                    for (index, sum) in sums.iter_mut().enumerate().take(there) {
                        let mut run = [P::Number::default(); COLUMNS];
                        let channel = self.group * job.conv.outputs + first + index;
                        let from =
                            job.cotangent
                                .at([batch, channel, plane, row, columns.start + start]);
                        // SAFETY: the row of the cotangent has as many columns from there on.
                        unsafe { copy_run(&mut run, from, stride) };
                        run[..overlap].fill(P::Number::default());
                        // SAFETY: a run is whole vectors.
                        unsafe {
                            for column in (0..COLUMNS).step_by(E::lanes::<S>()) {
                                let numbers = P::load::<S>(run.as_ptr().add(column));
                                *sum = E::plus(simd, *sum, numbers);
                            }
                            let run = run.as_ptr();
                            let numbers = [P::load::<S>(run), P::load::<S>(run.add(SIDE))];
                            let to = joined.as_mut_ptr().cast::<E>().add(index * SIDE);
                            let pairs = deinterleave::<S, E>(numbers);
                            store_parts::<S, E, P>(simd, pairs, to, SIDE * SIDE);
                        }
                    }
                    for joined in joined.iter().take(P::PARTS) {
                        let here = to[place..].as_mut_ptr();
                        let to = |run: usize| here.wrapping_add(run * room);
                        // SAFETY: runs have 16 pairs, and there is room for as many pairs of 16
                        // outputs.
                        unsafe { transpose::<S, E>(|run| joined[run].as_ptr(), None, to) };
                        place += SIDE * room;
                    }
                }
            }
            for (index, sum) in sums.into_iter().take(outputs.end - first).enumerate() {
                let channel = self.group * job.conv.outputs + first + index;
                // SAFETY: only this task adds to these outputs of its chunk.
                unsafe { *self.biases.at(channel) += E::sum(simd, sum) };
            }
        }
    }

    /// Adds the products of one or two matrices of channels with all outputs.
    ///
    /// # Safety
    /// The source tile must have these channels, and the cotangent a product for every position.
    #[inline(always)]
    unsafe fn add_products(
        &self,
        registers: &amx::Matrices,
        (source, part): (*const u16, usize),
        (cotangent, room, output): (*const E, usize, usize),
        [first, together]: [usize; 2],
        places: &[usize],
    ) {
        let Self { plan, .. } = self;
        let ([held, room_of_sums], [of_matrix, _]) = (plan.padded(), dealt(plan.job.conv.inputs));
        let (taps, channel) = (&plan.correlation.taps, plan.layout.channel());
        for (index, places) in places.chunks(TERMS).enumerate() {
            let cotangent = cotangent.wrapping_add(index * TERMS * P::PARTS * SIDE * room);
            for place in (0..room).step_by(2 * SIDE) {
                let sizes = [together, ((room - place) / SIDE).min(2)];
                for (tap, offset) in taps
                    .iter()
                    .map(|tap| plan.layout.offset(tap.offset))
                    .enumerate()
                {
                    let before = (self.group * taps.len() + tap) * held + first * SIDE;
                    // SAFETY: these sums belong to this task.
                    let sums = unsafe { self.sums.at(before * room_of_sums + output + place) };
                    let left = Factor {
                        at: |term: usize, m: usize| {
                            let place = places[term] + offset + m * of_matrix * channel;
                            source.wrapping_add(place).cast::<u8>()
                        },
                        row: 2 * channel,
                        part: 2 * part,
                    };
                    let right = columns(cotangent.wrapping_add(place), [room, SIDE], P::PARTS);
                    let to = Place::new(sums, room_of_sums, SIDE);
                    let terms = [places.len(), P::PARTS];
                    // SAFETY: all factors have been written, and the sums belong to this task.
                    unsafe { registers.add(sizes, terms, left, right, [to, to]) };
                }
            }
        }
    }
}

/// Copies the numbers of a run, `stride` apart.
///
/// # Safety
/// All numbers of the run must be readable.
#[inline(always)]
unsafe fn copy_run<N: Copy>(run: &mut [N; COLUMNS], from: *const N, stride: isize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if stride == 1 {
            from.copy_to_nonoverlapping(run.as_mut_ptr(), COLUMNS);
            return;
        }
        for (column, number) in run.iter_mut().enumerate() {
            *number = *from.offset(column as isize * stride);
        }
    }
}
