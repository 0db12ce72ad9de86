//! Training that starts from the network of another experiment, or with given statistics.

use std::fs;
use std::path::Path;

use halocline::io::{FieldFile, Statistics};
use serde_json::Value;

use super::{CONFIG, Replaced, fail, prepared, succeed, train, trained, write};

/// Returns the configuration of another experiment, on a part of the data, that starts from the
/// network in a folder.
fn tuned(pretrained: &str) -> String {
    CONFIG
        .replaced("FOLDER/run", "FOLDER/tuned")
        .replaced("train = { until", "train = { from = \"2018-01-03\", until")
        .replaced(
            "[training]",
            &format!("[training]\npretrained = \"{pretrained}\""),
        )
}

/// Returns the losses in the log of a folder.
fn losses(folder: &Path) -> Vec<f64> {
    let text = fs::read_to_string(folder.join("log.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64();
    text.lines().map(|line| loss(line).unwrap()).collect()
}

fn means(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("global_means.npy")).unwrap()
}

#[test]
fn a_package_is_tuned_with_its_statistics() {
    let folder = prepared(CONFIG);
    let path = folder.path();
    write(path, CONFIG, 3);
    succeed(path, &["train"]);
    succeed(path, &["package", "--output", "model"]);
    write(path, &tuned("model"), 1);
    succeed(path, &["train", "--ranks", "2"]);
    let [trained, tuning] = ["run", "tuned"].map(|name| path.join(name));
    let [before, after] = [&trained, &tuning].map(|folder| means(&folder.join("statistics")));
    assert_eq!(after, before);
    let (first, begun) = (losses(&trained)[0], losses(&tuning)[0]);
    assert!(begun < first, "{begun} after {first}");
    // After a checkpoint, the package is not needed.
    fs::remove_dir_all(path.join("model")).unwrap();
    write(path, &tuned("model"), 2);
    succeed(path, &["train"]);
    assert_eq!(losses(&tuning).len(), 2);
    write(path, &tuned("run"), 3);
    let error = fail(path, &["train"]);
    assert!(error.contains("from which this run started"), "{error}");
}

#[test]
fn networks_of_other_data_or_models_are_refused() {
    let folder = trained(CONFIG);
    let path = folder.path();
    for (before, after, told) in [
        ("width = 6", "width = 7", "of a model with another width"),
        (
            "\"t2m\", \"z@500\"",
            "\"z@500\", \"t2m\"",
            "; data.inputs = [\"t2m\", \"z@500\"] takes these channels in this order",
        ),
        (
            "cos_solar_zenith_angle",
            "cos_latitude",
            "trained with data.forcings",
        ),
        (
            "lead_hours = 6.0",
            "lead_hours = 6.0\nhistory = 2",
            "trained with data.history 1",
        ),
        (
            "pretrained = \"run\"",
            "pretrained = \"nowhere\"",
            "nowhere, which holds no trained network",
        ),
    ] {
        write(path, &tuned("run").replaced(before, after), 1);
        let error = fail(path, &["train"]);
        assert!(
            error.contains("training.pretrained") && error.contains(told),
            "{error}"
        );
    }
    assert!(!path.join("tuned").exists(), "nothing is made");
}

#[test]
fn statistics_may_be_given() {
    let config = CONFIG.replaced(
        "climatology = \"mean\"",
        "climatology = \"mean\"\nstatistics = \"given\"",
    );
    let folder = prepared(&config);
    let (path, given) = (folder.path(), folder.path().join("given"));
    let save = |lead: usize| {
        let files = [FieldFile::open(path.join("2018.h5")).unwrap()];
        let statistics = Statistics::compute(&files, lead).unwrap();
        statistics.save(&given).unwrap();
    };
    save(1);
    train(path, &config);
    assert_eq!(means(&path.join("run/statistics")), means(&given));
    // Other increments.
    save(2);
    write(path, &config, 2);
    let error = fail(path, &["train"]);
    assert!(
        error.contains("data.statistics: got other statistics in given"),
        "{error}"
    );
    fs::remove_dir_all(&given).unwrap();
    succeed(path, &["train"]);
}
