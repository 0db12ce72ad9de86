//! Stores in the layout of anemoi-datasets.

use std::path::{Path, PathBuf};

use halocline_io::{
    ConvertConfig, DatasetConfig, FieldDataset, Gaps, OpenConfig, OutputConfig, OutputFormat, Scan,
    Statistics, convert, inspect, open,
};

use crate::coordinates::array;

const TIMES: usize = 4;
const CELLS: usize = 6;
/// Latitude and longitude of each cell of a grid of three rows.
const GRID: [[f64; CELLS]; 2] = [
    [-10.0, -10.0, 0.0, 0.0, 10.0, 10.0],
    [0.0, 90.0, 0.0, 90.0, 0.0, 90.0],
];

/// Writes a store whose values encode time, variable and cell.
fn write(folder: &Path, [lat, lon]: [[f64; CELLS]; 2], members: usize, missing: &str) -> PathBuf {
    let path = folder.join("era5.zarr");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join(".zgroup"), "{\"zarr_format\": 2}").unwrap();
    let attributes = serde_json::json!({
        "variables": ["2t", "z_500"], "missing_dates": missing.split_whitespace().collect::<Vec<_>>(),
    });
    std::fs::write(path.join(".zattrs"), attributes.to_string()).unwrap();
    let value = |index: usize| {
        let (cell, row) = (index % CELLS, index / CELLS / members);
        (100 * (row / 2) + 10 * (row % 2) + cell) as f32
    };
    let values = (0..TIMES * 2 * members * CELLS).map(value);
    let values: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let dims = ["time", "variable", "ensemble", "cell"];
    let shape = [TIMES, 2, members, CELLS];
    array(&path.join("data"), "<f4", &shape, &dims, &values);
    let dates = (0..TIMES as i64).flat_map(|time| (time * 21600).to_le_bytes());
    let dates: Vec<u8> = dates.collect();
    array(&path.join("dates"), "<M8[s]", &[TIMES], &["time"], &dates);
    for (name, values) in [("latitudes", lat), ("longitudes", lon)] {
        let bytes: Vec<u8> = values.into_iter().flat_map(f64::to_le_bytes).collect();
        array(&path.join(name), "<f8", &[CELLS], &["cell"], &bytes);
    }
    let mean: Vec<u8> = [0.5_f64; 2]
        .into_iter()
        .flat_map(f64::to_le_bytes)
        .collect();
    array(&path.join("mean"), "<f8", &[2], &["variable"], &mean);
    path
}

#[test]
fn cells_of_a_grid_are_rows_and_columns() {
    let turned = [
        [-10.0, 0.0, 10.0, -10.0, 0.0, 10.0],
        [0.0, 0.0, 0.0, 90.0, 90.0, 90.0],
    ];
    for (places, expected, single) in [
        (GRID, [113.0, 115.0, 213.0, 215.0], 301.0),
        (turned, [114.0, 115.0, 214.0, 215.0], 303.0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let fields = open(write(folder.path(), places, 1, "")).unwrap();
        assert_eq!(fields.channels(), ["2t", "z_500"]);
        assert_eq!(fields.grid().lat(), [-10.0, 0.0, 10.0]);
        assert_eq!(fields.grid().lon(), [0.0, 90.0]);
        assert_eq!(fields.times(), [0.0, 21600.0, 43200.0, 64800.0]);
        let found = fields.read([1..3, 1..2, 1..3, 1..2]).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
        let found = fields.read([3..4, 0..1, 0..1, 1..2]).unwrap();
        assert_eq!(found[[0; 4]], single);
    }
}

#[test]
fn missing_dates_are_not_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), GRID, 1, "1970-01-01T06:00:00");
    let config = OpenConfig::of_channels(&["z_500"]).with_gaps(Gaps::Skip);
    let fields = config.open(&path).unwrap();
    assert_eq!(fields.channels(), ["z_500"]);
    assert_eq!(fields.times(), [0.0, 43200.0, 64800.0]);
    let found = fields.read([0..3, 0..1, 2..3, 0..1]).unwrap();
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [14.0, 214.0, 314.0]);
    let error = OpenConfig::of_channels(&["q_500"]).open(&path).unwrap_err();
    assert!(error.to_string().contains("z_500"), "{error}");
}

#[test]
fn cells_of_no_grid_are_one_row() {
    let reduced = [
        [10.0, 10.0, 0.0, 0.0, 0.0, -10.0],
        [0.0, 180.0, 0.0, 120.0, 240.0, 0.0],
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), reduced, 1, "");
    let fields = open(&path).unwrap();
    assert_eq!(fields.grid().shape(), [1, CELLS]);
    let found = fields.read([2..3, 1..2, 0..1, 3..5]).unwrap();
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [213.0, 214.0]);
    let chosen = OpenConfig::of_channels(&["z_500"]).open(&path).unwrap();
    let found = chosen.read([2..3, 0..1, 0..1, 3..5]).unwrap();
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [213.0, 214.0]);
    assert_eq!(chosen.grid(), fields.grid());
    assert_eq!(
        fields.grid().cells(),
        Some(reduced.each_ref().map(|values| &values[..]))
    );
    let forcings = ["sin_latitude", "cos_longitude", "cos_solar_zenith_angle"];
    let config = DatasetConfig::new().with_forcings(forcings.map(String::from).into());
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    let forcing = dataset.sample(0).unwrap().forcing;
    for cell in 0..CELLS {
        let [lat, lon] = reduced.map(|values| values[cell].to_radians());
        let found = [0, 1].map(|channel| f64::from(forcing[[channel, 0, cell]]));
        assert!((found[0] - lat.sin()).abs() < 1e-6, "{forcing}");
        assert!((found[1] - lon.cos()).abs() < 1e-6, "{forcing}");
    }
    // At midnight UTC, the sun shines on the date line.
    assert!(forcing[[2, 0, 1]] > 0.8 && forcing[[2, 0, 2]] == 0.0);
    let report = inspect(&path, &OpenConfig::new(), Scan::Sample).unwrap();
    assert!(
        report.to_string().contains(
            "unstructured, 6 cells\n  cells      latitude -10.000 to 10.000, longitude 0.000 to 240.000\n"
        ),
        "{report}"
    );
}

#[test]
fn cells_at_other_positions_are_another_grid() {
    let reduced = [
        [10.0, 10.0, 0.0, 0.0, 0.0, -10.0],
        [0.0, 180.0, 0.0, 120.0, 240.0, 0.0],
    ];
    let mut swapped = reduced;
    swapped[1].swap(3, 4);
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let first = write(folders[0].path(), reduced, 1, "");
    let other = write(folders[1].path(), swapped, 1, "");
    let told = "cell 3 is at latitude 0, longitude 240, not latitude 0, longitude 120";
    let error = FieldDataset::open(&[&first, &other], &DatasetConfig::new()).unwrap_err();
    assert!(error.to_string().contains(told), "{error}");
    // Statistics, and output in each format, keep the positions.
    let statistics = Statistics::compute(&[open(&first).unwrap()], 1).unwrap();
    statistics.save(folders[2].path()).unwrap();
    let loaded = Statistics::load(folders[2].path()).unwrap();
    let mut grids = vec![loaded.metadata().grid().clone()];
    let source = open(&first).unwrap();
    for format in [
        OutputFormat::Zarr2,
        OutputFormat::Zarr3,
        OutputFormat::NetCdf3,
    ] {
        let path = folders[2].path().join(format!("{format:?}"));
        let output = OutputConfig::new().with_format(format);
        let config = ConvertConfig::new().with_output(output);
        convert(&source, &path, &config, |_| ()).unwrap();
        let written = open(&path).unwrap();
        assert_eq!(written.channels(), source.channels());
        grids.push(written.grid().clone());
    }
    for grid in grids {
        assert_eq!(&grid, source.grid());
        let config = OpenConfig::new().with_grid(Some(grid));
        assert!(config.open(&first).is_ok());
        let error = config.open(&other).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn several_members_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), GRID, 3, "");
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("3 ensemble members"), "{error}");
}
