//! Attributes of the CF conventions, as written by h5py, netCDF and xarray.

use std::path::Path;

use halocline_io::{Calendar, FieldFile, Fields, Missing, Statistics, WriterConfig};
use hdf5_metno::types::{FixedAscii, VarLenUnicode};
use hdf5_metno::{Dataset, File, H5Type};
use ndarray::{Array4, ArrayView4};

use crate::{STEP, edit, numbered, numbered_file, write};

const SHAPE: [usize; 4] = [3, 2, 4, 5];
/// Index of the missing value in the files.
const AT: [usize; 4] = [1, 1, 2, 3];

/// Adds a scalar attribute to a dataset.
fn scalar<T: H5Type>(dataset: &Dataset, name: &str, value: T) {
    let attribute = dataset.new_attr::<T>().create(name).unwrap();
    attribute.write_scalar(&value).unwrap();
}

/// Adds an array attribute to a dataset, as netCDF does.
fn array<T: H5Type, const N: usize>(dataset: &Dataset, name: &str, values: [T; N]) {
    let attribute = dataset.new_attr_builder().with_data(&values);
    attribute.create(name).unwrap();
}

fn text(dataset: &Dataset, name: &str, value: &str) {
    scalar::<VarLenUnicode>(dataset, name, value.parse().unwrap());
}

/// Replaces a dataset with numbers of another type.
fn replace<'a, T: H5Type>(
    file: &File,
    name: &str,
    numbers: impl Into<ndarray::ArrayView<'a, T, ndarray::IxDyn>>,
) -> Dataset {
    file.unlink(name).unwrap();
    let numbers = numbers.into();
    file.new_dataset_builder()
        .with_data(numbers)
        .create(name)
        .unwrap()
}

fn replace_fields<T: H5Type>(file: &File, fields: &Array4<T>) -> Dataset {
    let view: ArrayView4<'_, T> = fields.view();
    replace(file, "fields", view.into_dyn())
}

fn replace_times<T: H5Type>(file: &File, times: &[T]) -> Dataset {
    replace(
        file,
        "timestamp",
        ndarray::ArrayView1::from(times).into_dyn(),
    )
}

fn message(path: &Path) -> String {
    let error = FieldFile::open(path).unwrap_err().to_string();
    error.replace(&format!("{}: ", path.display()), "")
}

/// Checks that a cell with this number is treated as missing because of the attributes.
fn check_missing(what: &str, number: f32, change: impl FnOnce(&File)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    let mut fields = numbered(SHAPE, 0.0);
    fields[AT] = number;
    write(&path, &fields, &WriterConfig::new());
    edit(&path, change);
    let lenient = || FieldFile::open(&path).unwrap().with_missing(Missing::Allow);
    let found = lenient().read(SHAPE.map(|size| 0..size)).unwrap();
    for (at, value) in found.indexed_iter() {
        let at = [at.0, at.1, at.2, at.3];
        if at == AT {
            assert!(value.is_nan(), "{what}: {value}");
        } else {
            assert_eq!(*value, fields[at], "{what}");
        }
    }
    let strict = FieldFile::open(&path).unwrap();
    // The index in the error is global, also for a box of cells.
    let error = strict
        .read([1..2, 1..2, 1..4, 1..5])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("\"fields\"[1, 1, 2, 3]: found "),
        "{what}: {error}"
    );
    assert!(
        error.contains(&format!("found {number:?}, which is the ")),
        "{what}: {error}"
    );
    assert!(strict.read([0..3, 0..1, 0..4, 0..5]).is_ok(), "{what}");
    let statistics = Statistics::compute(&[lenient()], 1).unwrap();
    assert!(
        statistics.means()[1] < 3000.0 && statistics.stds()[1] < 2000.0,
        "{what}"
    );
}

#[test]
fn fill_values_count_as_missing() {
    let fields = |file: &File| file.dataset("fields").unwrap();
    check_missing("scalar", 1e20, |file| {
        scalar(&fields(file), "_FillValue", 1e20_f32)
    });
    check_missing("array", 1e20, |file| {
        array(&fields(file), "_FillValue", [1e20_f32])
    });
    // 1e20 differs in f32 and f64.
    check_missing("f64", 1e20, |file| {
        array(&fields(file), "_FillValue", [1e20_f64])
    });
    check_missing("missing_value", 1e20, |file| {
        array(&fields(file), "missing_value", [1e20_f64])
    });
    check_missing("integer", -9999.0, |file| {
        scalar(&fields(file), "missing_value", -9999_i32)
    });
    check_missing("both", -1e30, |file| {
        array(&fields(file), "_FillValue", [f32::NAN]);
        array(&fields(file), "missing_value", [1e20_f32, -1e30]);
    });
    check_missing("f64 fields", 1e20, |file| {
        let mut values = fields(file)
            .read_dyn::<f64>()
            .unwrap()
            .into_dimensionality()
            .unwrap();
        values[AT] = 1e20;
        array(&replace_fields(file, &values), "_FillValue", [1e20_f32]);
    });
}

#[test]
fn packed_values_are_unpacked_in_double_precision() {
    let (_folder, path) = numbered_file(SHAPE);
    let stored = Array4::from_shape_fn(SHAPE, |(t, c, i, j)| {
        (t * 9000 + c * 100 + i * 10 + j) as i16
    });
    // f32 cannot resolve 0.01 next to the mean of geopotential.
    let (factor, offset) = (0.012_345_678_901, 54_321.0);
    let unpacked = stored.mapv(|stored| (f64::from(stored) * factor + offset) as f32);
    edit(&path, |file| {
        let fields = replace_fields(file, &stored);
        array(&fields, "scale_factor", [factor]);
        scalar(&fields, "add_offset", offset);
        array(&fields, "_FillValue", [i16::MIN]);
    });
    let file = FieldFile::open(&path).unwrap();
    assert_eq!(file.read(SHAPE.map(|size| 0..size)).unwrap(), unpacked);
    let mean = Statistics::compute(&[file], 1).unwrap().means()[0];
    assert!((mean - (54_321.0 + 9000.0 * factor)).abs() < 1.0, "{mean}");

    let mut stored = numbered(SHAPE, 0.0);
    stored[AT] = -1.0;
    edit(&path, |file| {
        let fields = replace_fields(file, &stored);
        scalar(&fields, "add_offset", 0.5_f32);
        scalar(&fields, "_FillValue", -1.0_f32);
    });
    let file = FieldFile::open(&path).unwrap();
    assert_eq!(file.read([2..3, 0..1, 0..1, 1..2]).unwrap()[[0; 4]], 2001.5);
    // The stored number is compared, before unpacking.
    let error = file.read([1..2, 1..2, 2..3, 3..4]).unwrap_err().to_string();
    assert!(
        error.contains("[1, 1, 2, 3]: found -1.0, which is the _FillValue"),
        "{error}"
    );
}

#[test]
fn packing_that_is_not_understood_is_refused() {
    let refused = |change: &dyn Fn(&File)| {
        let (_folder, path) = numbered_file(SHAPE);
        edit(&path, change);
        message(&path)
    };
    let fields = |file: &File| file.dataset("fields").unwrap();
    assert_eq!(
        refused(&|file| scalar(&fields(file), "scale_factor", 0.0)),
        "dataset \"fields\": found scale_factor = 0, expected a finite number, and no factor of zero"
    );
    assert_eq!(
        refused(&|file| array(&fields(file), "add_offset", [1.0, 2.0])),
        "dataset \"fields\": found add_offset = [1.0, 2.0], expected one number"
    );
    let error = refused(&|file| text(&fields(file), "_FillValue", "none"));
    assert!(
        error.starts_with("dataset \"fields\": attribute _FillValue: "),
        "{error}"
    );
    let error = refused(&|file| {
        let fields = replace_fields(file, &Array4::<i64>::zeros(SHAPE));
        scalar(&fields, "scale_factor", 0.1);
    });
    assert!(
        error.contains("found values of type int64, expected "),
        "{error}"
    );
    let error = refused(&|file| {
        let fields = replace_fields(file, &Array4::<i8>::zeros(SHAPE));
        scalar(&fields, "scale_factor", 0.1);
        text(&fields, "_Unsigned", "maybe");
    });
    assert!(
        error.contains("found _Unsigned = maybe, expected true or false"),
        "{error}"
    );
    let error = refused(&|file| {
        let fields = replace_fields(file, &Array4::<u8>::zeros(SHAPE));
        scalar(&fields, "scale_factor", 0.1);
        text(&fields, "_Unsigned", "false");
    });
    assert!(
        error.contains("found _Unsigned = false, expected true for unsigned integers"),
        "{error}"
    );
}

#[test]
fn signed_integers_may_stand_for_unsigned_ones() {
    let number = |(t, c, i, j): (usize, usize, usize, usize)| {
        (t * 80 + c * 40 + i * 10 + j * 2) as u8 // at most 238
    };
    for unsigned in ["true", "false"] {
        let (_folder, path) = numbered_file(SHAPE);
        edit(&path, |file| {
            let stored = Array4::from_shape_fn(SHAPE, |at| number(at) as i8);
            let fields = replace_fields(file, &stored);
            scalar(&fields, "scale_factor", 0.5);
            scalar(&fields, "_FillValue", 238_u8 as i8);
            text(&fields, "_Unsigned", unsigned);
        });
        let file = FieldFile::open(&path).unwrap();
        let file = file.with_missing(Missing::Allow);
        let found = file.read(SHAPE.map(|size| 0..size)).unwrap();
        for (at, value) in found.indexed_iter() {
            let expected = match unsigned {
                "true" => f32::from(number(at)),
                _ => f32::from(number(at) as i8),
            };
            match number(at) {
                238 => assert!(value.is_nan(), "{at:?} {value}"),
                _ => assert_eq!(*value, 0.5 * expected, "{at:?}"),
            }
        }
    }
}

#[test]
fn times_are_in_the_units_of_the_file() {
    // 2026-03-25, and six hours from one time to the next.
    let first = 1_774_396_800.0;
    let check = |what: &str, change: &dyn Fn(&File)| {
        let (_folder, path) = numbered_file(SHAPE);
        edit(&path, |file| change(file));
        let file = FieldFile::open(&path).unwrap();
        assert_eq!(
            file.times(),
            [first, first + STEP, first + 2.0 * STEP],
            "{what}"
        );
        assert_eq!(file.time_step().unwrap(), STEP, "{what}");
    };
    check("xarray and h5netcdf", &|file| {
        let times = replace_times(file, &[0_i64, 6, 12]);
        text(&times, "units", "hours since 2026-03-25");
        text(&times, "calendar", "proleptic_gregorian");
    });
    check("netCDF", &|file| {
        let times = replace_times(file, &[20_537.0, 20_537.25, 20_537.5]);
        let units = FixedAscii::<32>::from_ascii("days since 1970-01-01 00:00:00").unwrap();
        scalar(&times, "units", units);
        scalar(
            &times,
            "calendar",
            FixedAscii::<8>::from_ascii("standard").unwrap(),
        );
    });
    check("a zone", &|file| {
        let times = replace_times(file, &[60_i32, 420, 780]);
        text(&times, "units", "minutes since 2026-03-25T00:00:00+01:00");
    });
    check("nanoseconds", &|file| {
        let times =
            [0_i64, 6, 12].map(|hours| 1_774_396_800_000_000_000 + hours * 3_600_000_000_000);
        text(
            &replace_times(file, &times),
            "units",
            "nanoseconds since 1970-01-01",
        );
    });
    check("Makani", &|file| {
        replace_times(file, &[first, first + STEP, first + 2.0 * STEP]);
    });
}

#[test]
fn times_of_models_count_in_their_calendar() {
    let check = |calendar: &str, numbers: [f64; 3], expected: Calendar, dates: [&str; 3]| {
        let (_folder, path) = numbered_file(SHAPE);
        edit(&path, |file| {
            let times = replace_times(file, &numbers);
            text(&times, "units", "days since 2000-01-01");
            text(&times, "calendar", calendar);
        });
        let file = FieldFile::open(&path).unwrap();
        assert_eq!(file.calendar(), expected, "{calendar}");
        let found: Vec<String> = file
            .times()
            .iter()
            .map(|time| expected.date(*time))
            .collect();
        assert_eq!(
            found,
            dates.map(|date| format!("{date} 00:00:00")),
            "{calendar}"
        );
        assert_eq!(file.time_step().unwrap(), 86400.0, "{calendar}");
    };
    // Dates computed by cftime.num2date.
    let days = [58.0, 59.0, 60.0];
    check(
        "noleap",
        days,
        Calendar::NoLeap,
        ["2000-02-28", "2000-03-01", "2000-03-02"],
    );
    check(
        "366_day",
        days,
        Calendar::AllLeap,
        ["2000-02-28", "2000-02-29", "2000-03-01"],
    );
    check(
        "360_day",
        days,
        Calendar::Day360,
        ["2000-02-29", "2000-02-30", "2000-03-01"],
    );
    check(
        "julian",
        days,
        Calendar::Gregorian,
        ["2000-02-28", "2000-02-29", "2000-03-01"],
    );
}

/// Dates of 2000-02-29 ± 1 h, as ICON writes times by default.
#[test]
fn times_may_be_the_digits_of_dates() {
    let write = |numbers: [f64; 3], calendar: &str| {
        let (folder, path) = numbered_file(SHAPE);
        edit(&path, |file| {
            let times = replace_times(file, &numbers);
            text(&times, "units", "day as %Y%m%d.%f");
            text(&times, "calendar", calendar);
        });
        (folder, path)
    };
    let hour = 1.0 / 24.0;
    let hours = [
        20_000_228.0 + 23.0 * hour,
        20_000_229.0,
        20_000_229.0 + hour,
    ];
    let (_folder, path) = write(hours, "proleptic_gregorian");
    let file = FieldFile::open(&path).unwrap();
    // By `date -u -d 2000-02-29 +%s`.
    assert_eq!(file.times()[1], 951_782_400.0);
    assert_eq!(file.time_step().unwrap(), 3600.0);
    let days = [20_000_228.0, 20_000_229.0, 20_000_230.0];
    let (_folder, path) = write(days, "360_day");
    assert_eq!(
        FieldFile::open(&path).unwrap().time_step().unwrap(),
        86400.0
    );
    let (_folder, path) = write(days, "standard");
    let error = message(&path);
    assert!(
        error.contains("\"day as %Y%m%d.%f\", with the number 20000230"),
        "{error}"
    );
}

#[test]
fn times_that_are_not_understood_are_refused() {
    let refused = |units: Option<&str>, calendar: Option<&str>| {
        let (_folder, path) = numbered_file(SHAPE);
        edit(&path, |file| {
            let times = replace_times(file, &[0.0, 1.0, 2.0]);
            for (name, value) in [("units", units), ("calendar", calendar)] {
                if let Some(value) = value {
                    text(&times, name, value);
                }
            }
        });
        message(&path)
    };
    assert_eq!(
        refused(Some("months since 2000-01-01"), None),
        "dataset \"timestamp\": found units = \"months since 2000-01-01\", \
         expected days, hours, minutes, seconds, milliseconds, microseconds or nanoseconds since a date, of the year 1 \
         or later, such as \"hours since 1970-01-01 00:00:00\"; write the times in one of these, \
         in xarray by to_netcdf(encoding={\"timestamp\": {\"units\": …}})"
    );
    for calendar in ["none", "tai", "366"] {
        assert_eq!(
            refused(Some("days since 2000-01-01"), Some(calendar)),
            format!(
                "dataset \"timestamp\": found calendar = \"{calendar}\", \
                 expected standard, gregorian, proleptic_gregorian, julian, noleap, 365_day, all_leap, \
                 366_day or 360_day; write the times in one of these"
            )
        );
    }
    assert!(refused(None, Some("none")).contains("found calendar = "));
    // The standard calendar is Julian before 1582-10-15.
    let error = refused(Some("days since 0001-01-01"), None);
    assert!(
        error.contains("found calendar = \"standard\" with times before 1582-10-15"),
        "{error}"
    );
    // 2100 is a leap year of the Julian calendar only.
    for date in ["1900-02-29", "2100-02-27"] {
        let error = refused(Some(&format!("days since {date}")), Some("julian"));
        assert!(
            error.contains("found calendar = \"julian\" with times before 1900-03-01 or after"),
            "{error}"
        );
    }
}

#[test]
fn written_times_say_their_units_and_calendar() {
    let (_folder, path) = numbered_file(SHAPE);
    let file = File::open(&path).unwrap();
    let attribute = |dataset: &str, name: &str| {
        let attribute = file.dataset(dataset).unwrap().attr(name).unwrap();
        attribute
            .read_scalar::<FixedAscii<64>>()
            .unwrap()
            .to_string()
    };
    assert_eq!(
        attribute("timestamp", "units"),
        "seconds since 1970-01-01 00:00:00"
    );
    assert_eq!(attribute("timestamp", "calendar"), "proleptic_gregorian");
    assert_eq!(attribute("lat", "units"), "degrees_north");
    assert_eq!(attribute("lon", "units"), "degrees_east");
}
