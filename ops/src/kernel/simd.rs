//! Kernels that are written once for all instruction sets.
//!
//! A kernel is a [`WithSimd`]; [`Isa::run`] runs the version of it that `pulp` compiles for an
//! instruction set. [`Element`] makes it generic over `f32` and `f64`.
//!
//! The code of a kernel must be inlined into `vectorize` to be compiled for the instruction set;
//! hence `#[inline(always)]`. In a closure passed through a function that is not inlined
//! (`LocalKey::with`), every intrinsic becomes a call.

use std::any::TypeId;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Mul, Sub};
use std::sync::OnceLock;

use halocline_core::{Error, Result};
use pulp::{Simd, WithSimd};

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::constants::{self, Constants};

/// Environment variable that forces an instruction set.
const VARIABLE: &str = "HALOCLINE_ISA";

/// Instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Isa {
    /// AVX-512, and AMX for matrices of bf16 numbers.
    #[cfg(target_arch = "x86_64")]
    Amx(pulp::x86::V4),
    /// AVX-512 F, BW, CD, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
    /// One lane, for any processor.
    Portable,
}

impl Isa {
    /// Instruction sets of this machine, fastest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = pulp::x86::V4::try_new();
            found.extend(avx512.filter(|_| amx::is_permitted()).map(Self::Amx));
            found.extend(avx512.map(Self::Avx512));
            found.extend(pulp::x86::V3::try_new().map(Self::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        found.extend(pulp::aarch64::Neon::try_new().map(Self::Neon));
        found.push(Self::Portable);
        found
    }

    /// Instruction set for kernels: the one named by `HALOCLINE_ISA` (`amx`, `avx512`, `avx2`,
    /// `neon`, `portable`), or the fastest.
    ///
    /// # Errors
    /// Fails if the variable names one that this machine does not have.
    pub(crate) fn chosen() -> Result<Self> {
        static CHOSEN: OnceLock<Isa> = OnceLock::new();
        if let Some(isa) = CHOSEN.get() {
            return Ok(*isa);
        }
        let isa = Self::named(std::env::var(VARIABLE).ok().as_deref())?;
        Ok(*CHOSEN.get_or_init(|| isa))
    }

    fn named(name: Option<&str>) -> Result<Self> {
        let available = Self::available();
        let Some(name) = name else {
            return Ok(available[0]);
        };
        let found = available.iter().find(|isa| isa.name() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
            Error::operator(
                VARIABLE,
                format!("no instruction set {name:?} here; set one of {names:?}"),
            )
        })
    }

    /// Name as in `HALOCLINE_ISA`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            Self::Portable => "portable",
        }
    }

    /// Whether the set multiplies matrices of bf16 numbers.
    pub(crate) fn has_matrices(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Self::Amx(_));
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// Runs a kernel compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: WithSimd>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(simd) | Self::Avx512(simd) => Simd::vectorize(simd, kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => Simd::vectorize(simd, kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => Simd::vectorize(simd, kernel),
            Self::Portable => Simd::vectorize(pulp::Scalar, kernel),
        }
    }
}

/// Closure that is compiled for an instruction set.
pub(crate) struct Compiled<F>(pub F);

// Not `FnOnce`, whose call is a separate function without the instructions of the set.
impl<F: FnMut()> WithSimd for Compiled<F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        (self.0)();
    }
}

/// Whether vectors of these elements have shuffles, for transposing blocks and interleaving lanes.
#[inline(always)]
pub(crate) fn has_shuffles<S: Simd, E: Element>() -> bool {
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<E>() == TypeId::of::<f32>() {
        let isa = TypeId::of::<S>();
        return isa == TypeId::of::<pulp::x86::V3>() || isa == TypeId::of::<pulp::x86::V4>();
    }
    let _ = TypeId::of::<(S, E)>();
    false
}

/// Float type of kernels, and its vectors.
pub(crate) trait Element:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Mul<Output = Self>
    + Sub<Output = Self>
    + Send
    + Sync
    + 'static
{
    /// Vector that one instruction operates on.
    type Vector<S: Simd>: Copy;

    /// Number of elements of a vector.
    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Vector<S>>() / size_of::<Self>()
    }

    /// Broadcasts one value to all lanes.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;

    /// `a · b + c`, rounded once if the instruction set has an instruction for it.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// `a · b + c`, rounded once on every instruction set, even where that is slow.
    fn fused_mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// `a + b`.
    fn plus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `a - b`.
    fn minus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `a · b`.
    fn times<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `a / b`.
    fn over<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// `√a`.
    fn root<S: Simd>(simd: S, a: Self::Vector<S>) -> Self::Vector<S>;

    /// `|a|`.
    fn abs<S: Simd>(simd: S, a: Self::Vector<S>) -> Self::Vector<S>;

    /// `yes` in the lanes where the first of a pair is less than the second, else `no`; `no` also
    /// where one is NaN.
    fn select_less<S: Simd>(
        simd: S,
        pair: [Self::Vector<S>; 2],
        yes: Self::Vector<S>,
        no: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// `yes` in the lanes where both of a pair are equal, else `no`; `no` also where one is NaN.
    fn select_equal<S: Simd>(
        simd: S,
        pair: [Self::Vector<S>; 2],
        yes: Self::Vector<S>,
        no: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// `a · 2ⁿ` for `shifted = n + 1.5 · 2ᵐ`, with `m` the bits of the mantissa; `a` and the result
    /// must be normal.
    fn scale<S: Simd>(simd: S, a: Self::Vector<S>, shifted: Self::Vector<S>) -> Self::Vector<S>;

    /// Loads a slice of at most one vector, filled up with the lanes of `rest`.
    fn load_part<S: Simd>(simd: S, from: &[Self], rest: Self::Vector<S>) -> Self::Vector<S>;

    /// Writes the first lanes to a slice of at most one vector.
    fn store_part<S: Simd>(simd: S, place: &mut [Self], vector: Self::Vector<S>);

    /// Largest finite value.
    const HIGHEST: Self;

    /// Constants of the functions in [`math`](super::math).
    const CONSTANTS: Constants<Self>;

    /// Nearest value of this type.
    fn from_f64(value: f64) -> Self;

    /// Value in double precision.
    fn to_f64(self) -> f64;

    /// Natural logarithm.
    fn ln(self) -> Self;

    /// Sum of the lanes, in an order fixed by the instruction set.
    fn sum<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;

    /// Loads a vector from a pointer of any alignment.
    ///
    /// # Safety
    /// All lanes must lie in one initialised allocation.
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> Self::Vector<S> {
        // SAFETY: guaranteed by the caller; unaligned reads are allowed.
        unsafe { from.cast::<Self::Vector<S>>().read_unaligned() }
    }

    /// Writes a vector to a pointer of any alignment.
    ///
    /// # Safety
    /// All lanes must lie in one allocation that nothing else accesses meanwhile.
    #[inline(always)]
    unsafe fn store<S: Simd>(place: *mut Self, vector: Self::Vector<S>) {
        // SAFETY: guaranteed by the caller; unaligned writes are allowed.
        unsafe { place.cast::<Self::Vector<S>>().write_unaligned(vector) }
    }
}

macro_rules! element {
    ($float:ident, $bits:ident, $vector:ident, $constants:ident, {$($method:ident: $pulp:ident($($arg:ident),+);)+}, {
        $splat:ident, $sum:ident, $less:ident, $equal:ident, $select:ident, $to_bits:ident, $from_bits:ident,
        $add_bits:ident, $mul_bits:ident, $splat_bits:ident, $mask:ident, $load:ident, $store:ident $(,)?
    }, $ln:path) => {
        impl Element for $float {
            type Vector<S: Simd> = S::$vector;

            const HIGHEST: Self = $float::MAX;
            const CONSTANTS: Constants<Self> = constants::$constants;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$vector {
                simd.$splat(value)
            }

            #[inline(always)]
            fn sum<S: Simd>(simd: S, a: S::$vector) -> Self {
                simd.$sum(a)
            }

            $(#[inline(always)]
            fn $method<S: Simd>(simd: S, $($arg: S::$vector),+) -> S::$vector {
                simd.$pulp($($arg),+)
            })+

            #[inline(always)]
            fn select_less<S: Simd>(
                simd: S,
                [a, b]: [S::$vector; 2],
                yes: S::$vector,
                no: S::$vector,
            ) -> S::$vector {
                simd.$select(simd.$less(a, b), yes, no)
            }

            #[inline(always)]
            fn select_equal<S: Simd>(
                simd: S,
                [a, b]: [S::$vector; 2],
                yes: S::$vector,
                no: S::$vector,
            ) -> S::$vector {
                simd.$select(simd.$equal(a, b), yes, no)
            }

            #[inline(always)]
            fn scale<S: Simd>(simd: S, a: S::$vector, shifted: S::$vector) -> S::$vector {
                // A left shift by the bits of the mantissa, as a product, which every
                // instruction set has.
                let unit = simd.$splat_bits(1 << (Self::MANTISSA_DIGITS - 1));
                let exponent = simd.$mul_bits(simd.$to_bits(shifted), unit);
                simd.$from_bits(simd.$add_bits(simd.$to_bits(a), exponent))
            }

            #[inline(always)]
            fn load_part<S: Simd>(simd: S, from: &[Self], rest: S::$vector) -> S::$vector {
                debug_assert!(from.len() <= Self::lanes::<S>());
                let mask = simd.$mask(0, from.len() as $bits);
                // SAFETY: the mask covers the lanes of the slice.
                let loaded = unsafe { simd.$load(mask, from.as_ptr()) };
                simd.$select(mask.mask(), loaded, rest)
            }

            #[inline(always)]
            fn store_part<S: Simd>(simd: S, place: &mut [Self], vector: S::$vector) {
                debug_assert!(place.len() <= Self::lanes::<S>());
                let mask = simd.$mask(0, place.len() as $bits);
                // SAFETY: the mask covers the lanes of the slice.
                unsafe { simd.$store(mask, place.as_mut_ptr(), vector) }
            }

            #[inline]
            fn from_f64(value: f64) -> Self {
                value as Self
            }

            #[inline]
            fn to_f64(self) -> f64 {
                self as f64
            }

            #[inline(always)]
            fn ln(self) -> Self {
                $ln(self)
            }
        }
    };
}

element!(f32, u32, f32s, F32, {
    mul_add: mul_add_e_f32s(a, b, c);
    fused_mul_add: mul_add_f32s(a, b, c);
    plus: add_f32s(a, b);
    minus: sub_f32s(a, b);
    times: mul_f32s(a, b);
    over: div_f32s(a, b);
    root: sqrt_f32s(a);
    abs: abs_f32s(a);
}, {
    splat_f32s, reduce_sum_f32s, less_than_f32s, equal_f32s, select_f32s, transmute_u32s_f32s, transmute_f32s_u32s,
    add_u32s, mul_u32s, splat_u32s, mask_between_m32s, mask_load_ptr_f32s, mask_store_ptr_f32s,
}, super::logarithm::ln);
element!(f64, u64, f64s, F64, {
    mul_add: mul_add_e_f64s(a, b, c);
    fused_mul_add: mul_add_f64s(a, b, c);
    plus: add_f64s(a, b);
    minus: sub_f64s(a, b);
    times: mul_f64s(a, b);
    over: div_f64s(a, b);
    root: sqrt_f64s(a);
    abs: abs_f64s(a);
}, {
    splat_f64s, reduce_sum_f64s, less_than_f64s, equal_f64s, select_f64s, transmute_u64s_f64s, transmute_f64s_u64s,
    add_u64s, mul_u64s, splat_u64s, mask_between_m64s, mask_load_ptr_f64s, mask_store_ptr_f64s,
}, f64::ln);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_set_is_chosen_by_its_name() {
        for isa in Isa::available() {
            assert_eq!(Isa::named(Some(isa.name())).unwrap().name(), isa.name());
        }
        assert_eq!(Isa::named(None).unwrap().name(), Isa::available()[0].name());
        let error = Isa::named(Some("mmx")).unwrap_err().to_string();
        assert!(
            error.contains("no instruction set \"mmx\" here; set one of"),
            "{error}"
        );
    }
}
