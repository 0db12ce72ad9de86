//! Batches of samples, sharded over the ranks of a mesh.

mod config;
mod read_ahead;
mod single;
mod summary;

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use halocline_core::{
    DeviceMesh, IndexBox, Layout, Partial, Placement, RandomKey, ShardTensor, scatter_tensor,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::dataset::sample::Part;
use crate::ranks::agreement::{Fallible, agree, agree_at, broadcast};
use crate::ranks::alike::{Property, check, checksum};
use crate::{Channels, Error, FieldDataset, Result, Traffic};

pub use config::{LastBatch, LoaderConfig, Order, Source};
use read_ahead::{HostBatch, ReadAhead};
use summary::Summary;

/// Name of batch communication in errors.
const OPERATION: &str = "field_loader";

/// Sharded inputs, forcings and targets of a batch of samples.
///
/// See [`FieldLoader`] for an example.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Inputs, [batch, history · inputs, lat, lon].
    pub input: ShardTensor<4>,
    /// Forcings at the start of each step, [batch, steps · forcings, lat, lon]; `None` if the
    /// dataset has no forcings, or the loader [leaves them out](FieldLoader::without_forcings).
    pub forcing: Option<ShardTensor<4>>,
    /// Targets, [batch, steps · targets, lat, lon].
    pub target: ShardTensor<4>,
    /// Mask of the targets, in their shape: one where they have values, zero where values were
    /// filled. `None` unless missing values are [filled](crate::Missing::Fill).
    pub mask: Option<ShardTensor<4>>,
    /// Mask of the inputs, like [`mask`](Self::mask).
    pub input_mask: Option<ShardTensor<4>>,
    /// Indices of the samples in the dataset.
    pub samples: Vec<usize>,
    /// Time of the present of each sample, in seconds since 1970-01-01 UTC.
    pub times: Vec<f64>,
    /// Time from the present to each target of each sample, in hours.
    pub leads: Vec<Vec<f64>>,
}

/// Loader of batches onto a mesh. All ranks of the mesh create and use it collectively.
///
/// Both [sources](Source) yield bitwise identical batches. Ranks that each read a part of a field
/// check that they opened the same data, so that no field is assembled from different samples. They
/// compare the settings of the dataset, channels, grid, statistics, and the times, size and
/// checksum of each file (of 16 blocks of 4 KiB, if it is large).
///
/// # Example
/// ```
/// # use halocline_io::{FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(5, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["u10m", "v10m"], &WriterConfig::new())?;
/// # for step in 0..5 {
/// #     let field = halocline_io::ndarray::Array3::from_elem((2, 5, 8), step as f32);
/// #     writer.append(f64::from(step) * 21600.0, field.view())?;
/// # }
/// # writer.finish()?;
/// use halocline_core::{Launcher, Shard};
/// use halocline_io::{DatasetConfig, FieldDataset, FieldLoader, LoaderConfig, Order};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let config = LoaderConfig::new(2).with_order(Order::Shuffled { seed: 7 });
///     let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || {
///         FieldDataset::open(&[&path], &DatasetConfig::new())
///     })?;
///     assert_eq!((loader.samples(), loader.batches()), (4, 2));
///     for batch in loader.epoch(0) {
///         let batch = batch?;
///         assert_eq!(batch.input.dims(), [2, 2, 5, 8]);
///         assert_eq!(batch.input.local_dims(), [2, 2, 3 - world.rank(), 8]);
///         assert_eq!(batch.target.dims(), [2, 2, 5, 8]);
///         assert_eq!(batch.samples.len(), 2);
///         assert_eq!(batch.times[0], batch.samples[0] as f64 * 21600.0);
///         assert_eq!(batch.leads, [[6.0], [6.0]]); // hours
///     }
///     assert_eq!(loader.epoch_from(1, 1).len(), 1); // resumes epoch 1 after one batch
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FieldLoader {
    mesh: DeviceMesh,
    placements: Vec<Placement>,
    config: LoaderConfig,
    summary: Summary,
    /// Whether input and target of every sample are the same fields.
    are_states: bool,
    /// Number of targets per sample in a batch.
    steps: usize,
    /// Whether batches have no forcings, although the dataset has some.
    leaves_forcings_out: bool,
    /// Dataset, on the ranks that read.
    dataset: Option<Arc<FieldDataset>>,
}

impl FieldLoader {
    /// Creates a loader onto `mesh`. Calls `open` on the ranks that read, which depend on the
    /// [source](Source).
    ///
    /// # Placement
    /// `placements` are of [batch, channel, lat, lon], one per mesh axis:
    /// [`Shard`](halocline_core::Shard) or [`Replicate`](halocline_core::Replicate). Shards need
    /// not be even.
    ///
    /// # Errors
    /// Placements or extents that do not fit; a batch size of zero, or larger than the dataset if
    /// the last batch is dropped; on all ranks, an error of `open` on any of them, ranks whose
    /// settings (except `prefetch`) or data differ from those of the first rank; a failure of
    /// communication.
    pub fn new(
        mesh: &DeviceMesh,
        placements: &[Placement],
        config: &LoaderConfig,
        open: impl FnOnce() -> Result<FieldDataset>,
    ) -> halocline_core::Result<Self> {
        check_settings(mesh, placements, config)?;
        // These checks have the same outcome on all ranks, so that a rank may return without
        // communication.
        Layout::new(mesh.shape(), &[1; 4], placements)?;
        if let Some(placement) = placements.iter().find(|p| matches!(p, Partial(_))) {
            return Err(halocline_core::Error::placement(
                "FieldLoader",
                placement.to_string(),
                "load to Shard or Replicate",
            ));
        }
        if config.batch_size == 0 {
            return Err(Error::argument("batch_size", 0, "at least 1 sample").into());
        }
        let mut loader = Self {
            mesh: mesh.clone(),
            placements: placements.to_vec(),
            config: config.clone(),
            summary: Summary::default(),
            are_states: false,
            steps: 0,
            leaves_forcings_out: false,
            dataset: None,
        };
        loader.open(open)?;
        let [rows, columns] = loader.summary.grid;
        loader.layout([1, 1, rows, columns])?;
        if loader.batches() == 0 {
            let expected = format!(
                "at most the {} samples, or LastBatch::Keep",
                loader.samples()
            );
            return Err(Error::argument("batch_size", config.batch_size, expected).into());
        }
        Ok(loader)
    }

    /// Opens the dataset on the ranks that read, and sends its summary to all ranks.
    fn open(&mut self, open: impl FnOnce() -> Result<FieldDataset>) -> halocline_core::Result<()> {
        let opened = if self.reads() {
            open().and_then(|dataset| dataset.fills().map(|_| Some(dataset)))
        } else {
            Ok(None)
        };
        let dataset = agree(&self.mesh, OPERATION, self.fallible(), opened)?;
        // With a single reader there is nothing to compare.
        let compares = self.config.source == Source::PerRank && self.mesh.size() > 1;
        let properties = match &dataset {
            Some(dataset) if compares => dataset.properties(),
            _ => Ok(Vec::new()),
        };
        let properties = agree(&self.mesh, OPERATION, self.fallible(), properties)?;
        let summary = dataset.as_ref().map(|dataset| {
            let samples = 0..dataset.len();
            let samples = samples.map(|sample| (dataset.time(sample), dataset.leads(sample)));
            let summary = Summary {
                samples: samples.collect(),
                channels: dataset.channels().clone(),
                history: dataset.history(),
                steps: dataset.steps(),
                grid: dataset.metadata().grid().shape(),
                fills: dataset.fills().is_ok_and(|fills| fills),
            };
            (summary, &properties)
        });
        let first: Option<(Summary, Vec<(String, String)>)> = from_first(&self.mesh, &summary)?;
        let Some((summary, first)) = first else {
            unreachable!("the first rank reads under every source");
        };
        let checked = check(&properties, &first);
        agree(&self.mesh, OPERATION, self.fallible(), checked)?;
        self.are_states = summary.are_states();
        (self.steps, self.summary) = (summary.steps, summary);
        self.dataset = dataset.map(Arc::new);
        Ok(())
    }

    /// Returns the number of samples in the dataset.
    pub fn samples(&self) -> usize {
        self.summary.samples.len()
    }

    /// Returns the names of inputs, forcings and targets.
    pub fn channels(&self) -> &Channels {
        &self.summary.channels
    }

    /// Returns the number of targets of each sample in a batch.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Sets the number of targets per sample in the epochs that follow, for a curriculum such as
    /// `loader.set_steps(1 + trainer.epoch() / 5)?`. At most, and by default, the [number in the
    /// dataset](crate::DatasetConfig::steps). The samples stay the same.
    ///
    /// # Errors
    /// Zero steps, or more than the dataset has. If ranks set different numbers, the next batch is
    /// an error.
    pub fn set_steps(&mut self, steps: usize) -> Result<()> {
        let most = self.summary.steps;
        if !(1..=most).contains(&steps) {
            let expected = format!("1 to {most}, which DatasetConfig::with_steps sets");
            return Err(Error::argument("steps", steps, expected));
        }
        self.steps = steps;
        Ok(())
    }

    /// Returns the bytes that reading has taken so far on this rank, from which the read
    /// amplification follows; zero on ranks that do not read.
    pub fn traffic(&self) -> Traffic {
        let dataset = self.dataset.as_ref();
        dataset.map_or_else(Traffic::default, |dataset| dataset.traffic())
    }

    /// Returns the number of batches in an epoch.
    pub fn batches(&self) -> usize {
        match self.config.last_batch {
            LastBatch::Drop => self.samples() / self.config.batch_size,
            LastBatch::Keep => self.samples().div_ceil(self.config.batch_size),
        }
    }

    /// Iterates over the batches of an epoch, collectively on all ranks.
    ///
    /// Reading starts immediately, in the background. An error on one rank ends the iteration on
    /// all ranks, as the last item. Ranks that iterate over different epochs cause an error too.
    pub fn epoch(&self, epoch: usize) -> Epoch<'_> {
        self.epoch_from(epoch, 0)
    }

    /// Iterates over an [`epoch`](Self::epoch) without its first `first` batches, which are not
    /// read; used to resume training.
    pub fn epoch_from(&self, epoch: usize, first: usize) -> Epoch<'_> {
        let mut batches = self.order(epoch);
        batches.drain(..first.min(batches.len()));
        self.read_ahead(epoch, batches)
    }

    /// Starts to read the given samples of batches in the background.
    fn read_ahead(&self, epoch: usize, batches: Vec<Vec<usize>>) -> Epoch<'_> {
        let ahead = self.dataset.clone().map(|dataset| {
            let jobs = batches
                .iter()
                .map(|samples| (samples.clone(), self.boxes(samples.len())));
            ReadAhead::start(dataset, jobs.collect(), self.config.prefetch)
        });
        Epoch {
            loader: self,
            epoch,
            batches: batches.into_iter(),
            ahead,
        }
    }

    /// Returns the samples of each batch of an epoch.
    fn order(&self, epoch: usize) -> Vec<Vec<usize>> {
        let order = match self.config.order {
            Order::Sequential => (0..self.samples()).collect(),
            Order::Shuffled { seed } => {
                RandomKey::new(seed, ("epoch", epoch)).permutation(self.samples())
            }
        };
        let batches = order.chunks(self.config.batch_size).map(<[usize]>::to_vec);
        batches.take(self.batches()).collect()
    }

    /// Whether this rank reads files.
    fn reads(&self) -> bool {
        match self.config.source {
            Source::Scatter => self.mesh.position() == 0,
            Source::PerRank => true,
        }
    }

    fn fallible(&self) -> Fallible {
        match self.config.source {
            Source::Scatter => Fallible::First,
            Source::PerRank => Fallible::All,
        }
    }

    /// Returns the layouts of the parts of a batch.
    fn layouts(&self, batch: usize) -> [Layout; 3] {
        let Channels {
            inputs,
            forcings,
            targets,
        } = self.channels();
        let [rows, columns] = self.summary.grid;
        Part::ALL.map(|part| {
            let channels = match part {
                // Neither read nor sent, because they are the targets.
                Part::Input if self.are_states => 0,
                Part::Input => self.summary.history * inputs.len(),
                Part::Forcing if self.leaves_forcings_out => 0,
                Part::Forcing => self.steps * forcings.len(),
                Part::Target => self.steps * targets.len(),
            };
            let layout = self.layout([batch, channels, rows, columns]);
            layout.expect("checked in new()")
        })
    }

    /// Returns the layout of fields `[batch, channel, lat, lon]`.
    fn layout(&self, shape: [usize; 4]) -> halocline_core::Result<Layout> {
        let layout = Layout::new(self.mesh.shape(), &shape, &self.placements)?;
        match &self.config.extents {
            None => Ok(layout),
            Some([rows, columns]) => layout.with_extents(2, rows)?.with_extents(3, columns),
        }
    }

    /// Returns the cells of each part that this rank reads.
    fn boxes(&self, batch: usize) -> [IndexBox; 3] {
        self.layouts(batch).map(|layout| match self.config.source {
            Source::Scatter => IndexBox::whole(layout.shape()),
            Source::PerRank => layout.local_box(self.mesh.position()),
        })
    }

    /// Creates a batch from the data that this rank has read.
    fn batch(&self, samples: Vec<usize>, read: Option<HostBatch>) -> halocline_core::Result<Batch> {
        let [input_layout, forcing_layout, target_layout] = self.layouts(samples.len());
        let [input, forcing, target] = match read {
            Some(parts) => parts.map(|(values, mask)| (Some(values), mask)),
            None => Default::default(),
        };
        let given = !self.leaves_forcings_out && !self.channels().forcings.is_empty();
        let forcing = given.then(|| self.place(forcing.0, &forcing_layout));
        let (target, mask) = self.place_filled(target, &target_layout)?;
        let (input, input_mask) = if self.are_states {
            (target.clone(), mask.clone())
        } else {
            self.place_filled(input, &input_layout)?
        };
        let of_samples = samples
            .iter()
            .map(|&sample| self.summary.samples[sample].clone());
        let (times, leads) = of_samples
            .map(|(time, leads)| (time, leads[..self.steps].to_vec()))
            .unzip();
        Ok(Batch {
            input,
            forcing: forcing.transpose()?,
            target,
            mask,
            input_mask,
            times,
            leads,
            samples,
        })
    }

    /// Places values and, if missing ones are filled, their mask.
    fn place_filled(
        &self,
        (values, mask): (Option<TensorData>, Option<TensorData>),
        layout: &Layout,
    ) -> halocline_core::Result<(ShardTensor<4>, Option<ShardTensor<4>>)> {
        let values = self.place(values, layout)?;
        let mask = self.summary.fills.then(|| self.place(mask, layout));
        Ok((values, mask.transpose()?))
    }

    fn place(
        &self,
        read: Option<TensorData>,
        layout: &Layout,
    ) -> halocline_core::Result<ShardTensor<4>> {
        let tensor = read.map(|data| Tensor::from_data(data, self.mesh.device()));
        match (self.config.source, tensor) {
            (Source::PerRank, Some(local)) => ShardTensor::from_local(local, &self.mesh, layout),
            (_, whole) => {
                let root = self.mesh.shape().ranks()[0];
                scatter_tensor(whole, root, &self.mesh, layout)
            }
        }
    }
}

/// Checks that all ranks have the settings of the first, except `prefetch`.
fn check_settings(
    mesh: &DeviceMesh,
    placements: &[Placement],
    config: &LoaderConfig,
) -> halocline_core::Result<()> {
    let placements: Vec<String> = placements.iter().map(ToString::to_string).collect();
    let settings: [Property; 6] = [
        ("source", format!("{:?}", config.source)),
        ("placements", placements.join(", ")),
        ("batch_size", config.batch_size.to_string()),
        ("extents", format!("{:?}", config.extents)),
        ("order", format!("{:?}", config.order)),
        ("last_batch", format!("{:?}", config.last_batch)),
    ];
    let first: Vec<(String, String)> = from_first(mesh, &settings)?;
    agree(mesh, OPERATION, Fallible::All, check(&settings, &first))
}

/// Broadcasts a value of the first rank.
fn from_first<T: DeserializeOwned>(
    mesh: &DeviceMesh,
    value: &impl Serialize,
) -> halocline_core::Result<T> {
    let bytes = serde_json::to_vec(value).map_err(halocline_core::Error::other)?;
    let bytes = broadcast(mesh, OPERATION, bytes)?;
    serde_json::from_slice(&bytes).map_err(halocline_core::Error::other)
}

/// Iterator over the batches of an epoch. See [`FieldLoader::epoch`].
#[derive(Debug)]
#[must_use = "an epoch does nothing unless it is iterated over"]
pub struct Epoch<'a> {
    loader: &'a FieldLoader,
    epoch: usize,
    batches: std::vec::IntoIter<Vec<usize>>,
    ahead: Option<ReadAhead>,
}

impl Iterator for Epoch<'_> {
    type Item = halocline_core::Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let place = format!(
            "epoch {}, {} batches before its end",
            self.epoch,
            self.batches.len()
        );
        let samples = self.batches.next()?;
        let numbers = samples.iter().map(|&sample| sample as f64);
        let place = format!(
            "{place}, samples with checksum {:08x} and {} steps",
            checksum(numbers),
            self.loader.steps
        );
        let read = self.ahead.as_ref().map(ReadAhead::next);
        let batch = agree_at(
            &self.loader.mesh,
            OPERATION,
            self.loader.fallible(),
            ("batch", &place),
            read.transpose(),
        )
        .and_then(|read| self.loader.batch(samples, read));
        if batch.is_err() {
            self.batches = Vec::new().into_iter();
        }
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.batches.size_hint()
    }
}

impl ExactSizeIterator for Epoch<'_> {}
