//! Channels of noise that a model receives after the forcings.

use halocline_core::{RandomKey, Result, ShardTensor};
use halocline_models::perturbed;
use halocline_ops::prelude::*;

use super::network::OwnNetwork;
use super::setup::Experiment;

impl<N: OwnNetwork> Experiment<N> {
    /// Appends the channels of noise to the input of a step, in which members are stacked along the
    /// batch: standard normal values of a key, the same on any mesh. `samples` is a field of the
    /// batch before members were added.
    pub(super) fn with_noise_channels(
        &self,
        x: ShardTensor<4>,
        samples: &ShardTensor<4>,
        members: usize,
        key: RandomKey,
    ) -> Result<ShardTensor<4>> {
        let count = self.config.data.noise_channels;
        if count == 0 {
            return Ok(x);
        }
        let zero = samples.clone().narrow(1, 0, 1) * 0.0;
        let zeros = ShardTensor::cat(vec![zero; count], 1);
        let axis = self.member_axis().filter(|_| members > 1);
        let noise = perturbed(zeros, members, 1.0, key, axis)?;
        Ok(ShardTensor::cat(vec![x, noise], 1))
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;
    use halocline_io::Period;

    use super::*;
    use crate::experiment::fixture::{config_in, write_waves};

    #[test]
    fn members_differ_by_channels_of_noise_and_are_the_same_on_any_mesh() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let forecasts = |ranks: usize, mesh: &str| {
            let tables = format!("{mesh}\n[forecast]\nsteps = 2\nmembers = 2");
            let config = config_in(folder.path(), "noise_channels = 2", &tables);
            let found = Launcher::local(ranks).collect(|world| {
                let experiment = Experiment::new(&world, &config)?;
                let model = experiment.model()?.valid();
                let states = experiment.states(&Period::default())?;
                let read = |state: usize| states.loader.load(&[state]);
                let mut fields = Vec::new();
                experiment.steps(&model, &states, read(3)?, &config.forecast, read, |step| {
                    let field = step.fields.full_tensor().into_data();
                    fields.push(field.iter::<f32>().collect::<Vec<_>>());
                    Ok(())
                })?;
                Ok(fields)
            });
            found.unwrap().remove(0)
        };
        let expected = forecasts(1, "");
        for fields in &expected {
            let (first, second) = fields.split_at(fields.len() / 2);
            assert_ne!(first, second);
        }
        let found = forecasts(4, "[mesh]\nlat = 2\nmember = 2");
        for (field, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((field - expected).abs() < 1e-3, "{field} for {expected}");
        }
    }
}
