//! Packages of trained models.

use std::process::Command;

use halocline::io::ndarray::Array3;
use halocline::io::{FieldWriter, Grid, WriterConfig};

use super::{COLUMNS, CONFIG, ROWS, Replaced, SCORE, fail, succeed, trained_with, values};

#[test]
fn a_package_needs_neither_the_folder_nor_the_files_of_training() {
    let config = CONFIG.replaced(
        "forcings = [\"sin_latitude\",",
        "constants = \"FOLDER/land.h5\"\nforcings = [\"land\",",
    );
    let folder = trained_with(&config, |folder| {
        let grid = Grid::cell_centered(ROWS, COLUMNS).unwrap();
        let path = folder.join("land.h5");
        let mut writer =
            FieldWriter::create(&path, &grid, &["land"], &WriterConfig::new()).unwrap();
        let land = Array3::from_shape_fn((1, ROWS, COLUMNS), |(_, row, _)| (row % 2) as f32);
        writer.append(0.0, land.view()).unwrap();
        writer.finish().unwrap();
    });
    let path = folder.path();
    let forecast = ["forecast", "--from", "2018-01-10", "--files", "new.h5"];
    std::fs::copy(path.join("2018.h5"), path.join("new.h5")).unwrap();
    succeed(
        path,
        &[&forecast[..], &["--output", "expected.zarr"]].concat(),
    );
    succeed(path, &["package", "--output", "model"]);
    let again = fail(path, &["package", "--output", "model"]);
    assert!(again.contains("it exists"), "{again}");

    let elsewhere = tempfile::tempdir().unwrap();
    for name in ["model", "new.h5"] {
        let (from, to) = (path.join(name), elsewhere.path().join(name));
        // Across file systems, too.
        assert!(
            Command::new("mv")
                .args([from, to])
                .status()
                .unwrap()
                .success()
        );
    }
    let expected = values(&path.join("expected.zarr"));
    drop(folder);
    let run = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_halocline"))
            .args(arguments)
            .args(["--package", "model"])
            .current_dir(&elsewhere)
            .env("BURN_DEVICE", "flex")
            .output()
            .unwrap()
    };
    for (ranks, output) in [("1", "one.zarr"), ("3", "three.zarr")] {
        let more = ["--output", output, "--ranks", ranks];
        let done = run(&[&forecast[..], &more].concat());
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{error}");
        let found = values(&elsewhere.path().join(output));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found / expected - 1.0).abs() < 1e-5,
                "{found} for {expected}"
            );
        }
    }
    let scored = run(&[SCORE, &["--files", "new.h5"]].concat());
    let is_there = |name: &str| elsewhere.path().join(name).exists();
    assert!(scored.status.success() && is_there("scores-new.h5.json"));
    assert!(
        !is_there("model/scores-new.h5.json"),
        "a package stays as it is"
    );
    assert_eq!(run(&["score"]).status.code(), Some(2));
}
