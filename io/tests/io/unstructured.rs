//! Fields on one dim of cells: unstructured, reduced and HEALPix grids, and stations.

use std::path::{Path, PathBuf};

use halocline_io::{
    ConvertConfig, DatasetConfig, FieldDataset, Metadata, OpenConfig, OutputConfig, OutputFormat,
    Scan, Statistics, convert, inspect, open,
};

use crate::coordinates::{array, attribute};
use crate::formats::replace;

const TIMES: usize = 3;
/// Latitude and longitude of each cell, in degrees.
const CELLS: [[f64; 4]; 2] = [[60.0, 0.0, -30.0, 90.0], [10.0, 350.0, 90.0, 0.0]];

fn doubles(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    values.into_iter().flat_map(f64::to_le_bytes).collect()
}

/// Writes a store of times, of levels 10 and 2 and, along a dim of cells, of `t2m`, `w` with levels
/// and `topography`, whose values encode time, level and cell.
fn write(folder: &Path, dim: &str, cells: usize) -> PathBuf {
    let path = folder.join("cells.zarr");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join(".zgroup"), "{\"zarr_format\": 2}").unwrap();
    let hours = doubles((0..TIMES).map(|time| 6.0 * time as f64));
    array(&path.join("time"), "<f8", &[TIMES], &["time"], &hours);
    attribute(&path.join("time"), "\"units\": \"hours since 1970-01-01\"");
    let heights = doubles([10.0, 2.0]);
    array(&path.join("height"), "<f8", &[2], &["height"], &heights);
    let field = |name: &str, dims: &[&str], shape: &[usize], value: &dyn Fn(usize) -> usize| {
        let values = (0..shape.iter().product::<usize>()).map(|index| value(index) as f32);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        array(&path.join(name), "<f4", shape, dims, &bytes);
    };
    field("t2m", &["time", dim], &[TIMES, cells], &|index| {
        1000 * (index / cells) + index % cells
    });
    // The cells come first.
    field(
        "w",
        &[dim, "time", "height"],
        &[cells, TIMES, 2],
        &|index| {
            let (cell, time, level) = (index / 2 / TIMES, index / 2 % TIMES, index % 2);
            1000 * time + 100 * (level + 1) + cell
        },
    );
    field("topography", &[dim], &[cells], &|index| index);
    path
}

/// Adds the positions of the cells as variables with these names and attributes.
fn place(path: &Path, dim: &str, scale: f64, positions: [(&str, &str); 2]) {
    for ((name, attributes), values) in positions.into_iter().zip(CELLS) {
        let bytes = doubles(values.map(|value| value * scale));
        array(&path.join(name), "<f8", &[CELLS[0].len()], &[dim], &bytes);
        if !attributes.is_empty() {
            attribute(&path.join(name), attributes);
        }
    }
}

#[test]
fn cells_with_positions_are_one_row() {
    let radians = 1.0_f64.to_radians();
    for (dim, scale, positions) in [
        (
            "ncells",
            radians,
            [
                (
                    "clat",
                    "\"standard_name\": \"latitude\", \"units\": \"radian\"",
                ),
                (
                    "clon",
                    "\"standard_name\": \"longitude\", \"units\": \"radian\"",
                ),
            ],
        ),
        // The file of the grid.
        (
            "cell",
            radians,
            [
                (
                    "clat",
                    "\"standard_name\": \"grid_latitude\", \"units\": \"radian\"",
                ),
                (
                    "clon",
                    "\"standard_name\": \"grid_longitude\", \"units\": \"radian\"",
                ),
            ],
        ),
        ("nCells", radians, [("latCell", ""), ("lonCell", "")]),
        (
            "mesh2d_nFaces",
            1.0,
            [
                ("mesh2d_face_y", "\"units\": \"degrees_north\""),
                ("mesh2d_face_x", "\"units\": \"degrees_east\""),
            ],
        ),
        ("values", 1.0, [("latitude", ""), ("longitude", "")]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), dim, 4);
        place(&path, dim, scale, positions);
        // Corners and numbers of cells, which are no fields.
        let corners = doubles([0.0; 12]);
        array(
            &path.join("clat_bnds"),
            "<f8",
            &[4, 3],
            &[dim, "nv"],
            &corners,
        );
        attribute(&path.join(positions[0].0), "\"bounds\": \"clat_bnds\"");
        array(
            &path.join(dim),
            "<f8",
            &[4],
            &[dim],
            &doubles([0.0, 1.0, 2.0, 3.0]),
        );

        let fields = open(&path).unwrap();
        let mut channels = fields.channels().to_vec();
        channels.sort();
        assert_eq!(channels, ["t2m", "topography", "w@10", "w@2"], "{dim}");
        assert_eq!(fields.grid().shape(), [1, 4], "{dim}");
        let found = fields.grid().cells().unwrap();
        for (found, expected) in found.into_iter().zip(CELLS) {
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-9, "{dim}: {found} {expected}");
            }
        }
        let report = inspect(&path, &OpenConfig::new(), Scan::Sample).unwrap();
        let report = report.to_string();
        let told = "latitude -30.000 to 90.000, longitude -10.000 to 90.000";
        assert!(report.contains(told), "{dim}: {report}");
        assert!(!report.contains("radian"), "{dim}: {report}");
        let fields = OpenConfig::of_channels(&["t2m", "w@2", "topography"]).open(&path);
        let values = fields.unwrap().read([1..3, 0..3, 0..1, 1..3]).unwrap();
        let expected = [
            [[1001.0, 1002.0], [1201.0, 1202.0], [1.0, 2.0]],
            [[2001.0, 2002.0], [2201.0, 2202.0], [1.0, 2.0]],
        ];
        let expected: Vec<f32> = expected.into_iter().flatten().flatten().collect();
        assert_eq!(values.into_iter().collect::<Vec<f32>>(), expected, "{dim}");
    }
}

/// The names of ICON and MPAS, and any name in `cell_measures`, which comes first.
#[test]
fn areas_of_cells_are_weights_and_no_channels() {
    let areas = |name: &str, measures: &str, format: OutputFormat| {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "cell", 4);
        place(&path, "cell", 1.0, [("lat", ""), ("lon", "")]);
        let bytes = doubles([1.0, 3.0, 3.0, 1.0]);
        array(&path.join(name), "<f8", &[4], &["cell"], &bytes);
        attribute(&path.join("t2m"), measures);
        let fields = OpenConfig::of_channels(&["t2m"]).open(&path).unwrap();
        let expected = Some(vec![0.5, 1.5, 1.5, 0.5]);
        assert_eq!(fields.grid().cell_weights(), expected, "{name}");
        let all = open(&path).unwrap();
        assert!(!all.channels().contains(&name.to_string()), "{name}");
        let report = inspect(&path, &OpenConfig::of_channels(&["t2m"]), Scan::Sample);
        let told = "areas      0.500 to 1.500 times the mean";
        assert!(report.unwrap().to_string().contains(told), "{name}");
        let copy = folder.path().join("copy");
        let config = ConvertConfig::new().with_output(OutputConfig::new().with_format(format));
        convert(&fields, &copy, &config, |_| ()).unwrap();
        let copy = open(&copy).unwrap();
        assert_eq!(copy.grid(), fields.grid(), "{name}");
        assert_eq!(copy.channels(), ["t2m"], "{name}");
    };
    areas("cell_area", "\"units\": \"K\"", OutputFormat::Zarr3);
    areas("areaCell", "\"units\": \"K\"", OutputFormat::NetCdf3);
    let measures = "\"cell_measures\": \"volume: v area: dA\"";
    areas("dA", measures, OutputFormat::Zarr2);
}

#[test]
fn cells_without_an_area_do_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "cell", 4);
    place(&path, "cell", 1.0, [("lat", ""), ("lon", "")]);
    let bytes = doubles([f64::NAN, 1.0, 3.0, f64::NAN]);
    array(&path.join("areaCell"), "<f8", &[4], &["cell"], &bytes);
    let fields = OpenConfig::of_channels(&["t2m"]).open(&path).unwrap();
    let expected = Some(vec![0.0, 1.0, 3.0, 0.0]);
    assert_eq!(fields.grid().cell_weights(), expected);
}

#[test]
fn statistics_weight_cells_by_area() {
    let [folder, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [path, unknown] = [&folder, &other].map(|folder| {
        let path = write(folder.path(), "cell", 4);
        place(&path, "cell", 1.0, [("lat", ""), ("lon", "")]);
        path
    });
    let areas = doubles([1.0, 1.0, 1.0, 5.0]);
    array(&path.join("cell_area"), "<f8", &[4], &["cell"], &areas);
    let open = |path: &PathBuf| OpenConfig::of_channels(&["t2m"]).open(path).unwrap();
    // A file without areas counts like the first one, which has them.
    for files in [vec![open(&path)], vec![open(&path), open(&unknown)]] {
        let found = Statistics::compute(&files, 1).unwrap();
        // 0, 1000 and 2000 at the three times, and 0 to 3 in the cells, whose squares have the mean
        // (0 + 1 + 4 + 5 · 9) / 8.
        let mean = 18.0 / 8.0;
        let square = 2.0e6 / 3.0 + 50.0 / 8.0 - mean * mean;
        assert!((found.means()[0] - 1000.0 - mean).abs() < 1e-9);
        assert!((found.stds()[0] - square.sqrt()).abs() < 1e-9);
        assert_eq!(found.increment_means(), [1000.0]);
    }
    // Areas that the first one lacks do not count.
    let found = Statistics::compute(&[open(&unknown), open(&path)], 1).unwrap();
    assert!((found.means()[0] - 1001.5).abs() < 1e-9);
}

#[test]
fn forcings_statistics_and_outputs_have_the_positions_of_cells() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "station", 4);
    place(&path, "station", 1.0, [("lat", ""), ("lon", "")]);
    let config = DatasetConfig::new()
        .with_inputs(Some(vec!["t2m".into(), "w@10".into()]))
        .with_forcings(vec!["sin_latitude".into(), "topography".into()]);
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    let forcing = dataset.sample(0).unwrap().forcing;
    for (cell, lat) in CELLS[0].into_iter().enumerate() {
        let sine = f64::from(forcing[[0, 0, cell]]);
        assert!((sine - lat.to_radians().sin()).abs() < 1e-6, "{forcing}");
    }
    let fields = open(&path).unwrap();
    let statistics = Statistics::compute(&[open(&path).unwrap()], 1).unwrap();
    assert_eq!(statistics.metadata().grid(), fields.grid());
    for format in [OutputFormat::Zarr3, OutputFormat::NetCdf3] {
        let copy = folder.path().join(format!("{format:?}"));
        let config = ConvertConfig::new().with_output(OutputConfig::new().with_format(format));
        convert(&fields, &copy, &config, |_| ()).unwrap();
        assert_eq!(open(&copy).unwrap().grid(), fields.grid());
    }
}

/// The numbers of healpy.pix2ang(2, …, lonlat=True).
#[test]
fn cells_of_a_healpix_sphere_have_the_positions_of_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "cell", 48);
    let mapping = path.join("crs");
    array(&mapping, "<f8", &[], &[], &doubles([0.0]));
    attribute(&mapping, "\"grid_mapping_name\": \"healpix\"");
    attribute(&path.join("t2m"), "\"grid_mapping\": \"crs\"");
    let check = |sine: f64, meridian: f64| {
        let fields = OpenConfig::of_channels(&["t2m"]).open(&path).unwrap();
        let [lat, lon] = fields.grid().cells().unwrap();
        assert!((lat[0] - sine.asin().to_degrees()).abs() < 1e-9, "{lat:?}");
        assert!((lon[0] - meridian).abs() < 1e-9, "{lon:?}");
    };
    attribute(&mapping, "\"healpix_order\": \"nest\"");
    check(1.0 / 3.0, 45.0);
    // The name in the CF conventions.
    attribute(&mapping, "\"indexing_scheme\": \"ring\"");
    check(11.0 / 12.0, 45.0);
    // Statistics have the order in place of the positions.
    let fields = OpenConfig::of_channels(&["t2m"]).open(&path).unwrap();
    let metadata = Metadata::of(&fields).unwrap();
    metadata.save(folder.path()).unwrap();
    assert_eq!(Metadata::load(folder.path()).unwrap(), metadata);
    let text = std::fs::read_to_string(folder.path().join("data.json")).unwrap();
    assert!(
        text.contains("\"healpix_nside\": 2") && !text.contains("\"lon\": ["),
        "{text}"
    );
    let numbers = doubles((0..48).rev().map(f64::from));
    array(&path.join("cell"), "<f8", &[48], &["cell"], &numbers);
    check(-11.0 / 12.0, 315.0);
}

/// HEALPix spheres of 12 · 2² cells in an unknown order.
#[test]
fn cells_of_a_healpix_sphere_need_no_positions() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "cell", 48);
    assert!(open(&path).is_err());
    array(&path.join("crs"), "<f8", &[], &[], &doubles([0.0]));
    attribute(&path.join("crs"), "\"grid_mapping_name\": \"healpix\"");
    attribute(&path.join("t2m"), "\"grid_mapping\": \"crs\"");
    let read = || {
        let fields = OpenConfig::of_channels(&["w@10"]).open(&path).unwrap();
        assert_eq!(
            (fields.grid().shape(), fields.grid().cells()),
            ([1, 48], None)
        );
        fields.read([2..3, 0..1, 0..1, 47..48]).unwrap()[[0; 4]]
    };
    assert_eq!(read(), 2147.0);
    attribute(&path.join("crs"), "\"healpix_nside\": 2");
    assert_eq!(read(), 2147.0);
    let report = inspect(&path, &OpenConfig::of_channels(&["w@10"]), Scan::Sample);
    let report = report.unwrap().to_string();
    let told = "w: 1 x 4 ranks decode 12.0 times what they need (each a process; at most 3.0 times as local";
    for part in ["48 cells without positions\n", told] {
        assert!(report.contains(part), "{part} in\n{report}");
    }
    let config = DatasetConfig::new().with_forcings(vec!["cos_latitude".into()]);
    let error = FieldDataset::open(&[&path], &config)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("as cell_latitude and cell_longitude"),
        "{error}"
    );
    // The 12 · 2⁴⁰ columns of a damaged store are not allocated.
    replace(
        &path.join("topography/.zarray"),
        "\"shape\":[48]",
        "\"shape\":[13194139533312]",
    );
    replace(&path.join("crs/.zattrs"), "nside\": 2", "nside\": 1048576");
    let damaged = OpenConfig::of_channels(&["topography"]).open(&path);
    let error = damaged.unwrap_err().to_string();
    assert!(error.contains("at most 16777216 cells"), "{error}");
    replace(&path.join("crs/.zattrs"), "1048576", "4");
    let error = open(&path).unwrap_err().to_string();
    assert!(
        error.contains("none with the 12 · n² cells of the grid mapping crs"),
        "{error}"
    );
}

/// The output of MPAS, with times as texts, and a file that lacks them.
#[test]
fn fields_on_a_dim_of_times_without_a_coordinate_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "nCells", 4);
    place(&path, "nCells", 0.01, [("latCell", ""), ("lonCell", "")]);
    assert!(open(&path).is_ok());
    std::fs::remove_dir_all(path.join("time")).unwrap();
    let left_out = || {
        assert!(open(&path).is_ok());
        let error = OpenConfig::of_channels(&["t2m"]).open(&path).unwrap_err();
        let (error, told) = (error.to_string(), "t2m (time: no time coordinate along");
        assert!(error.contains(told), "{error}");
    };
    left_out();
    // Texts that are no dates.
    let texts = [0; 3 * 4 * 4];
    array(&path.join("xtime"), "<U4", &[3], &["time"], &texts);
    left_out();
    // Positions are no channels in place of the fields.
    std::fs::remove_dir_all(path.join("topography")).unwrap();
    let error = open(&path).unwrap_err().to_string();
    for part in [
        "no field among [",
        "t2m (time: no time coordinate along",
        "latCell (latitudes or longitudes",
        "texts of dates",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

/// The output of MPAS and WRF, with texts and characters as they are in Zarr stores.
#[test]
fn texts_of_dates_are_times() {
    let dates = [0, 6, 12].map(|hour| format!("2020-01-01_{hour:02}:00:00     "));
    let texts = dates.concat();
    let wide: Vec<u8> = texts
        .chars()
        .flat_map(|character| u32::from(character).to_le_bytes())
        .collect();
    let dims = ["time", "StrLen"];
    for (dtype, shape, bytes) in [
        ("<U24", &[TIMES][..], &wide[..]),
        ("|S24", &[TIMES], texts.as_bytes()),
        ("|S1", &[TIMES, 24], texts.as_bytes()),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "nCells", 4);
        place(&path, "nCells", 0.01, [("latCell", ""), ("lonCell", "")]);
        std::fs::remove_dir_all(path.join("time")).unwrap();
        let dims = &dims[..shape.len()];
        array(&path.join("xtime"), dtype, shape, dims, bytes);
        let fields = OpenConfig::of_channels(&["t2m"]).open(&path).unwrap();
        // By `date -u -d 2020-01-01 +%s`.
        let times = [0.0, 6.0, 12.0].map(|hours| 1_577_836_800.0 + hours * 3600.0);
        assert_eq!(fields.times(), times, "{dtype}");
    }
}

/// Texts that are not needed, because numbers are the times.
#[test]
fn texts_beside_times_may_be_incomplete() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "nCells", 4);
    place(&path, "nCells", 0.01, [("latCell", ""), ("lonCell", "")]);
    let texts = b"2020-01-012020-01-02          ";
    array(&path.join("xtime"), "|S10", &[TIMES], &["time"], texts);
    assert_eq!(open(&path).unwrap().times(), [0.0, 21600.0, 43200.0]);
    std::fs::remove_dir_all(path.join("time")).unwrap();
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("the text \"\" at index 2"), "{error}");
}

/// Dates along the dim of the cells, such as those of the first observations of stations.
#[test]
fn dates_of_cells_are_no_times_of_fields() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "station", 4);
    place(&path, "station", 1.0, [("lat", ""), ("lon", "")]);
    let dates = "2001-02-03".repeat(4);
    array(
        &path.join("founded"),
        "|S10",
        &[4],
        &["station"],
        dates.as_bytes(),
    );
    assert_eq!(open(&path).unwrap().shape(), [TIMES, 4, 1, 4]);
}

#[test]
fn latitudes_beyond_a_pole_in_radians_are_told() {
    for (units, told) in [
        ("", "by its name, as it has no units"),
        ("\"units\": \"radian\"", "by its units"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "ncells", 4);
        place(&path, "ncells", 1.0, [("clat", units), ("clon", units)]);
        let error = open(&path).unwrap_err().to_string();
        assert!(error.contains("\"clat\": found 60 in radians"), "{error}");
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn cells_without_positions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "ncells", 4);
    attribute(&path.join("t2m"), "\"CDI_grid_type\": \"unstructured\"");
    let error = open(&path).unwrap_err().to_string();
    for part in ["cells without positions", "such as clat and clon"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    // A position of each cell is required.
    let text = "\"units\": \"degrees_north\"";
    place(&path, "ncells", 2.0, [("clat", text), ("clon", "")]);
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("latitude 120"), "{error}");
    // The positions of a track lie along its times.
    let track = tempfile::tempdir().unwrap();
    let path = write(track.path(), "obs", 4);
    place(&path, "obs", 1.0, [("lat", ""), ("lon", "")]);
    let times = doubles([0.0, 1.0, 2.0, 3.0]);
    array(&path.join("date"), "<f8", &[4], &["obs"], &times);
    let units = "\"units\": \"days since 1970-01-01\"";
    attribute(&path.join("date"), units);
    assert!(open(&path).is_err());
    // Times may be texts.
    replace(&path.join("date/.zattrs"), units, "\"axis\": \"T\"");
    replace(&path.join("date/.zarray"), "<f8", "<U4");
    assert!(open(&path).is_err());
}
