//! Vector functions: the exponential, and the tails of two distributions from which activations are
//! computed.
//!
//! GELU and SiLU are `x · F(x)`, for the distribution function `F` of the normal and the logistic
//! distribution. Both are symmetric, so that with `u = |x|` and the tail `F(-u)`
//!
//! ```text
//! x · F(x)  = max(x, 0) - u · F(-u)
//! its slope = F(-u) - u · F'(u) for x < 0, one minus that for x > 0
//! ```
//!
//! and no digits are lost for either sign of `x`. The exponential reduces its argument by multiples
//! of ln 2 in two parts (W. J. Cody and W. Waite, Software Manual for the Elementary Functions,
//! 1980). The normal tail is `F'(u) / (u + G(u))`: `u + G(u)` is the inverse of Mills' ratio, and
//! `G` is a smooth function that decays like `1/u`, so one rational function approximates it
//! everywhere. Its error matters less where `u` is large. Its coefficients, all positive, are a
//! minimax fit by Remez's exchange algorithm, made for this file; those of the exponential
//! interpolate `(e^r - 1 - r) / r²` at Chebyshev nodes.

use pulp::Simd;

use super::constants::Constants;
use super::simd::Element;

/// Evaluates a polynomial by Horner's rule.
#[inline(always)]
fn polynomial<S: Simd, E: Element>(simd: S, coefficients: &[E], x: E::Vector<S>) -> E::Vector<S> {
    let Some((&last, lower)) = coefficients.split_last() else {
        return E::splat(simd, E::default());
    };
    let mut sum = E::splat(simd, last);
    for &coefficient in lower.iter().rev() {
        sum = E::mul_add(simd, sum, x, E::splat(simd, coefficient));
    }
    sum
}

/// `e^(a · b)` without rounding of the product, for results that are normal numbers.
#[inline(always)]
fn exp_product<S: Simd, E: Element>(simd: S, a: E::Vector<S>, b: E::Vector<S>) -> E::Vector<S> {
    let Constants {
        round,
        log2_e,
        ln_2: [high, low],
        exp,
        one,
        ..
    } = E::CONSTANTS;
    let [round, log2_e, one] = [round, log2_e, one].map(|value| E::splat(simd, value));
    let [high, low] = [high, low].map(|value| E::splat(simd, E::default() - value));
    let shifted = E::mul_add(simd, E::times(simd, a, log2_e), b, round);
    let exponent = E::minus(simd, shifted, round);
    let rest = E::fused_mul_add(simd, a, b, E::times(simd, exponent, high));
    let rest = E::mul_add(simd, exponent, low, rest);
    let square = E::times(simd, rest, rest);
    let curve = E::mul_add(simd, polynomial::<S, E>(simd, exp, rest), square, rest);
    E::scale(simd, E::plus(simd, curve, one), shifted)
}

/// `e^x` for `x` up to about 80; zero where that would not be a normal number.
#[inline(always)]
pub(crate) fn exp<S: Simd, E: Element>(simd: S, x: E::Vector<S>) -> E::Vector<S> {
    let [zero, one] = [E::default(), E::CONSTANTS.one].map(|value| E::splat(simd, value));
    let lowest = E::splat(simd, E::default() - Distribution::Logistic.end());
    // The last step restores NaN, whose bits the scaling may have changed.
    let power = E::mul_add(simd, x, zero, exp_product::<S, E>(simd, x, one));
    E::select_less(simd, [x, lowest], zero, power)
}

/// Distributions that are symmetric about zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Distribution {
    /// The standard normal distribution, whose distribution function is `(1 + erf(x/√2)) / 2`.
    Normal,
    /// The logistic distribution, whose distribution function is the sigmoid.
    Logistic,
}

/// Lower tail `F(-u)` and density `F'(u)`, for `u ≥ 0`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail<V> {
    pub tail: V,
    pub density: V,
}

impl Distribution {
    /// Cutoff beyond which the tail is zero.
    #[inline(always)]
    pub(crate) fn end<E: Element>(self) -> E {
        let [normal, logistic] = E::CONSTANTS.ends;
        match self {
            Self::Normal => normal,
            Self::Logistic => logistic,
        }
    }

    /// Tail and density for `0 ≤ u ≤ end`, or NaN.
    #[inline(always)]
    pub(crate) fn tail<S: Simd, E: Element>(self, simd: S, u: E::Vector<S>) -> Tail<E::Vector<S>> {
        let Constants {
            normal: [over, under],
            density,
            half,
            one,
            ..
        } = E::CONSTANTS;
        let splat = |value| E::splat(simd, value);
        let negative = |value| splat(E::default() - value);
        let cut = |decay| E::select_less(simd, [u, splat(self.end())], decay, splat(E::default()));
        match self {
            Self::Normal => {
                let scaled = E::times(simd, u, negative(half));
                let decay = cut(exp_product::<S, E>(simd, scaled, u));
                let density = E::times(simd, decay, splat(density));
                let over = polynomial::<S, E>(simd, over, u);
                let under = polynomial::<S, E>(simd, under, u);
                let inverse = E::mul_add(simd, u, under, over);
                let tail = E::over(simd, E::times(simd, density, under), inverse);
                Tail { tail, density }
            }
            Self::Logistic => {
                let decay = cut(exp_product::<S, E>(simd, u, negative(one)));
                let one = splat(one);
                let high = E::over(simd, one, E::plus(simd, one, decay));
                let tail = E::times(simd, decay, high);
                Tail {
                    tail,
                    density: E::times(simd, tail, high),
                }
            }
        }
    }
}

/// `x · F(x)`: GELU for the normal, SiLU for the logistic distribution.
#[inline(always)]
pub(crate) fn gated<S: Simd, E: Element>(
    simd: S,
    gate: Distribution,
    x: E::Vector<S>,
) -> E::Vector<S> {
    let u = magnitude::<S, E>(simd, gate, x);
    let Tail { tail, .. } = gate.tail::<S, E>(simd, u);
    let zero = E::splat(simd, E::default());
    // NaN propagates through `u`.
    let positive = E::select_less(simd, [zero, x], x, zero);
    E::minus(simd, positive, E::times(simd, u, tail))
}

/// Derivative of [`gated`].
#[inline(always)]
pub(crate) fn gated_slope<S: Simd, E: Element>(
    simd: S,
    gate: Distribution,
    x: E::Vector<S>,
) -> E::Vector<S> {
    let [zero, one] = [E::default(), E::CONSTANTS.one].map(|value| E::splat(simd, value));
    let u = magnitude::<S, E>(simd, gate, x);
    let Tail { tail, density } = gate.tail::<S, E>(simd, u);
    let below = E::mul_add(simd, E::minus(simd, zero, u), density, tail);
    E::select_less(simd, [x, zero], below, E::minus(simd, one, below))
}

/// `|x|`, clamped to the cutoff of the tail.
#[inline(always)]
fn magnitude<S: Simd, E: Element>(simd: S, gate: Distribution, x: E::Vector<S>) -> E::Vector<S> {
    let (u, end) = (E::abs(simd, x), E::splat(simd, gate.end()));
    E::select_less(simd, [end, u], end, u)
}

/// `max(x, 0)`, or NaN.
#[inline(always)]
pub(crate) fn relu<S: Simd, E: Element>(simd: S, x: E::Vector<S>) -> E::Vector<S> {
    let zero = E::splat(simd, E::default());
    E::select_less(simd, [x, zero], zero, x)
}

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::*;
    use crate::kernel::simd::Isa;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Function {
        Gated(Distribution),
        Slope(Distribution),
        Relu,
    }

    struct Apply<'a, E>(Function, &'a mut [E]);

    impl<E: Element> WithSimd for Apply<'_, E> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for part in self.1.chunks_mut(E::lanes::<S>()) {
                let x = E::load_part(simd, part, E::splat(simd, E::default()));
                let y = match self.0 {
                    Function::Gated(gate) => gated::<S, E>(simd, gate, x),
                    Function::Slope(gate) => gated_slope::<S, E>(simd, gate, x),
                    Function::Relu => relu::<S, E>(simd, x),
                };
                E::store_part(simd, part, y);
            }
        }
    }

    fn applied<E: Element>(isa: Isa, function: Function, x: &[E]) -> Vec<E> {
        let mut y = x.to_vec();
        isa.run(Apply(function, &mut y));
        y
    }

    /// `F(-u)` and `F'(u)`; the normal tail by a series of positive terms, or Laplace's continued
    /// fraction.
    fn tail(gate: Distribution, u: f64) -> [f64; 2] {
        if gate == Distribution::Logistic {
            let decay = (-u).exp();
            return [decay / (1.0 + decay), decay / (1.0 + decay) / (1.0 + decay)];
        }
        // Corrected for the rounding of the square.
        let square = u * u;
        let decay = (-square / 2.0).exp() * (1.0 - u.mul_add(u, -square) / 2.0);
        let density = decay / (2.0 * std::f64::consts::PI).sqrt();
        let tail = if u < 1.0 {
            let terms = (1..50).scan(u, |term, k| {
                let this = *term;
                *term *= square / f64::from(2 * k + 1);
                Some(this)
            });
            0.5 - density * terms.sum::<f64>()
        } else {
            let levels = 20 + (700.0 / square) as i32;
            density
                / (1..=levels)
                    .rev()
                    .fold(u, |rest, k| u + f64::from(k) / rest)
        };
        [tail, density]
    }

    fn expected(function: Function, x: f64) -> f64 {
        match function {
            Function::Relu => x.max(0.0),
            Function::Gated(gate) => {
                let [tail, _] = tail(gate, x.abs());
                x * if x < 0.0 { tail } else { 1.0 - tail }
            }
            Function::Slope(gate) => {
                let [tail, density] = tail(gate, x.abs());
                let below = tail - x.abs() * density;
                if x < 0.0 { below } else { 1.0 - below }
            }
        }
    }

    const GATES: [Distribution; 2] = [Distribution::Normal, Distribution::Logistic];

    fn functions() -> Vec<Function> {
        let gates = GATES
            .iter()
            .flat_map(|&gate| [Function::Gated(gate), Function::Slope(gate)]);
        gates.chain([Function::Relu]).collect()
    }

    /// Largest error and its argument; relative to the value, or to a quarter where slopes change
    /// sign. Tiny values need only be tiny.
    fn worst<E: Element>(isa: Isa, function: Function, x: &[E], tiny: f64) -> (f64, f64) {
        let y = applied(isa, function, x);
        let errors = x.iter().zip(&y).map(|(x, y)| {
            let (x, y) = (x.to_f64(), y.to_f64());
            let value = expected(function, x);
            let near_root = matches!(function, Function::Slope(_)) && (-4.0..0.0).contains(&x);
            let size = value.abs().max(if near_root { 0.25 } else { 0.0 });
            let error = (y - value).abs() / size;
            (
                if value.abs() < tiny {
                    f64::from(y.abs() > tiny)
                } else {
                    error
                },
                x,
            )
        });
        errors.fold(
            (0.0, 0.0),
            |worst, error| if error.0 > worst.0 { error } else { worst },
        )
    }

    /// Checks that errors are less than `most`.
    fn check<E: Element>(x: &[E], tiny: f64, most: f64) {
        for isa in Isa::available() {
            for function in functions() {
                let ((error, at), name) = (worst(isa, function, x, tiny), isa.name());
                assert!(error < most, "{name} {function:?}: {error:e} at {at}");
            }
        }
    }

    #[test]
    fn single_precision_is_within_a_few_units_in_the_last_place() {
        // Every 4001st number of either sign up to 20, and a fine grid.
        let patterns = (0..20f32.to_bits()).step_by(4001).map(f32::from_bits);
        let grid = (0..200_000).map(|index| index as f32 * 1e-4);
        let x: Vec<f32> = patterns.chain(grid).flat_map(|x| [x, -x]).collect();
        check(&x, 3e-36, 4e-7);
    }

    #[test]
    fn double_precision_is_within_a_few_units_in_the_last_place() {
        let grid = (0..100_000).map(|index| f64::from(index) * 3.8e-4);
        let small = (0..300).map(|power| 10f64.powi(-power));
        let x: Vec<f64> = grid.chain(small).flat_map(|x| [x, -x]).collect();
        check(&x, 1e-304, 3e-15);
    }

    fn limits<E: Element>(max: f64) {
        let [x, y] = [f64::INFINITY, max].map(E::from_f64);
        let nan = E::from_f64(f64::NAN);
        let negative = |x: E| E::default() - x;
        for isa in Isa::available() {
            for function in functions() {
                let found = applied(isa, function, &[x, negative(x), y, negative(y), nan]);
                let found: Vec<f64> = found.into_iter().map(E::to_f64).collect();
                let high = match function {
                    Function::Slope(_) => [1.0; 2],
                    Function::Gated(_) | Function::Relu => [f64::INFINITY, max],
                };
                assert_eq!(
                    found[..4],
                    [high[0], 0.0, high[1], 0.0],
                    "{} {function:?}",
                    isa.name()
                );
                assert!(found[4].is_nan());
            }
        }
    }

    #[test]
    fn infinities_and_nan_give_the_limits() {
        limits::<f32>(f64::from(f32::MAX));
        limits::<f64>(f64::MAX);
    }
}
