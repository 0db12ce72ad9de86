//! Configuration of loaders.

use burn::config::Config;

/// Ranks that read the files.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Source {
    /// Each rank reads its own box of cells, from a file system that all ranks share. The default.
    PerRank,
    /// The first rank of the mesh reads whole samples and sends each rank its shard. Suits files on
    /// the local disk of one node.
    Scatter,
}

/// Order of samples in an epoch.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Order {
    /// Order in the files.
    Sequential,
    /// Random order, different in each epoch. It depends only on the seed and the number of the
    /// epoch, not on the mesh.
    Shuffled {
        /// Seed of the random order.
        seed: u64,
    },
}

/// Handling of the samples at the end of an epoch that do not fill a batch.
///
/// See [`LoaderConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum LastBatch {
    /// Leaves them out of the epoch.
    Drop,
    /// Yields them as a smaller batch.
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
    /// Number of samples in a batch, over all ranks.
    pub batch_size: usize,
    /// Ranks that read the files.
    #[config(default = "Source::PerRank")]
    pub source: Source,
    /// Order of samples.
    #[config(default = "Order::Sequential")]
    pub order: Order,
    /// Handling of the samples at the end of an epoch that do not fill a batch.
    #[config(default = "LastBatch::Drop")]
    pub last_batch: LastBatch,
    /// Number of batches kept ready in the background, in addition to the one being read and the
    /// one in use.
    #[config(default = "2")]
    pub prefetch: usize,
    /// Extents of the shards along latitude and longitude, such as those of a
    /// [`Balance`](halocline_core::Balance) by the cells that have values. Default even extents.
    pub extents: Option<[Vec<usize>; 2]>,
}
