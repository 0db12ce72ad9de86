//! The passes over the blocks of sources that some target reaches.

use pulp::Simd;

use super::job::{Backward, Tokens};
use super::task::{Runs, SOURCES, Task};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::lanes::weights;
use crate::kernel::math;
use crate::kernel::simd::Element;

impl<E: Element> Task<'_, E> {
    /// Adds weighted values to the results so far.
    ///
    /// # Safety
    /// The runs must have room, and all tokens be there.
    #[inline(always)]
    pub(super) unsafe fn forward<S: Simd>(
        &self,
        simd: S,
        runs: &mut impl FnMut(usize) -> Runs<E>,
        output: Tokens<E>,
        [most, sum]: [Tokens<E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let (q, means, scores) = (
            runs(job.queries.width),
            runs(job.values.width),
            runs(SOURCES),
        );
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
                self.complete(simd, self.head, &block, scores);
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
                self.drop::<S>(self.head, &block, scores);
                self.weighted(simd, scores, (&job.values, shared), &block, means);
            }
            self.store(simd, means, self.head, &output);
            for (vector, known) in known[..self.vectors::<S>()].iter().enumerate() {
                self.set_number::<S>(known[0], &most, self.head, vector);
                self.set_number::<S>(known[1], &sum, self.head, vector);
            }
        }
    }

    /// Adds to the gradients of queries.
    ///
    /// # Safety
    /// The runs must have room, and all tokens be there.
    #[inline(always)]
    pub(super) unsafe fn query_gradients<S: Simd>(
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
                self.complete(simd, self.head, &block, scores);
                self.scores(simd, g, (&job.values, shared), &block, slopes);
                self.drop::<S>(self.head, &block, slopes);
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

    /// Adds to the gradients of keys and values.
    ///
    /// # Safety
    /// The runs must have room, and all tokens be there.
    #[inline(always)]
    pub(super) unsafe fn key_gradients<S: Simd>(
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
                    self.complete(simd, head, &block, scores);
                    self.scores(simd, v, (&from.cotangent, head), &block, slopes);
                    self.drop::<S>(head, &block, slopes);
                    for (source, query) in block.clone().enumerate() {
                        let known = [from.lse, from.products]
                            .map(|tokens| E::splat(simd, *tokens.at(self.batch, query, head)));
                        for vector in 0..self.vectors::<S>() {
                            let at =
                                [scores, slopes].map(|runs| runs.at(vector).add(source * lanes));
                            let [score, weight] = weights::<S, E>(simd, at, known);
                            E::store::<S>(at[0], score);
                            E::store::<S>(at[1], E::times(simd, weight, scale));
                        }
                    }
                    self.drop::<S>(head, &block, scores);
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
