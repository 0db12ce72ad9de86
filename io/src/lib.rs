//! Field files, datasets, loaders and checkpoints.
//!
//! [`open`](fn@open) reads [`Fields`] on a latitude-longitude [`Grid`] over time from Zarr stores,
//! NetCDF files and field files. A [`FieldFile`] has an HDF5 layout that h5py, netCDF, xarray and
//! Makani can read; a [`FieldWriter`] writes it. [`Statistics`] hold the mean and standard
//! deviation of each channel, for normalisation. A [`FieldDataset`] forms samples from several
//! files, and a [`FieldLoader`] distributes batches of them over the ranks of a mesh.
//!
//! A [`ForecastWriter`] writes a forecast from all ranks. [`convert`](fn@convert) turns fields of
//! any format into a Zarr store chunked for a mesh, and [`inspect`](fn@inspect) reports the
//! contents and problems of a file or store.
//!
//! [`Checkpoints`] save the state of a program: each rank writes its part of a [`Snapshot`], and a
//! [`Checkpoint`] can be loaded on any mesh.
//!
//! The only computations on fields here are statistics, forcings and masks; models are elsewhere.

mod attributes;
mod checkpoint;
mod dataset;
mod error;
mod fields;
mod files;
mod formats;
mod grid;
mod loader;
mod output;
mod ranks;
mod time;

pub use checkpoint::{
    Checkpoint, CheckpointConfig, Checkpoints, Direction, Snapshot, StateDict, StateName,
    load_record,
};
pub use dataset::{
    Channels, DatasetConfig, FieldDataset, Sample, Series, Statistics, StatisticsBuilder,
};
pub use error::{Error, Result};
pub use fields::{
    Channel, Fields, LeftOut, LeftOutReason, Missing, Period, Traffic, amplification, assumed_ranks,
};
pub use files::{save_json, save_whole};
pub use formats::{
    FieldFile, FieldWriter, Inspection, Metadata, OpenConfig, Scan, WriterConfig, inspect, open,
};
pub use grid::Grid;
pub use loader::{Batch, Epoch, FieldLoader, LastBatch, LoaderConfig, Order, Source};
/// Host arrays, in the version used by the interface of this crate.
pub use ndarray;
pub use output::{
    Compression, Conversion, ConvertConfig, Existing, ForecastWriter, OutputConfig, OutputFormat,
    Table, convert,
};
pub use ranks::Progress;
pub use time::{Calendar, Gaps, falls_at, falls_on, parse_time};
