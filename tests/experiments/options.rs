//! Options of data, training and mesh, one by one.

use std::fs;
use std::path::Path;

use halocline::experiment::ExperimentConfig;
use serde_json::Value;

use super::files::write_parts;
use super::training::losses_on;
use super::{
    CONFIG, Replaced, SCORE, TEST, fail, prepared, score, scores, succeed, trained, trained_with,
};

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
    let stored = "[[plan.store]]\npath = \"**\"\naxis = \"data\"";
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
    // The pattern stands for first.h5 and rest.h5.
    let files = "[\"FOLDER/*st.h5\"]";
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
        let copy = fs::read_to_string(folder.path().join("run/experiment.toml")).unwrap();
        assert!(copy.contains("/rest.h5") && !copy.contains('*'), "{copy}");
    }
}

#[test]
fn training_and_forecasts_start_at_chosen_hours() {
    let south = "every_hours = 12\nregions.south = { lat = [-90, -45], lon = [0, 90] }";
    let config = CONFIG
        .replaced("lead_hours = 6.0", "lead_hours = 6.0\nevery_hours = 12")
        .replaced("steps = 3", &format!("steps = 3\n{south}"));
    let folder = trained(&config);
    let path = folder.path();
    let log = fs::read_to_string(path.join("run/log.jsonl")).unwrap();
    let epoch: Value = serde_json::from_str(log.trim()).unwrap();
    // Of 26 samples, 13 start at 00 and 12 UTC: six batches of two.
    assert_eq!(epoch["step"], 6);
    // The test period has 12 states.
    succeed(path, SCORE);
    let rows = scores(path);
    assert_eq!(score(&rows, "t2m", 6.0, "forecasts"), 6.0);
    assert!(rows.iter().any(|row| row["region"] == "south"));
    let out = succeed(path, &["forecast", "--output", "forecasts"]);
    assert_eq!(out.lines().count(), 6, "{out}");
    let daily = ["--set", "forecast.every_hours=24"];
    succeed(path, &[SCORE, &daily].concat());
    assert_eq!(score(&scores(path), "t2m", 6.0, "forecasts"), 3.0);
    // Validations keep their starts, but not their regions.
    let more = ["train", "--set", "training.epochs=2"];
    let error = fail(path, &[&more[..], &daily].concat());
    assert!(error.contains("data.validation and forecast"), "{error}");
    succeed(
        path,
        &[&more[..], &["--set", "forecast.regions={}"]].concat(),
    );
    let error = fail(path, &["train", "--set", "training.epochs=0.5"]);
    assert!(error.contains(": --set training.epochs=0.5: "), "{error}");
    assert!(!error.contains("at line"), "{error}");
    let error = fail(path, &["score", "--set", "forecast.every_hours=31"]);
    assert!(error.contains("forecast.every_hours: got 31"), "{error}");
    // The last state of the test period.
    let error = fail(path, &["score", "--set", "forecast.every_hours=421050"]);
    let told = "a step after one that forecast.every_hours (421050) chooses";
    assert!(error.contains(told), "{error}");
    let error = fail(path, &["score", "--set", "data.every_hours=49"]);
    assert!(error.contains("data.every_hours: got 49"), "{error}");
    let error = fail(path, &["score", "--set", "data.at_hours=[3]"]);
    assert!(error.contains("data.at_hours: got [3] with"), "{error}");
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
#[cfg(target_os = "linux")]
fn a_model_larger_than_the_memory_is_refused() {
    let config = CONFIG.replaced("width = 6", "width = 1000000");
    let folder = prepared(&config);
    for command in ["plan", "train"] {
        let found = super::fail(folder.path(), &[command]);
        let told = "error: model.width: got 1000000, with which a rank needs ";
        assert!(found.contains(told), "{found}");
    }
    assert!(!folder.path().join("run").exists(), "nothing is written");
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

#[test]
fn gradients_of_the_last_step_reach_stored_parameters() {
    let training = "noise = 0.01\ngradient = \"last\"";
    let (_, all) = losses_on("", "noise = 0.01");
    let (_, expected) = losses_on("", training);
    // The third epoch has two steps.
    assert_eq!(all[..2], expected[..2]);
    assert!((expected[2] / all[2] - 1.0).abs() > 1e-2, "{expected:?}");
    let stored = "[[plan.store]]\npath = \"**\"\naxis = \"data\"";
    let mesh = format!("[mesh]\ndata = 2\nlat = 2\n{stored}");
    let (_, losses) = losses_on(&mesh, training);
    for (one, other) in losses.iter().zip(&expected) {
        assert!((one - other).abs() < 2e-4, "{losses:?} for {expected:?}");
    }
}
