//! Start of training from a trained network, and from given statistics.

use std::path::Path;

use halocline_core::{Error, Result};
use halocline_io::{Gaps, Metadata, Statistics};

use super::climatology::Climatology;
use super::config::ExperimentConfig;
use super::data::Data;
use super::data_config::DataConfig;
use super::errors::invalid;
use super::record::{
    CHECKPOINTS, CLIMATOLOGY, COPY, STATISTICS, has_checkpoint, odd_and_units, other_model_keys,
    same_units,
};

/// Key of the network from which training starts.
const PRETRAINED: &str = "training.pretrained";
/// Key of the statistics that replace those of the training period.
const GIVEN: &str = "data.statistics";

/// Returns the folder of the network from which training starts; `None` if there is none, or once
/// the experiment has a checkpoint.
fn network(config: &ExperimentConfig) -> Option<&Path> {
    let is_begun = has_checkpoint(&config.folder.join(CHECKPOINTS));
    let pretrained = config.training.pretrained.as_deref();
    pretrained.filter(|_| !is_begun)
}

/// Reads rows and columns in the order of the network from which training starts.
pub(super) fn in_order_of_network(config: &ExperimentConfig, data: Data) -> Result<Data> {
    let statistics = network(config).map(|folder| folder.join(STATISTICS));
    match statistics {
        Some(folder) if Metadata::exists(&folder) => {
            Ok(data.in_order_of(&Statistics::load(folder)?))
        }
        _ => Ok(data),
    }
}

/// Checks the network from which training starts, unless the folder has a checkpoint already.
/// Returns the statistics that replace those of the training period, for its channels: those that
/// the configuration names, or those of the network. `None` if there are none, or if the folder has
/// them already.
///
/// # Errors
/// A network of other data or of another model; statistics that lack a channel, or differ from
/// those of the folder.
pub(super) fn given_statistics(
    config: &ExperimentConfig,
    data: &Data,
) -> Result<Option<Statistics>> {
    let pretrained = network(config);
    if let Some(folder) = pretrained {
        check(folder, config, data)?;
    }
    let (key, given) = match (&config.data.statistics, pretrained) {
        (Some(folder), _) => (GIVEN, folder.clone()),
        (None, Some(folder)) => (PRETRAINED, folder.join(STATISTICS)),
        (None, None) => return Ok(None),
    };
    let kept = config.folder.join(STATISTICS);
    if !Metadata::exists(&kept) {
        let files = data.training_files()?;
        let metadata = Metadata::of(&files[0])?;
        return Ok(Some(Statistics::load(&given)?.for_metadata(&metadata)?));
    }
    // The statistics of the folder are used from now on, so the given ones may be gone.
    if Metadata::exists(&given) {
        let used = Statistics::load(&kept)?;
        if Statistics::load(&given)?.for_metadata(used.metadata())? != used {
            return Err(invalid(
                key,
                format!("other statistics in {}", given.display()),
                format!(
                    "those of {}, which this experiment began with; choose another folder, or remove that one",
                    kept.display()
                ),
            ));
        }
    }
    Ok(None)
}

/// Checks that the experiment or package in a folder has a trained network, of the configured model,
/// for the same channels in the same units on the same grid.
fn check(folder: &Path, config: &ExperimentConfig, data: &Data) -> Result<()> {
    let refused = |got: String, expected: String| {
        let got = format!("{}, {got}", folder.display());
        Err(invalid(PRETRAINED, got, expected))
    };
    if !folder.join(COPY).exists() || !has_checkpoint(&folder.join(CHECKPOINTS)) {
        return refused(
            "which holds no trained network".into(),
            "a package, or the folder of an experiment that was trained".into(),
        );
    }
    let trained = ExperimentConfig::load(folder.join(COPY))?;
    let keys = other_model_keys(&trained, config);
    if !keys.is_empty() {
        let got = format!("of a model with another {}", keys.join(", "));
        return refused(got, "the same [model]".into());
    }
    let statistics = Statistics::load(folder.join(STATISTICS))?;
    // The files of this experiment, with the roles of channels of that one.
    let roles = DataConfig {
        inputs: trained.data.inputs,
        targets: trained.data.targets,
        forcings: trained.data.forcings,
        odd: None,
        history: trained.data.history,
        noise_channels: trained.data.noise_channels,
        anomalies: trained.data.anomalies,
        // The times of a history may be further apart than those of that experiment.
        gaps: Gaps::Allow,
        ..config.data.clone()
    };
    let other = Data::open_others(&roles, (data.paths(), None), &statistics)
        .map_err(|error| Error::other(format!("{PRETRAINED}, {}: {error}", folder.display())))?;
    let (odd, units) = odd_and_units(folder)?;
    let ours = properties(&config.data, data, &data.odd);
    let theirs = properties(&roles, &other, &odd);
    for ((key, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
        if ours != theirs {
            let is_list = key == "data.inputs" || key == "data.targets";
            let remedy = if is_list {
                format!("; {key} = {theirs} takes these channels in this order")
            } else {
                String::new()
            };
            return refused(
                format!("trained with {key} {theirs}"),
                format!("{ours}{remedy}"),
            );
        }
    }
    let resolution = Climatology::resolution(&folder.join(CLIMATOLOGY))?;
    if let Some((cycle, parts)) = resolution
        && config.data.anomalies
        && !config.data.has_resolution(cycle, parts)
    {
        let (cycle, hours) = (format!("{cycle:?}").to_lowercase(), 24 / parts);
        let keys = format!("data.climatology = \"{cycle}\" and data.climatology_hours = {hours}");
        return refused(
            format!("trained with {keys}"),
            "the same; without these keys, those of the network hold".into(),
        );
    }
    same_units(&units, data, PRETRAINED)?;
    if config.data.anomalies && config.data.statistics.is_some() {
        return Err(invalid(
            GIVEN,
            "statistics besides those of training.pretrained",
            "none with data.anomalies, whose climatology is normalised by those",
        ));
    }
    Ok(())
}

/// Lists the keys that determine the values that a network receives and returns.
fn properties(config: &DataConfig, data: &Data, odd: &[String]) -> [(&'static str, String); 7] {
    let channels = &data.channels;
    let odd = if data.grid.boundary()[0].is_pole() {
        odd
    } else {
        &[]
    };
    [
        ("data.history", config.history.to_string()),
        ("data.noise_channels", config.noise_channels.to_string()),
        ("data.anomalies", config.anomalies.to_string()),
        ("data.inputs", format!("{:?}", channels.inputs)),
        ("data.targets", format!("{:?}", channels.targets)),
        ("data.forcings", format!("{:?}", channels.forcings)),
        ("data.odd", format!("{odd:?}")),
    ]
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;
    use halocline_io::ndarray::Array3;
    use halocline_io::{FieldWriter, Grid, WriterConfig};

    use super::*;
    use crate::experiment::fixture::{
        COLUMNS, ROWS, config_in, wave, write_fields_on, write_waves,
    };
    use crate::experiment::{Cycle, Experiment};

    /// Returns the configuration of an experiment that starts from another one, which has a
    /// climatology, and a folder in place of a checkpoint.
    fn tuned(folder: &Path, data: &str) -> ExperimentConfig {
        let trained = config_in(folder, data, "");
        open(&trained).unwrap();
        std::fs::create_dir_all(trained.folder.join("checkpoints/step_000000001")).unwrap();
        let mut config = trained.clone();
        config.folder = folder.join("tuned");
        config.training.pretrained = Some(trained.folder);
        config
    }

    /// Opens an experiment, and returns the grid on which it reads its files.
    fn open(config: &ExperimentConfig) -> Result<Grid> {
        let found = Launcher::local(1).collect(|world| {
            let experiment = Experiment::new(&world, config)?;
            experiment.climatology()?;
            Ok(experiment.data.grid.clone())
        });
        Ok(found?.remove(0))
    }

    #[test]
    fn files_are_read_in_the_order_of_the_network() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = tuned(folder.path(), "");
        let grid = Grid::cell_centered(ROWS, COLUMNS).unwrap();
        let lat = grid.lat().iter().rev().copied().collect();
        let turned = Grid::new(lat, grid.lon().to_vec()).unwrap();
        write_fields_on(folder.path(), &turned, wave);
        assert!(open(&config).unwrap().agrees_with(&grid));
        let statistics = Statistics::load(config.folder.join(STATISTICS)).unwrap();
        assert!(statistics.metadata().grid().agrees_with(&grid));
    }

    #[test]
    fn keys_of_the_climatology_that_are_left_out_are_those_of_the_network() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let keys = "anomalies = true\nclimatology = \"month\"\nclimatology_hours = 6";
        let mut config = tuned(folder.path(), keys);
        config.data.climatology = Some(Cycle::Day);
        let error = open(&config).unwrap_err().to_string();
        let told = "trained with data.climatology = \"month\" and data.climatology_hours = 6";
        assert!(error.contains(told), "{error}");
        (config.data.climatology, config.data.climatology_hours) = (None, None);
        // The second start finds the copy.
        for _ in 0..2 {
            open(&config).unwrap();
            let copy = Climatology::resolution(&config.folder.join(CLIMATOLOGY)).unwrap();
            assert_eq!(copy, Some((Cycle::Month, 4)));
        }
    }

    #[test]
    fn times_of_a_history_may_be_further_apart_than_those_of_the_network() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let trained = config_in(folder.path(), "history = 2", "");
        let opened = Launcher::local(1).run(|world| Experiment::new(&world, &trained).map(drop));
        opened.unwrap();
        std::fs::create_dir_all(trained.folder.join("checkpoints/step_000000001")).unwrap();
        let path = folder.path().join("daily.h5");
        let grid = Grid::cell_centered(ROWS, COLUMNS).unwrap();
        let (names, options) = (["sst", "t2m"], WriterConfig::new());
        let mut writer = FieldWriter::create(&path, &grid, &names, &options).unwrap();
        for day in 0..6 {
            let field = Array3::from_shape_fn((2, ROWS, COLUMNS), |cell| wave(4 * day, cell));
            writer.append(86400.0 * day as f64, field.view()).unwrap();
        }
        writer.finish().unwrap();
        let mut config = trained.clone();
        config.data.files = vec![path];
        config.data.lead_hours = None;
        let data = Data::open(&config.data).unwrap();
        check(&trained.folder, &config, &data).unwrap();
    }
}
