//! Fields on curvilinear grids, whose latitudes and longitudes lie along rows and columns.

use std::path::{Path, PathBuf};

use halocline_io::{
    ConvertConfig, DatasetConfig, FieldDataset, FieldFile, FieldWriter, Grid, Metadata, OpenConfig,
    OutputConfig, OutputFormat, Scan, Statistics, WriterConfig, convert, inspect, open,
};
use ndarray::Array3;
use serde_json::{Value, json};

use crate::coordinates::{array, attribute};

const TIMES: usize = 2;
const ROWS: usize = 3;
const COLUMNS: usize = 4;

pub(crate) fn doubles(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    values.into_iter().flat_map(f64::to_le_bytes).collect()
}

/// Latitudes and longitudes of the cells of a turned grid, row by row.
fn positions() -> [Vec<f64>; 2] {
    let cells = |along_row: f64, along_column: f64, first: f64| {
        let cell = |cell: usize| {
            let (row, column) = (cell / COLUMNS, cell % COLUMNS);
            first + along_row * column as f64 + along_column * row as f64
        };
        (0..ROWS * COLUMNS).map(cell).collect()
    };
    [cells(0.25, 1.0, 50.0), cells(1.0, -0.5, 10.0)]
}

/// Writes a store whose field encodes time, row and column, with these names of the time, of the
/// dims of rows and columns, and of latitudes and longitudes, which are repeated at each time or
/// not.
fn write(folder: &Path, time: &str, lines: [&str; 2], names: [&str; 2], repeats: bool) -> PathBuf {
    let path = folder.join("cells.zarr");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join(".zgroup"), "{\"zarr_format\": 2}").unwrap();
    let hours = doubles((0..TIMES).map(|time| 6.0 * time as f64));
    let times = path.join("XTIME");
    array(&times, "<f8", &[TIMES], &[time], &hours);
    attribute(&times, "\"units\": \"hours since 1970-01-01\"");
    attribute(&times, "\"standard_name\": \"time\"");
    let dims = [time, lines[0], lines[1]];
    let values = (0..TIMES * ROWS * COLUMNS).map(|cell| cell as f32);
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let shape = [TIMES, ROWS, COLUMNS];
    array(&path.join("t2m"), "<f4", &shape, &dims, &bytes);
    let units = ["degrees_north", "degrees_east"];
    for ((name, values), units) in names.into_iter().zip(positions()).zip(units) {
        let (first, count) = if repeats { (0, TIMES) } else { (1, 1) };
        let bytes = doubles(values.repeat(count));
        array(
            &path.join(name),
            "<f8",
            &shape[first..],
            &dims[first..],
            &bytes,
        );
        attribute(&path.join(name), &format!("\"units\": \"{units}\""));
    }
    path
}

/// Writes a store like a file of NEMO.
fn write_nemo(folder: &Path) -> PathBuf {
    write(
        folder,
        "time_counter",
        ["y", "x"],
        ["nav_lat", "nav_lon"],
        false,
    )
}

#[test]
fn rows_and_columns_have_the_positions_of_their_cells() {
    for (time, lines, names, repeats) in [
        ("time_counter", ["y", "x"], ["nav_lat", "nav_lon"], false),
        (
            "Time",
            ["south_north", "west_east"],
            ["XLAT", "XLONG"],
            true,
        ),
        ("time", ["yh", "xh"], ["geolat", "geolon"], false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), time, lines, names, repeats);
        if lines[0] == "yh" {
            // Nominal latitudes and longitudes of rows and columns, as in files of MOM6.
            for (name, count, units) in [("yh", 3, "degrees_north"), ("xh", 4, "degrees_east")] {
                let line = doubles((0..count).map(f64::from));
                array(&path.join(name), "<f8", &[count as usize], &[name], &line);
                attribute(&path.join(name), &format!("\"units\": \"{units}\""));
                attribute(
                    &path.join(name),
                    "\"long_name\": \"h point nominal position\"",
                );
            }
        }
        let fields = open(&path).unwrap();
        assert_eq!(fields.channels(), ["t2m"], "{names:?}");
        assert_eq!(fields.shape(), [TIMES, 1, ROWS, COLUMNS]);
        let [lat, lon] = positions();
        let expected = Grid::curvilinear([ROWS, COLUMNS], lat, lon).unwrap();
        assert_eq!(*fields.grid(), expected, "{names:?}");
        let values = fields.read([1..2, 0..1, 1..3, 2..4]).unwrap();
        assert_eq!(
            values.into_iter().collect::<Vec<f32>>(),
            [18.0, 19.0, 22.0, 23.0]
        );
        let report = inspect(&path, &OpenConfig::new(), Scan::Sample).unwrap();
        let report = report.to_string();
        assert!(report.contains("curvilinear, 3 x 4 cells"), "{report}");
    }
}

#[test]
fn the_attribute_coordinates_chooses_among_positions() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_nemo(folder.path());
    let dims = ["y", "x"];
    for (name, values) in ["lat_u", "lon_u"].into_iter().zip(positions()) {
        let bytes = doubles(values.into_iter().map(|value| value + 0.5));
        array(&path.join(name), "<f8", &[ROWS, COLUMNS], &dims, &bytes);
    }
    attribute(&path.join("lat_u"), "\"units\": \"degrees_north\"");
    attribute(&path.join("lon_u"), "\"units\": \"degrees_east\"");
    for (names, first) in [("nav_lon nav_lat", 50.0), ("lon_u lat_u", 50.5)] {
        attribute(&path.join("t2m"), &format!("\"coordinates\": \"{names}\""));
        let fields = open(&path).unwrap();
        assert_eq!(fields.grid().cells().unwrap()[0][0], first);
        let kept = path.join("t2m/.zattrs");
        let text = std::fs::read_to_string(&kept).unwrap();
        let text = text.replace(&format!("\"coordinates\": \"{names}\",\n"), "");
        std::fs::write(&kept, text).unwrap();
    }
}

#[test]
fn positions_that_move_are_refused_and_missing_ones_count_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "Time", ["y", "x"], ["XLAT", "XLONG"], true);
    let [lat, _] = positions();
    let moved = lat.iter().map(|lat| lat + 0.1).collect::<Vec<f64>>();
    let chunk = path.join("XLAT/0.0.0");
    std::fs::write(&chunk, doubles(lat.iter().copied().chain(moved))).unwrap();
    let error = open(&path).unwrap_err().to_string();
    assert!(
        error.contains("expected those of a grid that does not move"),
        "{error}"
    );
    let mut missing = lat.clone();
    missing[5] = f64::NAN;
    std::fs::write(&chunk, doubles(missing.iter().copied().chain(lat))).unwrap();
    assert_eq!(without_weight(&path), [5]);
    let [lat, lon] = [&[f64::NAN; ROWS * COLUMNS][..], &positions()[1]].map(<[f64]>::to_vec);
    for (name, values) in [("XLAT", lat), ("XLONG", lon)] {
        std::fs::write(path.join(name).join("0.0.0"), doubles(values.repeat(TIMES))).unwrap();
    }
    let error = open(&path).unwrap_err().to_string();
    assert!(
        error.contains("latitude NaN, longitude 10 of cell 0"),
        "{error}"
    );
}

/// Cells of a file whose weight is zero, all of which have a position.
fn without_weight(path: &Path) -> Vec<usize> {
    let fields = open(path).unwrap();
    let weights = fields.grid().cell_weights().unwrap();
    let [lat, lon] = fields.grid().cells().unwrap();
    assert!(lat.iter().chain(lon).all(|degrees| degrees.is_finite()));
    let cells = 0..ROWS * COLUMNS;
    cells.filter(|cell| weights[*cell] == 0.0).collect()
}

#[test]
fn land_at_zero_counts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_nemo(folder.path());
    for (name, mut values) in ["nav_lat", "nav_lon"].into_iter().zip(positions()) {
        for cell in [1, 2, 5, 6] {
            values[cell] = 0.0;
        }
        std::fs::write(path.join(name).join("0.0"), doubles(values)).unwrap();
    }
    assert_eq!(without_weight(&path), [1, 2, 5, 6]);
    let bytes = doubles(vec![1.0; ROWS * COLUMNS]);
    let areas = path.join("areacello");
    array(&areas, "<f8", &[ROWS, COLUMNS], &["y", "x"], &bytes);
    assert_eq!(without_weight(&path), [1, 2, 5, 6]);
    // A copy has the same cells, and no weight for these.
    let (copy, config) = (folder.path().join("copy"), ConvertConfig::new());
    convert(&open(&path).unwrap(), &copy, &config, |_| ()).unwrap();
    assert_eq!(open(&copy).unwrap().grid(), open(&path).unwrap().grid());
}

#[test]
fn outputs_and_statistics_have_positions_and_areas() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_nemo(folder.path());
    let computed = open(&path).unwrap().grid().cell_weights().unwrap();
    let areas: Vec<f64> = (1..=12).map(f64::from).collect();
    let bytes = doubles(areas.iter().copied());
    array(
        &path.join("areacello"),
        "<f8",
        &[ROWS, COLUMNS],
        &["y", "x"],
        &bytes,
    );
    let fields = open(&path).unwrap();
    assert_eq!(fields.channels(), ["t2m"]);
    let weights = fields.grid().cell_weights().unwrap();
    assert_eq!((weights[0], weights[11]), (1.0 / 6.5, 12.0 / 6.5));
    assert_ne!(computed, weights);
    let statistics = Statistics::compute(&[open(&path).unwrap()], 1).unwrap();
    assert_eq!(statistics.metadata().grid(), fields.grid());
    // Values from 0 to 11 at the first time, and 12 more at the second, with the weights 1 to 12.
    let mean = (0..12)
        .map(|cell| f64::from(cell * (cell + 1)))
        .sum::<f64>()
        / 78.0;
    assert!((statistics.means()[0] - mean - 6.0).abs() < 1e-9);
    let metadata = Metadata::of(&fields).unwrap();
    metadata.save(folder.path()).unwrap();
    assert_eq!(Metadata::load(folder.path()).unwrap(), metadata);
    for format in [
        OutputFormat::Zarr2,
        OutputFormat::Zarr3,
        OutputFormat::NetCdf3,
    ] {
        let copy = folder.path().join(format!("{format:?}"));
        let config = ConvertConfig::new().with_output(OutputConfig::new().with_format(format));
        convert(&fields, &copy, &config, |_| ()).unwrap();
        if format == OutputFormat::Zarr2 {
            let text = std::fs::read_to_string(copy.join("t2m/.zattrs")).unwrap();
            assert!(text.contains("area: cell_area"), "{text}");
        }
        let copy = open(&copy).unwrap();
        assert_eq!(copy.grid(), fields.grid(), "{format:?}");
        assert_eq!(copy.channels(), ["t2m"], "{format:?}");
        let all = [0..TIMES, 0..1, 0..ROWS, 0..COLUMNS];
        assert_eq!(copy.read(all.clone()).unwrap(), fields.read(all).unwrap());
    }
    let path = folder.path().join("data.h5");
    let config = WriterConfig::new();
    let mut writer = FieldWriter::create(&path, fields.grid(), &["t2m"], &config).unwrap();
    let field = Array3::zeros((1, ROWS, COLUMNS));
    writer.append(0.0, field.view()).unwrap();
    writer.finish().unwrap();
    assert_eq!(FieldFile::open(&path).unwrap().grid(), fields.grid());
}

#[test]
fn outputs_keep_the_projection_and_the_units_of_areas() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_nemo(folder.path());
    for (name, count, axis) in [("y", ROWS, "Y"), ("x", COLUMNS, "X")] {
        let line = doubles((0..count).map(|cell| 2500.0 * cell as f64));
        array(&path.join(name), "<f8", &[count], &[name], &line);
        let text = format!(
            "\"standard_name\": \"projection_{name}_coordinate\", \"units\": \"m\", \"axis\": \"{axis}\""
        );
        attribute(&path.join(name), &text);
    }
    array(&path.join("crs"), "<f8", &[], &[], &doubles([0.0]));
    let mapping = "\"grid_mapping_name\": \"lambert_conformal_conic\", \"standard_parallel\": [30.0, 60.0], \
                   \"longitude_of_central_meridian\": 10.5";
    attribute(&path.join("crs"), mapping);
    let named = "\"grid_mapping\": \"crs\", \"cell_methods\": \"time: mean\"";
    attribute(&path.join("t2m"), named);
    let areas = doubles((1..=12).map(f64::from));
    let shape = [ROWS, COLUMNS];
    let measured = path.join("areacello");
    array(&measured, "<f8", &shape, &["y", "x"], &areas);
    attribute(&measured, "\"units\": \"m2\"");
    for format in [OutputFormat::Zarr3, OutputFormat::NetCdf3] {
        // Attributes of the copy of a copy are read as text.
        let [first, second] = [format, OutputFormat::Zarr2].map(|format| {
            let config = ConvertConfig::new().with_output(OutputConfig::new().with_format(format));
            (folder.path().join(format!("{format:?}")), config)
        });
        convert(&open(&path).unwrap(), &first.0, &first.1, |_| ()).unwrap();
        convert(&open(&first.0).unwrap(), &second.0, &second.1, |_| ()).unwrap();
        let copy = open(&second.0).unwrap();
        assert_eq!(copy.channels(), ["t2m"], "{format:?}");
        assert_eq!(copy.grid(), open(&path).unwrap().grid(), "{format:?}");
        for (name, expected) in [
            ("crs", json!({ "standard_parallel": [30.0, 60.0] })),
            ("crs", json!({ "longitude_of_central_meridian": 10.5 })),
            (
                "t2m",
                json!({ "grid_mapping": "crs", "cell_methods": "time: mean" }),
            ),
            (
                "y",
                json!({ "standard_name": "projection_y_coordinate", "units": "m" }),
            ),
            ("x", json!({ "_ARRAY_DIMENSIONS": ["x"], "axis": "X" })),
            (
                "cell_area",
                json!({ "units": "m2", "standard_name": "cell_area" }),
            ),
        ] {
            let text = std::fs::read_to_string(second.0.join(name).join(".zattrs")).unwrap();
            let found: Value = serde_json::from_str(&text).unwrap();
            for (key, value) in expected.as_object().unwrap() {
                assert_eq!(&found[key], value, "{format:?}, {key} in {text}");
            }
        }
        std::fs::remove_dir_all(&second.0).unwrap();
    }
}

#[test]
fn forcings_are_those_of_the_positions() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_nemo(folder.path());
    let config = DatasetConfig::new()
        .with_inputs(Some(vec!["t2m".into()]))
        .with_forcings(vec!["sin_latitude".into(), "cos_longitude".into()]);
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    let forcing = dataset.sample(0).unwrap().forcing;
    let [lat, lon] = positions();
    for cell in 0..ROWS * COLUMNS {
        let found = [0, 1]
            .map(|channel: usize| f64::from(forcing[[channel, cell / COLUMNS, cell % COLUMNS]]));
        let expected = [lat[cell].to_radians().sin(), lon[cell].to_radians().cos()];
        for (found, expected) in found.into_iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-6,
                "{cell}: {found} {expected}"
            );
        }
    }
}

#[test]
fn a_grid_is_the_same_with_and_without_positions_on_land() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_nemo(folder.path());
    let areas = |first: f64| doubles((0..ROWS * COLUMNS).map(|cell| first + cell as f64));
    let dims = ["y", "x"];
    array(
        &path.join("areacello"),
        "<f8",
        &[ROWS, COLUMNS],
        &dims,
        &areas(1.0),
    );
    let whole = open(&path).unwrap().grid().clone();
    let [mut lat, _] = positions();
    lat[5] = f64::NAN;
    std::fs::write(path.join("nav_lat/0.0"), doubles(lat)).unwrap();
    let coast = open(&path).unwrap().grid().clone();
    assert_eq!(without_weight(&path), [5]);
    assert!(coast.agrees_with(&whole) && whole.agrees_with(&coast));
    // Other areas of the sea.
    std::fs::write(path.join("areacello/0.0"), areas(3.0)).unwrap();
    assert!(!open(&path).unwrap().grid().agrees_with(&whole));
}
