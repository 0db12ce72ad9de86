//! Forecasts written by all ranks.

use std::path::Path;

use halocline_core::{
    DeviceMesh, Launcher, Layout, Partial, Placement, ReduceOp, Replicate, Result, Shard,
    ShardTensor,
};
use halocline_io::{
    Calendar, Channel, Compression, DatasetConfig, Existing, FieldDataset, ForecastWriter, Grid,
    OpenConfig, OutputConfig, OutputFormat, amplification, open,
};
use ndarray::{Array4, s};

use crate::formats::store;
use crate::listing;

/// 2018-01-01, by `date -u -d 2018-01-01 +%s`.
const START: f64 = 1_514_764_800.0;
const LEADS: [f64; 3] = [6.0, 12.0, 30.0];
const NAMES: [&str; 4] = ["t2m", "z@850", "z@500", "orography"];
const FORMATS: [OutputFormat; 3] = [
    OutputFormat::Zarr3,
    OutputFormat::Zarr2,
    OutputFormat::NetCdf3,
];

pub(crate) fn channels() -> Vec<Channel> {
    let names = NAMES.iter().map(|name| Channel::new((*name).into()));
    let describe = |channel: Channel| match &*channel.name {
        "t2m" => channel.with_units(Some("K".into())),
        "orography" => channel
            .with_is_static(true)
            .with_long_name(Some("height".into())),
        _ => channel.with_level_units(Some("hPa".into())),
    };
    names.map(describe).collect()
}

/// Creates values [member, channel, lat, lon] that encode their index; the static channel is the
/// same at all times.
pub(crate) fn values(shape: [usize; 4], time: usize) -> Array4<f32> {
    Array4::from_shape_fn(shape, |(member, channel, row, column)| {
        let time = if channel == 3 { 0 } else { time };
        (10_000 * member + 1000 * time + 200 * channel + 20 * row + column) as f32
    })
}

/// Returns the shard of a rank.
fn shard(mesh: &DeviceMesh, layout: &Layout, time: usize) -> Result<ShardTensor<4>> {
    let shape: [usize; 4] = layout.shape().try_into().unwrap();
    let cells = layout.local_box(mesh.position());
    let ranges = cells.ranges();
    let [b, c, i, j] = [0, 1, 2, 3].map(|dim| ranges[dim].clone());
    let part = values(shape, time).slice(s![b, c, i, j]).to_owned();
    let data = burn::tensor::TensorData::new(part.into_iter().collect::<Vec<f32>>(), cells.shape());
    let local = burn::tensor::Tensor::from_data(data, mesh.device());
    ShardTensor::from_local(local, mesh, layout)
}

/// Sizes of the two axes of a mesh, the placements on them, and extents of rows and columns.
type Case = ([usize; 2], [Placement; 2], [Option<Vec<usize>>; 2]);

fn cases() -> Vec<Case> {
    vec![
        ([1, 1], [Shard(2), Shard(3)], [None, None]),
        ([2, 1], [Shard(2), Replicate], [None, None]),
        ([3, 1], [Shard(2), Replicate], [None, None]),
        ([2, 2], [Shard(2), Shard(3)], [None, None]),
        (
            [2, 2],
            [Shard(2), Shard(3)],
            [Some(vec![1, 6]), Some(vec![0, 5])],
        ),
        ([2, 2], [Shard(2), Shard(2)], [Some(vec![4, 0, 1, 2]), None]),
        ([2, 2], [Shard(1), Shard(3)], [None, None]),
        ([2, 2], [Replicate, Replicate], [None, None]),
    ]
}

/// Writes a forecast on a mesh.
pub(crate) fn write(path: &Path, case: &Case, members: usize, config: &OutputConfig) -> Result<()> {
    let (sizes, placements, extents) = case;
    Launcher::local(sizes[0] * sizes[1]).run(|world| {
        let mesh = world.mesh([("first", sizes[0]), ("second", sizes[1])])?;
        let mut layout = Layout::new(mesh.shape(), &[members, 4, 7, 5], placements)?;
        for (dim, extents) in extents.iter().enumerate() {
            if let Some(extents) = extents {
                layout = layout.with_extents(2 + dim, extents)?;
            }
        }
        let grid = Grid::with_poles(7, 5)?;
        let mut writer = ForecastWriter::create(&mesh, path, &grid, &channels(), START, config)?;
        for (time, lead) in LEADS.into_iter().enumerate() {
            writer.append(lead, &shard(&mesh, &layout, time)?)?;
        }
        let replaces = config.existing == Existing::Replace;
        assert!(
            replaces || !path.exists(),
            "nothing has the name before finish()"
        );
        writer.finish()
    })
}

/// Writes a single state with a static channel of this value.
fn write_state(path: &Path, time: usize, value: f64) {
    let result = Launcher::local(1).run(|world| {
        let (mesh, grid) = (world.mesh([("x", 1)])?, Grid::with_poles(7, 5)?);
        let (start, config) = (START + time as f64 * 3600.0, OutputConfig::new());
        let mut writer = ForecastWriter::create(&mesh, path, &grid, &channels(), start, &config)?;
        writer.append(
            6.0,
            &ShardTensor::<4>::full([1, 4, 7, 5], value, &mesh, &[Shard(2)])?,
        )?;
        writer.finish()
    });
    result.unwrap();
}

/// Channels without a time dim are static in a file with a single state, and in joined parts if
/// their values are equal.
#[test]
fn static_channels_of_one_state_and_of_parts_are_static() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a", "b", "c"].map(|name| folder.path().join(name));
    for (number, (path, value)) in paths.iter().zip([3.0, 3.0, 4.0]).enumerate() {
        write_state(path, 6 * number, value);
    }
    let config = OpenConfig::new().with_gaps(halocline_io::Gaps::Allow);
    assert!(config.open(&paths[0]).unwrap().describe(3).is_static);
    let is_static = |paths: &[std::path::PathBuf]| {
        let joined = config.open_joined(paths).unwrap();
        [0, 3].map(|channel| joined.describe(channel).is_static)
    };
    assert_eq!(is_static(&paths[..2]), [false, true]);
    assert_eq!(is_static(&paths), [false, false]);
}

/// A state without a time may be the initial state of a forecast, in which its channels change.
#[test]
fn a_forecast_from_a_state_without_a_time_has_all_leads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forecast");
    let state = open(store("latin1.nc")).unwrap();
    let described = [state.describe(0)];
    assert!(state.is_undated() && !described[0].is_static);
    let result = Launcher::local(1).run(|world| {
        let (mesh, config) = (world.mesh([("x", 1)])?, OutputConfig::new());
        let grid = state.grid();
        let mut writer = ForecastWriter::create(&mesh, &path, grid, &described, 0.0, &config)?;
        for lead in [6.0, 12.0] {
            let field = ShardTensor::<4>::full([1, 1, 5, 8], lead, &mesh, &[Shard(2)])?;
            writer.append(lead, &field)?;
        }
        writer.finish()
    });
    result.unwrap();
    let forecast = open(&path).unwrap();
    let found = forecast.read([0..2, 0..1, 0..1, 0..1]).unwrap();
    assert_eq!(found.iter().copied().collect::<Vec<f32>>(), [6.0, 12.0]);
}

#[test]
fn a_forecast_of_any_mesh_is_read_back_by_any_number_of_ranks() {
    for case in cases() {
        for format in FORMATS {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("forecast");
            write(&path, &case, 1, &OutputConfig::new().with_format(format)).unwrap();
            assert_eq!(listing(folder.path()), ["forecast"], "{case:?} {format:?}");
            let fields = OpenConfig::new().with_gaps(halocline_io::Gaps::Allow);
            let fields = fields.open(&path).unwrap();
            assert_eq!(fields.channels(), NAMES);
            assert_eq!(fields.times(), LEADS.map(|lead| START + lead * 3600.0));
            assert_eq!(fields.grid(), &Grid::with_poles(7, 5).unwrap());
            assert_eq!(fields.describe(0).units.as_deref(), Some("K"));
            assert_eq!(fields.describe(1).level_units.as_deref(), Some("hPa"));
            assert!(fields.describe(3).is_static);
            for ranks in 1..=4 {
                for rank in 0..ranks {
                    let rows = rank * 7 / ranks..(rank + 1) * 7 / ranks;
                    let found = fields.read([0..3, 0..4, rows.clone(), 0..5]).unwrap();
                    for (time, found) in found.outer_iter().enumerate() {
                        let expected = values([1, 4, 7, 5], time);
                        let expected = expected.slice(s![0, .., rows.clone(), ..]);
                        assert_eq!(found, expected, "{case:?} {format:?} time {time}");
                    }
                }
            }
        }
    }
}

#[test]
fn chunks_are_those_of_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forecast.zarr");
    let case = ([2, 1], [Shard(2), Replicate], [None, None]);
    write(&path, &case, 1, &OutputConfig::new()).unwrap();
    let fields = OpenConfig::new()
        .with_gaps(halocline_io::Gaps::Allow)
        .open(&path)
        .unwrap();
    assert_eq!(fields.describe(0).chunk, Some([1, 1, 4, 5]));
    assert_eq!(amplification(&fields, [2, 1]), 1.0);
    let chunks = listing(&path.join("t2m/c/1"));
    assert_eq!(chunks.len(), 2);
    // Chunks of other extents require cells to be moved between ranks.
    let config = OutputConfig::new()
        .with_chunk(Some([1, 3, 2]))
        .with_compression(Compression::None)
        .with_existing(Existing::Replace);
    write(&path, &case, 1, &config).unwrap();
    let fields = OpenConfig::new()
        .with_gaps(halocline_io::Gaps::Allow)
        .open(&path)
        .unwrap();
    let found = fields.read([2..3, 0..4, 0..7, 0..5]).unwrap();
    assert_eq!(found, values([1, 4, 7, 5], 2));
    assert_eq!(fields.describe(0).chunk, Some([1, 1, 3, 2]));
}

#[test]
fn a_forecast_is_a_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forecast.zarr");
    write(&path, &cases()[3], 1, &OutputConfig::new()).unwrap();
    let config = DatasetConfig::new().with_lead_hours(Some(6.0));
    let config = config.with_gaps(halocline_io::Gaps::Allow);
    let dataset = FieldDataset::open(&[&path], &config).unwrap();
    assert_eq!((dataset.len(), dataset.time(0)), (1, START + 6.0 * 3600.0));
}

#[test]
fn members_are_a_dim() {
    for format in FORMATS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forecast");
        let case = ([2, 2], [Shard(0), Shard(2)], [None, None]);
        write(&path, &case, 3, &OutputConfig::new().with_format(format)).unwrap();
        // Members are read like levels.
        let config = OpenConfig::of_channels(&["t2m"]).with_gaps(halocline_io::Gaps::Allow);
        let fields = config.open(&path).unwrap();
        assert_eq!(fields.channels(), ["t2m@0", "t2m@1", "t2m@2"]);
        let found = fields.read([1..2, 2..3, 0..7, 0..5]).unwrap();
        let expected = values([3, 4, 7, 5], 1);
        assert_eq!(
            found.slice(s![0, 0, .., ..]),
            expected.slice(s![2, 0, .., ..])
        );
    }
}

/// Program of a rank with its writer.
type Program<'a> = &'a (dyn Fn(&DeviceMesh, ForecastWriter) -> Result<()> + Sync);

/// Runs a program with a writer on two ranks, and returns the error of each rank.
fn errors(
    path: &Path,
    config: &OutputConfig,
    program: impl Fn(&DeviceMesh, ForecastWriter) -> Result<()> + Sync,
) -> Vec<String> {
    let all = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let grid = Grid::with_poles(7, 5)?;
        let writer = ForecastWriter::create(&mesh, path, &grid, &channels(), START, config);
        let done = writer.and_then(|writer| program(&mesh, writer));
        Ok(done
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default())
    });
    all.unwrap()
}

#[test]
fn mistakes_are_errors_on_all_ranks_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forecast.zarr");
    let config = OutputConfig::new();
    let field = |mesh: &DeviceMesh, shape| ShardTensor::<4>::ones(shape, mesh, &[Shard(2)]);
    let cases: [(&str, Program); 6] = [
        ("field: got ", &|mesh, mut writer| {
            writer.append(0.0, &field(mesh, [1, 4, 5, 7])?)
        }),
        ("Partial", &|mesh, mut writer| {
            let whole = ShardTensor::ones([1, 4, 7, 5], mesh, &[Partial(ReduceOp::Sum)]);
            writer.append(0.0, &whole?)
        }),
        (
            "lead: got 6, expected more than 6 h",
            &|mesh, mut writer| {
                writer.append(6.0, &field(mesh, [1, 4, 7, 5])?)?;
                writer.append(6.0, &field(mesh, [1, 4, 7, 5])?)
            },
        ),
        ("field: got ", &|mesh, mut writer| {
            writer.append(6.0, &field(mesh, [2, 4, 7, 5])?)?;
            writer.append(12.0, &field(mesh, [1, 4, 7, 5])?)
        }),
        ("lead: got NaN", &|mesh, mut writer| {
            writer.append(f64::NAN, &field(mesh, [1, 4, 7, 5])?)
        }),
        (
            "forecast: got no time, expected at least one append()",
            &|_, writer| writer.finish(),
        ),
    ];
    for (text, program) in cases {
        for error in errors(&path, &config, program) {
            assert!(error.contains(text), "{error}, expected {text}");
        }
        assert_eq!(listing(folder.path()), Vec::<String>::new(), "{text}");
    }
    // A writer that is dropped before it is finished.
    let dropped = errors(&path, &config, |mesh, mut writer| {
        writer.append(6.0, &field(mesh, [1, 4, 7, 5])?)
    });
    assert_eq!(dropped, ["", ""]);
    assert_eq!(listing(folder.path()), Vec::<String>::new());

    let finish = |mesh: &DeviceMesh, mut writer: ForecastWriter| {
        writer.append(6.0, &field(mesh, [1, 4, 7, 5])?)?;
        writer.finish()
    };
    assert_eq!(errors(&path, &config, finish), ["", ""]);
    for error in errors(&path, &config, finish) {
        assert!(error.contains("it is there already"), "{error}");
    }
    let chunk = config.clone().with_chunk(Some([2, 7, 5]));
    for error in errors(&path, &chunk, finish) {
        assert!(error.contains("one time in a chunk"), "{error}");
    }
    // A folder that is not a store is not replaced.
    std::fs::create_dir(folder.path().join("mine")).unwrap();
    let replace = config.with_existing(Existing::Replace);
    for error in errors(&folder.path().join("mine"), &replace, finish) {
        assert!(error.contains("neither a Zarr store nor a file"), "{error}");
    }
    assert_eq!(errors(&path, &replace, finish), ["", ""]);
    assert_eq!(open(&path).unwrap().times().len(), 1);
}

#[test]
fn forecasts_of_every_calendar_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    for calendar in [Calendar::NoLeap, Calendar::AllLeap, Calendar::Day360] {
        for format in FORMATS {
            let path = folder.path().join(format!("{calendar}-{format:?}"));
            write_with(&path, calendar, format).unwrap();
            let fields = open(&path).unwrap();
            assert_eq!(fields.calendar(), calendar, "{format:?}");
            assert_eq!(
                fields.times(),
                [START + 6.0 * 3600.0, START + 12.0 * 3600.0]
            );
        }
    }
    let path = folder.path().join("mixed");
    let all = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let grid = Grid::with_poles(7, 5)?;
        let config = OutputConfig::new();
        let writer = ForecastWriter::create(&mesh, &path, &grid, &channels(), START, &config)?;
        let calendar = [Calendar::NoLeap, Calendar::Gregorian][world.rank()];
        let field = ShardTensor::ones([1, 4, 7, 5], &mesh, &[Shard(2)])?;
        let appended = writer.with_calendar(calendar).append(6.0, &field);
        Ok(appended.unwrap_err().to_string())
    });
    for error in all.unwrap() {
        assert!(
            error.contains("6 h, noleap, as on the first rank"),
            "{error}"
        );
    }
}

/// Writes fields of ones at two leads, on two ranks.
pub(crate) fn write_with(path: &Path, calendar: Calendar, format: OutputFormat) -> Result<()> {
    Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let grid = Grid::with_poles(7, 5)?;
        let config = OutputConfig::new().with_format(format);
        let writer = ForecastWriter::create(&mesh, path, &grid, &channels(), START, &config)?;
        let mut writer = writer.with_calendar(calendar);
        for lead in [6.0, 12.0] {
            writer.append(lead, &ShardTensor::ones([1, 4, 7, 5], &mesh, &[Shard(2)])?)?;
        }
        writer.finish()
    })
}

#[test]
fn ranks_that_begin_different_forecasts_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forecast.zarr");
    let all = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let grid = Grid::with_poles(7, 5)?;
        let start = START + world.rank() as f64;
        let config = OutputConfig::new();
        let writer = ForecastWriter::create(&mesh, &path, &grid, &channels(), start, &config);
        Ok(writer.unwrap_err().to_string())
    });
    for error in all.unwrap() {
        assert!(error.contains("as on the first rank"), "{error}");
    }
}
