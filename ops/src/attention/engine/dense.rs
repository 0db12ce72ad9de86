//! Passes of dense attention over a block of keys: results, gradients of queries, gradients of keys and values.
//!
//! Targets, queries or keys, lie in lanes; sources, the others, are read where they lie, one element for all lanes. Scores of
//! a few vectors of targets with some sources at a time stay in the first-level cache; results are carried from block to
//! block with the largest score so far (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018; T.
//! Dao et al., "FlashAttention", 2022).

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::blocks::{ForAll, Sources, TARGETS, dots, sums};
use super::lanes::{pack, unpack};
use super::windows::weights;
use crate::kernel::lanes::WIDEST;
use crate::kernel::math;
use crate::kernel::memory::{Shared, with_scratch};
use crate::kernel::simd::{Element, Isa};

/// Sources whose scores are computed at a time.
const SOURCES: usize = 128;
/// Multiplications below which a second thread does not pay.
const SERIAL: usize = 1 << 19;
/// The largest score of no key: smaller than any, and still a number.
pub(crate) const LOWEST: f64 = -1e30;

/// `[batch, tokens, heads, width]` elements that lie in one piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<E> {
    pub elements: Shared<E>,
    pub tokens: usize,
    pub heads: usize,
    pub width: usize,
}

impl<E: Copy> Tokens<E> {
    fn at(&self, batch: usize, token: usize, head: usize) -> *mut E {
        let row = (batch * self.tokens + token) * self.heads + head;
        // SAFETY: an address, which is within the elements for tokens that are there.
        unsafe { self.elements.at(0) }.wrapping_add(row * self.width)
    }

    /// From a token to the next.
    fn pitch(&self) -> usize {
        self.heads * self.width
    }
}

/// Attention of the queries of a rank to a block of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense<E> {
    pub batch: usize,
    /// Heads of queries that share one of keys and values.
    pub shared: usize,
    pub scale: f64,
    pub queries: Tokens<E>,
    pub keys: Tokens<E>,
    pub values: Tokens<E>,
    /// Where only keys up to the query's own place count: the places of the first query and of the first key.
    pub causal: Option<[usize; 2]>,
    pub results: Results<E>,
}

/// What is computed, and what of the forward pass it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Results<E> {
    /// Adds weighted values to `output`, relative to the largest score so far, and exponentials to `sum`.
    Forward { output: Tokens<E>, most: Tokens<E>, sum: Tokens<E> },
    /// Adds to the gradients of queries.
    Queries { from: Backward<E>, gradient: Tokens<E> },
    /// Adds to the gradients of keys and values.
    Keys { from: Backward<E>, key: Tokens<E>, value: Tokens<E> },
}

/// What a backward pass starts from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward<E> {
    /// The gradient of the output.
    pub cotangent: Tokens<E>,
    /// The logarithms of the sums of exponentials.
    pub lse: Tokens<E>,
    /// The products of output and cotangent.
    pub products: Tokens<E>,
}

impl<E: Element> Dense<E> {
    /// Adds to the results what this block of keys gives.
    ///
    /// # Safety
    /// All elements must be initialised and outlive the call, and nothing else may use the results meanwhile.
    pub(crate) unsafe fn run(&self, isa: Isa) {
        isa.run(Whole(self));
    }
}

struct Whole<'a, E>(&'a Dense<E>);

impl<E: Element> WithSimd for Whole<'_, E> {
    type Output = ();

    fn with_simd<S: Simd>(self, simd: S) {
        let Self(job) = self;
        let (tokens, heads) = match job.results {
            Results::Keys { .. } => (job.keys.tokens, job.keys.heads),
            _ => (job.queries.tokens, job.queries.heads),
        };
        let length = TARGETS * E::lanes::<S>();
        let tiles = tokens.div_ceil(length);
        let products = job.queries.tokens * job.keys.tokens * job.queries.heads * job.batch;
        let tasks = 0..job.batch * heads * tiles;
        let run = |index: usize| {
            // Later tiles of causal attention have more to do, and begin first.
            let tile = tiles - 1 - index / heads % tiles;
            simd.vectorize(Task {
                job,
                batch: index / heads / tiles,
                head: index % heads,
                targets: tile * length..((tile + 1) * length).min(tokens),
            });
        };
        if products * (job.queries.width + job.values.width) < SERIAL {
            tasks.for_each(run);
        } else {
            tasks.into_par_iter().for_each(run);
        }
    }
}

/// A few vectors of targets of one head.
struct Task<'a, E> {
    job: &'a Dense<E>,
    batch: usize,
    head: usize,
    targets: Range<usize>,
}

/// Vectors of targets, each with a run of vectors of its own.
#[derive(Clone, Copy)]
struct Runs<E> {
    first: *mut E,
    pitch: usize,
}

impl<E> Runs<E> {
    fn at(self, vector: usize) -> *mut E {
        self.first.wrapping_add(vector * self.pitch)
    }
}

impl<E: Element> WithSimd for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let widths = 2 * (self.job.queries.width + self.job.values.width);
        let length = TARGETS * (widths + 2 * SOURCES) * E::lanes::<S>();
        with_scratch(length, |scratch| {
            let mut first: *mut E = scratch.as_mut_ptr();
            let mut runs = |vectors: usize| {
                let pitch = vectors * E::lanes::<S>();
                let runs = Runs { first, pitch };
                first = first.wrapping_add(TARGETS * pitch);
                runs
            };
            // SAFETY: the scratch is long enough; the rest is the caller's of `run`.
            unsafe {
                match self.job.results {
                    Results::Forward { output, most, sum } => {
                        self.forward(simd, &mut runs, output, [most, sum]);
                    }
                    Results::Queries { from, gradient } => {
                        self.query_gradients(simd, &mut runs, from, gradient);
                    }
                    Results::Keys { from, key, value } => {
                        self.key_gradients(simd, &mut runs, from, [key, value]);
                    }
                }
            }
        });
    }
}

impl<E: Element> Task<'_, E> {
    /// The vectors of the targets.
    #[inline(always)]
    fn vectors<S: Simd>(&self) -> usize {
        self.targets.len().div_ceil(E::lanes::<S>())
    }

    /// The targets of a vector.
    #[inline(always)]
    fn lanes<S: Simd>(&self, vector: usize) -> Range<usize> {
        let start = self.targets.start + vector * E::lanes::<S>();
        start..(start + E::lanes::<S>()).min(self.targets.end)
    }

    #[inline(always)]
    fn rows<S: Simd>(&self, tokens: &Tokens<E>, head: usize, vector: usize) -> ([*mut E; WIDEST], usize) {
        let lanes = self.lanes::<S>(vector);
        let mut rows = [std::ptr::null_mut(); WIDEST];
        for (row, token) in rows.iter_mut().zip(lanes.clone()) {
            *row = tokens.at(self.batch, token, head);
        }
        (rows, lanes.len())
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(&self, simd: S, tokens: &Tokens<E>, head: usize, factor: f64, to: Runs<E>) {
        let factor = E::splat(simd, E::from_f64(factor));
        for vector in 0..self.vectors::<S>() {
            let (rows, count) = self.rows::<S>(tokens, head, vector);
            let rows = rows.map(<*mut E>::cast_const);
            // SAFETY: the caller's.
            unsafe { pack(simd, &rows[..count], tokens.width, factor, to.at(vector)) };
        }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(&self, simd: S, from: Runs<E>, head: usize, tokens: &Tokens<E>) {
        let one = E::splat(simd, E::from_f64(1.0));
        for vector in 0..self.vectors::<S>() {
            let (rows, count) = self.rows::<S>(tokens, head, vector);
            // SAFETY: the caller's.
            unsafe { unpack(simd, from.at(vector), tokens.width, one, &rows[..count]) };
        }
    }

    /// One number of every target of a vector.
    #[inline(always)]
    unsafe fn number<S: Simd>(&self, tokens: &Tokens<E>, head: usize, vector: usize) -> E::Vector<S> {
        let mut numbers = [E::default(); WIDEST];
        for (number, token) in numbers.iter_mut().zip(self.lanes::<S>(vector)) {
            // SAFETY: the caller's.
            *number = unsafe { *tokens.at(self.batch, token, head) };
        }
        // SAFETY: no vector is wider.
        unsafe { E::load::<S>(numbers.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn set_number<S: Simd>(&self, value: E::Vector<S>, tokens: &Tokens<E>, head: usize, vector: usize) {
        let mut numbers = [E::default(); WIDEST];
        // SAFETY: no vector is wider; the rest is the caller's.
        unsafe {
            E::store::<S>(numbers.as_mut_ptr(), value);
            for (number, token) in numbers.iter().zip(self.lanes::<S>(vector)) {
                *tokens.at(self.batch, token, head) = *number;
            }
        }
    }

    /// Blocks of sources that some target reaches.
    #[inline(always)]
    fn blocks(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> + use<E> {
        let reached = match (self.job.causal, self.job.results) {
            (None, _) => 0..tokens,
            // Queries before the first key reach none of them.
            (Some([query, key]), Results::Keys { .. }) => {
                (key + self.targets.start).saturating_sub(query).min(tokens)..tokens
            }
            (Some([query, key]), _) => 0..(query + self.targets.end).saturating_sub(key).min(tokens),
        };
        let starts = reached.clone().step_by(SOURCES);
        starts.map(move |start| start..(start + SOURCES).min(reached.end))
    }

    /// The dot products of all targets with a block of sources.
    #[inline(always)]
    unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        targets: Runs<E>,
        sources: (&Tokens<E>, usize),
        block: &Range<usize>,
        scores: Runs<E>,
    ) {
        let vectors = 0..self.vectors::<S>();
        let targets = vectors.clone().map(|vector| targets.at(vector).cast_const());
        let mut offsets = [0; SOURCES];
        let sources = self.sources(sources, block, &mut offsets);
        // SAFETY: the caller's.
        unsafe { dots(simd, targets, sources, vectors.map(|vector| scores.at(vector))) };
    }

    /// Adds a block of sources, weighted, to the results.
    #[inline(always)]
    unsafe fn weighted<S: Simd>(
        &self,
        simd: S,
        weights: Runs<E>,
        sources: (&Tokens<E>, usize),
        block: &Range<usize>,
        results: Runs<E>,
    ) {
        let vectors = 0..self.vectors::<S>();
        let weights = vectors.clone().map(|vector| weights.at(vector).cast_const());
        let mut offsets = [0; SOURCES];
        let sources = self.sources(sources, block, &mut offsets);
        // SAFETY: the caller's.
        unsafe { sums(simd, weights, sources, vectors.map(|vector| results.at(vector))) };
    }

    #[inline(always)]
    fn sources<'a>(
        &self,
        (tokens, head): (&Tokens<E>, usize),
        block: &Range<usize>,
        offsets: &'a mut [usize; SOURCES],
    ) -> Sources<'a, E, ForAll> {
        let offsets = &mut offsets[..block.len()];
        let pitch = tokens.pitch();
        offsets.iter_mut().enumerate().for_each(|(token, offset)| *offset = token * pitch);
        Sources {
            first: tokens.at(self.batch, block.start, head),
            offsets,
            width: tokens.width,
            storage: PhantomData,
        }
    }

    /// Replaces scores that do not count by minus infinity.
    #[inline(always)]
    unsafe fn mask<S: Simd>(&self, simd: S, block: &Range<usize>, scores: Runs<E>) {
        let Some([query, key]) = self.job.causal else {
            return;
        };
        let keys = matches!(self.job.results, Results::Keys { .. });
        // The largest place of a key and the smallest of a query.
        let (last, first) = if keys {
            (key + self.targets.end - 1, query + block.start)
        } else {
            (key + block.end - 1, query + self.targets.start)
        };
        if last <= first {
            return;
        }
        let lowest = E::splat(simd, E::from_f64(f64::NEG_INFINITY));
        for vector in 0..self.vectors::<S>() {
            let start = self.lanes::<S>(vector).start as i64 - block.start as i64;
            for source in 0..block.len() {
                // The place of each lane's query less that of its key.
                let ahead = std::array::from_fn::<E, WIDEST, _>(|lane| {
                    let target = start + lane as i64 - source as i64;
                    let place = query as i64 - key as i64;
                    E::from_f64(if keys { place - target } else { place + target } as f64)
                });
                // SAFETY: a vector for each source.
                unsafe {
                    let at = scores.at(vector).add(source * E::lanes::<S>());
                    let pair = [E::load::<S>(ahead.as_ptr()), E::splat(simd, E::default())];
                    E::store::<S>(at, E::select_less(simd, pair, lowest, E::load::<S>(at)));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn forward<S: Simd>(
        &self,
        simd: S,
        runs: &mut impl FnMut(usize) -> Runs<E>,
        output: Tokens<E>,
        [most, sum]: [Tokens<E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let (q, means, scores) = (runs(job.queries.width), runs(job.values.width), runs(SOURCES));
        let shared = self.head / job.shared;
        // SAFETY: the caller's.
        unsafe {
            self.load(simd, &job.queries, self.head, job.scale, q);
            self.load(simd, &output, self.head, 1.0, means);
            let mut known = [[E::splat(simd, E::default()); 2]; TARGETS];
            for (vector, known) in known[..self.vectors::<S>()].iter_mut().enumerate() {
                *known = [most, sum].map(|tokens| self.number::<S>(&tokens, self.head, vector));
            }
            for block in self.blocks(job.keys.tokens) {
                self.scores(simd, q, (&job.keys, shared), &block, scores);
                self.mask(simd, &block, scores);
                for (vector, [most, sum]) in known[..self.vectors::<S>()].iter_mut().enumerate() {
                    let (scores, means) = (scores.at(vector), means.at(vector));
                    let before = *most;
                    for source in 0..block.len() {
                        let score = E::load::<S>(scores.add(source * lanes));
                        *most = E::select_less(simd, [*most, score], score, *most);
                    }
                    let factor = math::exp::<S, E>(simd, E::minus(simd, before, *most));
                    *sum = E::times(simd, *sum, factor);
                    for source in 0..block.len() {
                        let at = scores.add(source * lanes);
                        let score = E::minus(simd, E::load::<S>(at), *most);
                        let weight = math::exp::<S, E>(simd, score);
                        *sum = E::plus(simd, *sum, weight);
                        E::store::<S>(at, weight);
                    }
                    for element in 0..output.width {
                        let at = means.add(element * lanes);
                        E::store::<S>(at, E::times(simd, E::load::<S>(at), factor));
                    }
                }
                self.weighted(simd, scores, (&job.values, shared), &block, means);
            }
            self.store(simd, means, self.head, &output);
            for (vector, known) in known[..self.vectors::<S>()].iter().enumerate() {
                self.set_number::<S>(known[0], &most, self.head, vector);
                self.set_number::<S>(known[1], &sum, self.head, vector);
            }
        }
    }

    #[inline(always)]
    unsafe fn query_gradients<S: Simd>(
        &self,
        simd: S,
        runs: &mut impl FnMut(usize) -> Runs<E>,
        from: Backward<E>,
        gradient: Tokens<E>,
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let (q, g) = (runs(job.queries.width), runs(job.values.width));
        let (result, scores, slopes) = (runs(job.queries.width), runs(SOURCES), runs(SOURCES));
        let shared = self.head / job.shared;
        let scale = E::splat(simd, E::from_f64(job.scale));
        // SAFETY: the caller's.
        unsafe {
            self.load(simd, &job.queries, self.head, job.scale, q);
            self.load(simd, &from.cotangent, self.head, 1.0, g);
            self.load(simd, &gradient, self.head, 1.0, result);
            for block in self.blocks(job.keys.tokens) {
                self.scores(simd, q, (&job.keys, shared), &block, scores);
                self.mask(simd, &block, scores);
                self.scores(simd, g, (&job.values, shared), &block, slopes);
                for vector in 0..self.vectors::<S>() {
                    let known = [from.lse, from.products]
                        .map(|tokens| self.number::<S>(&tokens, self.head, vector));
                    for source in 0..block.len() {
                        let at = [scores, slopes].map(|runs| runs.at(vector).add(source * lanes));
                        let [_, weight] = weights::<S, E>(simd, at, known);
                        E::store::<S>(at[0], E::times(simd, weight, scale));
                    }
                }
                self.weighted(simd, scores, (&job.keys, shared), &block, result);
            }
            self.store(simd, result, self.head, &gradient);
        }
    }

    #[inline(always)]
    unsafe fn key_gradients<S: Simd>(
        &self,
        simd: S,
        runs: &mut impl FnMut(usize) -> Runs<E>,
        from: Backward<E>,
        gradients: [Tokens<E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let (k, v) = (runs(job.queries.width), runs(job.values.width));
        let results = [runs(job.queries.width), runs(job.values.width)];
        let (scores, slopes) = (runs(SOURCES), runs(SOURCES));
        let scale = E::splat(simd, E::from_f64(job.scale));
        // SAFETY: the caller's.
        unsafe {
            self.load(simd, &job.keys, self.head, job.scale, k);
            self.load(simd, &job.values, self.head, 1.0, v);
            for (result, gradient) in results.into_iter().zip(&gradients) {
                self.load(simd, gradient, self.head, 1.0, result);
            }
            for turn in 0..job.shared {
                let head = self.head * job.shared + turn;
                for block in self.blocks(job.queries.tokens) {
                    self.scores(simd, k, (&job.queries, head), &block, scores);
                    self.mask(simd, &block, scores);
                    self.scores(simd, v, (&from.cotangent, head), &block, slopes);
                    for (source, query) in block.clone().enumerate() {
                        let known = [from.lse, from.products].map(|tokens| {
                            E::splat(simd, *tokens.at(self.batch, query, head))
                        });
                        for vector in 0..self.vectors::<S>() {
                            let at = [scores, slopes].map(|runs| runs.at(vector).add(source * lanes));
                            let [score, weight] = weights::<S, E>(simd, at, known);
                            E::store::<S>(at[0], score);
                            E::store::<S>(at[1], E::times(simd, weight, scale));
                        }
                    }
                    self.weighted(simd, slopes, (&job.queries, head), &block, results[0]);
                    self.weighted(simd, scores, (&from.cotangent, head), &block, results[1]);
                }
            }
            for (result, gradient) in results.into_iter().zip(&gradients) {
                self.store(simd, result, self.head, gradient);
            }
        }
    }
}
