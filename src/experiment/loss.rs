//! Loss of a batch.

use halocline_core::{Distribution, Error, RandomKey, Result, ShardTensor};
use halocline_io::{Batch, Channel};
use halocline_models::{
    CrpsEstimator, crps, crps_masked, perturbed, repeat_members, rollout, split_members,
};
use halocline_ops::prelude::*;
use halocline_ops::{counted, spectral_loss};

use super::checks::check_weights;
use super::config::Loss;
use super::network::{FieldModel, places_of_targets, select_channels};
use super::setup::Experiment;

impl Experiment {
    /// Returns the area-weighted loss of a batch, of errors in standard deviations of the
    /// increments of a step.
    pub(super) fn loss(
        &self,
        model: &FieldModel,
        batch: Batch,
        steps: usize,
        epoch: usize,
    ) -> Result<ShardTensor<1>> {
        let training = &self.config.training;
        let key = RandomKey::new(self.config.seed, ("noise", epoch, batch.samples[0]));
        let members = training.members;
        let (mut x, present) = (batch.input, batch.input_mask);
        if training.loss == Loss::Crps {
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
        let mask = known.filter(|_| steps > 1).map(copies).transpose()?;
        let forcing = batch.forcing.map(copies).transpose()?;
        let (recompute, halos) = (training.recompute, self.config.model.halos());
        let y = rollout(x, forcing, steps, &feedback, |step, x| {
            let y = if recompute {
                x.recompute(model, halos, |model, x| x.apply(model))
            } else {
                x.apply(model)
            };
            let y = self.with_boundary(y, || {
                copies(target.clone().narrow(1, step * channels, channels))
            })?;
            match &mask {
                Some(mask) => self.filled(y, mask.clone(), &times(step)),
                None => Ok(y),
            }
        })?;
        self.distance(y, target, counts, &self.factors()?.repeat(steps))
    }

    /// Returns the factors of the errors of each target: standard deviations by those of increments,
    /// and what makes the loss that of the weights of the configuration.
    ///
    /// # Errors
    /// A weight of a name that is not a target.
    pub(super) fn factors(&self) -> Result<Vec<f64>> {
        let (training, targets) = (&self.config.training, &self.data.channels.targets);
        check_weights(training, targets)?;
        let weights = &training.weights;
        let weight = |target: &String| {
            let of_level = weights.get(target);
            let channel = Channel::new(target.clone());
            let weight = of_level.or_else(|| weights.get(channel.variable()));
            weight.copied().unwrap_or(1.0)
        };
        let [_, _, ratios] = &self.scales;
        let factor = |(target, ratio): (&String, &f64)| match training.loss {
            Loss::Crps => weight(target) * ratio,
            // Of squared errors.
            Loss::Mse | Loss::Spectral => weight(target).sqrt() * ratio,
        };
        Ok(targets.iter().zip(ratios).map(factor).collect())
    }

    /// Returns the mask of the targets at the start: the mask of the inputs at their newest time.
    /// For a target that is not an input it is one everywhere, because no forecast needs its value
    /// there.
    pub(super) fn of_targets(&self, present: &ShardTensor<4>) -> ShardTensor<4> {
        let inputs = present.dims()[1];
        let places = places_of_targets(&self.data.channels, inputs, inputs);
        select_channels(present.clone(), &places, |channel| channel * 0.0 + 1.0)
    }

    /// Returns the loss of predictions `[members · batch, steps · targets, lat, lon]`, whose errors
    /// have one factor per channel.
    fn distance(
        &self,
        y: ShardTensor<4>,
        target: ShardTensor<4>,
        mask: Option<ShardTensor<4>>,
        factors: &[f64],
    ) -> Result<ShardTensor<1>> {
        let training = &self.config.training;
        let weights = self.data.grid.latitude_weights();
        if training.loss == Loss::Crps {
            let factors = y.profile(1, factors);
            let y = split_members(y * factors.clone(), training.members, self.member_axis())?;
            let of_ensemble = |field: ShardTensor<4>| field.unsqueeze_dim::<5>(0);
            let target = of_ensemble(target * factors);
            return match mask {
                Some(mask) => {
                    crps_masked(y, target, of_ensemble(mask), &weights, CrpsEstimator::Fair)
                }
                None => crps(y, target, &weights, CrpsEstimator::Fair),
            };
        }
        let area = y.profile(2, &weights);
        let weight = match &mask {
            Some(mask) => mask.clone() * area,
            None => area,
        };
        // The factors belong to the weights of the errors, not to those that the sum is divided by.
        let squares: Vec<f64> = factors.iter().map(|factor| factor * factor).collect();
        let squares = weight.clone() * y.profile(1, &squares);
        let (penalty, sum) = (Penalty::Squared, Reduction::Sum);
        let squared = weighted_loss(y.clone(), target.clone(), squares, penalty, sum)?;
        let [cells, weights_held] =
            [y.dims(), weight.dims()].map(|dims| dims.iter().product::<usize>());
        let total = weight.sum().resolve() * (cells / weights_held) as f64;
        let squared = squared / total.clamp_min(f64::from(f32::MIN_POSITIVE));
        if training.loss == Loss::Mse {
            return Ok(squared);
        }
        let roots: Vec<f64> = weights.iter().map(|weight| weight.sqrt()).collect();
        let roots = y.profile(2, &roots) * y.profile(1, factors);
        let weighted = |field: ShardTensor<4>| {
            let field = match &mask {
                Some(mask) => counted(field, mask.clone())?,
                None => field,
            };
            Ok::<_, Error>(field * roots.clone())
        };
        let (y, target) = (weighted(y)?, weighted(target)?);
        let spectral = spectral_loss::<5, 4, _>(y, target, &[3], Reduction::Mean);
        Ok(squared.resolve() + spectral.resolve())
    }
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;
    use halocline_ops::loss_value;

    use super::*;
    use crate::experiment::fixture::{config_in, region, wave, write_fields, write_fields_on};

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
                    Ok(loss_value(&loss))
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
    fn weights_are_factors_of_the_losses_of_targets() {
        let folder = tempfile::tempdir().unwrap();
        write_fields(folder.path(), wave);
        for loss in [
            "loss = \"mse\"",
            "loss = \"spectral\"",
            "loss = \"crps\"\nmembers = 2\nnoise = 0.1",
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
}
