//! Checks of settings against the grid, the channels and the number of samples.

use std::collections::BTreeMap;

use halocline_core::{Boundary, Result};
use halocline_io::Error::Argument;
use halocline_io::{Channel, Channels, Grid};

use super::channels::stands_for;
use super::config::ExperimentConfig;
use super::data::Data;
use super::errors::invalid;
use super::geometry::harmonics;
use super::regions::regions;
use super::training_config::{Loss, RolloutGradient, TrainingConfig};

/// Refuses a rim, bounds or regions that do not fit the grid and the targets.
pub(super) fn check_data(config: &ExperimentConfig, data: &Data) -> Result<()> {
    check_rim(config.data.boundary, &data.grid)?;
    check_targets("data.bounds", &config.data.bounds, &data.channels.targets)?;
    regions(&data.grid, config.data.boundary, &config.forecast)?;
    Ok(())
}

/// Checks that a grid has cells inside a rim of this width, and edges.
fn check_rim(width: usize, grid: &Grid) -> Result<()> {
    let [rows, columns] = grid.shape();
    let is_region = grid.boundary()[1] != Boundary::Periodic;
    if width == 0 || (is_region && 2 * width < rows.min(columns)) {
        return Ok(());
    }
    if rows == 1 && !grid.has_rows() {
        let got = format!("{width} on a row of {columns} unstructured cells");
        let expected = "0, because only regions of rows and columns have a rim";
        return Err(invalid("data.boundary", got, expected));
    }
    Err(invalid(
        "data.boundary",
        format!("{width} on a grid of {rows} x {columns} cells"),
        "less than half of the rows and columns of a region, which does not go around the globe",
    ))
}

/// Refuses batches of more samples than there are.
pub(super) fn check_batch(batch: usize, samples: usize) -> halocline_io::Result<()> {
    if batch <= samples {
        return Ok(());
    }
    Err(Argument {
        argument: "training.batch",
        got: batch.to_string(),
        expected: format!("at most {samples}, the samples of data.train"),
    })
}

/// Refuses names in a table of a setting that are neither targets nor their variables.
pub(super) fn check_targets<T>(
    setting: &'static str,
    table: &BTreeMap<String, T>,
    targets: &[String],
) -> Result<()> {
    let is_target = |name: &String| targets.iter().any(|target| stands_for(name, target));
    match table.keys().find(|name| !is_target(name)) {
        None => Ok(()),
        Some(name) => {
            let expected = format!("targets or their variables: {}", targets.join(", "));
            Err(invalid(setting, name, expected))
        }
    }
}

/// Returns the value of a target in a table: that of its level, or else of its variable.
pub(super) fn of_target<'a, T>(table: &'a BTreeMap<String, T>, target: &str) -> Option<&'a T> {
    let channel = Channel::new(target.into());
    table.get(target).or_else(|| table.get(channel.variable()))
}

/// Refuses a loss of zonal waves on cells that are not in rows along latitudes, and one of spherical
/// harmonics on a grid without them.
fn check_loss(loss: Loss, grid: &Grid) -> Result<()> {
    if loss == Loss::Amse && harmonics(grid).is_err() {
        let expected = "mse, mae, huber, crps or energy, or a globe whose latitudes are equidistant from pole to pole \
                        or those of a Gaussian grid";
        return Err(invalid(
            "training.loss",
            format!("amse on {grid}"),
            expected,
        ));
    }
    if loss != Loss::Spectral || grid.has_rows() {
        return Ok(());
    }
    let got = if grid.is_curvilinear() {
        format!("spectral on a grid that is {grid}")
    } else {
        format!("spectral on a row of {} cells", grid.lon().len())
    };
    let expected = "mse, mae, huber, crps or energy, because waves along its rows are not zonal";
    Err(invalid("training.loss", got, expected))
}

/// Refuses settings that do not fit this number of samples, these channels or this grid.
///
/// # Errors
/// Larger batches than there are samples; more accumulated batches than an epoch has; a curriculum
/// that counts epochs from 0; a loss of zonal waves on a grid without rows; weights of other names
/// than targets; inputs that are not targets, if training takes several steps.
pub(super) fn check_training(
    training: &TrainingConfig,
    channels: &Channels,
    grid: &Grid,
    samples: usize,
) -> Result<()> {
    check_batch(training.batch, samples)?;
    let batches = samples / training.batch;
    if training.accumulation > batches {
        let expected = format!("at most {batches}, the batches of an epoch");
        return Err(invalid(
            "training.accumulation",
            training.accumulation,
            expected,
        ));
    }
    // Not an error of the configuration itself, because copies of earlier ones count from 0.
    if training.curriculum.iter().any(|[epoch, _]| *epoch == 0) {
        let expected = "1 or more, because epochs are counted from 1";
        return Err(invalid("training.curriculum", "epoch 0", expected));
    }
    check_loss(training.loss, grid)?;
    check_targets("training.weights", &training.weights, &channels.targets)?;
    if training.most_steps() > 1 {
        channels.feedback()?;
    }
    Ok(())
}

/// Prints a line for each setting that has no effect on a training of this number of samples, or
/// that does not suit its data.
pub(super) fn warn(config: &ExperimentConfig, data: &Data, samples: usize) {
    let lines = without_effect(config, samples / config.training.batch);
    for line in lines.into_iter().chain(unsuited(config, data)) {
        eprintln!("halocline: {line}");
    }
}

/// Returns the number of ranks along an axis of the mesh.
fn ranks(config: &ExperimentConfig, axis: &str) -> usize {
    config.mesh.get(axis).copied().unwrap_or(1)
}

/// Returns a line for each setting that does not suit the grid or the channels.
fn unsuited(config: &ExperimentConfig, data: &Data) -> Vec<String> {
    let mut lines = Vec::new();
    let [rows, columns] = data.grid.shape();
    for (axis, cells, name) in [("lat", rows, "rows"), ("lon", columns, "columns")] {
        let ranks = ranks(config, axis);
        if ranks > cells {
            lines.push(format!(
                "mesh.{axis}: {ranks} ranks share {cells} {name}, so that some have none"
            ));
        }
    }
    if let Some(repeated @ 1..) = data.grid.columns_repeated() {
        lines.push(format!(
            "data.files: the last {repeated} columns repeat the first, so that they count twice and the grid is not \
             periodic; leave them out"
        ));
    }
    let names_odd = config.data.odd.as_ref().is_some_and(|odd| !odd.is_empty());
    if names_odd && !data.grid.boundary()[0].is_pole() {
        lines.push("data.odd: without effect on a grid without rows at the poles".into());
    }
    let is_input = |name: &String| data.channels.inputs.contains(name);
    let files = data.files.iter();
    let fixed = files.filter(|channel| channel.is_static && is_input(&channel.name));
    let fixed: Vec<&str> = fixed.map(|channel| &channel.name[..]).collect();
    if !fixed.is_empty() && config.data.inputs.is_none() {
        let names = fixed.join(", ");
        lines.push(format!(
            "data.inputs: by default with {names}, which do not change in time; data.forcings takes them without predicting \
             them"
        ));
    }
    lines
}

/// Returns a line for each setting without effect in a training of this number of batches per
/// epoch. They are not errors, because training may be continued for more epochs, and forecasts
/// may be made with other members.
fn without_effect(config: &ExperimentConfig, batches: usize) -> Vec<String> {
    let training = &config.training;
    let epochs = training.epochs;
    let steps = epochs.saturating_mul(batches.div_ceil(training.accumulation));
    let mut lines = Vec::new();
    if epochs == 0 {
        lines.push("training.epochs: 0, with which the model keeps its initial weights".into());
    }
    let every = training.log_every;
    // The default is also that of short trainings.
    if every > steps as u64 && every != TrainingConfig::default().log_every {
        lines.push(format!(
            "training.log_every: {every} steps, but training ends after {steps}, before the first line"
        ));
    }
    let warmup = config.optimizer.warmup;
    if warmup > steps {
        lines.push(format!(
            "optimizer.warmup: {warmup} steps, but training ends after {steps}, before the learning rate is reached"
        ));
    }
    for [epoch, steps] in &training.curriculum {
        if *epoch > epochs {
            lines.push(format!(
                "training.curriculum: {steps} steps from epoch {epoch} on, but training ends after {epochs} epochs; \
                 samples have targets of all these steps"
            ));
        }
    }
    let is_last = training.gradient == RolloutGradient::Last;
    for (key, is_set) in [
        ("discount", training.discount != 1.0),
        ("gradient", is_last),
    ] {
        if is_set && training.most_steps() == 1 {
            lines.push(format!(
                "training.{key}: without effect on one step; training.curriculum sets several"
            ));
        }
    }
    let ranks = |axis: &str| ranks(config, axis);
    let forecast = &config.forecast;
    let most = training.members.max(forecast.members);
    if ranks("member") > most {
        let fault = match most {
            1 => "compute the same, because training.members and forecast.members are 1".into(),
            _ => format!("share at most {most} members, so that some have none"),
        };
        lines.push(format!("mesh.member: {} ranks {fault}", ranks("member")));
    }
    if config.data.constants.is_some() && config.data.forcings.is_empty() {
        lines.push("data.constants: a file of which data.forcings names no channel".into());
    }
    if forecast.noise > 0.0 && forecast.members == 1 {
        lines.push(format!(
            "forecast.noise: {}, which a forecast of one member does not get; forecast.members is 1",
            forecast.noise
        ));
    }
    if ranks("data") > training.batch {
        lines.push(format!(
            "mesh.data: {} ranks share {} samples of a batch, so that some have none",
            ranks("data"),
            training.batch
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::experiment::fixture::{config_in, region, write_waves};

    fn config(tables: &str) -> ExperimentConfig {
        config_in(Path::new("nowhere"), "", tables)
    }

    #[test]
    fn settings_beyond_the_samples_are_refused() {
        let channels = Channels {
            inputs: vec!["t2m".into(), "z@500".into()],
            forcings: Vec::new(),
            targets: vec!["t2m".into()],
        };
        let grid = Grid::unstructured(vec![0.0; 40], vec![0.0; 40]).unwrap();
        for (training, told) in [
            ("batch = 4\naccumulation = 3", ""),
            ("batch = 13", "training.batch: got 13, expected at most 12,"),
            (
                "batch = 4\naccumulation = 4",
                "training.accumulation: got 4, expected at most 3,",
            ),
            (
                "curriculum = [[0, 2]]",
                "training.curriculum: got epoch 0, expected 1 or more",
            ),
            (
                "loss = \"spectral\"",
                "training.loss: got spectral on a row of 40 cells, expected mse, mae, huber, crps or energy",
            ),
            (
                "loss = \"amse\"",
                "training.loss: got amse on unstructured, 40 cells, expected mse, mae,",
            ),
            ("weights = { z = 2.0 }", "training.weights: got z, expected"),
            (
                "curriculum = [[2, 2]]",
                "inputs: got z@500, expected a target",
            ),
        ] {
            let config = config(&format!("[training]\n{training}"));
            let checked = check_training(&config.training, &channels, &grid, 12);
            let found = checked.map_or_else(|error| error.to_string(), |()| String::new());
            assert!(
                found.contains(told) && found.is_empty() == told.is_empty(),
                "{found}"
            );
        }
    }

    #[test]
    fn names_in_tables_are_targets_or_variables() {
        let targets = ["t2m".to_string(), "z@500".to_string()];
        let table = BTreeMap::from([("z".to_string(), 1), ("t2m".to_string(), 2)]);
        check_targets("data.bounds", &table, &targets).unwrap();
        assert_eq!(of_target(&table, "z@500"), Some(&1));
        assert_eq!(of_target(&table, "q@500"), None);
        let table = BTreeMap::from([("tp".to_string(), 0)]);
        let error = check_targets("data.bounds", &table, &targets).unwrap_err();
        let told = "data.bounds: got tp, expected targets or their variables: t2m, z@500";
        assert!(error.to_string().contains(told), "{error}");
    }

    #[test]
    fn spectral_losses_need_rows_of_known_latitude() {
        let lon = vec![0.0, 90.0, 180.0, 270.0];
        for (lat, has_rows) in [
            (vec![45.0], true),
            (vec![30.0, 0.0], true),
            (vec![0.0], false),
        ] {
            let grid = Grid::new(lat, lon.clone()).unwrap();
            let checked = check_loss(Loss::Spectral, &grid);
            assert_eq!(checked.is_ok(), has_rows, "{grid}");
            assert!(check_loss(Loss::Mse, &grid).is_ok());
        }
        let grid = Grid::curvilinear([2, 2], vec![50.0; 4], lon).unwrap();
        let error = check_loss(Loss::Spectral, &grid).unwrap_err().to_string();
        let told = "training.loss: got spectral on a grid that is curvilinear, 2 x 2 cells,";
        assert!(error.starts_with(told), "{error}");
    }

    #[test]
    fn settings_without_effect_are_told() {
        let tables = "[optimizer]\nwarmup = 90\n[training]\nepochs = 2\ncurriculum = [[2, 2], [3, 3]]\n\
                      [mesh]\ndata = 2\nmember = 3\n";
        let found = without_effect(&config(tables), 10);
        let told = [
            "optimizer.warmup: 90 steps, but training ends after 20,",
            "training.curriculum: 3 steps from epoch 3 on, but training ends after 2 epochs",
            "mesh.member: 3 ranks",
            "mesh.data: 2 ranks share 1 samples",
        ];
        assert_eq!(found.len(), told.len(), "{found:?}");
        for (found, told) in found.iter().zip(told) {
            assert!(found.starts_with(told), "{found}");
        }
        let tables = "[optimizer]\nwarmup = 20\n[training]\nepochs = 2\n[mesh]\nmember = 3\n\
                      [forecast]\nmembers = 3\nnoise = 0.1\n";
        assert!(without_effect(&config(tables), 10).is_empty());
        for (members, told) in [
            (2, "mesh.member: 3 ranks share at most 2 members"),
            (1, "forecast.noise: 0.1, which a forecast of one member"),
        ] {
            let forecast = format!("[forecast]\nmembers = {members}\nnoise = 0.1\n");
            let tables = format!("[mesh]\nmember = 3\n{forecast}");
            let found = without_effect(&config(&tables), 10);
            assert!(found.last().unwrap().starts_with(told), "{found:?}");
        }
        let found = without_effect(&config("[training]\ndiscount = 0.9"), 10);
        assert!(
            found[0].starts_with("training.discount: without effect"),
            "{found:?}"
        );
        let found = without_effect(&config("[training]\nepochs = 2\nlog_every = 21"), 10);
        assert!(
            found[0].starts_with("training.log_every: 21 steps, but training ends after 20,"),
            "{found:?}"
        );
        let found = without_effect(&config("[training]\nepochs = 0"), 10);
        assert!(found[0].starts_with("training.epochs: 0,"), "{found:?}");
        let unused = config_in(Path::new("nowhere"), "constants = \"a.nc\"", "");
        let found = without_effect(&unused, 10);
        assert!(found[0].starts_with("data.constants: a file"), "{found:?}");
    }

    #[test]
    fn ranks_without_rows_and_inputs_without_times_are_told() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "[mesh]\nlat = 6\nlon = 8\n");
        let mut data = Data::open(&config.data).unwrap();
        let told = "mesh.lat: 6 ranks share 5 rows, so that some have none";
        assert_eq!(unsuited(&config, &data), [told]);
        data.files[0].is_static = true;
        let found = unsuited(&config, &data);
        assert!(
            found[1].starts_with("data.inputs: by default with sst,"),
            "{found:?}"
        );
        let config = config_in(folder.path(), "inputs = [\"sst\", \"t2m\"]", "");
        assert!(unsuited(&config, &data).is_empty());
    }

    #[test]
    fn odd_channels_without_a_pole_are_told() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "odd = [\"t2m\"]", "");
        let mut data = Data::open(&config.data).unwrap();
        assert!(unsuited(&config, &data).is_empty());
        data.grid = region();
        let told = "data.odd: without effect on a grid without rows at the poles";
        assert_eq!(unsuited(&config, &data), [told]);
    }

    #[test]
    fn a_rim_is_that_of_a_region_and_leaves_cells_inside() {
        let globe = Grid::cell_centered(6, 12).unwrap();
        assert!(check_rim(0, &globe).is_ok());
        let region = Grid::new(vec![50.0, 40.0, 30.0], vec![0.0, 10.0, 20.0, 30.0]).unwrap();
        assert!(check_rim(1, &region).is_ok());
        for (width, grid) in [(1, &globe), (2, &region)] {
            let error = check_rim(width, grid).unwrap_err().to_string();
            assert!(error.contains("data.boundary"), "{error}");
        }
        let cells = Grid::unstructured(vec![50.0, 40.0, 30.0], vec![0.0, 10.0, 20.0]).unwrap();
        let error = check_rim(1, &cells).unwrap_err().to_string();
        let told = "data.boundary: got 1 on a row of 3 unstructured cells, expected 0, because";
        assert!(error.starts_with(told), "{error}");
        let grid = Grid::curvilinear([3, 4], vec![50.0; 12], vec![0.0; 12]).unwrap();
        assert!(check_rim(1, &grid).is_ok());
        let error = check_rim(2, &grid).unwrap_err().to_string();
        let told = "data.boundary: got 2 on a grid of 3 x 4 cells, expected less than half";
        assert!(error.starts_with(told), "{error}");
    }
}
