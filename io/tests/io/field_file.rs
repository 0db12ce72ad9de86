use std::path::Path;

use halocline_io::{DatasetConfig, FieldDataset, FieldFile, FieldWriter, Missing, WriterConfig};
use hdf5_metno::types::FixedAscii;
use ndarray::{Array3, Array4, s};
use proptest::prelude::*;

use crate::{STEP, edit, grid, numbered, numbered_file, write};

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    for deflate in [0, 9] {
        let path = folder.path().join("2018.h5");
        let fields = numbered([3, 2, 7, 9], 0.5);
        let config = WriterConfig::new()
            .with_deflate(deflate)
            .with_chunk(Some([2, 1, 3, 4]));
        write(&path, &fields, &config);
        let file = FieldFile::open(&path).unwrap();
        assert_eq!(file.read([0..3, 0..2, 0..7, 0..9]).unwrap(), fields);
        assert_eq!(file.times(), [0.0, STEP, 2.0 * STEP]);
        assert_eq!(file.time_step().unwrap(), STEP);
        assert_eq!(file.channels(), ["z0", "z1"]);
        assert_eq!(file.grid(), &grid(7, 9));
        let raw = hdf5_metno::File::open(&path)
            .unwrap()
            .dataset("fields")
            .unwrap();
        assert_eq!(raw.chunk(), Some(vec![2, 1, 3, 4]));
        // The last one is the checksum.
        assert_eq!(raw.filters().len(), if deflate > 0 { 3 } else { 1 });
    }
}

#[test]
fn smooth_fields_are_stored_small() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let fields = Array4::from_shape_fn((1, 1, 181, 360), |(_, _, i, _)| i as f32);
    write(&path, &fields, &WriterConfig::new());
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert!(bytes < 181 * 360 * 4 / 4, "{bytes} bytes");
}

#[test]
fn boxes_are_read_as_they_lie() {
    let shape = [5, 3, 7, 9];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let fields = numbered(shape, 0.0);
    write(
        &path,
        &fields,
        &WriterConfig::new().with_chunk(Some([2, 2, 3, 4])),
    );
    let file = FieldFile::open(&path).unwrap();
    let range = |size: usize| (0..=size, 0..=size).prop_map(|(a, b)| a.min(b)..a.max(b));
    proptest!(|(t in range(5), c in range(3), i in range(7), j in range(9))| {
        let read = file.read([t.clone(), c.clone(), i.clone(), j.clone()]).unwrap();
        prop_assert_eq!(read, fields.slice(s![t, c, i, j]));
    });
    let error = file.read([0..5, 0..3, 2..8, 0..9]).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "{}: dataset \"fields\": found [5, 3, 7, 9], expected a shape that holds the cells [0..5, 0..3, 2..8, 0..9]",
            path.display()
        )
    );
}

#[test]
fn several_threads_read_one_file() {
    let shape = [6, 2, 11, 13];
    let (_folder, path) = numbered_file(shape);
    let file = FieldFile::open(&path).unwrap();
    let fields = numbered(shape, 0.0);
    std::thread::scope(|scope| {
        for time in 0..6 {
            let (file, fields, path) = (&file, &fields, &path);
            scope.spawn(move || {
                for _ in 0..20 {
                    let cells = [time..time + 1, 0..2, time..11, 0..13];
                    let expected = fields.slice(s![time..time + 1, .., time.., ..]);
                    assert_eq!(file.read(cells.clone()).unwrap(), expected);
                    assert_eq!(
                        FieldFile::open(path).unwrap().read(cells).unwrap(),
                        expected
                    );
                }
            });
        }
    });
}

#[test]
fn names_of_fixed_length_are_read() {
    let (_folder, path) = numbered_file([2, 2, 3, 4]);
    edit(&path, |file| {
        file.unlink("channel").unwrap();
        let names = ["u10m", "t2m"].map(|name| FixedAscii::<8>::from_ascii(name).unwrap());
        file.new_dataset_builder()
            .with_data(&names)
            .create("channel")
            .unwrap();
    });
    assert_eq!(FieldFile::open(&path).unwrap().channels(), ["u10m", "t2m"]);
}

/// Returns the error message of opening a file after a change, without the path.
fn message_after(change: impl FnOnce(&hdf5_metno::File)) -> String {
    let (_folder, path) = numbered_file([3, 2, 4, 5]);
    edit(&path, change);
    let error = FieldFile::open(&path).unwrap_err().to_string();
    let (file, message) = error.split_once(": ").unwrap();
    assert_eq!(Path::new(file), path);
    message.into()
}

#[test]
fn a_missing_dataset_is_named() {
    assert_eq!(
        message_after(|file| file.unlink("timestamp").unwrap()),
        "no dataset \"timestamp\"; expected fields, timestamp, channel, lat and lon, \
         or a data.json of Makani near the file for the last four, found [\"channel\", \"fields\", \"lat\", \"lon\"]"
    );
}

#[test]
fn another_shape_or_type_is_named() {
    let replace = |name: &'static str, shape: &'static [usize]| {
        message_after(move |file| {
            file.unlink(name).unwrap();
            file.new_dataset::<f32>().shape(shape).create(name).unwrap();
        })
    };
    assert_eq!(
        replace("fields", &[3, 4, 5]),
        "dataset \"fields\": found [3, 4, 5], expected 4 dims [time, channel, lat, lon]"
    );
    assert_eq!(
        replace("lat", &[5]),
        "dataset \"lat\": found [5], expected [4] for fields [3, 2, 4, 5]"
    );
    assert_eq!(
        replace("lon", &[5]),
        "dataset \"lon\": found 5 values from 0 to 0, \
         expected strictly rising degrees within one turn, such as from 0 to less than 360 or from -180 to less than 180"
    );
    assert_eq!(
        replace("timestamp", &[3]),
        "dataset \"timestamp\"[1]: found 1970-01-01 00:00:00, expected a time after \
         1970-01-01 00:00:00; sort the times, and drop those that repeat"
    );
    assert_eq!(
        replace("channel", &[2]),
        "dataset \"channel\": expected strings, found float32"
    );
    let positions = message_after(|file| {
        file.unlink("fields").unwrap();
        let fields = file.new_dataset::<f32>().shape((3, 2, 1000, 1000));
        fields.create("fields").unwrap();
        for name in ["cell_latitude", "cell_longitude"] {
            let positions = file.new_dataset::<f32>().shape((1000, 1000));
            positions.create(name).unwrap();
        }
    });
    let told = "dataset \"cell_latitude\": found 1000000 values, expected values that a file of";
    assert!(positions.starts_with(told), "{positions}");
    let integers = message_after(|file| {
        file.unlink("fields").unwrap();
        file.new_dataset::<i16>()
            .shape((3, 2, 4, 5))
            .create("fields")
            .unwrap();
    });
    assert_eq!(
        integers,
        "dataset \"fields\": found values of type int16, \
         expected floating point values, or integers of at most 32 bits with scale_factor or add_offset"
    );
}

#[test]
fn a_file_that_is_not_whole_is_named() {
    let (folder, path) = numbered_file([3, 2, 4, 5]);
    let whole = std::fs::read(&path).unwrap();
    for length in [whole.len() - 1, whole.len() / 2, 100, 0] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = FieldFile::open(&path).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}: not a complete HDF5 file (", path.display()))
                && error.ends_with("was its writer or a copy interrupted?"),
            "{error}"
        );
    }
    let absent = folder.path().join("2019.h5");
    let error = FieldFile::open(&absent).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{}: No such file", absent.display())),
        "{error}"
    );
}

#[test]
fn what_is_no_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| FieldFile::open(path).unwrap_err().to_string();
    assert_eq!(
        message(folder.path()),
        format!(
            "{}: it is a folder; expected a field file, one of HDF5 such as 2018.h5",
            folder.path().display()
        )
    );
    assert_eq!(
        message(Path::new("/dev/zero")),
        "/dev/zero: it is not a regular file; expected a field file, one of HDF5 such as 2018.h5"
    );
}

#[test]
fn values_of_other_files_are_refused() {
    let (folder, victim) = numbered_file([3, 2, 4, 5]);
    let secret = folder.path().join("secret");
    std::fs::write(&secret, [7; 480]).unwrap();
    let found = |change: &dyn Fn(&hdf5_metno::File)| {
        let message = message_after(|file| {
            file.unlink("fields").unwrap();
            change(file);
        });
        let expected = ", expected a dataset with its values in this file, as one with them elsewhere could read any \
                        file of this machine; copy them into it, or open the files that have them, \
                        of which a FieldDataset takes several";
        let found = message.strip_prefix("dataset \"fields\": found ");
        found
            .and_then(|m| m.strip_suffix(expected))
            .map(str::to_string)
            .ok_or(message)
    };
    let other = victim.to_str().unwrap();
    assert_eq!(
        found(&|file| file.link_external(other, "fields", "fields").unwrap()),
        Ok("a link to another file".into())
    );
    assert_eq!(
        found(&|file| {
            file.link_external(other, "/", "other").unwrap();
            file.link_soft("/other/fields", "fields").unwrap();
        }),
        Ok("a soft link".into())
    );
    assert_eq!(
        found(&|file| {
            let dataset = file.new_dataset::<f32>().shape((3, 2, 4, 5));
            let dataset = dataset.external(secret.to_str().unwrap(), 0, 480);
            dataset.create("fields").unwrap();
        }),
        Ok("values in external files".into())
    );
    assert_eq!(
        found(&|file| {
            let dataset = file.new_dataset::<f32>().shape((3, 2, 4, 5));
            let shape = (3, 2, 4, 5);
            let dataset = dataset.virtual_map(other, "fields", shape, .., shape, ..);
            dataset.create("fields").unwrap();
        }),
        Ok("a virtual dataset".into())
    );
    // The same for coordinates.
    let message = message_after(|file| {
        file.unlink("timestamp").unwrap();
        file.link_external(other, "timestamp", "timestamp").unwrap();
    });
    assert!(
        message.starts_with("dataset \"timestamp\": found a link to another file"),
        "{message}"
    );
}

#[test]
fn longitudes_may_be_from_the_west_and_go_with_those_from_the_east() {
    let (_folder, path) = numbered_file([3, 2, 4, 5]);
    let other = path.with_file_name("2019.h5");
    std::fs::copy(&path, &other).unwrap();
    let east = [180.4_f64, 240.3, 300.2, 0.1, 60.0];
    let west = [-179.6_f32, -119.7, -59.8, 0.1, 60.0];
    edit(&path, |file| {
        file.unlink("lon").unwrap();
        file.new_dataset_builder()
            .with_data(&east)
            .create("lon")
            .unwrap();
    });
    edit(&other, |file| {
        file.unlink("lon").unwrap();
        file.new_dataset_builder()
            .with_data(&west)
            .create("lon")
            .unwrap();
    });
    let file = FieldFile::open(&other).unwrap();
    // Columns and their coordinates stay together.
    for (found, expected) in file.grid().lon().iter().zip(east) {
        assert!((found - expected).abs() < 1e-4, "{found} {expected}");
    }
    assert_eq!(
        file.read([0..1, 0..1, 0..1, 0..5]).unwrap()[[0, 0, 0, 3]],
        3.0
    );
    let dataset = FieldDataset::open(&[&path, &other], &DatasetConfig::new()).unwrap();
    assert_eq!(dataset.metadata().grid().lon(), east);
    // Round trip: the values that were read are written, and read again.
    let copy = path.with_file_name("copy.h5");
    let mut writer = FieldWriter::create(&copy, file.grid(), &["a"], &WriterConfig::new()).unwrap();
    writer.append(0.0, Array3::zeros((1, 4, 5)).view()).unwrap();
    writer.finish().unwrap();
    assert_eq!(FieldFile::open(&copy).unwrap().grid(), file.grid());
}

#[test]
fn a_damaged_chunk_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    // Noise does not compress, so the chunks make up most of the file.
    let noise = Array4::from_shape_fn((1, 1, 61, 90), |(_, _, i, j)| {
        ((i * 7919 + j * 104_729) as f32).sin()
    });
    write(&path, &noise, &WriterConfig::new());
    let mut bytes = std::fs::read(&path).unwrap();
    let chunk = hdf5_metno::File::open(&path)
        .unwrap()
        .dataset("fields")
        .unwrap();
    let chunk = chunk.chunk_info(0).unwrap();
    let middle = (chunk.addr + chunk.size / 2) as usize;
    bytes[middle..middle + 64].fill(0);
    std::fs::write(&path, bytes).unwrap();
    let file = FieldFile::open(&path).unwrap();
    let error = file
        .read([0..1, 0..1, 3..5, 0..90])
        .unwrap_err()
        .to_string();
    let expected = format!(
        "{}: dataset \"fields\"[0..1, 0..1, 3..5, 0..90]: ",
        path.display()
    );
    assert!(
        error.starts_with(&expected) && error.ends_with("is the file damaged?"),
        "{error}"
    );
}

#[test]
fn missing_values_are_found_where_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let mut fields = numbered([3, 2, 4, 5], 0.0);
    fields[[2, 1, 3, 0]] = f32::NAN;
    write(&path, &fields, &WriterConfig::new());
    let lenient = FieldFile::open(&path).unwrap().with_missing(Missing::Allow);
    assert!(lenient.read([1..3, 1..2, 2..4, 0..5]).unwrap()[[1, 0, 1, 0]].is_nan());
    let strict = FieldFile::open(&path).unwrap();
    assert!(strict.read([0..3, 0..2, 0..4, 1..5]).is_ok());
    assert_eq!(
        strict
            .read([1..3, 1..2, 2..4, 0..5])
            .unwrap_err()
            .to_string(),
        format!(
            "{}: dataset \"fields\"[2, 1, 3, 0]: found NaN, \
             expected a finite value (Missing::Allow reads missing ones as NaN)",
            path.display()
        )
    );
    fields[[2, 1, 3, 0]] = f32::INFINITY;
    let path = path.with_file_name("infinite.h5");
    write(&path, &fields, &WriterConfig::new());
    let infinite = FieldFile::open(&path).unwrap();
    let error = infinite.read([1..3, 1..2, 2..4, 0..5]).unwrap_err();
    let told = "found inf, expected a finite value; an infinite one is not missing";
    assert!(error.to_string().contains(told), "{error}");
}
