//! Weighted moments of fields.

use ndarray::{Array4, s};
use rayon::prelude::*;

use crate::Grid;

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
        let equal = Self::weighted(values.map(|value| (value, 1.0)));
        Self {
            weight: weight * equal.weight,
            mean: equal.mean,
            squares: weight * equal.squares,
        }
    }

    /// Computes the moments of values with their weights, leaving out NaN and values of weight
    /// zero.
    fn weighted(values: impl Iterator<Item = (f64, f64)> + Clone) -> Self {
        let present = values.filter(|(value, weight)| !value.is_nan() && *weight > 0.0);
        let (total, sum) = present
            .clone()
            .fold((0.0, 0.0), |(total, sum), (value, weight)| {
                (total + weight, sum + weight * value)
            });
        if total == 0.0 {
            return Self::default();
        }
        let mean = sum / total;
        let squares = present.map(|(value, weight)| weight * (value - mean).powi(2));
        Self {
            weight: total,
            mean,
            squares: squares.sum(),
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

/// Weights of the cells of a grid by area.
#[derive(Debug)]
pub(crate) enum CellWeights {
    /// Weight of each cell of a row, for each row.
    Rows(Vec<f64>),
    /// Weight of each cell, row after row.
    Cells(Vec<f64>),
}

impl CellWeights {
    /// Returns the areas of cells that a grid has, or else the weights of its rows.
    pub(crate) fn of(grid: &Grid) -> Self {
        match grid.cell_weights() {
            Some(areas) => Self::Cells(areas),
            None => Self::Rows(grid.latitude_weights()),
        }
    }

    /// Computes the moments of the values of a row.
    fn moments(&self, row: usize, values: impl ExactSizeIterator<Item = f64> + Clone) -> Moments {
        match self {
            Self::Rows(rows) => Moments::of(values, rows[row]),
            Self::Cells(cells) => {
                let first = row * values.len();
                let weights = cells[first..].iter().copied();
                Moments::weighted(values.zip(weights))
            }
        }
    }
}

/// Adds a field [1, channel, lat, lon], or its difference from an earlier one, to the moments of
/// its channels.
pub(crate) fn collect(
    moments: &mut [Moments],
    field: &Array4<f32>,
    earlier: Option<&Array4<f32>>,
    weights: &CellWeights,
) {
    let rows = field.dim().2;
    let channels = moments.par_iter_mut().enumerate();
    channels.for_each(|(channel, moments)| {
        for row in 0..rows {
            let now = field.slice(s![0, channel, row, ..]);
            let row_moments = match earlier {
                None => weights.moments(row, now.iter().map(|&value| f64::from(value))),
                Some(earlier) => {
                    let before = earlier.slice(s![0, channel, row, ..]);
                    let pairs = now.iter().zip(before.iter());
                    let increments =
                        pairs.map(|(&now, &before)| f64::from(now) - f64::from(before));
                    weights.moments(row, increments)
                }
            };
            *moments = moments.merge(row_moments);
        }
    });
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

    #[test]
    fn cells_in_rows_have_their_own_areas() {
        let weights = CellWeights::Cells(vec![1.0, 1.0, 3.0, 1.0]);
        let values = Array4::from_shape_vec((1, 1, 2, 2), vec![0.0, 0.0, 4.0, 0.0]).unwrap();
        let mut moments = [Moments::default()];
        collect(&mut moments, &values, None, &weights);
        // The mean is 3 · 4 / 6, and so are the squares of all differences.
        assert_eq!(moments[0].mean_and_std(), Some((2.0, 2.0)));
    }

    #[test]
    fn values_in_cells_without_an_area_weigh_nothing() {
        let values = [
            (1.0, 1.0),
            (5.0, 3.0),
            (f64::NAN, 2.0),
            (f64::INFINITY, 0.0),
        ];
        let found = Moments::weighted(values.into_iter()).mean_and_std();
        // (1 + 3 · 5) / 4, and the root of (3² + 3 · 1²) / 4.
        assert_eq!(found, Some((4.0, 3.0_f64.sqrt())));
    }
}
