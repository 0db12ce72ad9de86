//! Summed products of numbers, or of pairs of bf16 numbers.
//!
//! Kernels read numbers from memory, multiply them as factors, and write sums back as numbers. In
//! `f32` and `f64` all three have one type ([`Numbers`]). bf16 numbers are widened to `f32` when
//! read ([`Halves`]). If the processor has an instruction that multiplies pairs of bf16 numbers and
//! adds both products to an f32 sum (AVX-512 BF16), a factor is a pair ([`Pairs`]): cells of two
//! channels, of two rows, or neighbours along the summed dim.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::marker::PhantomData;

use burn_std::bf16;
use pulp::{Simd, WithSimd};

use super::simd::{Element, Isa};
use super::widths::narrowed;

/// Number of bf16 numbers that add up to one f32: 8 bits each of its 24.
pub(crate) const MOST_PARTS: usize = 3;

/// Factors of summed products: their type, and how to load, multiply and store them.
pub(crate) trait Products<E: Element>: Copy + Send + Sync + 'static {
    /// Number of numbers in a factor.
    const NUMBERS: usize;

    /// Number as stored in memory.
    type Number: Copy + Default + Send + Sync + 'static;

    /// Combines stored numbers into a factor; the second is unused if a factor is one number.
    fn factor(numbers: [Self::Number; 2]) -> E;

    /// Products of the same numbers with one number per factor.
    type Single: Products<E, Number = Self::Number>;

    /// Widens a stored number to a term of a sum.
    fn widened(number: Self::Number) -> E;

    /// Narrows a sum to a stored number.
    fn number(sum: E) -> Self::Number;

    /// Loads a vector of numbers.
    ///
    /// # Safety
    /// A vector of numbers must be readable.
    unsafe fn load<S: Simd>(from: *const Self::Number) -> E::Vector<S>;

    /// Stores a vector of sums as numbers.
    ///
    /// # Safety
    /// A vector of numbers must be writable.
    unsafe fn store<S: Simd>(place: *mut Self::Number, vector: E::Vector<S>);

    /// Adds the product of factors to a sum.
    fn mul_add<S: Simd>(
        simd: S,
        a: E::Vector<S>,
        b: E::Vector<S>,
        sum: E::Vector<S>,
    ) -> E::Vector<S>;

    /// Combines vectors of sums into factors; the second is unused if a factor is one number.
    fn join<S: Simd>(simd: S, numbers: [E::Vector<S>; 2]) -> E::Vector<S>;

    /// Number of bf16 parts per number for matrix instructions; zero if they do not apply.
    const PARTS: usize;

    /// Splits two numbers into pairs of bf16 numbers for matrix instructions, in the first
    /// [`PARTS`](Self::PARTS) vectors.
    fn split<S: Simd>(simd: S, numbers: [E::Vector<S>; 2]) -> [E::Vector<S>; MOST_PARTS];

    /// [`join`](Self::join) for one lane.
    #[inline(always)]
    fn join_one(numbers: [E; 2]) -> E {
        Self::factor(numbers.map(Self::number))
    }
}

/// Writes the pairs of numbers for matrix instructions, those of each part `step` elements after
/// the previous part.
///
/// # Safety
/// `to` must have room for a vector of each part; any alignment is allowed.
#[inline(always)]
pub(crate) unsafe fn store_parts<S: Simd, E: Element, P: Products<E>>(
    simd: S,
    numbers: [E::Vector<S>; 2],
    to: *mut E,
    step: usize,
) {
    for (part, pairs) in P::split(simd, numbers).iter().enumerate().take(P::PARTS) {
        // SAFETY: guaranteed by the caller.
        unsafe { E::store::<S>(to.wrapping_add(part * step), *pairs) };
    }
}

/// Whether a processor with these vectors may have matrix instructions for these numbers. Code for
/// other vectors need not be compiled.
pub(crate) const fn matrices_multiply<S: Simd, E: Element, P: Products<E>>() -> bool {
    P::PARTS > 0 && size_of::<E::Vector<S>>() == 64
}

/// Runs a kernel of products, compiled only for the instruction sets that can be asked for: for
/// pairs, those with AVX-512 vectors. Tests also run pairs on other vectors, but not on single
/// lanes.
pub(crate) fn run<E: Element, P: Products<E>, K: WithSimd>(isa: Isa, kernel: K) -> K::Output {
    isa.run(OfProducts::<E, P, K>(kernel, PhantomData))
}

struct OfProducts<E, P, K>(K, PhantomData<(E, P)>);

impl<E: Element, P: Products<E>, K: WithSimd> WithSimd for OfProducts<E, P, K> {
    type Output = K::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> K::Output {
        if const { P::NUMBERS == 1 || has_512_bits::<S>() || cfg!(test) && !S::IS_SCALAR } {
            self.0.with_simd(simd)
        } else {
            unreachable!("pairs are multiplied by vectors of AVX-512")
        }
    }
}

/// Message of a panic where matrix instructions do not apply.
pub(crate) const NO_MATRICES: &str = "matrices do not multiply these numbers";

/// Factors that are the stored numbers. Matrix instructions multiply them as sums of `PARTS` bf16
/// numbers instead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<const PARTS: usize>;

/// Numbers that matrix instructions multiply with all of their bits.
pub(crate) type Numbers = Parts<MOST_PARTS>;

/// Numbers that are rounded to bf16 for matrix instructions.
pub(crate) type Rounded = Parts<1>;

impl<E: Element, const PARTS: usize> Products<E> for Parts<PARTS> {
    const NUMBERS: usize = 1;

    type Number = E;
    type Single = Self;

    #[inline(always)]
    fn factor([number, _]: [E; 2]) -> E {
        number
    }

    #[inline(always)]
    fn widened(number: E) -> E {
        number
    }

    #[inline(always)]
    fn number(sum: E) -> E {
        sum
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const E) -> E::Vector<S> {
        // SAFETY: guaranteed by the caller.
        unsafe { E::load::<S>(from) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(place: *mut E, vector: E::Vector<S>) {
        // SAFETY: guaranteed by the caller.
        unsafe { E::store::<S>(place, vector) }
    }

    #[inline(always)]
    fn mul_add<S: Simd>(
        simd: S,
        a: E::Vector<S>,
        b: E::Vector<S>,
        sum: E::Vector<S>,
    ) -> E::Vector<S> {
        E::mul_add(simd, a, b, sum)
    }

    #[inline(always)]
    fn join<S: Simd>(_: S, [number, _]: [E::Vector<S>; 2]) -> E::Vector<S> {
        number
    }

    const PARTS: usize = if size_of::<E>() == 4 { PARTS } else { 0 };

    #[inline(always)]
    fn split<S: Simd>(_: S, numbers: [E::Vector<S>; 2]) -> [E::Vector<S>; MOST_PARTS] {
        #[cfg(target_arch = "x86_64")]
        if size_of::<E>() == 4 && size_of::<E::Vector<S>>() == 64 {
            // SAFETY: the vectors are those of AVX-512, and processors with matrices have AVX-512
            // BF16.
            return unsafe {
                let [first, second] = numbers.each_ref().map(|numbers| to_zmm(numbers));
                let parts = match PARTS {
                    1 => [avx512::join(first, second); MOST_PARTS],
                    _ => avx512::split(first, second),
                };
                parts.map(|part| from_zmm(part))
            };
        }
        let _ = numbers;
        unreachable!("{NO_MATRICES}")
    }
}

/// Factors that are single bf16 numbers in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Halves;

impl Products<f32> for Halves {
    const NUMBERS: usize = 1;

    type Number = bf16;
    type Single = Self;

    #[inline(always)]
    fn factor([number, _]: [bf16; 2]) -> f32 {
        Self::widened(number)
    }

    #[inline(always)]
    fn widened(number: bf16) -> f32 {
        f32::from_bits(u32::from(number.to_bits()) << 16)
    }

    #[inline(always)]
    fn number(sum: f32) -> bf16 {
        narrowed(sum)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const bf16) -> S::f32s {
        #[cfg(target_arch = "x86_64")]
        if has_512_bits::<S>() {
            // SAFETY: guaranteed by the caller; the vectors are those of AVX-512.
            return unsafe { from_zmm(avx512::widen(from.cast())) };
        }
        // SAFETY: every bit pattern is a valid vector.
        let mut vector: S::f32s = unsafe { std::mem::zeroed() };
        let place = (&raw mut vector).cast::<f32>();
        for lane in 0..f32::lanes::<S>() {
            // SAFETY: guaranteed by the caller; a vector has these lanes and no padding.
            unsafe { *place.add(lane) = Self::widened(*from.add(lane)) };
        }
        vector
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(place: *mut bf16, vector: S::f32s) {
        #[cfg(target_arch = "x86_64")]
        if has_512_bits::<S>() {
            // SAFETY: as above.
            return unsafe { avx512::narrow(place.cast(), to_zmm(&vector)) };
        }
        let from = (&raw const vector).cast::<f32>();
        for lane in 0..f32::lanes::<S>() {
            // SAFETY: as above.
            unsafe { *place.add(lane) = narrowed(*from.add(lane)) };
        }
    }

    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, sum: S::f32s) -> S::f32s {
        <f32 as Element>::mul_add(simd, a, b, sum)
    }

    #[inline(always)]
    fn join<S: Simd>(_: S, [number, _]: [S::f32s; 2]) -> S::f32s {
        number
    }

    const PARTS: usize = 0;

    fn split<S: Simd>(_: S, _: [S::f32s; 2]) -> [S::f32s; MOST_PARTS] {
        unreachable!("{NO_MATRICES}")
    }
}

/// Factors of two bf16 numbers in the bits of an `f32`, the first in the lower half. Sums are
/// rounded to bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs;

impl Pairs {
    /// Whether kernels for an instruction set may use pairs in tests; with AVX-512 the processor
    /// must support them.
    #[cfg(test)]
    pub(crate) fn run_on(isa: Isa) -> bool {
        Self::are_fast(isa) || matches!(isa.name(), "avx2" | "neon")
    }

    /// Whether an instruction set multiplies pairs in hardware.
    pub(crate) fn are_fast(isa: Isa) -> bool {
        struct HasPairs;
        impl WithSimd for HasPairs {
            type Output = bool;

            fn with_simd<S: Simd>(self, _: S) -> bool {
                has_512_bits::<S>() && Pairs::are_multiplied()
            }
        }
        isa.run(HasPairs)
    }

    /// Whether the processor multiplies pairs.
    fn are_multiplied() -> bool {
        #[cfg(target_arch = "x86_64")]
        return std::arch::is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
}

/// Whether vectors are those of AVX-512.
const fn has_512_bits<S: Simd>() -> bool {
    size_of::<S::f32s>() == 64
}

fn numbers(pair: f32) -> [f32; 2] {
    let bits = pair.to_bits();
    [bits << 16, bits & 0xffff_0000].map(f32::from_bits)
}

/// Applies a function lane by lane.
#[inline(always)]
fn by_lanes<S: Simd, const N: usize>(
    mut vectors: [S::f32s; N],
    f: impl Fn([f32; N]) -> f32,
) -> S::f32s {
    let lanes = f32::lanes::<S>();
    let places = vectors
        .each_mut()
        .map(|vector| std::ptr::from_mut(vector).cast::<f32>());
    for lane in 0..lanes {
        // SAFETY: a vector has these lanes and no padding.
        unsafe { *places[0].add(lane) = f(places.map(|place| *place.add(lane))) };
    }
    vectors[0]
}

impl Products<f32> for Pairs {
    const NUMBERS: usize = 2;

    type Number = bf16;
    type Single = Halves;

    #[inline(always)]
    fn factor(numbers: [bf16; 2]) -> f32 {
        let [first, second] = numbers.map(|number| u32::from(number.to_bits()));
        f32::from_bits(second << 16 | first)
    }

    #[inline(always)]
    fn widened(number: bf16) -> f32 {
        Halves::widened(number)
    }

    /// Flushes subnormal numbers to zero, as the instructions do.
    #[inline(always)]
    fn number(sum: f32) -> bf16 {
        const SIGN: u32 = 1 << 31;
        let bits = sum.to_bits();
        match bits & 0x7f80_0000 {
            0 => bf16::from_bits(((bits & SIGN) >> 16) as u16),
            _ => narrowed(sum),
        }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const bf16) -> S::f32s {
        // SAFETY: guaranteed by the caller.
        unsafe { Halves::load::<S>(from) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(place: *mut bf16, vector: S::f32s) {
        #[cfg(target_arch = "x86_64")]
        if has_512_bits::<S>() {
            // SAFETY: guaranteed by the caller; the vectors are those of AVX-512, on a processor
            // with pairs.
            return unsafe { avx512::round(place.cast(), to_zmm(&vector)) };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { Halves::store::<S>(place, vector) }
    }

    #[inline(always)]
    fn mul_add<S: Simd>(_: S, a: S::f32s, b: S::f32s, sum: S::f32s) -> S::f32s {
        #[cfg(target_arch = "x86_64")]
        if has_512_bits::<S>() {
            // SAFETY: the vectors are those of AVX-512, and pairs are only used with them if the
            // processor multiplies pairs.
            return unsafe { from_zmm(avx512::mul_add(to_zmm(&a), to_zmm(&b), to_zmm(&sum))) };
        }
        by_lanes::<S, 3>([sum, a, b], |[sum, a, b]| {
            let ([a, c], [b, d]) = (numbers(a), numbers(b));
            sum + a * b + c * d
        })
    }

    #[inline(always)]
    fn join<S: Simd>(_: S, [first, second]: [S::f32s; 2]) -> S::f32s {
        #[cfg(target_arch = "x86_64")]
        if has_512_bits::<S>() {
            // SAFETY: as above.
            return unsafe { from_zmm(avx512::join(to_zmm(&first), to_zmm(&second))) };
        }
        by_lanes::<S, 2>([first, second], Self::join_one)
    }

    const PARTS: usize = 1;

    #[inline(always)]
    fn split<S: Simd>(simd: S, numbers: [S::f32s; 2]) -> [S::f32s; MOST_PARTS] {
        [Self::join(simd, numbers); MOST_PARTS]
    }
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m512;

/// Reinterprets a vector as one of AVX-512.
///
/// # Safety
/// The vector must have 512 bits.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn to_zmm<V>(vector: &V) -> __m512 {
    // SAFETY: guaranteed by the caller; every bit pattern is valid.
    unsafe { std::mem::transmute_copy(vector) }
}

/// The inverse of [`to_zmm`].
///
/// # Safety
/// As for [`to_zmm`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn from_zmm<V>(vector: __m512) -> V {
    // SAFETY: as above.
    unsafe { std::mem::transmute_copy(&vector) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds products of pairs to sums in all lanes.
    struct Run<'a>([&'a [f32]; 5]);

    impl WithSimd for Run<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let lanes = f32::lanes::<S>();
            let mut results = Vec::new();
            for first in (0..self.0[0].len()).step_by(lanes) {
                // SAFETY: the lengths of the slices are multiples of a vector.
                let [a, b, c, d, sum] = self
                    .0
                    .map(|numbers| unsafe { f32::load::<S>(numbers[first..].as_ptr()) });
                let (left, right) = (Pairs::join(simd, [a, b]), Pairs::join(simd, [c, d]));
                let sums = Pairs::mul_add(simd, left, right, sum);
                let mut result = vec![0.0; lanes];
                // SAFETY: as above.
                unsafe { f32::store::<S>(result.as_mut_ptr(), sums) };
                results.extend(result);
            }
            results
        }
    }

    #[test]
    fn pairs_are_rounded_multiplied_and_added_in_every_lane() {
        let numbers = |seed: u32| -> Vec<f32> {
            let number = |index: u32| ((index * 37 + seed) % 23) as f32 / 7.0 - 1.3;
            (0..32).map(number).collect()
        };
        let [a, b, c, d, sum] = [1, 5, 9, 14, 20].map(numbers);
        let near = |x: f32| bf16::from_f32(x).to_f32();
        for isa in Isa::available()
            .into_iter()
            .filter(|isa| Pairs::run_on(*isa))
        {
            let found = isa.run(Run([&a, &b, &c, &d, &sum]));
            for lane in 0..32 {
                let expected =
                    sum[lane] + near(a[lane]) * near(c[lane]) + near(b[lane]) * near(d[lane]);
                let off = (found[lane] - expected).abs();
                assert!(off < 1e-6, "{}, lane {lane}: {off}", isa.name());
            }
        }
    }
}
