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

mod agreement;
mod aligned;
mod alike;
mod amplification;
mod anemoi;
mod attributes;
mod boundary;
mod calendar;
mod cell_areas;
mod cells;
mod cf;
mod channel;
mod channels;
mod checkpoint;
mod chunk_index;
mod chunked;
mod compressed;
mod constants;
mod dataset;
mod dataset_config;
mod degrees;
mod durable;
mod error;
mod field_file;
mod field_writer;
mod fields;
mod file_bytes;
mod fletcher;
mod forcing;
mod grid;
mod grid_order;
mod healpix;
mod inside;
mod inspect;
mod joined;
mod json;
mod left_out;
mod listing;
mod loader;
mod loader_config;
mod merged;
mod metadata;
mod missing;
mod moments;
mod names;
mod netcdf;
mod open;
mod output;
mod packing;
mod period;
mod progress;
mod read_ahead;
mod row_weights;
mod sample;
mod samples;
mod scales;
mod selected;
mod staged;
mod staged_folder;
mod statistics;
mod time_units;
mod times;
mod traffic;
mod zarr;

pub use amplification::{amplification, assumed_ranks};
pub use calendar::Calendar;
pub use channel::Channel;
pub use channels::Channels;
pub use checkpoint::{
    Checkpoint, CheckpointConfig, Checkpoints, Direction, Snapshot, StateDict, StateName,
    load_record,
};
pub use dataset::FieldDataset;
pub use dataset_config::{DatasetConfig, Series};
pub use error::{Error, Result};
pub use field_file::FieldFile;
pub use field_writer::{FieldWriter, WriterConfig};
pub use fields::Fields;
pub use grid::Grid;
pub use inspect::{Inspection, Scan, inspect};
pub use json::save_json;
pub use left_out::{LeftOut, LeftOutReason};
pub use loader::{Batch, Epoch, FieldLoader};
pub use loader_config::{LastBatch, LoaderConfig, Order, Source};
pub use metadata::Metadata;
pub use missing::Missing;
/// Host arrays, in the version used by the interface of this crate.
pub use ndarray;
pub use open::{OpenConfig, open};
pub use output::{
    Compression, Conversion, ConvertConfig, ForecastWriter, OutputConfig, OutputFormat, Table,
    convert,
};
pub use period::Period;
pub use progress::Progress;
pub use sample::Sample;
pub use staged::save_whole;
pub use staged_folder::Existing;
pub use statistics::{Statistics, StatisticsBuilder};
pub use time_units::parse_time;
pub use times::{Gaps, falls_on};
pub use traffic::Traffic;
