//! Options of data, training and mesh, one by one.

use std::fs;
use std::path::Path;

use halocline::experiment::ExperimentConfig;
use serde_json::Value;

use super::files::write_parts;
use super::training::losses_on;
use super::{CONFIG, Replaced, TEST, prepared, score, scores, succeed, trained, trained_with};

#[test]
fn configurations_of_the_examples_are_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/configs");
    let files = fs::read_dir(folder).unwrap();
    let load = |file: fs::DirEntry| ExperimentConfig::load(file.path()).unwrap();
    let configs: Vec<_> = files.map(|file| load(file.unwrap())).collect();
    assert!(configs.len() >= 4);
}

#[test]
fn parameters_may_be_stored_over_the_axis_of_samples() {
    let (_, expected) = losses_on("", "noise = 0.01");
    let stored = "[[plan.store]]\npath = \"**\"\nover = \"data\"";
    let mesh = format!("[mesh]\ndata = 2\nlat = 2\n{stored}");
    let (folder, losses) = losses_on(&mesh, "noise = 0.01");
    for (one, other) in losses.iter().zip(&expected) {
        assert!((one - other).abs() < 2e-4, "{losses:?} for {expected:?}");
    }
    let path = folder.path();
    succeed(path, &["score"]);
    assert!(score(&scores(path), "t2m", 6.0, "rmse").is_finite());
    succeed(path, &["package", "--output", "model"]);
    assert!(path.join("model").exists());
}

#[test]
fn samples_of_joined_files_cross_their_ends() {
    let files = "[\"FOLDER/first.h5\", \"FOLDER/rest.h5\"]";
    for (joined, forecasts) in [(false, 10.0), (true, 11.0)] {
        let joined = format!("lead_hours = 6.0\njoined = {joined}");
        let config = CONFIG
            .replaced("[\"FOLDER/2018.h5\"]", files)
            .replaced("lead_hours = 6.0", &joined);
        // The first file ends after four times of the test period.
        let folder = trained_with(&config, |path| write_parts(path, TEST + 4));
        succeed(folder.path(), &["score"]);
        let found = score(&scores(folder.path()), "t2m", 6.0, "forecasts");
        assert_eq!(found, forecasts, "{joined}");
    }
}

#[test]
fn batches_accumulate_in_steps_that_warm_up() {
    let config = CONFIG
        .replaced("batch = 2", "batch = 2\naccumulation = 2")
        .replaced("[optimizer]", "[optimizer]\nwarmup = 100");
    let folder = trained(&config);
    let log = fs::read_to_string(folder.path().join("run/log.jsonl")).unwrap();
    let epoch: Value = serde_json::from_str(log.trim()).unwrap();
    // Six steps of two batches, and one of the last batch.
    assert_eq!(epoch["step"], 7);
    let rate = epoch["learning_rate"].as_f64().unwrap();
    let expected = 5e-3 * (0.01 + 0.99 * 0.06);
    assert!((rate - expected).abs() < 1e-12, "{rate} for {expected}");
}

#[test]
fn an_epoch_that_would_exceed_the_time_limit_does_not_begin() {
    let config = CONFIG.replaced("noise = 0.01", "noise = 0.01\nminutes = 1e-6");
    let folder = prepared(&config);
    let output = super::halocline(folder.path(), &["train"]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(75), "{out}");
    assert!(out.contains("no time for another epoch"), "{out}");
    assert!(!out.contains("epoch 1"), "{out}");
}

/// With so small a learning rate, all epochs have the same score.
#[test]
fn training_ends_when_patience_does() {
    let config = CONFIG
        .replaced("noise = 0.01", "noise = 0.01\npatience = 1")
        .replaced("learning_rate = 5e-3", "learning_rate = 1e-30");
    let folder = prepared(&config);
    let out = succeed(folder.path(), &["train"]);
    assert!(out.contains("1 validations without a better one"), "{out}");
    assert!(
        out.contains("epoch 2:") && !out.contains("epoch 3:"),
        "{out}"
    );
    // A second run takes no steps.
    let out = succeed(folder.path(), &["train"]);
    assert!(!out.contains("epoch"), "{out}");
}
