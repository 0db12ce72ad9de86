//! Associated Legendre functions and their derivatives, one order at a time.
//!
//! Orthonormal, without the Condon–Shortley phase: `∫ P_l^m P_k^m dx = δ_lk / 2π`.

use std::f64::consts::PI;

/// Exponent of the power of two that rescales values near the limits of f64.
const SCALE: i32 = 500;

/// A function of degree and order, evaluated at the colatitude θ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Function {
    /// `P_l^m(cos θ)`.
    Value,
    /// `dP_l^m/dθ`.
    Slope,
    /// `m P_l^m/sin θ`.
    Azimuthal,
}

impl Function {
    /// Returns whether the function of degree `order + row` is odd about the equator.
    pub(super) fn is_odd(self, row: usize) -> bool {
        (row % 2 == 1) != (self == Self::Slope)
    }

    /// Evaluates the function for degrees `order..degrees` at points given by their cosines:
    /// `[degree, point]`.
    pub(super) fn rows(self, order: usize, degrees: usize, cosines: &[f64]) -> Vec<f64> {
        let points = cosines.len();
        let below = || values(order.saturating_sub(1), degrees + 1, cosines);
        let above = || values(order + 1, degrees + 1, cosines);
        let row = |function: &[f64], first: usize, degree: usize| {
            let start = (degree >= first).then(|| (degree - first) * points);
            start.map(|start| function[start..start + points].to_vec())
        };
        let sum = |a: f64, x: Option<Vec<f64>>, b: f64, y: Option<Vec<f64>>| -> Vec<f64> {
            let zero = || vec![0.0; points];
            let (x, y) = (x.unwrap_or_else(zero), y.unwrap_or_else(zero));
            x.iter().zip(y).map(|(x, y)| a * x + b * y).collect()
        };
        let m = order as f64;
        match self {
            Self::Value => values(order, degrees, cosines),
            Self::Slope => {
                let (below, above) = (below(), above());
                let rows = (order..degrees).flat_map(|degree| {
                    let l = degree as f64;
                    let higher = row(&above, order + 1, degree);
                    if order == 0 {
                        return sum(0.0, None, -(l * (l + 1.0)).sqrt(), higher);
                    }
                    let a = 0.5 * ((l + m) * (l - m + 1.0)).sqrt();
                    let b = -0.5 * ((l - m) * (l + m + 1.0)).sqrt();
                    sum(a, row(&below, order - 1, degree), b, higher)
                });
                rows.collect()
            }
            Self::Azimuthal if order == 0 => vec![0.0; degrees * points],
            Self::Azimuthal => {
                let (below, above) = (below(), above());
                let rows = (order..degrees).flat_map(|degree| {
                    let l = degree as f64;
                    let half = 0.5 * ((2.0 * l + 1.0) / (2.0 * l + 3.0)).sqrt();
                    let a = half * ((l - m + 1.0) * (l - m + 2.0)).sqrt();
                    let b = half * ((l + m + 1.0) * (l + m + 2.0)).sqrt();
                    let [lower, higher] = [(&below, order - 1), (&above, order + 1)]
                        .map(|(function, first)| row(function, first, degree + 1));
                    sum(a, lower, b, higher)
                });
                rows.collect()
            }
        }
    }
}

/// Computes `P_l^m` for degrees `order..degrees` by recursion over the degree. Near the poles,
/// values of high orders underflow f64 at first and grow with the degree, so they are held as a
/// mantissa and an exponent.
fn values(order: usize, degrees: usize, cosines: &[f64]) -> Vec<f64> {
    let (small, large) = (2.0_f64.powi(-SCALE), 2.0_f64.powi(SCALE));
    let mut found = Vec::with_capacity(degrees.saturating_sub(order) * cosines.len());
    let first = cosines.iter().map(|x| {
        let sine = ((1.0 - x) * (1.0 + x)).sqrt();
        let (mut value, mut exponent) = ((4.0 * PI).sqrt().recip(), 0);
        for m in 1..=order {
            let m = m as f64;
            value *= ((2.0 * m + 1.0) / (2.0 * m)).sqrt() * sine;
            if value < small && value > 0.0 {
                (value, exponent) = (value * large, exponent - 1);
            }
        }
        (value, exponent)
    });
    let (mut this, mut exponents): (Vec<f64>, Vec<i32>) = first.unzip();
    let mut before = vec![0.0; cosines.len()];
    let m = order as f64;
    for degree in order..degrees {
        let held = this.iter().zip(&exponents);
        found.extend(held.map(|(value, exponent)| match exponent {
            0 => *value,
            _ => value * 2.0_f64.powi(SCALE * exponent),
        }));
        let l = (degree + 1) as f64;
        let a = ((2.0 * l - 1.0) / (l - m) * (2.0 * l + 1.0) / (l + m)).sqrt();
        let b = if degree == order {
            0.0
        } else {
            ((l + m - 1.0) / (l - m) * (2.0 * l + 1.0) / (2.0 * l - 3.0) * (l - m - 1.0) / (l + m))
                .sqrt()
        };
        for (k, x) in cosines.iter().enumerate() {
            let next = a * x * this[k] - b * before[k];
            (before[k], this[k]) = (this[k], next);
            if exponents[k] < 0 && next.abs() > 1.0 {
                (before[k], this[k]) = (before[k] * small, next * small);
                exponents[k] += 1;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::grid::SphereGrid;
    use super::*;

    #[test]
    fn low_degrees_are_the_known_functions() {
        let x: f64 = 0.3;
        let sine = (1.0 - x * x).sqrt();
        let near = |found: f64, expected: f64| {
            assert!((found - expected).abs() < 1e-15, "{found} {expected}");
        };
        let zonal = Function::Value.rows(0, 3, &[x]);
        near(zonal[0], (1.0 / (4.0 * PI)).sqrt());
        near(zonal[1], (3.0 / (4.0 * PI)).sqrt() * x);
        near(zonal[2], (5.0 / (16.0 * PI)).sqrt() * (3.0 * x * x - 1.0));
        let first = Function::Value.rows(1, 3, &[x]);
        near(first[0], (3.0 / (8.0 * PI)).sqrt() * sine);
        near(first[1], (15.0 / (8.0 * PI)).sqrt() * x * sine);
        // Their derivatives with respect to θ, and the quotients by sin θ.
        near(
            Function::Slope.rows(0, 2, &[x])[1],
            -(3.0 / (4.0 * PI)).sqrt() * sine,
        );
        near(
            Function::Slope.rows(1, 2, &[x])[0],
            (3.0 / (8.0 * PI)).sqrt() * x,
        );
        near(
            Function::Azimuthal.rows(1, 2, &[x])[0],
            (3.0 / (8.0 * PI)).sqrt(),
        );
    }

    /// Covers orders whose first values underflow f64.
    #[test]
    fn functions_of_high_degree_are_orthonormal() {
        let degrees = 1400;
        let (cosines, weights) = SphereGrid::LegendreGauss.quadrature(degrees).unwrap();
        for order in [0, 1, 700, 1300] {
            let rows = Function::Value.rows(order, degrees, &cosines);
            let row = |degree: usize| &rows[(degree - order) * cosines.len()..][..cosines.len()];
            for (a, b) in [
                (order, order),
                (degrees - 1, degrees - 1),
                (order, order + 2),
                (1350, 1398),
            ] {
                let terms = row(a).iter().zip(row(b)).zip(&weights);
                let found: f64 = terms.map(|((a, b), w)| a * b * w).sum::<f64>() * 2.0 * PI;
                let expected = f64::from(a == b);
                let off = (found - expected).abs();
                assert!(off < 1e-11, "order {order}, degrees {a} and {b}: {off:e}");
            }
        }
    }
}
