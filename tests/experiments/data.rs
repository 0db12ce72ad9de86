//! Data with gaps, missing values, other calendars, and files that change.

use std::path::Path;
use std::process::Stdio;

use halocline::io::{
    Calendar, Channel, Fields, ForecastWriter, Grid, OutputConfig, OutputFormat, open, parse_time,
};
use halocline::prelude::*;

use super::files::{seconds, write_fields};
use super::{
    COLUMNS, CONFIG, ROWS, Replaced, TIMES, command, fail, forecast_from, interrupt_at, prepared,
    score, scores, succeed, train, trained, trained_with, values, write,
};

#[test]
fn steps_do_not_lead_across_gaps_that_are_skipped() {
    let config = CONFIG.replaced("lead_hours = 6.0", "gaps = \"skip\"");
    let gaps = [20, 42];
    let folder = trained_with(&config, |folder| {
        write_fields(&folder.join("2018.h5"), |time, _| {
            (!gaps.contains(&time)).then_some(time)
        });
    });
    succeed(folder.path(), &["score"]);
    let found = scores(folder.path());
    // All states from 36 to 47 but 42 whose next state is one step ahead.
    assert_eq!(score(&found, "t2m", 6.0, "forecasts"), 9.0);
    let forecast = forecast_from("2018-01-11T06", "a.zarr", &[]);
    succeed(folder.path(), &forecast);
    let forecast = open(folder.path().join("a.zarr")).unwrap();
    assert_eq!(forecast.times(), [42, 43, 44].map(seconds));
}

#[test]
fn forecasts_have_the_calendar_of_their_data() {
    let config = CONFIG
        .replaced("2018.h5", "model.nc")
        .replaced(
            "forcings = [\"sin_latitude\", \"cos_solar_zenith_angle\"]",
            "",
        )
        .replaced("steps = 3", "steps = 2");
    let folder = prepared(&config);
    let start = write_model(&folder.path().join("model.nc"), "K");
    train(folder.path(), &config);
    succeed(folder.path(), &forecast_from("2018-01-10", "a.zarr", &[]));
    let forecast = open(folder.path().join("a.zarr")).unwrap();
    assert_eq!(forecast.calendar(), Calendar::NoLeap);
    assert_eq!(forecast.times()[0], start + 9.25 * 86400.0);
    assert_eq!(forecast.describe(0).units.as_deref(), Some("K"));
    // Another file has temperatures in other units.
    write_model(&folder.path().join("other.nc"), "degC");
    let other = forecast_from("2018-01-10", "b.zarr", &["--files", "other.nc"]);
    let found = fail(folder.path(), &other);
    assert!(
        found.contains("files: got degC of t2m, expected K"),
        "{found}"
    );
}

#[test]
fn times_of_files_may_have_other_units() {
    let units = "lead_hours = 6.0\ntime_units = \"seconds since 1971-01-01\"";
    let config = CONFIG
        .replaced("2018.h5", "model.nc")
        .replaced("2018-01", "2019-01")
        .replaced("lead_hours = 6.0", units)
        .replaced("[\"sin_latitude\", \"cos_solar_zenith_angle\"]", "[]");
    let folder = prepared(&config);
    let start = write_model(&folder.path().join("model.nc"), "K");
    train(folder.path(), &config);
    succeed(folder.path(), &forecast_from("2019-01-10", "a.zarr", &[]));
    let forecast = open(folder.path().join("a.zarr")).unwrap();
    assert_eq!(forecast.times()[0], start + (365.0 + 9.25) * 86400.0);
    // Other files may have units that are right. By those, the files of training have other dates.
    write(
        folder.path(),
        &config.replaced(units, "lead_hours = 6.0"),
        1,
    );
    let other = forecast_from("2019-01-10T06", "b.zarr", &["--files", "a.zarr"]);
    succeed(folder.path(), &other);
    let forecast = open(folder.path().join("b.zarr")).unwrap();
    assert_eq!(forecast.times()[0], start + (365.0 + 9.5) * 86400.0);
    assert!(fail(folder.path(), &["train"]).contains("have changed"));
}

/// Writes a file of a model without leap years, with these units of temperature. Returns its start
/// in seconds.
fn write_model(path: &Path, units: &str) -> f64 {
    let start = parse_time("2018-01-01", Calendar::NoLeap).unwrap();
    let written = Launcher::local(1).run(|world| {
        let mesh = world.mesh([("lat", 1)])?;
        let grid = Grid::cell_centered(ROWS, COLUMNS)?;
        let channels = [("t2m", units), ("z@500", "m2 s-2")]
            .map(|(name, units)| Channel::new(name.into()).with_units(Some(units.into())));
        let output = OutputConfig::new().with_format(OutputFormat::NetCdf3);
        let mut writer = ForecastWriter::create(&mesh, path, &grid, &channels, start, &output)?
            .with_calendar(Calendar::NoLeap);
        for time in 0..TIMES {
            let key = RandomKey::new(1, ("field", time));
            let shape = [1, 2, ROWS, COLUMNS];
            let normal = Distribution::Normal(0.0, 1.0);
            let layout = Layout::new(mesh.shape(), &shape, &[Replicate])?;
            let field = ShardTensor::random(shape, normal, key, &mesh, &layout)?;
            writer.append(6.0 * time as f64, &field)?;
        }
        writer.finish()
    });
    written.unwrap();
    start
}

#[test]
fn periods_that_overlap_are_refused() {
    let error = |from: &str, to: &str| {
        let folder = prepared(&CONFIG.replaced(from, to));
        fail(folder.path(), &["train"])
    };
    let found = error(
        "validation = { from = \"2018-01-08\"",
        "validation = { from = \"2018-01-07\"",
    );
    for part in [
        "data.validation: got from 2018-01-07 until 2018-01-10",
        "data.train, which is until 2018-01-08",
    ] {
        assert!(found.contains(part), "{part} in {found}");
    }
    let found = error(
        "test = { from = \"2018-01-10\" }",
        "test = { from = \"2018-01-09\" }",
    );
    assert!(found.contains("data.test: got from 2018-01-09"), "{found}");
    let found = error("train = { until = \"2018-01-08\" }", "");
    assert!(found.contains("data.train: all times"), "{found}");
}

#[test]
fn land_stays_missing() {
    let config = CONFIG.replaced("lead_hours = 6.0", "lead_hours = 6.0\nmissing = \"fill\"");
    let folder = prepared(&config);
    let is_land = |[row, column]: [usize; 2]| row > 3 && column < 4;
    write_fields(&folder.path().join("2018.h5"), |time, cell| {
        (!is_land(cell)).then_some(time)
    });
    succeed(folder.path(), &["train"]);
    succeed(folder.path(), &["score"]);
    assert!(score(&scores(folder.path()), "t2m", 18.0, "rmse").is_finite());
    succeed(folder.path(), &forecast_from("2018-01-10", "a.zarr", &[]));
    let values = values(&folder.path().join("a.zarr"));
    for ((step, channel, row, column), value) in values.indexed_iter() {
        assert_eq!(
            value.is_nan(),
            is_land([row, column]),
            "{:?}",
            (step, channel, row, column)
        );
    }
}

#[test]
fn members_that_would_be_the_same_are_refused() {
    let folder = trained(CONFIG);
    for arguments in [
        &["score", "--members", "3"][..],
        &["forecast", "--members", "3", "--output", "a"],
    ] {
        let found = fail(folder.path(), arguments);
        assert!(found.contains("all members are the same"), "{found}");
    }
    assert!(!folder.path().join("a").exists());
    let found = fail(folder.path(), &["score", "--noise", "-0.5"]);
    assert!(found.contains("forecast.noise: -0.5; expected"), "{found}");
    let noise = ["score", "--members", "3", "--noise", "0.1"];
    let table = succeed(folder.path(), &noise);
    assert!(table.contains("CRPS"), "{table}");
    let run = folder.path().join("run");
    assert!(run.join("scores-members3-noise0.1.json").exists());
    assert!(
        !run.join("scores.json").exists(),
        "those of the configuration"
    );
    // One member has no noise.
    let alone = forecast_from("2018-01-10", "a.nc", &["--noise", "0.1"]);
    let output = super::halocline(folder.path(), &alone);
    let found = String::from_utf8_lossy(&output.stderr);
    assert!(found.contains("halocline: --noise 0.1, which"), "{found}");
}

/// The first training reports missing values; a configuration that handles them is not another
/// experiment.
#[test]
fn a_first_training_that_failed_may_be_mended() {
    let folder = prepared(CONFIG);
    write(folder.path(), CONFIG, 1);
    write_fields(&folder.path().join("2018.h5"), |time, [row, _]| {
        (row > 0).then_some(time)
    });
    let found = fail(folder.path(), &["train"]);
    assert!(found.contains("data.missing = \"fill\""), "{found}");
    let filled = CONFIG.replaced("lead_hours = 6.0", "lead_hours = 6.0\nmissing = \"fill\"");
    train(folder.path(), &filled);
    // Without the statistics, the results that were made with them remain.
    std::fs::remove_dir_all(folder.path().join("run/statistics")).unwrap();
    write(folder.path(), CONFIG, 1);
    assert!(fail(folder.path(), &["train"]).contains("has another [data]"));
}

#[test]
fn statistics_of_files_that_have_changed_are_refused() {
    let folder = trained(CONFIG);
    let summary = std::fs::read_to_string(folder.path().join("run/files.json")).unwrap();
    assert!(summary.contains("2018-01-07 18:00:00"), "{summary}");
    write_fields(&folder.path().join("2018.h5"), |time, _| Some(2 * time));
    for command in ["train", "score"] {
        let found = fail(folder.path(), &[command]);
        for part in ["files.json", "have changed", "remove"] {
            assert!(found.contains(part), "{part} in {found}");
        }
    }
}

#[test]
fn an_epoch_that_was_interrupted_goes_on_with_its_batches() {
    let config = CONFIG
        .replaced("batch = 2", "batch = BATCH\nsave_every = 1")
        .replaced("width = 6", "width = 32");
    let of_batch = |batch: &str| config.replaced("BATCH", batch);
    let folder = prepared(&of_batch("1"));
    let mut program = command(folder.path(), &["train"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    interrupt_at(&program, &folder.path().join("run/checkpoints"));
    assert_eq!(program.wait().unwrap().code(), Some(75));
    for batch in ["2", "26"] {
        write(folder.path(), &of_batch(batch), 4);
        let found = fail(folder.path(), &["train"]);
        for part in [
            "training.batch: got",
            "expected 1 of 26, as",
            "was interrupted",
        ] {
            assert!(found.contains(part), "{part} in {found}");
        }
    }
    write(folder.path(), &of_batch("1"), 4);
    for (key, value) in [("data.every_hours", "12"), ("data.at_hours", "[0]")] {
        let setting = format!("{key}={value}");
        let found = fail(folder.path(), &["train", "--set", &setting]);
        assert!(found.contains(&format!("{key}: got [")), "{found}");
    }
    train(folder.path(), &of_batch("1"));
}

/// Inputs take their climatology from the targets.
#[test]
fn anomalies_of_inputs_that_are_no_targets_are_refused_at_once() {
    let config = CONFIG
        .replaced(
            "lead_hours = 6.0",
            "lead_hours = 6.0\ntargets = [\"t2m\"]\nanomalies = true",
        )
        .replaced(
            "kind = \"cnn\"\nwidth = 6\nblocks = 1",
            "kind = \"unet\"\nwidth = 4\nlevels = 1",
        )
        .replaced("[[4, 2]]", "[]")
        .replaced("steps = 3", "steps = 1");
    let folder = prepared(&config);
    let found = fail(folder.path(), &["train"]);
    assert!(
        found.contains("z@500") && found.contains("a target too"),
        "{found}"
    );
    assert!(!folder.path().join("run").exists(), "nothing is computed");
}

#[test]
fn a_test_period_without_states_is_told_before_training() {
    let config = CONFIG.replaced(
        "test = { from = \"2018-01-10\" }",
        "test = { from = \"2019-01-01\" }",
    );
    let folder = prepared(&config);
    write(folder.path(), &config, 1);
    let output = super::halocline(folder.path(), &["train"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && told.contains("data.test"),
        "{told}"
    );
}
