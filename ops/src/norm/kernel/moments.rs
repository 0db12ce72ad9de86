//! Mean and variance of samples in parts.
//!
//! Moments of blocks that fit into the L1 cache are computed by the corrected two-pass algorithm,
//! and combined in order in double precision (T. F. Chan, G. H. Golub and R. J. LeVeque, Algorithms
//! for computing the sample variance, The American Statistician 37, 1983).

use pulp::Simd;

use crate::kernel::lanes::sums;
use crate::kernel::simd::Element;

/// Number of elements summed in their own precision before sums continue in double precision.
pub(super) const BLOCK: usize = 2048;

/// Count, mean and sum of squared deviations from the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Moments {
    pub count: f64,
    pub mean: f64,
    pub squares: f64,
}

/// Mean and scale of a normalization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Statistic {
    pub mean: f64,
    /// `1 / √(variance + epsilon)`.
    pub scale: f64,
}

impl Moments {
    /// Combines the moments of two samples.
    pub(crate) fn combine(self, other: Self) -> Self {
        let count = self.count + other.count;
        if self.count == 0.0 || other.count == 0.0 {
            return if self.count == 0.0 { other } else { self };
        }
        let (share, distance) = (other.count / count, other.mean - self.mean);
        Self {
            count,
            mean: self.mean + distance * share,
            squares: self.squares + other.squares + distance * distance * self.count * share,
        }
    }

    /// Statistic with the population variance.
    pub(crate) fn statistic(self, epsilon: f64) -> Statistic {
        Statistic {
            mean: self.mean,
            scale: 1.0 / (self.squares / self.count + epsilon).sqrt(),
        }
    }

    /// Moments of a slice.
    #[inline(always)]
    pub(super) fn of<S: Simd, E: Element>(simd: S, x: &[E]) -> Self {
        let mut total = Self::default();
        for block in x.chunks(BLOCK) {
            total = total.combine(Self::of_block(simd, block));
        }
        total
    }

    #[inline(always)]
    fn of_block<S: Simd, E: Element>(simd: S, x: &[E]) -> Self {
        let zero = E::splat(simd, E::default());
        let [sum] = sums(
            simd,
            [x],
            [zero],
            #[inline(always)]
            |[sum], [x]| [E::plus(simd, sum, x)],
        );
        let count = x.len() as f64;
        // The second pass sums deviations from the rounded mean, and its first sum corrects for the
        // rounding.
        let center = E::from_f64(sum.to_f64() / count);
        let middle = E::splat(simd, center);
        let [sum, squares] = sums(
            simd,
            [x],
            [middle],
            #[inline(always)]
            |[sum, squares], [x]| {
                let away = E::minus(simd, x, middle);
                [
                    E::plus(simd, sum, away),
                    E::mul_add(simd, away, away, squares),
                ]
            },
        );
        let away = sum.to_f64() / count;
        Self {
            count,
            mean: center.to_f64() + away,
            squares: squares.to_f64() - away * away * count,
        }
    }
}

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::*;
    use crate::kernel::simd::Isa;
    use crate::kernel::testing::random;

    struct Of<'a>(&'a [f64]);

    impl WithSimd for Of<'_> {
        type Output = Moments;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Moments {
            Moments::of(simd, self.0)
        }
    }

    #[test]
    fn moments_of_parts_combine() {
        let x = random(3 * BLOCK + 11, 4);
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let squares: f64 = x.iter().map(|x| (x - mean) * (x - mean)).sum();
        for isa in Isa::available() {
            let moments = |x: &[f64]| isa.run(Of(x));
            for cut in [0, 1, 17, BLOCK, x.len()] {
                let both = moments(&x[..cut]).combine(moments(&x[cut..]));
                assert_eq!(both.count, x.len() as f64);
                assert!((both.mean - mean).abs() < 1e-14);
                assert!((both.squares - squares).abs() < 1e-9);
            }
        }
    }
}
