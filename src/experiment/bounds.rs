//! Bounds of predictions, such as those of precipitation or of a fraction of ice.

use halocline_core::{Result, ShardTensor};
use halocline_ops::prelude::*;

use super::checks::of_target;
use super::network::OwnNetwork;
use super::setup::Experiment;

impl<N: OwnNetwork> Experiment<N> {
    /// Limits predictions of the model for these times to the bounds of the targets.
    pub(super) fn bounded(&self, y: ShardTensor<4>, times: &[f64]) -> Result<ShardTensor<4>> {
        if self.config.data.bounds.is_empty() {
            return Ok(y);
        }
        let [means, stds, _] = &self.scales;
        let bounds = self.bounds().map(|bounds| {
            let scaled = bounds.iter().zip(means.iter().zip(stds));
            let scaled = scaled.map(|(bound, (mean, std))| (bound - mean) / std);
            scaled.collect::<Vec<f64>>()
        });
        if !self.config.data.anomalies {
            return Ok(clamped(y, &bounds));
        }
        let normal = self.normal_at(times, &y)?;
        Ok(clamped(y + normal.clone(), &bounds) - normal)
    }

    /// Limits bounded predictions again after their conversion to units, because rounding may take
    /// them beyond the bounds.
    pub(super) fn bounded_in_units(&self, fields: ShardTensor<4>) -> ShardTensor<4> {
        if self.config.data.bounds.is_empty() {
            return fields;
        }
        clamped(fields, &self.bounds())
    }

    /// Returns the lower and the upper bound of each target in its units, infinite if it has none.
    fn bounds(&self) -> [Vec<f64>; 2] {
        let bounds = &self.config.data.bounds;
        [(0, f64::NEG_INFINITY), (1, f64::INFINITY)].map(|(side, none)| {
            let bound = |target: &String| {
                let found = of_target(bounds, target).and_then(|bounds| bounds.get(side));
                found.copied().unwrap_or(none)
            };
            self.data.channels.targets.iter().map(bound).collect()
        })
    }
}

/// Replaces finite values beyond the bounds of their channel by the bounds. Infinite values and NaN
/// stay, so that a model that diverges is not hidden.
fn clamped(x: ShardTensor<4>, bounds: &[Vec<f64>; 2]) -> ShardTensor<4> {
    // NaN where a value is infinite, which is then not beyond a bound.
    let zero = x.clone().detach() * 0.0;
    let [lower, upper] = [0, 1].map(|side| zero.clone() + x.profile(1, &bounds[side]));
    let below = x.clone().lower(lower.clone());
    let above = x.clone().greater(upper.clone());
    x.mask_where(below, lower).mask_where(above, upper)
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::tensor::Tensor;
    use halocline_core::Launcher;
    use halocline_io::Period;

    use super::*;
    use crate::experiment::ForecastConfig;
    use crate::experiment::fixture::{config_in, wave, write_fields};

    #[test]
    fn values_that_are_not_finite_have_no_bounds() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let x = ShardTensor::solo(Tensor::<4>::from([[[[inf, -inf, nan, -2.0, 0.5, 2.0]]]]));
        let found = clamped(x, &[vec![0.0], vec![1.0]]);
        let found: Vec<f32> = found.local().clone().into_data().iter().collect();
        let is_bounded = found[..3].iter().any(|value| value.is_finite());
        assert!(!is_bounded, "{found:?}");
        assert_eq!(found[3..], [0.0, 0.5, 1.0]);
    }

    #[test]
    fn forecasts_stay_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        for anomalies in [false, true] {
            let data = format!(
                "anomalies = {anomalies}\nbounds = {{ sst = [274.1], t2m = [275.0, 281.3] }}"
            );
            let mut config = config_in(folder.path(), &data, "");
            config.folder = folder.path().join(format!("run-{anomalies}"));
            let run = Launcher::local(2).run(|world| {
                let experiment = Experiment::new(&world, &config)?;
                let model = experiment.model()?.valid();
                let states = experiment.states(&Period::default())?;
                let read = |state: usize| states.loader.load(&[state]);
                let forecast = ForecastConfig {
                    steps: 2,
                    ..ForecastConfig::default()
                };
                experiment.steps(&model, &states, read(0)?, &forecast, read, |step| {
                    let values = step.fields.full_tensor().into_data();
                    let values: Vec<f32> = values.iter().collect();
                    let (sst, t2m) = values.split_at(values.len() / 2);
                    let range = |values: &[f32]| {
                        let low = values.iter().copied().fold(f32::INFINITY, f32::min);
                        (low, values.iter().copied().fold(0.0, f32::max))
                    };
                    let ((coldest, warmest), t2m) = (range(sst), range(t2m));
                    assert!(coldest >= 274.1 && t2m.0 >= 275.0 && t2m.1 <= 281.3);
                    if step.number == 1 {
                        // The start is beyond the bounds.
                        assert!(coldest < 274.11 && warmest > 285.0, "{coldest}, {warmest}");
                        assert!(t2m.0 < 275.01 && t2m.1 > 281.29, "{t2m:?}");
                    }
                    Ok(())
                })
            });
            run.unwrap();
        }
    }

    #[test]
    fn losses_are_those_of_bounded_predictions() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        // All predictions lie below these bounds.
        let bounds = "bounds = { sst = [400.0], t2m = [400.0, 500.0] }";
        let config = config_in(folder.path(), bounds, "");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?;
            let batch = experiment.batches(2)?.load(&[0])?;
            let mut other = batch.clone();
            other.input = batch.input.clone() * 0.5;
            let [one, other] = [batch, other].map(|batch| {
                let loss = experiment.loss(&model, batch, 2, 0);
                loss.unwrap().into_scalar::<f64>()
            });
            assert!(one == other && one > 100.0, "{one}, {other}");
            Ok(())
        });
        run.unwrap();
    }
}
