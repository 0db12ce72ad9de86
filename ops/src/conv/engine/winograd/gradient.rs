//! Gradients of weights by squares of results: for each of the 36 products, the factors of outputs
//! × squares of the cotangent times those of squares × channels of the source; or by
//! [oblongs](super::oblongs), which have 24.

use std::marker::PhantomData;
use std::ops::Range;

use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::squares::{PANEL, Squares, boxes, padded, products};
use super::{PRODUCTS, RESULTS, TAPS, Tiles, oblongs, to_taps};
use crate::conv::engine::ahead::{Stretch, ask_for, shares};
use crate::conv::engine::geometry::{Conv, Correlation, Dims, Tap};
use crate::conv::engine::pieces::Pieces;
use crate::conv::engine::plan::{
    self, OUTPUTS, TASKS, WeightGradient, WeightJob, chunks, place_of,
};
use crate::conv::engine::tile::tile_box;
use crate::kernel::buffer::{Buffer, filled};
use crate::kernel::lanes::WIDEST;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::panels::{Factors, Sums};
use crate::kernel::products::{Numbers, Products};
use crate::kernel::simd::Element;

/// Minimum cells of all fields for which squares are used: the fewer cells, the more the rounding
/// of factors dominates the error. With 2,048 cells errors are more than four times those of direct
/// sums.
pub(crate) const CELLS: usize = 3800;
/// Minimum cells for which oblongs are used.
pub(crate) const OBLONG_CELLS: usize = 512;
/// Approximate bytes of the factors of a box, and its minimum and maximum number of squares.
const BOX_BYTES: usize = 768 << 10;
const SQUARES: Range<usize> = 64..256;
/// Squares whose products are added up before they are added to the sums of others, which are
/// larger.
const TOGETHER: usize = 16;
/// Channels of the side not in lanes whose sums of all chunks are added up at once.
const ROWS: usize = 4;
/// Approximate minimum of squares of a chunk, because its sums are written and read again.
const OF_CHUNK: usize = 128;
/// Channels of the source in a block.
const BLOCK: usize = 256;

/// Computes the gradients.
pub(crate) fn run<S: Simd, E: Element, P: Products<E>, const COLUMNS: usize>(
    simd: S,
    job: &WeightJob<'_, P::Number>,
    tiles: &Tiles<COLUMNS>,
) -> WeightGradient<E> {
    let plan = Plan::new::<S, E>(job, tiles);
    let Conv {
        groups, outputs, ..
    } = *job.conv;
    let (chunks, channels) = (plan.chunks.len(), groups * outputs);
    let mut biases: Buffer<E> = filled(chunks * channels, 0.0);
    let all_biases = biases.shared();
    // SAFETY: each chunk's first box writes all of its sums.
    let sums: Buffer<E> = unsafe {
        Buffer::filled(chunks * plan.sums(), |sums| {
            tasks::for_each(chunks * groups * plan.ranges, 1, |task| {
                let [chunk, group, range] = place_of(task, [groups, plan.ranges]);
                simd.vectorize(Task::<E, P, COLUMNS> {
                    plan: &plan,
                    sums: sums.starting_at(chunk * plan.sums()),
                    biases: all_biases.starting_at(chunk * channels),
                    chunk,
                    group,
                    range,
                    products: PhantomData,
                });
            });
        })
    };
    let mut weight = vec![E::default(); channels * job.conv.inputs * job.conv.elements()];
    let shared = Shared::new(&mut weight);
    let [rows, _] = plan.sides;
    let blocks = rows.div_ceil(ROWS);
    tasks::for_each(groups * blocks, 1, |index| {
        let first = index % blocks * ROWS;
        simd.vectorize(Taps {
            plan: &plan,
            sums: &sums,
            group: index / blocks,
            rows: first..rows.min(first + ROWS),
            to: shared,
        });
    });
    WeightGradient {
        weight,
        bias: plan::biases(&biases, channels),
    }
}

/// Data shared by all tasks.
struct Plan<'a, N, const COLUMNS: usize> {
    job: &'a WeightJob<'a, N>,
    tiles: &'a Tiles<COLUMNS>,
    source: Squares<PRODUCTS, COLUMNS>,
    cotangent: Squares<RESULTS, COLUMNS>,
    /// Cotangent as a field.
    pieces: Pieces<'a, N>,
    /// Squares of a box, per dim.
    tile: Dims,
    /// Number of boxes of a sample.
    boxes: usize,
    /// (sample, box) pairs of every chunk.
    chunks: Vec<Range<usize>>,
    /// Ranges of outputs of a group.
    ranges: usize,
    /// Whether the lanes of sums are outputs, not inputs: whichever fill vectors better.
    by_outputs: bool,
    /// Channels of a group on the side not in lanes, and on the other, padded.
    sides: [usize; 2],
}

impl<'a, N: Copy + Send + Sync, const COLUMNS: usize> Plan<'a, N, COLUMNS> {
    fn new<S: Simd, E: Element>(job: &'a WeightJob<'a, N>, tiles: &'a Tiles<COLUMNS>) -> Self {
        let Conv {
            groups,
            inputs,
            outputs,
            ..
        } = *job.conv;
        let [of_inputs, of_outputs] = [inputs, outputs].map(padded::<S, E>);
        let by_outputs = of_outputs * inputs < of_inputs * outputs;
        let sides = if by_outputs {
            [inputs, of_outputs]
        } else {
            [outputs, of_inputs]
        };
        let held = of_inputs.min(BLOCK) + of_outputs.min(OUTPUTS);
        let (tile, boxes) = boxes::<E, COLUMNS>(tiles.flat.count, held, BOX_BYTES, SQUARES);
        let ranges = outputs.div_ceil(OUTPUTS);
        let [batch, ..] = job.cotangent.shape();
        let sums = groups * products(COLUMNS) * sides[0] * sides[1];
        let squares = batch * tiles.flat.count.iter().product::<usize>();
        let wanted = TASKS
            .div_ceil(groups * ranges)
            .min(squares.div_ceil(OF_CHUNK));
        // Windows of one cell, on whole squares.
        let cells = Correlation {
            taps: vec![Tap {
                offset: [0; 3],
                element: 0,
            }],
            ..tiles.source.clone()
        };
        Self {
            job,
            tiles,
            source: Squares::new(&tiles.source, [tile[1], tile[2]]),
            cotangent: Squares::new(&cells, [tile[1], tile[2]]),
            pieces: Pieces::whole(job.cotangent),
            tile,
            boxes,
            chunks: chunks(batch * boxes, wanted, sums * size_of::<E>()),
            ranges,
            by_outputs,
            sides,
        }
    }

    /// Number of sums of a chunk, `[group][product][channel of one side][channel of the other]`.
    fn sums(&self) -> usize {
        self.job.conv.groups * self.of_group()
    }

    fn of_group(&self) -> usize {
        products(COLUMNS) * self.of_product()
    }

    fn of_product(&self) -> usize {
        self.sides.iter().product()
    }
}

/// A range of outputs of one group, over the boxes of a chunk.
struct Task<'a, E: Element, P: Products<E>, const COLUMNS: usize> {
    plan: &'a Plan<'a, P::Number, COLUMNS>,
    /// Sums of a chunk, of which this task has those of its group and outputs.
    sums: Shared<E>,
    biases: Shared<E>,
    chunk: usize,
    group: usize,
    range: usize,
    products: PhantomData<P>,
}

/// Factors of some channels of a side of a box.
struct Side<'a, E> {
    factors: &'a [E],
    /// Elements from one product to the next.
    of_product: usize,
    /// Channels of a group.
    channels: Range<usize>,
    padded: usize,
}

impl<E: Element, P: Products<E>, const COLUMNS: usize> WithSimd for Task<'_, E, P, COLUMNS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { plan, .. } = self;
        let Plan {
            job,
            source,
            cotangent,
            ..
        } = plan;
        let Conv {
            inputs, outputs, ..
        } = *job.conv;
        let first = self.range * OUTPUTS;
        let range = first..outputs.min(first + OUTPUTS);
        let of_range = padded::<S, E>(range.len());
        let cells = source.cells::<S, E>().max(cotangent.cells::<S, E>());
        let room = cells.next_multiple_of(WIDEST);
        let of_source = source.len(padded::<S, E>(inputs.min(BLOCK)));
        with_scratch(
            room + of_source + cotangent.len(of_range),
            #[inline(always)]
            |scratch: &mut [E]| {
                let (cells, factors) = scratch.split_at_mut(room);
                let (of_source, of_cotangent) = factors.split_at_mut(of_source);
                let chunk = plan.chunks[self.chunk].clone();
                for field in chunk.clone() {
                    let ahead = self.ahead::<S>(field + 1, &range);
                    let (batch, index) = (field / plan.boxes, field % plan.boxes);
                    let [origin, size] = tile_box(index, plan.tile, plan.tiles.flat.count);
                    let (size, squares) = ([size[1], size[2]], size[1] * size[2]);
                    let base = self.group * outputs;
                    cotangent.fill::<S, E, P>(
                        simd,
                        [&mut *cells, &mut *of_cotangent],
                        &plan.pieces,
                        (batch, base + range.start..base + range.end),
                        (origin, size),
                        // SAFETY: only this task adds to these outputs of its chunk.
                        |channel, sum| unsafe { *self.biases.at(channel) += sum },
                    );
                    let of_outputs = Side {
                        factors: of_cotangent,
                        of_product: cotangent.of_product(of_range),
                        channels: range.clone(),
                        padded: of_range,
                    };
                    for first in (0..inputs).step_by(BLOCK) {
                        let block = first..inputs.min(first + BLOCK);
                        let last = block.end == inputs;
                        let base = self.group * inputs;
                        source.fill::<S, E, P>(
                            simd,
                            [&mut *cells, &mut *of_source],
                            job.pieces,
                            (batch, base + block.start..base + block.end),
                            (origin, size),
                            |_, _| (),
                        );
                        let of_block = padded::<S, E>(block.len());
                        let of_inputs = Side {
                            factors: of_source,
                            of_product: source.of_product(of_block),
                            channels: block,
                            padded: of_block,
                        };
                        let sides = if plan.by_outputs {
                            [&of_inputs, &of_outputs]
                        } else {
                            [&of_outputs, &of_inputs]
                        };
                        // The next box is prefetched while the last block is added.
                        let ahead = if last { &ahead[..] } else { &[] };
                        self.add(simd, sides, squares, field > chunk.start, ahead);
                    }
                }
            },
        );
    }
}

impl<E: Element, P: Products<E>, const COLUMNS: usize> Task<'_, E, P, COLUMNS> {
    /// Memory of the first channels of the next box of the chunk.
    fn ahead<S: Simd>(&self, field: usize, range: &Range<usize>) -> Vec<Stretch> {
        let Self { plan, .. } = self;
        if !plan.chunks[self.chunk].contains(&field) {
            return Vec::new();
        }
        let Conv {
            inputs, outputs, ..
        } = *plan.job.conv;
        let (batch, index) = (field / plan.boxes, field % plan.boxes);
        let [origin, _] = tile_box(index, plan.tile, plan.tiles.flat.count);
        let (before, first) = (self.group * outputs, self.group * inputs);
        let outputs = before + range.start..before + range.end;
        let mut ahead = plan
            .cotangent
            .ahead::<S, E, _>(&plan.pieces, batch, outputs, origin);
        let channels = first..first + inputs;
        ahead.extend(
            plan.source
                .ahead::<S, E, _>(plan.job.pieces, batch, channels, origin),
        );
        ahead
    }

    /// Adds the products of a box to the sums of its channels, or writes them.
    #[inline(always)]
    fn add<S: Simd>(
        &self,
        simd: S,
        [rows, lanes]: [&Side<'_, E>; 2],
        squares: usize,
        adds: bool,
        ahead: &[Stretch],
    ) {
        let Self { plan, .. } = self;
        let zeros = [E::default(); PANEL];
        let [_, pitch] = plan.sides;
        for (product, ahead) in shares(ahead, products(COLUMNS)).enumerate() {
            ask_for(ahead);
            let first = self.group * plan.of_group() + product * plan.of_product();
            for row in (0..rows.channels.len()).step_by(PANEL) {
                let width = PANEL.min(rows.padded - row);
                let a = &rows.factors[product * rows.of_product + row * squares..];
                for lane in (0..lanes.padded).step_by(PANEL) {
                    let b = &lanes.factors[product * lanes.of_product + lane * squares..];
                    let place = (rows.channels.start + row) * pitch + lanes.channels.start + lane;
                    let of_lanes = PANEL.min(lanes.padded - lane);
                    for start in (0..squares).step_by(TOGETHER) {
                        // SAFETY: the factors of all squares have been written; the sums belong to
                        // this task.
                        unsafe {
                            let to = self.sums.at(first + place);
                            let from = if adds || start > 0 {
                                (to.cast_const(), pitch)
                            } else {
                                (zeros.as_ptr(), 0)
                            };
                            Sums {
                                a: Factors::across(a[start * width..].as_ptr(), width),
                                rows: PANEL.min(rows.channels.len() - row),
                                b: b[start * of_lanes..].as_ptr(),
                                width: of_lanes,
                                steps: TOGETHER.min(squares - start),
                                from,
                                to: (to, pitch),
                            }
                            .run::<S, Numbers>(simd);
                        }
                    }
                }
            }
        }
    }
}

/// Taps of some channels of the side not in lanes, computed in `f64` because there are few.
struct Taps<'a, E, N, const COLUMNS: usize> {
    plan: &'a Plan<'a, N, COLUMNS>,
    /// Sums of all chunks, which are added up in order.
    sums: &'a [E],
    group: usize,
    rows: Range<usize>,
    to: Shared<E>,
}

impl<E: Element, N: Copy + Send + Sync, const COLUMNS: usize> Taps<'_, E, N, COLUMNS> {
    /// Adds up the sums of all chunks, `[product][row][lane]`.
    #[inline(always)]
    fn totals(&self, totals: &mut [f64]) {
        let Self { plan, rows, .. } = self;
        let [_, pitch] = plan.sides;
        let len = rows.len() * pitch;
        for (product, totals) in totals.chunks_exact_mut(len).enumerate() {
            let place = self.group * plan.of_group() + product * plan.of_product();
            let place = place + rows.start * pitch;
            totals.fill(0.0);
            for chunk in 0..plan.chunks.len() {
                let part = &self.sums[chunk * plan.sums() + place..][..len];
                for (total, sum) in totals.iter_mut().zip(part) {
                    *total += sum.to_f64();
                }
            }
        }
    }

    /// Taps of a vector of sums; consecutive products are `of_product` elements apart.
    #[inline(always)]
    fn of_vector<S: Simd>(
        &self,
        simd: S,
        totals: &[f64],
        of_product: usize,
    ) -> [[f64; WIDEST]; TAPS * TAPS] {
        let zero = f64::splat(simd, 0.0);
        let mut down = [[zero; PRODUCTS]; TAPS];
        let across = const { COLUMNS + TAPS - 1 };
        for column in 0..across {
            let mut sums = [zero; PRODUCTS];
            for (k, sum) in sums.iter_mut().enumerate() {
                let part = &totals[(across * k + column) * of_product..][..f64::lanes::<S>()];
                // SAFETY: the part has as many elements as a vector.
                *sum = unsafe { f64::load::<S>(part.as_ptr()) };
            }
            for (down, taps) in down.iter_mut().zip(to_taps::<S, f64>(simd, sums)) {
                down[column] = taps;
            }
        }
        let mut taps = [[0.0; WIDEST]; TAPS * TAPS];
        for (row, down) in down.into_iter().enumerate() {
            let down = match const { COLUMNS == RESULTS } {
                true => to_taps::<S, f64>(simd, down),
                false => oblongs::to_taps::<S, f64>(simd, down),
            };
            for (column, tap) in down.into_iter().enumerate() {
                let place = self.plan.tiles.elements[column][row];
                // SAFETY: no vector is wider.
                unsafe { f64::store::<S>(taps[place].as_mut_ptr(), tap) };
            }
        }
        taps
    }

    /// Writes the weights of all sums.
    #[inline(always)]
    fn write<S: Simd>(&self, simd: S, totals: &[f64]) {
        let Self { plan, rows, .. } = self;
        let Conv {
            inputs, outputs, ..
        } = *plan.job.conv;
        let (lanes, elements) = (f64::lanes::<S>(), plan.job.conv.elements());
        let [_, pitch] = plan.sides;
        let present = if plan.by_outputs { outputs } else { inputs };
        for (index, row) in rows.clone().enumerate() {
            for first in (0..present).step_by(lanes) {
                let totals = &totals[index * pitch + first..];
                let taps = self.of_vector::<S>(simd, totals, rows.len() * pitch);
                for lane in 0..lanes.min(present - first) {
                    let [output, input] = if plan.by_outputs {
                        [first + lane, row]
                    } else {
                        [row, first + lane]
                    };
                    let weight = ((self.group * outputs + output) * inputs + input) * elements;
                    for (element, taps) in taps.iter().enumerate() {
                        // SAFETY: this weight belongs to this task.
                        unsafe { *self.to.at(weight + element) = E::from_f64(taps[lane]) };
                    }
                }
            }
        }
    }
}

impl<E: Element, N: Copy + Send + Sync, const COLUMNS: usize> WithSimd for Taps<'_, E, N, COLUMNS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [_, pitch] = self.plan.sides;
        with_scratch(
            products(COLUMNS) * self.rows.len() * pitch,
            #[inline(always)]
            |totals: &mut [f64]| {
                self.totals(totals);
                self.write::<S>(simd, totals);
            },
        );
    }
}
