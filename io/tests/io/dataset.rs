use std::path::Path;

use halocline_io::{
    DatasetConfig, Error, FieldDataset, FieldFile, FieldWriter, Missing, Statistics, WriterConfig,
};
use ndarray::{Array4, concatenate, s};

use crate::{STEP, grid, names, numbered, numbered_file, write, zeros};

#[test]
fn samples_have_their_history_and_lead_and_stay_in_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let fields = [
        numbered([6, 2, 3, 4], 0.0),
        numbered([3, 2, 3, 4], 1e5),
        numbered([5, 2, 3, 4], 2e5),
    ];
    let paths: Vec<_> = (0..3)
        .map(|index| folder.path().join(format!("{index}.h5")))
        .collect();
    for (path, fields) in paths.iter().zip(&fields) {
        write(path, fields, &WriterConfig::new());
    }
    let config = DatasetConfig::new().with_history(2).with_lead(2);
    let dataset = FieldDataset::open(&paths, &config).unwrap();
    assert_eq!(
        (dataset.input_shape(), dataset.target_shape()),
        ([4, 3, 4], [2, 3, 4])
    );
    // 6 - 3 and 5 - 3 samples; the file of 3 times is too short for any.
    let expected = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)];
    assert_eq!(dataset.len(), expected.len());
    for (index, (file, first)) in expected.into_iter().enumerate() {
        let field = |time: usize| fields[file].slice(s![time, .., .., ..]);
        let sample = dataset.sample(index).unwrap();
        let input = concatenate![ndarray::Axis(0), field(first), field(first + 1)];
        assert_eq!(sample.input, input, "sample {index}");
        assert_eq!(sample.target, field(first + 3), "sample {index}");
        assert_eq!(dataset.time(index), (first + 1) as f64 * STEP);
    }
}

#[test]
fn values_are_normalised_by_the_statistics() {
    let (_folder, path) = numbered_file([4, 2, 3, 4]);
    let statistics = Statistics::compute(&[FieldFile::open(&path).unwrap()], 1).unwrap();
    let dataset = FieldDataset::open(&[&path], &DatasetConfig::new()).unwrap();
    let plain = dataset.sample(1).unwrap();
    let scaled = dataset
        .with_statistics(&statistics)
        .unwrap()
        .sample(1)
        .unwrap();
    for ((channel, i, j), value) in scaled.target.indexed_iter() {
        let back = f64::from(*value) * statistics.stds()[channel] + statistics.means()[channel];
        assert!((back - f64::from(plain.target[[channel, i, j]])).abs() < 1e-3);
    }
    assert!(scaled.input.iter().all(|value| value.abs() < 4.0));
}

#[test]
fn statistics_must_fit() {
    let (_folder, path) = numbered_file([4, 2, 3, 4]);
    let other = path.with_file_name("other.h5");
    write(&other, &Array4::ones((3, 1, 3, 4)), &WriterConfig::new());
    let constant = Statistics::compute(&[FieldFile::open(&other).unwrap()], 1).unwrap();
    let message = |path| {
        let dataset = FieldDataset::open(&[path], &DatasetConfig::new()).unwrap();
        dataset.with_statistics(&constant).unwrap_err().to_string()
    };
    assert_eq!(
        message(&path),
        "statistics: got those of [\"z0\"], expected those of channel z1 too"
    );
    assert_eq!(
        message(&other),
        "statistics: got a standard deviation of 0 for z0, expected finite statistics of a channel that varies; leave constant ones out"
    );
}

/// Writes a file of zeros at these hours.
fn write_hours(path: &Path, hours: &[f64]) {
    let mut writer =
        FieldWriter::create(path, &grid(3, 4), &names(1), &WriterConfig::new()).unwrap();
    let field = zeros([1, 3, 4]);
    for hour in hours {
        writer.append(hour * 3600.0, field.view()).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn time_steps_must_be_even() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    write_hours(&path, &[0.0, 6.0, 12.0, 24.0]);
    assert_eq!(
        FieldDataset::open(&[&path], &DatasetConfig::new())
            .unwrap_err()
            .to_string(),
        format!(
            "{}: dataset \"timestamp\"[3]: found a time step of 12 h, \
             expected 6 h, as between the first two times; \
             write each stretch of equal steps into a file of its own, of which a FieldDataset takes several, \
             or choose Gaps::Skip or Gaps::Allow",
            path.display()
        )
    );
    // The remedy that the message suggests works.
    let parts = ["1.h5", "2.h5"].map(|name| folder.path().join(name));
    write_hours(&parts[0], &[0.0, 6.0, 12.0]);
    write_hours(&parts[1], &[24.0, 30.0, 36.0]);
    let dataset = FieldDataset::open(&parts, &DatasetConfig::new()).unwrap();
    assert_eq!(dataset.len(), 4);
}

#[test]
fn files_must_go_together() {
    let (_folder, path) = numbered_file([4, 2, 3, 4]);
    let other = path.with_file_name("other.h5");
    let message = || {
        let error = FieldDataset::open(&[&path, &other], &DatasetConfig::new()).unwrap_err();
        error
            .to_string()
            .replace(&format!("{}", path.display()), "PATH")
    };
    write(&other, &numbered([4, 2, 3, 5], 0.0), &WriterConfig::new());
    assert_eq!(
        message(),
        format!(
            "{}: grid: found lat 3 values from 90 to -90, lon 5 values from 0 to 288 \
             (5 longitudes, not 4), \
             expected lat 3 values from 90 to -90, lon 4 values from 0 to 270 as in PATH",
            other.display()
        )
    );
    let mut writer =
        FieldWriter::create(&other, &grid(3, 4), &names(2), &WriterConfig::new()).unwrap();
    for time in [0.0, 3600.0] {
        writer.append(time, zeros([2, 3, 4]).view()).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(
        message(),
        format!(
            "{}: time step: found 3600 s, expected 21600 s as in PATH",
            other.display()
        )
    );
}

#[test]
fn arguments_must_leave_a_sample() {
    let (_folder, path) = numbered_file([4, 1, 3, 4]);
    let message = |config: DatasetConfig| {
        FieldDataset::open(&[&path], &config)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        message(DatasetConfig::new().with_history(3).with_lead(2)),
        "history and lead: got 3 and 2, expected a sum of at most the 4 times of the longest file"
    );
    let steps = DatasetConfig::new().with_steps(40);
    let error = FieldDataset::open(&[&path], &steps).unwrap_err();
    assert!(
        matches!(error, Error::TooShort { most_steps: 3, .. }),
        "{error}"
    );
    let states = DatasetConfig::new().with_history(5).with_lead(0);
    assert_eq!(
        message(states.with_history_hours(Some(12.0))),
        "history: got 5, expected a file with 5 times 12 h apart; the longest file has 4 times, 6 h apart"
    );
    assert_eq!(
        message(DatasetConfig::new().with_history(0)),
        "history: got 0, expected at least 1 time"
    );
    let none: [&str; 0] = [];
    let error = FieldDataset::open(&none, &DatasetConfig::new())
        .unwrap_err()
        .to_string();
    assert_eq!(error, "files: got 0, expected at least one field file");
    let longest = DatasetConfig::new().with_history(3).with_lead(1);
    assert_eq!(FieldDataset::open(&[&path], &longest).unwrap().len(), 1);
}

#[test]
fn samples_start_at_multiples_of_hours() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    write_hours(&path, &[6.0, 12.0, 18.0, 24.0, 30.0, 36.0]);
    let open = |hours: usize| {
        let config = DatasetConfig::new().with_every_hours(Some(hours));
        FieldDataset::open(&[&path], &config)
    };
    let times = |hours: usize| {
        let dataset = open(hours).unwrap();
        let samples = 0..dataset.len();
        let times = samples.map(|sample| dataset.time(sample) / 3600.0);
        times.collect::<Vec<_>>()
    };
    assert_eq!(times(12), [12.0, 24.0]);
    assert_eq!(times(6), [6.0, 12.0, 18.0, 24.0, 30.0]);
    for (hours, told) in [
        (0, "every_hours: got 0, expected at least 1 hour"),
        (
            36,
            "every_hours: got 36, expected hours of which the time of a sample is",
        ),
    ] {
        let error = open(hours).unwrap_err().to_string();
        assert!(error.starts_with(told), "{error}");
    }
    let open = |hours: &[usize]| {
        let config = DatasetConfig::new().with_at_hours(hours.to_vec());
        FieldDataset::open(&[&path], &config)
    };
    let dataset = open(&[18, 6]).unwrap();
    let times: Vec<f64> = (0..dataset.len())
        .map(|sample| dataset.time(sample))
        .collect();
    assert_eq!(times, [6.0, 18.0, 30.0].map(|hours| hours * 3600.0));
    for (hours, told) in [
        ([3, 24], "at_hours: got [3, 24], expected hours of the day"),
        (
            [3, 15],
            "at_hours: got [3, 15], expected hours of the day at",
        ),
    ] {
        let error = open(&hours).unwrap_err().to_string();
        assert!(error.starts_with(told), "{error}");
    }
}

#[test]
fn missing_values_are_an_error_unless_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let mut fields = numbered([3, 1, 3, 4], 0.0);
    fields[[2, 0, 1, 1]] = f32::NAN;
    write(&path, &fields, &WriterConfig::new());
    let open = |missing| {
        let config = DatasetConfig::new().with_missing(missing);
        FieldDataset::open(&[&path], &config).unwrap()
    };
    assert!(open(Missing::Reject).sample(0).is_ok());
    let error = open(Missing::Reject).sample(1).unwrap_err().to_string();
    assert!(
        error.contains("dataset \"fields\"[2, 0, 1, 1]: found NaN"),
        "{error}"
    );
    assert!(open(Missing::Allow).sample(1).unwrap().target[[0, 1, 1]].is_nan());
}
