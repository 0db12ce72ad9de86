//! Results for the queries of tiles.

use pulp::Simd;

use super::sources::Operand;
use super::task::{Ahead, Part, Room, Task, pack_targets};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::rows::Rows;
use crate::kernel::lanes::WIDEST;
use crate::kernel::lines::by_lane;
use crate::kernel::math;
use crate::kernel::simd::Element;

impl<E: Element> Task<'_, E> {
    /// Computes weighted means of values, and the logarithms of the sums of exponentials.
    ///
    /// # Safety
    /// The room must be large enough, and all positions of tiles must lie in the fields.
    #[inline(always)]
    pub(super) unsafe fn forward<S: Simd>(
        &self,
        simd: S,
        room: &mut Room<'_, E>,
        most: usize,
        output: &Rows<'_, E>,
        lse: &Rows<'_, E>,
    ) {
        let (job, lanes) = (self.job, E::lanes::<S>());
        let [key, value] = job.widths;
        let q = room.packed(TARGETS, key, lanes);
        let k = self.reached(room, Operand::Key, lanes);
        let v = self.reached(room, Operand::Value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let means = room.packed(TARGETS, value, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        let one = E::splat(simd, E::from_f64(1.0));
        let [keys, values] = [(&job.keys, key), (&job.values, value)]
            .map(|rows| self.located(rows, Part::Sources, shared));
        let [queries, output, lse] = [(&job.queries, key), (output, value), (lse, 1)]
            .map(|rows| self.located(rows, Part::Targets, own));
        let rows: [&[_]; 2] = [&[&keys, &values], &[&queries, &output]];
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
                    for segment in &group.segments {
                        self.scores(simd, (turn, segment), q, &k, scores);
                        ahead.ask();
                    }
                    let mut scales = [one; TARGETS];
                    for (member, &number) in group.targets.iter().enumerate() {
                        let [most, sum] =
                            softmax::<S, E>(simd, scores.at(member), group.counts[member]);
                        scales[member] = E::over(simd, one, sum);
                        let logarithm = E::plus(simd, most, by_lane::<S, E>(simd, sum, E::ln));
                        let mut numbers = [E::default(); WIDEST];
                        E::store::<S>(numbers.as_mut_ptr(), logarithm);
                        for (number, row) in numbers.iter().zip(lse.at(turn, number).rows()) {
                            **row = *number;
                        }
                        ahead.ask();
                    }
                    let pairs = (scores, &v);
                    let to = (means, &output);
                    self.write_sums(simd, (turn, group), pairs, scales, to, &mut ahead);
                }
            }
        }
    }
}

/// Replaces scores by their exponentials relative to the largest; returns the largest and their
/// sum.
#[inline(always)]
unsafe fn softmax<S: Simd, E: Element>(simd: S, scores: *mut E, count: usize) -> [E::Vector<S>; 2] {
    let lanes = E::lanes::<S>();
    // SAFETY: the caller guarantees this number of vectors.
    unsafe {
        let larger = |one, other| E::select_less(simd, [one, other], other, one);
        // Several, so that comparisons need not wait for each other.
        let mut largest = [E::load::<S>(scores); 4];
        for start in (0..count).step_by(largest.len()) {
            for (index, most) in largest.iter_mut().enumerate() {
                let source = (start + index).min(count - 1);
                *most = larger(*most, E::load::<S>(scores.add(source * lanes)));
            }
        }
        let [a, b, c, d] = largest;
        let most = larger(larger(a, b), larger(c, d));
        let mut sum = E::splat(simd, E::default());
        for source in 0..count {
            let at = scores.add(source * lanes);
            let weight = math::exp::<S, E>(simd, E::minus(simd, E::load::<S>(at), most));
            sum = E::plus(simd, sum, weight);
            E::store::<S>(at, weight);
        }
        [most, sum]
    }
}
