//! The passes over the blocks of sources that some target reaches.

use pulp::{Simd, WithSimd};

use super::job::{Backward, Tokens};
use super::task::{GROUPS, Runs, SOURCES, Task};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::lanes::weights;
use crate::kernel::math;
use crate::kernel::panels::{Factors, Sums};
use crate::kernel::products::Numbers;
use crate::kernel::simd::Element;

/// Sums for gradients of queries: a call, because it is large.
struct Combined<E>(Sums<E>);

impl<E: Element> WithSimd for Combined<E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: as `gradients` says.
        unsafe { self.0.run::<S, Numbers>(simd) };
    }
}

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
            for block in self.blocks() {
                let keys = self.copied(&job.keys, shared, &block, copies[0]);
                let values = self.copied(&job.values, shared, &block, copies[1]);
                for (number, group) in self.groups::<S>() {
                    let block = group.within(&block);
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

    /// Adds to the gradients that are wanted, of queries, keys and values.
    ///
    /// # Safety
    /// Runs and copies must have room, as rows of whole vectors `keys` for all targets and `sums` for a block of sources, and all tokens
    /// be there.
    #[inline(always)]
    pub(super) unsafe fn gradients<S: Simd>(
        &self,
        simd: S,
        copies: [*mut E; 2],
        [keys, sums]: [*mut E; 2],
        runs: &mut impl FnMut(usize, usize) -> Runs<E>,
        from: Backward<E>,
        [query, key, value]: [Option<Tokens<E>>; 3],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let widths = [job.queries.width, job.values.width];
        let [k, v] = widths.map(|width| runs(width, GROUPS));
        let [of_keys, of_values] = widths.map(|width| runs(width, GROUPS));
        let (scores, slopes) = (runs(SOURCES, 1), runs(SOURCES, 1));
        let scale = E::splat(simd, E::from_f64(job.scale));
        let pitch = job.keys.width.next_multiple_of(lanes);
        // SAFETY: the caller's.
        unsafe {
            for (number, group) in self.groups::<S>() {
                group.load(simd, &job.keys, self.head, job.scale, k.of(number));
                group.load(simd, &job.values, self.head, 1.0, v.of(number));
                for (gradient, sums) in [(&key, of_keys), (&value, of_values)] {
                    if let Some(gradient) = gradient {
                        group.load(simd, gradient, self.head, 1.0, sums.of(number));
                    }
                }
            }
            if query.is_some() {
                for (row, token) in self.targets.clone().enumerate() {
                    let key = job.keys.at(self.batch, token, self.head);
                    let row = keys.add(row * pitch);
                    std::ptr::copy_nonoverlapping(key, row, job.keys.width);
                    row.add(job.keys.width)
                        .write_bytes(0, pitch - job.keys.width);
                }
            }
            for turn in 0..job.shared {
                let head = self.head * job.shared + turn;
                for block in self.blocks() {
                    let queries = self.copied(&job.queries, head, &block, copies[0]);
                    let cotangents = self.copied(&from.cotangent, head, &block, copies[1]);
                    if query.is_some() {
                        sums.write_bytes(0, block.len() * pitch);
                    }
                    for (number, group) in self.groups::<S>() {
                        let reached = group.within(&block);
                        if reached.is_empty() {
                            continue;
                        }
                        group.scores(simd, k.of(number), queries, &reached, scores);
                        group.complete(simd, head, &reached, scores);
                        group.scores(simd, v.of(number), cotangents, &reached, slopes);
                        group.drop::<S>(head, &reached, slopes);
                        for (source, query) in reached.clone().enumerate() {
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
                        if query.is_some() {
                            let before = group.targets.start - self.targets.start;
                            let to = sums.add((reached.start - block.start) * pitch);
                            for vector in 0..group.vectors::<S>() {
                                simd.vectorize(Combined(Sums {
                                    a: Factors::new(slopes.at(vector), lanes),
                                    rows: reached.len(),
                                    b: keys.add((before + vector * lanes) * pitch),
                                    width: pitch,
                                    steps: group.lanes::<S>(vector).len(),
                                    from: (to, pitch),
                                    to: (to, pitch),
                                }));
                            }
                        }
                        if key.is_some() {
                            group.weighted(simd, slopes, queries, &reached, of_keys.of(number));
                        }
                        if value.is_some() {
                            group.drop::<S>(head, &reached, scores);
                            let to = of_values.of(number);
                            group.weighted(simd, scores, cotangents, &reached, to);
                        }
                    }
                    if let Some(gradient) = &query {
                        for (row, token) in block.enumerate() {
                            let to = gradient.at(self.batch, token, head);
                            let sums = sums.add(row * pitch);
                            for element in 0..gradient.width {
                                *to.add(element) += *sums.add(element);
                            }
                        }
                    }
                }
            }
            for (number, group) in self.groups::<S>() {
                for (gradient, sums) in [(&key, of_keys), (&value, of_values)] {
                    if let Some(gradient) = gradient {
                        group.store(simd, sums.of(number), self.head, gradient);
                    }
                }
            }
        }
    }
}
