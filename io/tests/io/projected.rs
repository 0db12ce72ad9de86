//! Fields whose rows and columns have coordinates in a map projection, or repeat the first column.

use std::path::{Path, PathBuf};

use halocline_io::{Grid, OpenConfig, open};

use crate::coordinates::{array, attribute};
use crate::curvilinear::doubles;

/// Writes a store of a field on these rows and columns, with coordinates along them.
fn write_lines(
    folder: &Path,
    [rows, columns]: [(&str, &str, &[f64]); 2],
    standard: bool,
) -> PathBuf {
    let path = folder.join("lines.zarr");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join(".zgroup"), "{\"zarr_format\": 2}").unwrap();
    let times = path.join("time");
    array(&times, "<f8", &[1], &["time"], &doubles([0.0]));
    attribute(&times, "\"units\": \"hours since 1970-01-01\"");
    let shape = [1, rows.2.len(), columns.2.len()];
    let values = (0..shape.iter().product()).map(|cell: usize| cell as f32);
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let field = path.join("tas");
    array(&field, "<f4", &shape, &["time", rows.0, columns.0], &bytes);
    for (name, kind, values) in [rows, columns] {
        let line = path.join(name);
        let values = doubles(values.iter().copied());
        array(&line, "<f8", &[values.len() / 8], &[name], &values);
        if standard {
            attribute(&line, &format!("\"standard_name\": \"{kind}\""));
        }
        attribute(&line, "\"units\": \"degrees\"");
    }
    path
}

/// Adds a grid mapping to a store.
fn project(path: &Path, name: &str, numbers: &[(&str, f64)]) {
    attribute(&path.join("tas"), "\"grid_mapping\": \"crs\"");
    let mapping = path.join("crs");
    array(&mapping, "<i4", &[1], &["one"], &0_i32.to_le_bytes());
    attribute(&mapping, &format!("\"grid_mapping_name\": \"{name}\""));
    for (name, number) in numbers {
        attribute(&mapping, &format!("\"{name}\": {number:?}"));
    }
}

/// Adds the grid mapping of a rotated pole to a store.
fn rotate(path: &Path, [lat, lon]: [f64; 2]) {
    let names = ["grid_north_pole_latitude", "grid_north_pole_longitude"];
    let numbers = [(names[0], lat), (names[1], lon)];
    project(path, "rotated_latitude_longitude", &numbers);
}

#[test]
fn cells_of_a_rotated_pole_have_positions() {
    let (rows, columns) = ([-1.0, 0.0, 1.0], [-2.0, -1.0, 0.0, 1.0]);
    for (names, standard) in [
        (
            [("rlat", "grid_latitude"), ("rlon", "grid_longitude")],
            true,
        ),
        ([("rlat", ""), ("rlon", "")], false),
        ([("y", "grid_latitude"), ("x", "grid_longitude")], true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let [(row, of_row), (column, of_column)] = names;
        let lines = [(row, of_row, &rows[..]), (column, of_column, &columns[..])];
        let path = write_lines(folder.path(), lines, standard);
        assert!(open(&path).is_err());
        rotate(&path, [39.25, -162.0]);
        let fields = open(&path).unwrap();
        let grid = fields.grid();
        assert!(grid.is_curvilinear() && grid.shape() == [3, 4]);
        let [lat, lon] = grid.cells().unwrap();
        // The origin of the rotated sphere.
        assert!((lat[6] - 50.75).abs() < 1e-9 && (lon[6] - 18.0).abs() < 1e-9);
        assert!((lat[10] - 51.75).abs() < 1e-9 && (lon[10] - 18.0).abs() < 1e-9);
        assert!(lon[5] < 17.0 && lon[7] > 19.0);
        let values = fields.read([0..1, 0..1, 1..2, 2..4]).unwrap();
        assert_eq!(values.into_raw_vec_and_offset().0, [6.0, 7.0]);
        // A variable without a grid mapping lies on the same cells.
        let height = path.join("height");
        let bytes: Vec<u8> = [0.5_f32; 12]
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        array(&height, "<f4", &[3, 4], &[row, column], &bytes);
        let config = OpenConfig::new().with_channels(Some(vec!["height".into()]));
        let fields = config.open(&path).unwrap();
        assert!(fields.grid().is_curvilinear());
    }
}

#[test]
fn a_rotated_pole_at_the_true_one_is_a_regular_grid() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [
        ("rlat", "grid_latitude", &[-1.0, 0.0, 1.0][..]),
        ("rlon", "grid_longitude", &[-2.0, -1.0, 0.0, 1.0][..]),
    ];
    let path = write_lines(folder.path(), lines, true);
    rotate(&path, [90.0, 180.0]);
    let fields = open(&path).unwrap();
    assert_eq!(fields.grid().lat(), [-1.0, 0.0, 1.0]);
    assert_eq!(fields.grid().lon(), [358.0, 359.0, 0.0, 1.0]);
}

#[test]
fn cells_in_a_map_projection_have_positions() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [
        ("y", "projection_y_coordinate", &[-3.0, 0.0, 3.0][..]),
        ("x", "projection_x_coordinate", &[-3.0, 0.0, 3.0, 6.0][..]),
    ];
    let path = write_lines(folder.path(), lines, true);
    for name in ["y", "x"] {
        let text = std::fs::read_to_string(path.join(name).join(".zattrs")).unwrap();
        std::fs::write(
            path.join(name).join(".zattrs"),
            text.replace("degrees", "km"),
        )
        .unwrap();
    }
    let numbers = [
        ("latitude_of_projection_origin", 60.0),
        ("longitude_of_projection_origin", 10.0),
        ("earth_radius", 6_371_000.0),
    ];
    project(&path, "lambert_azimuthal_equal_area", &numbers);
    let fields = open(&path).unwrap();
    let grid = fields.grid();
    assert!(grid.is_curvilinear() && grid.shape() == [3, 4]);
    let [lat, lon] = grid.cells().unwrap();
    // Three kilometres are 0.02698 degrees.
    assert!((lat[5] - 60.0).abs() < 1e-9 && (lon[5] - 10.0).abs() < 1e-9);
    assert!((lat[9] - 60.026_98).abs() < 1e-5 && (lon[9] - 10.0).abs() < 1e-9);
    assert!((lon[6] - 10.053_96).abs() < 1e-5);
    let weights = grid.cell_weights().unwrap();
    assert!(
        weights.iter().all(|weight| (weight - 1.0).abs() < 1e-5),
        "{weights:?}"
    );
}

#[test]
fn the_last_column_is_left_out_where_it_repeats_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [
        ("lat", "latitude", &[-30.0, 30.0][..]),
        ("lon", "longitude", &[0.0, 90.0, 180.0, 270.0, 360.0][..]),
    ];
    let path = write_lines(folder.path(), lines, true);
    let fields = open(&path).unwrap();
    assert_eq!(
        fields.grid(),
        &Grid::new(vec![-30.0, 30.0], lines[1].2[..4].into()).unwrap()
    );
    let told: Vec<String> = fields.left_out().iter().map(ToString::to_string).collect();
    assert_eq!(told, ["lon (its last column repeats the first)"]);
    let values = fields.read([0..1, 0..1, 0..2, 2..4]).unwrap();
    assert_eq!(values.into_raw_vec_and_offset().0, [2.0, 3.0, 7.0, 8.0]);
    assert!(fields.read([0..1, 0..1, 0..2, 0..5]).is_err());
}
