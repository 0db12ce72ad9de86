//! Replicas of the model, among which the starts of scored forecasts are dealt out.

use halocline_core::{DeviceMesh, MeshShape, Result};
use halocline_models::parallel::Plan;
use halocline_models::{Spectra, Verification};

use super::network::OwnNetwork;
use super::setup::Experiment;

impl<N: OwnNetwork> Experiment<N> {
    /// Returns the experiment on the ranks of this rank's replica of the model: those with the same
    /// coordinate on the mesh axis `data`, which has one rank there. `None` if there are no other
    /// replicas, or the plan shards parameters, which belong to the whole mesh.
    ///
    /// # Errors
    /// No climatology that can be read or computed; a failure of communication.
    pub(super) fn replica(&self) -> Result<Option<Self>> {
        let shape = self.mesh.shape();
        let Ok(data) = shape.axis("data") else {
            return Ok(None);
        };
        if shape.sizes()[data] == 1 || self.config.plan != Plan::default() {
            return Ok(None);
        }
        let axes = shape.names().iter().zip(shape.sizes()).enumerate();
        let axes = axes.map(|(axis, (name, size))| {
            let size = if axis == data { 1 } else { *size };
            (&name[..], size)
        });
        let axes: Vec<(&str, usize)> = axes.collect();
        let others: Vec<usize> = (0..axes.len()).filter(|axis| *axis != data).collect();
        let ranks = MeshShape::new(&axes, self.mesh.ranks_along(&others).to_vec())?;
        let (comm, device) = (self.mesh.comm().clone(), self.mesh.device().clone());
        let mesh = DeviceMesh::new(ranks, comm, device)?;
        Ok(Some(Self {
            replicas: self.mesh.submesh(&["data"])?,
            climatology: self.climatology()?.on_mesh(&mesh).into(),
            areas: self.areas.clone(),
            harmonics: self.harmonics.clone(),
            mesh,
            config: self.config.clone(),
            world: self.world.clone(),
            data: self.data.clone(),
            files: self.files,
            statistics: self.statistics.clone(),
            scales: self.scales.clone(),
            maker: self.maker,
            begin: self.begin,
        }))
    }
}

/// Scores of ensembles, of their means or of single forecasts, and of persistence and climatology,
/// with the spectra of the forecasts where they have any.
#[derive(Clone)]
pub(super) struct Scores {
    pub(super) ensembles: Verification,
    pub(super) means: Verification,
    pub(super) persistence: Verification,
    pub(super) climatology: Verification,
    pub(super) spectra: Option<Spectra>,
}

impl Scores {
    /// Makes scores of no forecast from scores and spectra of none.
    pub(super) fn new(empty: &Verification, spectra: Option<Spectra>) -> Self {
        let [ensembles, means, persistence, climatology] = [(); 4].map(|()| empty.clone());
        Self {
            ensembles,
            means,
            persistence,
            climatology,
            spectra,
        }
    }

    /// Adds the part of each replica, in their order, so that the sums do not depend on the number
    /// of replicas.
    pub(super) fn add_dealt(&mut self, part: &Self, replicas: &DeviceMesh) -> Result<()> {
        self.ensembles.add_dealt(&part.ensembles, replicas)?;
        self.means.add_dealt(&part.means, replicas)?;
        self.persistence.add_dealt(&part.persistence, replicas)?;
        self.climatology.add_dealt(&part.climatology, replicas)?;
        match (&mut self.spectra, &part.spectra) {
            (Some(spectra), Some(part)) => spectra.add_dealt(part, replicas),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use halocline_core::Launcher;
    use halocline_io::Period;

    use super::*;
    use crate::experiment::ExperimentConfig;
    use crate::experiment::fixture::{TIMES, config_in, write_waves};

    const TRAINING: &str = "[training]\nepochs = 1\nbatch = 6\n[optimizer]\nlearning_rate = 1e-30";

    /// Returns the scores of forecasts from four states, of each rank.
    fn scored(config: &ExperimentConfig, ranks: usize) -> Vec<String> {
        let found = Launcher::local(ranks).collect(|world| {
            let experiment = Experiment::new(&world, config)?;
            let model = experiment.model()?.valid();
            let report = experiment.score(&model, &config.forecast)?;
            assert!(!report.spectra.is_empty());
            Ok(format!("{report:?}"))
        });
        found.unwrap()
    }

    #[test]
    fn scores_have_the_same_bits_for_any_number_of_replicas() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let periods = "train = { until = \"1970-01-03\" }\ntest = { from = \"1970-01-03\" }";
        let found = |[data, lat]: [usize; 2], plan: &str| {
            let forecast = "[forecast]\nsteps = 2\nmembers = 3\nnoise = 0.1";
            let mesh = format!("[mesh]\ndata = {data}\nlat = {lat}");
            let tables = format!("{TRAINING}\n{forecast}\n{mesh}\n{plan}");
            scored(&config_in(folder.path(), periods, &tables), data * lat)
        };
        for lat in [1, 2] {
            let expected = found([1, lat], "");
            // Equal shares, others, and more replicas than starts.
            for data in [2, 3, 5] {
                for found in found([data, lat], "") {
                    assert_eq!(found, expected[0], "data = {data}, lat = {lat}");
                }
            }
        }
        // Parameters on the whole mesh.
        let stored = "[[plan.store]]\npath = \"**\"\naxis = \"data\"";
        assert_eq!(found([2, 1], stored).len(), 2);
    }

    #[test]
    fn replicas_read_the_states_of_their_own_forecasts() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", &format!("{TRAINING}\n[mesh]\ndata = 3"));
        let run = Launcher::local(3).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let model = experiment.model()?.valid();
            let replica = experiment.replica()?.expect("there are three");
            let states = replica.states(&Period::default())?;
            replica.score_states(&model, &states, &config.forecast, None)?;
            // Those of at most four starts, the states after them, and one that is read ahead.
            let read = states.loader.traffic().needed / (2 * 5 * 8 * 4);
            assert!(read < TIMES as u64, "{read} states");
            Ok(())
        });
        run.unwrap();
    }

    /// With so small a learning rate, the weights stay the same.
    #[test]
    fn validations_have_the_same_bits_for_any_number_of_replicas() {
        let validated = |data: usize| {
            let folder = tempfile::tempdir().unwrap();
            write_waves(folder.path());
            let periods =
                "train = { until = \"1970-01-03\" }\nvalidation = { from = \"1970-01-03\" }";
            let tables = format!("{TRAINING}\n[mesh]\ndata = {data}");
            let config = config_in(folder.path(), periods, &tables);
            let run = Launcher::local(data).run(|world| {
                let experiment = Experiment::new(&world, &config)?;
                let _ended = experiment.train()?;
                Ok(())
            });
            run.unwrap();
            std::fs::read_to_string(config.folder.join("validation.json")).unwrap()
        };
        assert_eq!(validated(2), validated(1));
    }
}
