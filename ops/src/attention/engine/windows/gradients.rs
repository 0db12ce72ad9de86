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
        let q = room.packed(targets, key, lanes);
        let g = room.packed(targets, value, lanes);
        let k = self.reached(room, key, lanes);
        let v = self.reached(room, value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let result = room.packed(TARGETS, key, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, q, job.scale, &job.queries, own);
            self.pack(simd, g, 1.0, &from.cotangent, own);
            self.pack_sources(simd, &k, 1.0, &job.keys, shared);
            self.pack_sources(simd, &v, 1.0, &job.values, shared);
        }
        let zero = E::splat(simd, E::default());
        let scale = E::splat(simd, E::from_f64(job.scale));
        for group in &self.class.groups {
            // SAFETY: all is within the packed operands.
            unsafe {
                for segment in &group.segments {
                    self.scores(simd, group, segment, q, &k, scores);
                    self.scores(simd, group, segment, g, &v, slopes);
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
                    self.weighted(simd, segment, scores, &k, |member| result.at(member));
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let to = self.target(gradient, number, own);
                    unpack(simd, result.at(member), key, scale, to.rows());
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
        let k = room.packed(targets, key, lanes);
        let v = room.packed(targets, value, lanes);
        let results = [key, value].map(|width| room.packed(targets, width, lanes));
        let q = self.reached(room, key, lanes);
        let g = self.reached(room, value, lanes);
        let numbers = [(); 2].map(|()| self.reached(room, 1, lanes));
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let (zero, one) = (
            E::splat(simd, E::default()),
            E::splat(simd, E::from_f64(1.0)),
        );
        let own = |head: usize| head;
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, k, 1.0, &job.keys, own);
            self.pack(simd, v, 1.0, &job.values, own);
            for result in results {
                for vector in 0..targets * result.width {
                    E::store::<S>(result.first.add(vector * lanes), zero);
                }
            }
        }
        for turn in 0..job.shared {
            let head = |head: usize| head * job.shared + turn;
            // SAFETY: all is within the packed operands.
            unsafe {
                self.pack_sources(simd, &q, job.scale, &job.queries, head);
                self.pack_sources(simd, &g, 1.0, &from.cotangent, head);
                for (to, rows) in numbers.iter().zip([&from.lse, &from.products]) {
                    self.pack_sources(simd, to, 1.0, rows, head);
                }
                for group in &self.class.groups {
                    for segment in &group.segments {
                        self.scores(simd, group, segment, k, &q, scores);
                        self.scores(simd, group, segment, v, &g, slopes);
                        for member in segment.members.clone() {
                            let before = segment.before[member];
                            for (number, place) in segment.reached.clone().enumerate() {
                                let offset = (before + number) * lanes;
                                let pair =
                                    [scores.at(member).add(offset), slopes.at(member).add(offset)];
                                let known = [0, 1]
                                    .map(|which: usize| E::load::<S>(numbers[which].at(place)));
                                let [score, weight] = weights::<S, E>(simd, pair, known);
                                E::store::<S>(pair[0], score);
                                E::store::<S>(pair[1], weight);
                            }
                        }
                        let result = |which: usize| {
                            let results: Packed<E> = results[which];
                            move |member: usize| results.at(group.targets[member])
                        };
                        self.weighted(simd, segment, slopes, &q, result(0));
                        self.weighted(simd, segment, scores, &g, result(1));
                    }
                }
            }
        }
        for (gradient, result) in gradients.into_iter().zip(results) {
            for number in 0..targets {
                let to = self.target(gradient, number, own);
                // SAFETY: as above.
                unsafe { unpack(simd, result.at(number), result.width, one, to.rows()) };
            }
        }
    }
}
