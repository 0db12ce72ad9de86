//! Instructions of AVX-512 BF16, as inline assembly: a function with their target feature would not
//! be inlined into kernels, which are compiled without it. Casts use plain AVX-512.

use std::arch::asm;
use std::arch::x86_64::{
    __m256i, __m512, __m512i, _CMP_UNORD_Q, _mm256_loadu_si256, _mm256_storeu_si256,
    _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32, _mm512_mask_or_epi32,
    _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_sub_ps, _mm512_ternarylogic_epi32,
};

/// # Safety
/// 16 numbers must be readable.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn widen(from: *const __m256i) -> __m512 {
    // SAFETY: guaranteed by the caller.
    let numbers = unsafe { _mm256_loadu_si256(from) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers)))
}

/// Rounds to bf16, bit-identical to [`narrowed`](super::narrowed).
///
/// # Safety
/// 16 numbers must be writable.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn narrow(place: *mut __m256i, vector: __m512) {
    let bits = _mm512_castps_si512(vector);
    let upper = _mm512_srli_epi32::<16>(bits);
    let last = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
    let nearest = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
    let not_numbers = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(vector, vector);
    let quiet = _mm512_set1_epi32(0x40);
    let rounded = _mm512_mask_or_epi32(nearest, not_numbers, upper, quiet);
    // SAFETY: guaranteed by the caller.
    unsafe { _mm256_storeu_si256(place, _mm512_cvtepi32_epi16(rounded)) };
}

/// Splits numbers into pairs of bf16 numbers, each the nearest to the rest left by the previous
/// ones. The last takes the remaining bits, so that any NaN stays NaN.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn split(mut first: __m512, mut second: __m512) -> [__m512; 3] {
    let one = pair(take_nearest(&mut first), take_nearest(&mut second));
    let two = pair(take_nearest(&mut first), take_nearest(&mut second));
    let rest = pair(_mm512_castps_si512(first), _mm512_castps_si512(second));
    [one, two, rest]
}

/// Combines the upper halves of two vectors, those of the first in the lower halves.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pair(first: __m512i, second: __m512i) -> __m512 {
    // `second & upper | first >> 16`.
    const SELECT: i32 = 0b1111_1000;
    let upper = _mm512_set1_epi32(UPPER);
    let lower = _mm512_srli_epi32::<16>(first);
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<SELECT>(lower, second, upper))
}

/// Subtracts from a vector the nearest bf16 numbers and returns their bits.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn take_nearest(rest: &mut __m512) -> __m512i {
    let half = _mm512_set1_epi32(0x8000);
    let bits = _mm512_add_epi32(_mm512_castps_si512(*rest), half);
    let near = _mm512_and_si512(bits, _mm512_set1_epi32(UPPER));
    *rest = _mm512_sub_ps(*rest, _mm512_castsi512_ps(near));
    near
}

/// Bits that bf16 keeps of an `f32`.
const UPPER: i32 = 0xffff_0000_u32 as i32;

/// # Safety
/// The processor must have AVX-512 BF16.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn mul_add(a: __m512, b: __m512, mut sum: __m512) -> __m512 {
    // SAFETY: guaranteed by the caller; the instruction only uses registers.
    unsafe {
        asm!(
            "vdpbf16ps {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// # Safety
/// The processor must have AVX-512 BF16, and 16 numbers must be writable.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn round(place: *mut __m256i, vector: __m512) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "vcvtneps2bf16 {rounded}, {vector}",
            "vmovdqu32 [{place}], {rounded}",
            rounded = out(ymm_reg) _,
            vector = in(zmm_reg) vector,
            place = in(reg) place,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// As for [`mul_add`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn join(first: __m512, second: __m512) -> __m512 {
    const TURNS: [u16; 32] = {
        let mut turns = [0; 32];
        let mut lane = 0;
        while lane < 16 {
            turns[2 * lane] = lane as u16;
            turns[2 * lane + 1] = 16 + lane as u16;
            lane += 1;
        }
        turns
    };
    let both: __m512;
    // SAFETY: guaranteed by the caller; the instruction only uses registers.
    unsafe {
        asm!(
            "vcvtne2ps2bf16 {both}, {second}, {first}",
            both = lateout(zmm_reg) both,
            second = in(zmm_reg) second,
            first = in(zmm_reg) first,
            options(pure, nomem, nostack, preserves_flags),
        );
        let turns = std::mem::transmute::<[u16; 32], __m512i>(TURNS);
        let both = _mm512_permutexvar_epi16(turns, _mm512_castps_si512(both));
        _mm512_castsi512_ps(both)
    }
}
