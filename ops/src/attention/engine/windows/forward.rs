//! Results of the queries of tiles.

use pulp::Simd;

use super::task::{Room, Task};
use crate::attention::engine::blocks::TARGETS;
use crate::attention::engine::lanes::unpack;
use crate::attention::engine::rows::Rows;
use crate::kernel::lanes::WIDEST;
use crate::kernel::math;
use crate::kernel::simd::Element;

impl<E: Element> Task<'_, E> {
    /// Weighted means of values, and the logarithms of the sums of exponentials.
    ///
    /// # Safety
    /// The room must be enough, and all places of tiles in the fields.
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
        let targets: usize = self.class.targets.iter().product();
        let q = room.packed(targets, key, lanes);
        let k = self.reached(room, key, lanes);
        let v = self.reached(room, value, lanes);
        let scores = room.packed(TARGETS, most, lanes);
        let means = room.packed(TARGETS, value, lanes);
        let (own, shared) = (|head: usize| head, |head: usize| head / job.shared);
        // SAFETY: the caller's.
        unsafe {
            self.pack(simd, q, job.scale, &job.queries, own);
            self.pack_sources(simd, &k, 1.0, &job.keys, shared);
            self.pack_sources(simd, &v, 1.0, &job.values, shared);
        }
        let zero = E::splat(simd, E::default());
        let one = E::splat(simd, E::from_f64(1.0));
        for group in &self.class.groups {
            // SAFETY: all is within the packed operands.
            unsafe {
                for segment in &group.segments {
                    self.scores(simd, group, segment, q, &k, scores);
                }
                let mut scales = [one; TARGETS];
                for (member, &number) in group.targets.iter().enumerate() {
                    let [most, sum] =
                        softmax::<S, E>(simd, scores.at(member), group.counts[member]);
                    scales[member] = E::over(simd, one, sum);
                    let numbers = [most, sum].map(|vector| {
                        let mut numbers = [E::default(); WIDEST];
                        E::store::<S>(numbers.as_mut_ptr(), vector);
                        numbers.map(E::to_f64)
                    });
                    let lanes_of = self.target(lse, number, own);
                    for (lane, row) in lanes_of.rows().iter().enumerate() {
                        **row = E::from_f64(numbers[0][lane] + numbers[1][lane].ln());
                    }
                    for element in 0..value {
                        E::store::<S>(means.at(member).add(element * lanes), zero);
                    }
                }
                for segment in &group.segments {
                    self.weighted(simd, segment, scores, &v, |member| means.at(member));
                }
                for (member, &number) in group.targets.iter().enumerate() {
                    let to = self.target(output, number, own);
                    unpack(simd, means.at(member), value, scales[member], to.rows());
                }
            }
        }
    }
}

/// Replaces scores by their exponentials, relative to the largest: gives that and their sum.
#[inline(always)]
unsafe fn softmax<S: Simd, E: Element>(simd: S, scores: *mut E, count: usize) -> [E::Vector<S>; 2] {
    let lanes = E::lanes::<S>();
    // SAFETY: the caller's: so many vectors.
    unsafe {
        let mut most = E::load::<S>(scores);
        for source in 1..count {
            let score = E::load::<S>(scores.add(source * lanes));
            most = E::select_less(simd, [most, score], score, most);
        }
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
