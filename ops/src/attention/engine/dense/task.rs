//! A few vectors of targets: their operands, scores and sums.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::Simd;

use super::job::{Dense, Results, Tokens};
use crate::attention::engine::blocks::{ForAll, Sources, TARGETS, dots, sums};
use crate::attention::engine::lanes::{pack, unpack};
use crate::kernel::lanes::WIDEST;
use crate::kernel::simd::Element;

/// Sources whose scores are computed at a time.
pub(super) const SOURCES: usize = 64;

/// Groups of targets of a task at most.
pub(super) const GROUPS: usize = 4;

/// Targets of one head: a few vectors, or several such groups.
pub(super) struct Task<'a, E> {
    pub job: &'a Dense<E>,
    pub batch: usize,
    pub head: usize,
    pub targets: Range<usize>,
    /// The sources that count, of all.
    pub sources: Range<usize>,
}

/// Vectors of targets, each with a run of vectors of its own.
#[derive(Clone, Copy)]
pub(super) struct Runs<E> {
    pub first: *mut E,
    pub pitch: usize,
}

impl<E> Runs<E> {
    /// The runs of a group of targets.
    pub(super) fn of(self, group: usize) -> Self {
        let first = self.first.wrapping_add(group * TARGETS * self.pitch);
        Self { first, ..self }
    }

    pub(super) fn at(self, vector: usize) -> *mut E {
        self.first.wrapping_add(vector * self.pitch)
    }
}

/// Sources that lie in one piece, from one of them on.
#[derive(Clone, Copy)]
pub(super) struct Copied<E> {
    first: *mut E,
    width: usize,
    start: usize,
}

impl<E> Copied<E> {
    /// A block of them.
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

impl<'a, E: Element> Task<'a, E> {
    /// Groups of the targets, each a few vectors.
    #[inline(always)]
    pub(super) fn groups<S: Simd>(&self) -> impl Iterator<Item = (usize, Self)> + use<'a, E, S> {
        let (length, all) = (TARGETS * E::lanes::<S>(), self.targets.clone());
        let &Self {
            job, batch, head, ..
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
            };
            (number, group)
        })
    }

    /// The vectors of the targets.
    #[inline(always)]
    pub(super) fn vectors<S: Simd>(&self) -> usize {
        self.targets.len().div_ceil(E::lanes::<S>())
    }

    /// The targets of a vector.
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
        let factor = E::from_f64(factor);
        for vector in 0..self.vectors::<S>() {
            let (rows, count) = self.rows::<S>(tokens, head, vector);
            let rows = rows.map(<*mut E>::cast_const);
            // SAFETY: the caller's.
            unsafe {
                pack(
                    simd,
                    &rows[..count],
                    tokens.width,
                    factor,
                    (to.at(vector), E::lanes::<S>()),
                )
            };
        }
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
            // SAFETY: the caller's.
            unsafe { unpack(simd, from.at(vector), tokens.width, one, &rows[..count]) };
        }
    }

    /// One number of every target of a vector.
    #[inline(always)]
    pub(super) unsafe fn number<S: Simd>(
        &self,
        tokens: &Tokens<E>,
        head: usize,
        vector: usize,
    ) -> E::Vector<S> {
        let mut numbers = [E::default(); WIDEST];
        for (number, token) in numbers.iter_mut().zip(self.lanes::<S>(vector)) {
            // SAFETY: the caller's.
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
        // SAFETY: no vector is wider; the rest is the caller's.
        unsafe {
            E::store::<S>(numbers.as_mut_ptr(), value);
            for (number, token) in numbers.iter().zip(self.lanes::<S>(vector)) {
                *tokens.at(self.batch, token, head) = *number;
            }
        }
    }

    /// The sources that some target reaches.
    #[inline(always)]
    fn reached(&self) -> Range<usize> {
        let Range { start, end } = self.sources;
        match (self.job.causal, self.job.results) {
            (None, _) => start..end,
            // Queries before the first key reach none of them.
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

    /// The sources of a block that some target reaches.
    #[inline(always)]
    pub(super) fn within(&self, block: &Range<usize>) -> Range<usize> {
        let reached = self.reached();
        block.start.max(reached.start)..block.end.min(reached.end)
    }

    /// A block of the sources of a head, copied to lie in one piece.
    ///
    /// # Safety
    /// The sources must be there, and room for them.
    #[inline(always)]
    pub(super) unsafe fn copied(
        &self,
        tokens: &Tokens<E>,
        head: usize,
        block: &Range<usize>,
        to: *mut E,
    ) -> Copied<E> {
        let (width, first) = (tokens.width, tokens.at(self.batch, block.start, head));
        let in_place = tokens.pitch() == width;
        let copied = Copied {
            first: if in_place { first } else { to },
            width,
            start: block.start,
        };
        if in_place {
            return copied;
        }
        for source in 0..block.len() {
            let from = first.wrapping_add(source * tokens.pitch());
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(from, to.add(source * width), width) };
        }
        copied
    }

    /// The dot products of all targets with a block of sources.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        targets: Runs<E>,
        sources: Copied<E>,
        block: &Range<usize>,
        scores: Runs<E>,
    ) {
        let vectors = 0..self.vectors::<S>();
        let targets = vectors
            .clone()
            .map(|vector| targets.at(vector).cast_const());
        let mut offsets = [0; SOURCES];
        let sources = sources.block(block, &mut offsets);
        // SAFETY: the caller's.
        unsafe {
            dots(
                simd,
                targets,
                sources,
                vectors.map(|vector| scores.at(vector)),
            )
        };
    }

    /// Adds a block of sources, weighted, to the results.
    #[inline(always)]
    pub(super) unsafe fn weighted<S: Simd>(
        &self,
        simd: S,
        weights: Runs<E>,
        sources: Copied<E>,
        block: &Range<usize>,
        results: Runs<E>,
    ) {
        let vectors = 0..self.vectors::<S>();
        let weights = vectors
            .clone()
            .map(|vector| weights.at(vector).cast_const());
        let mut offsets = [0; SOURCES];
        let sources = sources.block(block, &mut offsets);
        // SAFETY: the caller's.
        unsafe {
            sums(
                simd,
                weights,
                sources,
                vectors.map(|vector| results.at(vector)),
            )
        };
    }
}
