//! Data that would be misread, and is therefore refused.

use halocline_io::{
    DatasetConfig, FieldDataset, FieldWriter, Gaps, Missing, OpenConfig, Progress, Series,
    StatisticsBuilder, WriterConfig, open,
};

use crate::formats::{copy, replace, store};
use crate::{grid, numbered_file, zeros};

fn lenient(channel: &str) -> OpenConfig {
    OpenConfig::of_channels(&[channel])
        .with_missing(Missing::Allow)
        .with_gaps(Gaps::Allow)
}

#[test]
fn files_with_other_units_of_a_channel_are_refused() {
    let (_folder, other) = copy("v2.zarr");
    let units = |from: &str, to: &str| replace(&other.join("t2m/.zattrs"), from, to);
    let message = || {
        [Series::Separate, Series::Joined].map(|series| {
            let config = DatasetConfig::new()
                .with_series(series)
                .with_open(lenient("t2m"));
            let opened = FieldDataset::open(&[store("v2.zarr"), other.clone()], &config);
            opened.map_or_else(|error| error.to_string(), |_| String::new())
        })
    };
    // Another year, so that the time axes can be joined.
    replace(&other.join("time/.zattrs"), "2018", "2019");
    assert_eq!(message(), ["", ""]);
    units("\"K\"", "\"degC\"");
    for found in message() {
        let told = "units: found degC of t2m, expected K";
        assert!(found.contains(told), "{found}");
    }
    // Units that are missing in one file are not those of the other.
    units("\"units\"", "\"unit\"");
    for found in message() {
        let told = "units: found none of t2m, expected K";
        assert!(found.contains(told), "{found}");
    }
}

#[test]
fn files_that_count_in_other_calendars_are_refused() {
    let (_folder, other) = copy("v2.zarr");
    replace(
        &other.join("time/.zattrs"),
        "\"units\"",
        "\"calendar\": \"360_day\", \"units\"",
    );
    let config = DatasetConfig::new().with_open(lenient("t2m"));
    let opened = FieldDataset::open(&[store("v2.zarr"), other], &config);
    let found = opened.unwrap_err().to_string();
    assert!(found.contains("calendar: found 360_day"), "{found}");
}

#[test]
fn statistics_of_files_with_other_units_are_refused() {
    let (_folder, other) = copy("v2.zarr");
    replace(&other.join("t2m/.zattrs"), "\"K\"", "\"degC\"");
    let mut statistics = StatisticsBuilder::new(1).unwrap();
    let mut add = |path| {
        let fields = lenient("t2m").open(path).unwrap();
        statistics.add(&fields, &Progress::hidden())
    };
    add(store("v2.zarr")).unwrap();
    let found = add(other).unwrap_err().to_string();
    assert!(
        found.contains("units: found degC of t2m, expected K"),
        "{found}"
    );
}

#[test]
fn times_that_are_no_numbers_are_not_taken_for_levels() {
    let (_folder, path) = copy("v2.zarr");
    replace(&path.join("time/.zarray"), "<i8", "<M8[ns]");
    let found = open(&path).unwrap_err().to_string();
    for part in ["\"time\"", "M8[ns]", "hours since"] {
        assert!(found.contains(part), "{part} in {found}");
    }
    let (_other, dates) = copy("v3.zarr");
    let date =
        r#"{ "name": "numpy.datetime64", "configuration": { "unit": "ns", "scale_factor": 1 } }"#;
    replace(&dates.join("time/zarr.json"), "\"int64\"", date);
    let found = open(&dates).unwrap_err().to_string();
    for part in ["\"time\"", "datetime64", "hours since"] {
        assert!(found.contains(part), "{part} in {found}");
    }
    // Fields without the time are read.
    let fields = lenient("orography").open(&path).unwrap();
    assert_eq!(fields.channels(), ["orography"]);
}

#[test]
fn constants_with_missing_values_are_chosen_by_name() {
    let (_folder, mask) = copy("v2.zarr");
    let dataset = |forcing: &str, missing: &[&str]| {
        let config = DatasetConfig::new()
            .with_inputs(Some(vec!["t2m".into()]))
            .with_forcings(vec![forcing.into()])
            .with_constants(Some(mask.clone()))
            .with_constants_missing(missing.iter().map(|name| (*name).into()).collect())
            .with_gaps(Gaps::Allow)
            .with_missing(Missing::Allow);
        FieldDataset::open(&[store("v2.zarr")], &config)
    };
    assert!(dataset("orography", &[]).is_ok());
    // The fill value of absent chunks is a value of the field.
    replace(&mask.join("orography/.zarray"), "\"NaN\"", "300.0");
    let found = dataset("orography", &[]).unwrap_err().to_string();
    for part in ["orography", "missing value", "constants_missing"] {
        assert!(found.contains(part), "{part} in {found}");
    }
    assert!(dataset("orography", &["orography"]).is_ok());
    // Problems in unused constants do not matter, but an unknown name does.
    assert!(dataset("sin_latitude", &[]).is_ok());
    let found = dataset("orography", &["oro"]).unwrap_err().to_string();
    assert!(found.starts_with("constants_missing: got oro"), "{found}");
}

#[test]
fn constants_with_infinite_values_are_refused() {
    let (folder, path) = numbered_file([3, 1, 5, 8]);
    let constants = folder.path().join("constants.h5");
    let mut field = zeros([1, 5, 8]);
    field[[0, 2, 3]] = f32::INFINITY;
    let config = WriterConfig::new();
    let mut writer = FieldWriter::create(&constants, &grid(5, 8), &["oro"], &config).unwrap();
    writer.append(0.0, field.view()).unwrap();
    writer.finish().unwrap();
    let config = DatasetConfig::new()
        .with_forcings(vec!["oro".into()])
        .with_constants(Some(constants))
        .with_constants_missing(vec!["oro".into()]);
    let found = FieldDataset::open(&[path], &config).unwrap_err();
    let found = found.to_string();
    assert!(
        found.contains("[2, 3]: found an infinite value, inf"),
        "{found}"
    );
}
