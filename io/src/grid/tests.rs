use super::description::{AttributeValue, Line, Mapping, attribute};
use super::*;

#[test]
fn weights_are_the_areas_of_the_rows() {
    let centred = Grid::cell_centered(4, 8).unwrap().latitude_weights();
    // Rows of 45 degrees: sin 90 - sin 45 and sin 45 - sin 0; their mean is 1/2.
    let half = 0.5_f64.sqrt();
    for (weight, expected) in centred.iter().zip([1.0 - half, half, half, 1.0 - half]) {
        assert!((weight - 2.0 * expected).abs() < 1e-14, "{centred:?}");
    }
    let poles = Grid::with_poles(3, 4).unwrap().latitude_weights();
    // 90 to 45, 45 to -45, -45 to -90; the mean is 2/3.
    for (weight, expected) in poles.iter().zip([1.0 - half, 2.0 * half, 1.0 - half]) {
        assert!((weight - 1.5 * expected).abs() < 1e-14, "{poles:?}");
    }
}

#[test]
fn what_is_no_grid_is_not_read() {
    let read = |text: &str| serde_json::from_str::<Grid>(text);
    let grid = Grid::cell_centered(4, 8).unwrap();
    let text = serde_json::to_string(&grid).unwrap();
    assert_eq!(read(&text).unwrap(), grid);
    for lat in ["[]", "[10, 20, 15]", "[95, 0]"] {
        let error = read(&format!("{{\"lat\": {lat}, \"lon\": [0]}}")).unwrap_err();
        assert!(error.to_string().contains("lat"), "{error}");
    }
}

#[test]
fn an_unstructured_grid_keeps_the_positions_of_its_cells() {
    let grid = |lon: &[f64]| Grid::unstructured(vec![60.0, 0.0, 0.0], lon.to_vec());
    let first = grid(&[10.0, 90.0, -90.0]).unwrap();
    let text = serde_json::to_string(&first).unwrap();
    assert_eq!(serde_json::from_str::<Grid>(&text).unwrap(), first);
    let swapped = grid(&[10.0, 270.0, 90.0]).unwrap();
    assert_eq!(first.other_cell(&swapped), Some(1));
    assert!(first.agrees_with(&grid(&[370.0, 90.0, 269.999_99]).unwrap()));
    // A grid that was saved without positions.
    let unknown = Grid::new(first.lat().to_vec(), first.lon().to_vec()).unwrap();
    assert!(unknown.agrees_with(&first) && !first.agrees_with(&swapped));
    // Earlier versions wrote the row and the columns, too.
    let columns = r#""lon":[0.0,120.0,240.0],"cells""#;
    for (lat, is_grid) in [("[0.0]", true), ("[1.0,0.0]", false)] {
        let rows = format!("\"lat\":{lat},{columns}");
        let text = text.replace("\"cells\"", &rows);
        let read = serde_json::from_str::<Grid>(&text);
        assert_eq!(read.ok(), is_grid.then(|| first.clone()));
    }
}

#[test]
fn coordinates_that_are_no_grid_are_refused() {
    let message = |lat: &[f64], lon: &[f64]| {
        Grid::new(lat.to_vec(), lon.to_vec())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        message(&[10.0, 20.0, 15.0], &[0.0]),
        "lat: got 3 values from 10 to 15, expected strictly falling (or rising) degrees from 90 to -90"
    );
    assert!(message(&[91.0, 0.0], &[0.0]).starts_with("lat: got 2 values from 91"));
    assert!(message(&[f64::NAN], &[0.0]).starts_with("lat: got [NaN]"));
    assert!(message(&[1.0], &[0.0, 360.0]).starts_with("lon: got 2 values from 0 to 360"));
    assert!(message(&[1.0], &[]).starts_with("lon: got []"));
    for lon in [
        &[0.0, 90.0, 45.0][..],
        &[-180.0, 0.0, 180.0],
        &[20.0, 10.0, 0.0],
        &[f64::NAN],
        &[0.0, f64::INFINITY],
    ] {
        assert!(message(&[1.0], lon).starts_with("lon: got "), "{lon:?}");
    }
}

#[test]
fn a_grid_is_the_same_in_every_notation_of_its_longitudes() {
    let grid = |lon: &[f64]| Grid::new(vec![1.0], lon.to_vec()).unwrap();
    let from_date_line = grid(&[-180.0, -90.0, 0.0, 90.0]);
    assert_eq!(from_date_line.lon(), [180.0, 270.0, 0.0, 90.0]);
    for lon in [
        [180.0, 270.0, 360.0, 450.0],
        [180.0, 270.0, 0.0, 90.0],
        [-180.0, -90.0, -0.0, 90.0],
    ] {
        assert_eq!(grid(&lon), from_date_line, "{lon:?}");
    }
    assert_eq!(from_date_line.kind(), "equiangular");
    // Columns in another order are another grid.
    assert_ne!(grid(&[0.0, 90.0, 180.0, 270.0]), from_date_line);
    // No longitude is rounded up to 360.
    assert_eq!(grid(&[-1e-17, 1.0]).lon(), [0.0, 1.0]);
    // Tenths of a degree differ in their last bits between the notations, and more so in single
    // precision.
    let tenths = |first: i32| {
        (first..first + 7)
            .map(|i| f64::from(i) / 10.0)
            .collect::<Vec<_>>()
    };
    let (west, east) = (grid(&tenths(-1799)), grid(&tenths(1801)));
    let single: Vec<f64> = tenths(-1799)
        .into_iter()
        .map(|lon| f64::from(lon as f32))
        .collect();
    assert!(west.agrees_with(&east) && west.agrees_with(&grid(&single)));
    assert!(!west.agrees_with(&grid(&tenths(1802))));
}

#[test]
fn a_description_is_kept_and_does_not_make_grids_differ() {
    let plain = Grid::curvilinear([2, 2], vec![0.0, 0.0, 1.0, 1.0], vec![0.0; 4]).unwrap();
    let mut grid = plain.clone().with_cell_areas(vec![1.0; 4]).unwrap();
    let numbers = AttributeValue::Numbers(vec![30.0, 60.0]);
    let line = |step: f64| Line {
        values: vec![0.0, step],
        attributes: vec![attribute("units", "m")],
    };
    grid.description = Description {
        mapping: Some(Mapping {
            name: "crs".into(),
            attributes: vec![("standard_parallel".into(), numbers)],
        }),
        lines: Some([line(0.1), line(3e3)]),
        area_units: Some("m2".into()),
    };
    let text = serde_json::to_string(&grid).unwrap();
    let read = serde_json::from_str::<Grid>(&text).unwrap();
    assert_eq!(read.description, grid.description);
    assert_eq!(grid.description.area_units.as_deref(), Some("m2"));
    // Other areas may be in another unit.
    assert_eq!(
        grid.clone().without_cell_areas().description.area_units,
        None
    );
    assert_eq!(grid.without_cell_areas(), plain);
    let text = serde_json::to_string(&plain).unwrap();
    assert!(!text.contains("description"), "{text}");
}
