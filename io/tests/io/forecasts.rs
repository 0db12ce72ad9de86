//! Forecast files as provided by data centres, and files with a single time.

use std::path::{Path, PathBuf};

use halocline_io::open;

use crate::coordinates::{array, attribute};
use crate::formats::copy;

/// 2018-01-01, by `date -u -d 2018-01-01 +%s`.
const START: f64 = 1_514_764_800.0;
const HOUR: f64 = 3600.0;
const DIMS: [&str; 2] = ["forecast_reference_time", "forecast_period"];
const UNITS: &str = "\"units\": \"hours since 2018-01-01\"";

/// Creates a store that contains only a grid of 5 rows and 8 columns.
pub(crate) fn bare() -> (tempfile::TempDir, PathBuf) {
    let (folder, path) = copy("v2.zarr");
    for name in ["t2m", "z", "orography", "station", "level", "time"] {
        std::fs::remove_dir_all(path.join(name)).unwrap();
    }
    (folder, path)
}

/// Adds a variable of integers along dims.
fn numbers(path: &Path, name: &str, dims: &[&str], shape: &[usize], values: &[i64]) {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    array(&path.join(name), "<i8", shape, dims, &bytes);
}

/// Adds a field of zeros on the grid, with further leading dims.
fn field(path: &Path, dims: &[&str], shape: &[usize]) {
    let dims = [dims, &["longitude", "latitude"]].concat();
    let shape = [shape, &[8, 5]].concat();
    let bytes = vec![0_u8; 4 * shape.iter().product::<usize>()];
    array(&path.join("t2m"), "<f4", &shape, &dims, &bytes);
}

/// Creates a store as provided by Copernicus: initial times 12 h apart, and steps of 3 h.
fn forecasts(starts: usize, steps: usize) -> (tempfile::TempDir, PathBuf) {
    let (folder, path) = bare();
    let starting: Vec<i64> = (0..starts as i64).map(|start| 12 * start).collect();
    let leads: Vec<i64> = (0..steps as i64).map(|step| 3 * step).collect();
    let pairs = starting
        .iter()
        .flat_map(|start| leads.iter().map(move |lead| start + lead));
    let valid: Vec<i64> = pairs.collect();
    numbers(&path, DIMS[0], &DIMS[..1], &[starts], &starting);
    numbers(&path, DIMS[1], &DIMS[1..], &[steps], &leads);
    numbers(&path, "valid_time", &DIMS, &[starts, steps], &valid);
    for (name, standard, units) in [
        (DIMS[0], DIMS[0], UNITS),
        (DIMS[1], DIMS[1], "\"units\": \"hours\""),
        ("valid_time", "time", UNITS),
    ] {
        let text = format!("\"standard_name\": \"{standard}\", {units}");
        attribute(&path.join(name), &text);
    }
    field(&path, &DIMS, &[starts, steps]);
    (folder, path)
}

fn refusal(path: &Path) -> String {
    open(path).unwrap_err().to_string()
}

#[test]
fn forecasts_with_one_beginning_or_one_step_have_the_times_of_their_fields() {
    for (starts, steps, hours) in [
        (1, 1, &[0.0][..]),
        (1, 3, &[0.0, 3.0, 6.0]),
        (3, 1, &[0.0, 12.0, 24.0]),
    ] {
        let (_folder, path) = forecasts(starts, steps);
        let fields = open(&path).unwrap();
        let times: Vec<f64> = hours.iter().map(|hour| START + hour * HOUR).collect();
        assert_eq!(fields.times(), times);
        assert_eq!(fields.channels(), ["t2m"]);
        let values = fields.read(fields.shape().map(|size| 0..size)).unwrap();
        assert_eq!(values.dim(), (times.len(), 1, 5, 8));
        // Without them, no coordinate holds the valid times.
        std::fs::remove_dir_all(path.join("valid_time")).unwrap();
        let error = refusal(&path);
        let told = "is the beginning or the step of forecasts";
        assert!(error.contains(told), "{starts} {steps}: {error}");
    }
    let (_folder, path) = forecasts(2, 3);
    let error = refusal(&path);
    let told = "swap_dims(forecast_reference_time=\"valid_time\")";
    assert!(error.contains(told), "{error}");
}

/// The layout of WeatherBench and NCAR, in which the initial time is called `time`.
#[test]
fn steps_beside_a_time_are_no_levels() {
    for (step, units) in [("prediction_timedelta", "hours"), ("forecast_hour0", "h")] {
        let (_folder, path) = bare();
        numbers(&path, "time", &["time"], &[2], &[0, 12]);
        numbers(&path, step, &[step], &[3], &[6, 12, 18]);
        attribute(&path.join("time"), UNITS);
        attribute(&path.join(step), &format!("\"units\": \"{units}\""));
        field(&path, &["time", step], &[2, 3]);
        let error = refusal(&path);
        let told = format!("{step} is the beginning or the step of forecasts");
        assert!(error.contains(&told), "{error}");
    }
}

#[test]
fn the_beginning_of_a_forecast_alone_is_no_time() {
    let (_folder, path) = bare();
    field(&path, &[], &[]);
    numbers(&path, DIMS[0], &[], &[], &[6]);
    let text = format!("\"standard_name\": \"{}\", {UNITS}", DIMS[0]);
    attribute(&path.join(DIMS[0]), &text);
    let error = refusal(&path);
    let told = "found the beginning of a forecast, and no time";
    assert!(error.contains(told), "{error}");
}

#[test]
fn a_time_that_no_field_has_and_that_cannot_be_read_is_no_time() {
    let (_folder, path) = bare();
    field(&path, &[], &[]);
    numbers(&path, "time", &["time"], &[1], &[6]);
    let text = "\"units\": \"months since 2018-01-01\"";
    attribute(&path.join("time"), text);
    let fields = open(&path).unwrap();
    assert!(fields.is_undated() && fields.times() == [0.0]);
    // A scalar is the time of the fields.
    std::fs::remove_dir_all(path.join("time")).unwrap();
    numbers(&path, "time", &[], &[], &[6]);
    attribute(&path.join("time"), text);
    assert!(refusal(&path).contains("months since"));
}

#[test]
fn of_several_single_times_the_one_with_the_name_of_a_time_counts() {
    let (_folder, path) = bare();
    field(&path, &[], &[]);
    // A date as digits is not a time.
    numbers(&path, "date", &["date"], &[1], &[20_180_101]);
    assert_eq!(open(&path).unwrap().times(), [0.0]);
    numbers(&path, "reftime", &["reftime"], &[1], &[0]);
    numbers(&path, "valid_time", &["valid_time"], &[1], &[6]);
    for name in ["reftime", "valid_time"] {
        attribute(&path.join(name), UNITS);
    }
    assert_eq!(open(&path).unwrap().times(), [START + 6.0 * HOUR]);
    numbers(&path, "verification", &["verification"], &[1], &[9]);
    let text = format!("\"standard_name\": \"time\", {UNITS}");
    attribute(&path.join("verification"), &text);
    assert_eq!(open(&path).unwrap().times(), [START + 9.0 * HOUR]);
}
