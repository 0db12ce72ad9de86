//! Columns of oblongs of four rows and two columns of results: F(4 × 2, 3 × 3), 24 products for
//! eight results, with smaller errors than squares.
//!
//! Rows are transformed like those of squares, columns by F(2, 3), with the points 0, ±1 and ∞.

use pulp::Simd;

use super::{PRODUCTS, TAPS, both};
use crate::kernel::simd::Element;

/// Factors of four columns of a source, or of the first two of a cotangent; the last two products
/// are not used.
#[inline(always)]
pub(super) fn transformed<S: Simd, E: Element, const CELLS: usize>(
    simd: S,
    x: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; PRODUCTS] {
    let unused = E::splat(simd, E::default());
    let (zero, [high, low], infinity) = if const { CELLS == PRODUCTS } {
        (
            E::minus(simd, x[2], x[0]),
            both::<S, E>(simd, x[2], x[1]),
            E::minus(simd, x[3], x[1]),
        )
    } else {
        (x[0], both::<S, E>(simd, x[0], x[1]), x[1])
    };
    [zero, high, low, infinity, unused, unused]
}

/// Gradients of taps from sums of products, the last two of which are not used.
#[inline(always)]
pub(super) fn to_taps<S: Simd, E: Element>(
    simd: S,
    [zero, high, low, infinity, ..]: [E::Vector<S>; PRODUCTS],
) -> [E::Vector<S>; TAPS] {
    let [even, odd] = both::<S, E>(simd, high, low);
    let half = E::splat(simd, E::from_f64(0.5));
    let even = E::times(simd, half, even);
    [
        E::minus(simd, even, zero),
        E::times(simd, half, odd),
        E::plus(simd, even, infinity),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Scalar;

    #[test]
    fn transforms_give_gradients() {
        let x = [0.3, -1.2, 2.5, 0.7, 0.0, 0.0];
        let g = [1.3, -0.2, 0.0, 0.0, 0.0, 0.0];
        let source = transformed::<Scalar, f64, PRODUCTS>(Scalar::new(), x);
        let cotangent = transformed::<Scalar, f64, 4>(Scalar::new(), g);
        let products = std::array::from_fn(|k| source[k] * cotangent[k]);
        let gradient = to_taps::<Scalar, f64>(Scalar::new(), products);
        for (tap, gradient) in gradient.into_iter().enumerate() {
            let expected = g[0] * x[tap] + g[1] * x[tap + 1];
            assert!((gradient - expected).abs() < 1e-13, "{tap}: {gradient}");
        }
    }
}
