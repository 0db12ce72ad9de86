//! Convolutions with the matrices of AMX. A strip of a tile is the product of outputs × pairs of
//! channels with pairs of channels × columns.

pub(crate) mod gradient;

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use super::geometry::{Correlation, Tap};
use super::job::Job;
use super::method::Method;
use super::tile::TileLayout;
use crate::kernel::amx::{self, Factor, Place, SIDE};
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::{Shared, prefetch_to_write};
use crate::kernel::products::{MOST_PARTS, Products, store_parts};
use crate::kernel::simd::Element;
use crate::kernel::work::deal;

/// Columns of a strip: two matrices.
pub(super) const COLUMNS: usize = 2 * SIDE;
/// Number of sums of a strip: two matrices each of outputs and columns.
pub(super) const SUMS: usize = 4 * SIDE * SIDE;
/// Minimum channels on either side for which matrices pay, and the minimum for numbers of three
/// parts.
const CHANNELS: usize = 2;
const SPLIT_CHANNELS: usize = 64;

/// Weights of a correlation as matrices of outputs × pairs of channels.
#[derive(Debug)]
pub(super) struct Weights<E> {
    /// Pairs of channels of a matrix.
    pairs: usize,
    /// Outputs of a matrix; matrices of a group, for each block and tap; outputs of a group.
    rows: usize,
    count: usize,
    outputs: usize,
    /// Elements of the tile from a column to the cells of each term, `[block][tap]`.
    offsets: Vec<usize>,
    /// Elements of the tile from one pair of channels to the next.
    channel: usize,
    /// Elements of the tile from one part of a pair to the next.
    part: usize,
    /// `[group][one or two matrices of
    /// outputs][block][tap][matrix][part][output][pair]`; the pairs are padded to [`SIDE`].
    packed: Buffer<E>,
}

/// Destination of a strip's results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Results<'a, E, N> {
    /// Position of the strip's first column in the first output of the group.
    pub output: *mut N,
    /// Elements between outputs, and between columns.
    pub channel: usize,
    pub step: usize,
    /// The columns of the strip.
    pub columns: usize,
    /// The biases of the group.
    pub bias: Option<&'a [E]>,
}

/// Divides things evenly among matrices: the number in each, and the number of matrices.
fn dealt(things: usize) -> [usize; 2] {
    let count = things.div_ceil(SIDE);
    [things.div_ceil(count), count]
}

/// Whether matrices pay for this number of channels per group. Numbers of three parts pay from
/// `instead` channels on if another method has fewer products.
pub(super) fn pay<E: Element, P: Products<E>>(
    method: Method,
    channels: [usize; 2],
    instead: Option<usize>,
) -> bool {
    let fewest = match (P::PARTS, method) {
        (0, _) | (MOST_PARTS, Method::Direct | Method::Winograd) => return false,
        (MOST_PARTS, Method::Fastest) => instead.unwrap_or(SPLIT_CHANNELS),
        _ => CHANNELS,
    };
    channels.iter().all(|channels| *channels >= fewest)
}

/// Pairs of channels of a tile, padded to whole matrices.
pub(super) fn held(inputs: usize) -> usize {
    let [pairs, blocks] = dealt(inputs.div_ceil(2));
    pairs * blocks
}

impl<E: Element> Weights<E> {
    /// Packs the weights of a correlation, for tiles of a layout.
    pub(super) fn new<S: Simd, P: Products<E>>(
        simd: S,
        job: &Job<'_, E, P::Number>,
        correlation: &Correlation,
        layout: &TileLayout,
        weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
    ) -> Self {
        let [pairs, blocks] = dealt(job.inputs.div_ceil(2));
        let [rows, count] = dealt(job.outputs);
        let taps = &correlation.taps;
        let channel = layout.channel();
        let offsets = (0..blocks).flat_map(|block| {
            let taps = taps.iter().map(|tap| layout.offset(tap.offset));
            taps.map(move |offset| block * pairs * channel + offset)
        });
        let (terms, matrix) = (blocks * taps.len(), P::PARTS * rows * SIDE);
        let len = job.groups * count * terms * matrix;
        let fill = |packed: Shared<E>| {
            let one = |index: usize| {
                simd.vectorize(Pack::<E, P, _> {
                    job,
                    taps,
                    sizes: [rows, pairs, blocks],
                    place: [index / count, index % count],
                    count,
                    weight,
                    packed,
                    products: PhantomData,
                });
            };
            deal(job.groups * count, 4 * len, one);
        };
        Self {
            pairs,
            rows,
            count,
            outputs: job.outputs,
            offsets: offsets.collect(),
            channel,
            part: blocks * pairs * channel,
            // SAFETY: every element of every matrix is written.
            packed: unsafe { Buffer::filled(len, fill) },
        }
    }

    /// Registers configured for these matrices.
    pub(super) fn registers(&self) -> amx::Matrices {
        // SAFETY: weights are packed only where the registers exist.
        unsafe { amx::Matrices::of(self.rows, self.pairs) }
    }

    /// First matrix of every panel of one or two matrices of outputs.
    pub(super) fn panels(&self) -> impl ExactSizeIterator<Item = usize> {
        (0..self.count).step_by(2)
    }

    /// Computes the strip of a group's outputs in one or two matrices. The strip's columns begin at
    /// `tile`.
    ///
    /// # Safety
    /// The tile must be readable at all offsets from `tile`, for [`COLUMNS`] columns, and the
    /// results must be writable and used by nothing else.
    #[inline(always)]
    pub(super) unsafe fn strip<S: Simd, P: Products<E>>(
        &self,
        simd: S,
        registers: &amx::Matrices,
        [group, first]: [usize; 2],
        tile: *const E,
        sums: &mut [E],
        to: Results<'_, E, P::Number>,
    ) {
        let terms = self.offsets.len();
        let matrix = P::PARTS * self.rows * SIDE;
        let together = (self.count - first).min(2);
        let weights = self.packed[(group * self.count + first) * terms * matrix..].as_ptr();
        let left = Factor {
            at: |term: usize, m: usize| {
                let place = weights.wrapping_add((term * together + m) * matrix);
                place.cast::<u8>()
            },
            row: 4 * SIDE,
            part: 4 * self.rows * SIDE,
        };
        let right = Factor {
            at: |term: usize, n: usize| {
                let place = tile.wrapping_add(self.offsets[term] + n * SIDE);
                place.cast::<u8>()
            },
            row: 4 * self.channel,
            part: 4 * self.part,
        };
        let across = to.columns.div_ceil(SIDE);
        let outputs = first * self.rows..((first + together) * self.rows).min(self.outputs);
        if to.step == 1 {
            let results = to.output.wrapping_add(outputs.start * to.channel);
            prefetch_to_write(results, [outputs.len(), to.columns], to.channel);
        }
        let place = Place::new(sums.as_mut_ptr(), SIDE, 2 * SIDE * SIDE);
        let sizes = [together, across];
        // SAFETY: guaranteed by the caller, and `sums` has two by two matrices.
        unsafe { registers.products(sizes, [terms, P::PARTS], left, right, place) };
        for (index, output) in outputs.enumerate() {
            let (m, row) = (index / self.rows, index % self.rows);
            let bias = to.bias.map_or(E::default(), |bias| bias[output]);
            for n in 0..across {
                let columns = (to.columns - n * SIDE).min(SIDE);
                // SAFETY: guaranteed by the caller, and `sums` has this many numbers.
                unsafe {
                    let sums = sums.as_ptr().add(((2 * n + m) * SIDE + row) * SIDE);
                    let place = to.output.add(output * to.channel + n * SIDE * to.step);
                    store::<S, E, P>(simd, sums, bias, place, to.step, columns);
                }
            }
        }
    }
}

/// Packs the weights of a group for one matrix of outputs.
struct Pack<'a, E: Element, P: Products<E>, W> {
    job: &'a Job<'a, E, P::Number>,
    taps: &'a [Tap],
    /// Outputs and pairs of a matrix, and number of blocks of pairs.
    sizes: [usize; 3],
    /// Group, and index of the matrix within the group.
    place: [usize; 2],
    /// Number of matrices of a group.
    count: usize,
    weight: &'a W,
    packed: Shared<E>,
    products: PhantomData<P>,
}

impl<E: Element, P: Products<E>, W: Fn([usize; 4]) -> P::Number> WithSimd for Pack<'_, E, P, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { job, taps, .. } = self;
        let ([rows, pairs, blocks], [group, number]) = (self.sizes, self.place);
        let (together, place) = ((self.count - number / 2 * 2).min(2), number % 2);
        let matrix = P::PARTS * rows * SIDE;
        let first = (group * self.count + number - place) * blocks * taps.len() * matrix;
        // First numbers of the pairs of every tap, then the second ones.
        let mut numbers = vec![[[P::Number::default(); SIDE]; 2]; taps.len()];
        for (row, block) in (0..rows).flat_map(|row| (0..blocks).map(move |b| (row, b))) {
            let (output, input) = (number * rows + row, 2 * block * pairs);
            let inputs = if output < job.outputs {
                input..job.inputs.min(input + 2 * pairs)
            } else {
                0..0
            };
            numbers.fill([[P::Number::default(); SIDE]; 2]);
            for (index, input) in inputs.enumerate() {
                for (numbers, tap) in numbers.iter_mut().zip(taps) {
                    let weight = (self.weight)([group, output, input, tap.element]);
                    numbers[index % 2][index / 2] = weight;
                }
            }
            let before = first + (block * taps.len() * together + place) * matrix;
            for (tap, [first, second]) in numbers.iter().enumerate() {
                let place = before + tap * together * matrix + row * SIDE;
                // SAFETY: numbers are two vectors, and elements are those of this matrix of
                // outputs.
                unsafe {
                    let numbers = [P::load::<S>(first.as_ptr()), P::load::<S>(second.as_ptr())];
                    let to = self.packed.at(place);
                    store_parts::<S, E, P>(simd, numbers, to, rows * SIDE);
                }
            }
        }
    }
}

/// Adds a bias to the sums of some columns, and writes them.
///
/// # Safety
/// [`SIDE`] sums must be readable, and results writable.
#[inline(always)]
unsafe fn store<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    sums: *const E,
    bias: E,
    place: *mut P::Number,
    step: usize,
    columns: usize,
) {
    let lanes = E::lanes::<S>();
    // SAFETY: guaranteed by the caller; vectors divide a row of sums.
    unsafe {
        if step == 1 && columns == SIDE {
            let bias = E::splat(simd, bias);
            for first in (0..SIDE).step_by(lanes) {
                let sums = E::plus(simd, E::load::<S>(sums.add(first)), bias);
                P::store::<S>(place.add(first), sums);
            }
        } else {
            for column in 0..columns {
                *place.add(column * step) = P::number(*sums.add(column) + bias);
            }
        }
    }
}
