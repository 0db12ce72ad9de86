//! Passes over the blocks of sources that some target reaches.

use pulp::{Simd, WithSimd};

use super::job::{Backward, Tokens};
use super::room::{COLUMNS, GROUPS, Room};
use super::task::{Registers, Task};
use crate::attention::engine::weights::weights;
use crate::kernel::math;
use crate::kernel::panels::{Factors, Sums};
use crate::kernel::products::{Numbers, Products, matrices_multiply};
use crate::kernel::simd::Element;

/// Sums for the gradients of queries; not inlined, because it is large.
struct Combined<E>(Sums<E>);

impl<E: Element> WithSimd for Combined<E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: as in `gradients`.
        unsafe { self.0.run::<S, Numbers>(simd) };
    }
}

impl<E: Element> Task<'_, E> {
    /// Adds weighted values to the results so far.
    ///
    /// # Safety
    /// The room must belong to this task, and all tokens must be readable.
    #[inline(always)]
    pub(super) unsafe fn forward<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &Registers,
        room: &Room<E>,
        output: Tokens<E>,
        [most, sum]: [Tokens<E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let &Room { factors, spare, .. } = room;
        let (q, means, scores) = (room.targets[0], room.results[1], room.scores[0]);
        let (shared, scales) = (self.head / job.shared, self.scales());
        let mut known = [[[E::splat(simd, E::default()); 2]; COLUMNS]; GROUPS];
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (number, group) in self.groups::<S>() {
                let (queries, q) = ((&job.queries, scales[0]), q.of(number));
                group.load_operands::<S, P>(simd, registers, queries, spare, q);
                group.load(simd, &output, self.head, 1.0, means.of(number));
                for (vector, known) in known[number].iter_mut().enumerate() {
                    *known =
                        [most, sum].map(|tokens| group.number::<S>(&tokens, self.head, vector));
                }
            }
            for block in self.blocks() {
                let (keys, values) = ((&job.keys, shared), (&job.values, shared));
                let [of_keys, of_values] = [[true, false], [false, true]];
                let [to_keys, to_values] = room.blocks;
                let keys = self.copied::<S, P>(simd, registers, keys, &block, to_keys, of_keys);
                let values =
                    self.copied::<S, P>(simd, registers, values, &block, to_values, of_values);
                for (number, group) in self.groups::<S>() {
                    let block = group.within(&block, registers.is_some());
                    if block.is_empty() {
                        continue;
                    }
                    let (q, means) = (q.of(number), means.of(number));
                    let q = (q, scales[1]);
                    group.scores::<S, P>(simd, q, keys, &block, scores);
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
                    let weights = (scores, factors);
                    group.weighted::<S, P>(simd, weights, values, &block, means);
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

    /// Adds to the requested gradients of queries, keys and values.
    ///
    /// # Safety
    /// There must be room, and all tokens must be readable.
    #[inline(always)]
    pub(super) unsafe fn gradients<S: Simd, P: Products<E, Number = E>>(
        &self,
        simd: S,
        registers: &Registers,
        room: &Room<E>,
        from: Backward<E>,
        [query, key, value]: [Option<Tokens<E>>; 3],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let &Room {
            targets: [k, v],
            results: [of_keys, of_values],
            scores: [scores, slopes],
            factors,
            spare,
            queries: sums,
            keys,
            turned,
            ..
        } = room;
        let (scale, scales) = (E::splat(simd, E::from_f64(job.scale)), self.scales());
        let pitch = sums.pitch;
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (number, group) in self.groups::<S>() {
                let operands = [(&job.keys, scales[0], k), (&job.values, 1.0, v)];
                for (tokens, scale, to) in operands {
                    let (tokens, to) = ((tokens, scale), to.of(number));
                    group.load_operands::<S, P>(simd, registers, tokens, spare, to);
                }
                for (gradient, sums) in [(&key, of_keys), (&value, of_values)] {
                    if let Some(gradient) = gradient {
                        group.load(simd, gradient, self.head, 1.0, sums.of(number));
                    }
                }
                if query.is_some() && registers.is_some() {
                    let to = keys.first.add(number * keys.pitch);
                    group.load_panels::<S, P>(simd, &job.keys, to);
                }
            }
            if query.is_some() && registers.is_none() {
                for (row, token) in self.targets.clone().enumerate() {
                    let key = job.keys.at(self.batch, token, self.head);
                    let row = keys.first.add(row * pitch);
                    std::ptr::copy_nonoverlapping(key, row, job.keys.width);
                    row.add(job.keys.width)
                        .write_bytes(0, pitch - job.keys.width);
                }
            }
            for turn in 0..job.shared {
                let head = self.head * job.shared + turn;
                for block in self.blocks() {
                    let (of, wanted) = ((&job.queries, head), [true, key.is_some()]);
                    let queries =
                        self.copied::<S, P>(simd, registers, of, &block, room.blocks[0], wanted);
                    let (of, wanted) = ((&from.cotangent, head), [true, value.is_some()]);
                    let cotangents =
                        self.copied::<S, P>(simd, registers, of, &block, room.blocks[1], wanted);
                    if query.is_some() {
                        sums.first.write_bytes(0, block.len() * pitch);
                    }
                    for (number, group) in self.groups::<S>() {
                        let reached = group.within(&block, registers.is_some());
                        if reached.is_empty() {
                            continue;
                        }
                        let (k, v) = ((k.of(number), scales[1]), (v.of(number), 1.0));
                        group.scores::<S, P>(simd, k, queries, &reached, scores);
                        group.complete(simd, head, &reached, scores);
                        group.scores::<S, P>(simd, v, cotangents, &reached, slopes);
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
                        if const { matrices_multiply::<S, E, P>() }
                            && query.is_some()
                            && let Some(registers) = registers
                        {
                            group.clear_beyond::<S>(slopes, reached.len());
                            let slopes = (slopes, reached.len(), turned);
                            let keys = keys.first.add(number * keys.pitch);
                            let keys = (keys, job.keys.width);
                            group.add_combined::<S, P>(simd, registers, slopes, keys, sums);
                        } else if query.is_some() {
                            let before = group.targets.start - self.targets.start;
                            let to = sums.first.add((reached.start - block.start) * pitch);
                            for vector in 0..group.vectors::<S>() {
                                simd.vectorize(Combined(Sums {
                                    a: Factors::new(slopes.at(vector), lanes),
                                    rows: reached.len(),
                                    b: keys.first.add((before + vector * lanes) * pitch),
                                    width: pitch,
                                    steps: group.lanes::<S>(vector).len(),
                                    from: (to, pitch),
                                    to: (to, pitch),
                                }));
                            }
                        }
                        if key.is_some() {
                            let (weights, to) = ((slopes, factors), of_keys.of(number));
                            group.weighted::<S, P>(simd, weights, queries, &reached, to);
                        }
                        if value.is_some() {
                            group.drop::<S>(head, &reached, scores);
                            let (weights, to) = ((scores, factors), of_values.of(number));
                            group.weighted::<S, P>(simd, weights, cotangents, &reached, to);
                        }
                    }
                    if let Some(gradient) = &query {
                        for (row, token) in block.enumerate() {
                            let to = gradient.at(self.batch, token, head);
                            let sums = sums.first.add(row * pitch);
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
