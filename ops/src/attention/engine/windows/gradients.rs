//! Gradients of the queries of tiles, or of their keys and values.

use pulp::Simd;

use super::job::Backward;
use super::task::{Packed, Room, Task};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::lanes::{unpack, weights};
use crate::attention::engine::rows::Rows;
use crate::kernel::simd::Element;

impl<E: Element> Task<'_, E> {
    /// Gradients of queries.
    ///
    /// # Safety
    /// The room must be enough, and all places of tiles in the fields.
    #[inline(always)]
    pub(super) unsafe fn query_gradients<S: Simd>(
        &self,
        simd: S,
        room: &mut Room<'_, E>,
        most: usize,
        from: &Backward<'_, E>,
        gradient: &Rows<'_, E>,
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [key, value] = job.widths;
        let targets: usize = self.class.targets.iter().product();
        let sources: usize = self.class.sources.iter().product();
        let q = room.packed(targets, key, lanes);
        let g = room.packed(targets, value, lanes);
        let k = room.packed(sources, key, lanes);
        let v = room.packed(sources, value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let result = room.packed(TARGETS, key, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, q, targets, job.scale, |number| {
                self.target(&job.queries, number, own)
            });
            self.pack(simd, g, targets, 1.0, |number| {
                self.target(&from.cotangent, number, own)
            });
            self.pack(simd, k, sources, 1.0, |number| {
                self.source(&job.keys, number, shared)
            });
            self.pack(simd, v, sources, 1.0, |number| {
                self.source(&job.values, number, shared)
            });
        }
        let (key_offsets, value_offsets) = (self.offsets(k), self.offsets(v));
        let zero = E::splat(simd, E::default());
        let scale = E::splat(simd, E::from_f64(job.scale));
        for group in &self.class.groups {
            // SAFETY: all is within the packed operands.
            unsafe {
                for segment in &group.segments {
                    let reached = segment.reached.clone();
                    self.scores(
                        simd,
                        group,
                        segment,
                        [q, k],
                        &key_offsets[reached.clone()],
                        scores,
                    );
                    self.scores(
                        simd,
                        group,
                        segment,
                        [g, v],
                        &value_offsets[reached],
                        slopes,
                    );
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let lse = self.gather::<S>(self.target(&from.lse, number, own));
                    let product = self.gather::<S>(self.target(&from.products, number, own));
                    for source in 0..group.counts[member] {
                        let score = scores.at(member).add(source * lanes);
                        let slope = slopes.at(member).add(source * lanes);
                        let [_, weight] = weights::<S, E>(simd, [score, slope], [lse, product]);
                        E::store::<S>(score, weight);
                    }
                    for element in 0..key {
                        E::store::<S>(result.at(member).add(element * lanes), zero);
                    }
                }
                for segment in &group.segments {
                    let offsets = &key_offsets[segment.reached.clone()];
                    self.weighted(simd, segment, [scores, k], offsets, |member| {
                        result.at(member)
                    });
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let rows = self.target(gradient, number, own);
                    unpack(
                        simd,
                        result.at(member),
                        key,
                        scale,
                        &rows[..self.places.len()],
                    );
                }
            }
        }
    }

    /// Gradients of keys and values.
    ///
    /// # Safety
    /// As for [`query_gradients`](Self::query_gradients).
    #[inline(always)]
    pub(super) unsafe fn key_gradients<S: Simd>(
        &self,
        simd: S,
        room: &mut Room<'_, E>,
        most: usize,
        from: &Backward<'_, E>,
        gradients: [&Rows<'_, E>; 2],
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [key, value] = job.widths;
        let targets: usize = self.class.targets.iter().product();
        let sources: usize = self.class.sources.iter().product();
        let k = room.packed(targets, key, lanes);
        let v = room.packed(targets, value, lanes);
        let results = [key, value].map(|width| room.packed(targets, width, lanes));
        let q = room.packed(sources, key, lanes);
        let g = room.packed(sources, value, lanes);
        let numbers = [
            room.packed(sources, 1, lanes),
            room.packed(sources, 1, lanes),
        ];
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let (zero, one) = (
            E::splat(simd, E::default()),
            E::splat(simd, E::from_f64(1.0)),
        );
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, k, targets, 1.0, |number| {
                self.target(&job.keys, number, |head| head)
            });
            self.pack(simd, v, targets, 1.0, |number| {
                self.target(&job.values, number, |head| head)
            });
            for result in results {
                for vector in 0..targets * result.width {
                    E::store::<S>(result.first.add(vector * lanes), zero);
                }
            }
        }
        let (query_offsets, cotangent_offsets) = (self.offsets(q), self.offsets(g));
        for turn in 0..job.shared {
            let head = |head: usize| head * job.shared + turn;
            // SAFETY: all is within the packed operands.
            unsafe {
                self.pack(simd, q, sources, job.scale, |number| {
                    self.source(&job.queries, number, head)
                });
                self.pack(simd, g, sources, 1.0, |number| {
                    self.source(&from.cotangent, number, head)
                });
                for (to, rows) in numbers.into_iter().zip([&from.lse, &from.products]) {
                    for number in 0..sources {
                        let vector = self.gather::<S>(self.source(rows, number, head));
                        E::store::<S>(to.at(number), vector);
                    }
                }
                for group in &self.class.groups {
                    for segment in &group.segments {
                        let reached = segment.reached.clone();
                        self.scores(
                            simd,
                            group,
                            segment,
                            [k, q],
                            &query_offsets[reached.clone()],
                            scores,
                        );
                        self.scores(
                            simd,
                            group,
                            segment,
                            [v, g],
                            &cotangent_offsets[reached.clone()],
                            slopes,
                        );
                        for member in segment.members.clone() {
                            let before = segment.before[member];
                            for (place, &number) in
                                self.class.reached[reached.clone()].iter().enumerate()
                            {
                                let offset = (before + place) * lanes;
                                let pair =
                                    [scores.at(member).add(offset), slopes.at(member).add(offset)];
                                let known = numbers.map(|numbers| E::load::<S>(numbers.at(number)));
                                let [score, weight] = weights::<S, E>(simd, pair, known);
                                E::store::<S>(pair[0], score);
                                E::store::<S>(pair[1], weight);
                            }
                        }
                        let result = |which: usize| {
                            let results: Packed<E> = results[which];
                            move |member: usize| results.at(group.targets[member])
                        };
                        let offsets = &query_offsets[reached.clone()];
                        self.weighted(simd, segment, [slopes, q], offsets, result(0));
                        let offsets = &cotangent_offsets[reached];
                        self.weighted(simd, segment, [scores, g], offsets, result(1));
                    }
                }
            }
        }
        for (gradient, result) in gradients.into_iter().zip(results) {
            for number in 0..targets {
                let rows = self.target(gradient, number, |head| head);
                // SAFETY: as above.
                unsafe {
                    unpack(
                        simd,
                        result.at(number),
                        result.width,
                        one,
                        &rows[..self.places.len()],
                    )
                };
            }
        }
    }
}
