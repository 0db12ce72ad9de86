//! Graph networks on unstructured grids.

use std::path::Path;

use halocline::io::{Fields, Grid, open};

use super::files::write_on;
use super::{CONFIG, Replaced, SCORE, fail, prepared, score, scores, succeed, write};

const CELLS: usize = 40;

/// Writes waves that move east, on cells that spiral from pole to pole, with their positions.
fn write_cells(path: &Path) {
    let sine = |cell: usize| 1.0 - (cell as f64 + 0.5) / 20.0;
    let lat = (0..CELLS).map(|cell| sine(cell).asin().to_degrees());
    let lon = (0..CELLS).map(|cell| 137.5 * cell as f64);
    let grid = Grid::unstructured(lat.collect(), lon.collect()).unwrap();
    let [lat, lon] = grid.cells().unwrap();
    write_on(
        path,
        &grid,
        &["t2m", "z@500"],
        |time, (channel, _, cell)| {
            let angle = lon[cell].to_radians() - 0.4 * time as f64 + channel as f64;
            (280.0 + 10.0 * lat[cell].to_radians().cos() * angle.cos()) as f32
        },
    );
}

fn config() -> String {
    let kind = "kind = \"graph\"\nwidth = 6\nlayers = 2\nmesh_level = 1";
    CONFIG
        .replaced("2018.h5", "cells.h5")
        .replaced("kind = \"cnn\"\nwidth = 6\nblocks = 1", kind)
}

#[test]
fn graphs_of_cells_are_trained_and_scored_on_any_ranks() {
    let config = config();
    let mut first = None;
    for ranks in ["1", "2"] {
        let folder = prepared(&config);
        write_cells(&folder.path().join("cells.h5"));
        write(folder.path(), &config, 1);
        let run = |arguments: &[&str]| {
            let arguments = [arguments, &["--ranks", ranks]].concat();
            succeed(folder.path(), &arguments)
        };
        let plan = run(&["plan", "--latency", "5", "--bandwidth", "10"]);
        assert!(ranks == "1" || plan.contains("of exchange"), "{plan}");
        run(&["train"]);
        let has_pictures = cfg!(feature = "plot") && ranks == "2";
        run(if has_pictures { &["score"][..] } else { SCORE });
        let map = folder.path().join("run/pictures/t2m_map.png");
        assert_eq!(map.exists(), has_pictures);
        let all = scores(folder.path());
        assert!(all.iter().any(|row| row["region"] == "tropics"), "{all:?}");
        let found = score(&all, "t2m", 6.0, "rmse");
        let expected = *first.get_or_insert(found);
        assert!((found / expected - 1.0).abs() < 1e-3, "{found}, {expected}");
        run(&["forecast", "--from", "2018-01-10", "--output", "a.zarr"]);
        let forecast = open(folder.path().join("a.zarr")).unwrap();
        assert_eq!(forecast.grid().shape(), [1, CELLS]);
        run(&["package", "--output", "model"]);
    }
}

#[test]
fn graphs_need_positions() {
    let config = config();
    let folder = prepared(&config);
    let path = folder.path().join("cells.h5");
    let lon = (0..CELLS).map(|cell| 9.0 * cell as f64).collect();
    let grid = Grid::new(vec![0.0], lon).unwrap();
    write_on(&path, &grid, &["t2m", "z@500"], |time, (_, _, cell)| {
        (cell + time) as f32
    });
    let forcings = "forcings = [\"sin_latitude\", \"cos_solar_zenith_angle\"]";
    write(folder.path(), &config.replaced(forcings, ""), 1);
    let error = fail(folder.path(), &["train"]);
    let told = "model.kind graph: one row of 40 cells without positions";
    assert!(error.contains(told), "{error}");
}
