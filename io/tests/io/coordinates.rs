//! Files with unusual coordinates or metadata, as they occur in practice.

use std::path::Path;

use burn::tensor::f16;
use halocline_io::{
    DatasetConfig, FieldDataset, FieldWriter, Missing, OpenConfig, Period, WriterConfig, open,
};
use ndarray::Array3;

use crate::forecasts::bare;
use crate::formats::{copy, replace, store};
use crate::{STEP, grid};

/// Adds an attribute to an array of version 2.
pub(crate) fn attribute(array: &Path, text: &str) {
    replace(&array.join(".zattrs"), "{\n", &format!("{{\n{text},\n"));
}

/// Writes an uncompressed array of version 2.
pub(crate) fn array(folder: &Path, dtype: &str, shape: &[usize], dims: &[&str], bytes: &[u8]) {
    std::fs::create_dir(folder).unwrap();
    let metadata = serde_json::json!({
        "shape": shape, "chunks": shape, "dtype": dtype, "fill_value": null, "order": "C", "filters": null,
        "compressor": null, "zarr_format": 2, "dimension_separator": ".",
    });
    std::fs::write(folder.join(".zarray"), metadata.to_string()).unwrap();
    let attributes = serde_json::json!({ "_ARRAY_DIMENSIONS": dims });
    let attributes = serde_json::to_string_pretty(&attributes).unwrap();
    std::fs::write(folder.join(".zattrs"), attributes).unwrap();
    let chunk = vec!["0"; shape.len().max(1)].join(".");
    std::fs::write(folder.join(chunk), bytes).unwrap();
}

/// The layout of cfgrib: `time` is the initial time of the forecast, and the valid time shares its
/// dim.
#[test]
fn times_may_lie_beside_the_beginning_of_forecasts() {
    let (_folder, path) = copy("v2.zarr");
    let expected = open(&path).unwrap().times().to_vec();
    attribute(
        &path.join("time"),
        "\"standard_name\": \"forecast_reference_time\"",
    );
    // The remaining channel has no time dim.
    assert_eq!(open(&path).unwrap().channels(), ["orography"]);
    let error = OpenConfig::of_channels(&["t2m"])
        .open(&path)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("time is the beginning or the step of forecasts"),
        "{error}"
    );
    let hours: Vec<u8> = [0_i64, 6, 12, 18]
        .iter()
        .flat_map(|hour| hour.to_le_bytes())
        .collect();
    array(&path.join("valid_time"), "<i8", &[4], &["time"], &hours);
    attribute(
        &path.join("valid_time"),
        "\"standard_name\": \"time\", \"units\": \"hours since 2018-01-01\"",
    );
    let fields = open(&path).unwrap();
    assert_eq!(fields.times(), expected);
    assert!(fields.channels().contains(&"t2m".to_string()));
}

/// In files of MOM6, the latitudes of rows are nominal, next to those of the cells; in files of
/// GEOS, those of the cells differ between the faces of a cubed sphere.
#[test]
fn nominal_latitudes_of_a_curvilinear_grid_are_refused() {
    for (faces, bend, is_curved) in [
        (1, 0.0, false),
        (1, 0.5, true),
        (2, 0.0, false),
        (2, 0.5, true),
    ] {
        let (_folder, path) = copy("v2.zarr");
        let lat = open(&path).unwrap().grid().lat().to_vec();
        attribute(
            &path.join("latitude"),
            "\"long_name\": \"h point Nominal latitude\"",
        );
        let error = open(&path).unwrap_err().to_string();
        assert!(
            error.contains("on latitude, which is a \"h point Nominal latitude\""),
            "{error}"
        );
        // Coordinates of the last face.
        let cells = (0..8 * faces).flat_map(|column| {
            let bend = if column == 8 * faces - 5 { bend } else { 0.0 };
            lat.iter().map(move |lat| lat + bend)
        });
        let bytes: Vec<u8> = cells.flat_map(f64::to_le_bytes).collect();
        let (shape, dims) = ([faces, 8, 5], ["face", "longitude", "latitude"]);
        let first = usize::from(faces == 1);
        let geolat = path.join("geolat");
        array(&geolat, "<f8", &shape[first..], &dims[first..], &bytes);
        attribute(&geolat, "\"units\": \"degrees_north\"");
        match open(&path) {
            Ok(fields) => assert!(!is_curved && fields.channels().contains(&"t2m".to_string())),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    is_curved
                        && error.contains("on a curvilinear grid, whose latitudes are geolat")
                        && error.contains("or stack its cells along one dim"),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn latitudes_that_are_nan_do_not_confirm_nominal_ones() {
    let (_folder, path) = copy("v2.zarr");
    let text = "\"long_name\": \"Nominal latitude\"";
    attribute(&path.join("latitude"), text);
    let geolat = path.join("geolat");
    let bytes = f64::NAN.to_le_bytes().repeat(40);
    array(&geolat, "<f8", &[8, 5], &["longitude", "latitude"], &bytes);
    attribute(&geolat, "\"units\": \"degrees_north\"");
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("on latitude, which is a"), "{error}");
}

/// Latitudes of the cells, which are those of the rows, and a field that another one names.
#[test]
fn coordinates_of_cells_are_channels_only_by_name() {
    let (_folder, path) = copy("v2.zarr");
    let lat = open(&path).unwrap().grid().lat().to_vec();
    let bytes: Vec<u8> = lat
        .repeat(8)
        .into_iter()
        .flat_map(f64::to_le_bytes)
        .collect();
    let dims = ["longitude", "latitude"];
    array(&path.join("nav_lat"), "<f8", &[8, 5], &dims, &bytes);
    let text = "\"coordinates\": \"time nav_lat orography\"";
    attribute(&path.join("t2m"), text);
    let fields = open(&path).unwrap();
    assert_eq!(fields.channels(), ["t2m", "z@850", "z@500"]);
    let told = "orography (a coordinate of t2m; choose it by name to read it)";
    let mut left_out = fields.left_out().iter();
    assert!(left_out.any(|variable| variable.to_string() == told));
    let chosen = OpenConfig::of_channels(&["nav_lat", "orography"]).open(&path);
    let values = chosen.unwrap().read([0..1, 0..1, 1..2, 3..4]).unwrap();
    assert_eq!(f64::from(values[[0; 4]]), lat[1]);
    let name = |name: &str| vec![name.to_string()];
    let config = DatasetConfig::new()
        .with_inputs(Some(name("t2m")))
        .with_constants(Some(path.clone()))
        .with_forcings(name("nav_lat"));
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    assert_eq!(dataset.channels().forcings, ["nav_lat"]);
    let config = DatasetConfig::new().with_forcings(name("orography"));
    let error = FieldDataset::open(&[&path], &config).unwrap_err();
    let told = "; orography is a coordinate, which is read if inputs are named too";
    assert!(error.to_string().ends_with(told), "{error}");
    for name in ["t2m", "z", "orography"] {
        std::fs::remove_dir_all(path.join(name)).unwrap();
    }
    assert_eq!(open(&path).unwrap().channels(), ["nav_lat"]);
}

/// The corners lie along the first dim, as some models write them.
#[test]
fn corners_of_cells_are_no_positions() {
    let (_folder, path) = copy("v2.zarr");
    let corners = path.join("lat_corners");
    let bytes = 1.0_f64.to_le_bytes().repeat(4 * 40);
    let dims = ["corner", "longitude", "latitude"];
    array(&corners, "<f8", &[4, 8, 5], &dims, &bytes);
    attribute(&corners, "\"units\": \"degrees_north\"");
    assert!(open(&path).is_err());
    attribute(&path.join("latitude"), "\"bounds\": \"lat_corners\"");
    let fields = open(&path).unwrap();
    assert!(fields.channels().contains(&"t2m".to_string()));
}

/// Dims with indices, and degrees along the same dims.
#[test]
fn degrees_may_lie_beside_indices() {
    let (_folder, path) = bare();
    for (dim, name, units, extent) in [
        ("y", "lat", "degrees_north", 5_usize),
        ("x", "lon", "degrees_east", 8),
    ] {
        let indices: Vec<u8> = (0..extent as i64).flat_map(i64::to_le_bytes).collect();
        let degrees = (0..extent).flat_map(|index| (10.0 * index as f64).to_le_bytes());
        let degrees: Vec<u8> = degrees.collect();
        array(&path.join(dim), "<i8", &[extent], &[dim], &indices);
        array(&path.join(name), "<f8", &[extent], &[dim], &degrees);
        attribute(&path.join(name), &format!("\"units\": \"{units}\""));
    }
    array(&path.join("mask"), "<f4", &[5, 8], &["y", "x"], &[0; 160]);
    let fields = open(&path).unwrap();
    assert_eq!(fields.channels(), ["mask"]);
    assert_eq!(fields.grid().lat(), [0.0, 10.0, 20.0, 30.0, 40.0]);
    assert_eq!(fields.grid().lon()[7], 70.0);
}

#[test]
fn levels_that_repeat_and_those_of_a_profile_are_numbered() {
    let (_folder, path) = copy("v2.zarr");
    let level = path.join("level");
    let write = |name: &str, units: &str, values: [i32; 2]| {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        array(&path.join(name), "<i4", &[2], &["level"], &bytes);
        attribute(&path.join(name), &format!("\"units\": \"{units}\""));
    };
    let check = || {
        let fields = OpenConfig::of_channels(&["z"]).open(&path).unwrap();
        assert_eq!(fields.channels(), ["z@0", "z@1"]);
        assert_eq!(fields.describe(0).level_units, None);
    };
    std::fs::remove_dir_all(&level).unwrap();
    write("level", "hPa", [500, 500]);
    check();
    // A temperature called `t` on levels without a coordinate is not a time.
    std::fs::remove_dir_all(&level).unwrap();
    write("t", "K", [200, 250]);
    check();
}

#[test]
fn the_groups_of_a_file_without_fields_outside_of_them_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("imerg.h5");
    let file = hdf5_metno::File::create(&path).unwrap();
    let group = file.create_group("Grid").unwrap();
    let values = Array3::<f32>::zeros((1, 2, 3));
    group
        .new_dataset_builder()
        .with_data(&values)
        .create("precipitation")
        .unwrap();
    drop(group);
    file.close().unwrap();
    let error = open(&path).unwrap_err().to_string();
    for part in ["the groups Grid", "group=\"Grid\""] {
        assert!(error.contains(part), "{error}");
    }
}

/// Strings such as `expver` in ERA5, booleans, and NaN as Python writes it.
#[test]
fn members_and_attributes_of_other_kinds_leave_fields_readable() {
    let (_folder, path) = copy("v2.zarr");
    array(&path.join("expver"), "<U4", &[4], &["time"], &[0; 64]);
    let dims = ["time", "member"];
    array(&path.join("names"), "<U4", &[4, 2], &dims, &[0; 128]);
    let mask: Vec<u8> = (0..40).map(|cell| cell % 2).collect();
    array(
        &path.join("mask"),
        "|b1",
        &[8, 5],
        &["longitude", "latitude"],
        &mask,
    );
    replace(
        &path.join("mask/.zarray"),
        "\"fill_value\":null",
        "\"fill_value\":false",
    );
    attribute(
        &path.join("t2m"),
        "\"valid_range\": [0.0, NaN], \"missing_value\": NaN",
    );
    let fields = open(&path).unwrap();
    assert!(fields.channels().contains(&"mask".to_string()));
    let cells = fields.shape().map(|size| 0..size);
    let place = fields
        .channels()
        .iter()
        .position(|name| name == "mask")
        .unwrap();
    let values = fields.read(cells).unwrap();
    assert_eq!(
        (values[[0, place, 0, 0]], values[[0, place, 1, 0]]),
        (0.0, 1.0)
    );
}

#[test]
fn numbers_of_half_precision_are_read() {
    let (_folder, path) = copy("v2.zarr");
    let values: Vec<f16> = (0..40)
        .map(|cell| f16::from_f32(0.25 * cell as f32))
        .collect();
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    array(
        &path.join("depth"),
        "<f2",
        &[8, 5],
        &["longitude", "latitude"],
        &bytes,
    );
    let fields = OpenConfig::of_channels(&["depth"]).open(&path).unwrap();
    let read = fields.read([0..1, 0..1, 0..5, 0..8]).unwrap();
    // Ordered by latitude and longitude.
    let mut turned = read.iter().enumerate();
    assert!(turned.all(|(cell, value)| *value == 0.25 * (cell % 8 * 5 + cell / 8) as f32));
}

#[test]
fn texts_that_are_not_utf8_leave_fields_readable() {
    let fields = open(store("latin1.nc")).unwrap();
    assert_eq!(fields.channels(), ["t2m"]);
    let values = fields.read(fields.shape().map(|size| 0..size)).unwrap();
    assert_eq!(
        values.iter().copied().collect::<Vec<_>>(),
        (0..40).map(|i| i as f32).collect::<Vec<_>>()
    );
}

#[test]
fn a_field_without_a_time_has_those_of_its_file() {
    let config = OpenConfig::of_channels(&["orography"]).with_missing(Missing::Allow);
    let chosen = config.open(store("v2.zarr")).unwrap();
    let all = open(store("v2.zarr")).unwrap();
    assert_eq!(chosen.times(), all.times());
    assert!(chosen.describe(0).is_static);
}

/// The second year has no surface file.
#[test]
fn a_chosen_channel_without_a_time_in_the_period_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["surface1", "levels1", "levels2"].map(|name| folder.path().join(name));
    let write = |path: &Path, name: &str, times: std::ops::Range<usize>| {
        let config = WriterConfig::new();
        let mut writer = FieldWriter::create(path, &grid(3, 4), &[name], &config).unwrap();
        for time in times {
            writer
                .append(time as f64 * STEP, Array3::zeros((1, 3, 4)).view())
                .unwrap();
        }
        writer.finish().unwrap();
    };
    write(&paths[0], "t2m", 0..4);
    write(&paths[1], "z@500", 0..4);
    write(&paths[2], "z@500", 4..9);
    let config = OpenConfig::of_channels(&["z@500", "t2m"]);
    assert_eq!(
        config.open_joined(&paths[..2]).unwrap().channels(),
        ["z@500", "t2m"]
    );
    let later = config.with_period(Some(Period::since("1970-01-02")));
    let each = later.open_each(&paths).unwrap_err().to_string();
    let joined = later.open_joined(&paths).unwrap_err().to_string();
    for error in [each, joined] {
        assert!(error.contains("t2m"), "{error}");
    }
}
