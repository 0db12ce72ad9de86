//! Times that are characters of NetCDF files.

use std::path::Path;

use halocline_io::open;

/// Writes a NetCDF-3 file with the variables of MPAS: positions of three cells, a field at two
/// times, and `xtime`, of twenty characters for each of them.
fn write(path: &Path, xtime: &str) {
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
    let variables = [
        ("xtime", &[0, 2][..], CHARACTERS, xtime.as_bytes()),
        ("latCell", &[1], DOUBLES, &positions[..]),
        ("lonCell", &[1], DOUBLES, &positions[..]),
        ("t2m", &[0, 1], DOUBLES, &field[..]),
    ];
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
        for (variable, dims, kind, values) in variables {
            bytes.extend(name(variable));
            bytes.extend(number(dims.len()));
            let rest = [0, 0, kind, values.len(), offset];
            for count in dims.iter().copied().chain(rest) {
                bytes.extend(number(count));
            }
            offset += values.len();
        }
        bytes
    };
    let mut bytes = header(header(0).len());
    for (_, _, _, values) in variables {
        bytes.extend(values);
    }
    std::fs::write(path, bytes).unwrap();
}

/// Values by `date -u -d 2020-02-29 +%s`.
#[test]
fn characters_of_dates_are_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mpas.nc");
    write(&path, "2020-02-29_00:00:00 2020-02-29_06:00:00 ");
    let fields = open(&path).unwrap();
    assert_eq!(fields.channels(), ["t2m"]);
    assert_eq!(fields.times(), [1_582_934_400.0, 1_582_956_000.0]);
    let values = fields.read([1..2, 0..1, 0..1, 0..3]).unwrap();
    assert_eq!(values.into_iter().collect::<Vec<f32>>(), [4.0, 5.0, 6.0]);
    write(&path, "first time          second time         ");
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("t2m (Time: no time coordinate"), "{error}");
}
