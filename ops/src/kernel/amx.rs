//! AMX tile registers: matrices of 16 rows of 64 bytes. One instruction multiplies two matrices of
//! pairs of bf16 numbers and adds the product to a matrix of f32 sums.
//!
//! The instructions are inline assembly: the compiler has no types for these registers and does not
//! use them.

use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

use instructions::{configure, load, multiply, release, store, zero};

/// Maximum number of rows of a matrix, and of 32-bit elements in a row.
pub(crate) const SIDE: usize = 16;

/// Products of parts of a left number with parts of a right number that add up to the product of
/// both; the omitted rest is less than half of its last bit. Consecutive products share one part,
/// which is loaded once; the largest comes last, so that adding the others loses nothing.
const fn products(parts: usize) -> &'static [[usize; 2]] {
    match parts {
        1 => &[[0, 0]],
        3 => &[[0, 2], [0, 1], [1, 1], [1, 0], [2, 0], [0, 0]],
        _ => unreachable!(),
    }
}

/// Memory layout of the matrices of a factor.
pub(crate) struct Factor<F> {
    /// Address of the first part of matrix 0 or 1 of a term.
    pub at: F,
    /// Bytes from one row to the next, and from one part to the next.
    pub row: usize,
    pub part: usize,
}

/// Memory layout of up to two by two matrices of sums; those of the second row of matrices begin
/// [`SIDE`] rows below the first.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    first: *mut u8,
    /// Bytes from one row to the next, and from a matrix to the one to its right.
    row: usize,
    next: usize,
}

impl Place {
    /// Creates a layout from the element strides from one row to the next, and from a matrix to the
    /// one to its right.
    pub(crate) fn new<E>(first: *mut E, row: usize, next: usize) -> Self {
        Self {
            first: first.cast(),
            row: size_of::<E>() * row,
            next: size_of::<E>() * next,
        }
    }

    fn at(self, m: usize, n: usize) -> *mut u8 {
        self.first.wrapping_add(m * SIDE * self.row + n * self.next)
    }
}

/// Whether the processor supports AMX and AVX-512 BF16, and the system lets this process use them.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        #[cfg(target_os = "linux")]
        {
            const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
            let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
            // The registers enlarge the state of a thread; the system grants this on request.
            const ASK: libc::c_long = 0x1023;
            const TILE_DATA: libc::c_long = 18;
            // SAFETY: the call reads no memory.
            let given = || unsafe { libc::syscall(libc::SYS_arch_prctl, ASK, TILE_DATA) == 0 };
            let rounds = std::arch::is_x86_feature_detected!("avx512bf16");
            rounds && features & BF16_AND_TILE == BF16_AND_TILE && given()
        }
        #[cfg(not(target_os = "linux"))]
        false
    })
}

/// Tile configuration: rows, and bytes per row, of every register.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    first_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tile registers of this thread, configured for one matrix size per factor and released on drop.
/// The pointer keeps the type on this thread.
pub(crate) struct Matrices(PhantomData<*const ()>);

impl Matrices {
    /// Configures the registers: sums have `rows` rows of [`SIDE`] columns, left factors `rows`
    /// rows of `pairs` pairs, right factors `pairs` rows of [`SIDE`] columns.
    ///
    /// # Safety
    /// [`is_permitted`] must be true.
    pub(crate) unsafe fn of(rows: usize, pairs: usize) -> Self {
        debug_assert!((1..=SIDE).contains(&rows) && (1..=SIDE).contains(&pairs));
        let mut configuration = Configuration {
            palette: 1,
            first_row: 0,
            reserved: [0; 14],
            bytes: [0; 16],
            rows: [0; 16],
        };
        for register in 0..8 {
            let [rows, columns] = match register {
                0..4 => [rows, SIDE],
                4 | 5 => [rows, pairs],
                _ => [pairs, SIDE],
            };
            configuration.rows[register] = rows as u8;
            configuration.bytes[register] = 4 * columns as u16;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { configure(&configuration) };
        Self(PhantomData)
    }

    /// Writes the sums of the products of one or two left with one or two right matrices (`sizes`),
    /// over a number of terms with one or three parts (`terms`).
    ///
    /// # Safety
    /// All matrices must be readable, and the sums writable.
    #[inline(always)]
    pub(crate) unsafe fn products(
        &self,
        sizes: [usize; 2],
        terms: [usize; 2],
        left: Factor<impl Fn(usize, usize) -> *const u8>,
        right: Factor<impl Fn(usize, usize) -> *const u8>,
        to: Place,
    ) {
        // SAFETY: guaranteed by the caller; previous sums are not read.
        unsafe { self.sums::<false>(sizes, terms, left, right, [to, to]) };
    }

    /// Reads previous sums from one place, adds the [`products`](Self::products), and writes the
    /// result to the other place.
    ///
    /// # Safety
    /// As for [`products`](Self::products), and the previous sums must be readable.
    #[inline(always)]
    pub(crate) unsafe fn add(
        &self,
        sizes: [usize; 2],
        terms: [usize; 2],
        left: Factor<impl Fn(usize, usize) -> *const u8>,
        right: Factor<impl Fn(usize, usize) -> *const u8>,
        [from, to]: [Place; 2],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.sums::<true>(sizes, terms, left, right, [from, to]) };
    }

    #[inline(always)]
    unsafe fn sums<const ADD: bool>(
        &self,
        [m, n]: [usize; 2],
        [terms, parts]: [usize; 2],
        left: Factor<impl Fn(usize, usize) -> *const u8>,
        right: Factor<impl Fn(usize, usize) -> *const u8>,
        places: [Place; 2],
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (m, n, parts) {
                (1, 1, 1) => self.block::<1, 1, ADD, 1>(terms, left, right, places),
                (1, _, 1) => self.block::<1, 2, ADD, 1>(terms, left, right, places),
                (_, 1, 1) => self.block::<2, 1, ADD, 1>(terms, left, right, places),
                (_, _, 1) => self.block::<2, 2, ADD, 1>(terms, left, right, places),
                (1, 1, _) => self.block::<1, 1, ADD, 3>(terms, left, right, places),
                (1, _, _) => self.block::<1, 2, ADD, 3>(terms, left, right, places),
                (_, 1, _) => self.block::<2, 1, ADD, 3>(terms, left, right, places),
                (_, _, _) => self.block::<2, 2, ADD, 3>(terms, left, right, places),
            }
        }
    }

    #[inline(always)]
    unsafe fn block<const M: usize, const N: usize, const ADD: bool, const PARTS: usize>(
        &self,
        terms: usize,
        left: Factor<impl Fn(usize, usize) -> *const u8>,
        right: Factor<impl Fn(usize, usize) -> *const u8>,
        [from, to]: [Place; 2],
    ) {
        // SAFETY: guaranteed by the caller; the registers are configured.
        unsafe {
            begin::<0, ADD>(from.at(0, 0), from.row);
            if N > 1 {
                begin::<1, ADD>(from.at(0, 1), from.row);
            }
            if M > 1 {
                begin::<2, ADD>(from.at(1, 0), from.row);
                if N > 1 {
                    begin::<3, ADD>(from.at(1, 1), from.row);
                }
            }
            for term in 0..terms {
                let mut loaded = [usize::MAX; 2];
                for parts in const { products(PARTS) } {
                    if parts[1] != loaded[1] {
                        let at = |n| (right.at)(term, n).wrapping_add(parts[1] * right.part);
                        load::<6>(at(0), right.row);
                        if N > 1 {
                            load::<7>(at(1), right.row);
                        }
                    }
                    if parts[0] != loaded[0] {
                        let at = |m| (left.at)(term, m).wrapping_add(parts[0] * left.part);
                        load::<4>(at(0), left.row);
                        if M > 1 {
                            load::<5>(at(1), left.row);
                        }
                    }
                    loaded = *parts;
                    multiply::<0, 4, 6>();
                    if N > 1 {
                        multiply::<1, 4, 7>();
                    }
                    if M > 1 {
                        multiply::<2, 5, 6>();
                        if N > 1 {
                            multiply::<3, 5, 7>();
                        }
                    }
                }
            }
            store::<0>(to.at(0, 0), to.row);
            if N > 1 {
                store::<1>(to.at(0, 1), to.row);
            }
            if M > 1 {
                store::<2>(to.at(1, 0), to.row);
                if N > 1 {
                    store::<3>(to.at(1, 1), to.row);
                }
            }
        }
    }
}

/// Loads the previous sums, or zeros.
#[inline(always)]
unsafe fn begin<const T: usize, const ADD: bool>(from: *mut u8, row: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if ADD {
            load::<T>(from, row)
        } else {
            zero::<T>()
        }
    }
}

impl Drop for Matrices {
    fn drop(&mut self) {
        // SAFETY: the registers belong to this thread.
        unsafe { release() };
    }
}

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::asm;

    use super::Configuration;

    pub(super) unsafe fn configure(configuration: &Configuration) {
        // SAFETY: guaranteed by the caller; the instruction reads 64 bytes.
        unsafe {
            let configuration = std::ptr::from_ref(configuration);
            asm!("ldtilecfg [{}]", in(reg) configuration, options(readonly, nostack, preserves_flags));
        }
    }

    pub(super) unsafe fn release() {
        // SAFETY: guaranteed by the caller.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }

    #[inline(always)]
    pub(super) unsafe fn zero<const T: usize>() {
        // SAFETY: the caller has configured the registers.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) };
    }

    #[inline(always)]
    pub(super) unsafe fn load<const T: usize>(from: *const u8, row: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{from} + {row} * 1]",
                t = const T,
                from = in(reg) from,
                row = in(reg) row,
                options(readonly, nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    pub(super) unsafe fn multiply<const C: usize, const A: usize, const B: usize>() {
        // SAFETY: the caller has configured the registers with matching sizes.
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nomem, nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    pub(super) unsafe fn store<const T: usize>(to: *mut u8, row: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            asm!(
                "tilestored [{to} + {row} * 1], tmm{t}",
                t = const T,
                to = in(reg) to,
                row = in(reg) row,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod instructions {
    use super::Configuration;

    macro_rules! none {
        ($($name:ident<$(const $t:ident: usize),*>($($arg:ident: $type:ty),*))*) => {$(
            pub(super) unsafe fn $name<$(const $t: usize),*>($(_: $type),*) {
                unreachable!("registers that this processor does not have")
            }
        )*};
    }
    none!(configure<>(c: &Configuration) release<>() zero<const T: usize>() load<const T: usize>(from: *const u8, row: usize)
        multiply<const C: usize, const A: usize, const B: usize>() store<const T: usize>(to: *mut u8, row: usize));
}

#[cfg(target_arch = "x86_64")]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::products::{Pairs, Products};

    /// Values whose products and sums are exact.
    fn numbers(len: usize) -> Vec<[f32; 2]> {
        let number = |index: usize| (index * 7 % 13) as f32 - 6.0;
        (0..len)
            .map(|index| [number(index), number(index + 5)])
            .collect()
    }

    fn check<const M: usize, const N: usize>(rows: usize, pairs: usize) {
        let terms = 3_usize;
        let (left, right) = (
            numbers(terms * M * rows * pairs),
            numbers(terms * pairs * N * SIDE),
        );
        let [packed_left, packed_right] = [&left, &right].map(|pairs| {
            let factors = pairs.iter().map(|pair| Pairs::join_one(*pair));
            factors.collect::<Vec<f32>>()
        });
        let mut sums = vec![f32::NAN; 4 * SIDE * SIDE];
        let at_left = |term: usize, m: usize| {
            packed_left[(term * M + m) * rows * pairs..]
                .as_ptr()
                .cast::<u8>()
        };
        let at_right = |term: usize, n: usize| {
            packed_right[(term * pairs * N + n) * SIDE..]
                .as_ptr()
                .cast::<u8>()
        };
        // SAFETY: the processor has the registers, and all matrices are that long.
        unsafe {
            let matrices = Matrices::of(rows, pairs);
            let left = || Factor {
                at: at_left,
                row: 4 * pairs,
                part: 0,
            };
            let right = || Factor {
                at: at_right,
                row: 4 * N * SIDE,
                part: 0,
            };
            let (sizes, terms) = ([M, N], [terms, 1]);
            let to = Place::new(sums.as_mut_ptr(), SIDE, M * SIDE * SIDE);
            matrices.products(sizes, terms, left(), right(), to);
            matrices.add(sizes, terms, left(), right(), [to, to]);
        }
        for m in 0..M {
            for n in 0..N {
                for (row, column) in
                    (0..rows).flat_map(|row| (0..SIDE).map(move |column| (row, column)))
                {
                    let products =
                        (0..terms).flat_map(|term| (0..pairs).map(move |pair| (term, pair)));
                    let products = products.map(|(term, pair)| {
                        let a = left[((term * M + m) * rows + row) * pairs + pair];
                        let b = right[((term * pairs + pair) * N + n) * SIDE + column];
                        a[0] * b[0] + a[1] * b[1]
                    });
                    let found = sums[((n * M + m) * SIDE + row) * SIDE + column];
                    assert_eq!(
                        found,
                        2.0 * products.sum::<f32>(),
                        "{M} × {N}, {rows} rows, {pairs} pairs"
                    );
                }
            }
        }
    }

    #[test]
    fn sums_are_those_of_products_of_pairs() {
        if !is_permitted() {
            return;
        }
        for (rows, pairs) in [(16, 16), (1, 1), (10, 3), (7, 16), (16, 5)] {
            check::<1, 1>(rows, pairs);
            check::<1, 2>(rows, pairs);
            check::<2, 1>(rows, pairs);
            check::<2, 2>(rows, pairs);
        }
    }
}
