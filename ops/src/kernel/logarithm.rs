//! Natural logarithm in single precision.

/// Natural logarithm without branches, so that the compiler vectorises loops over it.
///
/// After S. Moshier's `logf` (Cephes): the exponent, and a polynomial in a mantissa from `√½` to
/// `√2`. The error is below one unit in the last place.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    const SUBNORMAL: f32 = (1_u32 << 23) as f32;
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const POLYNOMIAL: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let small = x < f32::MIN_POSITIVE;
    let bits = (if small { x * SUBNORMAL } else { x }).to_bits();
    let half = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000);
    let low = half < std::f32::consts::FRAC_1_SQRT_2;
    let exponent = (bits >> 23) as i32 - 126 - i32::from(low) - if small { 23 } else { 0 };
    let exponent = exponent as f32;
    let t = (if low { half + half } else { half }) - 1.0;
    let square = t * t;
    let mut sum = POLYNOMIAL[0];
    for coefficient in &POLYNOMIAL[1..] {
        sum = sum * t + coefficient;
    }
    let rest = sum * t * square + exponent * LN_2[1] - 0.5 * square;
    let y = t + rest + exponent * LN_2[0];
    let y = if x < f32::INFINITY { y } else { x };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 { f32::NAN } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_within_a_unit_in_the_last_place() {
        let numbers = (0..f32::INFINITY.to_bits())
            .step_by(997)
            .map(f32::from_bits);
        for x in numbers.chain([1.0 - f32::EPSILON / 2.0, 1.0, 1.0 + f32::EPSILON]) {
            let exact = f64::from(x).ln();
            let unit = f64::from(f32::EPSILON) * exact.abs().max(f64::from(f32::MIN_POSITIVE));
            assert!(
                x == 0.0 || (f64::from(ln(x)) - exact).abs() <= unit,
                "{x:e}: {}",
                ln(x)
            );
        }
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert!(ln(f32::NAN).is_nan() && ln(-1.0).is_nan() && ln(f32::NEG_INFINITY).is_nan());
    }
}
