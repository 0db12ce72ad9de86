//! Small experiment for tests.

use std::f64::consts::TAU;
use std::path::Path;

use halocline_io::ndarray::Array3;
use halocline_io::{FieldWriter, Grid, WriterConfig};

use super::config::ExperimentConfig;

/// Rows and columns of the fields.
pub(super) const ROWS: usize = 5;
pub(super) const COLUMNS: usize = 8;
/// Number of times, six hours apart.
pub(super) const TIMES: usize = 12;

/// Channel, row and column of a cell.
pub(super) type Cell = (usize, usize, usize);

/// Returns the grid of a region, of the rows and columns of the fields.
pub(super) fn region() -> Grid {
    let degrees = |count: usize| (0..count).map(|cell| 10.0 + 3.0 * cell as f64).collect();
    Grid::new(degrees(ROWS), degrees(COLUMNS)).unwrap()
}

/// Writes a data file into a folder, with the channels `sst` and `t2m` and the given value at each
/// time and cell.
pub(super) fn write_fields(folder: &Path, value: impl Fn(usize, Cell) -> f32) {
    write_fields_on(folder, &Grid::cell_centered(ROWS, COLUMNS).unwrap(), value);
}

/// Writes a data file like [`write_fields`] on another grid of as many rows and columns.
pub(super) fn write_fields_on(folder: &Path, grid: &Grid, value: impl Fn(usize, Cell) -> f32) {
    let (path, config) = (folder.join("data.h5"), WriterConfig::new());
    let mut writer = FieldWriter::create(path, grid, &["sst", "t2m"], &config).unwrap();
    for time in 0..TIMES {
        let field = Array3::from_shape_fn((2, ROWS, COLUMNS), |cell| value(time, cell));
        let seconds = 6.0 * 3600.0 * time as f64;
        writer.append(seconds, field.view()).unwrap();
    }
    writer.finish().unwrap();
}

/// Returns the value of an eastward-moving wave at a time and cell.
pub(super) fn wave(time: usize, (channel, row, column): Cell) -> f32 {
    let angle = TAU * (column as f64 / COLUMNS as f64 - time as f64 / 7.0);
    (280.0 + 10.0 * (angle + (channel + row) as f64).cos()) as f32
}

/// Writes a data file of eastward-moving waves into a folder.
pub(super) fn write_waves(folder: &Path) {
    write_fields(folder, wave);
}

/// Returns the configuration of an experiment in a folder, with additional lines in `[data]` and
/// additional tables.
pub(super) fn config_in(folder: &Path, data: &str, tables: &str) -> ExperimentConfig {
    let folder = folder.display();
    let text = format!(
        "folder = \"{folder}/run\"\n[data]\nfiles = [\"{folder}/data.h5\"]\nlead_hours = 6.0\n{data}\n[model]\n\
         kind = \"unet\"\nwidth = 2\nlevels = 1\n{tables}"
    );
    ExperimentConfig::from_toml(&text).unwrap()
}
