//! Interleaving of the lanes of two vectors, with shuffles if the instruction set has them.

use pulp::Simd;

use crate::kernel::simd::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernel::simd::has_shuffles;

/// Interleaves the lanes of two vectors: those of the first come at even positions.
#[inline(always)]
pub(crate) fn interleave<S: Simd, E: Element>(pair: [E::Vector<S>; 2]) -> [E::Vector<S>; 2] {
    let (lanes, mut turns) = (E::lanes::<S>(), pair);
    let (from, place) = (pair.as_ptr().cast::<E>(), turns.as_mut_ptr().cast::<E>());
    // SAFETY: both hold `2 · lanes` elements and no padding. For the shuffles: elements are f32 and
    // the instruction set is available.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if has_shuffles::<S, E>() {
            match lanes {
                8 => x86::interleave_eight(from.cast(), place.cast()),
                _ => x86::interleave_sixteen(from.cast(), place.cast()),
            }
            return turns;
        }
        for lane in 0..lanes {
            *place.add(2 * lane) = *from.add(lane);
            *place.add(2 * lane + 1) = *from.add(lanes + lane);
        }
    }
    turns
}

/// Separates the even and the odd lanes of two vectors: the inverse of [`interleave`].
#[inline(always)]
pub(crate) fn deinterleave<S: Simd, E: Element>(turns: [E::Vector<S>; 2]) -> [E::Vector<S>; 2] {
    let (lanes, mut pair) = (E::lanes::<S>(), turns);
    let (from, place) = (turns.as_ptr().cast::<E>(), pair.as_mut_ptr().cast::<E>());
    // SAFETY: as in `interleave`.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if has_shuffles::<S, E>() {
            match lanes {
                8 => x86::deinterleave_eight(from.cast(), place.cast()),
                _ => x86::deinterleave_sixteen(from.cast(), place.cast()),
            }
            return pair;
        }
        for lane in 0..lanes {
            *place.add(lane) = *from.add(2 * lane);
            *place.add(lanes + lane) = *from.add(2 * lane + 1);
        }
    }
    pair
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn interleave_eight(from: *const f32, to: *mut f32) {
        // SAFETY: the caller guarantees two vectors at both pointers.
        unsafe {
            let [a, b] = [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))];
            let [low, high] = [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)];
            _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(to.add(8), _mm256_permute2f128_ps::<0x31>(low, high));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn deinterleave_eight(from: *const f32, to: *mut f32) {
        // SAFETY: the caller guarantees two vectors at both pointers.
        unsafe {
            let [a, b] = [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))];
            // Halves of both, whose middle quarters are swapped.
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(a, b));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0xdd>(a, b));
            _mm256_storeu_ps(to, _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(even)));
            _mm256_storeu_ps(
                to.add(8),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(odd)),
            );
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn interleave_sixteen(from: *const f32, to: *mut f32) {
        // SAFETY: the caller guarantees two vectors at both pointers.
        unsafe {
            let [a, b] = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, low, b));
            _mm512_storeu_ps(to.add(16), _mm512_permutex2var_ps(a, high, b));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn deinterleave_sixteen(from: *const f32, to: *mut f32) {
        // SAFETY: the caller guarantees two vectors at both pointers.
        unsafe {
            let [a, b] = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, even, b));
            _mm512_storeu_ps(to.add(16), _mm512_permutex2var_ps(a, odd, b));
        }
    }
}

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::*;
    use crate::kernel::simd::Isa;

    struct Check;

    impl WithSimd for Check {
        type Output = ();

        fn with_simd<S: Simd>(self, _: S) {
            fn check<S: Simd, E: Element + std::fmt::Debug>() {
                let lanes = E::lanes::<S>();
                let number = |index: usize| E::from_f64(index as f64);
                let numbers: Vec<E> = (0..2 * lanes).map(number).collect();
                let first = numbers.as_ptr();
                // SAFETY: two vectors of values, and results of the same length.
                let (pair, of_results) = unsafe {
                    let pair = [E::load::<S>(first), E::load::<S>(first.add(lanes))];
                    (pair, |results: [E::Vector<S>; 2]| {
                        std::slice::from_raw_parts(results.as_ptr().cast::<E>(), 2 * lanes).to_vec()
                    })
                };
                let turns = interleave::<S, E>(pair);
                let expected: Vec<E> = (0..2 * lanes)
                    .map(|place| number(place / 2 + place % 2 * lanes))
                    .collect();
                assert_eq!(of_results(turns), expected);
                assert_eq!(of_results(deinterleave::<S, E>(turns)), numbers);
            }
            check::<S, f32>();
            check::<S, f64>();
        }
    }

    #[test]
    fn lanes_take_turns_and_are_parted_again() {
        Isa::available().into_iter().for_each(|isa| isa.run(Check));
    }
}
