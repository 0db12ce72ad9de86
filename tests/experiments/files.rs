//! Files of fields on grids.

use std::f64::consts::TAU;
use std::path::Path;

use halocline::io::ndarray::Array3;
use halocline::io::{FieldWriter, Grid, WriterConfig, parse_time};

use super::{COLUMNS, ROWS, TIMES};

/// Writes a file with the given value at each time, channel, row and column. Times without any
/// value are left out.
pub(super) fn write_on(
    path: &Path,
    grid: &Grid,
    names: &[&str],
    value: impl Fn(usize, (usize, usize, usize)) -> f32,
) {
    let [rows, columns] = grid.shape();
    let mut writer = FieldWriter::create(path, grid, names, &WriterConfig::new()).unwrap();
    for time in 0..TIMES {
        let field = Array3::from_shape_fn((names.len(), rows, columns), |cell| value(time, cell));
        if !field.iter().all(|value| value.is_nan()) {
            writer.append(seconds(time), field.view()).unwrap();
        }
    }
    writer.finish().unwrap();
}

/// Writes a file of waves that move east. Cells for which `phase` returns `None` are missing.
pub(super) fn write_fields(path: &Path, phase: impl Fn(usize, [usize; 2]) -> Option<usize>) {
    let grid = Grid::cell_centered(ROWS, COLUMNS).unwrap();
    write_on(path, &grid, &["t2m", "z@500"], |time, cell| {
        let (channel, row, column) = cell;
        let Some(time) = phase(time, [row, column]) else {
            return f32::NAN;
        };
        let angle = TAU * (2.0 * column as f64 / COLUMNS as f64 - time as f64 / 16.0);
        let wave = grid.lat()[row].to_radians().cos() * (angle + channel as f64).cos();
        [280.0 + 10.0 * wave, 5e4 + 800.0 * wave][channel] as f32
    });
}

/// Writes the times before `end` to `first.h5`, and the others to `rest.h5`.
pub(super) fn write_parts(folder: &Path, end: usize) {
    write_fields(&folder.join("first.h5"), |time, _| {
        (time < end).then_some(time)
    });
    write_fields(&folder.join("rest.h5"), |time, _| {
        (time >= end).then_some(time)
    });
}

/// Returns a time in seconds.
pub(super) fn seconds(time: usize) -> f64 {
    let start = parse_time("2018-01-01", Default::default()).unwrap();
    start + 6.0 * 3600.0 * time as f64
}
