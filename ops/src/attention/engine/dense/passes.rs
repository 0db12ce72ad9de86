//! The passes over the blocks of sources that some target reaches.

use pulp::Simd;

use super::job::{Backward, Tokens};
use super::task::{GROUPS, Runs, SOURCES, Task};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::lanes::weights;
use crate::kernel::math;
use crate::kernel::simd::Element;

impl<E: Element> Task<'_, E> {
    /// Adds weighted values to the results so far.
    ///
    /// # Safety
    /// Runs and copies must have room, and all tokens be there.
    #[inline(always)]
    pub(super) unsafe fn forward<S: Simd>(
        &self,
        simd: S,
        copies: [*mut E; 2],
        runs: &mut impl FnMut(usize, usize) -> Runs<E>,
        output: Tokens<E>,
        [most, sum]: [Tokens<E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let (q, means) = (
            runs(job.queries.width, GROUPS),
            runs(job.values.width, GROUPS),
        );
        let scores = runs(SOURCES, 1);
        let shared = self.head / job.shared;
        let mut known = [[[E::splat(simd, E::default()); 2]; TARGETS]; GROUPS];
        // SAFETY: the caller's.
        unsafe {
            for (number, group) in self.groups::<S>() {
                group.load(simd, &job.queries, self.head, job.scale, q.of(number));
                group.load(simd, &output, self.head, 1.0, means.of(number));
                for (vector, known) in known[number].iter_mut().enumerate() {
                    *known =
                        [most, sum].map(|tokens| group.number::<S>(&tokens, self.head, vector));
                }
            }
            for block in self.blocks(job.keys.tokens) {
                let keys = self.copied(&job.keys, shared, &block, copies[0]);
                let values = self.copied(&job.values, shared, &block, copies[1]);
                for (number, group) in self.groups::<S>() {
                    let block = group.within(&block, job.keys.tokens);
                    if block.is_empty() {
                        continue;
                    }
                    let (q, means) = (q.of(number), means.of(number));
                    group.scores(simd, q, keys, &block, scores);
                    group.complete(simd, self.head, &block, scores);
                    let known = &mut known[number][..group.vectors::<S>()];
                    for (vector, [most, sum]) in known.iter_mut().enumerate() {
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
                    group.drop::<S>(self.head, &block, scores);
                    group.weighted(simd, scores, values, &block, means);
                }
            }
            for (number, group) in self.groups::<S>() {
                group.store(simd, means.of(number), self.head, &output);
                for (vector, [largest, total]) in known[number].into_iter().enumerate() {
                    group.set_number::<S>(largest, &most, self.head, vector);
                    group.set_number::<S>(total, &sum, self.head, vector);
                }
            }
        }
    }

    /// Adds to the gradients of queries.
    ///
    /// # Safety
    /// Runs and copies must have room, and all tokens be there.
    #[inline(always)]
    pub(super) unsafe fn query_gradients<S: Simd>(
        &self,
        simd: S,
        copies: [*mut E; 2],
        runs: &mut impl FnMut(usize, usize) -> Runs<E>,
        from: Backward<E>,
        gradient: Tokens<E>,
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [q, g, result] = [job.queries.width, job.values.width, job.queries.width]
            .map(|width| runs(width, GROUPS));
        let (scores, slopes) = (runs(SOURCES, 1), runs(SOURCES, 1));
        let shared = self.head / job.shared;
        let scale = E::splat(simd, E::from_f64(job.scale));
        // SAFETY: the caller's.
        unsafe {
            for (number, group) in self.groups::<S>() {
                group.load(simd, &job.queries, self.head, job.scale, q.of(number));
                group.load(simd, &from.cotangent, self.head, 1.0, g.of(number));
                group.load(simd, &gradient, self.head, 1.0, result.of(number));
            }
            for block in self.blocks(job.keys.tokens) {
                let keys = self.copied(&job.keys, shared, &block, copies[0]);
                let values = self.copied(&job.values, shared, &block, copies[1]);
                for (number, group) in self.groups::<S>() {
                    let block = group.within(&block, job.keys.tokens);
                    if block.is_empty() {
                        continue;
                    }
                    group.scores(simd, q.of(number), keys, &block, scores);
                    group.complete(simd, self.head, &block, scores);
                    group.scores(simd, g.of(number), values, &block, slopes);
                    group.drop::<S>(self.head, &block, slopes);
                    for vector in 0..group.vectors::<S>() {
                        let known = [from.lse, from.products]
                            .map(|tokens| group.number::<S>(&tokens, self.head, vector));
                        for source in 0..block.len() {
                            let at =
                                [scores, slopes].map(|runs| runs.at(vector).add(source * lanes));
                            let [_, weight] = weights::<S, E>(simd, at, known);
                            E::store::<S>(at[0], E::times(simd, weight, scale));
                        }
                    }
                    group.weighted(simd, scores, keys, &block, result.of(number));
                }
            }
            for (number, group) in self.groups::<S>() {
                group.store(simd, result.of(number), self.head, &gradient);
            }
        }
    }

    /// Adds to the gradients of keys and values.
    ///
    /// # Safety
    /// Runs and copies must have room, and all tokens be there.
    #[inline(always)]
    pub(super) unsafe fn key_gradients<S: Simd>(
        &self,
        simd: S,
        copies: [*mut E; 2],
        runs: &mut impl FnMut(usize, usize) -> Runs<E>,
        from: Backward<E>,
        gradients: [Tokens<E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let widths = [job.queries.width, job.values.width];
        let [k, v] = widths.map(|width| runs(width, GROUPS));
        let results = widths.map(|width| runs(width, GROUPS));
        let (scores, slopes) = (runs(SOURCES, 1), runs(SOURCES, 1));
        let scale = E::splat(simd, E::from_f64(job.scale));
        // SAFETY: the caller's.
        unsafe {
            for (number, group) in self.groups::<S>() {
                group.load(simd, &job.keys, self.head, job.scale, k.of(number));
                group.load(simd, &job.values, self.head, 1.0, v.of(number));
                for (result, gradient) in results.into_iter().zip(&gradients) {
                    group.load(simd, gradient, self.head, 1.0, result.of(number));
                }
            }
            for turn in 0..job.shared {
                let head = self.head * job.shared + turn;
                for block in self.blocks(job.queries.tokens) {
                    let queries = self.copied(&job.queries, head, &block, copies[0]);
                    let cotangents = self.copied(&from.cotangent, head, &block, copies[1]);
                    for (number, group) in self.groups::<S>() {
                        let block = group.within(&block, job.queries.tokens);
                        if block.is_empty() {
                            continue;
                        }
                        group.scores(simd, k.of(number), queries, &block, scores);
                        group.complete(simd, head, &block, scores);
                        group.scores(simd, v.of(number), cotangents, &block, slopes);
                        group.drop::<S>(head, &block, slopes);
                        for (source, query) in block.clone().enumerate() {
                            let known = [from.lse, from.products]
                                .map(|tokens| E::splat(simd, *tokens.at(self.batch, query, head)));
                            for vector in 0..group.vectors::<S>() {
                                let at = [scores, slopes]
                                    .map(|runs| runs.at(vector).add(source * lanes));
                                let [score, weight] = weights::<S, E>(simd, at, known);
                                E::store::<S>(at[0], score);
                                E::store::<S>(at[1], E::times(simd, weight, scale));
                            }
                        }
                        group.drop::<S>(head, &block, scores);
                        let [of_keys, of_values] = results.map(|runs| runs.of(number));
                        group.weighted(simd, slopes, queries, &block, of_keys);
                        group.weighted(simd, scores, cotangents, &block, of_values);
                    }
                }
            }
            for (number, group) in self.groups::<S>() {
                for (result, gradient) in results.into_iter().zip(&gradients) {
                    group.store(simd, result.of(number), self.head, gradient);
                }
            }
        }
    }
}
