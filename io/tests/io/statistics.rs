use halocline_io::{
    FieldFile, FieldWriter, Gaps, Metadata, Missing, OpenConfig, Progress, Statistics,
    StatisticsBuilder, WriterConfig,
};
use ndarray::{Array3, Array4};
use proptest::prelude::*;

use crate::{STEP, grid, listing, numbered, numbered_file, write};

/// Computes the area-weighted mean and standard deviation of a channel, in two passes over all
/// cells of all fields.
fn direct(fields: &[Array4<f64>], channel: usize) -> (f64, f64) {
    let rows = fields[0].dim().2;
    let weights = grid(rows, 1).latitude_weights();
    let cells = || {
        fields.iter().flat_map(|fields| {
            let weights = &weights;
            let cells = fields
                .indexed_iter()
                .filter(move |((_, c, _, _), _)| *c == channel);
            cells.map(move |((_, _, i, _), value)| (weights[i], *value))
        })
    };
    let total: f64 = cells().map(|(weight, _)| weight).sum();
    let mean = cells().map(|(weight, value)| weight * value).sum::<f64>() / total;
    let square = cells()
        .map(|(weight, value)| weight * (value - mean).powi(2))
        .sum::<f64>();
    (mean, (square / total).sqrt())
}

/// Computes the differences of fields `lead` times apart.
fn increments(fields: &Array4<f64>, lead: usize) -> Array4<f64> {
    let (times, channels, rows, columns) = fields.dim();
    Array4::from_shape_fn(
        (times.saturating_sub(lead), channels, rows, columns),
        |(t, c, i, j)| fields[[t + lead, c, i, j]] - fields[[t, c, i, j]],
    )
}

fn close(found: &[f64], expected: f64, channel: usize) {
    let found = found[channel];
    assert!(
        (found - expected).abs() < 1e-9 * expected.abs().max(1.0),
        "{found} {expected}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn they_are_those_of_two_direct_passes(
        times in (3..6_usize, 1..3_usize), rows in 2..6_usize, columns in 1..5_usize, lead in 1..3_usize,
        seed in 0..1000_u32,
    ) {
        let folder = tempfile::tempdir().unwrap();
        // One file may be too short for increments, which must not span two files either.
        let fields: Vec<Array4<f32>> = [times.0, times.1 + 1].iter().enumerate().map(|(file, &times)| {
            Array4::from_shape_fn((times, 2, rows, columns), |(t, c, i, j)| {
                let index = (((file * 7 + t) * 2 + c) * 11 + i) * 13 + j;
                let noise = ((index as u32 + 1).wrapping_mul(2_654_435_761 + 2 * seed) >> 8) as f32 / 1e7;
                // Like geopotential, with a small variance and a large mean.
                noise + if c == 0 { 5e4 } else { 0.0 }
            })
        }).collect();
        let files: Vec<FieldFile> = fields.iter().enumerate().map(|(index, fields)| {
            let path = folder.path().join(format!("{index}.h5"));
            write(&path, fields, &WriterConfig::new());
            FieldFile::open(path).unwrap()
        }).collect();
        let found = Statistics::compute(&files, lead).unwrap();
        let wide: Vec<Array4<f64>> = fields.iter().map(|fields| fields.mapv(f64::from)).collect();
        let steps: Vec<Array4<f64>> = wide.iter().map(|fields| increments(fields, lead)).collect();
        for channel in 0..2 {
            let (mean, std) = direct(&wide, channel);
            close(found.means(), mean, channel);
            close(found.stds(), std, channel);
            let (mean, std) = direct(&steps, channel);
            close(found.increment_means(), mean, channel);
            close(found.increment_stds(), std, channel);
        }
        // Accumulated separately and merged, as on two ranks.
        let parts: Vec<StatisticsBuilder> = files.iter().map(|file| {
            let mut part = StatisticsBuilder::new(lead).unwrap();
            part.add(file, &Progress::hidden()).unwrap();
            part
        }).collect();
        let merged = parts.into_iter().rev().reduce(|a, b| a.merge(b).unwrap()).unwrap();
        let merged = merged.finish().unwrap();
        for channel in 0..2 {
            close(merged.means(), found.means()[channel], channel);
            close(merged.stds(), found.stds()[channel], channel);
            close(merged.increment_stds(), found.increment_stds()[channel], channel);
        }
    }
}

#[test]
fn increments_of_a_lead_in_hours_are_those_between_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    // The values are equal to the hours.
    let increments = |hours: &[f64], gaps, lead| {
        let config = WriterConfig::new();
        let mut writer = FieldWriter::create(&path, &grid(3, 4), &["t2m"], &config).unwrap();
        for hour in hours {
            let field = Array3::from_elem((1, 3, 4), *hour as f32);
            writer.append(hour * 3600.0, field.view()).unwrap();
        }
        writer.finish().unwrap();
        let file = FieldFile::open(&path).unwrap().with_gaps(gaps);
        let mut builder = StatisticsBuilder::with_lead_hours(lead).unwrap();
        builder.add(&file, &Progress::hidden()).unwrap();
        let found = builder.finish().unwrap();
        (found.increment_means()[0], found.increment_stds()[0])
    };
    // Every twelve hours at first, every six hours later.
    let finer = [0.0, 12.0, 24.0, 30.0, 36.0, 42.0, 48.0];
    assert_eq!(increments(&finer, Gaps::Allow, 12.0), (12.0, 0.0));
    // Three times of each day.
    let daily = [0.0, 6.0, 18.0, 24.0, 30.0, 42.0, 48.0];
    assert_eq!(increments(&daily, Gaps::Skip, 24.0), (24.0, 0.0));
    let merged = StatisticsBuilder::with_lead_hours(6.0).unwrap();
    let merged = merged.merge(StatisticsBuilder::new(1).unwrap());
    let error = merged.unwrap_err().to_string();
    assert_eq!(
        error,
        "lead: got 1 step, expected 6 h, as in the other part"
    );
}

#[test]
fn they_are_stored_as_makani_reads_them() {
    let (folder, path) = numbered_file([4, 3, 4, 5]);
    let progress = Progress::hidden();
    let mut builder = StatisticsBuilder::new(1).unwrap();
    builder
        .add(&FieldFile::open(&path).unwrap(), &progress)
        .unwrap();
    assert_eq!(progress.steps(), 4);
    let statistics = builder.finish().unwrap();
    statistics.save(folder.path()).unwrap();
    let mut files = listing(folder.path());
    files.sort();
    assert_eq!(
        files,
        [
            "2018.h5",
            "data.json",
            "global_means.npy",
            "global_stds.npy",
            "time_diff_means.npy",
            "time_diff_stds.npy"
        ]
    );
    // A folder that does not exist is created.
    let below = folder.path().join("new/folder");
    statistics.save(&below).unwrap();
    assert_eq!(listing(&below).len(), 5);
    let means: Array4<f32> = ndarray_npy::read_npy(folder.path().join("global_means.npy")).unwrap();
    assert_eq!(means.shape(), [1, 3, 1, 1]);
    assert_eq!(means[[0, 2, 0, 0]], statistics.means()[2] as f32);

    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("data.json")).unwrap()).unwrap();
    assert_eq!(json["h5_path"], "fields");
    assert_eq!(
        json["dims"],
        serde_json::json!(["time", "channel", "lat", "lon"])
    );
    assert_eq!(json["dhours"], 6.0);
    assert_eq!(json["coords"]["grid_type"], "equiangular");
    assert_eq!(
        json["coords"]["channel"],
        serde_json::json!(["z0", "z1", "z2"])
    );
    assert_eq!(json["coords"]["lat"][0], 90.0);
    assert_eq!(json["coords"]["lon"][1], 72.0);

    let loaded = Statistics::load(folder.path()).unwrap();
    assert_eq!(loaded.metadata(), statistics.metadata());
    assert_eq!(loaded.metadata(), &Metadata::load(folder.path()).unwrap());
    assert_eq!(loaded.metadata().time_step(), STEP);
    for (loaded, saved) in [
        (loaded.means(), statistics.means()),
        (loaded.stds(), statistics.stds()),
        (loaded.increment_means(), statistics.increment_means()),
        (loaded.increment_stds(), statistics.increment_stds()),
    ] {
        let rounded: Vec<f64> = saved.iter().map(|&value| f64::from(value as f32)).collect();
        assert_eq!(loaded, rounded);
    }
}

#[test]
fn channels_are_selected_in_the_order_of_other_metadata() {
    let (_folder, path) = numbered_file([4, 3, 4, 5]);
    let statistics = Statistics::compute(&[FieldFile::open(&path).unwrap()], 1).unwrap();
    let two = OpenConfig::of_channels(&["z2", "z0"]).open(&path).unwrap();
    let two = Metadata::of(&two).unwrap();
    let selected = statistics.for_metadata(&two).unwrap();
    assert_eq!(selected.metadata(), &two);
    let means = statistics.means();
    assert_eq!(selected.means(), [means[2], means[0]]);
    let error = selected.for_metadata(statistics.metadata()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("those of channel z1 too"), "{error}");
}

#[test]
fn files_of_another_shape_are_refused() {
    let (folder, path) = numbered_file([4, 3, 4, 5]);
    let statistics = Statistics::compute(&[FieldFile::open(&path).unwrap()], 1).unwrap();
    statistics.save(folder.path()).unwrap();
    let stds = folder.path().join("global_stds.npy");
    ndarray_npy::write_npy(&stds, &Array4::<f32>::zeros((1, 2, 1, 1))).unwrap();
    assert_eq!(
        Statistics::load(folder.path()).unwrap_err().to_string(),
        format!(
            "{}: dataset \"global_stds.npy\": found [1, 2, 1, 1], expected [1, 3, 1, 1] for the channels of data.json",
            stds.display()
        )
    );
    std::fs::remove_file(&stds).unwrap();
    let error = Statistics::load(folder.path()).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{}: ", stds.display())),
        "{error}"
    );
}

#[test]
fn missing_values_are_left_out_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let mut fields = Array4::from_elem((3, 1, 3, 4), 2.0);
    fields[[1, 0, 2, 3]] = f32::NAN;
    write(&path, &fields, &WriterConfig::new());
    let lenient = || [FieldFile::open(&path).unwrap().with_missing(Missing::Allow)];
    let found = Statistics::compute(&lenient(), 1).unwrap();
    assert_eq!((found.means(), found.stds()), (&[2.0][..], &[0.0][..]));
    let strict = FieldFile::open(&path).unwrap();
    let error = Statistics::compute(&[strict], 1).unwrap_err().to_string();
    assert!(error.contains("[1, 0, 2, 3]: found NaN"), "{error}");

    fields[[0, 0, 0, 0]] = f32::INFINITY;
    write(&path, &fields, &WriterConfig::new());
    let error = Statistics::compute(&lenient(), 1).unwrap_err().to_string();
    assert!(
        error.contains("\"z0\": found infinite values, expected finite ones; Missing::Reject"),
        "{error}"
    );
}

#[test]
fn there_must_be_something_to_collect() {
    let message =
        |files: &[FieldFile], lead| Statistics::compute(files, lead).unwrap_err().to_string();
    assert_eq!(
        message(&[], 1),
        "files: got 0, expected at least one field file"
    );
    assert_eq!(
        message(&[], 0),
        "lead: got 0, expected at least 1 time step"
    );
    let (_folder, path) = numbered_file([3, 1, 4, 5]);
    let error = message(&[FieldFile::open(&path).unwrap()], 3);
    assert!(
        error.ends_with(
            "dataset \"z0\": found no increments, expected two times a lead of 3 steps apart in one file"
        ),
        "{error}"
    );
    let other = path.with_file_name("other.h5");
    write(&other, &numbered([3, 2, 4, 5], 0.0), &WriterConfig::new());
    let error = message(
        &[&path, &other].map(|path| FieldFile::open(path).unwrap()),
        1,
    );
    assert_eq!(
        error,
        format!(
            "{}: channels: found [\"z0\", \"z1\"], expected [\"z0\"] as in {}",
            other.display(),
            path.display()
        )
    );
}

#[test]
fn of_a_file_that_cannot_be_read_nothing_counts() {
    let (_folder, path) = numbered_file([3, 1, 4, 5]);
    let mut fields = numbered([3, 1, 4, 5], 1.0);
    fields[[2, 0, 3, 4]] = f32::NAN;
    let broken = path.with_file_name("broken.h5");
    write(&broken, &fields, &WriterConfig::new());
    let broken = FieldFile::open(&broken).unwrap();
    let good = FieldFile::open(&path).unwrap();
    let mut builder = StatisticsBuilder::new(1).unwrap();
    let progress = Progress::new(1, "statistics", 6);
    builder.add(&broken, &progress).unwrap_err();
    builder.add(&good, &progress).unwrap();
    let found = builder.finish().unwrap();
    assert_eq!(found, Statistics::compute(&[good], 1).unwrap());
}
