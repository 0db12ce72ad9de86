//! Files and statistics with the names and the layout of Makani.

use halocline_io::{FieldFile, Metadata, Statistics, open};

use crate::{STEP, edit, grid, numbered, numbered_file};

/// Seconds from 1970 to 2018.
const START: f64 = 1_514_764_800.0;

#[test]
fn coordinates_that_a_file_lacks_are_those_of_data_json() {
    let (folder, path) = numbered_file([3, 2, 4, 5]);
    let metadata = Metadata::of(&FieldFile::open(&path).unwrap()).unwrap();
    edit(&path, |file| {
        for name in ["timestamp", "channel", "lat", "lon"] {
            file.unlink(name).unwrap();
        }
    });
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("no dataset \"channel\""), "{error}");
    // Virtual files of Makani have another suffix, which does not matter here.
    let other = path.with_extension("h5v");
    std::fs::copy(&path, &other).unwrap();
    metadata.save(folder.path()).unwrap();
    for path in [&path, &other] {
        let file = open(path).unwrap();
        assert_eq!(file.times(), [START, START + STEP, START + 2.0 * STEP]);
        assert_eq!(file.channels(), ["z0", "z1"]);
        assert_eq!(file.grid(), &grid(4, 5));
        let values = file.read([0..3, 0..2, 0..4, 0..5]).unwrap();
        assert_eq!(values, numbered([3, 2, 4, 5], 0.0));
    }
    // Files in a folder of their own, and the metadata in another one beside it.
    let train = folder.path().join("train");
    std::fs::create_dir(&train).unwrap();
    let moved = train.join("2018.h5");
    std::fs::rename(&path, &moved).unwrap();
    std::fs::remove_file(folder.path().join("data.json")).unwrap();
    metadata.save(folder.path().join("metadata")).unwrap();
    assert_eq!(open(&moved).unwrap().channels(), ["z0", "z1"]);
    let named = train.join("test.h5");
    std::fs::rename(&moved, &named).unwrap();
    let error = open(&named).unwrap_err().to_string();
    assert!(error.contains("a year as the name of the file"), "{error}");
}

#[test]
fn data_json_must_fit_the_fields() {
    let (folder, path) = numbered_file([3, 2, 4, 5]);
    edit(&path, |file| {
        file.unlink("channel").unwrap();
        file.unlink("lat").unwrap();
    });
    // The keys that Makani's tools read.
    let open_with = |lat: &str, channels: &str| {
        let coords = format!(
            r#""coords": {{"lat": {lat}, "lon": [0, 72, 144, 216, 288], "channel": {channels}}}"#
        );
        let text = format!(r#"{{"dhours": 6, {coords}}}"#);
        std::fs::write(folder.path().join("data.json"), text).unwrap();
        FieldFile::open(&path).map_err(|error| error.to_string())
    };
    let file = open_with("[90, 30, -30, -90]", r#"["a", "b"]"#).unwrap();
    assert_eq!(file.channels(), ["a", "b"]);
    assert_eq!(file.grid(), &grid(4, 5));
    for (lat, channels, told) in [
        (
            "[90, 30, -30, -90]",
            r#"["a"]"#,
            "found 2 channels, expected 1 as in",
        ),
        (
            "[90, 0, -90]",
            r#"["a", "b"]"#,
            "found 4 x 5 cells, expected 3 x 5 as in",
        ),
        ("[0, 95]", r#"["a", "b"]"#, "data.json"),
    ] {
        let error = open_with(lat, channels).unwrap_err();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn statistics_of_one_step_have_the_names_of_makani() {
    let (folder, path) = numbered_file([4, 3, 4, 5]);
    let statistics = Statistics::compute(&[FieldFile::open(&path).unwrap()], 1).unwrap();
    statistics.save(folder.path()).unwrap();
    let saved = Statistics::load(folder.path()).unwrap();
    for name in ["time_diff_means", "time_diff_stds"] {
        let [from, to] = ["", "_dt1"].map(|end| folder.path().join(format!("{name}{end}.npy")));
        std::fs::rename(from, to).unwrap();
    }
    assert_eq!(Statistics::load(folder.path()).unwrap(), saved);
}
