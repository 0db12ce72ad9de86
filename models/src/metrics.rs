//! Latitude-weighted scores, as defined by WeatherBench 2 (Rasp et al. 2024).

use std::sync::Arc;

use halocline_core::{Error, Result};
use halocline_ops::prelude::*;
use serde::Serialize;

use crate::ensemble::{CrpsEstimator, beside, crps_cells, together};
use crate::precision::wide;
use crate::row_sums::{Shards, Weights};
use crate::sums::Sums;

const NAME: &str = "Evaluation";

/// Metrics of one variable; [`Evaluation`] has an example. Metrics that were not accumulated are
/// NaN.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// Number of forecasts.
    pub forecasts: usize,
    /// Root of the mean over forecasts of the weighted spatial mean squared error, in the
    /// variable's unit. For ensembles, the error of the ensemble mean.
    pub rmse: f64,
    /// Mean absolute error.
    pub mae: f64,
    /// Mean error, forecast minus truth.
    pub bias: f64,
    /// Mean weighted correlation of forecast and true anomalies, over the forecasts in which
    /// neither is zero everywhere.
    pub acc: f64,
    /// [Continuous ranked probability score](crate::crps()) of ensembles, by the fair estimator.
    pub crps: f64,
    /// Root of the mean ensemble variance.
    pub spread: f64,
    /// Spread-skill ratio `√((m + 1) / m) · spread / rmse` for `m` members: one if the spread of an
    /// ensemble matches its error (Fortin et al. 2014).
    pub spread_skill: f64,
}

/// Accumulator of scores of forecasts with the same lead time, over the globe or a region.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::Evaluation;
///
/// let device = Device::default();
/// let field = |value: f32| Tensor::<4>::full([1, 1, 2, 3], value, &device);
/// let mut evaluation = Evaluation::new(&[1.0, 1.0], 1); // two rows of equal area
/// evaluation.add(field(1.0), field(2.0), field(0.0))?;
/// let scores = evaluation.metrics()[0];
/// assert!((scores.rmse - 1.0).abs() < 1e-6 && (scores.acc - 1.0).abs() < 1e-6);
/// assert!((scores.bias + 1.0).abs() < 1e-6 && scores.crps.is_nan());
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// Weights of rows and columns, which the clones for other leads share.
    rows: Arc<[f64]>,
    columns: Option<Arc<[f64]>>,
    sums: Vec<Sums>,
}

impl Evaluation {
    /// Makes an evaluation of a number of variables, with one weight per latitude row. Weights are
    /// proportional to the area of the row, i.e. the difference of the sines of its bounds; a
    /// weight of zero leaves the row out.
    pub fn new(weights: &[f64], variables: usize) -> Self {
        Self {
            rows: weights.into(),
            columns: None,
            sums: vec![Sums::default(); variables],
        }
    }

    /// Sets a weight per column; default one for all. A weight of zero leaves the column out. Beside
    /// a single weight of rows, there may be a weight per cell in place of it, row by row.
    #[must_use]
    pub fn with_columns(self, weights: &[f64]) -> Self {
        Self {
            columns: Some(weights.into()),
            ..self
        }
    }

    /// Adds forecasts `[batch, variables, lat, lon]`, in physical units, and their truth. Anomalies
    /// are relative to `climatology` `[1 or batch, variables, lat, lon]`. All ranks must call this
    /// together.
    ///
    /// # Errors
    /// Same as [`add_masked`](Self::add_masked).
    pub fn add<X: Field<4>>(&mut self, forecast: X, truth: X, climatology: X) -> Result<()> {
        self.add_masked(forecast, truth, Some(climatology), None)
    }

    /// [`add`](Self::add) with an optional climatology, restricted to the cells where `mask`
    /// `[1 or batch, 1 or variables, lat, lon]` is one. Values elsewhere are ignored. A field with
    /// no unmasked cells does not count as a forecast.
    ///
    /// # Errors
    /// The number of channels differs from the number of variables, or rows or columns from the
    /// number of weights; fields differ in size or shards; communication fails.
    pub fn add_masked<X: Field<4>>(
        &mut self,
        forecast: X,
        truth: X,
        climatology: Option<X>,
        mask: Option<X>,
    ) -> Result<()> {
        add_fields(
            std::slice::from_mut(self),
            [forecast, truth],
            climatology,
            mask,
        )
    }

    /// Adds ensembles `[members, batch, variables, lat, lon]` and their truth
    /// `[1, batch, variables, lat, lon]`, at cells where `mask` (shaped like the truth) is one: the
    /// error of the ensemble mean, the spread and the CRPS.
    ///
    /// # Errors
    /// Same as [`add_masked`](Self::add_masked) and [`crps_cells`].
    pub fn add_ensemble<X: Field<5>>(
        &mut self,
        ensemble: X,
        truth: X,
        mask: Option<X>,
    ) -> Result<()> {
        add_ensembles(std::slice::from_mut(self), ensemble, truth, mask)
    }

    fn check(&self, forecast: [usize; 4], truth: [usize; 4]) -> Result<()> {
        let [_, channels, rows, columns] = forecast;
        let (variables, weights) = (self.sums.len(), self.rows.len());
        let widths = self.columns.as_deref().map_or(columns, <[f64]>::len);
        let is_by_cell = weights == 1 && self.columns.is_some() && widths == rows * columns;
        if channels != variables || (!is_by_cell && (rows, columns) != (weights, widths)) {
            let message = format!(
                "{channels} channels for {variables} variables, {rows} rows for {weights} weights, \
                 {columns} columns for {widths} weights"
            );
            return Err(Error::operator(NAME, message));
        }
        if truth != forecast {
            let message =
                format!("a forecast {forecast:?}, the truth {truth:?}; expected the same sizes");
            return Err(Error::operator(NAME, message));
        }
        Ok(())
    }

    /// Returns the metrics of every variable so far.
    pub fn metrics(&self) -> Vec<Metrics> {
        let scores = self.sums.iter().map(|sums| {
            let count = sums.forecasts as f64;
            let rmse = (sums.squared / count).sqrt();
            let ensembles = sums.ensembles as f64;
            let spread = (sums.variance / ensembles).sqrt();
            Metrics {
                forecasts: sums.forecasts,
                rmse,
                mae: sums.absolute / count,
                bias: sums.error / count,
                acc: sums.correlation / sums.correlated as f64,
                crps: sums.crps / ensembles,
                spread,
                spread_skill: (sums.members / ensembles).sqrt() * spread / rmse,
            }
        });
        scores.collect()
    }

    /// Returns the sums of all variables as numbers, which ranks exchange.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        self.sums.iter().flat_map(Sums::numbers).collect()
    }

    /// Adds the [numbers](Self::numbers) of other forecasts of as many variables.
    pub(crate) fn add_numbers(&mut self, numbers: &[f64]) {
        let (numbers, _) = numbers.as_chunks();
        for (sums, numbers) in self.sums.iter_mut().zip(numbers) {
            sums.add_numbers(*numbers);
        }
    }
}

/// Adds fields to evaluations as [`Evaluation::add_masked`] does, with one message, and one pass
/// over the fields for all evaluations with the same columns.
pub(crate) fn add_fields<X: Field<4>>(
    evaluations: &mut [Evaluation],
    fields: [X; 2],
    climatology: Option<X>,
    mask: Option<X>,
) -> Result<()> {
    let shards = shards(evaluations, fields, climatology, mask)?;
    let sums = |columns: &[f64]| shards.errors(columns);
    let totals = shards.totals(NAME, &weights(evaluations), sums)?;
    for (evaluation, totals) in evaluations.iter_mut().zip(totals) {
        let variables = evaluation.sums.len();
        for (index, errors) in totals.into_iter().enumerate() {
            evaluation.sums[index % variables].add_errors(errors, shards.has_climatology());
        }
    }
    Ok(())
}

/// Adds ensembles to evaluations as [`Evaluation::add_ensemble`] does, with one message.
pub(crate) fn add_ensembles<X: Field<5>>(
    evaluations: &mut [Evaluation],
    ensemble: X,
    truth: X,
    mask: Option<X>,
) -> Result<()> {
    let [members, ..] = ensemble.dims();
    let (ensemble, truth) = together(ensemble, truth)?;
    let (ensemble, truth) = (wide(ensemble)?, wide(truth)?);
    Error::catch(|| {
        let mask = match mask {
            None => None,
            Some(mask) => Some(beside(wide(mask)?, &truth)?.squeeze_dim::<4>(0)),
        };
        let mean = ensemble.clone().mean_dims(&[0]);
        // Unbiased estimate: members are a sample of a population.
        let deviations = (ensemble.clone() - mean.clone()).square().sum_dims(&[0]);
        let variance = deviations / members.saturating_sub(1).max(1) as f64;
        let crps = crps_cells(ensemble, truth.clone(), CrpsEstimator::Fair)?;
        let [mean, truth, crps, variance] =
            [mean, truth, crps, variance].map(|field| field.squeeze_dim::<4>(0));
        let shards = shards(evaluations, [mean, truth], None, mask)?;
        let cells = [crps.into_shard(), variance.into_shard()];
        let sums = |columns: &[f64]| -> Result<Vec<[f64; 9]>> {
            let errors = shards.errors(columns)?.into_iter();
            let pairs = errors.zip(shards.cells(cells.clone(), columns)?);
            let joined = pairs.map(|(errors, cells)| {
                let mut all = [0.0; 9];
                all[..7].copy_from_slice(&errors);
                all[7..].copy_from_slice(&cells);
                all
            });
            Ok(joined.collect())
        };
        let totals = shards.totals(NAME, &weights(evaluations), sums)?;
        for (evaluation, totals) in evaluations.iter_mut().zip(totals) {
            let variables = evaluation.sums.len();
            for (index, totals) in totals.into_iter().enumerate() {
                let [errors @ .., crps, variance] = totals;
                let sums = &mut evaluation.sums[index % variables];
                sums.add_errors(errors, false);
                let weight = errors[0];
                if weight != 0.0 {
                    sums.ensembles += 1;
                    sums.crps += crps / weight;
                    sums.variance += variance / weight;
                    sums.members += (members + 1) as f64 / members as f64;
                }
            }
        }
        Ok(())
    })?
}

/// Returns this rank's shards of fields that fit the evaluations.
fn shards<X: Field<4>>(
    evaluations: &[Evaluation],
    [forecast, truth]: [X; 2],
    climatology: Option<X>,
    mask: Option<X>,
) -> Result<Shards> {
    for evaluation in evaluations {
        evaluation.check(forecast.dims(), truth.dims())?;
    }
    Shards::new(
        NAME,
        forecast.into_shard(),
        truth.into_shard(),
        climatology.map(X::into_shard),
        mask.map(X::into_shard),
    )
}

/// Returns the weights of the rows and columns of each evaluation.
fn weights(evaluations: &[Evaluation]) -> Vec<Weights<'_>> {
    let pairs = evaluations
        .iter()
        .map(|evaluation| (&evaluation.rows[..], evaluation.columns.as_deref()));
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard, ShardTensor};

    use super::*;
    use crate::testing::distributed;

    /// Snow in summer: a field equal to its climatology has no correlation.
    #[test]
    fn forecasts_without_anomalies_have_no_correlation() {
        let field = |values: [f32; 2]| Tensor::<1>::from(values).reshape([1, 1, 2, 1]);
        let (zero, snow) = (|| field([0.0, 0.0]), || field([1.0, -1.0]));
        let mut evaluation = Evaluation::new(&[1.0, 1.0], 1);
        evaluation.add(zero(), zero(), zero()).unwrap();
        assert!(evaluation.metrics()[0].acc.is_nan());
        evaluation.add(snow(), snow(), zero()).unwrap();
        evaluation.add(snow(), zero(), zero()).unwrap();
        let scores = evaluation.metrics()[0];
        assert!(
            scores.forecasts == 3 && (scores.acc - 1.0).abs() < 1e-6,
            "{scores:?}"
        );
        evaluation
            .add(field([f32::NAN, 0.0]), snow(), zero())
            .unwrap();
        assert!(evaluation.metrics()[0].acc.is_nan());
    }

    #[test]
    fn scores_are_those_of_the_definition_on_any_mesh() {
        let field = |scale: f32| {
            let values: Vec<f32> = (0..24)
                .map(|i| scale * ((i * 7 % 11) as f32 - 5.0) + i as f32)
                .collect();
            Tensor::<1>::from_floats(values.as_slice(), &Default::default()).reshape([2, 1, 3, 4])
        };
        let (forecast, truth) = (field(1.0), field(1.5));
        let climatology = Tensor::<4>::full([1, 1, 3, 4], 2.0, &Default::default());

        let weights = [0.75, 1.5, 0.75]; // rows at 60, 0 and -60 degrees
        let numbers = |t: &Tensor<4>| t.to_data().iter::<f64>().collect::<Vec<_>>();
        let (f, o) = (numbers(&forecast), numbers(&truth));
        let mean = |time: usize, g: &dyn Fn(f64, f64) -> f64| {
            let cells = (0..12).map(|i| weights[i / 4] * g(f[12 * time + i], o[12 * time + i]));
            cells.sum::<f64>() / 12.0
        };
        let errors = [0, 1].map(|time| mean(time, &|f, o| (f - o).powi(2)));
        let acc = [0, 1].map(|time| {
            let (a, b) = (|x: f64| x - 2.0, |x: f64| x - 2.0);
            mean(time, &|f, o| a(f) * b(o))
                / (mean(time, &|f, _| a(f).powi(2)) * mean(time, &|_, o| b(o).powi(2))).sqrt()
        });
        let rmse = f64::midpoint(errors[0], errors[1]).sqrt();
        let acc = f64::midpoint(acc[0], acc[1]);
        let bias = f64::midpoint(mean(0, &|f, o| f - o), mean(1, &|f, o| f - o));
        let close = |scores: &[Metrics]| {
            let found = [scores[0].rmse, scores[0].acc, scores[0].bias];
            let pairs = found.iter().zip([rmse, acc, bias]);
            let differences = pairs.map(|(found, expected)| (found - expected).abs());
            let off: f64 = differences.sum();
            assert!(off < 1e-5, "{scores:?}, expected {rmse}, {acc}, {bias}");
        };

        let mut plain = Evaluation::new(&weights, 1);
        plain
            .add(forecast.clone(), truth.clone(), climatology.clone())
            .unwrap();
        close(&plain.metrics());

        Launcher::local(4)
            .run(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                // Sharded over space, and over forecasts that share one climatology.
                for placements in [[Shard(2), Shard(3)], [Shard(0), Shard(2)]] {
                    let shard =
                        |whole: &Tensor<4>| distributed::<4>(whole.to_data(), &mesh, &placements);
                    let mut sharded = Evaluation::new(&weights, 1);
                    sharded.add(shard(&forecast)?, shard(&truth)?, shard(&climatology)?)?;
                    close(&sharded.metrics());
                    let mut two = Evaluation::new(&weights, 2);
                    let error = two.add(shard(&forecast)?, shard(&truth)?, shard(&climatology)?);
                    let error = error.unwrap_err().to_string();
                    assert!(error.contains("1 channels for 2 variables"), "{error}");
                    let one = shard(&truth.clone().narrow(0, 0, 1))?;
                    let error = sharded.add(shard(&forecast)?, one, shard(&climatology)?);
                    let error = error.unwrap_err().to_string();
                    assert!(error.contains("the truth [1, 1, 3, 4]"), "{error}");
                }
                Ok(())
            })
            .unwrap();
    }

    /// Masked values, NaN included, do not count, nor do rows or columns with zero weight.
    #[test]
    fn masked_scores_are_those_of_the_other_cells_on_any_mesh() {
        const SHAPE: [usize; 4] = [2, 2, 3, 5];
        let count: usize = SHAPE.iter().product();
        let value = |i: usize, step: usize| ((i * step) % 23) as f64 / 7.0;
        // The second field of the first forecast has no cells.
        let kept = |i: usize| !(i * 3).is_multiple_of(4) && !(15..30).contains(&i);
        let (rows, columns) = ([0.75, 1.5, 0.0], [1.0, 1.0, 0.0, 1.0, 1.0]);
        let weight = |i: usize| rows[i / 5 % 3] * columns[i % 5] * f64::from(kept(i));
        let expected = |channel: usize| {
            let fields = [0, 1].map(|batch| 2 * batch + channel);
            let means = fields.map(|field| {
                let cells = 15 * field..15 * field + 15;
                let total: f64 = cells.clone().map(weight).sum();
                let mean = |f: &dyn Fn(f64) -> f64| {
                    let error = |i: usize| weight(i) * f(value(i, 5) - value(i, 11));
                    cells.clone().map(error).sum::<f64>() / total
                };
                (total > 0.0).then(|| [mean(&|e| e * e), mean(&|e| e.abs()), mean(&|e| e)])
            });
            let means: Vec<[f64; 3]> = means.into_iter().flatten().collect();
            let [squared, absolute, error] = [0, 1, 2].map(|score| {
                means.iter().map(|mean| mean[score]).sum::<f64>() / means.len() as f64
            });
            (means.len(), [squared.sqrt(), absolute, error])
        };
        let tensor = |step: Option<usize>| {
            let cell = |i: usize| match (step, kept(i)) {
                (None, kept) => f32::from(kept),
                (Some(step), true) => value(i, step) as f32,
                (Some(_), false) => f32::NAN,
            };
            let cells: Vec<f32> = (0..count).map(cell).collect();
            Tensor::<1>::from_floats(cells.as_slice(), &Default::default()).reshape(SHAPE)
        };
        for placements in [
            [Shard(2), Shard(3)],
            [Shard(0), Shard(2)],
            [Shard(1), Shard(3)],
        ] {
            let run = Launcher::local(4).run(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                let shard = |step| ShardTensor::distribute(tensor(step), &mesh, &placements);
                let mut scores = Evaluation::new(&rows, 2).with_columns(&columns);
                scores.add_masked(shard(Some(5))?, shard(Some(11))?, None, Some(shard(None)?))?;
                for (channel, scores) in scores.metrics().iter().enumerate() {
                    let (forecasts, expected) = expected(channel);
                    assert_eq!(scores.forecasts, forecasts);
                    assert!(scores.acc.is_nan());
                    for (found, expected) in
                        [scores.rmse, scores.mae, scores.bias].iter().zip(expected)
                    {
                        assert!((found - expected).abs() < 1e-5, "{scores:?}: {expected}");
                    }
                }
                Ok(())
            });
            run.unwrap();
        }
    }
}
