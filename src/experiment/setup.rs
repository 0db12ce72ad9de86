//! Experiment on one rank: mesh, data, model, units.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Device;
use halocline_core::{
    DeviceMesh, Launcher, MeshShape, Placement, Replicate, Result, Shard, ShardTensor, World,
    with_all_threads,
};
use halocline_io::{
    Checkpoint, FieldLoader, Grid, LoaderConfig, Metadata, Order, Period, Source, Statistics,
};
use halocline_models::parallel::build;
use halocline_ops::prelude::*;

use super::checks::{check_batch, check_rim, check_training};
use super::climatology::Climatology;
use super::config::ExperimentConfig;
use super::data::{Data, Samples};
use super::lock::lock;
use super::network::FieldModel;
use super::pretrained::{given_statistics, in_order_of_network};
use super::record::{
    CHECKPOINTS, STATISTICS, compare, compare_files, odd_and_units, record, untrained,
};
use super::timeline::Timeline;
use crate::root::on_root;
use crate::trainer::{best_or_latest, validated_name};

/// Experiment on one rank. All ranks create it and call its methods together.
///
/// Its folder holds `experiment.toml`, a summary of the files, the `statistics` and the
/// `climatology` of the training period, the `checkpoints`, the log of training (`log.jsonl`), and
/// the scores of validations.
///
/// The [module](super) has an example.
#[derive(Debug)]
pub struct Experiment {
    pub(super) config: ExperimentConfig,
    pub(super) world: World,
    pub(super) mesh: DeviceMesh,
    pub(super) data: Data,
    pub(super) files: Files,
    pub(super) statistics: Statistics,
    /// Mean of each target, its standard deviation, and the ratio of the latter to the standard
    /// deviation of its increments.
    pub(super) scales: [Vec<f64>; 3],
    pub(super) climatology: OnceCell<Climatology>,
    /// Time at which it was opened.
    pub(super) begin: Instant,
}

/// The files that an experiment reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Files {
    /// The files of its configuration.
    Trained,
    /// Other files, all of whose states are forecast and scored.
    Others,
}

/// States of a period, one by one.
#[derive(Debug)]
pub(super) struct States {
    pub(super) loader: FieldLoader,
    pub(super) timeline: Timeline,
    /// RMSE of persistence and of climatology in each row of a report, and the number of steps that
    /// the report is of. They do not depend on the model.
    pub(super) baselines: OnceCell<(usize, Vec<[f64; 2]>)>,
}

/// Choice of a checkpoint.
///
/// The [module](super) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointChoice {
    /// The checkpoint with the best validation, or else the last.
    Best,
    /// The last checkpoint.
    Last,
}

impl ExperimentConfig {
    /// Returns a launcher with the seed of the experiment and the ranks of its mesh, or `ranks`
    /// ranks if it has none. Ranks that the environment sets take precedence.
    pub fn launcher(&self, ranks: usize) -> Launcher {
        let ranks = if self.mesh.is_empty() {
            ranks
        } else {
            self.mesh.values().product()
        };
        let launcher = Launcher::from_env().ranks(ranks).seed(self.seed);
        match std::env::var_os("HALOCLINE_TIMEOUT") {
            Some(_) => launcher,
            // The other ranks wait while rank 0 computes statistics.
            None => launcher.timeout(Duration::from_secs(3600)),
        }
    }

    /// Returns names and sizes of the mesh's axes on this number of ranks: as square as possible,
    /// unless the configuration names them or the grid has fewer rows.
    pub(super) fn axes(&self, ranks: usize, grid: &Grid) -> Vec<(&str, usize)> {
        if !self.mesh.is_empty() {
            return self
                .mesh
                .iter()
                .map(|(name, size)| (&name[..], *size))
                .collect();
        }
        let [rows, _] = grid.shape();
        let divides = |lat: &usize| ranks.is_multiple_of(*lat) && lat * lat <= ranks;
        let lat = (1..=ranks.min(rows)).filter(divides).max().unwrap_or(1);
        vec![("lat", lat), ("lon", ranks / lat)]
    }

    /// Initializes the model for the channels and the grid of `data`.
    pub(super) fn model_on(&self, data: &Data, device: &Device) -> Result<FieldModel> {
        let history = self.data.history;
        let model = &self.model;
        model.init(&data.channels, history, &data.grid, &data.odd, device)
    }

    /// Checks that training fits a device and `data`. Returns the model on the device without
    /// autodiff, and the number of samples.
    ///
    /// # Errors
    /// A precision that the device lacks; a model that does not fit; batches, steps, weights or a
    /// loss that do not fit the samples, channels or grid.
    pub(super) fn check_fit(&self, data: &Data, device: &Device) -> Result<(FieldModel, usize)> {
        let training = &self.training;
        training.precision.check(device)?;
        let model = self.model_on(data, &device.clone().inner())?;
        let samples = data.samples(training.most_steps())?;
        check_training(training, &data.channels, &data.grid, samples)?;
        Ok((model, samples))
    }
}

/// Returns the placements of fields `[batch, channels, lat, lon]` by the names of the axes. On the
/// axis `data`, samples that are read one by one are replicated; so is a batch if the axis has one
/// rank, because members may be added to it.
pub(super) fn placements(mesh: &MeshShape, samples: Samples) -> Vec<Placement> {
    let of_axis = |(name, size): (&String, &usize)| match (&name[..], samples) {
        ("data", Samples::Steps(_)) if *size > 1 => Shard(0),
        ("lat", _) => Shard(2),
        ("lon", _) => Shard(3),
        _ => Replicate,
    };
    mesh.names().iter().zip(mesh.sizes()).map(of_axis).collect()
}

impl Experiment {
    /// Opens the data, and loads or computes the statistics: those of the training period, unless
    /// [`statistics`](super::DataConfig::statistics) or, before the first checkpoint,
    /// [`pretrained`](super::TrainingConfig::pretrained) names others.
    ///
    /// # Errors
    /// A configuration with values out of range; a mesh of another number of ranks; data that
    /// cannot be read, or lack a channel; if there are no statistics yet, a model that does not fit,
    /// a precision that the device lacks, or batches, steps, weights or a loss of training that do
    /// not fit the samples, channels or grid; a folder that holds an experiment with other data or
    /// another model, whose files have changed since, or whose statistics another job is computing;
    /// given statistics that lack a channel or differ from those of the folder; a pretrained model
    /// of other data or of another configuration; periods that overlap; a failure of communication.
    pub fn new(world: &World, config: &ExperimentConfig) -> Result<Self> {
        let begin = Instant::now();
        config.check_run()?;
        let data = in_order_of_network(config, Data::open(&config.data)?)?;
        check_rim(config.data.boundary, &data.grid)?;
        let folder = config.folder.join(STATISTICS);
        on_root(world, || {
            let given = given_statistics(config, &data)?;
            let is_computed = || Metadata::exists(&folder);
            let mut locked = if is_computed() {
                None
            } else {
                // Fails before the data are read.
                config.check_fit(&data, world.device())?;
                Some(lock(&config.folder)?)
            };
            record(config, &data, &mut locked)?;
            if !is_computed() {
                let statistics = match given {
                    Some(given) => given,
                    // The other ranks wait, so that their threads are free.
                    None => with_all_threads(|| data.statistics())?,
                };
                statistics.save(&folder)?;
            }
            Ok(())
        })?;
        let statistics = Statistics::load(&folder)?;
        let mut data = data.in_order_of(&statistics);
        if config.data.odd.is_none() {
            // Those that were known by their names at the first start.
            (data.odd, _) = odd_and_units(&config.folder)?;
        }
        let experiment = Self::of(world, config, data, statistics, Files::Trained)?;
        Ok(Self {
            begin,
            ..experiment
        })
    }

    /// Opens a trained experiment on other files, such as those of another year, to forecast from
    /// their states and to score the forecasts. The files may have a single time.
    ///
    /// # Errors
    /// An experiment that was not trained, or with other data or another model; files that cannot
    /// be read, lack a channel, or have another grid or other units; the errors of
    /// [`new`](Self::new).
    ///
    /// # Example
    /// ```no_run
    /// use halocline::experiment::{Experiment, ExperimentConfig, CheckpointChoice};
    /// use halocline::prelude::*;
    ///
    /// let config = ExperimentConfig::load("weather.toml")?;
    /// config.launcher(4).run(|world| {
    ///     let experiment = Experiment::of_files(&world, &config, &["2023.nc".into()])?;
    ///     println!("{}", experiment.score(&experiment.trained(CheckpointChoice::Best)?, &config.forecast)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn of_files(world: &World, config: &ExperimentConfig, files: &[PathBuf]) -> Result<Self> {
        config.check_run()?;
        compare(config)?;
        let statistics = Statistics::load(config.folder.join(STATISTICS))?;
        let mut data = Data::open_others(&config.data, files, &statistics)?;
        compare_files(config, &mut data)?;
        Self::of(world, config, data, statistics, Files::Others)
    }

    fn of(
        world: &World,
        config: &ExperimentConfig,
        data: Data,
        statistics: Statistics,
        files: Files,
    ) -> Result<Self> {
        // Components change sign beyond a pole after they are normalised, so their means are not
        // subtracted.
        let statistics = if data.grid.boundary()[0].is_pole() {
            statistics.without_means(&data.odd)
        } else {
            statistics
        };
        Ok(Self {
            mesh: world.mesh_of(&config.axes(world.size(), &data.grid))?,
            scales: data.scales(&statistics)?,
            config: config.clone(),
            world: world.clone(),
            data,
            files,
            statistics,
            climatology: OnceCell::new(),
            begin: Instant::now(),
        })
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the mesh axis over which members of ensembles are sharded.
    pub(super) fn member_axis(&self) -> Option<&str> {
        let mut names = self.mesh.shape().names().iter();
        names.find(|name| *name == "member").map(|name| &name[..])
    }

    /// Returns the folder of checkpoints.
    pub(super) fn checkpoints(&self) -> PathBuf {
        self.config.folder.join(CHECKPOINTS)
    }

    /// Initializes the model, with its parameters sharded by the plan.
    ///
    /// # Errors
    /// A model or plan that does not fit; a failure of communication.
    pub fn model(&self) -> Result<FieldModel> {
        let make = |device: &Device| self.config.model_on(&self.data, device);
        make(&self.world.device().clone().inner())?;
        build(&self.world, &self.mesh, &self.config.plan, |device| {
            make(device).expect("it was made before")
        })
    }

    /// Loads a trained model for forecasts, with the averaged parameters if there are any.
    ///
    /// # Errors
    /// No checkpoint; one that cannot be loaded; a failure of communication.
    pub fn trained(&self, kept: CheckpointChoice) -> Result<FieldModel> {
        let folder = self.checkpoints();
        // Not opened as a writer, because another job may still be training.
        let found = match kept {
            CheckpointChoice::Best => best_or_latest(&self.world, &folder)?,
            CheckpointChoice::Last => Checkpoint::latest(&self.world, &folder)?,
        };
        let Some(checkpoint) = found else {
            return Err(untrained(&folder));
        };
        let name = validated_name(&checkpoint);
        let mut model = checkpoint.module(&self.world, name, self.model()?.valid())?;
        model.checkpoint = Some(checkpoint.fingerprint());
        Ok(model)
    }

    /// Returns a loader of the training period, with targets of this number of steps.
    pub(super) fn batches(&self, steps: usize) -> Result<FieldLoader> {
        let seed = self.config.seed;
        let config =
            LoaderConfig::new(self.config.training.batch).with_order(Order::Shuffled { seed });
        let train = &self.config.data.train;
        let states = self.loader(&self.data, train, Samples::Steps(steps), &config)?;
        Ok(states.loader)
    }

    /// Opens the states of a period.
    pub(super) fn states(&self, period: &Period) -> Result<States> {
        // The next state is read while the model runs.
        let config = LoaderConfig::new(1).with_prefetch(0);
        self.loader(&self.data, period, Samples::States, &config)
    }

    /// Returns a loader of samples of a period, and their times.
    pub(super) fn loader(
        &self,
        data: &Data,
        period: &Period,
        samples: Samples,
        config: &LoaderConfig,
    ) -> Result<States> {
        let config = config.clone().with_source(Source::PerRank);
        let placements = placements(self.mesh.shape(), samples);
        let mut timeline = None;
        let loader = FieldLoader::new(&self.mesh, &placements, &config, || {
            let dataset = data.dataset(period, samples, &self.statistics)?;
            check_batch(config.batch_size, dataset.len())?;
            timeline = Some(data.timeline(&dataset));
            Ok(dataset)
        })?;
        let timeline = timeline.expect("every rank opens the data");
        let loader = match samples {
            Samples::Steps(_) => loader,
            // The forcings of each step of a forecast are read by their time.
            Samples::States | Samples::Targets => loader.without_forcings(),
        };
        Ok(States {
            loader,
            timeline,
            baselines: OnceCell::new(),
        })
    }

    /// Converts normalised targets to their units.
    pub(super) fn in_units(&self, x: ShardTensor<4>) -> ShardTensor<4> {
        let [means, stds, _] = &self.scales;
        let (means, stds) = (x.profile(1, means), x.profile(1, stds));
        x * stds + means
    }
}

/// Redistributes a field to the placements and batch extents of another one.
pub(super) fn like_batch_of(
    field: ShardTensor<4>,
    other: &ShardTensor<4>,
) -> Result<ShardTensor<4>> {
    let mut extents = field.layout().all_extents().to_vec();
    extents[0] = other.layout().extents(0).to_vec();
    let layout = field.layout().derive(other.placements().to_vec(), extents);
    field.try_redistribute(&layout)
}

/// Returns zero where a mask is one, and NaN elsewhere.
pub(super) fn missing(mask: ShardTensor<4>) -> ShardTensor<4> {
    let zero = mask.clone() * 0.0;
    zero.clone()
        .mask_where(mask.lower_elem(0.5), zero + f64::NAN)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::experiment::fixture::config_in;

    #[test]
    fn a_single_row_is_sharded_along_longitude() {
        let config = config_in(Path::new("a"), "", "");
        let cells = Grid::unstructured(vec![0.0; 40], vec![0.0; 40]).unwrap();
        assert_eq!(config.axes(4, &cells), [("lat", 1), ("lon", 4)]);
        let grid = Grid::with_poles(5, 8).unwrap();
        assert_eq!(config.axes(4, &grid), [("lat", 2), ("lon", 2)]);
    }

    #[test]
    fn a_batch_on_one_rank_is_whole() {
        for (data, samples, expected) in [
            (1, Samples::Steps(1), Replicate),
            (2, Samples::Steps(1), Shard(0)),
            (2, Samples::States, Replicate),
        ] {
            let axes = [("data", data), ("lat", 2)];
            let mesh = MeshShape::new(&axes, (0..2 * data).collect()).unwrap();
            assert_eq!(placements(&mesh, samples), [expected, Shard(2)]);
        }
    }
}
