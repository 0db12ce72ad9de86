//! A few vectors of targets: their operands, scores and sums.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::Simd;

use super::job::{Dense, Results, Tokens};
use super::room::{Runs, SOURCES, together};
use crate::attention::engine::blocks::{ForAll, Sources, dots, sums};
use crate::kernel::amx;
use crate::kernel::lanes::WIDEST;
use crate::kernel::panels::matrices::Rows;
use crate::kernel::products::{NO_MATRICES, Products, matrices_multiply};
use crate::kernel::simd::Element;
use crate::kernel::transpose::{pack, unpack};

/// Targets of one head: one group of a few vectors, or several groups.
pub(super) struct Task<'a, E> {
    pub job: &'a Dense<E>,
    pub batch: usize,
    pub head: usize,
    pub targets: Range<usize>,
    /// The sources that count.
    pub sources: Range<usize>,
    /// Number of parts of the numbers that matrices multiply; zero for vectors.
    pub parts: usize,
}

/// Contiguous sources, from one of them on.
#[derive(Clone, Copy)]
pub(super) struct Piece<E> {
    first: *mut E,
    width: usize,
    start: usize,
}

impl<E> Piece<E> {
    /// A block of these sources.
    #[inline(always)]
    fn block<'a>(
        self,
        block: &Range<usize>,
        offsets: &'a mut [usize; SOURCES],
    ) -> Sources<'a, E, ForAll> {
        let offsets = &mut offsets[..block.len()];
        for (source, offset) in offsets.iter_mut().enumerate() {
            *offset = source * self.width;
        }
        let before = (block.start - self.start) * self.width;
        Sources {
            first: self.first.wrapping_add(before),
            offsets,
            width: self.width,
            step: 1,
            storage: PhantomData,
        }
    }
}

/// A block of sources as factors of matrices: rows of sources, and of elements, where these are
/// requested.
#[derive(Clone, Copy)]
pub(super) struct Packed<E> {
    pub count: usize,
    pub width: usize,
    pub sources: Option<Rows<E>>,
    pub elements: Option<Rows<E>>,
}

/// A block of sources, contiguous or as factors of matrices.
#[derive(Clone, Copy)]
pub(super) enum Copied<'a, E> {
    Piece(Piece<E>),
    Factors(&'a amx::Matrices, Packed<E>),
}

/// How products are computed: with vectors, or with matrices.
pub(super) type Registers = Option<amx::Matrices>;

impl<'a, E: Element> Task<'a, E> {
    /// Factors of targets and of scores, whose product is the scale. If targets are rounded to
    /// bf16, scores take the scale, unless it is a power of two.
    pub(super) fn scales(&self) -> [f64; 2] {
        let scale = self.job.scale;
        if self.parts == 1 && scale.to_bits().trailing_zeros() < f64::MANTISSA_DIGITS - 1 {
            [1.0, scale]
        } else {
            [scale, 1.0]
        }
    }

    /// Groups of the targets, of a few vectors each.
    #[inline(always)]
    pub(super) fn groups<S: Simd>(&self) -> impl Iterator<Item = (usize, Self)> + use<'a, E, S> {
        let length = together(self.parts) * E::lanes::<S>();
        let all = self.targets.clone();
        let &Self {
            job,
            batch,
            head,
            parts,
            ..
        } = self;
        let sources = self.sources.clone();
        let starts = all.clone().step_by(length);
        starts.enumerate().map(move |(number, start)| {
            let group = Self {
                job,
                batch,
                head,
                targets: start..(start + length).min(all.end),
                sources: sources.clone(),
                parts,
            };
            (number, group)
        })
    }

    /// Number of vectors of the targets.
    #[inline(always)]
    pub(super) fn vectors<S: Simd>(&self) -> usize {
        self.targets.len().div_ceil(E::lanes::<S>())
    }

    /// Targets of a vector.
    #[inline(always)]
    pub(super) fn lanes<S: Simd>(&self, vector: usize) -> Range<usize> {
        let start = self.targets.start + vector * E::lanes::<S>();
        start..(start + E::lanes::<S>()).min(self.targets.end)
    }

    #[inline(always)]
    pub(super) fn rows<S: Simd>(
        &self,
        tokens: &Tokens<E>,
        head: usize,
        vector: usize,
    ) -> ([*mut E; WIDEST], usize) {
        let lanes = self.lanes::<S>(vector);
        let mut rows = [std::ptr::null_mut(); WIDEST];
        for (row, token) in rows.iter_mut().zip(lanes.clone()) {
            *row = tokens.at(self.batch, token, head);
        }
        (rows, lanes.len())
    }

    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &self,
        simd: S,
        tokens: &Tokens<E>,
        head: usize,
        factor: f64,
        to: Runs<E>,
    ) {
        for vector in 0..self.vectors::<S>() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.load_vector(simd, (tokens, head), vector, factor, to.at(vector)) };
        }
    }

    #[inline(always)]
    pub(super) unsafe fn load_vector<S: Simd>(
        &self,
        simd: S,
        (tokens, head): (&Tokens<E>, usize),
        vector: usize,
        factor: f64,
        to: *mut E,
    ) {
        let (rows, count) = self.rows::<S>(tokens, head, vector);
        let rows = rows.map(<*mut E>::cast_const);
        let (factor, to) = (E::from_f64(factor), (to, E::lanes::<S>()));
        // SAFETY: guaranteed by the caller.
        unsafe { pack(simd, &rows[..count], tokens.width, factor, to) };
    }

    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(
        &self,
        simd: S,
        from: Runs<E>,
        head: usize,
        tokens: &Tokens<E>,
    ) {
        let one = E::splat(simd, E::from_f64(1.0));
        for vector in 0..self.vectors::<S>() {
            let (rows, count) = self.rows::<S>(tokens, head, vector);
            // SAFETY: guaranteed by the caller.
            unsafe { unpack(simd, from.at(vector), tokens.width, one, &rows[..count]) };
        }
    }

    /// One number for every target of a vector.
    #[inline(always)]
    pub(super) unsafe fn number<S: Simd>(
        &self,
        tokens: &Tokens<E>,
        head: usize,
        vector: usize,
    ) -> E::Vector<S> {
        let mut numbers = [E::default(); WIDEST];
        for (number, token) in numbers.iter_mut().zip(self.lanes::<S>(vector)) {
            // SAFETY: guaranteed by the caller.
            *number = unsafe { *tokens.at(self.batch, token, head) };
        }
        // SAFETY: no vector is wider.
        unsafe { E::load::<S>(numbers.as_ptr()) }
    }

    #[inline(always)]
    pub(super) unsafe fn set_number<S: Simd>(
        &self,
        value: E::Vector<S>,
        tokens: &Tokens<E>,
        head: usize,
        vector: usize,
    ) {
        let mut numbers = [E::default(); WIDEST];
        // SAFETY: no vector is wider; the rest is guaranteed by the caller.
        unsafe {
            E::store::<S>(numbers.as_mut_ptr(), value);
            for (number, token) in numbers.iter().zip(self.lanes::<S>(vector)) {
                *tokens.at(self.batch, token, head) = *number;
            }
        }
    }

    /// Sources that some target reaches.
    #[inline(always)]
    fn reached(&self) -> Range<usize> {
        let Range { start, end } = self.sources;
        match (self.job.causal, self.job.results) {
            (None, _) => start..end,
            // Queries before the first key reach no key.
            (Some([query, key]), Results::Gradients { .. }) => {
                let first = (key + self.targets.start).saturating_sub(query);
                first.clamp(start, end)..end
            }
            (Some([query, key]), Results::Forward { .. }) => {
                start
                    ..(query + self.targets.end)
                        .saturating_sub(key)
                        .clamp(start, end)
            }
        }
    }

    /// Blocks of sources that some target reaches.
    #[inline(always)]
    pub(super) fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<E> {
        let reached = self.reached();
        let starts = reached.clone().step_by(SOURCES);
        starts.map(move |start| start..(start + SOURCES).min(reached.end))
    }

    /// Sources of a block that some target reaches. Matrices take all of them if any is reached:
    /// the others have a weight of zero, and a value among them that is not finite turns the
    /// block's results into NaN.
    #[inline(always)]
    pub(super) fn within(&self, block: &Range<usize>, by_matrices: bool) -> Range<usize> {
        let reached = self.reached();
        let within = block.start.max(reached.start)..block.end.min(reached.end);
        if by_matrices && !within.is_empty() {
            block.clone()
        } else {
            within
        }
    }

    /// Loads the operands of targets, multiplied by a factor: as vectors, or packed as factors
    /// through `spare`.
    ///
    /// # Safety
    /// The targets must be readable, and there must be room for them.
    #[inline(always)]
    pub(super) unsafe fn load_operands<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &Registers,
        (tokens, factor): (&Tokens<E>, f64),
        spare: *mut E,
        to: Runs<E>,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if const { matrices_multiply::<S, E, P>() } && registers.is_some() {
                self.load_factors::<S, P>(simd, (tokens, factor), spare, to);
            } else {
                self.load(simd, tokens, self.head, factor, to);
            }
        }
    }

    /// Copies a block of the sources of a head to contiguous memory, or packs the requested factors
    /// of matrices: of sources, and of elements.
    ///
    /// # Safety
    /// The sources must be readable, and there must be room for them.
    #[inline(always)]
    pub(super) unsafe fn copied<'r, S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &'r Registers,
        (tokens, head): (&Tokens<E>, usize),
        block: &Range<usize>,
        to: *mut E,
        wanted: [bool; 2],
    ) -> Copied<'r, E> {
        if const { matrices_multiply::<S, E, P>() }
            && let Some(registers) = registers
        {
            // SAFETY: guaranteed by the caller.
            let factors = unsafe { self.factors::<S, P>(simd, (tokens, head), block, to, wanted) };
            return Copied::Factors(registers, factors);
        }
        let (width, first) = (tokens.width, tokens.at(self.batch, block.start, head));
        let in_place = tokens.pitch() == width;
        let sources = if in_place { 0 } else { block.len() };
        for source in 0..sources {
            let from = first.wrapping_add(source * tokens.pitch());
            // SAFETY: guaranteed by the caller.
            unsafe { std::ptr::copy_nonoverlapping(from, to.add(source * width), width) };
        }
        Copied::Piece(Piece {
            first: if in_place { first } else { to },
            width,
            start: block.start,
        })
    }

    /// Runs of all targets.
    #[inline(always)]
    fn runs<S: Simd>(
        &self,
        runs: Runs<E>,
    ) -> impl ExactSizeIterator<Item = *mut E> + Clone + use<E, S> {
        (0..self.vectors::<S>()).map(move |vector| runs.at(vector))
    }

    /// Dot products of all targets with a block of sources; with matrices, multiplied by a factor.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        (targets, factor): (Runs<E>, f64),
        sources: Copied<'_, E>,
        block: &Range<usize>,
        scores: Runs<E>,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match sources {
                Copied::Piece(piece) => {
                    debug_assert!(factor == 1.0, "operands are scaled instead");
                    let targets = self.runs::<S>(targets).map(<*mut E>::cast_const);
                    let mut offsets = [0; SOURCES];
                    let sources = piece.block(block, &mut offsets);
                    dots(simd, targets, sources, self.runs::<S>(scores));
                }
                Copied::Factors(registers, packed) if const { matrices_multiply::<S, E, P>() } => {
                    self.scores_of::<S, P>(registers, targets, packed, scores);
                    self.scale(simd, factor, block.len(), scores);
                }
                Copied::Factors(..) => unreachable!("{NO_MATRICES}"),
            }
        }
    }

    /// Adds a block of sources, weighted, to the results; `factors` has room for those of the
    /// weights.
    #[inline(always)]
    pub(super) unsafe fn weighted<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        (weights, factors): (Runs<E>, Runs<E>),
        sources: Copied<'_, E>,
        block: &Range<usize>,
        results: Runs<E>,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match sources {
                Copied::Piece(piece) => {
                    let weights = self.runs::<S>(weights).map(<*mut E>::cast_const);
                    let mut offsets = [0; SOURCES];
                    let sources = piece.block(block, &mut offsets);
                    sums(simd, weights, sources, self.runs::<S>(results));
                }
                Copied::Factors(registers, packed) if const { matrices_multiply::<S, E, P>() } => {
                    let weights = (weights, factors);
                    self.add_weighted::<S, P>(simd, registers, weights, packed, results);
                }
                Copied::Factors(..) => unreachable!("{NO_MATRICES}"),
            }
        }
    }
}
