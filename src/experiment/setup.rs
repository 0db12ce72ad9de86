//! Experiment on one rank: mesh, data, model, units.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Device;
use halocline_core::tasks::with_all_threads;
use halocline_core::{
    DeviceMesh, Launcher, MeshShape, Placement, Replicate, Result, Shard, ShardTensor, World,
};
use halocline_io::{
    Checkpoint, FieldLoader, Grid, LoaderConfig, Metadata, Order, Period, Source, Statistics,
};
use halocline_models::parallel::init_parallel;
use halocline_ops::prelude::*;

use super::capacity::{Use, check_memory};
use super::checks::{check_batch, check_data, check_training};
use super::climatology::Climatology;
use super::config::{ExperimentConfig, ranks_of};
use super::data::{Data, Samples};
use super::lock::lock;
use super::network::{FieldModel, Maker, NoNetwork, OwnNetwork, Signature};
use super::pretrained::{given_statistics, in_order_of_network};
use super::record::{
    CHECKPOINTS, STATISTICS, compare, compare_files, odd_and_units, record, untrained,
};
use super::static_fields::static_fields_of;
use super::timeline::Timeline;
use crate::root::on_root;
use crate::trainer::{best_or_latest, validated_name};

/// Experiment on one rank. All ranks create it and call its methods together.
///
/// Its folder holds `experiment.toml`, a summary of the files, the `statistics` and the
/// `climatology` of the training period, the `checkpoints`, the logs of training (`log.jsonl` and
/// `steps.jsonl`), and the scores of validations.
///
/// `N` is the type of the [network of your own](Self::with_network), if there is one.
///
/// The [module](super) has an example.
#[derive(Debug)]
pub struct Experiment<N = NoNetwork> {
    pub(super) config: ExperimentConfig,
    pub(super) world: World,
    pub(super) mesh: DeviceMesh,
    /// Ranks with the same part of a field, one of each replica among which the starts of scores
    /// are dealt out: this rank alone, unless the experiment is a [replica](Self::replica).
    pub(super) replicas: DeviceMesh,
    pub(super) data: Data,
    pub(super) files: Files,
    pub(super) statistics: Statistics,
    /// Mean of each target, its standard deviation, and the ratio of the latter to the standard
    /// deviation of its increments.
    pub(super) scales: [Vec<f64>; 3],
    pub(super) climatology: OnceCell<Climatology>,
    /// Areas of the cells of an unstructured grid, divided by their mean, if they are known.
    pub(super) areas: OnceCell<Option<Vec<f64>>>,
    /// Spherical harmonics of the grid, for the loss that needs them.
    pub(super) harmonics: OnceCell<Sht>,
    /// Function that makes a network of the kind `own`.
    pub(super) maker: Maker<N>,
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
            self.mesh.values().copied().fold(1, usize::saturating_mul)
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

    /// Returns the mesh of these axes on this number of ranks, or on those of the configuration.
    ///
    /// # Errors
    /// More ranks than a mesh can have.
    pub(super) fn mesh_shape(&self, ranks: usize, grid: &Grid) -> Result<MeshShape> {
        let axes = self.axes(ranks, grid);
        let ranks = ranks_of(axes.iter().map(|(_, size)| *size))?;
        MeshShape::new(&axes, (0..ranks).collect())
    }

    /// Initializes the model for the channels and the grid of `data`.
    pub(super) fn model_on<N: OwnNetwork>(
        &self,
        data: &Data,
        device: &Device,
        maker: Maker<N>,
    ) -> Result<FieldModel<N>> {
        let signature = Signature {
            channels: &data.channels,
            history: self.data.history,
            grid: &data.grid,
            odd: &data.odd,
            noise_channels: self.data.noise_channels,
        };
        self.model.init_with(&signature, device, maker)
    }

    /// Checks that training on this number of ranks fits a device and `data`. Returns the model on
    /// the device without autodiff, and the number of samples. The parameters are not made.
    ///
    /// # Errors
    /// A precision that the device lacks; a model or plan that does not fit; batches, steps,
    /// weights or a loss that do not fit the samples, channels or grid; a share of a rank that is
    /// larger than the memory of this machine.
    pub(super) fn check_fit<N: OwnNetwork>(
        &self,
        data: &Data,
        device: &Device,
        ranks: usize,
        maker: Maker<N>,
    ) -> Result<(FieldModel<N>, usize)> {
        let training = &self.training;
        training.precision.check(device)?;
        let model = self.model_on(data, &device.clone().inner(), maker)?;
        let samples = data.samples(training.most_steps())?;
        check_training(training, &data.channels, &data.grid, samples)?;
        let mesh = Arc::new(self.mesh_shape(ranks, &data.grid)?);
        check_memory((self, data), (&model, &mesh), device, Use::Training)?;
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

impl<N: OwnNetwork> Experiment<N> {
    /// Opens the data, with a network of the kind `own` from `maker`.
    pub(super) fn open(world: &World, config: &ExperimentConfig, maker: Maker<N>) -> Result<Self> {
        let begin = Instant::now();
        config.check_run()?;
        let data = in_order_of_network(config, Data::open(&config.data)?)?;
        check_data(config, &data)?;
        // The record names the files that match the patterns.
        let mut config = config.clone();
        config.data.files = data.paths().to_vec();
        let config = &config;
        let folder = config.folder.join(STATISTICS);
        on_root(world, || {
            let given = given_statistics(config, &data)?;
            let is_computed = || Metadata::exists(&folder);
            let mut locked = if is_computed() {
                None
            } else {
                // Fails before the data are read.
                config.check_fit(&data, world.device(), world.size(), maker)?;
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
        let experiment = Self::of(world, config, data, statistics, (Files::Trained, maker))?;
        Ok(Self {
            begin,
            ..experiment
        })
    }

    /// Opens a trained experiment on other files, with a network of the kind `own` from `maker`.
    pub(super) fn open_files(
        world: &World,
        config: &ExperimentConfig,
        files: &[PathBuf],
        maker: Maker<N>,
    ) -> Result<Self> {
        config.check_run()?;
        compare(config)?;
        let statistics = Statistics::load(config.folder.join(STATISTICS))?;
        let static_fields = static_fields_of(&config.folder);
        let data = Data::open_others(&config.data, (files, static_fields), &statistics)?;
        let mut data = data.in_order_of(&statistics);
        compare_files(config, &mut data)?;
        Self::of(world, config, data, statistics, (Files::Others, maker))
    }

    fn of(
        world: &World,
        config: &ExperimentConfig,
        data: Data,
        statistics: Statistics,
        (files, maker): (Files, Maker<N>),
    ) -> Result<Self> {
        // Components change sign beyond a pole after they are normalised, so their means are not
        // subtracted.
        let statistics = if data.grid.boundary()[0].is_pole() {
            statistics.without_means(&data.odd)
        } else {
            statistics
        };
        let (comm, device) = (world.comm().clone(), world.device().clone());
        Ok(Self {
            mesh: world.mesh_of(&config.axes(world.size(), &data.grid))?,
            replicas: DeviceMesh::new(MeshShape::solo(world.rank()), comm, device)?,
            scales: data.scales(&statistics)?,
            config: config.clone(),
            world: world.clone(),
            data,
            files,
            statistics,
            climatology: OnceCell::new(),
            areas: OnceCell::new(),
            harmonics: OnceCell::new(),
            maker,
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
    /// A model or plan that does not fit; a share of a rank that is larger than the memory of this
    /// machine; a failure of communication.
    pub fn model(&self) -> Result<FieldModel<N>> {
        let make = |device: &Device| self.config.model_on(&self.data, device, self.maker);
        let device = self.world.device().clone().inner();
        let (sources, mesh) = ((&self.config, &self.data), self.mesh.shape());
        check_memory(sources, (&make(&device)?, mesh), &device, Use::Forecast)?;
        init_parallel(&self.world, &self.mesh, &self.config.plan, |device| {
            make(device).expect("it was made before")
        })
    }

    /// Loads a trained model for forecasts, with the averaged parameters if there are any.
    ///
    /// # Errors
    /// No checkpoint; one that cannot be loaded; a failure of communication.
    pub fn trained(&self, kept: CheckpointChoice) -> Result<FieldModel<N>> {
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
    fn more_ranks_than_a_mesh_can_have_are_refused() {
        let config = config_in(Path::new("a"), "", "");
        let grid = Grid::with_poles(5, 8).unwrap();
        assert_eq!(config.mesh_shape(4, &grid).unwrap().sizes(), [2, 2]);
        let error = config.mesh_shape(1 << 40, &grid).unwrap_err().to_string();
        let told = "mesh: got 1099511627776, expected at most 1048576 ranks";
        assert!(error.contains(told), "{error}");
    }

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
