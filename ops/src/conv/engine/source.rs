//! Tiles of a weight gradient: cells of the source and of the cotangent, or factors of their rows.

use pulp::{Scalar, Simd};

use super::tile::TileLayout;
use super::winograd::{Factors, PRODUCTS, RESULTS, TAPS, of_cotangent, to_taps};
use crate::kernel::simd::Element;

/// A tile of the source: its cells, or factors of its rows, with the elements of the kernel that
/// each tap of the factors stands for.
pub(super) enum Source {
    Cells(TileLayout),
    Factors(Box<Factors>, Vec<[usize; TAPS]>),
}

impl Source {
    pub(super) fn layout(&self) -> &TileLayout {
        match self {
            Self::Cells(layout) => layout,
            Self::Factors(factors, _) => &factors.layout,
        }
    }

    pub(super) fn len(&self, channels: usize) -> usize {
        match self {
            Self::Cells(layout) => layout.len(channels),
            Self::Factors(factors, _) => factors.len(channels),
        }
    }

    /// Rows of the source's tile for each row of the plan's tile.
    pub(super) fn products(&self) -> usize {
        match self {
            Self::Cells(_) => 1,
            Self::Factors(..) => PRODUCTS,
        }
    }

    /// Rows of the cotangent for each row of the plan's tile.
    pub(super) fn results(&self) -> usize {
        match self {
            Self::Cells(_) => 1,
            Self::Factors(..) => RESULTS,
        }
    }

    /// Computes the gradients of weights, of kernels of `kernel` elements, from their sums.
    pub(super) fn weights<E: Element>(&self, sums: Vec<E>, kernel: usize) -> Vec<E> {
        let Self::Factors(_, taps) = self else {
            return sums;
        };
        let of_product = sums.len() / PRODUCTS;
        let mut weights = vec![E::default(); TAPS * of_product];
        for (index, weights) in weights.chunks_exact_mut(kernel).enumerate() {
            for (tap, elements) in taps.iter().enumerate() {
                let first = index * taps.len() + tap;
                let sums = std::array::from_fn(|k| E::splat(Scalar, sums[k * of_product + first]));
                for (element, value) in elements.iter().zip(to_taps::<_, E>(Scalar, sums)) {
                    weights[*element] = E::sum(Scalar, value);
                }
            }
        }
        weights
    }
}

/// Transforms a tile of rows of the cotangent in place.
#[inline(always)]
pub(super) fn transform<S: Simd, E: Element>(simd: S, tile: &mut [E], row: usize) {
    let tile = &mut tile[..PRODUCTS * row];
    for column in (0..row).step_by(E::lanes::<S>()) {
        let mut rows = [E::splat(simd, E::default()); RESULTS];
        // SAFETY: rows are whole vectors long, and the tile has as many rows as there are products.
        unsafe {
            for (line, cells) in rows.iter_mut().enumerate() {
                *cells = E::load::<S>(tile.as_ptr().add(line * row + column));
            }
            for (k, factor) in of_cotangent::<S, E>(simd, rows).into_iter().enumerate() {
                E::store::<S>(tile.as_mut_ptr().add(k * row + column), factor);
            }
        }
    }
}
