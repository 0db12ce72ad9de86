//! Latitude-weighted loss and scores, as WeatherBench 2 defines them (Rasp et al. 2024).

use halocline_core::{Error, Replicate, Result};
use halocline_ops::prelude::*;

/// The mean over all elements of `weight(lat) · (x − target)²`, for `[batch, channels, lat, lon]`.
///
/// The result is `Partial(Sum)` on axes on which `x` is sharded, as that of every loss.
pub fn weighted_mse<X: Field<4>>(x: X, target: X, weights: &[f64]) -> Rank<X, 1> {
    let weights = x.profile(2, weights);
    let error = x - target;
    (error.clone() * error * weights).mean()
}

/// Root-mean-square error and anomaly correlation of one variable; [`Evaluation`] has an example.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// The root of the mean over forecasts of the weighted spatial mean of the squared error, in
    /// the variable's unit.
    pub rmse: f64,
    /// The mean over forecasts of the weighted correlation of forecast and true anomalies.
    pub acc: f64,
}

/// Accumulated scores of forecasts with the same lead time.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::Evaluation;
///
/// let device = Device::default();
/// let field = |value: f32| Tensor::<4>::full([1, 1, 2, 3], value, &device);
/// let mut evaluation = Evaluation::new(&[1.0, 1.0], 1); // two rows of the same area
/// evaluation.add(field(1.0), field(2.0), field(0.0))?;
/// let scores = evaluation.scores()[0];
/// assert!((scores.rmse - 1.0).abs() < 1e-6 && (scores.acc - 1.0).abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Evaluation {
    weights: Vec<f64>,
    /// Per variable: the number of forecasts, the sum of squared errors, the sum of correlations.
    sums: Vec<(usize, f64, f64)>,
}

impl Evaluation {
    /// Makes an evaluation of a number of variables, with a weight per latitude row. Weights are
    /// proportional to the area of the row, the difference of the sines of its bounds, and have
    /// mean one.
    pub fn new(weights: &[f64], variables: usize) -> Self {
        Self {
            weights: weights.to_vec(),
            sums: vec![(0, 0.0, 0.0); variables],
        }
    }

    /// Adds forecasts `[batch, variables, lat, lon]`, in physical units, and their truth. Anomalies
    /// are relative to `climatology` `[1 or batch, variables, lat, lon]`. All ranks call this
    /// together.
    ///
    /// # Errors
    /// A number of channels that differs from that of variables, or a number of rows that differs
    /// from that of weights; fields of other sizes; a failure of communication.
    ///
    /// # Panics
    /// Panics if the fields are sharded so that they cannot be subtracted.
    pub fn add<X: Field<4>>(&mut self, forecast: X, truth: X, climatology: X) -> Result<()> {
        let dims = forecast.global_dims();
        let [batch, channels, rows, _] = dims;
        let (variables, weights) = (self.sums.len(), self.weights.len());
        if (channels, rows) != (variables, weights) {
            let message = format!(
                "{channels} channels for {variables} variables, {rows} rows for {weights} weights"
            );
            return Err(Error::operator("Evaluation", message));
        }
        let means = climatology.global_dims();
        let fits = means[1..] == dims[1..] && [1, batch].contains(&means[0]);
        if truth.global_dims() != dims || !fits {
            let message = format!(
                "a forecast {dims:?}, the truth {:?} and a climatology {means:?}; expected the same sizes, or a batch of one \
                 climatology",
                truth.global_dims()
            );
            return Err(Error::operator("Evaluation", message));
        }
        let moments = || self.moments(forecast, truth, climatology);
        let [squared_errors, covariances, forecasts, truths] = Error::catch(moments)??;
        for (i, squared_error) in squared_errors.into_iter().enumerate() {
            let (count, errors, correlations) = &mut self.sums[i % variables];
            *count += 1;
            *errors += squared_error;
            *correlations += covariances[i] / (forecasts[i] * truths[i]).sqrt();
        }
        Ok(())
    }

    /// For every field of the batch: the mean squared error, the covariance of the anomalies, and
    /// their variances.
    fn moments<X: Field<4>>(&self, forecast: X, truth: X, climatology: X) -> Result<[Vec<f64>; 4]> {
        let error = forecast.clone() - truth.clone();
        let forecast = forecast - climatology.clone();
        let truth = truth - climatology;
        let weights = forecast.profile(2, &self.weights);
        let mean = |product: X| values((product * weights.clone()).mean_dims(&[2, 3]).resolve());
        Ok([
            mean(error.clone() * error)?,
            mean(forecast.clone() * truth.clone())?,
            mean(forecast.clone() * forecast)?,
            mean(truth.clone() * truth)?,
        ])
    }

    /// The scores of every variable so far.
    pub fn scores(&self) -> Vec<Scores> {
        let scores = self
            .sums
            .iter()
            .map(|&(count, errors, correlations)| Scores {
                rmse: (errors / count as f64).sqrt(),
                acc: correlations / count as f64,
            });
        scores.collect()
    }
}

/// Gathers all values of a small tensor on every rank.
fn values<X: Field<4>>(means: X) -> Result<Vec<f64>> {
    let means = means.into_shard().inner();
    let everywhere = vec![Replicate; means.placements().len()];
    let (local, _, _) = means.try_redistribute(&everywhere)?.into_parts();
    Ok(local.into_data().iter::<f64>().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Placement, Shard, ShardTensor};

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

        let weights = [0.75, 1.5, 0.75]; // of rows at 60, 0 and -60 degrees
        let at = |t: &Tensor<4>| t.to_data().iter::<f64>().collect::<Vec<_>>();
        let (f, o) = (at(&forecast), at(&truth));
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
        let expected = Scores {
            rmse: f64::midpoint(errors[0], errors[1]).sqrt(),
            acc: f64::midpoint(acc[0], acc[1]),
        };
        let close = |scores: &[Scores]| {
            let off = (scores[0].rmse - expected.rmse).abs() + (scores[0].acc - expected.acc).abs();
            assert!(off < 1e-5, "{scores:?}, expected {expected:?}");
        };

        let mut plain = Evaluation::new(&weights, 1);
        plain
            .add(forecast.clone(), truth.clone(), climatology.clone())
            .unwrap();
        close(&plain.scores());

        Launcher::local(4)
            .run(|world| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                // Over space, and over forecasts, of which all have one climatology.
                for placements in [[Shard(2), Shard(3)], [Shard(0), Shard(2)]] {
                    let shard = |t: &Tensor<4>| {
                        let whole = |p: Placement| p == Shard(0) && t.dims()[0] == 1;
                        let placements = placements.map(|p| if whole(p) { Replicate } else { p });
                        ShardTensor::distribute(t.clone(), &mesh, &placements)
                    };
                    let mut sharded = Evaluation::new(&weights, 1);
                    sharded.add(shard(&forecast)?, shard(&truth)?, shard(&climatology)?)?;
                    close(&sharded.scores());
                    let mut two = Evaluation::new(&weights, 2);
                    let error = two.add(shard(&forecast)?, shard(&truth)?, shard(&climatology)?);
                    assert!(
                        error
                            .unwrap_err()
                            .to_string()
                            .contains("1 channels for 2 variables")
                    );
                    let one = shard(&truth.clone().narrow(0, 0, 1))?;
                    let error = sharded.add(shard(&forecast)?, one, shard(&climatology)?);
                    assert!(
                        error
                            .unwrap_err()
                            .to_string()
                            .contains("the truth [1, 1, 3, 4]")
                    );
                }
                Ok(())
            })
            .unwrap();
    }
}
