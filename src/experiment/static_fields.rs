//! Static forcings of a package, in place of those of other files.

use std::path::{Path, PathBuf};

use halocline_core::Result;
use halocline_io::ndarray::{ArrayView2, Axis};
use halocline_io::{FieldWriter, Period, Statistics, WriterConfig};

use super::data::Data;

/// Name of the file of static forcings in a package.
const STATIC_FIELDS: &str = "static.h5";

/// Returns the path of the static forcings in a folder, if it has any.
pub(super) fn static_fields_of(folder: &Path) -> Option<PathBuf> {
    let path = folder.join(STATIC_FIELDS);
    path.exists().then_some(path)
}

/// Writes the forcings from the files that do not change in time, and are the same in all files of
/// a period, into a folder. Without such forcings nothing is written.
///
/// # Errors
/// Files that cannot be read; a folder that cannot be written.
pub(super) fn save_static_fields(
    data: &Data,
    statistics: &Statistics,
    period: &Period,
    folder: &Path,
) -> Result<()> {
    let mut names = static_forcings(data, statistics);
    if names.is_empty() {
        return Ok(());
    }
    let dataset = data.channels_in_units(period, names.clone())?;
    let fields = dataset.sample(0)?.input;
    let mut are_same = vec![true; names.len()];
    for sample in 1..dataset.len() {
        let series = dataset.series(sample);
        let is_last = sample + 1 == dataset.len() || series != dataset.series(sample + 1);
        if series == dataset.series(sample - 1) && !is_last {
            continue;
        }
        let others = dataset.sample(sample)?.input;
        let pairs = fields.outer_iter().zip(others.outer_iter());
        for (is_same, (field, other)) in are_same.iter_mut().zip(pairs) {
            *is_same &= has_bits_of(field, other);
        }
    }
    let held: Vec<usize> = (0..names.len()).filter(|place| are_same[*place]).collect();
    if held.is_empty() {
        return Ok(());
    }
    names = held.iter().map(|place| names[*place].clone()).collect();
    let is_static = |name: &String| {
        let mut channels = data.files.iter();
        channels.any(|channel| channel.name == *name && channel.is_static)
    };
    let repeated = names.iter().filter(|name| !is_static(name));
    let repeated: Vec<&str> = repeated.map(String::as_str).collect();
    if !repeated.is_empty() {
        eprintln!(
            "halocline: {}: the same at all times of training; the package has them in place of those of other \
             files",
            repeated.join(", ")
        );
    }
    let fields = fields.select(Axis(0), &held);
    let (path, config) = (folder.join(STATIC_FIELDS), WriterConfig::new());
    let mut writer = FieldWriter::create(path, &data.grid, &names, &config)?;
    writer.append(0.0, fields.view())?;
    Ok(writer.finish()?)
}

/// Returns the names of the channels of the files that forcings, or masks among them, are read
/// from, and that have no time or, by the statistics of training, the same values at all times.
fn static_forcings(data: &Data, statistics: &Statistics) -> Vec<String> {
    let (files, roles) = (&data.files, &data.channels);
    let is_read = |name: &String| {
        let mut forcings = roles.forcings.iter();
        forcings.any(|forcing| forcing.strip_prefix("mask:").unwrap_or(forcing) == name)
    };
    // The files must have inputs and targets.
    let is_predicted = |name: &String| roles.inputs.contains(name) || roles.targets.contains(name);
    let known = statistics.metadata().channels();
    let is_constant = |name: &String| {
        let place = known.iter().position(|known| known == name);
        place.is_some_and(|place| {
            statistics.increment_means()[place] == 0.0 && statistics.increment_stds()[place] == 0.0
        })
    };
    let channels = files.iter().filter(|channel| {
        let is_fixed = channel.is_static || is_constant(&channel.name);
        is_fixed && is_read(&channel.name) && !is_predicted(&channel.name)
    });
    channels.map(|channel| channel.name.clone()).collect()
}

/// Whether two fields have the same bits, which is true of missing values, too.
fn has_bits_of(field: ArrayView2<'_, f32>, other: ArrayView2<'_, f32>) -> bool {
    let mut pairs = field.iter().zip(other.iter());
    pairs.all(|(value, other)| value.to_bits() == other.to_bits())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Error, Launcher, Replicate, ShardTensor, World};
    use halocline_io::{Channel, Existing, Fields, ForecastWriter, Grid, OutputConfig, open};

    use super::*;
    use crate::experiment::data::Samples;
    use crate::experiment::data_config::DataConfig;
    use crate::experiment::fixture::{COLUMNS, ROWS, TIMES, config_in, wave};
    use crate::experiment::{CheckpointChoice, Experiment, ExperimentConfig};

    /// Writes a store of waves and, with a height, of an orography, which has no time if it is
    /// static.
    fn write_store(
        world: &World,
        path: &Path,
        grid: &Grid,
        (height, is_static): (Option<f32>, bool),
    ) -> Result<()> {
        let mesh = world.mesh([("lon", 1)])?;
        let mut channels = ["sst", "t2m"]
            .map(|name| Channel::new(name.into()))
            .to_vec();
        if height.is_some() {
            channels.push(Channel::new("orography".into()).with_is_static(is_static));
        }
        let [rows, columns] = grid.shape();
        let shape = [1, channels.len(), rows, columns];
        let config = OutputConfig::new();
        let mut writer = ForecastWriter::create(&mesh, path, grid, &channels, 0.0, &config)?;
        for time in 0..TIMES {
            let value = |index: usize| {
                let (channel, cell) = (index / (rows * columns), index % (rows * columns));
                match channel {
                    2 => height.unwrap_or(0.0) * (cell * cell) as f32,
                    _ => wave(time, (channel, cell / columns, cell % columns)),
                }
            };
            let values: Vec<f32> = (0..channels.len() * rows * columns).map(value).collect();
            let field = Tensor::<4>::from_data(TensorData::new(values, shape), world.device());
            let field = ShardTensor::distribute(field, &mesh, &[Replicate])?;
            writer.append(6.0 * time as f64, &field)?;
        }
        writer.finish()
    }

    #[test]
    fn forecasts_of_a_package_take_its_orography() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let forcings = "forcings = [\"orography\"]";
        let mut config = config_in(folder.path(), forcings, "[training]\nepochs = 1");
        config.data.files = vec![path("data.zarr")];
        let run = Launcher::local(1).run(|world| {
            let grid = Grid::cell_centered(ROWS, COLUMNS)?;
            for (name, height) in [
                ("data.zarr", Some(1.0)),
                ("lacking.zarr", None),
                ("other.zarr", Some(3.0)),
            ] {
                write_store(&world, &path(name), &grid, (height, true))?;
            }
            let forecast = |experiment: &Experiment, name: &str| {
                let model = experiment.trained(CheckpointChoice::Last)?;
                let (from, output) = (Some("1970-01-01"), path(name));
                let config = &config.forecast;
                experiment.forecast(&model, from, config, &output, Existing::Reject)?;
                let fields = open(&output)?;
                let values = fields.read(fields.shape().map(|size| 0..size))?;
                Ok::<_, Error>(values)
            };
            let experiment = Experiment::new(&world, &config)?;
            let _ended = experiment.train()?;
            experiment.package(CheckpointChoice::Last, path("model"))?;
            let expected = forecast(&experiment, "expected.zarr")?;
            let package = ExperimentConfig::load_package(path("model"))?;
            let open_file = |name: &str| Experiment::of_files(&world, &package, &[path(name)]);
            for name in ["data.zarr", "lacking.zarr", "other.zarr"] {
                let found = forecast(&open_file(name)?, &format!("from-{name}"))?;
                assert_eq!(found, expected, "{name}");
            }
            // A package of an earlier version.
            std::fs::remove_file(path("model").join(STATIC_FIELDS)).unwrap();
            let found = forecast(&open_file("data.zarr")?, "earlier.zarr")?;
            assert_eq!(found, expected);
            let error = open_file("lacking.zarr").unwrap_err().to_string();
            assert!(error.contains("orography"), "{error}");
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn forcings_that_are_the_same_in_all_files_are_saved_on_any_grid() {
        let run = Launcher::local(1).run(|world| {
            let cells = Grid::unstructured(vec![50.0, 20.0, -10.0], vec![0.0, 120.0, 240.0])?;
            let cells = cells.with_cell_areas(vec![1.0, 3.0, 2.0])?;
            for grid in [Grid::cell_centered(ROWS, COLUMNS)?, cells] {
                let folder = tempfile::tempdir().unwrap();
                let path = |name: &str| folder.path().join(name);
                for (name, height) in [
                    ("a.zarr", Some(1.0)),
                    ("same.zarr", Some(1.0)),
                    ("other.zarr", Some(2.0)),
                    ("lacking.zarr", None),
                ] {
                    write_store(&world, &path(name), &grid, (height, true))?;
                }
                let forcings = "forcings = [\"orography\", \"mask:orography\"]";
                let mut config = config_in(folder.path(), forcings, "").data;
                let mut save = |other: &str| {
                    config.files = vec![path("a.zarr"), path(other)];
                    let data = Data::open(&config)?;
                    let statistics = data.statistics()?;
                    save_static_fields(&data, &statistics, &config.train, folder.path())?;
                    Ok::<_, Error>((data, static_fields_of(folder.path())))
                };
                assert_eq!(save("other.zarr")?.1, None);
                let (data, saved) = save("same.zarr")?;
                let fields = open(saved.as_ref().unwrap())?;
                assert_eq!(fields.channels(), ["orography"]);
                assert!(fields.grid().agrees_with(&data.grid));
                let statistics = data.statistics()?;
                let files = [path("lacking.zarr")];
                let lacking = Data::open_others(&config, (&files, saved), &statistics)?;
                let forcing = |data: &Data| {
                    let all = Period::default();
                    let states = data.dataset(&all, Samples::States, &statistics)?;
                    Ok::<_, Error>(states.sample(0)?.forcing)
                };
                assert_eq!(forcing(&lacking)?, forcing(&data)?);
            }
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn forcings_that_repeat_at_each_time_are_saved() {
        let run = Launcher::local(1).run(|world| {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            let grid = Grid::cell_centered(ROWS, COLUMNS)?;
            write_store(&world, &path("a.zarr"), &grid, (Some(1.0), false))?;
            write_store(&world, &path("lacking.zarr"), &grid, (None, false))?;
            let mut config = config_in(folder.path(), "forcings = [\"sst\"]", "").data;
            config.files = vec![path("a.zarr")];
            let save = |config: &DataConfig| {
                let data = Data::open(config)?;
                let statistics = data.statistics()?;
                save_static_fields(&data, &statistics, &config.train, folder.path())?;
                Ok::<_, Error>((data, statistics, static_fields_of(folder.path())))
            };
            // Waves change in time.
            assert_eq!(save(&config)?.2, None);
            config.forcings = vec!["sst".into(), "orography".into()];
            let (data, statistics, saved) = save(&config)?;
            let fields = open(saved.as_ref().unwrap())?;
            assert_eq!(fields.channels(), ["orography"]);
            let files = [path("lacking.zarr")];
            let lacking = Data::open_others(&config, (&files, saved), &statistics)?;
            let forcing = |data: &Data| {
                let states = data.dataset(&Period::default(), Samples::States, &statistics)?;
                Ok::<_, Error>(states.sample(3)?.forcing)
            };
            assert_eq!(forcing(&lacking)?, forcing(&data)?);
            Ok(())
        });
        run.unwrap();
    }
}
