//! Gradients of the queries of tiles, or of their keys and values.

use pulp::Simd;

use super::job::Backward;
use super::sources::Operand;
use super::task::{Ahead, Part, Room, Task, pack_targets};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::rows::Rows;
use crate::attention::engine::weights::weights;
use crate::kernel::simd::Element;
use crate::kernel::transpose::unpack;

impl<E: Element> Task<'_, E> {
    /// Computes the gradients of queries.
    ///
    /// # Safety
    /// The room must be large enough, and all positions of tiles must lie in the fields.
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
        let k = self.reached(room, Operand::Key, lanes);
        let v = self.reached(room, Operand::Value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let result = room.packed(TARGETS, key, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        let scales = [E::splat(simd, E::from_f64(job.scale)); TARGETS];
        let [keys, values] = [(&job.keys, key), (&job.values, value)]
            .map(|rows| self.located(rows, Part::Sources, shared));
        let [queries, cotangent, gradient, lses, products] = [
            (&job.queries, key),
            (&from.cotangent, value),
            (gradient, key),
            (&from.lse, 1),
            (&from.products, 1),
        ]
        .map(|rows| self.located(rows, Part::Targets, own));
        let rows: [&[_]; 2] = [&[&keys, &values], &[&queries, &cotangent, &gradient]];
        let (turns, groups) = (self.turns(), &self.class.groups);
        let mut ahead = Ahead::new();
        ahead.begin(groups.first(), rows, 1);
        ahead.ask();
        for (index, group) in groups.iter().enumerate() {
            let calls = turns * (2 * group.segments.len() + group.targets.len());
            ahead.begin(groups.get(index + 1), rows, calls);
            // SAFETY: guaranteed by the caller.
            unsafe {
                self.pack_sources(simd, group, &k, 1.0, &keys);
                self.pack_sources(simd, group, &v, 1.0, &values);
            }
            for turn in 0..turns {
                // SAFETY: everything is within the packed operands.
                unsafe {
                    pack_targets(simd, (turn, group), q, job.scale, &queries);
                    pack_targets(simd, (turn, group), g, 1.0, &cotangent);
                    for segment in &group.segments {
                        self.scores(simd, (turn, segment), q, &k, scores);
                        self.scores(simd, (turn, segment), g, &v, slopes);
                        ahead.ask();
                    }
                    for (member, &number) in group.targets.iter().enumerate() {
                        let lse = self.gather::<S>(lses.at(turn, number));
                        let product = self.gather::<S>(products.at(turn, number));
                        for source in 0..group.counts[member] {
                            let score = scores.at(member).add(source * lanes);
                            let slope = slopes.at(member).add(source * lanes);
                            let [_, weight] = weights::<S, E>(simd, [score, slope], [lse, product]);
                            E::store::<S>(score, weight);
                        }
                        ahead.ask();
                    }
                    let pairs = (scores, &k);
                    let to = (result, &gradient);
                    self.write_sums(simd, (turn, group), pairs, scales, to, &mut ahead);
                }
            }
        }
    }

    /// Computes the gradients of keys and values.
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
        let turns = self.turns();
        let k = room.packed(TARGETS, key, lanes);
        let v = room.packed(TARGETS, value, lanes);
        let results = [key, value].map(|width| room.packed(self.kept(), width, lanes));
        let q = self.reached(room, Operand::Key, lanes);
        let g = self.reached(room, Operand::Value, lanes);
        let numbers = [(); 2].map(|()| self.reached(room, Operand::Number, lanes));
        let scores = room.packed(TARGETS, most, lanes);
        let slopes = room.packed(TARGETS, most, lanes);
        let one = E::splat(simd, E::from_f64(1.0));
        let own = |head: usize| head;
        let [keys, values] = [(&job.keys, key), (&job.values, value)]
            .map(|rows| self.located(rows, Part::Targets, own));
        let [key_gradient, value_gradient] = gradients;
        let gradients = [(key_gradient, key), (value_gradient, value)]
            .map(|rows| self.located(rows, Part::Targets, own));
        let groups = &self.class.groups;
        for query in 0..job.shared {
            let head = |head: usize| head * job.shared + query;
            let [queries, cotangent, lses, products] = [
                (&job.queries, key),
                (&from.cotangent, value),
                (&from.lse, 1),
                (&from.products, 1),
            ]
            .map(|rows| self.located(rows, Part::Sources, head));
            let rows: [&[_]; 2] = [
                &[&queries, &cotangent, &lses, &products],
                &[&keys, &values, &gradients[0], &gradients[1]],
            ];
            let mut ahead = Ahead::new();
            ahead.begin(groups.first(), rows, 1);
            ahead.ask();
            for (index, group) in groups.iter().enumerate() {
                let calls = turns * 3 * group.segments.len();
                ahead.begin(groups.get(index + 1), rows, calls);
                // SAFETY: guaranteed by the caller.
                unsafe {
                    self.pack_sources(simd, group, &q, job.scale, &queries);
                    self.pack_sources(simd, group, &g, 1.0, &cotangent);
                    self.pack_sources(simd, group, &numbers[0], 1.0, &lses);
                    self.pack_sources(simd, group, &numbers[1], 1.0, &products);
                }
                for turn in 0..turns {
                    let place = |member: usize| match job.shared {
                        1 => member,
                        _ => turn * self.targets() + group.targets[member],
                    };
                    let members = 0..group.targets.len();
                    // SAFETY: everything is within the packed operands.
                    unsafe {
                        pack_targets(simd, (turn, group), k, 1.0, &keys);
                        pack_targets(simd, (turn, group), v, 1.0, &values);
                        if query == 0 {
                            for result in results {
                                for member in members.clone() {
                                    result.clear(simd, place(member));
                                }
                            }
                        }
                        for segment in &group.segments {
                            self.scores(simd, (turn, segment), k, &q, scores);
                            self.scores(simd, (turn, segment), v, &g, slopes);
                            ahead.ask();
                            for member in segment.members.clone() {
                                let before = segment.before[member];
                                for (number, place) in segment.reached.clone().enumerate() {
                                    let offset = (before + number) * lanes;
                                    let pair = [scores, slopes]
                                        .map(|packed| packed.at(member).add(offset));
                                    let known = numbers
                                        .each_ref()
                                        .map(|known| E::load::<S>(known.at(turn, place)));
                                    let [score, weight] = weights::<S, E>(simd, pair, known);
                                    E::store::<S>(pair[0], score);
                                    E::store::<S>(pair[1], weight);
                                }
                            }
                            for ((weights, sources), result) in
                                [(slopes, &q), (scores, &g)].into_iter().zip(results)
                            {
                                let result = |member| result.at(place(member));
                                self.weighted(simd, (turn, segment), weights, sources, result);
                                ahead.ask();
                            }
                        }
                        if query + 1 == job.shared {
                            for (gradient, result) in gradients.iter().zip(results) {
                                for member in members.clone() {
                                    let to = gradient.at(turn, group.targets[member]);
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
}
