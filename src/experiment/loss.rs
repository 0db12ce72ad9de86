//! The loss of a batch.

use halocline_core::{Distribution, RandomKey, Result, ShardTensor};
use halocline_io::Batch;
use halocline_models::{Spread, crps, crps_masked, perturbed, rollout};
use halocline_ops::prelude::*;
use halocline_ops::{counted, spectral_loss};

use super::config::Loss;
use super::network::FieldModel;
use super::setup::Experiment;

impl Experiment {
    /// The loss of a batch, weighted by area, of errors in standard deviations of the increments of a step.
    pub(super) fn loss(
        &self,
        model: &FieldModel,
        batch: Batch,
        steps: usize,
        epoch: usize,
    ) -> Result<ShardTensor<1>> {
        let training = &self.config.training;
        let key = RandomKey::new(self.config.seed, ("noise", epoch, batch.samples[0]));
        let mut x = self.seen_inputs(batch.input, &batch.times)?;
        let members = training.members;
        if training.loss == Loss::Crps {
            x = perturbed(x, members, training.noise, key, None)?;
        } else if training.noise > 0.0 {
            let normal = Distribution::Normal {
                mean: 0.0,
                std: training.noise,
            };
            let noise = ShardTensor::random(x.dims(), normal, key, x.mesh(), x.layout())?;
            x = x + noise;
        }
        // Members lie beside each other in the batch.
        let copies = |field: ShardTensor<4>| match members {
            1 => field,
            _ => ShardTensor::cat(vec![field; members], 0),
        };
        let channels = self.data.channels.targets.len();
        let feedback = match steps {
            1 => Vec::new(),
            _ => self.data.channels.feedback()?,
        };
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
        // What has no value after the first step is no input of the next ones, as in forecasts.
        let mask = batch.mask.as_ref().filter(|_| steps > 1);
        let mask = mask.map(|mask| copies(mask.clone().narrow(1, 0, channels)));
        let (recompute, halos) = (training.recompute, self.config.model.halos());
        let y = rollout(x, batch.forcing.map(copies), steps, &feedback, |step, x| {
            let y = match recompute {
                true => x.recompute(model, halos, |model, x| x.apply(model)),
                false => x.apply(model),
            };
            match &mask {
                Some(mask) => self.filled(y, mask.clone(), &times(step).repeat(members)),
                None => Ok(y),
            }
        })?;
        let [_, _, ratios] = &self.scales;
        let ratios = y.profile(1, &ratios.repeat(steps));
        let (y, target) = (y * ratios.clone(), target * ratios);
        self.distance(y, target, batch.mask)
    }

    /// The loss of predictions `[members · batch, steps · targets, lat, lon]`.
    fn distance(
        &self,
        y: ShardTensor<4>,
        target: ShardTensor<4>,
        mask: Option<ShardTensor<4>>,
    ) -> Result<ShardTensor<1>> {
        let training = &self.config.training;
        let weights = self.data.grid.latitude_weights();
        if training.loss == Loss::Crps {
            let batch = target.dims()[0];
            let y = y.unflatten::<5>(0, &[training.members, batch]);
            let of_ensemble = |field| ShapeField::unsqueeze::<5>(field, 0);
            let target = of_ensemble(target);
            return match mask {
                Some(mask) => crps_masked(y, target, of_ensemble(mask), &weights, Spread::Fair),
                None => crps(y, target, &weights, Spread::Fair),
            };
        }
        let area = y.profile(2, &weights);
        let weight = match &mask {
            Some(mask) => mask.clone() * area,
            None => area,
        };
        let (penalty, mean) = (Penalty::Squared, Reduction::Mean);
        let squared = weighted_loss(y.clone(), target.clone(), weight, penalty, mean)?;
        if training.loss == Loss::Mse {
            return Ok(squared);
        }
        let roots: Vec<f64> = weights.iter().map(|weight| weight.sqrt()).collect();
        let weighted = |field: ShardTensor<4>| {
            let field = match &mask {
                Some(mask) => counted(field, mask.clone())?,
                None => field,
            };
            let roots = field.profile(2, &roots);
            Ok::<_, halocline_core::Error>(field * roots)
        };
        let spectral = spectral_loss::<5, 4, _>(weighted(y)?, weighted(target)?, &[3], mean);
        Ok(squared.resolve() + spectral.resolve())
    }
}
