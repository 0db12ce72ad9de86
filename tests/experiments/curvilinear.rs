//! Networks of rows and columns on curvilinear grids.

use std::path::Path;

use halocline::io::{Fields, Grid, open};

use super::files::write_on;
use super::{
    COLUMNS, CONFIG, ROWS, Replaced, SCORE, fail, prepared, score, scores, succeed, write,
};

/// Writes waves on a turned grid of a region, and returns the grid.
fn write_cells(path: &Path) -> Grid {
    let cells = |along_row: f64, along_column: f64, first: f64| -> Vec<f64> {
        let cell = |cell: usize| {
            let (row, column) = (cell / COLUMNS, cell % COLUMNS);
            first + along_row * column as f64 + along_column * row as f64
        };
        (0..ROWS * COLUMNS).map(cell).collect()
    };
    let (lat, lon) = (cells(0.25, -1.0, 50.0), cells(1.5, 0.5, 10.0));
    let grid = Grid::curvilinear([ROWS, COLUMNS], lat, lon).unwrap();
    write_on(
        path,
        &grid,
        &["t2m", "z@500"],
        |time, (channel, row, column)| {
            let angle = 0.35 * (column + row) as f64 - 0.4 * time as f64 + channel as f64;
            (280.0 + 10.0 * angle.cos()) as f32
        },
    );
    grid
}

fn config(model: &str, mesh: &str) -> String {
    let config = CONFIG
        .replaced("2018.h5", "cells.h5")
        .replaced("lead_hours = 6.0", "lead_hours = 6.0\nboundary = 1")
        .replaced("kind = \"cnn\"\nwidth = 6\nblocks = 1", model);
    format!("{config}{mesh}")
}

#[test]
fn networks_on_curvilinear_grids_are_the_same_on_any_ranks() {
    for model in [
        "kind = \"cnn\"\nwidth = 6\nblocks = 1",
        "kind = \"unet\"\nwidth = 4\nlevels = 1",
    ] {
        let mut first = None;
        for (ranks, mesh) in [("1", ""), ("4", "\n[mesh]\nlat = 2\nlon = 2\n")] {
            let config = config(model, mesh);
            let folder = prepared(&config);
            let grid = write_cells(&folder.path().join("cells.h5"));
            write(folder.path(), &config, 1);
            let run = |arguments: &[&str]| {
                let arguments = [arguments, &["--ranks", ranks]].concat();
                succeed(folder.path(), &arguments)
            };
            run(&["train"]);
            run(SCORE);
            let all = scores(folder.path());
            let has = |region: &str| all.iter().any(|row| row["region"] == region);
            assert!(has("northern extratropics") && !has("tropics"), "{all:?}");
            let found = score(&all, "t2m", 6.0, "rmse");
            let expected = *first.get_or_insert(found);
            assert!((found / expected - 1.0).abs() < 1e-3, "{found}, {expected}");
            run(&["forecast", "--from", "2018-01-10", "--output", "a.zarr"]);
            let forecast = open(folder.path().join("a.zarr")).unwrap();
            assert!(forecast.grid().agrees_with(&grid) && forecast.grid().is_curvilinear());
        }
    }
}

#[test]
fn spherical_harmonics_need_latitudes() {
    let config = config("kind = \"sfno\"\nwidth = 4\nblocks = 1", "");
    let folder = prepared(&config);
    write_cells(&folder.path().join("cells.h5"));
    write(folder.path(), &config, 1);
    let error = fail(folder.path(), &["train"]);
    let told = "model.kind sfno: curvilinear, 10 x 18 cells; expected a globe";
    assert!(error.contains(told), "{error}");
}
