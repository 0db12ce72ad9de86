//! What the tasks of a correlation share: tiles, blocks of channels, and weights in the order in which kernels read them.

use std::marker::PhantomData;

use pulp::Simd;
use rayon::prelude::*;

use super::geometry::{Correlation, Dims};
use super::job::{Job, OUTPUTS, SERIAL, STRIPS, block};
use super::matrices;
use super::rows::{ROWS, Recipe};
use super::strip::{self, panels};
use super::tile::{TileLayout, tile_extents};
use crate::kernel::buffer::Buffer;
use crate::kernel::memory::Shared;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Most bytes of a tile, which stays in the second-level cache beside a block of weights.
const TILE_BYTES: usize = 512 << 10;
/// Most bytes of a tile with the rows between dilated taps, which are not copied, if channels are divided into blocks: those of
/// bf16 are not.
const SCRATCH_BYTES: usize = 2 << 20;
/// Most terms of a block of channels, whose weights for a panel stay in the first-level cache.
const TERMS: usize = 640;

/// A correlation with the data that its tasks share.
pub(super) struct Part<'a, E, P> {
    pub correlation: &'a Correlation,
    pub layout: TileLayout,
    /// Extents of a tile, in results.
    pub tile: Dims,
    /// Vectors of a tile's rows.
    pub vectors: usize,
    /// Number of tiles of a field.
    pub tiles: usize,
    /// Number of ranges that the outputs are divided into.
    pub ranges: usize,
    /// Channels of the source in a block.
    pub block: usize,
    /// Factors of a block: those of its channels, and what fills up matrices.
    pub held: usize,
    pub offsets: Vec<u32>,
    pub weights: Weights<E>,
    /// Recipe for rows computed together, if channels do not mix, and its weights,
    /// `[group][element]`.
    pub rows: Option<(Recipe, Vec<E>)>,
    products: PhantomData<P>,
}

/// Weights in the order in which kernels read them.
pub(super) enum Weights<E> {
    /// `[group][block][panel][term][channel]`.
    Strips(Buffer<E>),
    Matrices(matrices::Weights<E>),
}

impl<'a, E: Element, P: Products<E>> Part<'a, E, P> {
    pub(super) fn new<S: Simd>(
        job: &Job<'_, E, P::Number>,
        correlation: &'a Correlation,
        weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
        matrices: bool,
    ) -> Self {
        let mut block = block::<E, P>(TERMS / correlation.terms.max(1), job.inputs);
        let lanes = E::lanes::<S>();
        let strip = match matrices {
            true => matrices::COLUMNS,
            false => strip::width::<S>(strip::height::<S>(usize::MAX, 3)) * lanes,
        };
        // From the correlation alone, not from the box of results: the order of sums, and so their
        // bits, are the same in any box.
        let smallest = TileLayout::new(correlation, [1, 1, strip]);
        let once = size_of::<P::Number>() < size_of::<E>();
        while block > P::NUMBERS && !once && smallest.len(block) > SCRATCH_BYTES / size_of::<E>() {
            block /= 2;
        }
        let held = match matrices {
            true => matrices::held(block),
            false => block.div_ceil(P::NUMBERS),
        };
        let room = TILE_BYTES / size_of::<E>() / held;
        let most_room = SCRATCH_BYTES / size_of::<E>();
        let fits =
            |layout: &TileLayout, _: Dims| layout.copied() <= room && layout.len(held) <= most_room;
        let tasks = match matrices {
            // Copying tiles takes a larger part of the time, and of each there are as many copies as ranges of outputs.
            true => job.tasks(correlation).min(4 * rayon::current_num_threads()),
            false => job.tasks(correlation),
        };
        let most = match matrices {
            true => 1,
            false => job.outputs.div_ceil(OUTPUTS),
        };
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
                    elements.map(move |element| P::widened(weight([group, 0, 0, *element])))
                });
                let weights = weights.collect();
                (recipe, weights)
            }),
            held,
            offsets: layout.offsets(correlation, held),
            ranges: tasks.div_ceil(tiles).min(most),
            tiles,
            weights: match matrices {
                true => {
                    let weights = matrices::Weights::new::<P>(job, correlation, &layout, weight);
                    Weights::Matrices(weights)
                }
                false => Weights::Strips(pack::<S, E, P>(job, correlation, block, vectors, weight)),
            },
            vectors,
            correlation,
            layout,
            tile,
            block,
            products: PhantomData,
        }
    }
}

/// Packs the factors of weights in the order in which strips read them.
fn pack<S: Simd, E: Element, P: Products<E>>(
    job: &Job<'_, E, P::Number>,
    correlation: &Correlation,
    block: usize,
    vectors: usize,
    weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
) -> Buffer<E> {
    let taps = &correlation.taps;
    let held = job.inputs.div_ceil(P::NUMBERS);
    let len = job.groups * held * job.outputs * taps.len();
    let fill = |packed: Shared<E>| {
        let panels: Vec<(usize, usize)> = panels::<S>(job.outputs, vectors).collect();
        let blocks = job.inputs.div_ceil(block);
        let panel = |index: usize| {
            let (rest, (start, height)) = (index / panels.len(), panels[index % panels.len()]);
            let (group, first) = (rest / blocks, rest % blocks * block);
            let inputs = first..job.inputs.min(first + block);
            let here = inputs.len().div_ceil(P::NUMBERS);
            let before = (group * held + first / P::NUMBERS) * job.outputs + here * start;
            let mut place = before * taps.len();
            for input in inputs.clone().step_by(P::NUMBERS) {
                for tap in taps {
                    for output in start..start + height {
                        let number = |input: usize| match inputs.contains(&input) {
                            true => weight([group, output, input, tap.element]),
                            false => P::Number::default(),
                        };
                        let factor = P::factor([number(input), number(input + 1)]);
                        // SAFETY: places are consecutive, panel by panel, and below `len`.
                        unsafe { *packed.at(place) = factor };
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
    // SAFETY: the panels of all blocks and groups write every factor once.
    unsafe { Buffer::filled(len, fill) }
}
