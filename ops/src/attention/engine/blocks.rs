//! Products of a few targets with many sources: dot products and weighted sums, with one target in
//! every lane.
//!
//! A target is a run of vectors, one for each of its elements. A source is either that too
//! ([`InLanes`]: another source in every lane) or a run of single elements ([`ForAll`]: the same
//! source for all lanes).

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use crate::kernel::simd::Element;

/// Targets computed at a time: each load of a source serves all of them. With six, compilers do not
/// keep the sums in registers, even of 32.
pub(super) const TARGETS: usize = 3;

/// Storage of the elements of a source.
pub(super) trait Storage: Copy {
    /// Whether compilers keep the sums of four sources and [`TARGETS`] in 16 registers, where they
    /// would fit together with their operands. If not, blocks of three are twice as fast.
    const FOUR: bool;

    /// Distance between elements, for sources that declare `step`.
    fn step(step: usize) -> usize;

    /// Loads an element into all lanes.
    ///
    /// # Safety
    /// The element must lie in one initialised allocation.
    unsafe fn load<S: Simd, E: Element>(simd: S, from: *const E) -> E::Vector<S>;
}

/// One vector per element, with another source in every lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct InLanes;

impl Storage for InLanes {
    const FOUR: bool = true;

    #[inline(always)]
    fn step(step: usize) -> usize {
        step
    }

    #[inline(always)]
    unsafe fn load<S: Simd, E: Element>(_: S, from: *const E) -> E::Vector<S> {
        // SAFETY: guaranteed by the caller.
        unsafe { E::load::<S>(from) }
    }
}

/// One element for all lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForAll;

impl Storage for ForAll {
    const FOUR: bool = false;

    // A constant, so that the compiler knows it.
    #[inline(always)]
    fn step(step: usize) -> usize {
        debug_assert_eq!(step, 1);
        1
    }

    #[inline(always)]
    unsafe fn load<S: Simd, E: Element>(simd: S, from: *const E) -> E::Vector<S> {
        // SAFETY: guaranteed by the caller.
        E::splat(simd, unsafe { *from })
    }
}

/// Sources of `width` elements each: where they begin, counted in elements from the first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sources<'a, E, T> {
    pub first: *const E,
    pub offsets: &'a [usize],
    pub width: usize,
    /// Distance between the elements of a source.
    pub step: usize,
    pub storage: PhantomData<T>,
}

/// Whether there are 32 registers, enough for blocks of eight.
#[inline(always)]
fn wide<S: Simd, E: Element>() -> bool {
    size_of::<E::Vector<S>>() >= 64
}

/// Runs an operand in blocks of sources or elements: as large as registers permit, the last one
/// smaller.
macro_rules! in_blocks {
    ($operand:expr, $simd:expr, $count:expr) => {{
        let (count, mut start) = ($count, 0);
        let four = wide::<S, E>() || T::FOUR;
        while wide::<S, E>() && start + 8 <= count {
            $operand.block::<S, 8>($simd, start);
            start += 8;
        }
        while four && start + 4 <= count {
            $operand.block::<S, 4>($simd, start);
            start += 4;
        }
        while start + 4 < count {
            $operand.block::<S, 3>($simd, start);
            start += 3;
        }
        match count - start {
            1 => $operand.block::<S, 1>($simd, start),
            2 => $operand.block::<S, 2>($simd, start),
            3 => $operand.block::<S, 3>($simd, start),
            4 => {
                $operand.block::<S, 2>($simd, start);
                $operand.block::<S, 2>($simd, start + 2);
            }
            _ => {}
        }
    }};
}

/// Dot product of every target with every source: one vector per source.
pub(super) struct Dots<'a, E, T, const R: usize> {
    pub targets: [*const E; R],
    pub sources: Sources<'a, E, T>,
    /// Destination of the products with each target.
    pub products: [*mut E; R],
}

impl<E: Element, T: Storage, const R: usize> Dots<'_, E, T, R> {
    #[inline(always)]
    unsafe fn block<S: Simd, const C: usize>(&self, simd: S, start: usize) {
        let lanes = E::lanes::<S>();
        let sources: [*const E; C] = std::array::from_fn(|source| {
            self.sources
                .first
                .wrapping_add(self.sources.offsets[start + source])
        });
        let mut sums = [[E::splat(simd, E::default()); C]; R];
        for element in 0..self.sources.width {
            // SAFETY: targets and sources have `width` elements.
            unsafe {
                let targets = self
                    .targets
                    .map(|target| E::load::<S>(target.add(element * lanes)));
                for (source, from) in sources.iter().enumerate() {
                    let value = T::load(simd, from.add(element * T::step(self.sources.step)));
                    for (sums, target) in sums.iter_mut().zip(&targets) {
                        sums[source] = E::mul_add(simd, *target, value, sums[source]);
                    }
                }
            }
        }
        for (products, sums) in self.products.iter().zip(&sums) {
            for (source, sum) in sums.iter().enumerate() {
                // SAFETY: there is room for a product with every source.
                unsafe { E::store::<S>(products.add((start + source) * lanes), *sum) };
            }
        }
    }
}

impl<E: Element, T: Storage, const R: usize> WithSimd for Dots<'_, E, T, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `dots` guarantees that all pointers are valid for this.
        unsafe { in_blocks!(self, simd, self.sources.offsets.len()) }
    }
}

/// Adds to every result the sum of all sources, each multiplied by the target's weight for it.
pub(super) struct Sums<'a, E, T, const R: usize> {
    /// Weights of each target: one vector per source.
    pub weights: [*const E; R],
    pub sources: Sources<'a, E, T>,
    /// Result of each target: one vector per element.
    pub results: [*mut E; R],
}

impl<E: Element, T: Storage, const R: usize> Sums<'_, E, T, R> {
    #[inline(always)]
    unsafe fn block<S: Simd, const C: usize>(&self, simd: S, start: usize) {
        let (lanes, step) = (E::lanes::<S>(), T::step(self.sources.step));
        // SAFETY: results have `width` elements, weights a vector for each source.
        unsafe {
            let mut sums: [[E::Vector<S>; C]; R] = self.results.map(|result| {
                std::array::from_fn(|element| E::load::<S>(result.add((start + element) * lanes)))
            });
            for (source, offset) in self.sources.offsets.iter().enumerate() {
                let from = self.sources.first.add(offset + start * step);
                let weights = self
                    .weights
                    .map(|weight| E::load::<S>(weight.add(source * lanes)));
                for element in 0..C {
                    let value = T::load(simd, from.add(element * step));
                    for (sums, weight) in sums.iter_mut().zip(&weights) {
                        sums[element] = E::mul_add(simd, *weight, value, sums[element]);
                    }
                }
            }
            for (result, sums) in self.results.iter().zip(&sums) {
                for (element, sum) in sums.iter().enumerate() {
                    E::store::<S>(result.add((start + element) * lanes), *sum);
                }
            }
        }
    }
}

impl<E: Element, T: Storage, const R: usize> WithSimd for Sums<'_, E, T, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `sums` guarantees that all pointers are valid for this.
        unsafe { in_blocks!(self, simd, self.sources.width) }
    }
}

/// Runs an expression with the number of targets, one to [`TARGETS`], as a constant.
macro_rules! with_targets {
    ($count:expr, $r:ident => $expression:expr) => {
        match $count {
            1 => {
                const $r: usize = 1;
                $expression
            }
            2 => {
                const $r: usize = 2;
                $expression
            }
            _ => {
                const $r: usize = 3;
                $expression
            }
        }
    };
}

/// [`Dots`] of some targets.
///
/// # Safety
/// Every target and source must have `width` elements, a source in lanes with a whole vector for
/// each, and every target must have room for one vector per source.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, E: Element, T: Storage>(
    simd: S,
    targets: impl ExactSizeIterator<Item = *const E> + Clone,
    sources: Sources<'_, E, T>,
    products: impl Iterator<Item = *mut E>,
) {
    let (mut targets, mut products) = (targets, products);
    with_targets!(targets.len(), R => simd.vectorize(Dots::<E, T, R> {
        targets: [(); R].map(|()| targets.next().expect("counted")),
        sources,
        products: [(); R].map(|()| products.next().expect("one for each target")),
    }));
}

/// [`Sums`] for some targets.
///
/// # Safety
/// Every source and result must have `width` elements, a source in lanes with a whole vector for
/// each, and every target must have a weight for each source.
#[inline(always)]
pub(super) unsafe fn sums<S: Simd, E: Element, T: Storage>(
    simd: S,
    weights: impl ExactSizeIterator<Item = *const E>,
    sources: Sources<'_, E, T>,
    results: impl Iterator<Item = *mut E>,
) {
    let (mut weights, mut results) = (weights, results);
    with_targets!(weights.len(), R => simd.vectorize(Sums::<E, T, R> {
        weights: [(); R].map(|()| weights.next().expect("counted")),
        sources,
        results: [(); R].map(|()| results.next().expect("one for each target")),
    }));
}
