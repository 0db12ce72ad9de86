//! Correlations by squares of results: for each of the 36 products, the factors of squares ×
//! channels times those of channels × outputs. The sums of squares are transformed to results with
//! outputs in lanes, and then to rows of the field.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::squares::{ALL, PANEL, Squares, boxes, padded};
use super::{PRODUCTS, RESULTS, SquareTiles, TAPS, of_taps, to_results};
use crate::conv::engine::ahead::{Stretch, ask_for, shares};
use crate::conv::engine::geometry::{Correlation, Dims};
use crate::conv::engine::job::Job;
use crate::conv::engine::tile::{SKEW, tile_box};
use crate::kernel::buffer::Buffer;
use crate::kernel::lanes::WIDEST;
use crate::kernel::memory::{Shared, prefetch_to_write, with_scratch};
use crate::kernel::panels::{Factors, Sums};
use crate::kernel::products::{Numbers, Products};
use crate::kernel::simd::Element;
use crate::kernel::transpose::transpose;
use crate::kernel::work::deal;

/// Minimum cells of all fields for which this pays: the factors of taps are as many as those of
/// this number of cells.
pub(crate) const CELLS: usize = 256;
/// Approximate bytes of the factors of a box, and its minimum and maximum number of squares.
const BOX_BYTES: usize = 384 << 10;
const SQUARES: Range<usize> = 32..96;
/// Number of tasks of a call with enough panels of outputs: each task of a box computes its
/// factors.
const TASKS: usize = 16;
/// Inputs whose taps a task packs.
const INPUTS: usize = 16;

/// Computes the results of a part.
pub(crate) fn correlate<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    job: &Job<'_, E, P::Number>,
    correlation: &Correlation,
    tiles: &SquareTiles,
    weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    output: Shared<P::Number>,
) {
    let part = Part::<E, P>::new(simd, job, correlation, tiles, weight);
    let tasks = job.batch * job.groups * part.boxes * part.ranges;
    job.run_tasks(correlation, tasks, |index| {
        let [batch, group, tile, range] = job.place(index, [part.boxes, part.ranges]);
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
    tiles: &'a SquareTiles,
    source: Squares<PRODUCTS, RESULTS>,
    /// Squares of a box, per dim.
    tile: Dims,
    /// Number of boxes of a field.
    boxes: usize,
    /// Number of ranges of panels of outputs.
    ranges: usize,
    weights: Weights<E>,
    products: PhantomData<P>,
}

impl<'a, E: Element, P: Products<E>> Part<'a, E, P> {
    fn new<S: Simd>(
        simd: S,
        job: &Job<'_, E, P::Number>,
        correlation: &'a Correlation,
        tiles: &'a SquareTiles,
        weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    ) -> Self {
        let outputs = padded::<S, E>(job.outputs);
        let held = padded::<S, E>(job.inputs) + outputs.min(PANEL);
        let (tile, boxes) = boxes::<E, RESULTS>(tiles.flat.count, held, BOX_BYTES, SQUARES);
        let ranges = TASKS.div_ceil(job.batch * job.groups * boxes);
        Self {
            correlation,
            tiles,
            source: Squares::new(&tiles.source, [tile[1], tile[2]]),
            tile,
            boxes,
            ranges: ranges.min(outputs.div_ceil(PANEL)),
            weights: Weights::new::<S, P>(simd, job, tiles, weight),
            products: PhantomData,
        }
    }
}

/// Factors of taps, `[group][product][panel][input][output]`.
struct Weights<E> {
    factors: Buffer<E>,
    /// Elements from one product to the next, chosen so that products begin at different places of
    /// a cache.
    of_product: usize,
}

impl<E: Element> Weights<E> {
    fn new<S: Simd, P: Products<E>>(
        simd: S,
        job: &Job<'_, E, P::Number>,
        tiles: &SquareTiles,
        weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    ) -> Self {
        let (inputs, padded) = (job.inputs, padded::<S, E>(job.outputs));
        let of_product = inputs * padded + SKEW;
        let len = job.groups * ALL * of_product;
        let parts = inputs.div_ceil(INPUTS);
        let fill = |factors: Shared<E>| {
            for end in (of_product..=len).step_by(of_product) {
                for place in end - SKEW..end {
                    // SAFETY: this lies between the factors of two products.
                    unsafe { *factors.at(place) = E::default() };
                }
            }
            let part = |index: usize| {
                let (group, first) = (index / parts, index % parts * INPUTS);
                simd.vectorize(Pack::<E, P, _> {
                    tiles,
                    weight,
                    group,
                    inputs: [first, inputs.min(first + INPUTS), inputs],
                    outputs: job.outputs,
                    to: factors.starting_at(group * ALL * of_product),
                    of_product,
                    products: PhantomData,
                });
            };
            deal(job.groups * parts, len, part);
        };
        // SAFETY: the parts write every factor, and the gaps between products are set to zero.
        let factors = unsafe { Buffer::filled(len, fill) };
        Self {
            factors,
            of_product,
        }
    }
}

/// Packs the factors of some inputs.
struct Pack<'a, E, P, W> {
    tiles: &'a SquareTiles,
    weight: &'a W,
    group: usize,
    /// First input, end, and number of all inputs.
    inputs: [usize; 3],
    outputs: usize,
    /// Factors of the group.
    to: Shared<E>,
    of_product: usize,
    products: PhantomData<P>,
}

impl<E: Element, P: Products<E>, W: Fn([usize; 4]) -> P::Number + Sync> WithSimd
    for Pack<'_, E, P, W>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ([start, end, inputs], outputs) = (self.inputs, self.outputs);
        let lanes = E::lanes::<S>();
        // Lanes without an output hold values of others; their results are never stored.
        let mut taps = [[[E::default(); WIDEST]; TAPS]; TAPS];
        for input in start..end {
            for first in (0..outputs).step_by(lanes) {
                for (column, taps) in taps.iter_mut().enumerate() {
                    for (row, taps) in taps.iter_mut().enumerate() {
                        let element = self.tiles.elements[column][row];
                        for (output, tap) in (first..outputs).zip(&mut taps[..lanes]) {
                            *tap = P::widened((self.weight)([self.group, output, input, element]));
                        }
                    }
                }
                let panel = first / PANEL * PANEL;
                let width = PANEL.min(padded::<S, E>(outputs) - panel);
                let place = panel * inputs + first - panel + input * width;
                // SAFETY: these factors belong to this part.
                unsafe { factors_of_taps::<S, E>(simd, &taps, self.to.at(place), self.of_product) };
            }
        }
    }
}

/// Writes the factors of a vector of squares of taps, `[column][row]`; consecutive products are
/// `of_product` elements apart.
///
/// # Safety
/// There must be room for the factors.
#[inline(always)]
unsafe fn factors_of_taps<S: Simd, E: Element>(
    simd: S,
    taps: &[[[E; WIDEST]; TAPS]; TAPS],
    to: *mut E,
    of_product: usize,
) {
    let zero = E::splat(simd, E::default());
    let mut down = [[zero; TAPS]; PRODUCTS];
    for (column, taps) in taps.iter().enumerate() {
        let mut rows = [zero; TAPS];
        for (row, taps) in rows.iter_mut().zip(taps) {
            // SAFETY: no vector is wider.
            *row = unsafe { E::load::<S>(taps.as_ptr()) };
        }
        for (down, factor) in down.iter_mut().zip(of_taps::<S, E>(simd, rows)) {
            down[column] = factor;
        }
    }
    for (k, down) in down.into_iter().enumerate() {
        for (j, factor) in of_taps::<S, E>(simd, down).into_iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { E::store::<S>(to.add((PRODUCTS * k + j) * of_product), factor) };
        }
    }
}

/// One box of one group of one sample, for a range of panels of outputs.
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
        let [origin, size] = tile_box(self.tile, part.tile, part.tiles.flat.count);
        let size = [size[1], size[2]];
        let [inputs, outputs] = [job.inputs, job.outputs].map(padded::<S, E>);
        let cells = part.source.cells::<S, E>().next_multiple_of(WIDEST);
        let factors = part.source.len(inputs);
        let of_sums = size[0] * size[1] * PANEL + SKEW;
        with_scratch(
            cells + factors + ALL * of_sums,
            #[inline(always)]
            |scratch: &mut [E]| {
                let (cells, rest) = scratch.split_at_mut(cells);
                let (factors, sums) = rest.split_at_mut(factors);
                let before = self.group * job.inputs;
                part.source.fill::<S, E, P>(
                    simd,
                    [cells, &mut *factors],
                    job.pieces,
                    (self.batch, before..before + job.inputs),
                    (origin, size),
                    |_, _| (),
                );
                let ahead = self.ahead::<S>();
                let panels = outputs.div_ceil(PANEL);
                let of_range = panels.div_ceil(part.ranges);
                let range = self.range * of_range..panels.min((self.range + 1) * of_range);
                for panel in range.clone() {
                    // The next box is prefetched with the last panel.
                    let ahead = if panel + 1 == range.end {
                        &ahead[..]
                    } else {
                        &[]
                    };
                    let width = PANEL.min(outputs - panel * PANEL);
                    let panel = (panel, width);
                    let to = (&mut *sums, of_sums);
                    self.multiply(simd, factors, panel, (origin, size), to, ahead);
                    for row in 0..size[0] {
                        self.store(simd, (&*sums, of_sums), panel, (origin, size), row);
                    }
                }
            },
        );
    }
}

impl<E: Element, P: Products<E>> Task<'_, E, P> {
    /// Computes the sums of all products and squares for a panel of outputs,
    /// `[product][square][output]`.
    #[inline(always)]
    fn multiply<S: Simd>(
        &self,
        simd: S,
        factors: &[E],
        (panel, width): (usize, usize),
        (origin, size): (Dims, [usize; 2]),
        (sums, of_sums): (&mut [E], usize),
        ahead: &[Stretch],
    ) {
        let Self { job, part, .. } = self;
        let (inputs, squares) = (padded::<S, E>(job.inputs), size[0] * size[1]);
        let of_product = part.weights.of_product;
        let zeros = [E::default(); PANEL];
        let ([down, across], output) = self.place(panel, (origin, size), [0; 2]);
        let lines = PANEL.min(job.outputs - panel * PANEL) * down.len();
        for (product, ahead) in shares(ahead, ALL).enumerate() {
            // Prefetches shortly before each product what is read and written next.
            ask_for(ahead);
            for line in lines * product / ALL..lines * (product + 1) / ALL {
                let (channel, row) = (line / down.len(), line % down.len());
                let line = output.wrapping_add(channel * job.cells() + row * job.shape[2]);
                prefetch_to_write(line, [1, across.len()], 0);
            }
            let weights = (self.group * ALL + product) * of_product + panel * PANEL * job.inputs;
            let weights = &part.weights.factors[weights..];
            let to = sums[product * of_sums..].as_mut_ptr();
            for first in (0..job.inputs).step_by(PANEL) {
                let a = product * part.source.of_product(inputs) + first * squares;
                // SAFETY: the factors of all squares have been written, and there is room for their
                // sums.
                unsafe {
                    Sums {
                        a: Factors::new(factors[a..].as_ptr(), PANEL.min(inputs - first)),
                        rows: squares,
                        b: weights[first * width..].as_ptr(),
                        width,
                        steps: PANEL.min(job.inputs - first),
                        from: match first {
                            0 => (zeros.as_ptr(), 0),
                            _ => (to.cast_const(), width),
                        },
                        to: (to, width),
                    }
                    .run::<S, Numbers>(simd);
                }
            }
        }
    }

    /// Rows and columns that are results, of `size` squares from `square` of the box at `origin`
    /// on, and the position of the first of these for the first output of a panel. Results of the
    /// first square of a dim may begin after its first row or column.
    fn place(
        &self,
        panel: usize,
        (origin, size): (Dims, [usize; 2]),
        square: [usize; 2],
    ) -> ([Range<usize>; 2], *mut P::Number) {
        let Self { job, part, .. } = self;
        let Correlation { start, count, .. } = part.correlation;
        let mut place = start[0] + origin[0];
        let results = [1, 2].map(|dim| {
            let at = RESULTS * (origin[dim] + square[dim - 1]);
            let before = part.tiles.before[dim - 1];
            let first = at.saturating_sub(before);
            let skipped = before.saturating_sub(at);
            place = place * job.shape[dim] + start[dim] + first;
            skipped..(RESULTS * size[dim - 1]).min(count[dim] + skipped - first)
        });
        let channel = self.group * job.outputs + panel * PANEL;
        let field = self.batch * job.groups * job.outputs + channel;
        // SAFETY: the lattice lies in the output.
        let output = unsafe { self.output.at(field * job.cells() + place) };
        (results, output)
    }

    /// Memory of the next box's first channels.
    fn ahead<S: Simd>(&self) -> Vec<Stretch> {
        let Self { job, part, .. } = self;
        if self.range + 1 < part.ranges || self.tile + 1 == part.boxes {
            return Vec::new();
        }
        let [origin, _] = tile_box(self.tile + 1, part.tile, part.tiles.flat.count);
        let first = self.group * job.inputs;
        let channels = first..first + job.inputs;
        let source = &part.source;
        source.ahead::<S, E, _>(job.pieces, self.batch, channels, origin)
    }

    /// Writes the results of a row of squares from the sums of a panel.
    #[inline(always)]
    fn store<S: Simd>(
        &self,
        simd: S,
        (sums, of_sums): (&[E], usize),
        (panel, width): (usize, usize),
        (origin, size): (Dims, [usize; 2]),
        row: usize,
    ) {
        let Self { job, .. } = self;
        let (lanes, cells, columns) = (E::lanes::<S>(), job.cells(), job.shape[2]);
        let in_block = lanes / RESULTS;
        let mut block = [[[E::default(); WIDEST]; WIDEST]; RESULTS];
        let mut turned = [[E::default(); WIDEST]; WIDEST];
        let of_row = size[1];
        for square in (0..of_row).step_by(in_block) {
            let size = [1, in_block.min(of_row - square)];
            let ([down, across], output) = self.place(panel, (origin, size), [row, square]);
            for vector in (0..width).step_by(lanes) {
                let channel = panel * PANEL + vector;
                let channels = lanes.min(job.outputs - channel);
                let channel = self.group * job.outputs + channel;
                let output = output.wrapping_add(vector * cells);
                // SAFETY: the lattice lies in the output, its channels are `cells` apart, and tasks
                // have disjoint parts of it.
                unsafe {
                    let mut bias = E::splat(simd, E::default());
                    if let Some(all) = job.bias {
                        bias = E::load_part(simd, &all[channel..channel + channels], bias);
                    }
                    for index in 0..size[1] {
                        let place = (row * of_row + square + index) * width + vector;
                        let sums = sums[place..].as_ptr();
                        let to = &mut block;
                        results::<S, E>(simd, (sums, of_sums), bias, to, RESULTS * index);
                    }
                    for (line, row) in down.clone().enumerate() {
                        let to = turned.as_mut_ptr();
                        let from = &block[row];
                        transpose::<S, E>(
                            |run| from[run].as_ptr(),
                            None,
                            |run| to.wrapping_add(run).cast(),
                        );
                        for (channel, results) in turned.iter().enumerate().take(channels) {
                            let place = output.wrapping_add(channel * cells + line * columns);
                            if across.len() == lanes {
                                P::store::<S>(place, E::load::<S>(results.as_ptr()));
                                continue;
                            }
                            for (column, result) in results[across.clone()].iter().enumerate() {
                                *place.add(column) = P::number(*result);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes the results of a square, with a bias, from sums of a vector of outputs that are `of_sums`
/// elements apart: `[row][column]`, from column `first` on.
///
/// # Safety
/// The sums of all products must be readable.
#[inline(always)]
unsafe fn results<S: Simd, E: Element>(
    simd: S,
    (sums, of_sums): (*const E, usize),
    bias: E::Vector<S>,
    to: &mut [[[E; WIDEST]; WIDEST]; RESULTS],
    first: usize,
) {
    let zero = E::splat(simd, E::default());
    let mut down = [[zero; PRODUCTS]; RESULTS];
    for column in 0..PRODUCTS {
        let mut products = [zero; PRODUCTS];
        for (k, product) in products.iter_mut().enumerate() {
            // SAFETY: guaranteed by the caller.
            *product = unsafe { E::load::<S>(sums.add((PRODUCTS * k + column) * of_sums)) };
        }
        for (down, result) in down.iter_mut().zip(to_results::<S, E>(simd, products)) {
            down[column] = result;
        }
    }
    for (to, down) in to.iter_mut().zip(down) {
        let results = to_results::<S, E>(simd, down);
        for (to, result) in to[first..].iter_mut().zip(results) {
            // SAFETY: no vector is wider.
            unsafe { E::store::<S>(to.as_mut_ptr(), E::plus(simd, result, bias)) };
        }
    }
}
