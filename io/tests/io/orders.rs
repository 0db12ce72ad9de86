//! Files whose rows run in the other direction, or whose columns start at another meridian.

use std::ops::Range;
use std::path::Path;

use halocline_io::{
    DatasetConfig, FieldDataset, FieldWriter, Fields, Grid, OpenConfig, Series, Statistics,
    WriterConfig, open,
};
use ndarray::Array3;

use crate::STEP;
use crate::formats::{lenient, store};

fn from_north() -> Grid {
    Grid::new(vec![60.0, 20.0, -40.0], vec![0.0, 90.0, 180.0, 270.0]).unwrap()
}

fn from_south() -> Grid {
    Grid::new(vec![-40.0, 20.0, 60.0], vec![-180.0, -90.0, 0.0, 90.0]).unwrap()
}

/// Returns a field at a time whose values depend on the coordinates of their cells.
fn field(grid: &Grid, time: usize) -> Array3<f32> {
    let [rows, columns] = grid.shape();
    Array3::from_shape_fn((1, rows, columns), |(_, row, column)| {
        (grid.lat()[row] + 7.0 * grid.lon()[column] + 1e5 * time as f64) as f32
    })
}

fn write(path: &Path, grid: &Grid, name: &str, times: Range<usize>) {
    let mut writer = FieldWriter::create(path, grid, &[name], &WriterConfig::new()).unwrap();
    for time in times {
        let seconds = time as f64 * STEP;
        writer.append(seconds, field(grid, time).view()).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn boxes_are_read_in_the_order_of_a_grid() {
    let config = lenient();
    let south = config.open(store("v2.zarr")).unwrap();
    let config = config.with_channels(Some(south.channels().to_vec()));
    let stored = config.open(store("v3.zarr")).unwrap();
    assert_ne!(stored.grid(), south.grid());
    let north = config.with_grid(Some(south.grid().clone()));
    let north = north.open(store("v3.zarr")).unwrap();
    assert_eq!(north.grid(), south.grid());
    for cells in [
        [0..4, 0..4, 0..5, 0..8],
        [1..3, 1..4, 1..3, 2..7],
        [0..1, 0..1, 4..5, 4..6],
        [2..3, 3..4, 0..1, 3..4],
        [0..1, 0..1, 0..2, 3..3],
    ] {
        let needed = north.traffic().needed;
        let found = north.read(cells.clone()).unwrap();
        assert_eq!(found, south.read(cells.clone()).unwrap(), "{cells:?}");
        // No more is read than the box. The field without a time has four bytes too.
        let count: usize = cells.iter().map(ExactSizeIterator::len).product();
        assert!(north.traffic().needed - needed <= 4 * count as u64);
    }
    assert!(north.read([0..1, 0..1, 0..6, 0..1]).is_err());
}

#[test]
fn files_that_are_combined_may_each_have_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["a.h5", "b.h5"].map(|name| folder.path().join(name));
    write(&first, &from_north(), "t2m", 0..3);
    write(&second, &from_south(), "t2m", 3..6);
    for series in [Series::Separate, Series::Joined] {
        for paths in [[&first, &second], [&second, &first]] {
            let grid = open(paths[0]).unwrap().grid().clone();
            let config = DatasetConfig::new().with_series(series);
            let dataset = FieldDataset::open(&paths, &config).unwrap();
            assert!(dataset.metadata().grid().agrees_with(&grid));
            for index in 0..dataset.len() {
                let time = (dataset.time(index) / STEP) as usize;
                let sample = dataset.sample(index).unwrap();
                assert_eq!(sample.input, field(&grid, time), "{series:?} {time}");
                assert_eq!(sample.target, field(&grid, time + 1), "{series:?} {time}");
            }
        }
    }
    // Other channels at the same times, merged.
    write(&second, &from_south(), "z@500", 0..3);
    let merged = OpenConfig::new().open_joined(&[&first, &second]).unwrap();
    let values = merged.read([2..3, 1..2, 0..3, 0..4]).unwrap();
    assert_eq!(
        values.index_axis(ndarray::Axis(0), 0),
        field(&from_north(), 2)
    );
}

#[test]
fn constants_are_in_the_order_of_the_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    write(&path, &from_north(), "t2m", 0..3);
    let forcing = |grid: &Grid| {
        let land = folder.path().join("land.h5");
        write(&land, grid, "oro", 0..1);
        let config = DatasetConfig::new()
            .with_constants(Some(land))
            .with_forcings(vec!["oro".into()]);
        let dataset = FieldDataset::open(&[&path], &config).unwrap();
        dataset.sample(0).unwrap().forcing
    };
    let difference = forcing(&from_north()) - forcing(&from_south());
    assert!(difference.iter().all(|value| value.abs() < 1e-5));
}

#[test]
fn the_coordinate_by_which_grids_differ_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["a.h5", "b.h5"].map(|name| folder.path().join(name));
    let other = Grid::new(vec![-40.0, 20.0, 60.0], vec![-180.0, -90.0, 0.0, 91.0]).unwrap();
    write(&first, &from_north(), "t2m", 0..3);
    write(&second, &other, "t2m", 3..6);
    let told = "(longitude[3] is 91, not 90)";
    let together = FieldDataset::open(&[&first, &second], &DatasetConfig::new());
    let error = together.unwrap_err().to_string();
    assert!(
        error.contains("b.h5: grid: found") && error.contains(told),
        "{error}"
    );
    let config = OpenConfig::new().with_grid(Some(from_north()));
    let error = config.open(&second).unwrap_err().to_string();
    assert!(
        error.starts_with("grid: got") && error.contains(told),
        "{error}"
    );
    // Cells that are not in rows have one order.
    let cells = |lon: [f64; 2]| Grid::unstructured(vec![10.0, 20.0], lon.into()).unwrap();
    let path = folder.path().join("cells.h5");
    write(&path, &cells([5.0, 30.0]), "t2m", 0..3);
    let config = OpenConfig::new().with_grid(Some(cells([30.0, 5.0])));
    let error = config.open(&path).unwrap_err().to_string();
    assert!(error.ends_with("2 cells, in the same order"), "{error}");
    // Files that were opened one by one.
    write(&second, &from_south(), "t2m", 3..6);
    let files = [open(&first).unwrap(), open(&second).unwrap()];
    let error = Statistics::compute(&files, 1).unwrap_err().to_string();
    assert!(error.contains("the same in another order"), "{error}");
}
