//! Loss of a batch.

use burn::module::Module;
use halocline_core::{Distribution, Error, RandomKey, Result, ShardTensor};
use halocline_io::Batch;
use halocline_models::{
    CrpsEstimator, amse_penalty, crps, crps_masked, energy_score, energy_score_masked, perturbed,
    repeat_members, rollout, split_members,
};
use halocline_ops::masked::apply_mask;
use halocline_ops::prelude::*;

use super::checks::{check_targets, of_target};
use super::config::ExperimentConfig;
use super::geometry::harmonics;
use super::network::{FieldModel, OwnNetwork, places_of_targets, select_channels};
use super::setup::Experiment;
use super::training_config::{Loss, RolloutGradient};

impl<N: OwnNetwork> Experiment<N> {
    /// Returns the area-weighted loss of a batch, of errors in standard deviations of the
    /// increments of a step.
    pub(super) fn loss(
        &self,
        model: &FieldModel<N>,
        batch: Batch,
        steps: usize,
        epoch: usize,
    ) -> Result<ShardTensor<1>> {
        let training = &self.config.training;
        let key = RandomKey::new(self.config.seed, ("noise", epoch, batch.samples[0]));
        let members = training.members;
        let (mut x, present) = (batch.input, batch.input_mask);
        if training.loss.is_of_ensembles() {
            x = perturbed(x, members, training.noise, key, self.member_axis())?;
        } else if training.noise > 0.0 {
            let normal = Distribution::Normal(0.0, training.noise);
            let noise = ShardTensor::random(x.dims(), normal, key, x.mesh(), x.layout())?;
            x = x + noise;
        }
        let copies = |field: ShardTensor<4>| match members {
            1 => Ok(field),
            _ => repeat_members(field, members, self.member_axis()),
        };
        if let Some(present) = &present {
            x = x * copies(present.clone())?;
        }
        let x = self.seen_inputs(x, &batch.times)?;
        let channels = self.data.channels.targets.len();
        let feedback = self.data.feedback(steps)?;
        let times = |step: usize| -> Vec<f64> {
            let times = batch.times.iter().zip(&batch.leads);
            times
                .map(|(time, leads)| time + 3600.0 * leads[step])
                .collect()
        };
        let targets = (0..steps).map(|step| {
            self.seen(
                batch.target.clone().narrow(1, step * channels, channels),
                &times(step),
            )
        });
        let target = ShardTensor::cat(targets.collect::<Result<Vec<_>>>()?, 1);
        // A target without a value at the start does not count, and is filled in the input of the
        // next steps, as in forecasts.
        let known = present.map(|present| self.of_targets(&present));
        let counts = match (batch.mask, &known) {
            (Some(mask), Some(known)) => {
                Some(mask * ShardTensor::cat(vec![known.clone(); steps], 1))
            }
            (mask, _) => mask,
        };
        let counts = self.without_rim(&target, counts)?;
        let counts = self.by_area(&target, counts);
        let mask = known.filter(|_| steps > 1).map(copies).transpose()?;
        let forcing = batch.forcing.map(copies).transpose()?;
        let y = rollout(x, forcing, steps, &feedback, |step, x| {
            let stream = ("noise channels", epoch, batch.samples[0], step);
            let key = RandomKey::new(self.config.seed, stream);
            let x = self.with_noise_channels(x, &batch.target, members, key)?;
            let y = apply_step(&self.config, model, x, step + 1 == steps);
            let y = self.bounded(y, &times(step))?;
            let y = self.with_boundary(y, || {
                copies(target.clone().narrow(1, step * channels, channels))
            })?;
            match &mask {
                Some(mask) => self.filled(y, mask.clone(), &times(step)),
                None => Ok(y),
            }
        })?;
        let count = match training.gradient {
            RolloutGradient::All => steps,
            RolloutGradient::Last => 1,
        };
        let newest = |field: ShardTensor<4>| match steps - count {
            0 => field,
            before => field.narrow(1, before * channels, count * channels),
        };
        let [y, target] = [y, target].map(newest);
        let target_weights = self.weights()?;
        let weights = training.step_weights(count).into_iter();
        let weights =
            weights.flat_map(|step| target_weights.iter().map(move |weight| step * weight));
        let (weights, ratios) = (weights.collect::<Vec<_>>(), self.scales[2].repeat(count));
        self.distance(y, target, counts.map(newest), [&weights, &ratios])
    }

    /// Returns the weight of the loss of each target.
    ///
    /// # Errors
    /// A weight of a name that is not a target.
    fn weights(&self) -> Result<Vec<f64>> {
        let (weights, targets) = (&self.config.training.weights, &self.data.channels.targets);
        check_targets("training.weights", weights, targets)?;
        let weight = |target: &String| of_target(weights, target).copied().unwrap_or(1.0);
        Ok(targets.iter().map(weight).collect())
    }

    /// Returns the mask of the targets at the start: the mask of the inputs at their newest time.
    /// For a target that is not an input it is one everywhere, because no forecast needs its value
    /// there.
    pub(super) fn of_targets(&self, present: &ShardTensor<4>) -> ShardTensor<4> {
        let inputs = present.dims()[1];
        let places = places_of_targets(&self.data.channels, inputs, inputs);
        select_channels(present.clone(), &places, |channel| channel * 0.0 + 1.0)
    }

    /// Returns the loss of predictions `[members · batch, steps · targets, lat, lon]`. The loss of
    /// each channel has a weight, and its errors are multiplied by the ratio of standard deviations
    /// to those of increments.
    pub(super) fn distance(
        &self,
        y: ShardTensor<4>,
        target: ShardTensor<4>,
        mask: Option<ShardTensor<4>>,
        [weights, ratios]: [&[f64]; 2],
    ) -> Result<ShardTensor<1>> {
        let training = &self.config.training;
        let areas = self.data.grid.latitude_weights();
        let factors = |factor: fn(f64, f64) -> f64| -> Vec<f64> {
            let channels = weights.iter().zip(ratios);
            channels
                .map(|(weight, ratio)| factor(*weight, *ratio))
                .collect()
        };
        if training.loss.is_of_ensembles() {
            let factors = y.profile(1, &factors(|weight, ratio| weight * ratio));
            let y = split_members(y * factors.clone(), training.members, self.member_axis())?;
            let of_ensemble = |field: ShardTensor<4>| field.unsqueeze_dim::<5>(0);
            let target = of_ensemble(target * factors);
            let mask = mask.map(of_ensemble);
            let estimator = CrpsEstimator::AlmostFair(training.alpha);
            return match (training.loss, mask) {
                (Loss::Energy, Some(mask)) => {
                    energy_score_masked(y, target, mask, &areas, estimator)
                }
                (Loss::Energy, None) => energy_score(y, target, &areas, estimator),
                (_, Some(mask)) => crps_masked(y, target, mask, &areas, estimator),
                (_, None) => crps(y, target, &areas, estimator),
            };
        }
        let area = y.profile(2, &areas);
        let weight = match &mask {
            Some(mask) => mask.clone() * area,
            None => area,
        };
        let (penalty, factors_of_penalty) = match training.loss {
            Loss::Mae => (Penalty::Absolute, factors(|weight, ratio| weight * ratio)),
            // Its errors are scaled before it is computed.
            Loss::Huber => (Penalty::Huber(training.huber_delta), weights.to_vec()),
            _ => (
                Penalty::Squared,
                factors(|weight, ratio| weight * ratio * ratio),
            ),
        };
        let fields = [y.clone(), target.clone()];
        let [scaled, scaled_target] = match training.loss {
            Loss::Huber => fields.map(|field| field * y.profile(1, ratios)),
            _ => fields,
        };
        // The factors belong to the weights of the errors, not to those that the sum is divided by.
        let counts = weight.clone() * y.profile(1, &factors_of_penalty);
        let loss = weighted_loss(scaled, scaled_target, counts, penalty, Reduction::Sum)?;
        let [cells, weights_held] =
            [y.dims(), weight.dims()].map(|dims| dims.iter().product::<usize>());
        let total = weight.sum().resolve() * (cells / weights_held) as f64;
        let loss = loss / total.clamp_min(f64::from(f32::MIN_POSITIVE));
        let roots_of_channels = y.profile(1, &factors(|weight, ratio| weight.sqrt() * ratio));
        let roots = match training.loss {
            Loss::Amse => roots_of_channels,
            Loss::Spectral => {
                let roots: Vec<f64> = areas.iter().map(|area| area.sqrt()).collect();
                y.profile(2, &roots) * roots_of_channels
            }
            _ => return Ok(loss),
        };
        let weighted = |field: ShardTensor<4>| {
            let field = match &mask {
                Some(mask) => apply_mask(field, mask.clone())?,
                None => field,
            };
            Ok::<_, Error>(field * roots.clone())
        };
        let (y, target) = (weighted(y)?, weighted(target)?);
        let penalty = match training.loss {
            Loss::Amse => amse_penalty(y, target, self.transform()?)?,
            _ => spectral_loss::<5, 4, _>(y, target, &[3], Reduction::Mean)?,
        };
        Ok(loss.resolve() + penalty.resolve())
    }

    /// Returns the spherical-harmonic transform of the grid, whose tables are kept.
    fn transform(&self) -> Result<&Sht> {
        if let Some(transform) = self.harmonics.get() {
            return Ok(transform);
        }
        let transform = harmonics(&self.data.grid)?;
        Ok(self.harmonics.get_or_init(|| transform))
    }
}

/// Applies the model to the input of a step. A step through which no gradients flow has no graph.
pub(super) fn apply_step<N: OwnNetwork>(
    config: &ExperimentConfig,
    model: &FieldModel<N>,
    x: ShardTensor<4>,
    is_last: bool,
) -> ShardTensor<4> {
    let training = &config.training;
    if training.gradient == RolloutGradient::Last && !is_last {
        // Uses of parameters that the backward pass does not reach would delay their sums.
        return x.apply(&model.clone().no_grad());
    }
    if training.recompute {
        x.recompute(model, config.model.halos(), |model, x| x.apply(model))
    } else {
        x.apply(model)
    }
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;
    use halocline_io::Grid;

    use super::*;
    use crate::experiment::fixture::{
        COLUMNS, ROWS, config_in, region, wave, write_fields, write_fields_on,
    };

    /// Moving ice: at each time a third of the cells has no value.
    #[test]
    fn targets_without_a_value_at_the_start_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), |time, cell| {
            let (channel, row, column) = cell;
            if channel == 0 && (time + row + column).is_multiple_of(3) {
                f32::NAN
            } else {
                wave(time, cell)
            }
        });
        for loss in [
            "loss = \"mse\"",
            "loss = \"crps\"\nmembers = 2\nnoise = 0.1",
            "loss = \"energy\"\nmembers = 2\nnoise = 0.1",
        ] {
            let training = format!("[training]\n{loss}");
            let config = config_in(folder.path(), "missing = \"fill\"", &training);
            let run = Launcher::local(1).run(|world| {
                let experiment = Experiment::new(&world, &config)?;
                let model = experiment.model()?;
                for steps in [1, 2] {
                    let batch = experiment.batches(steps)?.load(&[0])?;
                    let present = batch.input_mask.clone().expect("missing values are filled");
                    let absent = experiment.of_targets(&present) * -1.0 + 1.0;
                    let absent = ShardTensor::cat(vec![absent; steps], 1);
                    let mut other = batch.clone();
                    other.target = batch.target.clone() + absent * 100.0;
                    let [one, other] = [batch, other].map(|batch| {
                        let loss = experiment.loss(&model, batch, steps, 0).unwrap().resolve();
                        loss.local().clone().into_scalar::<f32>()
                    });
                    assert_eq!(one, other, "{steps} steps");
                    assert!(one > 0.0);
                }
                Ok(())
            });
            run.unwrap();
        }
    }

    /// Missing values and the rim of a region over two steps, with members and anomalies or with a
    /// history.
    #[test]
    fn losses_of_several_settings_are_the_same_on_any_mesh() {
        for (data, loss, mesh) in [
            (
                "anomalies = true",
                "loss = \"crps\"\nmembers = 3",
                "data = 2\nmember = 2",
            ),
            ("history = 2", "loss = \"spectral\"", "data = 2\nlon = 2"),
            (
                "noise_channels = 2",
                "loss = \"energy\"\nmembers = 3",
                "data = 2\nmember = 2",
            ),
            (
                "bounds = { sst = [275.0, 285.0] }",
                "loss = \"huber\"\ndiscount = 0.5",
                "data = 2\nlat = 2",
            ),
            (
                "",
                "loss = \"mae\"\ngradient = \"last\"",
                "data = 2\nlat = 2",
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write_fields_on(folder.path(), &region(), |time, cell| {
                let (channel, row, column) = cell;
                if channel == 0 && (time + row + column).is_multiple_of(5) {
                    f32::NAN
                } else {
                    wave(time, cell)
                }
            });
            let values = |ranks: usize, mesh: &str| {
                let data = format!("missing = \"fill\"\nboundary = 1\n{data}");
                let tables = format!("[training]\nbatch = 2\nnoise = 0.1\n{loss}\n{mesh}");
                let config = config_in(folder.path(), &data, &tables);
                let found = Launcher::local(ranks).collect(|world| {
                    let experiment = Experiment::new(&world, &config)?;
                    let batch = experiment.batches(2)?.load(&[0, 5])?;
                    let loss = experiment.loss(&experiment.model()?, batch, 2, 0)?;
                    Ok(loss.into_scalar::<f64>())
                });
                found.unwrap()
            };
            let expected = values(1, "")[0];
            for found in values(4, &format!("[mesh]\n{mesh}")) {
                let is_same = (found / expected - 1.0).abs() < 1e-4;
                assert!(is_same, "{found} for {expected}: {loss}");
            }
        }
    }

    #[test]
    fn the_adjusted_error_of_any_mesh_exceeds_the_squared_one() {
        let folder = tempfile::tempdir().unwrap();
        write_fields_on(
            folder.path(),
            &Grid::with_poles(ROWS, COLUMNS).unwrap(),
            wave,
        );
        let losses = |loss: &str, ranks: usize, mesh: &str| {
            let tables = format!("[training]\nloss = \"{loss}\"\nnoise = 0.3\n{mesh}");
            let config = config_in(folder.path(), "", &tables);
            let found = Launcher::local(ranks).collect(|world| {
                let experiment = Experiment::new(&world, &config)?;
                let batch = experiment.batches(1)?.load(&[0])?;
                let loss = experiment.loss(&experiment.model()?, batch, 1, 0)?;
                Ok(loss.into_scalar::<f64>())
            });
            found.unwrap()
        };
        let [squared, adjusted] = ["mse", "amse"].map(|loss| losses(loss, 1, "")[0]);
        assert!(adjusted > squared, "{adjusted} {squared}");
        for found in losses("amse", 4, "[mesh]\nlat = 2\nlon = 2") {
            assert!(
                (found / adjusted - 1.0).abs() < 1e-4,
                "{found} for {adjusted}"
            );
        }
    }

    #[test]
    fn weights_are_factors_of_the_losses_of_targets() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        for loss in [
            "loss = \"mse\"",
            "loss = \"mae\"",
            "loss = \"huber\"",
            "loss = \"spectral\"",
            "loss = \"crps\"\nmembers = 2\nnoise = 0.1",
            "loss = \"energy\"\nmembers = 2\nnoise = 0.1",
        ] {
            let value = |weights: &str| {
                let training = format!("[training]\n{loss}\nweights = {{ {weights} }}");
                let config = config_in(folder.path(), "", &training);
                let found = Launcher::local(1).collect(|world| {
                    let experiment = Experiment::new(&world, &config)?;
                    let batch = experiment.batches(1)?.load(&[0])?;
                    let loss = experiment
                        .loss(&experiment.model()?, batch, 1, 0)?
                        .resolve();
                    Ok(loss.local().clone().into_scalar::<f64>())
                });
                found.map(|values| values[0])
            };
            let plain = value("").unwrap();
            let tripled = value("sst = 3.0, t2m = 3.0").unwrap();
            assert!((tripled / plain - 3.0).abs() < 1e-4, "{tripled} of {plain}");
            let one = value("sst = 3.0").unwrap();
            assert!(plain < one && one < tripled, "{plain}, {one}, {tripled}");
            let error = value("sss = 3.0").unwrap_err().to_string();
            assert!(
                error.contains("training.weights") && error.contains("sst"),
                "{error}"
            );
        }
    }

    #[test]
    fn losses_of_a_rollout_are_discounted_or_those_of_the_last_step() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        let value = |training: &str, steps: usize| {
            let config = config_in(folder.path(), "", &format!("[training]\n{training}"));
            let found = Launcher::local(1).collect(|world| {
                let experiment = Experiment::new(&world, &config)?;
                let batch = experiment.batches(steps)?.load(&[0])?;
                let loss = experiment.loss(&experiment.model()?, batch, steps, 0)?;
                Ok(loss.into_scalar::<f64>())
            });
            found.unwrap()[0]
        };
        let (first, both) = (value("", 1), value("", 2));
        let second = 2.0 * both - first;
        let found = value("gradient = \"last\"", 2);
        assert!((found / second - 1.0).abs() < 1e-4, "{found} for {second}");
        let found = value("discount = 0.5", 2);
        let expected = (2.0 * first + second) / 3.0;
        assert!(
            (found / expected - 1.0).abs() < 1e-4,
            "{found} for {expected}"
        );
        assert!((second / first - 1.0).abs() > 1e-2, "{first}, {second}");
    }
}
