//! Transposition of square blocks of elements, by shuffles where the instruction set has them; and
//! packing of rows of a tensor for kernels: one vector per element, one row per lane.

use pulp::Simd;

use crate::kernel::lanes::WIDEST;
use crate::kernel::simd::{Element, has_shuffles};

/// Writes element `i` of run `j` to element `j` of run `i`, multiplying each run by `factors` if
/// given, else copying bits. Runs are one vector long.
///
/// # Safety
/// [`has_shuffles`](crate::kernel::simd::has_shuffles) must be true; there must be as many runs as
/// lanes, and room for as many results.
#[inline(always)]
pub(crate) unsafe fn transpose<S: Simd, E: Element>(
    from: impl Fn(usize) -> *const E,
    factors: Option<E::Vector<S>>,
    to: impl Fn(usize) -> *mut E,
) {
    #[cfg(target_arch = "x86_64")]
    {
        let mut numbers = [E::default(); WIDEST];
        let from = |run: usize| from(run).cast::<f32>();
        let to = |run: usize| to(run).cast::<f32>();
        // SAFETY: no vector is wider. For the calls: elements are f32 and the instruction set is
        // available, as the caller checked; the rest is guaranteed by the caller.
        unsafe {
            if let Some(factors) = factors {
                E::store::<S>(numbers.as_mut_ptr(), factors);
            }
            let factors = factors.map(|_| numbers.as_ptr().cast::<f32>());
            match E::lanes::<S>() {
                8 => x86::eight(from, factors, to),
                _ => x86::sixteen(from, factors, to),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (from, factors, to);
        unreachable!("no shuffles");
    }
}

/// Writes rows of `width` elements as vectors, one per element and `pitch` elements apart, times a
/// factor. Lanes without a row hold zeros.
///
/// # Safety
/// The rows must have `width` elements, and `to` must have room for `width` vectors.
#[inline(always)]
pub(crate) unsafe fn pack<S: Simd, E: Element>(
    simd: S,
    rows: &[*const E],
    width: usize,
    factor: E,
    (to, pitch): (*mut E, usize),
) {
    let lanes = E::lanes::<S>();
    let mut start = 0;
    if has_shuffles::<S, E>() {
        let nothing = [E::default(); WIDEST];
        let mut from = [nothing.as_ptr(); WIDEST];
        from[..rows.len()].copy_from_slice(rows);
        while start + lanes <= width {
            let vector = |element: usize| to.wrapping_add((start + element) * pitch);
            // SAFETY: the rows have these elements, and `to` has room for these vectors.
            unsafe {
                transpose::<S, E>(|lane| from[lane], Some(E::splat(simd, factor)), vector);
            }
            for row in &mut from[..rows.len()] {
                *row = row.wrapping_add(lanes);
            }
            start += lanes;
        }
    }
    for lane in 0..lanes {
        for element in start..width {
            let value = match rows.get(lane) {
                // SAFETY: the row has `width` elements.
                Some(row) => unsafe { *row.add(element) * factor },
                None => E::default(),
            };
            // SAFETY: there is room for `width` vectors.
            unsafe { *to.add(element * pitch + lane) = value };
        }
    }
}

/// Writes vectors, one per element, as rows of `width` elements, times a factor. Some of the
/// vectors are scaled in place.
///
/// # Safety
/// There must be `width` vectors, and room for as many elements in each row; nothing else may
/// access either meanwhile.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Simd, E: Element>(
    simd: S,
    from: *mut E,
    width: usize,
    factor: E::Vector<S>,
    rows: &[*mut E],
) {
    let lanes = E::lanes::<S>();
    let mut start = 0;
    if has_shuffles::<S, E>() {
        let mut nowhere = [E::default(); WIDEST];
        let mut to = [nowhere.as_mut_ptr(); WIDEST];
        to[..rows.len()].copy_from_slice(rows);
        while start + lanes <= width {
            let vector = |element: usize| from.wrapping_add((start + element) * lanes).cast_const();
            // SAFETY: there are these vectors, and room for their elements in each row.
            unsafe { transpose::<S, E>(vector, Some(factor), |lane| to[lane]) };
            for row in &mut to[..rows.len()] {
                *row = row.wrapping_add(lanes);
            }
            start += lanes;
        }
    }
    // SAFETY: there are `width` vectors, and room for as many elements in each row; nothing else
    // accesses them.
    unsafe {
        for element in start..width {
            let vector = from.add(element * lanes);
            E::store::<S>(vector, E::times(simd, E::load::<S>(vector), factor));
        }
        for (lane, row) in rows.iter().enumerate() {
            for element in start..width {
                *row.add(element) = *from.add(element * lanes + lane);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    // Loops, not `map` and `from_fn`, which are compiled without the vector instructions, so that
    // closures over vectors remain calls.

    /// Eight runs of eight.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn eight(
        from: impl Fn(usize) -> *const f32,
        factors: Option<*const f32>,
        to: impl Fn(usize) -> *mut f32,
    ) {
        // SAFETY: the caller guarantees eight runs of eight elements each.
        unsafe {
            let zero = _mm256_setzero_ps();
            let mut runs = [zero; 8];
            for (run, row) in runs.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(from(run));
            }
            if let Some(factors) = factors {
                let factors = _mm256_loadu_ps(factors);
                for row in &mut runs {
                    *row = _mm256_mul_ps(*row, factors);
                }
            }
            // Pairs of runs, then quarters, then halves.
            let mut pairs = [[zero; 2]; 4];
            for (pair, both) in pairs.iter_mut().enumerate() {
                let (one, other) = (runs[2 * pair], runs[2 * pair + 1]);
                *both = [
                    _mm256_unpacklo_ps(one, other),
                    _mm256_unpackhi_ps(one, other),
                ];
            }
            let mut fours = [[zero; 4]; 2];
            for (four, all) in fours.iter_mut().enumerate() {
                let ([a, b], [c, d]) = (pairs[2 * four], pairs[2 * four + 1]);
                *all = [
                    _mm256_shuffle_ps::<0x44>(a, c),
                    _mm256_shuffle_ps::<0xee>(a, c),
                    _mm256_shuffle_ps::<0x44>(b, d),
                    _mm256_shuffle_ps::<0xee>(b, d),
                ];
            }
            let [lower, upper] = fours;
            for (run, (low, high)) in lower.into_iter().zip(upper).enumerate() {
                _mm256_storeu_ps(to(run), _mm256_permute2f128_ps::<0x20>(low, high));
                _mm256_storeu_ps(to(run + 4), _mm256_permute2f128_ps::<0x31>(low, high));
            }
        }
    }

    /// Sixteen runs of sixteen.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn sixteen(
        from: impl Fn(usize) -> *const f32,
        factors: Option<*const f32>,
        to: impl Fn(usize) -> *mut f32,
    ) {
        // SAFETY: the caller guarantees sixteen runs of sixteen elements each.
        unsafe {
            let zero = _mm512_setzero_ps();
            let mut runs = [zero; 16];
            for (run, row) in runs.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from(run));
            }
            if let Some(factors) = factors {
                let factors = _mm512_loadu_ps(factors);
                for row in &mut runs {
                    *row = _mm512_mul_ps(*row, factors);
                }
            }
            let mut pairs = [[_mm512_setzero_pd(); 2]; 8];
            for (pair, both) in pairs.iter_mut().enumerate() {
                let (one, other) = (runs[2 * pair], runs[2 * pair + 1]);
                *both = [
                    _mm512_castps_pd(_mm512_unpacklo_ps(one, other)),
                    _mm512_castps_pd(_mm512_unpackhi_ps(one, other)),
                ];
            }
            let mut fours = [[zero; 4]; 4];
            for (four, all) in fours.iter_mut().enumerate() {
                let ([a, b], [c, d]) = (pairs[2 * four], pairs[2 * four + 1]);
                *all = [
                    _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)),
                    _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)),
                ];
            }
            for run in [0, 1, 2, 3] {
                let [a, b, c, d] = [fours[0][run], fours[1][run], fours[2][run], fours[3][run]];
                // First and third quarter of each four runs, then second and fourth.
                let low = [
                    _mm512_shuffle_f32x4::<0x88>(a, b),
                    _mm512_shuffle_f32x4::<0x88>(c, d),
                ];
                let high = [
                    _mm512_shuffle_f32x4::<0xdd>(a, b),
                    _mm512_shuffle_f32x4::<0xdd>(c, d),
                ];
                for (place, [one, other]) in [(run, low), (run + 4, high)] {
                    let first = _mm512_shuffle_f32x4::<0x88>(one, other);
                    let second = _mm512_shuffle_f32x4::<0xdd>(one, other);
                    _mm512_storeu_ps(to(place), first);
                    _mm512_storeu_ps(to(place + 8), second);
                }
            }
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

        fn with_simd<S: Simd>(self, simd: S) {
            if !has_shuffles::<S, f32>() {
                return;
            }
            let lanes = f32::lanes::<S>();
            let from: Vec<f32> = (0..lanes * lanes).map(|index| index as f32).collect();
            let mut to = vec![0.0_f32; lanes * lanes];
            let first = to.as_mut_ptr();
            let run = |run: usize| from[run * lanes..].as_ptr();
            let room = |run: usize| first.wrapping_add(run * lanes);
            // SAFETY: as many runs, and room for as many, as there are lanes.
            unsafe { transpose::<S, f32>(run, Some(f32::splat(simd, 2.0)), room) };
            for row in 0..lanes {
                for column in 0..lanes {
                    let expected = 2.0 * from[column * lanes + row];
                    assert_eq!(to[row * lanes + column], expected, "{row} {column}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_transposed() {
        Isa::available().into_iter().for_each(|isa| isa.run(Check));
    }
}
