//! Zarr stores and NetCDF files, written by `stores/make.py`.

use std::path::{Path, PathBuf};

use halocline_core::{Launcher, Shard};
use halocline_io::{
    Batch, DatasetConfig, FieldDataset, FieldLoader, FieldWriter, Fields, Gaps, LoaderConfig,
    Missing, OpenConfig, Period, Series, Source, Statistics, WriterConfig, open,
};
use ndarray::{Array4, s};

use crate::{grid, numbered, write};

const STORES: [&str; 4] = ["v2.zarr", "v3.zarr", "packed.nc", "classic.nc"];
/// 2018-01-01, by `date -u -d 2018-01-01 +%s`.
const START: f64 = 1_514_764_800.0;
const HOUR: f64 = 3600.0;

pub(crate) fn store(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/io/stores")
        .join(name)
}

/// Returns a configuration that allows missing values and gaps.
pub(crate) fn lenient() -> OpenConfig {
    OpenConfig::new()
        .with_missing(Missing::Allow)
        .with_gaps(Gaps::Allow)
}

/// Computes the expected values of all channels of a store from their indices.
fn expected(fields: &dyn Fields) -> Array4<f32> {
    let (lat, lon) = (fields.grid().lat(), fields.grid().lon());
    let all = ["t2m", "z@850", "z@500", "orography"];
    let index = |name: &String| all.iter().position(|other| other == name).unwrap();
    let channels: Vec<usize> = fields.channels().iter().map(index).collect();
    Array4::from_shape_fn(fields.shape(), |(time, channel, row, column)| {
        let channel = channels[channel];
        let time = if channel == 3 {
            0.0
        } else {
            1000.0 * time as f64
        };
        let (row, column) = ((90.0 - lat[row]) / 45.0, lon[column] / 45.0);
        (time + 100.0 * channel as f64 + 10.0 * row + column) as f32
    })
}

fn whole(fields: &dyn Fields) -> Array4<f32> {
    fields.read(fields.shape().map(|size| 0..size)).unwrap()
}

#[test]
fn stores_of_all_formats_have_the_same_fields() {
    for name in STORES {
        let fields = lenient().open(store(name)).unwrap();
        let mut channels = fields.channels().to_vec();
        channels.sort();
        assert_eq!(channels, ["orography", "t2m", "z@500", "z@850"], "{name}");
        let last = if name == "v3.zarr" { 24.0 } else { 18.0 };
        let hours = [0.0, 6.0, 12.0, last].map(|hours| START + hours * HOUR);
        assert_eq!(fields.times(), hours, "{name}");
        let mut expected = expected(&*fields);
        if name == "packed.nc" {
            let t2m = fields
                .channels()
                .iter()
                .position(|name| name == "t2m")
                .unwrap();
            expected[[2, t2m, 3, 4]] = f32::NAN;
        }
        let found = whole(&*fields);
        let mut pairs = found.indexed_iter().zip(&expected);
        let differs = pairs.find(|((_, found), expected)| found.to_bits() != expected.to_bits());
        assert_eq!(differs, None, "{name}");
    }
    // Rows and columns keep the order of the file.
    let grid = |name| open(store(name)).map(|fields| fields.grid().clone());
    assert_eq!(
        grid("v2.zarr").unwrap().lat(),
        [-90.0, -45.0, 0.0, 45.0, 90.0]
    );
    let config = OpenConfig::new().with_gaps(Gaps::Skip);
    let grid = config.open(store("v3.zarr")).unwrap().grid().clone();
    assert_eq!(
        grid.lon(),
        [180.0, 225.0, 270.0, 315.0, 0.0, 45.0, 90.0, 135.0]
    );
    assert_eq!(grid.lat()[0], 90.0);
}

#[test]
fn a_box_has_the_values_of_the_whole() {
    for name in STORES {
        let fields = lenient().open(store(name)).unwrap();
        let whole = whole(&*fields);
        for cells in [
            [0..1, 0..4, 0..2, 0..8],
            [1..4, 1..3, 2..5, 3..7],
            [3..4, 2..4, 4..5, 7..8],
            [2..2, 0..4, 0..5, 0..8],
            [0..4, 3..3, 0..5, 0..8],
        ] {
            let [times, channels, rows, columns] = cells.clone();
            let part = whole.slice(s![times, channels, rows, columns]);
            let found = fields.read(cells.clone()).unwrap();
            let pairs = found.iter().zip(part);
            assert_eq!(found.shape(), part.shape());
            let same = pairs
                .filter(|(found, part)| found.to_bits() == part.to_bits())
                .count();
            assert_eq!(same, found.len(), "{name} {cells:?}");
        }
        let error = fields
            .read([0..1, 0..1, 0..6, 0..8])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("expected a shape that holds the cells"),
            "{error}"
        );
    }
}

#[test]
fn channels_are_chosen_by_name() {
    for name in STORES {
        let choose = |channels: &[&str]| {
            let config = OpenConfig::of_channels(channels)
                .with_missing(Missing::Allow)
                .with_gaps(Gaps::Allow);
            config.open(store(name))
        };
        let fields = choose(&["z@500", "orography", "z@850"]).unwrap();
        assert_eq!(fields.channels(), ["z@500", "orography", "z@850"], "{name}");
        assert_eq!(whole(&*fields), expected(&*fields), "{name}");
        assert_eq!(
            choose(&["z"]).unwrap().channels(),
            ["z@850", "z@500"],
            "{name}"
        );
        let message = |channels: &[&str]| choose(channels).unwrap_err().to_string();
        assert!(message(&["z@500", "q"]).starts_with("channels: got q, expected channels of "));
        assert!(
            message(&["z", "z@850"]).starts_with("channels: got z@850, expected"),
            "{name}"
        );
        assert!(
            message(&["t2m", "t2m"]).starts_with("channels: got t2m, expected"),
            "{name}"
        );
        let nothing = message(&["humidity"]);
        assert!(
            nothing.contains("none of humidity, expected some of"),
            "{nothing}"
        );
    }
    let nothing = OpenConfig::of_channels(&["station"]).open(store("packed.nc"));
    let nothing = nothing.unwrap_err().to_string();
    assert!(
        nothing.contains("no field among [station (dims [\"station\"])]"),
        "{nothing}"
    );
}

#[test]
fn missing_values_are_an_error_unless_allowed() {
    let packed = open(store("packed.nc")).unwrap();
    let t2m = packed
        .channels()
        .iter()
        .position(|name| name == "t2m")
        .unwrap();
    assert!(packed.read([0..2, t2m..t2m + 1, 0..5, 0..8]).is_ok());
    let error = packed.read([1..4, t2m..t2m + 1, 2..5, 1..8]).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("dataset \"t2m\"[2, 3, 4]: found -32768.0, which is the _FillValue"),
        "{error}"
    );
}

#[test]
fn reads_are_counted_in_chunks() {
    let traffic = |name: &str, channel: &str, cells: [std::ops::Range<usize>; 2]| {
        let config = OpenConfig::of_channels(&[channel]).with_gaps(Gaps::Allow);
        // Uses a copy, because chunks decoded by other tests are not counted.
        let (_folder, path) = copy(name);
        let fields = config.open(path).unwrap();
        assert_eq!(fields.traffic().fetched, 0);
        let [rows, columns] = cells;
        fields.read([0..1, 0..1, rows, columns]).unwrap();
        fields.traffic()
    };
    // Shards of 6 rows and 8 columns, whose chunks have 3 rows and 4 columns.
    let fits = traffic("v3.zarr", "t2m", [0..3, 0..4]);
    assert_eq!((fits.decoded, fits.needed), (48, 48));
    assert_eq!(fits.amplification(), 1.0);
    let more = traffic("v3.zarr", "t2m", [2..4, 0..4]);
    assert_eq!((more.decoded, more.needed), (5 * 4 * 4, 2 * 4 * 4));
    assert!(
        more.fetched > fits.fetched && fits.fetched > 0,
        "{fits} {more}"
    );
    // A chunk holds a whole time, whichever part of it is needed.
    let quarter = traffic("v2.zarr", "t2m", [0..5, 0..2]);
    assert_eq!(quarter.amplification(), 4.0);
    // Deflated chunks of 3 rows, with 2 bytes per value.
    let packed = traffic("packed.nc", "t2m", [0..1, 0..8]);
    assert_eq!((packed.decoded, packed.needed), (3 * 8 * 2, 8 * 2));
    // Without chunks, only the rows are read.
    let classic = traffic("classic.nc", "t2m", [1..3, 0..8]);
    assert_eq!(
        (classic.fetched, classic.decoded, classic.needed),
        (64, 64, 64)
    );
    assert!(
        classic.to_string().ends_with("read amplification 1.00"),
        "{classic}"
    );
}

#[test]
fn a_gap_is_an_error_or_a_choice() {
    let path = store("v3.zarr");
    let dataset = |config: &DatasetConfig| FieldDataset::open(&[&path], config);
    let error = dataset(&DatasetConfig::new()).unwrap_err().to_string();
    assert!(
        error.contains("dataset \"time\"[3]: found a time step of 12 h, expected 6 h"),
        "{error}"
    );
    let presents = |config: DatasetConfig| {
        let dataset = dataset(&config).unwrap();
        let hours = |sample| (dataset.time(sample) - START) / HOUR;
        let pairs = (0..dataset.len()).map(|sample| (hours(sample), dataset.lead(sample)));
        pairs.collect::<Vec<_>>()
    };
    let config = DatasetConfig::new();
    let skip = config.clone().with_gaps(Gaps::Skip);
    assert_eq!(presents(skip.clone()), [(0.0, 6.0), (6.0, 6.0)]);
    let allow = config.with_gaps(Gaps::Allow);
    assert_eq!(
        presents(allow.clone()),
        [(0.0, 6.0), (6.0, 6.0), (12.0, 12.0)]
    );
    let by_time = allow.with_lead_hours(Some(12.0));
    assert_eq!(presents(by_time.clone()), [(0.0, 12.0), (12.0, 12.0)]);
    let dataset = dataset(&by_time).unwrap();
    assert_eq!(dataset.find(START + 12.0 * HOUR), Some(1));
    assert_eq!(dataset.find(START + 6.0 * HOUR), None);
    let sample = dataset.sample(1).unwrap();
    assert_eq!((sample.time, sample.lead), (START + 12.0 * HOUR, 12.0));
    let message = |hours| {
        let config = skip.clone().with_lead_hours(Some(hours));
        FieldDataset::open(&[&path], &config)
            .unwrap_err()
            .to_string()
    };
    assert!(
        message(5.0).contains("the time step is 6 h"),
        "{}",
        message(5.0)
    );
    assert!(message(-6.0).starts_with("lead_hours: got -6"));
    // Increments over the gap, which are 1000 K for t2m, are left out too.
    let config = OpenConfig::of_channels(&["t2m"]).with_gaps(Gaps::Skip);
    let statistics = Statistics::compute(&[config.open(&path).unwrap()], 1).unwrap();
    assert_eq!(statistics.increment_means(), [1000.0]);
    assert_eq!(statistics.metadata().time_step(), 6.0 * HOUR);
}

#[test]
fn files_of_any_format_make_one_time_axis() {
    let folder = tempfile::tempdir().unwrap();
    // Files at six-hour intervals, on the grid of the stores; the first channel is called z0.
    let paths = ["1.h5", "2.h5"].map(|name| folder.path().join(name));
    let config = WriterConfig::new();
    write(&paths[0], &numbered([2, 1, 5, 8], 0.0), &config);
    let later = numbered([3, 1, 5, 8], 5e4);
    let mut writer = FieldWriter::create(&paths[1], &grid(5, 8), &["z0"], &config).unwrap();
    for (index, field) in later.outer_iter().enumerate() {
        writer
            .append((index + 2) as f64 * 6.0 * HOUR, field)
            .unwrap();
    }
    writer.finish().unwrap();
    // The order of paths does not matter.
    let [first, second] = &paths;
    let joined = OpenConfig::new().open_joined(&[second, first]).unwrap();
    assert_eq!(
        joined.times(),
        [0.0, 6.0, 12.0, 18.0, 24.0].map(|hours| hours * HOUR)
    );
    let parts = [numbered([2, 1, 5, 8], 0.0), later];
    let all = ndarray::concatenate![ndarray::Axis(0), parts[0], parts[1]];
    assert_eq!(whole(&*joined), all);
    let part = joined.read([1..3, 0..1, 1..4, 2..8]).unwrap();
    assert_eq!(part, all.slice(s![1..3, .., 1..4, 2..8]));
    let config = DatasetConfig::new().with_history(2);
    let separate = FieldDataset::open(&paths, &config).unwrap();
    let config = config.with_series(Series::Joined);
    let dataset = FieldDataset::open(&paths, &config).unwrap();
    assert_eq!((separate.len(), dataset.len()), (1, 3));
    assert_eq!(
        dataset.sample(1).unwrap().target,
        all.slice(s![3, .., .., ..])
    );
    let message = |paths: &[PathBuf]| {
        OpenConfig::new()
            .open_joined(paths)
            .unwrap_err()
            .to_string()
    };
    let twice = message(&[paths[0].clone(), paths[0].clone()]);
    assert!(
        twice.contains("first time: found 1970-01-01 00:00:00, expected a time after the last one"),
        "{twice}"
    );
    let other = message(&[paths[0].clone(), store("classic.nc")]);
    let told = "classic.nc: times of other channels: found";
    assert!(other.contains(told), "{other}");
    assert!(message(&[]).contains("at least one field file or store"));
}

/// Bits, times and leads of a batch.
type Read = (Vec<u32>, Vec<f64>, Vec<Vec<f64>>);

#[test]
fn ranks_that_read_their_boxes_have_the_batches_of_one_reader() {
    let load = |source, ranks: usize| {
        let batches = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", ranks)])?;
            let config = LoaderConfig::new(2).with_source(source);
            let loader = FieldLoader::new(&mesh, &[Shard(2)], &config, || {
                let config = DatasetConfig::new().with_gaps(Gaps::Allow);
                FieldDataset::open(&[store("v3.zarr")], &config)
            })?;
            let read = |batch: halocline_core::Result<Batch>| -> halocline_core::Result<Read> {
                let batch = batch?;
                let bits = [&batch.input, &batch.target]
                    .into_iter()
                    .flat_map(|tensor| {
                        let whole = tensor.full_tensor();
                        let values: Vec<f32> = whole.to_data().try_to_vec().unwrap();
                        values.into_iter().map(f32::to_bits)
                    });
                Ok((bits.collect(), batch.times, batch.leads))
            };
            let batches = loader.epoch(0).map(read).collect::<Result<Vec<_>, _>>()?;
            let traffic = loader.traffic();
            let reads = source == Source::PerRank || world.rank() == 0;
            assert_eq!(traffic.needed > 0, reads, "{traffic}");
            Ok(batches)
        });
        batches.unwrap()
    };
    let reference = load(Source::Scatter, 1);
    let (_, times, leads) = &reference[0][0];
    assert_eq!(times[..], [START, START + 6.0 * HOUR]);
    assert_eq!(leads[..], [[6.0], [6.0]]);
    for ranks in 2..=4 {
        for source in [Source::Scatter, Source::PerRank] {
            for batches in load(source, ranks) {
                assert_eq!(batches, reference[0], "{source:?} on {ranks}");
            }
        }
    }
}

/// Copies a store into a folder of its own.
pub(crate) fn copy(name: &str) -> (tempfile::TempDir, PathBuf) {
    fn copy_folder(from: &Path, to: &Path) {
        std::fs::create_dir(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let to = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy_folder(&entry.path(), &to)
            } else {
                std::fs::copy(entry.path(), to).unwrap();
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    if store(name).is_dir() {
        copy_folder(&store(name), &path)
    } else {
        std::fs::copy(store(name), &path).unwrap();
    }
    (folder, path)
}

/// Replaces text in a file of a store.
pub(crate) fn replace(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn stores_that_are_not_understood_are_refused() {
    let message = |change: &dyn Fn(&Path)| {
        let (_folder, path) = copy("v2.zarr");
        change(&path);
        open(&path).unwrap_err().to_string()
    };
    let time = |from: &'static str, to: &'static str| {
        message(&|path: &Path| replace(&path.join("time/.zattrs"), from, to))
    };
    let error = time("\"units\"", "\"calendar\": \"none\", \"units\"");
    assert!(
        error.contains("dataset \"time\": found calendar = \"none\", expected standard"),
        "{error}"
    );
    let error = time("\"units\"", "\"unit\"");
    assert!(
        error.contains("found units = none") && error.contains("OpenConfig::with_time_units"),
        "{error}"
    );
    let error = message(&|path| {
        replace(
            &path.join("latitude/.zarray"),
            "\"shape\": [\n    5",
            "\"shape\": [\n    6",
        )
    });
    assert!(error.contains("expected [6] values of latitude"), "{error}");
    let error = message(&|path| std::fs::remove_dir_all(path.join("latitude")).unwrap());
    assert!(error.contains("no field among ["), "{error}");
    let error = message(&|path| replace(&path.join("t2m/.zarray"), "<f4", "<f5"));
    assert!(
        error.contains("\"t2m\": ") && error.contains("choose channels by name"),
        "{error}"
    );
    let error = message(&|path| {
        replace(
            &path.join("t2m/.zarray"),
            "\"chunks\": [\n    1",
            "\"chunks\": [\n    99999999999",
        )
    });
    assert!(error.contains("chunks of [99999999999, 8, 5]"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let error = open(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("a folder without the metadata of a Zarr group"),
        "{error}"
    );
    for (content, expected) in [
        ("CDF\u{9}, or not", "neither NetCDF nor HDF5"),
        (
            "GRIB, edition 2",
            "a GRIB file, which is not read; convert it first",
        ),
    ] {
        let file = folder.path().join("file");
        std::fs::write(&file, content).unwrap();
        let error = open(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let later = lenient().with_period(Some(Period::since("2020-01-01")));
    for error in [
        later.open_joined(&[store("v2.zarr")]).err().unwrap(),
        later.open_each(&[store("v2.zarr")]).err().unwrap(),
    ] {
        let error = error.to_string();
        for part in [
            "period: got from 2020-01-01",
            "times 2018-01-01 00:00:00 to 2018",
            "v2.zarr",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
    // The others can be read.
    let (_folder, path) = copy("v2.zarr");
    replace(&path.join("t2m/.zarray"), "<f4", "<f5");
    let fields = OpenConfig::of_channels(&["z@500"]).open(&path).unwrap();
    assert_eq!(whole(&*fields), expected(&*fields));
    // Units set by the configuration; an absent chunk has the fill value, which is missing.
    replace(&path.join("time/.zattrs"), "\"units\"", "\"unit\"");
    std::fs::remove_file(path.join("z/0.1.0.0")).unwrap();
    let config =
        OpenConfig::of_channels(&["z@500"]).with_time_units(Some("days since 1970-1-1".into()));
    let fields = config.open(&path).unwrap();
    assert_eq!(fields.times()[1], 6.0 * 86400.0);
    let error = fields
        .read([0..1, 0..1, 0..5, 0..8])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("dataset \"z\"[0, 1, 0, 0]: found NaN"),
        "{error}"
    );
}
