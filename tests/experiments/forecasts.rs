//! Forecasts and scores of files that the model was not trained on, and of many states.

use std::path::Path;
use std::time::SystemTime;

use halocline::io::ndarray::s;
use halocline::io::{Fields, Grid, open};

use super::files::{write_fields, write_on, write_parts};
use super::{
    COLUMNS, CONFIG, ROWS, Replaced, TIMES, fail, forecast_from, prepared, score, scores,
    scores_in, succeed, train, trained, trained_with, values, write,
};

/// First date of the test period.
const START: &str = "2018-01-10";

#[test]
fn other_files_are_forecast_and_scored() {
    let folder = trained(CONFIG);
    let path = folder.path();
    succeed(path, &["score"]);
    let before = scores(path);
    // The same fields in another file, with the file of training gone.
    std::fs::rename(path.join("2018.h5"), path.join("other.h5")).unwrap();
    let found = fail(path, &forecast_from(START, "a.zarr", &[]));
    assert!(found.contains("2018.h5"), "{found}");
    let other = ["--files", "other.h5"];
    succeed(path, &forecast_from(START, "a.zarr", &other));
    let first = values(&path.join("a.zarr"));
    // A file with one state, which is enough for a forecast.
    let one = [&other[..], &["--steps", "1"]].concat();
    succeed(path, &forecast_from(START, "one.zarr", &one));
    let next = forecast_from("2018-01-10T06", "next.zarr", &["--files", "one.zarr"]);
    succeed(path, &next);
    let next = values(&path.join("next.zarr"));
    let (expected, found) = (
        first.slice(s![1.., .., .., ..]),
        next.slice(s![..2, .., .., ..]),
    );
    for (expected, found) in expected.iter().zip(found) {
        assert!(
            (found / expected - 1.0).abs() < 1e-5,
            "{found} for {expected}"
        );
    }
    // All states of other files count.
    write_fields(&path.join("far.h5"), |time, _| (time < 10).then_some(time));
    succeed(path, &["score", "--files", "far.h5"]);
    let of_far = scores_in(path, "scores-far.h5.json");
    assert_eq!(score(&of_far, "t2m", 6.0, "forecasts"), 9.0);
    // They may be joined, although training was on a single file.
    write_parts(path, 10);
    let joined = ["first.h5", "rest.h5", "--set", "data.joined=true"];
    succeed(path, &[&["score", "--files"], &joined[..]].concat());
    let of_joined = scores_in(path, "scores-first.h5+1.json");
    assert_eq!(
        score(&of_joined, "t2m", 6.0, "forecasts"),
        (TIMES - 1) as f64
    );
    assert_eq!(scores(path), before);
    let test = |row: &serde_json::Value| row["rmse_climatology"].as_f64().unwrap();
    assert!(before.iter().all(|row| test(row) > 0.0));
    std::fs::rename(path.join("other.h5"), path.join("2018.h5")).unwrap();
    // Files that have moved count as the same.
    std::fs::rename(path.join("2018.h5"), path.join("moved.h5")).unwrap();
    write(path, &CONFIG.replaced("2018.h5", "moved.h5"), 1);
    succeed(path, &["score"]);
    assert_eq!(scores(path), before);
}

/// Waves that go around the globe in a day have the same field at each hour, which is their
/// climatology.
#[test]
fn hours_of_the_day_have_a_climatology_of_their_own() {
    let of_day = CONFIG.replaced(
        "climatology = \"mean\"",
        "climatology = \"day\"\nclimatology_hours = 6",
    );
    let errors = [CONFIG, &of_day].map(|config| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        write_fields(&path.join("2018.h5"), |time, _| Some(4 * time));
        train(path, config);
        let error = || {
            succeed(path, &["score"]);
            score(&scores(path), "t2m", 6.0, "rmse_climatology")
        };
        let first = error();
        // The model does not see the climatology, so it may change.
        write(path, &of_day, 1);
        assert!(error() < 1e-3);
        first
    });
    assert!(errors[0] > 1.0 && errors[1] < 1e-3, "{errors:?}");
}

#[test]
fn outputs_without_a_name_are_in_the_folder_of_the_experiment() {
    let folder = trained(CONFIG);
    let path = folder.path();
    let from = ["forecast", "--from", "2018-01-10 06:00", "--steps", "1"];
    let out = succeed(path, &from);
    let store = path.join("run/forecast-2018-01-10T0600-steps1.zarr");
    let told = format!("written to {}", store.display());
    assert!(out.contains(&told) && store.exists(), "{out}");
    // The same date in another spelling.
    for date in [from[2], " 2018-01-10T06Z"] {
        let again = fail(path, &["forecast", "--from", date, "--steps", "1"]);
        assert!(again.contains("it is there already"), "{again}");
    }
    succeed(path, &["forecast"]);
    assert!(path.join("run/forecasts/2018-01-10T0600.zarr").exists());
    succeed(path, &["package"]);
    let again = fail(path, &["package"]);
    assert!(again.contains("run/package: it exists"), "{again}");
}

#[test]
fn the_climatology_is_made_of_the_files_of_training() {
    let validation = "validation = { from = \"2018-01-08\", until = \"2018-01-10\" }\n";
    let config = CONFIG.replaced(validation, "");
    let folder = trained(&config);
    let path = folder.path();
    assert!(!path.join("run/climatology").exists());
    std::fs::rename(path.join("2018.h5"), path.join("other.h5")).unwrap();
    write_fields(&path.join("2018.h5"), |time, _| Some(2 * time));
    let found = fail(path, &["score", "--files", "other.h5"]);
    assert!(found.contains("have changed"), "{found}");
    std::fs::copy(path.join("other.h5"), path.join("2018.h5")).unwrap();
    succeed(path, &["score", "--files", "other.h5"]);
}

#[test]
fn other_files_have_the_grid_and_the_channels_of_training() {
    let folder = prepared(CONFIG);
    let path = folder.path();
    let nothing = fail(path, &["score", "--files", "2018.h5"]);
    assert!(nothing.contains("no experiment; train first"), "{nothing}");
    train(path, CONFIG);
    let arguments = forecast_from(START, "a.zarr", &["--files", "other.h5"]);
    for ([rows, columns], names, part) in [
        ([8, 18], ["t2m", "z@500"], "files: got lat 8 values"),
        ([10, 18], ["t2m", "z@850"], "z@500"),
    ] {
        let grid = Grid::cell_centered(rows, columns).unwrap();
        write_on(&path.join("other.h5"), &grid, &names, |_, _| 1.0);
        let found = fail(path, &arguments);
        assert!(found.contains(part), "{part} in {found}");
    }
    write(path, &CONFIG.replaced("width = 6", "width = 7"), 1);
    assert!(fail(path, &arguments).contains("has another [model]"));
}

/// Files may have the levels of a variable in another order than those of training.
#[test]
fn other_files_may_have_another_order_of_levels() {
    let config = CONFIG.replaced("\"z@500\"", "\"z\"").replaced(
        "forcings = [\"sin_latitude\", \"cos_solar_zenith_angle\"]",
        "",
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_levels(&path.join("2018.h5"), ["t2m", "z@850", "z@500"]);
    write_levels(&path.join("other.h5"), ["z@500", "t2m", "z@850"]);
    train(path, &config);
    let forecast = |name: &str, files: &[&str]| {
        succeed(path, &forecast_from(START, name, files));
        (
            open(path.join(name)).unwrap().channels().to_vec(),
            values(&path.join(name)),
        )
    };
    let expected = forecast("a.zarr", &[]);
    assert_eq!(forecast("b.zarr", &["--files", "other.h5"]), expected);
}

/// Writes a field for each name, with values that depend on the name and the time.
fn write_levels(path: &Path, names: [&str; 3]) {
    let grid = Grid::cell_centered(ROWS, COLUMNS).unwrap();
    write_on(path, &grid, &names, |time, (channel, row, column)| {
        let offset = names[channel].bytes().map(usize::from).sum::<usize>() % 97;
        (((row * 18 + column) * 7 + time * 5 + offset * 31) % 113) as f32
    });
}

#[test]
fn land_is_filled_in_each_step_as_in_the_first() {
    let missing = "lead_hours = 6.0\nmissing = \"fill\"";
    let config = CONFIG.replaced("lead_hours = 6.0", missing);
    let folder = trained_with(&config, |folder| {
        write_fields(&folder.join("2018.h5"), |time, [row, column]| {
            (row <= 3 || column >= 4).then_some(time)
        });
    });
    let path = folder.path();
    succeed(path, &forecast_from(START, "a.zarr", &[]));
    // A forecast from the first step of another one, in which land is missing.
    succeed(path, &forecast_from(START, "one.zarr", &["--steps", "1"]));
    let next = forecast_from("2018-01-10T06", "next.zarr", &["--files", "one.zarr"]);
    succeed(path, &next);
    let [whole, next] = ["a.zarr", "next.zarr"].map(|name| values(&path.join(name)));
    let pairs = whole.slice(s![1.., .., .., ..]).into_iter().zip(&next);
    for (expected, found) in pairs {
        let is_same = (found / expected - 1.0).abs() < 1e-5;
        assert!(
            is_same || found.is_nan() && expected.is_nan(),
            "{found} for {expected}"
        );
    }
}

#[test]
fn a_run_of_many_states_goes_on() {
    let folder = trained(CONFIG);
    let path = folder.path();
    let arguments = ["forecast", "--output", "forecasts"];
    assert_eq!(succeed(path, &arguments).lines().count(), 12);
    let output = |hours: &str| path.join(format!("forecasts/2018-01-10T{hours}00.zarr"));
    let written = |hours: &str| -> SystemTime {
        let metadata = output(hours).join("zarr.json").metadata().unwrap();
        metadata.modified().unwrap()
    };
    let first = written("00");
    // As if killed during the second one, which does not have its name yet.
    std::fs::rename(
        output("06"),
        path.join("forecasts/.halocline-2018-01-10T0600.zarr.partial"),
    )
    .unwrap();
    let out = succeed(path, &arguments);
    assert_eq!(out.lines().count(), 1, "{out}");
    assert!(out.contains("2018-01-10T0600.zarr"), "{out}");
    assert_eq!(open(output("06")).unwrap().times().len(), 3);
    assert_eq!(written("00"), first);
    // Forecasts of another configuration are not mistaken for those of this one.
    let two = [&arguments[..], &["--steps", "2"]].concat();
    assert!(fail(path, &two).contains("another configuration"));
    let out = succeed(path, &[&two[..], &["--replace"]].concat());
    assert_eq!(out.lines().count(), 12, "{out}");
    assert_eq!(open(output("00")).unwrap().times().len(), 2);
    // Without a note, some may be of either configuration.
    std::fs::write(path.join("forecasts/forecasts.json"), "").unwrap();
    assert!(fail(path, &two).contains("not all replaced; choose another folder, or --replace"));
    // Nor are those of another checkpoint.
    let last = [&two[..], &["--checkpoint", "last"]].concat();
    succeed(path, &[&last[..], &["--replace"]].concat());
    let out = succeed(path, &last);
    assert!(out.starts_with("nothing is written"), "{out}");
    write(path, CONFIG, 2);
    succeed(path, &["train"]);
    assert!(fail(path, &last).contains("another configuration or checkpoint"));
    // Old forecasts may not remain among replaced ones.
    let short = CONFIG.replaced(
        "test = { from = \"2018-01-10\"",
        "test = { from = \"2018-01-11\"",
    );
    write(path, &short, 2);
    let found = fail(path, &[&last[..], &["--replace"]].concat());
    assert!(
        found.contains("2018-01-10T0000.zarr") && found.contains("remove them"),
        "{found}"
    );
    assert!(fail(path, &last).contains("another configuration or checkpoint"));
    write(path, CONFIG, 2);
    // What is read is not written over, and a store takes no others.
    let read = forecast_from(START, "2018.h5", &["--replace"]);
    assert!(fail(path, &read).contains("one of the files that are read"));
    let within = ["forecast", "--output", "forecasts/2018-01-10T0600.zarr"];
    assert!(fail(path, &within).contains("expected a folder"));
    // From a date.
    let one = forecast_from(START, "a.nc", &[]);
    succeed(path, &one);
    assert!(fail(path, &one).contains("it is there already; choose another name, or --replace"));
    succeed(path, &[&one[..], &["--replace"]].concat());
}
