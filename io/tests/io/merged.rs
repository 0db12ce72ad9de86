//! Files with different channels at the same times, such as surface and pressure levels.

use std::path::{Path, PathBuf};

use halocline_io::{
    DatasetConfig, FieldDataset, FieldWriter, Fields, OpenConfig, Period, Series, WriterConfig,
};
use ndarray::{Array3, s};

use crate::STEP;

/// Writes channels at some times. Values are the sum of `value` and the index of the time.
fn write(path: &Path, names: &[&str], times: impl IntoIterator<Item = usize>, value: f32) {
    let config = WriterConfig::new();
    let mut writer = FieldWriter::create(path, &crate::grid(3, 4), names, &config).unwrap();
    for time in times {
        let field = Array3::from_shape_fn((names.len(), 3, 4), |(channel, ..)| {
            value + 10.0 * channel as f32 + time as f32 / 100.0
        });
        writer.append(time as f64 * STEP, field.view()).unwrap();
    }
    writer.finish().unwrap();
}

/// Creates a folder with two years of surface files and level files.
fn years() -> (tempfile::TempDir, [PathBuf; 4]) {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["surface1", "surface2", "levels2", "levels1"].map(|name| folder.path().join(name));
    write(&paths[0], &["t2m", "msl"], 0..4, 0.0);
    write(&paths[1], &["t2m", "msl"], 4..9, 0.0);
    write(&paths[2], &["z@850", "z@500"], 4..9, 100.0);
    write(&paths[3], &["z@850", "z@500"], 0..4, 100.0);
    (folder, paths)
}

#[test]
fn files_of_other_channels_are_one() {
    let (_folder, paths) = years();
    let joined = OpenConfig::new().open_joined(&paths).unwrap();
    assert_eq!(joined.channels(), ["t2m", "msl", "z@850", "z@500"]);
    assert_eq!(joined.shape(), [9, 4, 3, 4]);
    let values = joined.read([3..5, 1..3, 0..1, 0..1]).unwrap();
    let found: Vec<f32> = values.iter().copied().collect();
    assert_eq!(found, [10.03, 100.03, 10.04, 100.04]);
    assert_eq!(joined.describe(3).name, "z@500");
    // Chosen channels, in the chosen order.
    let chosen = OpenConfig::of_channels(&["z", "t2m"]).open_joined(&paths);
    let chosen = chosen.unwrap();
    assert_eq!(chosen.channels(), ["z@850", "z@500", "t2m"]);
    let values = chosen.read([8..9, 0..3, 2..3, 3..4]).unwrap();
    assert_eq!(
        values.slice(s![0, .., 0, 0]).to_vec(),
        [100.08, 110.08, 0.08]
    );
    // Each year is a trajectory of all channels.
    let config = DatasetConfig::new().with_inputs(Some(vec!["msl".into(), "z@500".into()]));
    let dataset = FieldDataset::open(&paths, &config).unwrap();
    assert_eq!(dataset.len(), 3 + 4);
    let sample = dataset.sample(3).unwrap();
    assert_eq!(sample.input.slice(s![.., 0, 0]).to_vec(), [10.04, 110.04]);
    assert_eq!(dataset.series(3), 1);
    let config = config.with_series(Series::Joined);
    assert_eq!(FieldDataset::open(&paths, &config).unwrap().len(), 8);
}

#[test]
fn what_does_not_belong_together_is_told() {
    let (folder, paths) = years();
    let [surface, _, _, levels] = &paths;
    let other = folder.path().join("other");
    let message = |paths: &[&PathBuf], config: &OpenConfig| {
        let joined = config.open_joined(paths).unwrap_err().to_string();
        let each = config.open_each(paths).unwrap_err().to_string();
        [joined, each]
    };
    let new = OpenConfig::new();
    write(&other, &["z@850"], 1..5, 0.0);
    let [joined, each] = message(&[surface, &other], &new);
    for part in [
        "other: times of other channels: found 4 times from 1970-01-01 06",
        "as in",
    ] {
        assert!(joined.contains(part), "{part} in {joined}");
    }
    assert!(
        each.contains("expected a file with [\"t2m\", \"msl\"] from the same time on"),
        "{each}"
    );
    write(&other, &["z@850", "msl"], 0..4, 0.0);
    for found in message(&[surface, &other], &new) {
        assert!(
            found.contains("channels: found msl, expected a channel of one file only"),
            "{found}"
        );
    }
    let [_, each] = message(&[surface, &paths[1], levels], &new);
    assert!(each.starts_with("files: got 1 with"), "{each}");
    // A channel that is in no file, and a file without any chosen channel.
    for (chosen, part) in [
        (&["t2m", "z@500", "sst"][..], "sst"),
        (&["t2m", "msl"], "levels1"),
    ] {
        for found in message(&[surface, levels], &OpenConfig::of_channels(chosen)) {
            assert!(found.contains(part), "{part} in {found}");
        }
    }
}

/// An uneven step is that of a file, at the index of the time in it.
#[test]
fn an_uneven_step_of_joined_files_is_told_by_file() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    // Without the first time of the first file.
    let period = Period::since("1970-01-01T06:00");
    let config = OpenConfig::new().with_period(Some(period));
    for (times, place) in [
        ([[0, 1, 2, 4], [5, 6, 7, 8]], "first: dataset \"time\"[3]"),
        ([[0, 1, 2, 3], [4, 5, 6, 8]], "second: dataset \"time\"[3]"),
    ] {
        write(&first, &["t2m"], times[0], 0.0);
        write(&second, &["t2m"], times[1], 0.0);
        let joined = config.open_joined(&[&first, &second]).unwrap();
        let error = joined.time_step().unwrap_err().to_string();
        assert!(error.contains(place), "{place} in {error}");
    }
}
