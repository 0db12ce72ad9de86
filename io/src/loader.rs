//! Batches of samples, sharded over the ranks of a mesh.

use std::sync::Arc;

use burn::config::Config;
use burn::tensor::{Tensor, TensorData};
use halocline_core::{
    DeviceMesh, IndexBox, Layout, LocalGradient, Partial, Placement, RandomKey, ShardTensor,
    scatter_tensor,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::agreement::{Fallible, agree, agree_at, broadcast};
use crate::alike::{Property, check, checksum};
use crate::read_ahead::{HostBatch, ReadAhead};
use crate::{Error, FieldDataset, Result, Traffic};

/// The name of communication for batches in errors.
const OPERATION: &str = "field_loader";

/// The ranks that read the files.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Source {
    /// The first rank of the mesh reads whole samples and sends each rank its shard: for files on
    /// the disk of one node.
    Scatter,
    /// Every rank reads its own box of cells: for file systems that all ranks share.
    PerRank,
}

/// The order of samples in an epoch.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Order {
    /// The order in the files.
    Sequential,
    /// A random order, another in every epoch; the seed and the number of the epoch determine it on
    /// any mesh.
    Shuffled {
        /// The seed.
        seed: u64,
    },
}

/// The handling of samples that do not fill a batch.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum LastBatch {
    /// They are left out of the epoch.
    Drop,
    /// They make a smaller batch.
    Keep,
}

/// Configuration of a [`FieldLoader`].
///
/// # Example
/// ```
/// use halocline_io::{LastBatch, LoaderConfig, Order, Source};
///
/// let config = LoaderConfig::new(8)
///     .with_source(Source::PerRank)
///     .with_order(Order::Shuffled { seed: 7 })
///     .with_last_batch(LastBatch::Keep);
/// assert_eq!((config.batch_size, config.prefetch), (8, 2));
/// ```
#[derive(Config, Debug)]
pub struct LoaderConfig {
    /// The number of samples in a batch, over all ranks.
    pub batch_size: usize,
    /// The ranks that read the files.
    #[config(default = "Source::Scatter")]
    pub source: Source,
    /// The order of samples.
    #[config(default = "Order::Sequential")]
    pub order: Order,
    /// The handling of samples that do not fill a batch.
    #[config(default = "LastBatch::Drop")]
    pub last_batch: LastBatch,
    /// The number of batches that are kept ready in the background, besides the one being read and
    /// the one in use.
    #[config(default = "2")]
    pub prefetch: usize,
}

/// The inputs and targets of some samples, sharded.
///
/// See [`FieldLoader`] for an example.
#[derive(Clone)]
pub struct Batch {
    /// Inputs, [batch, history · channels, lat, lon].
    pub input: ShardTensor<4>,
    /// Targets, [batch, channels, lat, lon].
    pub target: ShardTensor<4>,
    /// Indices of the samples in the dataset.
    pub samples: Vec<usize>,
    /// Time of the present of every sample, in seconds since 1970-01-01 UTC.
    pub times: Vec<f64>,
    /// Time from the present to the target of every sample, in hours.
    pub leads: Vec<f64>,
}

/// Loader of batches onto a mesh. All ranks of the mesh create and use it together.
///
/// Both [sources](Source) give the same batches, bit for bit. Ranks that each read a part of a
/// field compare the data that they opened, so that a field is not assembled from different
/// samples: history, lead, channels, grid, statistics, and of every file, in order, its times, its
/// size and a checksum of 16 blocks of 4 KiB.
///
/// # Example
/// ```
/// # use halocline_io::{FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centred(5, 8)?;
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
///         assert_eq!(batch.leads, [6.0, 6.0]); // hours
///     }
///     assert_eq!(loader.epoch_from(1, 1).len(), 1); // to resume in epoch 1 after a batch
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FieldLoader {
    mesh: DeviceMesh,
    placements: Vec<Placement>,
    config: LoaderConfig,
    /// Time in seconds and lead in hours of every sample.
    samples: Vec<(f64, f64)>,
    /// The shapes of an input and of a target.
    shapes: [[usize; 3]; 2],
    /// The dataset, on the ranks that read.
    dataset: Option<Arc<FieldDataset>>,
}

impl FieldLoader {
    /// Creates a loader onto `mesh`. `open` is called on the ranks that read, according to the
    /// [source](Source).
    ///
    /// # Placement
    /// `placements` are of [batch, channel, lat, lon], one per mesh axis:
    /// [`Shard`](halocline_core::Shard) or [`Replicate`](halocline_core::Replicate). Shards need
    /// not be even.
    ///
    /// # Errors
    /// Placements that do not fit; a batch size of zero, or too large for a single batch; on all
    /// ranks, an error of `open` on any of them, ranks with other settings (but for `prefetch`)
    /// than the first, and ranks that opened other data; a failure of communication.
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
            return Err(halocline_core::Error::Placement {
                operator: "FieldLoader".into(),
                placement: placement.to_string(),
                help: "load to Shard or Replicate".into(),
            });
        }
        if config.batch_size == 0 {
            return Err(Error::argument("batch_size", 0, "at least 1 sample").into());
        }
        let mut loader = Self {
            mesh: mesh.clone(),
            placements: placements.to_vec(),
            config: config.clone(),
            samples: Vec::new(),
            shapes: [[0; 3]; 2],
            dataset: None,
        };
        loader.open(open)?;
        if loader.batches() == 0 {
            let expected = format!(
                "at most the {} samples, or LastBatch::Keep",
                loader.samples()
            );
            return Err(Error::argument("batch_size", config.batch_size, expected).into());
        }
        Ok(loader)
    }

    /// Opens the dataset on the ranks that read, and sends its sizes and times to the others.
    fn open(&mut self, open: impl FnOnce() -> Result<FieldDataset>) -> halocline_core::Result<()> {
        let opened = if self.reads() {
            open().map(Some)
        } else {
            Ok(None)
        };
        let dataset = agree(&self.mesh, OPERATION, self.fallible(), opened)?;
        // A single rank that reads needs no comparison.
        let compares = self.config.source == Source::PerRank && self.mesh.size() > 1;
        let properties = match &dataset {
            Some(dataset) if compares => dataset.properties(),
            _ => Ok(Vec::new()),
        };
        let properties = agree(&self.mesh, OPERATION, self.fallible(), properties)?;
        let summary = dataset.as_ref().map(|dataset| {
            let shapes = [dataset.input_shape(), dataset.target_shape()];
            let samples = 0..dataset.len();
            let samples = samples.map(|sample| (dataset.time(sample), dataset.lead(sample)));
            (samples.collect::<Vec<_>>(), shapes, &properties)
        });
        let first: Option<Summary> = from_first(&self.mesh, &summary)?;
        let Some((samples, shapes, first)) = first else {
            unreachable!("the first rank reads under every source");
        };
        let checked = check(&properties, &first);
        agree(&self.mesh, OPERATION, self.fallible(), checked)?;
        (self.samples, self.shapes) = (samples, shapes);
        self.dataset = dataset.map(Arc::new);
        Ok(())
    }

    /// The number of samples in the dataset.
    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// Bytes that reading has taken so far on this rank, and its read amplification; zero on ranks
    /// that do not read.
    pub fn traffic(&self) -> Traffic {
        let dataset = self.dataset.as_ref();
        dataset.map_or_else(Traffic::default, |dataset| dataset.traffic())
    }

    /// The number of batches in an epoch.
    pub fn batches(&self) -> usize {
        match self.config.last_batch {
            LastBatch::Drop => self.samples() / self.config.batch_size,
            LastBatch::Keep => self.samples().div_ceil(self.config.batch_size),
        }
    }

    /// Iterates over the batches of an epoch, on all ranks together.
    ///
    /// Reading begins at once, in the background. An error on one rank is the last item on all
    /// ranks. A rank that iterates over another epoch than the first rank is an error too.
    pub fn epoch(&self, epoch: usize) -> Epoch<'_> {
        self.epoch_from(epoch, 0)
    }

    /// [`epoch`](Self::epoch) without its `first` batches, which are not read: to resume training.
    pub fn epoch_from(&self, epoch: usize, first: usize) -> Epoch<'_> {
        let mut batches = self.order(epoch);
        batches.drain(..first.min(batches.len()));
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

    /// The samples of every batch of an epoch.
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

    /// The layouts of the inputs and the targets of a batch.
    fn layouts(&self, batch: usize) -> [Layout; 2] {
        self.shapes.map(|[channels, rows, columns]| {
            let shape = [batch, channels, rows, columns];
            Layout::new(self.mesh.shape(), &shape, &self.placements).expect("checked in new()")
        })
    }

    /// The cells of inputs and targets that this rank reads.
    fn boxes(&self, batch: usize) -> [IndexBox; 2] {
        self.layouts(batch).map(|layout| match self.config.source {
            Source::Scatter => IndexBox::whole(layout.shape()),
            Source::PerRank => layout.local_box(self.mesh.position()),
        })
    }

    /// Creates the batch from the data that this rank has read.
    fn batch(&self, samples: Vec<usize>, read: Option<HostBatch>) -> halocline_core::Result<Batch> {
        let [input_layout, target_layout] = self.layouts(samples.len());
        let (input, target) = read.unzip();
        Ok(Batch {
            input: self.place(input, &input_layout)?,
            target: self.place(target, &target_layout)?,
            times: samples
                .iter()
                .map(|&sample| self.samples[sample].0)
                .collect(),
            leads: samples
                .iter()
                .map(|&sample| self.samples[sample].1)
                .collect(),
            samples,
        })
    }

    fn place(
        &self,
        read: Option<TensorData>,
        layout: &Layout,
    ) -> halocline_core::Result<ShardTensor<4>> {
        let tensor = read.map(|data| Tensor::from_data(data, self.mesh.device()));
        match (self.config.source, tensor) {
            (Source::PerRank, Some(local)) => {
                ShardTensor::from_local(local, layout, &self.mesh, LocalGradient::Replicated)
            }
            (_, whole) => {
                let root = self.mesh.shape().ranks()[0];
                scatter_tensor(whole, root, &self.mesh, &self.placements)
            }
        }
    }
}

/// The times and leads of the samples, the shapes of an input and of a target, and the properties that must be
/// equal on all ranks that read.
type Summary = (Vec<(f64, f64)>, [[usize; 3]; 2], Vec<(String, String)>);

/// Checks that all ranks have the settings of the first, except `prefetch`.
fn check_settings(
    mesh: &DeviceMesh,
    placements: &[Placement],
    config: &LoaderConfig,
) -> halocline_core::Result<()> {
    let placements: Vec<String> = placements.iter().map(ToString::to_string).collect();
    let settings: [Property; 5] = [
        ("source", format!("{:?}", config.source)),
        ("placements", placements.join(", ")),
        ("batch_size", config.batch_size.to_string()),
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
        let place = format!("{place}, samples with checksum {:08x}", checksum(numbers));
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
