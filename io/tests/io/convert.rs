//! Conversion of all formats into stores and files.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::SystemTime;

use halocline_io::{
    Calendar, ConvertConfig, Existing, Fields, Missing, OpenConfig, OutputConfig, OutputFormat,
    amplification, convert,
};

use crate::formats::{copy, lenient, replace, store};
use crate::{grid, listing, numbered_file};

const SOURCES: [&str; 4] = ["v2.zarr", "v3.zarr", "packed.nc", "classic.nc"];

/// Returns the configuration of a conversion into a format.
fn into_format(format: OutputFormat) -> ConvertConfig {
    ConvertConfig::new().with_output(OutputConfig::new().with_format(format))
}

fn bits(fields: &dyn Fields) -> Vec<u32> {
    let values = fields.read(fields.shape().map(|size| 0..size)).unwrap();
    values.iter().map(|value| value.to_bits()).collect()
}

/// Opens fields with the channels of a source, in the order of the source.
fn reopened(path: &std::path::Path, source: &dyn Fields) -> Box<dyn Fields> {
    let channels = source.channels().to_vec();
    lenient().with_channels(Some(channels)).open(path).unwrap()
}

#[test]
fn every_source_has_the_same_values_in_every_format() {
    for name in SOURCES {
        let source = lenient().open(store(name)).unwrap();
        for format in [
            OutputFormat::Zarr3,
            OutputFormat::Zarr2,
            OutputFormat::NetCdf3,
        ] {
            for (chunk, memory) in [(None, 256 << 20), (Some([2, 3, 3]), 18 * 24)] {
                let chunk = chunk.filter(|_| format != OutputFormat::NetCdf3);
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("converted");
                let output = OutputConfig::new().with_format(format).with_chunk(chunk);
                let config = ConvertConfig::new()
                    .with_output(output)
                    .with_ranks([2, 2])
                    .with_memory(memory);
                let mut states = Vec::new();
                let done = convert(&source, &path, &config, |state| states.push(state)).unwrap();
                assert_eq!(
                    (done.done, done.resumed),
                    (done.blocks, 0),
                    "{name} {format:?}"
                );
                assert_eq!(states.len(), done.blocks);
                assert_eq!(listing(folder.path()), ["converted"]);
                let found = reopened(&path, &*source);
                assert_eq!(found.times(), source.times(), "{name} {format:?}");
                assert_eq!(found.grid(), source.grid(), "{name} {format:?}");
                assert_eq!(bits(&*found), bits(&*source), "{name} {format:?} {chunk:?}");
                let statics = |fields: &dyn Fields| {
                    let count = fields.channels().len();
                    (0..count)
                        .map(|index| fields.describe(index).is_static)
                        .collect::<Vec<_>>()
                };
                assert_eq!(statics(&*found), statics(&*source));
                if chunk.is_none() && format != OutputFormat::NetCdf3 {
                    assert_eq!(amplification(&found, [2, 2]), 1.0, "{name} {format:?}");
                }
                assert_eq!(lenient().open(&path).unwrap().channels(), source.channels());
            }
        }
    }
}

#[test]
fn an_interrupted_conversion_to_netcdf_goes_on() {
    let source = lenient().open(store("v2.zarr")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.nc");
    let config = into_format(OutputFormat::NetCdf3).with_memory(40 * 24);
    stop(&source, &path, &config);
    assert!(!path.exists());
    let done = convert(&source, &path, &config, |_| ()).unwrap();
    assert!(done.resumed >= 1 && done.done == done.blocks, "{done:?}");
    assert_eq!(bits(&*reopened(&path, &*source)), bits(&*source));
    assert_eq!(listing(folder.path()), ["converted.nc"]);
}

#[test]
fn an_interrupted_conversion_goes_on() {
    let source = lenient().open(store("v2.zarr")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.zarr");
    let config = ConvertConfig::new().with_memory(40 * 24); // one field at a time
    stop(&source, &path, &config);
    assert!(lenient().open(&path).is_err());
    let left = listing(folder.path());
    assert_eq!(left, [".halocline-converted.zarr.partial"]);
    // The first block was recorded.
    let done = convert(&source, &path, &config, |_| ()).unwrap();
    assert!(done.resumed >= 1 && done.done == done.blocks, "{done:?}");
    assert_eq!(bits(&*reopened(&path, &*source)), bits(&*source));

    // Another configuration starts over, and replaces the existing output only at its end.
    let output = OutputConfig::new().with_existing(Existing::Replace);
    let other = config.clone().with_output(output.clone());
    stop(&source, &path, &other);
    assert_eq!(bits(&*reopened(&path, &*source)), bits(&*source));
    let rechunked = other.with_output(output.with_chunk(Some([1, 2, 3])));
    let done = convert(&source, &path, &rechunked, |_| ()).unwrap();
    assert_eq!(done.resumed, 0);
    let found = reopened(&path, &*source);
    assert_eq!(found.describe(0).chunk, Some([1, 1, 2, 3]));
    assert_eq!(bits(&*found), bits(&*source));
    assert_eq!(listing(folder.path()), ["converted.zarr"]);
}

#[test]
fn calendars_are_kept() {
    let (folder, source) = copy("v2.zarr");
    let (units, calendar) = ("\"units\"", "\"calendar\": \"365_day\", \"units\"");
    replace(&source.join("time/.zattrs"), units, calendar);
    let source = lenient().open(source).unwrap();
    assert_eq!(source.calendar(), Calendar::NoLeap);
    for format in [OutputFormat::Zarr3, OutputFormat::NetCdf3] {
        let path = folder.path().join(format!("{format:?}"));
        convert(&source, &path, &into_format(format), |_| ()).unwrap();
        let found = lenient().open(&path).unwrap();
        assert_eq!(
            (found.calendar(), found.times()),
            (Calendar::NoLeap, source.times())
        );
    }
    let standard = lenient().open(store("v2.zarr")).unwrap();
    assert_eq!(
        source.times()[1] - source.times()[0],
        standard.times()[1] - standard.times()[0]
    );
    let t2m = lenient().with_channels(Some(vec!["t2m".into()]));
    let joined = t2m.open_joined(&[store("v2.zarr"), source.path().into()]);
    let error = joined.unwrap_err().to_string();
    assert!(error.contains("calendar: found"), "{error}");
}

#[test]
fn levels_keep_their_name_and_direction() {
    let (folder, source) = copy("v2.zarr");
    let attributes = "\"units\": \"m\", \"positive\": \"down\", \"standard_name\": \"depth\"";
    replace(
        &source.join("level/.zattrs"),
        "\"units\": \"hPa\"",
        attributes,
    );
    let source = lenient().open(source).unwrap();
    for format in [OutputFormat::Zarr3, OutputFormat::NetCdf3] {
        let path = folder.path().join(format!("{format:?}"));
        convert(&source, &path, &into_format(format), |_| ()).unwrap();
        let z = OpenConfig::of_channels(&["z@850"]).open(&path).unwrap();
        let level = z.describe(0);
        let texts = [
            level.level_units,
            level.level_positive,
            level.level_standard_name,
        ];
        assert_eq!(
            texts,
            ["m", "down", "depth"].map(|text| Some(text.to_string()))
        );
    }
}

#[test]
fn fields_without_a_time_are_written_without_one() {
    let source = lenient().open(store("latin1.nc")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for format in [
        OutputFormat::Zarr3,
        OutputFormat::Zarr2,
        OutputFormat::NetCdf3,
    ] {
        let path = folder.path().join(format!("{format:?}"));
        convert(&source, &path, &into_format(format), |_| ()).unwrap();
        let found = lenient().open(&path).unwrap();
        // A coordinate with one time would be taken for the time of the field.
        assert!(found.is_undated(), "{format:?}");
        if format == OutputFormat::NetCdf3 {
            let file = std::fs::read(&path).unwrap();
            assert_eq!(file[4..8], [0; 4], "number of records");
            assert!(!file.windows(4).any(|text| text == b"time"));
        }
        assert_eq!(bits(&*found), bits(&*source), "{format:?}");
    }
}

/// Runs a conversion that stops after some blocks.
fn stop(source: &impl Fields, path: &std::path::Path, config: &ConvertConfig) {
    let stop = || {
        convert(source, path, config, |state| {
            assert!(state.done < 2, "stop")
        })
    };
    catch_unwind(AssertUnwindSafe(stop)).unwrap_err();
}

#[test]
fn blocks_of_another_choice_of_missing_values_are_not_taken() {
    let open = |missing| {
        lenient()
            .with_missing(missing)
            .open(store("v2.zarr"))
            .unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.zarr");
    let config = ConvertConfig::new().with_memory(40 * 24);
    stop(&open(Missing::Allow), &path, &config);
    let done = convert(&open(Missing::Fill), &path, &config, |_| ()).unwrap();
    assert_eq!((done.resumed, done.done), (0, done.blocks));
}

#[test]
fn blocks_of_a_source_that_was_rewritten_are_not_taken() {
    for name in ["classic.nc", "v2.zarr"] {
        let (folder, path) = copy(name);
        let target = folder.path().join("converted.zarr");
        let config = ConvertConfig::new().with_memory(40 * 24);
        let source = lenient().open(&path).unwrap();
        stop(&source, &target, &config);
        let written = if path.is_dir() {
            path.join("t2m/.zarray")
        } else {
            path
        };
        let written = File::options().write(true).open(written).unwrap();
        written.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let done = convert(&source, &target, &config, |_| ()).unwrap();
        assert_eq!((done.resumed, done.done), (0, done.blocks), "{name}");
    }
}

#[test]
fn a_damaged_journal_is_none() {
    let source = lenient().open(store("v2.zarr")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.zarr");
    let config = ConvertConfig::new().with_memory(40 * 24);
    stop(&source, &path, &config);
    let journal = folder
        .path()
        .join(".halocline-converted.zarr.partial/.journal");
    let text = std::fs::read_to_string(&journal).unwrap();
    std::fs::write(&journal, text.replace("\"done\":1", "\"done\":99999")).unwrap();
    let done = convert(&source, &path, &config, |_| ()).unwrap();
    assert_eq!((done.resumed, done.done), (0, done.blocks));
    assert_eq!(bits(&*reopened(&path, &*source)), bits(&*source));
}

#[test]
fn mistakes_are_errors() {
    let source = lenient().open(store("v2.zarr")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.zarr");
    let error = |config: &ConvertConfig| {
        convert(&source, &path, config, |_| ())
            .unwrap_err()
            .to_string()
    };
    let output = |chunk| ConvertConfig::new().with_output(OutputConfig::new().with_chunk(chunk));
    assert!(error(&output(Some([0, 1, 1]))).starts_with("chunk: got [0, 1, 1]"));
    assert!(error(&ConvertConfig::new().with_ranks([0, 1])).starts_with("ranks: got [0, 1]"));
    let netcdf = OutputConfig::new().with_format(OutputFormat::NetCdf3);
    let chunked = ConvertConfig::new().with_output(netcdf.with_chunk(Some([1, 2, 2])));
    assert!(error(&chunked).contains("a NetCDF-3 file has no chunks"));
    for name in ["converted.h5", "converted.hdf5"] {
        let path = folder.path().join(name);
        let error = convert(&source, &path, &ConvertConfig::new(), |_| ()).unwrap_err();
        let error = error.to_string();
        let told = "another ending, such as .zarr or .nc";
        assert!(error.contains(told), "{error}");
    }
    let little = error(&ConvertConfig::new().with_memory(200));
    assert!(
        little.contains("expected at least 40 for a chunk"),
        "{little}"
    );
    std::fs::write(&path, "mine").unwrap();
    assert!(error(&ConvertConfig::new()).contains("it is there already"));
    assert_eq!(listing(folder.path()), ["converted.zarr"]);
    // Missing values are an error if the source rejects them.
    let strict = OpenConfig::of_channels(&["t2m"])
        .open(store("packed.nc"))
        .unwrap();
    let target = folder.path().join("other.zarr");
    let error = convert(&strict, &target, &ConvertConfig::new(), |_| ()).unwrap_err();
    assert!(
        error.to_string().contains("expected a finite value"),
        "{error}"
    );
    assert!(!target.exists());
}

#[test]
fn errors_about_a_channel_list_all_others_and_no_coordinates() {
    let (folder, source) = numbered_file([3, 2, 4, 5]);
    let path = folder.path().join("converted.zarr");
    let source = OpenConfig::new().open(&source).unwrap();
    convert(&source, &path, &ConvertConfig::new(), |_| ()).unwrap();
    let message = |channels: &[&str]| {
        // Another grid than that of the file.
        let config = OpenConfig::of_channels(channels).with_grid(Some(grid(3, 4)));
        config.open(&path).unwrap_err().to_string()
    };
    let expected = "/converted.zarr, each once: z0, z1";
    assert!(message(&["z0", "q"]).ends_with(expected));
    assert!(message(&["q"]).ends_with("found none of q, expected some of its channels z0, z1"));
}
