//! Files with rows and columns in another order than those of training.

use std::path::Path;

use halocline::io::ndarray::Array3;
use halocline::io::{FieldWriter, Fields, Grid, WriterConfig, open};

use super::files::{write_on, write_parts};
use super::{
    COLUMNS, CONFIG, Replaced, fail, scores, succeed, trained, trained_with, values, write,
};

/// Number of times of training.
const TRAINED: usize = 28;

/// Rewrites a file with rows from south to north and columns from the date line on.
fn turn(path: &Path) {
    let fields = open(path).unwrap();
    let (lat, lon) = (fields.grid().lat(), fields.grid().lon());
    let half = COLUMNS / 2;
    let lat: Vec<f64> = lat.iter().rev().copied().collect();
    let west = lon[half..].iter().map(|lon| lon - 360.0);
    let lon: Vec<f64> = west.chain(lon[..half].iter().copied()).collect();
    let grid = Grid::new(lat, lon).unwrap();
    let all = values(path);
    let (names, config) = (fields.channels(), WriterConfig::new());
    let mut writer = FieldWriter::create(path, &grid, names, &config).unwrap();
    for (time, field) in fields.times().iter().zip(all.outer_iter()) {
        let turned = Array3::from_shape_fn(field.dim(), |(channel, row, column)| {
            let (row, column) = (field.dim().1 - 1 - row, (column + half) % COLUMNS);
            field[[channel, row, column]]
        });
        writer.append(*time, turned.view()).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn other_files_in_another_order_are_forecast_in_that_of_training() {
    let folder = trained(CONFIG);
    let path = folder.path();
    std::fs::copy(path.join("2018.h5"), path.join("other.h5")).unwrap();
    turn(&path.join("other.h5"));
    let forecast = |files: &str, ranks: &str| {
        let output = format!("{files}.zarr");
        let from = ["forecast", "--from", "2018-01-10", "--files", files];
        let others = ["--output", &output, "--ranks", ranks];
        succeed(path, &[from.as_slice(), others.as_slice()].concat());
        let output = path.join(output);
        (open(&output).unwrap().grid().clone(), values(&output))
    };
    assert_eq!(forecast("other.h5", "4"), forecast("2018.h5", "4"));
    // A grid that differs in more than the order.
    let grid = Grid::with_poles(10, COLUMNS).unwrap();
    let names = ["t2m", "z@500"];
    write_on(&path.join("poles.h5"), &grid, &names, |_, _| 0.0);
    let found = fail(path, &["score", "--files", "poles.h5"]);
    for part in ["files: got", "latitude[0] is 90, not 81", "as in training"] {
        assert!(found.contains(part), "{part} in {found}");
    }
}

#[test]
fn periods_may_be_in_stores_of_another_order() {
    let files = "[\"FOLDER/first.h5\", \"FOLDER/rest.h5\"]";
    let config = CONFIG.replaced("[\"FOLDER/2018.h5\"]", files);
    let folder = trained_with(&config, |path| write_parts(path, TRAINED));
    let path = folder.path();
    succeed(path, &["score"]);
    let before = scores(path);
    turn(&path.join("rest.h5"));
    succeed(path, &["score"]);
    assert_eq!(scores(path), before);
}

#[test]
fn joined_files_of_two_orders_may_be_listed_in_any() {
    let listed = |names: [&str; 2]| {
        let [one, other] = names.map(|name| format!("\"FOLDER/{name}.h5\""));
        let files = format!("[{one}, {other}]\njoined = true");
        CONFIG.replaced("[\"FOLDER/2018.h5\"]", &files)
    };
    let folder = trained_with(&listed(["first", "rest"]), |path| {
        write_parts(path, TRAINED / 2);
        turn(&path.join("rest.h5"));
    });
    let path = folder.path();
    succeed(path, &["score"]);
    let before = scores(path);
    write(path, &listed(["rest", "first"]), 1);
    succeed(path, &["score"]);
    assert_eq!(scores(path), before);
}
