//! Terms that depend on a pair of query and key, apart from their product: bias, causal order,
//! dropout.

use std::ops::Range;

use halocline_core::Distribution;
use pulp::Simd;

use super::job::Results;
use super::room::Runs;
use super::task::Task;
use crate::kernel::lanes::WIDEST;
use crate::kernel::simd::Element;

impl<E: Element> Task<'_, E> {
    fn targets_are_keys(&self) -> bool {
        matches!(self.job.results, Results::Gradients { .. })
    }

    /// The pair of a target and a source.
    fn pair(&self, head: usize, target: usize, source: usize) -> [usize; 4] {
        if self.targets_are_keys() {
            [self.batch, source, head, target]
        } else {
            [self.batch, target, head, source]
        }
    }

    /// Adds the bias to the scores of a head's queries, and sets excluded scores to minus infinity.
    ///
    /// # Safety
    /// There must be a vector of scores for each source.
    #[inline(always)]
    pub(super) unsafe fn complete<S: Simd>(
        &self,
        simd: S,
        head: usize,
        block: &Range<usize>,
        scores: Runs<E>,
    ) {
        if let Some(bias) = &self.job.bias {
            for vector in 0..self.vectors::<S>() {
                for (source, place) in block.clone().enumerate() {
                    let mut numbers = [E::default(); WIDEST];
                    for (number, target) in numbers.iter_mut().zip(self.lanes::<S>(vector)) {
                        // SAFETY: the pair exists.
                        *number = unsafe { bias.at(self.pair(head, target, place)) };
                    }
                    // SAFETY: guaranteed by the caller, and no vector is wider.
                    unsafe {
                        let at = scores.at(vector).add(source * E::lanes::<S>());
                        let sum = E::plus(simd, E::load::<S>(at), E::load::<S>(numbers.as_ptr()));
                        E::store::<S>(at, sum);
                    }
                }
            }
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.mask(simd, block, scores) };
    }

    /// Sets the values of dropped pairs to zero, and divides the others by the probability of being
    /// kept.
    ///
    /// # Safety
    /// There must be a vector of values for each source.
    #[inline(always)]
    pub(super) unsafe fn drop<S: Simd>(&self, head: usize, block: &Range<usize>, values: Runs<E>) {
        let Some(dropout) = &self.job.dropout else {
            return;
        };
        let probability = 1.0 - dropout.probability;
        let (coin, factor) = (Distribution::Bernoulli(probability), 1.0 / probability);
        let scaled = |stays: f32| E::from_f64(f64::from(stays) * factor);
        // A counter yields four numbers, which adjacent keys share.
        let mut known = None;
        let mut stays = |pair: [usize; 4]| {
            let number = dropout.number(pair);
            let four = match known {
                Some((block, four)) if block == number / 4 => four,
                _ => dropout.key.four(coin, (number / 4) as u64),
            };
            known = Some((number / 4, four));
            scaled(four[number % 4])
        };
        let lanes = E::lanes::<S>();
        for vector in 0..self.vectors::<S>() {
            let mut multiply = |source: usize, lane: usize, target: usize| {
                let factor = stays(self.pair(head, target, block.start + source));
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let at = values.at(vector).add(source * lanes + lane);
                    *at = *at * factor;
                }
            };
            // Keys are the inner loop.
            if self.targets_are_keys() {
                for source in 0..block.len() {
                    for (lane, target) in self.lanes::<S>(vector).enumerate() {
                        multiply(source, lane, target);
                    }
                }
            } else {
                for (lane, target) in self.lanes::<S>(vector).enumerate() {
                    for source in 0..block.len() {
                        multiply(source, lane, target);
                    }
                }
            }
        }
    }

    /// Sets excluded scores to minus infinity.
    #[inline(always)]
    unsafe fn mask<S: Simd>(&self, simd: S, block: &Range<usize>, scores: Runs<E>) {
        let Some([query, key]) = self.job.causal else {
            return;
        };
        let keys = self.targets_are_keys();
        // Last position of a key, and first position of a query.
        let (last, first) = if keys {
            (key + self.targets.end - 1, query + block.start)
        } else {
            (key + block.end - 1, query + self.targets.start)
        };
        if last <= first {
            return;
        }
        let lowest = E::splat(simd, E::from_f64(f64::NEG_INFINITY));
        for vector in 0..self.vectors::<S>() {
            let start = self.lanes::<S>(vector).start as i64 - block.start as i64;
            for source in 0..block.len() {
                // Position of each lane's query less that of its key.
                let ahead = std::array::from_fn::<E, WIDEST, _>(|lane| {
                    let target = start + lane as i64 - source as i64;
                    let place = query as i64 - key as i64;
                    E::from_f64(if keys { place - target } else { place + target } as f64)
                });
                // SAFETY: there is a vector for each source.
                unsafe {
                    let at = scores.at(vector).add(source * E::lanes::<S>());
                    let pair = [E::load::<S>(ahead.as_ptr()), E::splat(simd, E::default())];
                    E::store::<S>(at, E::select_less(simd, pair, lowest, E::load::<S>(at)));
                }
            }
        }
    }
}
