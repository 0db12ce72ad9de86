/// Weight, mean and sum of squared deviations of a set of values, which can be merged.
///
/// Chan, Golub, LeVeque: *Updating formulae and a pairwise algorithm for computing sample
/// variances*, 1979. The mean of squares is never computed, because for fields such as geopotential
/// the variance would be lost to cancellation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Moments {
    weight: f64,
    mean: f64,
    squares: f64,
}

impl Moments {
    /// Computes the moments of values of weight `weight` each, leaving out NaN.
    pub(crate) fn of(values: impl Iterator<Item = f64> + Clone, weight: f64) -> Self {
        let present = values.filter(|value| !value.is_nan());
        let (count, sum) = present
            .clone()
            .fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
        if count == 0.0 {
            return Self::default();
        }
        let mean = sum / count;
        let squares: f64 = present.map(|value| (value - mean).powi(2)).sum();
        Self {
            weight: weight * count,
            mean,
            squares: weight * squares,
        }
    }

    /// Returns the moments of the union of both sets.
    pub(crate) fn merge(self, other: Self) -> Self {
        if self.weight == 0.0 {
            return other;
        }
        if other.weight == 0.0 {
            return self;
        }
        let weight = self.weight + other.weight;
        let shift = other.mean - self.mean;
        Self {
            weight,
            mean: self.mean + shift * (other.weight / weight),
            squares: self.squares
                + other.squares
                + shift * shift * (self.weight * other.weight / weight),
        }
    }

    /// Returns mean and standard deviation of the population, or `None` without values.
    pub(crate) fn mean_and_std(self) -> Option<(f64, f64)> {
        let std = (self.squares / self.weight).sqrt();
        (self.weight > 0.0).then_some((self.mean, std))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Weighted mean and standard deviation in two passes over all values.
    fn direct(values: &[(f64, f64)]) -> (f64, f64) {
        let total: f64 = values.iter().map(|(_, weight)| weight).sum();
        let mean = values
            .iter()
            .map(|(value, weight)| value * weight)
            .sum::<f64>()
            / total;
        let squares = values
            .iter()
            .map(|(value, weight)| weight * (value - mean).powi(2));
        (mean, (squares.sum::<f64>() / total).sqrt())
    }

    proptest! {
        #[test]
        fn merged_in_any_order_they_are_those_of_all_values(
            rows in prop::collection::vec((prop::collection::vec(-5.0..5.0_f64, 0..9), 0.1..3.0_f64), 1..12),
            offset in prop::sample::select(vec![0.0, 1e6]),
        ) {
            let rows: Vec<(Vec<f64>, f64)> =
                rows.into_iter().map(|(row, w)| (row.iter().map(|v| v + offset).collect(), w)).collect();
            let all: Vec<(f64, f64)> =
                rows.iter().flat_map(|(row, w)| row.iter().map(move |v| (*v, *w))).collect();
            let parts: Vec<Moments> =
                rows.iter().map(|(row, w)| Moments::of(row.iter().copied(), *w)).collect();
            let forward = parts.iter().fold(Moments::default(), |a, b| a.merge(*b));
            let (left, right) = parts.split_at(parts.len() / 2);
            let halves = [left, right].map(|h| h.iter().rev().fold(Moments::default(), |a, b| a.merge(*b)));
            for merged in [forward, halves[0].merge(halves[1])] {
                let Some((mean, std)) = merged.mean_and_std() else {
                    prop_assert!(all.is_empty());
                    continue;
                };
                let (expected_mean, expected_std) = direct(&all);
                prop_assert!((mean - expected_mean).abs() < 1e-9 * (1.0 + offset * 1e-3));
                // With an offset of 1e6 the difference of mean squares would be wrong from the
                // fifth digit on.
                prop_assert!((std - expected_std).abs() < 1e-8, "{} {}", std, expected_std);
            }
        }
    }

    #[test]
    fn missing_values_weigh_nothing() {
        let some = Moments::of([1.0, f64::NAN, 3.0].into_iter(), 2.0);
        assert_eq!(some.mean_and_std(), Some((2.0, 1.0)));
        assert_eq!(some, Moments::of([1.0, 3.0].into_iter(), 2.0));
        assert_eq!(
            Moments::of([f64::NAN].into_iter(), 2.0).mean_and_std(),
            None
        );
    }
}
