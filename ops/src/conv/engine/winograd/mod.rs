//! Correlations with three rows of taps by Winograd's method, F(4, 3): six products for four rows
//! of results, where twelve are the direct sum.
//!
//! Four rows of results are a polynomial product, which is known from its values at six points: 0,
//! ±3/4, ±3/2 and ∞ (Winograd 1980; points near one keep rounding small, Barabasz et al. 2020).
//! With the matrices of these points, `y = Aᵀ[(G w) ⊙ (Bᵀ x)]`: rows of the source are transformed
//! once for all outputs ([`Factors`]), taps once for all cells, and sums over channels, planes and
//! columns of taps are those of a direct correlation. The gradient of the taps is
//! `Gᵀ[(A g) ⊙ (Bᵀ x)]`.
//!
//! Transforms go along rows, so vectors of columns stay as they are, and any taps in other dims are
//! possible. With three columns of taps, too, and many channels, pairs of columns are transformed as
//! well, F(2, 3) with the points 0, ±1 and ∞: 24 products for eight results, where rows alone need 36
//! and the direct sum 72. Neither result of a pair depends on a cell outside of its window.

mod factors;
mod strip;
mod task;

pub(crate) use factors::{Factors, RowTiles, Tiles};
pub(super) use task::correlate;

use std::ops::Range;

use pulp::Simd;

use crate::kernel::simd::Element;

/// Rows of results of a tile.
pub(super) const RESULTS: usize = 4;
/// Products of a tile: rows of the source that it meets.
pub(super) const PRODUCTS: usize = 6;
/// Rows of taps, and columns.
pub(super) const TAPS: usize = 3;
/// Columns of results of a pair.
const PAIR: usize = 2;
/// Products of a pair of columns: columns of the source that it meets.
const COLUMN_PRODUCTS: usize = 4;

/// The rows of whole tiles within a range of rows, of so many: those that may be computed by themselves.
pub(crate) fn whole_tiles(rows: &Range<usize>, count: usize) -> Range<usize> {
    let end = match rows.end == count {
        true => count,
        false => rows.end / RESULTS * RESULTS,
    };
    rows.start.next_multiple_of(RESULTS).min(end)..end
}

/// The points beside 0 and ∞ are those at these distances from 0, on both sides.
const NEAR: f64 = 0.75;
const FAR: f64 = 1.5;

/// `Bᵀ`: rows of a source to factors.
#[inline(always)]
fn of_source<S: Simd, E: Element>(
    simd: S,
    x: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; PRODUCTS] {
    let constant = |value: f64| E::splat(simd, E::from_f64(value));
    let (near, far) = (NEAR * NEAR, FAR * FAR);
    // The polynomials with zeros at all other points.
    let without = |square: f64, low, high| E::mul_add(simd, constant(-square), low, high);
    let ends = |low, middle, high| {
        let rest = E::mul_add(simd, constant(-(near + far)), middle, high);
        E::mul_add(simd, constant(near * far), low, rest)
    };
    let pair = |point: f64, other: f64| {
        let even = without(other, x[2], x[4]);
        let odd = E::times(simd, constant(point), without(other, x[1], x[3]));
        [E::plus(simd, even, odd), E::minus(simd, even, odd)]
    };
    let [near_high, near_low] = pair(NEAR, far);
    let [far_high, far_low] = pair(FAR, near);
    let (zero, infinity) = (ends(x[0], x[2], x[4]), ends(x[1], x[3], x[5]));
    [zero, near_high, near_low, far_high, far_low, infinity]
}

/// `Bᵀ` of columns, with the points 0, ±1 and ∞.
#[inline(always)]
fn of_columns<S: Simd, E: Element>(
    simd: S,
    [a, b, c, d]: [E::Vector<S>; COLUMN_PRODUCTS],
) -> [E::Vector<S>; COLUMN_PRODUCTS] {
    [
        E::minus(simd, a, c),
        E::plus(simd, b, c),
        E::minus(simd, c, b),
        E::minus(simd, b, d),
    ]
}

/// `Aᵀ` of columns.
#[inline(always)]
fn to_pair<S: Simd, E: Element>(
    simd: S,
    [zero, high, low, infinity]: [E::Vector<S>; COLUMN_PRODUCTS],
) -> [E::Vector<S>; PAIR] {
    let (sum, difference) = (E::plus(simd, high, low), E::minus(simd, high, low));
    [
        E::plus(simd, zero, sum),
        E::minus(simd, difference, infinity),
    ]
}

/// `G` of columns.
#[inline(always)]
fn of_column_taps<E: Element>([left, middle, right]: [E; TAPS]) -> [E; COLUMN_PRODUCTS] {
    let half = E::from_f64(0.5);
    let (even, odd) = (half * (left + right), half * middle);
    [left, even + odd, even - odd, right]
}

/// `Aᵀ`: sums of products to rows of results.
#[inline(always)]
fn to_results<S: Simd, E: Element>(
    simd: S,
    sums: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; RESULTS] {
    let [zero, near_high, near_low, far_high, far_low, infinity] = sums;
    let constant = |value: f64| E::splat(simd, E::from_f64(value));
    let near = [
        E::plus(simd, near_high, near_low),
        E::minus(simd, near_high, near_low),
    ];
    let far = [
        E::plus(simd, far_high, far_low),
        E::minus(simd, far_high, far_low),
    ];
    // The value at a point of each power.
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

/// `A`: rows of a cotangent to factors.
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
        [E::plus(simd, even, odd), E::minus(simd, even, odd)]
    };
    let ([near_high, near_low], [far_high, far_low]) = (pair(NEAR), pair(FAR));
    [g[0], near_high, near_low, far_high, far_low, g[3]]
}

/// One over the product of the distances of a point to the others: of zero, and of a pair.
const AT_ZERO: f64 = 1.0 / (NEAR * NEAR * FAR * FAR);
const AT_NEAR: f64 = 0.5 / (NEAR * NEAR * (NEAR * NEAR - FAR * FAR));
const AT_FAR: f64 = 0.5 / (FAR * FAR * (FAR * FAR - NEAR * NEAR));

/// `G`: rows of taps to factors.
#[inline(always)]
fn of_taps<E: Element>(taps: [E; TAPS]) -> [E; PRODUCTS] {
    let [low, middle, high] = taps;
    let pair = |point: f64, scale: f64| {
        let (even, odd) = (
            low * E::from_f64(scale) + high * E::from_f64(scale * point * point),
            middle * E::from_f64(scale * point),
        );
        [even + odd, even - odd]
    };
    let ([near_high, near_low], [far_high, far_low]) = (pair(NEAR, AT_NEAR), pair(FAR, AT_FAR));
    let zero = low * E::from_f64(AT_ZERO);
    [zero, near_high, near_low, far_high, far_low, high]
}

/// `Gᵀ`: sums of products to gradients of taps.
pub(super) fn to_taps<E: Element>(sums: [E; PRODUCTS]) -> [E; TAPS] {
    let [zero, near_high, near_low, far_high, far_low, infinity] = sums;
    let near = [near_high + near_low, near_high - near_low];
    let far = [far_high + far_low, far_high - far_low];
    let power = |power: i32| {
        let odd = power as usize % 2;
        near[odd] * E::from_f64(AT_NEAR * NEAR.powi(power))
            + far[odd] * E::from_f64(AT_FAR * FAR.powi(power))
    };
    [
        zero * E::from_f64(AT_ZERO) + power(0),
        power(1),
        power(2) + infinity,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Scalar;

    /// The pair of results of three columns of taps, as it is defined.
    #[test]
    fn transforms_of_columns_give_pairs() {
        let (x, w) = ([0.3, -1.2, 2.5, 0.7], [0.4, -0.8, 1.7]);
        let factors = of_columns::<Scalar, f64>(Scalar::new(), x);
        let taps = of_column_taps(w);
        let products = std::array::from_fn(|k| factors[k] * taps[k]);
        let pair = to_pair::<Scalar, f64>(Scalar::new(), products);
        for column in 0..PAIR {
            let expected: f64 = (0..TAPS).map(|tap| w[tap] * x[column + tap]).sum();
            assert!(
                (pair[column] - expected).abs() < 1e-14,
                "{column}: {pair:?}"
            );
        }
    }

    /// The four results of three taps, and the gradient of the taps, as they are defined.
    #[test]
    fn transforms_give_results_and_gradients() {
        let (x, w) = ([0.3, -1.2, 2.5, 0.7, -0.9, 1.1], [0.4, -0.8, 1.7]);
        let g = [1.3, -0.2, 0.6, -2.1];
        let factors = of_source::<Scalar, f64>(Scalar::new(), x);
        let product = |a: [f64; PRODUCTS]| std::array::from_fn(|k| a[k] * factors[k]);
        let y = to_results::<Scalar, f64>(Scalar::new(), product(of_taps(w)));
        let of_cotangent = of_cotangent::<Scalar, f64>(Scalar::new(), g);
        let gradient = to_taps(product(of_cotangent));
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
