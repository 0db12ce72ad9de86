//! Times that are characters of NetCDF files.

use std::path::Path;

use halocline_io::open;

const DATES: &str = "2020-02-29_00:00:00 2020-02-29_06:00:00 ";

/// Writes a NetCDF-3 file with the variables of MPAS: positions of three cells, a field at two
/// times, and texts of twenty characters for each of them.
fn write(path: &Path, texts: &[(&str, &str)]) {
    const CHARACTERS: usize = 2;
    const DOUBLES: usize = 6;
    let number = |number: usize| (number as u32).to_be_bytes();
    let name = |name: &str| {
        let mut bytes = number(name.len()).to_vec();
        bytes.extend(name.bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    };
    let doubles = |values: &[f64]| -> Vec<u8> {
        let bytes = values.iter().flat_map(|value| value.to_be_bytes());
        bytes.collect()
    };
    let positions = doubles(&[0.0, 0.5, 1.0]);
    let field = doubles(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let mut variables: Vec<(&str, &[usize], usize, &[u8])> = vec![
        ("latCell", &[1], DOUBLES, &positions),
        ("lonCell", &[1], DOUBLES, &positions),
        ("t2m", &[0, 1], DOUBLES, &field),
    ];
    for (name, text) in texts {
        variables.push((name, &[0, 2], CHARACTERS, text.as_bytes()));
    }
    // The offset of the values, which is that of the end of the header, is part of it.
    let header = |mut offset: usize| {
        let mut bytes = b"CDF\x01".to_vec();
        for count in [0, 10, 3] {
            bytes.extend(number(count));
        }
        for (dim, extent) in [("Time", 2), ("nCells", 3), ("StrLen", 20)] {
            bytes.extend(name(dim));
            bytes.extend(number(extent));
        }
        for count in [0, 0, 11, variables.len()] {
            bytes.extend(number(count));
        }
        for (variable, dims, kind, values) in &variables {
            bytes.extend(name(variable));
            bytes.extend(number(dims.len()));
            let rest = [0, 0, *kind, values.len(), offset];
            for count in dims.iter().copied().chain(rest) {
                bytes.extend(number(count));
            }
            offset += values.len();
        }
        bytes
    };
    let mut bytes = header(header(0).len());
    for (_, _, _, values) in &variables {
        bytes.extend_from_slice(values);
    }
    std::fs::write(path, bytes).unwrap();
}

/// Values by `date -u -d 2020-02-29 +%s`.
#[test]
fn characters_of_dates_are_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mpas.nc");
    write(&path, &[("xtime", DATES)]);
    let fields = open(&path).unwrap();
    assert_eq!(fields.channels(), ["t2m"]);
    assert_eq!(fields.times(), [1_582_934_400.0, 1_582_956_000.0]);
    let values = fields.read([1..2, 0..1, 0..1, 0..3]).unwrap();
    assert_eq!(values.into_iter().collect::<Vec<f32>>(), [4.0, 5.0, 6.0]);
    write(
        &path,
        &[("xtime", "first time          second time         ")],
    );
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("t2m (Time: no time coordinate"), "{error}");
}

#[test]
fn a_text_among_dates_that_is_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mpas.nc");
    write(
        &path,
        &[("xtime", "2020-02-29_00:00:00 2020-02-30_06:00:00 ")],
    );
    let error = open(&path).unwrap_err().to_string();
    for part in [
        "mpas.nc",
        "\"xtime\"",
        "\"2020-02-30_06:00:00\" at index 1",
        "expected numbers with units",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
    // Other variables may have dates beside other texts.
    write(
        &path,
        &[
            ("xtime", DATES),
            ("source", "2020-02-29          unknown             "),
        ],
    );
    assert!(open(&path).is_ok());
}

/// Means of MPAS have the times at which they start and end, and may have the times of the fields.
#[test]
fn of_several_texts_of_dates_those_with_the_name_of_a_time_are_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mpas.nc");
    let starts = ("xtime_start", "2020-01-01_00:00:00 2020-01-01_06:00:00 ");
    write(&path, &[starts, ("xtime", DATES)]);
    assert_eq!(open(&path).unwrap().times()[0], 1_582_934_400.0);
    write(&path, &[starts, ("xtime_end", DATES)]);
    let error = open(&path).unwrap_err().to_string();
    let told = "texts of dates along Time in each of xtime_start, xtime_end";
    assert!(error.contains(told), "{error}");
}
