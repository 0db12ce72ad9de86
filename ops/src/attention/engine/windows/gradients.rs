//! Gradients of the queries of tiles, or of their keys and values.

use pulp::Simd;

use super::job::Backward;
use super::task::{Part, Room, Task, fetch, pack_targets};
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
        let q = room.packed(TARGETS, key, lanes);
        let g = room.packed(TARGETS, value, lanes);
        let k = self.reached(room, key, lanes);
        let v = self.reached(room, value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let result = room.packed(TARGETS, key, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        // SAFETY: the caller's.
        unsafe {
            self.pack_sources(simd, &k, 1.0, &job.keys, shared);
            self.pack_sources(simd, &v, 1.0, &job.values, shared);
        }
        let zero = E::splat(simd, E::default());
        let scale = E::splat(simd, E::from_f64(job.scale));
        let [queries, cotangent, gradient, lses, products] = [
            &job.queries,
            &from.cotangent,
            gradient,
            &from.lse,
            &from.products,
        ]
        .map(|rows| self.located(rows, Part::Targets, own));
        let groups = &self.class.groups;
        for (index, group) in groups.iter().enumerate() {
            let next = groups.get(index + 1);
            fetch(next, key, &[&queries, &gradient]);
            fetch(next, value, &[&cotangent]);
            // SAFETY: all is within the packed operands.
            unsafe {
                pack_targets(simd, group, q, job.scale, &queries);
                pack_targets(simd, group, g, 1.0, &cotangent);
                for segment in &group.segments {
                    self.scores(simd, segment, q, &k, scores);
                    self.scores(simd, segment, g, &v, slopes);
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let lse = self.gather::<S>(lses.at(number));
                    let product = self.gather::<S>(products.at(number));
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
                    let to = gradient.at(number);
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
        let k = room.packed(TARGETS, key, lanes);
        let v = room.packed(TARGETS, value, lanes);
        let results = [key, value].map(|width| room.packed(self.kept(), width, lanes));
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
        let [keys, values] =
            [&job.keys, &job.values].map(|rows| self.located(rows, Part::Targets, own));
        let gradients = gradients.map(|rows| self.located(rows, Part::Targets, own));
        for turn in 0..job.shared {
            let head = |head: usize| head * job.shared + turn;
            // SAFETY: all is within the packed operands.
            unsafe {
                self.pack_sources(simd, &q, job.scale, &job.queries, head);
                self.pack_sources(simd, &g, 1.0, &from.cotangent, head);
                for (to, rows) in numbers.iter().zip([&from.lse, &from.products]) {
                    self.pack_sources(simd, to, 1.0, rows, head);
                }
                let groups = &self.class.groups;
                for (index, group) in groups.iter().enumerate() {
                    let next = groups.get(index + 1);
                    fetch(next, key, &[&keys, &gradients[0]]);
                    fetch(next, value, &[&values, &gradients[1]]);
                    pack_targets(simd, group, k, 1.0, &keys);
                    pack_targets(simd, group, v, 1.0, &values);
                    let place = |member: usize| match job.shared {
                        1 => member,
                        _ => group.targets[member],
                    };
                    let members = 0..group.targets.len();
                    if turn == 0 {
                        for result in results {
                            for member in members.clone() {
                                let first = result.at(place(member));
                                for element in 0..result.width {
                                    E::store::<S>(first.add(element * lanes), zero);
                                }
                            }
                        }
                    }
                    for segment in &group.segments {
                        self.scores(simd, segment, k, &q, scores);
                        self.scores(simd, segment, v, &g, slopes);
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
                        let [keys, values] = results;
                        self.weighted(simd, segment, slopes, &q, |member| keys.at(place(member)));
                        self.weighted(simd, segment, scores, &g, |member| values.at(place(member)));
                    }
                    if turn + 1 == job.shared {
                        for (gradient, result) in gradients.iter().zip(results) {
                            for member in members.clone() {
                                let to = gradient.at(group.targets[member]);
                                let from = result.at(place(member));
                                unpack(simd, from, result.width, one, to.rows());
                            }
                        }
                    }
                }
            }
        }
    }
}
