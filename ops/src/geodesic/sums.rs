//! Weighted sums of lines, each from its own offset.

use pulp::{Simd, WithSimd};

use crate::kernel::lanes::store;
use crate::kernel::simd::Element;

/// Cells of a line from `start` on, times a factor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Term<E> {
    pub(super) start: usize,
    pub(super) factor: E,
}

/// Writes the sum of the terms, rounded alike in all cells.
///
/// From each start on, `lines` must hold enough cells for all vectors that cover `to`.
pub(super) struct Sums<'a, E> {
    pub(super) lines: &'a [E],
    pub(super) terms: &'a [Term<E>],
    pub(super) to: &'a mut [E],
}

impl<E: Element> WithSimd for Sums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        /// Number of sums computed concurrently, so that none waits for its last addition.
        const TOGETHER: usize = 4;
        let (lanes, len) = (E::lanes::<S>(), self.to.len());
        let last = self.terms.iter().map(|term| term.start).max();
        assert!(
            last.is_none_or(|start| start + len.next_multiple_of(lanes) <= self.lines.len()),
            "a line ends before its sum"
        );
        let mut place = 0;
        while place < len {
            // SAFETY: as asserted, each term has cells for all vectors that begin within `to`.
            unsafe {
                if place + (TOGETHER - 1) * lanes < len {
                    self.write::<S, TOGETHER>(simd, place);
                    place += TOGETHER * lanes;
                } else {
                    self.write::<S, 1>(simd, place);
                    place += lanes;
                }
            }
        }
    }
}

impl<E: Element> Sums<'_, E> {
    /// Writes `N` vectors from an offset on.
    ///
    /// # Safety
    /// Each term must have that many vectors of cells from `place` on, and each vector must begin
    /// within `to`.
    #[inline(always)]
    unsafe fn write<S: Simd, const N: usize>(&mut self, simd: S, place: usize) {
        let lanes = E::lanes::<S>();
        let mut sums = [E::splat(simd, E::default()); N];
        for term in self.terms {
            let factor = E::splat(simd, term.factor);
            for (number, sum) in sums.iter_mut().enumerate() {
                let start = term.start + place + number * lanes;
                // SAFETY: guaranteed by the caller.
                let cells = unsafe { E::load::<S>(self.lines.as_ptr().add(start)) };
                *sum = E::mul_add(simd, factor, cells, *sum);
            }
        }
        for (number, sum) in sums.into_iter().enumerate() {
            let start = place + number * lanes;
            let end = self.to.len().min(start + lanes);
            store(simd, &mut self.to[start..end], sum);
        }
    }
}
