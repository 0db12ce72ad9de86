//! Files, statistics, datasets, loaders and checkpoints, tested through the public interface.

mod alike;
mod anemoi;
mod cf;
mod checkpoint;
mod compressed;
mod convert;
mod coordinates;
mod curvilinear;
mod data_page;
mod dataset;
mod field_file;
mod field_writer;
mod forecast;
mod forecasts;
mod formats;
mod loader;
mod makani;
mod merged;
mod orders;
mod projected;
mod refused;
mod roles;
mod shared;
mod statistics;
mod text_times;
mod unstructured;
mod xarray;

use std::path::{Path, PathBuf};

use halocline_io::{FieldWriter, Grid, WriterConfig};
use ndarray::{Array3, Array4};

/// Seconds between the fields of the files.
const STEP: f64 = 21600.0;

/// Creates values that encode their index.
fn numbered(shape: [usize; 4], first: f32) -> Array4<f32> {
    Array4::from_shape_fn(shape, |(t, c, i, j)| {
        first + (t * 1000 + c * 100 + i * 10 + j) as f32
    })
}

fn names(channels: usize) -> Vec<String> {
    (0..channels).map(|channel| format!("z{channel}")).collect()
}

fn grid(rows: usize, columns: usize) -> Grid {
    Grid::with_poles(rows, columns).unwrap()
}

/// Writes fields [time, channel, lat, lon] to a file.
fn write(path: &Path, fields: &Array4<f32>, config: &WriterConfig) {
    let (_, channels, rows, columns) = fields.dim();
    let mut writer =
        FieldWriter::create(path, &grid(rows, columns), &names(channels), config).unwrap();
    for (index, field) in fields.outer_iter().enumerate() {
        writer.append(index as f64 * STEP, field).unwrap();
    }
    writer.finish().unwrap();
}

/// Creates a folder with one file of numbered values.
fn numbered_file(shape: [usize; 4]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    write(&path, &numbered(shape, 0.0), &WriterConfig::new());
    (folder, path)
}

/// Lists the names of the files in a folder, including hidden ones.
fn listing(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Edits a file with HDF5.
fn edit(path: &Path, change: impl FnOnce(&hdf5_metno::File)) {
    let file = hdf5_metno::File::open_rw(path).unwrap();
    change(&file);
    file.close().unwrap();
}

/// Creates a field of zeros, for tests in which values do not matter.
fn zeros(shape: [usize; 3]) -> Array3<f32> {
    Array3::zeros(shape)
}
