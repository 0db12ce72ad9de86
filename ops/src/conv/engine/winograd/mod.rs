//! Correlations with three rows of taps by Winograd's method, F(4, 3): six products for four rows
//! of results, where the direct sum takes twelve.
//!
//! Four rows of results are a polynomial product, which is determined by its values at six points:
//! 0, ±5/8, ±3/2 and ∞ (Winograd 1980; points near one keep rounding small, Barabasz et al. 2020).
//! With the matrices of these points, `y = Aᵀ[(G w) ⊙ (Bᵀ x)]`: rows of the source are transformed
//! once for all outputs ([`Factors`]), taps once for all cells, and sums over channels, planes and
//! columns of taps are those of a direct correlation. The gradient of the taps is
//! `Gᵀ[(A g) ⊙ (Bᵀ x)]`.
//!
//! Transforms run along rows, so vectors of columns stay as they are, and any taps in other dims
//! are possible. With three columns of taps as well, and many channels, columns are transformed in
//! the same way ([`squares`]): 36 products for sixteen results, where rows alone need 72 and the
//! direct sum 144.

mod factors;
pub(crate) mod gradient;
mod oblongs;
pub(crate) mod results;
mod squares;
mod strip;
mod task;

pub(crate) use factors::{Factors, RowTiles, SquareTiles, Tiles};
pub(super) use task::correlate;

use std::ops::Range;

use pulp::Simd;

use super::geometry::Correlation;
use super::method::Method;
use crate::kernel::products::Products;
use crate::kernel::simd::{Element, has_shuffles};

/// Rows of results of a tile.
pub(super) const RESULTS: usize = 4;
/// Products of a tile: rows of the source that it meets.
pub(super) const PRODUCTS: usize = 6;
/// Rows and columns of taps of a square.
pub(super) const TAPS: usize = 3;

/// Rows of whole tiles, or columns of whole squares, within a range of `count` results: those that
/// may be computed separately.
pub(crate) fn whole_tiles(results: &Range<usize>, count: usize) -> Range<usize> {
    let end = if results.end == count {
        count
    } else {
        results.end / RESULTS * RESULTS
    };
    results.start.next_multiple_of(RESULTS).min(end)..end
}

/// Squares of a correlation, or its oblongs, if sums of these numbers are computed by squares,
/// given input and output channels of a group, and the number, rows and columns of fields of
/// results, which must have at least `least` cells together.
pub(crate) fn squares<S: Simd, E: Element, const COLUMNS: usize>(
    method: Method,
    correlation: &Correlation,
    channels: [usize; 2],
    sizes: [usize; 3],
    least: usize,
) -> Option<Tiles<COLUMNS>> {
    let used = has_shuffles::<S, E>() && method.transforms_squares(channels, sizes, least);
    let squares = used.then(|| Tiles::new(correlation)).flatten();
    squares.filter(|squares| squares.flat.taps.len() == 1)
}

/// Whether code for [`squares`] of these numbers is needed.
pub(crate) const fn may_have_squares<S: Simd, E: Element, P: Products<E>>() -> bool {
    P::NUMBERS == 1 && size_of::<E>() == size_of::<f32>() && !S::IS_SCALAR
}

/// Distances from 0 of the points other than 0 and ∞, which lie on both sides.
const NEAR: f64 = 0.625;
const FAR: f64 = 1.5;

/// `Bᵀ`: transforms rows of a source to factors.
#[inline(always)]
fn of_source<S: Simd, E: Element>(
    simd: S,
    x: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; PRODUCTS] {
    let constant = |value: f64| E::splat(simd, E::from_f64(value));
    let (near, far) = (NEAR * NEAR, FAR * FAR);
    // Polynomials with zeros at all other points.
    let without = |square: f64, low, high| E::mul_add(simd, constant(-square), low, high);
    let ends = |low, middle, high| {
        let rest = E::mul_add(simd, constant(-(near + far)), middle, high);
        E::mul_add(simd, constant(near * far), low, rest)
    };
    let pair = |point: f64, other: f64| {
        let even = without(other, x[2], x[4]);
        let odd = E::times(simd, constant(point), without(other, x[1], x[3]));
        both::<S, E>(simd, even, odd)
    };
    let [near_high, near_low] = pair(NEAR, far);
    let [far_high, far_low] = pair(FAR, near);
    let (zero, infinity) = (ends(x[0], x[2], x[4]), ends(x[1], x[3], x[5]));
    [zero, near_high, near_low, far_high, far_low, infinity]
}

/// Sum and difference of two vectors.
#[inline(always)]
fn both<S: Simd, E: Element>(simd: S, high: E::Vector<S>, low: E::Vector<S>) -> [E::Vector<S>; 2] {
    [E::plus(simd, high, low), E::minus(simd, high, low)]
}

/// `Aᵀ`: transforms sums of products to rows of results.
#[inline(always)]
fn to_results<S: Simd, E: Element>(
    simd: S,
    sums: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; RESULTS] {
    let [zero, near_high, near_low, far_high, far_low, infinity] = sums;
    let constant = |value: f64| E::splat(simd, E::from_f64(value));
    let near = both::<S, E>(simd, near_high, near_low);
    let far = both::<S, E>(simd, far_high, far_low);
    // Value of each power at a point.
    let power = |power: i32, rest| {
        let odd = power as usize % 2;
        let rest = E::mul_add(simd, constant(FAR.powi(power)), far[odd], rest);
        E::mul_add(simd, constant(NEAR.powi(power)), near[odd], rest)
    };
    let nothing = constant(0.0);
    [
        power(0, zero),
        power(1, nothing),
        power(2, nothing),
        power(3, infinity),
    ]
}

/// `A`: transforms rows of a cotangent to factors.
#[inline(always)]
pub(super) fn of_cotangent<S: Simd, E: Element>(
    simd: S,
    g: [E::Vector<S>; RESULTS],
) -> [E::Vector<S>; PRODUCTS] {
    let constant = |value: f64| E::splat(simd, E::from_f64(value));
    let pair = |point: f64| {
        let square = constant(point * point);
        let even = E::mul_add(simd, square, g[2], g[0]);
        let odd = E::mul_add(simd, square, g[3], g[1]);
        let odd = E::times(simd, constant(point), odd);
        both::<S, E>(simd, even, odd)
    };
    let ([near_high, near_low], [far_high, far_low]) = (pair(NEAR), pair(FAR));
    [g[0], near_high, near_low, far_high, far_low, g[3]]
}

/// Inverse of the product of the distances from a point to the others: for zero, and for each pair.
const AT_ZERO: f64 = 1.0 / (NEAR * NEAR * FAR * FAR);
const AT_NEAR: f64 = 0.5 / (NEAR * NEAR * (NEAR * NEAR - FAR * FAR));
const AT_FAR: f64 = 0.5 / (FAR * FAR * (FAR * FAR - NEAR * NEAR));

/// `G`: transforms rows of taps to factors.
#[inline(always)]
fn of_taps<S: Simd, E: Element>(
    simd: S,
    [low, middle, high]: [E::Vector<S>; TAPS],
) -> [E::Vector<S>; PRODUCTS] {
    let times = |value: f64, vector| E::times(simd, E::splat(simd, E::from_f64(value)), vector);
    let pair = |point: f64, scale: f64| {
        let even = E::plus(simd, times(scale, low), times(scale * point * point, high));
        let odd = times(scale * point, middle);
        both::<S, E>(simd, even, odd)
    };
    let ([near_high, near_low], [far_high, far_low]) = (pair(NEAR, AT_NEAR), pair(FAR, AT_FAR));
    [
        times(AT_ZERO, low),
        near_high,
        near_low,
        far_high,
        far_low,
        high,
    ]
}

/// `Gᵀ`: transforms sums of products to gradients of taps.
#[inline(always)]
pub(super) fn to_taps<S: Simd, E: Element>(
    simd: S,
    sums: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; TAPS] {
    let [zero, near_high, near_low, far_high, far_low, infinity] = sums;
    let constant = |value: f64| E::splat(simd, E::from_f64(value));
    let near = both::<S, E>(simd, near_high, near_low);
    let far = both::<S, E>(simd, far_high, far_low);
    let power = |power: i32, rest| {
        let odd = power as usize % 2;
        let rest = E::mul_add(simd, constant(AT_FAR * FAR.powi(power)), far[odd], rest);
        E::mul_add(simd, constant(AT_NEAR * NEAR.powi(power)), near[odd], rest)
    };
    let nothing = constant(0.0);
    [
        E::mul_add(simd, constant(AT_ZERO), zero, power(0, nothing)),
        power(1, nothing),
        power(2, infinity),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Scalar;

    /// The four results of three taps, and the gradient of the taps, by their definitions.
    #[test]
    fn transforms_give_results_and_gradients() {
        let (x, w) = ([0.3, -1.2, 2.5, 0.7, -0.9, 1.1], [0.4, -0.8, 1.7]);
        let g = [1.3, -0.2, 0.6, -2.1];
        let factors = of_source::<Scalar, f64>(Scalar::new(), x);
        let product = |a: [f64; PRODUCTS]| std::array::from_fn(|k| a[k] * factors[k]);
        let of_taps = of_taps::<Scalar, f64>(Scalar::new(), w);
        let y = to_results::<Scalar, f64>(Scalar::new(), product(of_taps));
        let of_cotangent = of_cotangent::<Scalar, f64>(Scalar::new(), g);
        let gradient = to_taps::<Scalar, f64>(Scalar::new(), product(of_cotangent));
        for row in 0..RESULTS {
            let expected: f64 = (0..TAPS).map(|tap| w[tap] * x[row + tap]).sum();
            assert!((y[row] - expected).abs() < 1e-13, "{row}: {y:?}");
        }
        for tap in 0..TAPS {
            let expected: f64 = (0..RESULTS).map(|row| g[row] * x[row + tap]).sum();
            assert!(
                (gradient[tap] - expected).abs() < 1e-13,
                "{tap}: {gradient:?}"
            );
        }
    }
}
