//! Configuration of loaders.

use burn::config::Config;

/// The ranks that read the files.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Source {
    /// Every rank reads its own box of cells, from a file system that all ranks share. The default.
    PerRank,
    /// The first rank of the mesh reads whole samples and sends each rank its shard: for files on
    /// the disk of one node.
    Scatter,
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

/// Configuration of a [`FieldLoader`](crate::FieldLoader).
///
/// # Example
/// ```
/// use halocline_io::{LastBatch, LoaderConfig, Order, Source};
///
/// let config = LoaderConfig::new(8)
///     .with_source(Source::Scatter)
///     .with_order(Order::Shuffled { seed: 7 })
///     .with_last_batch(LastBatch::Keep);
/// assert_eq!((config.batch_size, config.prefetch), (8, 2));
/// ```
#[derive(Config, Debug)]
pub struct LoaderConfig {
    /// The number of samples in a batch, over all ranks.
    pub batch_size: usize,
    /// The ranks that read the files.
    #[config(default = "Source::PerRank")]
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
    /// Extents of the shards along latitude and longitude, such as those of a [`Balance`](halocline_core::Balance) by the cells
    /// with a value; even ones by default.
    pub extents: Option<[Vec<usize>; 2]>,
}
