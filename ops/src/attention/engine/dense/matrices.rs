//! Products with AMX matrices: targets are columns; rows are sources, to compute scores, or
//! elements, to compute sums.

use std::ops::Range;

use pulp::Simd;

use super::job::Tokens;
use super::room::{Runs, SOURCES, Table};
use super::task::{Packed, Task};
use crate::kernel::amx::{self, Factor, Place, SIDE};
use crate::kernel::matrices::Matrix;
use crate::kernel::panels::matrices::{
    Rows, columns, factors as factors_of, pack_panel, room, terms,
};
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Views rows of vectors as a matrix.
///
/// # Safety
/// This number of vectors must be readable.
unsafe fn rows<'a, E: Copy>(first: *const E, rows: usize) -> Matrix<'a, E> {
    // SAFETY: guaranteed by the caller.
    let elements = unsafe { std::slice::from_raw_parts(first, rows * SIDE) };
    Matrix::new(elements, [rows, SIDE])
}

/// Blocks of rows and vectors, one or two at a time, as the first and the number of each.
fn in_twos(blocks: usize, vectors: usize) -> impl Iterator<Item = [[usize; 2]; 2]> {
    (0..vectors).step_by(2).flat_map(move |vector| {
        let sizes = move |block: usize| [(blocks - block).min(2), (vectors - vector).min(2)];
        (0..blocks)
            .step_by(2)
            .map(move |block| [[block, vector], sizes(block)])
    })
}

/// Factors of targets in `parts` parts, from a vector on.
fn factors<E: Copy>(
    runs: Runs<E>,
    vector: usize,
    parts: usize,
) -> Factor<impl Fn(usize, usize) -> *const u8> {
    columns(runs.at(vector).cast_const(), [SIDE, runs.pitch], parts)
}

/// Destination of the sums of targets, from a block of rows and a vector on.
fn place<E: Copy>(runs: Runs<E>, [block, vector]: [usize; 2]) -> Place {
    let first = runs.at(vector).wrapping_add(block * SIDE * SIDE);
    Place::new(first, SIDE, runs.pitch)
}

impl<E: Element> Task<'_, E> {
    /// Packs targets, multiplied by a factor, as factors.
    ///
    /// # Safety
    /// The targets must be readable, and there must be room for factors and, in `spare`, for the
    /// vectors of a target.
    #[inline(always)]
    pub(super) unsafe fn load_factors<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        (tokens, factor): (&Tokens<E>, f64),
        spare: *mut E,
        to: Runs<E>,
    ) {
        for vector in 0..self.vectors::<S>() {
            // SAFETY: guaranteed by the caller.
            unsafe {
                self.load_vector(simd, (tokens, self.head), vector, factor, spare);
                let numbers = rows(spare, tokens.width);
                pack_panel::<S, E, P>(simd, numbers, 0..SIDE, SIDE, to.at(vector));
            }
        }
    }

    /// Packs the requested factors of a block of sources of a head: of sources, and of elements.
    ///
    /// # Safety
    /// The sources must be readable, and there must be room for both kinds of factors.
    #[inline(always)]
    pub(super) unsafe fn factors<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        (tokens, head): (&Tokens<E>, usize),
        block: &Range<usize>,
        to: *mut E,
        wanted: [bool; 2],
    ) -> Packed<E> {
        let (width, pitch) = (tokens.width, tokens.pitch());
        let (count, first) = (block.len(), tokens.at(self.batch, block.start, head));
        let mut packed = Packed {
            count,
            width,
            sources: None,
            elements: None,
        };
        // SAFETY: guaranteed by the caller.
        unsafe {
            let elements = std::slice::from_raw_parts(first, (count - 1) * pitch + width);
            let sources = Matrix::strided(elements, [count, width], [pitch, 1]);
            if wanted[0] {
                packed.sources = Some(Rows::new::<S, P>(simd, sources, to));
            }
            if wanted[1] {
                let to = to.add(room(SOURCES, width, P::PARTS));
                packed.elements = Some(Rows::new::<S, P>(simd, sources.transposed(), to));
            }
        }
        packed
    }

    /// Computes the dot products of all targets with a block of sources.
    ///
    /// # Safety
    /// There must be factors for all, and room for one vector per source.
    #[inline(always)]
    pub(super) unsafe fn scores_of<S: Simd, P: Products<E, Number = E>>(
        &self,
        registers: &amx::Matrices,
        targets: Runs<E>,
        packed: Packed<E>,
        scores: Runs<E>,
    ) {
        let sources = packed.sources.expect("factors of sources are wanted");
        let terms = [terms(packed.width), P::PARTS];
        for [at, sizes] in in_twos(packed.count.div_ceil(SIDE), self.vectors::<S>()) {
            let (left, right) = (sources.factor(at[0]), factors(targets, at[1], P::PARTS));
            // SAFETY: guaranteed by the caller.
            unsafe { registers.products(sizes, terms, left, right, place(scores, at)) };
        }
    }

    /// Multiplies the scores of `sources` sources by a factor.
    ///
    /// # Safety
    /// There must be one vector per source.
    #[inline(always)]
    pub(super) unsafe fn scale<S: Simd>(
        &self,
        simd: S,
        factor: f64,
        sources: usize,
        scores: Runs<E>,
    ) {
        if factor == 1.0 {
            return;
        }
        let factor = E::splat(simd, E::from_f64(factor));
        for vector in 0..self.vectors::<S>() {
            for source in 0..sources {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let at = scores.at(vector).add(source * SIDE);
                    E::store::<S>(at, E::times(simd, E::load::<S>(at), factor));
                }
            }
        }
    }

    /// Adds a block of sources, weighted, to the results.
    ///
    /// # Safety
    /// There must be one vector of weights per source, room for their factors, and vectors of
    /// results for whole matrices of elements.
    #[inline(always)]
    pub(super) unsafe fn add_weighted<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &amx::Matrices,
        (weights, room): (Runs<E>, Runs<E>),
        packed: Packed<E>,
        to: Runs<E>,
    ) {
        let elements = packed.elements.expect("factors of elements are wanted");
        let (vectors, terms) = (self.vectors::<S>(), [terms(packed.count), P::PARTS]);
        for vector in 0..vectors {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let weights = rows(weights.at(vector), packed.count);
                pack_panel::<S, E, P>(simd, weights, 0..SIDE, SIDE, room.at(vector));
            }
        }
        for [at, sizes] in in_twos(packed.width.div_ceil(SIDE), vectors) {
            let (left, right) = (elements.factor(at[0]), factors(room, at[1], P::PARTS));
            // SAFETY: guaranteed by the caller.
            unsafe { registers.add(sizes, terms, left, right, [place(to, at); 2]) };
        }
    }

    /// Packs the elements of the targets of a group, to be combined, into panels of two matrices of
    /// elements.
    ///
    /// # Safety
    /// The targets must be readable, and there must be room for the factors of all elements.
    #[inline(always)]
    pub(super) unsafe fn load_panels<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        tokens: &Tokens<E>,
        to: *mut E,
    ) {
        let (count, width) = (self.targets.len(), tokens.width);
        let first = tokens.at(self.batch, self.targets.start, self.head);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let elements = std::slice::from_raw_parts(first, (count - 1) * tokens.pitch() + width);
            let targets = Matrix::strided(elements, [count, width], [tokens.pitch(), 1]);
            for (elements, to) in panels(width, factors_of(count, P::PARTS), to) {
                let there = elements.start..elements.end.min(width);
                pack_panel::<S, E, P>(simd, targets, there, elements.len(), to);
            }
        }
    }

    /// Sets the weights of lanes without a target to zero.
    ///
    /// # Safety
    /// There must be one vector of weights per source.
    #[inline(always)]
    pub(super) unsafe fn clear_beyond<S: Simd>(&self, weights: Runs<E>, sources: usize) {
        // Only the last vector has such lanes.
        let vector = self.vectors::<S>() - 1;
        for lane in self.lanes::<S>(vector).len()..SIDE {
            for source in 0..sources {
                // SAFETY: guaranteed by the caller.
                unsafe { *weights.at(vector).add(source * SIDE + lane) = E::default() };
            }
        }
    }

    /// Adds, for every source of a block, the elements of all targets, weighted, to rows of whole
    /// matrices.
    ///
    /// # Safety
    /// There must be one vector of weights per source, zero for lanes without a target, room for
    /// their factors, and rows for whole matrices of sources.
    #[inline(always)]
    pub(super) unsafe fn add_combined<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &amx::Matrices,
        (weights, count, room): (Runs<E>, usize, *mut E),
        (targets, width): (*mut E, usize),
        to: Table<E>,
    ) {
        let held = self.targets.len();
        let (all, of_row) = (self.vectors::<S>(), terms(held));
        let rows = Rows::packed::<P>(room, held);
        for (source, term) in (0..count).flat_map(|source| (0..of_row).map(move |t| (source, t))) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let first = E::load::<S>(weights.at(2 * term).add(source * SIDE));
                let second = if 2 * term + 1 < all {
                    E::load::<S>(weights.at(2 * term + 1).add(source * SIDE))
                } else {
                    E::splat(simd, E::default())
                };
                rows.store::<S, P>(simd, [source, term], [first, second]);
            }
        }
        let blocks = count.div_ceil(SIDE);
        for (elements, panel) in panels(width, factors_of(held, P::PARTS), targets) {
            let across = elements.len();
            for block in (0..blocks).step_by(2) {
                let sizes = [(blocks - block).min(2), across / SIDE];
                let (left, terms) = (rows.factor(block), [of_row, P::PARTS]);
                let right = columns(panel.cast_const(), [across, SIDE], P::PARTS);
                let first = block * SIDE * to.pitch + elements.start;
                let place = Place::new(to.first.wrapping_add(first), to.pitch, SIDE);
                // SAFETY: guaranteed by the caller.
                unsafe { registers.add(sizes, terms, left, right, [place; 2]) };
            }
        }
    }
}

/// Elements of panels of one or two matrices, and the addresses of their factors, `factors` for
/// each element.
fn panels<E>(
    width: usize,
    factors: usize,
    first: *mut E,
) -> impl Iterator<Item = (Range<usize>, *mut E)> {
    let whole = width.next_multiple_of(SIDE);
    (0..whole).step_by(2 * SIDE).map(move |start| {
        let elements = start..whole.min(start + 2 * SIDE);
        (elements, first.wrapping_add(start * factors))
    })
}
