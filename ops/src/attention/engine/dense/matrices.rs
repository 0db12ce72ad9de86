//! Products by the matrices of AMX: targets in columns; in rows sources, whose scores are computed, or elements, whose sums are.

use std::ops::Range;

use pulp::Simd;

use super::job::Tokens;
use super::room::{Runs, SOURCES};
use super::task::{Copied, Task};
use crate::kernel::amx::{self, Factor, SIDE};
use crate::kernel::matrices::Matrix;
use crate::kernel::panels::matrices::{Rows, pack_panel, room, whole};
use crate::kernel::products::Products;
use crate::kernel::simd::Element;

/// Rows of vectors as a matrix.
///
/// # Safety
/// There must be so many vectors.
unsafe fn vectors<'a, E: Copy>(first: *const E, rows: usize) -> Matrix<'a, E> {
    // SAFETY: the caller's.
    let elements = unsafe { std::slice::from_raw_parts(first, rows * SIDE) };
    Matrix::new(elements, [rows, SIDE])
}

/// Factors of vectors of targets, from one of them on.
fn columns<E: Element>(
    factors: Runs<E>,
    vector: usize,
    parts: usize,
) -> Factor<impl Fn(usize, usize) -> *const u8> {
    let bytes = size_of::<E>();
    Factor {
        at: move |term, n| {
            let first = factors.at(vector + n);
            first
                .wrapping_add(term * parts * SIDE * SIDE)
                .cast_const()
                .cast::<u8>()
        },
        row: bytes * SIDE,
        part: bytes * SIDE * SIDE,
    }
}

/// Rows of vectors of targets, from one vector and one of every [`SIDE`] rows on, with the bytes between them.
fn results<E: Element>(
    runs: Runs<E>,
    vector: usize,
    block: usize,
) -> (impl Fn(usize, usize) -> *mut u8, usize) {
    let at = move |m: usize, n: usize| {
        let first = runs.at(vector + n);
        first.wrapping_add((block + m) * SIDE * SIDE).cast::<u8>()
    };
    (at, size_of::<E>() * SIDE)
}

impl<E: Element> Task<'_, E> {
    /// The factors of targets, times a number.
    ///
    /// # Safety
    /// The targets must be there, and room for factors and, in `spare`, for the vectors of a target.
    #[inline(always)]
    pub(super) unsafe fn load_factors<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        (tokens, factor): (&Tokens<E>, f64),
        spare: *mut E,
        to: Runs<E>,
    ) {
        for vector in 0..self.vectors::<S>() {
            // SAFETY: the caller's.
            unsafe {
                self.load_vector(simd, (tokens, self.head), vector, factor, spare);
                let numbers = vectors(spare, tokens.width);
                pack_panel::<S, E, P>(simd, numbers, 0..SIDE, SIDE, to.at(vector));
            }
        }
    }

    /// A block of sources of a head as factors.
    ///
    /// # Safety
    /// The sources must be there, and room [`of_block`].
    #[inline(always)]
    pub(super) unsafe fn factors<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        (tokens, head): (&Tokens<E>, usize),
        block: &Range<usize>,
        to: *mut E,
        [rows, columns]: [bool; 2],
    ) -> Copied<E> {
        let (width, pitch) = (tokens.width, tokens.pitch());
        let (count, first) = (block.len(), tokens.at(self.batch, block.start, head));
        // SAFETY: the caller's.
        unsafe {
            let last = count.max(1) - 1;
            let elements = std::slice::from_raw_parts(first, last * pitch + width);
            let sources = Matrix::strided(elements, [count, width], [pitch, 1]);
            let after = to.wrapping_add(room(SOURCES, width, P::PARTS));
            Copied::Factors {
                rows: match rows {
                    true => Some(Rows::new::<S, P>(simd, sources, to)),
                    false => None,
                },
                columns: match columns {
                    true => Some(Rows::new::<S, P>(simd, sources.transposed(), after)),
                    false => None,
                },
            }
        }
    }

    /// The dot products of all targets with a block of sources, times a factor.
    ///
    /// # Safety
    /// There must be factors for all, and room for a vector for each source.
    #[inline(always)]
    pub(super) unsafe fn scores_of<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &amx::Matrices,
        targets: Runs<E>,
        (sources, count, width): (Rows<E>, usize, usize),
        scores: Runs<E>,
        factor: f64,
    ) {
        let (all, blocks) = (self.vectors::<S>(), count.div_ceil(SIDE));
        let terms = whole(width, 1) / SIDE;
        for vector in (0..all).step_by(2) {
            for block in (0..blocks).step_by(2) {
                let sizes = [(blocks - block).min(2), (all - vector).min(2)];
                let (left, right) = (sources.factor(block), columns(targets, vector, P::PARTS));
                let (to, row) = results(scores, vector, block);
                let from = |m, n| to(m, n).cast_const();
                // SAFETY: the caller's.
                unsafe {
                    let (from, to) = ((from, row), (&to, row));
                    registers.sums::<false>(sizes, [terms, P::PARTS], left, right, from, to);
                }
            }
        }
        if factor != 1.0 {
            let factor = E::splat(simd, E::from_f64(factor));
            for vector in 0..all {
                for source in 0..count {
                    // SAFETY: the caller's.
                    unsafe {
                        let at = scores.at(vector).add(source * SIDE);
                        E::store::<S>(at, E::times(simd, E::load::<S>(at), factor));
                    }
                }
            }
        }
    }

    /// Adds a block of sources, weighted, to the results.
    ///
    /// # Safety
    /// There must be a vector of weights for each source, room for their factors, and vectors of results for whole matrices of
    /// elements.
    #[inline(always)]
    pub(super) unsafe fn add_weighted<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &amx::Matrices,
        (weights, factors): (Runs<E>, Runs<E>),
        (sources, count, width): (Rows<E>, usize, usize),
        to: Runs<E>,
    ) {
        let (all, blocks) = (self.vectors::<S>(), width.div_ceil(SIDE));
        let terms = whole(count, 1) / SIDE;
        for vector in 0..all {
            // SAFETY: the caller's.
            unsafe {
                let weights = vectors(weights.at(vector), count);
                pack_panel::<S, E, P>(simd, weights, 0..SIDE, SIDE, factors.at(vector));
            }
        }
        for vector in (0..all).step_by(2) {
            for block in (0..blocks).step_by(2) {
                let sizes = [(blocks - block).min(2), (all - vector).min(2)];
                let (left, right) = (sources.factor(block), columns(factors, vector, P::PARTS));
                let (to, row) = results(to, vector, block);
                let from = |m, n| to(m, n).cast_const();
                // SAFETY: the caller's.
                unsafe {
                    let (from, to) = ((from, row), (&to, row));
                    registers.sums::<true>(sizes, [terms, P::PARTS], left, right, from, to);
                }
            }
        }
    }

    /// Packs the elements of the targets of a group, to be combined: panels of two matrices of elements.
    ///
    /// # Safety
    /// The targets must be there, and room for factors of all elements.
    #[inline(always)]
    pub(super) unsafe fn load_panels<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        tokens: &Tokens<E>,
        to: *mut E,
    ) {
        let (count, width) = (self.targets.len(), tokens.width);
        let first = tokens.at(self.batch, self.targets.start, self.head);
        // SAFETY: the caller's.
        unsafe {
            let elements = std::slice::from_raw_parts(first, (count - 1) * tokens.pitch() + width);
            let targets = Matrix::strided(elements, [count, width], [tokens.pitch(), 1]);
            for (elements, to) in panels(width, whole(count, P::PARTS), to) {
                let there = elements.start..elements.end.min(width);
                pack_panel::<S, E, P>(simd, targets, there, elements.len(), to);
            }
        }
    }

    /// Makes the weights of lanes without a target zero.
    ///
    /// # Safety
    /// There must be a vector of weights for each source.
    #[inline(always)]
    pub(super) unsafe fn clear_beyond<S: Simd>(&self, weights: Runs<E>, sources: usize) {
        for vector in 0..self.vectors::<S>() {
            for lane in self.lanes::<S>(vector).len()..SIDE {
                for source in 0..sources {
                    // SAFETY: the caller's.
                    unsafe { *weights.at(vector).add(source * SIDE + lane) = E::default() };
                }
            }
        }
    }

    /// Adds for every source of a block the elements of all targets, weighted, to rows of whole matrices, `pitch` elements apart.
    ///
    /// # Safety
    /// There must be a vector of weights for each source, zero for lanes without a target, room for their factors in `packed`, and
    /// for whole matrices of sources.
    #[inline(always)]
    pub(super) unsafe fn add_combined<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &amx::Matrices,
        (weights, count, packed): (Runs<E>, usize, *mut E),
        (targets, width): (*mut E, usize),
        (to, pitch): (*mut E, usize),
    ) {
        let held = self.targets.len();
        let (all, terms) = (self.vectors::<S>(), whole(held, 1) / SIDE);
        let rows = Rows::packed::<P>(packed, held);
        for (source, term) in (0..count).flat_map(|source| (0..terms).map(move |t| (source, t))) {
            // SAFETY: the caller's.
            unsafe {
                let first = E::load::<S>(weights.at(2 * term).add(source * SIDE));
                let second = match 2 * term + 1 < all {
                    true => E::load::<S>(weights.at(2 * term + 1).add(source * SIDE)),
                    false => E::splat(simd, E::default()),
                };
                let parts = P::split(simd, E::deinterleave::<S>([first, second]));
                for (part, pairs) in parts.iter().enumerate().take(P::PARTS) {
                    E::store::<S>(rows.place(source, term, part), *pairs);
                }
            }
        }
        let (blocks, bytes) = (count.div_ceil(SIDE), size_of::<E>());
        for (elements, panel) in panels(width, whole(held, P::PARTS), targets) {
            let across = elements.len();
            for block in (0..blocks).step_by(2) {
                let sizes = [(blocks - block).min(2), across / SIDE];
                let right = Factor {
                    at: |term: usize, n: usize| {
                        let place = term * P::PARTS * SIDE * across + n * SIDE;
                        panel.wrapping_add(place).cast_const().cast::<u8>()
                    },
                    row: bytes * across,
                    part: bytes * SIDE * across,
                };
                let to = |m: usize, n: usize| {
                    let row = (block + m) * SIDE * pitch;
                    to.wrapping_add(row + elements.start + n * SIDE)
                        .cast::<u8>()
                };
                let from = |m, n| to(m, n).cast_const();
                // SAFETY: the caller's.
                unsafe {
                    let left = rows.factor(block);
                    let (from, to) = ((from, bytes * pitch), (&to, bytes * pitch));
                    registers.sums::<true>(sizes, [terms, P::PARTS], left, right, from, to);
                }
            }
        }
    }
}

/// The elements of panels, of one or two matrices, and where their factors lie, so many for each element.
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
