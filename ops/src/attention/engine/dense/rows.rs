//! Sums of the targets, each times the weight that a source has for it: the other product of a block of weights, for which
//! elements lie in lanes.

use pulp::{Simd, WithSimd};

use super::task::{Runs, SOURCES};
use crate::kernel::simd::Element;

/// Rows that are worked on at a time: each load of a target serves all of them.
const ROWS: usize = 4;

/// Rows that a block of sources needs room for: the last of [`ROWS`] may lie behind it.
pub(super) const ROOM: usize = SOURCES + ROWS - 1;

/// Adds to the row of every source the sum of all targets, each times the source's weight for it.
#[derive(Clone, Copy)]
pub(super) struct Rows<E> {
    /// A vector for each source, of every vector of targets.
    pub weights: Runs<E>,
    /// The targets, each a row of `vectors`.
    pub targets: *const E,
    pub count: usize,
    /// The rows, with room for [`ROWS`] less one behind the last of them.
    pub results: *mut E,
    pub sources: usize,
    pub vectors: usize,
}

impl<E: Element> Rows<E> {
    #[inline(always)]
    unsafe fn block<S: Simd, const C: usize>(&self, simd: S, row: usize, first: usize) {
        let lanes = E::lanes::<S>();
        let pitch = self.vectors * lanes;
        // SAFETY: the caller of `Rows` says that all pointers are good for this.
        unsafe {
            let results = self.results.add(row * pitch + first * lanes);
            let at = |row: usize, vector: usize| results.add(row * pitch + vector * lanes);
            let mut sums: [[E::Vector<S>; C]; ROWS] = std::array::from_fn(
                #[inline(always)]
                |row| {
                    std::array::from_fn(
                        #[inline(always)]
                        |vector| E::load::<S>(at(row, vector)),
                    )
                },
            );
            for start in (0..self.count).step_by(lanes) {
                let weights = self.weights.at(start / lanes).add(row * lanes);
                for lane in 0..lanes.min(self.count - start) {
                    let target = self.targets.add((start + lane) * pitch + first * lanes);
                    let target: [E::Vector<S>; C] = std::array::from_fn(
                        #[inline(always)]
                        |vector| E::load::<S>(target.add(vector * lanes)),
                    );
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let weight = E::splat(simd, *weights.add(row * lanes + lane));
                        for (sum, target) in sums.iter_mut().zip(&target) {
                            *sum = E::mul_add(simd, weight, *target, *sum);
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    E::store::<S>(at(row, vector), *sum);
                }
            }
        }
    }
}

impl<E: Element> WithSimd for Rows<E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // As many as 32 registers permit, and 16.
        let wide = size_of::<E::Vector<S>>() >= 64;
        for row in (0..self.sources).step_by(ROWS) {
            let mut first = 0;
            // SAFETY: vectors and rows that are there.
            unsafe {
                while wide && first + 4 <= self.vectors {
                    self.block::<S, 4>(simd, row, first);
                    first += 4;
                }
                while first + 2 <= self.vectors {
                    self.block::<S, 2>(simd, row, first);
                    first += 2;
                }
                if first < self.vectors {
                    self.block::<S, 1>(simd, row, first);
                }
            }
        }
    }
}
