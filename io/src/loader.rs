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
use crate::{Error, FieldDataset, Result};

/// What errors call communication for batches.
const OPERATION: &str = "field_loader";

/// Who reads the files.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Source {
    /// The first rank of the mesh reads whole samples and sends each rank its shard: for files on one node's disk.
    Scatter,
    /// Every rank reads its own box of cells: for file systems that all ranks share.
    PerRank,
}

/// In which order an epoch goes through the samples.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Order {
    /// As they are in the files.
    Sequential,
    /// At random, another way in every epoch; the seed and the number of the epoch determine it on any mesh.
    Shuffled {
        /// The seed.
        seed: u64,
    },
}

/// What becomes of the samples that do not fill a batch.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum LastBatch {
    /// They are left out of the epoch.
    Drop,
    /// They make a smaller batch.
    Keep,
}

/// How samples become batches.
#[derive(Config, Debug)]
pub struct LoaderConfig {
    /// The number of samples in a batch, over all ranks.
    pub batch_size: usize,
    /// Who reads the files.
    #[config(default = "Source::Scatter")]
    pub source: Source,
    /// The order of samples.
    #[config(default = "Order::Sequential")]
    pub order: Order,
    /// What becomes of the samples that do not fill a batch.
    #[config(default = "LastBatch::Drop")]
    pub last_batch: LastBatch,
    /// How many batches wait, read in the background, while another is read and a third is in use.
    #[config(default = "2")]
    pub prefetch: usize,
}

/// Some samples, sharded.
#[derive(Clone)]
pub struct Batch {
    /// [batch, history · channels, lat, lon].
    pub input: ShardTensor<4>,
    /// [batch, channels, lat, lon].
    pub target: ShardTensor<4>,
    /// The samples' indices in the dataset.
    pub samples: Vec<usize>,
}

/// Loads batches onto a mesh. All ranks of the mesh make and use it together.
///
/// Both [sources](Source) give the same batches, bit for bit. Ranks that read each a part of a field compare what they
/// opened: history, lead, channels, grid, statistics, and of every file, in order, its times, its size and a checksum of
/// 16 blocks of 4 KiB, so that they do not make one field of different samples.
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
///     for batch in loader.epoch(0) {
///         let batch = batch?;
///         assert_eq!(batch.input.dims(), [2, 2, 5, 8]);
///         assert_eq!(batch.input.local_dims(), [2, 2, 3 - world.rank(), 8]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FieldLoader {
    mesh: DeviceMesh,
    placements: Vec<Placement>,
    config: LoaderConfig,
    samples: usize,
    /// The shapes of an input and of a target.
    shapes: [[usize; 3]; 2],
    /// On the ranks that read.
    dataset: Option<Arc<FieldDataset>>,
}

impl FieldLoader {
    /// A loader onto `mesh`. `open` is called on the ranks that read, as the [source](Source) says.
    ///
    /// # Placement
    /// `placements` are of [batch, channel, lat, lon], one per mesh axis: [`Shard`](halocline_core::Shard) or
    /// [`Replicate`](halocline_core::Replicate). Shards need not be even.
    ///
    /// # Errors
    /// Placements that do not fit; a batch size of zero, or too large for a single batch; on all ranks, an error of
    /// `open` on any of them, ranks with other settings (but for `prefetch`) than the first, and ranks that opened other
    /// data; a failure of communication.
    pub fn new(
        mesh: &DeviceMesh,
        placements: &[Placement],
        config: &LoaderConfig,
        open: impl FnOnce() -> Result<FieldDataset>,
    ) -> halocline_core::Result<Self> {
        check_settings(mesh, placements, config)?;
        // What fails here fails alike on all ranks, so they may part without a word.
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
            samples: 0,
            shapes: [[0; 3]; 2],
            dataset: None,
        };
        loader.open(open)?;
        if loader.batches() == 0 {
            let expected = format!("at most the {} samples, or LastBatch::Keep", loader.samples);
            return Err(Error::argument("batch_size", config.batch_size, expected).into());
        }
        Ok(loader)
    }

    /// Opens the dataset where it is read, and tells the other ranks what it holds.
    fn open(&mut self, open: impl FnOnce() -> Result<FieldDataset>) -> halocline_core::Result<()> {
        let opened = if self.reads() {
            open().map(Some)
        } else {
            Ok(None)
        };
        let dataset = agree(&self.mesh, OPERATION, self.fallible(), opened)?;
        // One rank that reads has nobody to differ from.
        let compares = self.config.source == Source::PerRank && self.mesh.size() > 1;
        let properties = match &dataset {
            Some(dataset) if compares => dataset.properties(),
            _ => Ok(Vec::new()),
        };
        let own = agree(&self.mesh, OPERATION, self.fallible(), properties)?;
        let summary = dataset.as_ref().map(|dataset| {
            let shapes = [dataset.input_shape(), dataset.target_shape()];
            (dataset.len(), shapes, &own)
        });
        let first: Option<Summary> = of_first(&self.mesh, &summary)?;
        let Some((samples, shapes, first)) = first else {
            unreachable!("the first rank reads under every source");
        };
        agree(&self.mesh, OPERATION, self.fallible(), check(&own, &first))?;
        (self.samples, self.shapes) = (samples, shapes);
        self.dataset = dataset.map(Arc::new);
        Ok(())
    }

    /// The number of samples in the dataset.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// The number of batches in an epoch.
    pub fn batches(&self) -> usize {
        match self.config.last_batch {
            LastBatch::Drop => self.samples / self.config.batch_size,
            LastBatch::Keep => self.samples.div_ceil(self.config.batch_size),
        }
    }

    /// The batches of an epoch, which all ranks go through together.
    ///
    /// Reading begins at once, in the background. An error on one rank is the item of all ranks, and the last; a rank
    /// that goes through another epoch than the first is an error too.
    pub fn epoch(&self, epoch: usize) -> Epoch<'_> {
        self.epoch_from(epoch, 0)
    }

    /// [`epoch`](Self::epoch) without its first batches, which are not read: to resume.
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
            Order::Sequential => (0..self.samples).collect(),
            Order::Shuffled { seed } => {
                RandomKey::new(seed, ("epoch", epoch)).permutation(self.samples)
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

    /// Makes the batch of what this rank has read.
    fn batch(&self, samples: Vec<usize>, read: Option<HostBatch>) -> halocline_core::Result<Batch> {
        let [input_layout, target_layout] = self.layouts(samples.len());
        let (input, target) = read.unzip();
        Ok(Batch {
            input: self.place(input, &input_layout)?,
            target: self.place(target, &target_layout)?,
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

/// The number of samples, the shapes of an input and of a target, and what all ranks that read must have alike.
type Summary = (usize, [[usize; 3]; 2], Vec<(String, String)>);

/// Checks that all ranks make the same batches of the samples.
fn check_settings(
    mesh: &DeviceMesh,
    placements: &[Placement],
    config: &LoaderConfig,
) -> halocline_core::Result<()> {
    let placements: Vec<String> = placements.iter().map(ToString::to_string).collect();
    let own: [Property; 5] = [
        ("source", format!("{:?}", config.source)),
        ("placements", placements.join(", ")),
        ("batch_size", config.batch_size.to_string()),
        ("order", format!("{:?}", config.order)),
        ("last_batch", format!("{:?}", config.last_batch)),
    ];
    let first: Vec<(String, String)> = of_first(mesh, &own)?;
    agree(mesh, OPERATION, Fallible::All, check(&own, &first))
}

/// A value of the first rank, on all ranks.
fn of_first<T: DeserializeOwned>(
    mesh: &DeviceMesh,
    own: &impl Serialize,
) -> halocline_core::Result<T> {
    let bytes = serde_json::to_vec(own).map_err(halocline_core::Error::other)?;
    let bytes = broadcast(mesh, OPERATION, bytes)?;
    serde_json::from_slice(&bytes).map_err(halocline_core::Error::other)
}

/// The batches of an epoch. See [`FieldLoader::epoch`].
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
