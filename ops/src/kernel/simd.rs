//! Kernels written once for all instruction sets.
//!
//! A kernel is a [`WithSimd`]; [`Isa::run`] compiles it for the instruction set at hand through `pulp`. [`Element`] makes
//! it generic over `f32` and `f64` as well.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Mul, Sub};
use std::sync::OnceLock;

use halocline_core::{Error, Result};
use pulp::{Simd, WithSimd};

/// The environment variable that forces an instruction set.
const VARIABLE: &str = "HALOCLINE_ISA";

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Isa {
    /// AVX-512 F, BW, CD, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
    /// Whatever the compiler makes of one lane.
    Portable,
}

impl Isa {
    /// All that this machine has, the fastest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(pulp::x86::V4::try_new().map(Self::Avx512));
            found.extend(pulp::x86::V3::try_new().map(Self::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        found.extend(pulp::aarch64::Neon::try_new().map(Self::Neon));
        found.push(Self::Portable);
        found
    }

    /// The one that kernels run on: the fastest, or what `HALOCLINE_ISA` says (`avx512`, `avx2`, `neon`, `portable`).
    ///
    /// # Errors
    /// The variable names one that this machine does not have.
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

    /// The name as in `HALOCLINE_ISA`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            Self::Portable => "portable",
        }
    }

    /// Runs a kernel compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: WithSimd>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => Simd::vectorize(simd, kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => Simd::vectorize(simd, kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => Simd::vectorize(simd, kernel),
            Self::Portable => Simd::vectorize(pulp::Scalar, kernel),
        }
    }
}

/// A float that kernels compute with, and its vectors.
pub(crate) trait Element:
    Copy
    + Debug
    + Default
    + PartialEq
    + Add<Output = Self>
    + AddAssign
    + Mul<Output = Self>
    + Sub<Output = Self>
    + Send
    + Sync
    + 'static
{
    /// As many as an instruction works on.
    type Vector<S: Simd>: Copy;

    /// The number of elements of a vector.
    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Vector<S>>() / size_of::<Self>()
    }

    /// One value in all lanes.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;

    /// `a · b + c`, rounded once where the instruction set can.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;

    /// `a + b`.
    fn plus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// The sum of the lanes, in an order that the instruction set fixes.
    fn sum<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;

    /// The vector at a pointer of any alignment.
    ///
    /// # Safety
    /// All lanes must lie in one initialised allocation.
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> Self::Vector<S> {
        // SAFETY: the caller's; unaligned reads are allowed.
        unsafe { from.cast::<Self::Vector<S>>().read_unaligned() }
    }

    /// Writes a vector to a pointer of any alignment.
    ///
    /// # Safety
    /// All lanes must lie in one allocation that nothing else uses meanwhile.
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, vector: Self::Vector<S>) {
        // SAFETY: the caller's; unaligned writes are allowed.
        unsafe { to.cast::<Self::Vector<S>>().write_unaligned(vector) }
    }
}

macro_rules! element {
    ($float:ty, $vector:ident, $splat:ident, $mul_add:ident, $add:ident, $sum:ident) => {
        impl Element for $float {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$vector {
                simd.$splat(value)
            }

            #[inline(always)]
            fn mul_add<S: Simd>(
                simd: S,
                a: S::$vector,
                b: S::$vector,
                c: S::$vector,
            ) -> S::$vector {
                simd.$mul_add(a, b, c)
            }

            #[inline(always)]
            fn plus<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }

            #[inline(always)]
            fn sum<S: Simd>(simd: S, a: S::$vector) -> Self {
                simd.$sum(a)
            }
        }
    };
}

element!(
    f32,
    f32s,
    splat_f32s,
    mul_add_e_f32s,
    add_f32s,
    reduce_sum_f32s
);
element!(
    f64,
    f64s,
    splat_f64s,
    mul_add_e_f64s,
    add_f64s,
    reduce_sum_f64s
);
