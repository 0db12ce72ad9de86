//! Field files, datasets, loaders and checkpoints.
//!
//! A [`FieldFile`] holds fields on a latitude-longitude [`Grid`] over time, in an HDF5 layout that
//! h5py, netCDF, xarray and Makani read; a [`FieldWriter`] writes it. [`Statistics`] hold the mean
//! and standard deviation of each channel, for normalisation. A [`FieldDataset`] forms samples from
//! several files, and a [`FieldLoader`] distributes batches of them over the ranks of a mesh.
//!
//! [`Checkpoints`] store the state of a program: each rank writes its part of a [`Snapshot`], and
//! any mesh loads the [`Checkpoint`].
//!
//! This crate computes only the statistics of fields, and contains no models.

mod agreement;
mod alike;
mod attributes;
mod checkpoint;
mod dataset;
mod durable;
mod error;
mod field_file;
mod field_writer;
mod grid;
mod inside;
mod loader;
mod metadata;
mod moments;
mod names;
mod packing;
mod progress;
mod read_ahead;
mod scales;
mod staged;
mod statistics;
mod time_units;

pub use checkpoint::{
    Checkpoint, CheckpointConfig, Checkpoints, Snapshot, StateDict, StateName, load_record,
};
pub use dataset::{DatasetConfig, FieldDataset, Sample};
pub use error::{Error, Result};
pub use field_file::{FieldFile, Missing};
pub use field_writer::{FieldWriter, WriterConfig};
pub use grid::Grid;
pub use loader::{Batch, Epoch, FieldLoader, LastBatch, LoaderConfig, Order, Source};
pub use metadata::Metadata;
/// Host arrays, at the version that this crate's interface uses.
pub use ndarray;
pub use progress::Progress;
pub use statistics::{Statistics, StatisticsBuilder};
