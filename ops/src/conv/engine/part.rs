//! Data of a correlation that its tasks share: extents of tiles, blocks of channels, packed
//! weights.

use std::marker::PhantomData;

use pulp::Simd;

use super::geometry::{Correlation, Dims};
use super::job::{Job, OUTPUTS, STRIPS, block};
use super::matrices;
use super::pack::pack;
use super::rows::{ROWS, Recipe};
use super::strip;
use super::tile::{SCRATCH_BYTES, TileLayout, tile_count, tile_extents};
use crate::kernel::buffer::Buffer;
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Maximum bytes of a tile, which stays in the second-level cache together with a block of weights.
const TILE_BYTES: usize = 512 << 10;
/// Maximum terms of a block of channels; its weights for a panel stay in the first-level cache.
const TERMS: usize = 640;

/// A correlation with the data that its tasks share.
pub(super) struct Part<'a, E, P> {
    pub correlation: &'a Correlation,
    pub layout: TileLayout,
    /// Extents of a tile, in results.
    pub tile: Dims,
    /// Number of vectors of a tile's rows.
    pub vectors: usize,
    /// Number of tiles of a field.
    pub tiles: usize,
    /// Number of ranges that the outputs are divided into.
    pub ranges: usize,
    /// Channels of the source in a block.
    pub block: usize,
    /// Number of factors of a block: those of its channels, padded to whole matrices.
    pub held: usize,
    pub weights: Weights<E>,
    /// Recipe for rows computed together, if channels do not mix, and its weights,
    /// `[group][element]`.
    pub rows: Option<(Recipe, Vec<E>)>,
    products: PhantomData<P>,
}

/// Weights in the order in which kernels read them.
pub(super) enum Weights<E> {
    /// `[group][block][panel][term][channel]`, and the offset of every term in the tile.
    Strips(Buffer<E>, Vec<u32>),
    Matrices(matrices::Weights<E>),
}

/// Whether matrices have room for the smallest tile, of which they need all channels at once: with
/// a large dilation it may be many times the cells that are read. For bf16 numbers this does not
/// matter, because vectors do not divide their channels into blocks either.
pub(super) fn holds_matrices<E: Element, P: Products<E>>(
    correlation: &Correlation,
    inputs: usize,
) -> bool {
    let smallest = TileLayout::smallest(correlation, matrices::COLUMNS);
    let elements = smallest.len(matrices::held(inputs) * P::PARTS);
    P::PARTS == 1 || smallest.is_dense() || elements <= SCRATCH_BYTES / size_of::<E>()
}

impl<'a, E: Element, P: Products<E>> Part<'a, E, P> {
    pub(super) fn new<S: Simd>(
        simd: S,
        job: &Job<'_, E, P::Number>,
        correlation: &'a Correlation,
        weight: &(impl Fn([usize; 4]) -> P::Number + Sync),
        matrices: bool,
    ) -> Self {
        let (lanes, tasks) = (E::lanes::<S>(), job.tasks(correlation));
        let most_room = SCRATCH_BYTES / size_of::<E>();
        let ([block, held, strip], [tasks, most]) = if matrices {
            let held = matrices::held(job.inputs) * P::PARTS;
            // Copying tiles takes a larger share of the time, and each is copied for every range of
            // outputs.
            let tasks = tasks.min(4 * rayon::current_num_threads());
            ([job.inputs, held, matrices::COLUMNS], [tasks, 1])
        } else {
            let strip = strip::width::<S>(strip::height::<S>(usize::MAX, 3)) * lanes;
            let mut block = block::<E, P>(TERMS / correlation.terms().max(1), job.inputs);
            // Independent of the box of results: the order of sums, and so their bits, are the same
            // in any box.
            let smallest = TileLayout::smallest(correlation, strip);
            let once = size_of::<P::Number>() < size_of::<E>();
            while block > P::NUMBERS && !once && smallest.len(block) > most_room {
                block /= 2;
            }
            let held = block.div_ceil(P::NUMBERS);
            ([block, held, strip], [tasks, job.outputs.div_ceil(OUTPUTS)])
        };
        let room = TILE_BYTES / size_of::<E>() / held;
        let fits =
            |layout: &TileLayout, _: Dims| layout.copied() <= room && layout.len(held) <= most_room;
        let tile = tile_extents(correlation, [strip, STRIPS], tasks.div_ceil(most), fits);
        let tiles = tile_count(tile, correlation.count);
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
            ranges: tasks.div_ceil(tiles).min(most),
            tiles,
            weights: if matrices {
                let weights =
                    matrices::Weights::new::<S, P>(simd, job, correlation, &layout, weight);
                Weights::Matrices(weights)
            } else {
                let taps = &correlation.taps;
                let sizes = [taps.len(), block, vectors];
                let packed = pack::<S, E, P, 1>(job, sizes, |[group, output], inputs, tap| {
                    let number = |input| weight([group, output, input, taps[tap].element]);
                    let numbers = inputs.map(|input| input.map_or_else(Default::default, number));
                    [P::factor(numbers)]
                });
                Weights::Strips(packed, layout.offsets(correlation, held))
            },
            vectors,
            correlation,
            layout,
            tile,
            block,
            products: PhantomData,
        }
    }

    /// Whether a tile holds pairs of channels.
    pub(super) fn in_pairs(&self) -> bool {
        P::NUMBERS == 2 || matches!(self.weights, Weights::Matrices(_))
    }
}
