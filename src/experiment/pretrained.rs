//! Start of training from a trained network, and from given statistics.

use std::path::Path;

use halocline_core::{Error, Result};
use halocline_io::{Gaps, Metadata, Statistics};

use super::config::ExperimentConfig;
use super::data::Data;
use super::data_config::DataConfig;
use super::record::{
    CHECKPOINTS, COPY, STATISTICS, has_checkpoint, odd_and_units, other_keys, same_units,
};

/// Key of the network from which training starts.
const PRETRAINED: &str = "training.pretrained";
/// Key of the statistics that replace those of the training period.
const GIVEN: &str = "data.statistics";

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
    let is_begun = has_checkpoint(&config.folder.join(CHECKPOINTS));
    let pretrained = config.training.pretrained.as_deref();
    let pretrained = pretrained.filter(|_| !is_begun);
    if let Some(folder) = pretrained {
        check(folder, config, data)?;
    }
    let (key, given) = match (&config.data.statistics, pretrained) {
        (Some(folder), _) => (GIVEN, folder.clone()),
        (None, Some(folder)) => (PRETRAINED, folder.join(STATISTICS)),
        (None, None) => return Ok(None),
    };
    let kept = config.folder.join(STATISTICS);
    let exists = |folder: &Path| folder.join("data.json").exists();
    if !exists(&kept) {
        let files = data.training_files()?;
        let metadata = Metadata::of(&files[0])?;
        return Ok(Some(Statistics::load(&given)?.for_metadata(&metadata)?));
    }
    // Those of the folder are used from now on, so the given ones may be gone.
    if exists(&given) {
        let used = Statistics::load(&kept)?;
        if Statistics::load(&given)?.for_metadata(used.metadata())? != used {
            return Err(Error::from(halocline_io::Error::Argument {
                argument: key,
                got: format!("other statistics in {}", given.display()),
                expected: format!(
                    "those of {}, which this experiment began with; choose another folder, or remove that one",
                    kept.display()
                ),
            }));
        }
    }
    Ok(None)
}

/// Checks that the experiment or package in a folder has a trained network, of the configured model,
/// for the same channels in the same units on the same grid.
fn check(folder: &Path, config: &ExperimentConfig, data: &Data) -> Result<()> {
    let refused = |got: String, expected: String| {
        Err(Error::from(halocline_io::Error::Argument {
            argument: PRETRAINED,
            got: format!("{}, {got}", folder.display()),
            expected,
        }))
    };
    if !folder.join(COPY).exists() || !has_checkpoint(&folder.join(CHECKPOINTS)) {
        return refused(
            "which holds no trained network".into(),
            "a package, or the folder of an experiment that was trained".into(),
        );
    }
    let trained = ExperimentConfig::load(folder.join(COPY))?;
    let mut keys = other_keys(&trained.model, &config.model);
    // Recomputed blocks have the same results.
    keys.retain(|key| key != "recompute");
    if !keys.is_empty() {
        let got = format!("of a model with another {}", keys.join(", "));
        return refused(got, "the same [model]".into());
    }
    let statistics = Statistics::load(folder.join(STATISTICS))?;
    let grid = statistics.metadata().grid();
    if !data.grid.agrees_with(grid) {
        return refused(format!("trained on {grid}"), data.grid.to_string());
    }
    // The files of this experiment, with the roles of channels of that one.
    let roles = DataConfig {
        inputs: trained.data.inputs,
        targets: trained.data.targets,
        forcings: trained.data.forcings,
        odd: None,
        history: trained.data.history,
        anomalies: trained.data.anomalies,
        climatology: trained.data.climatology,
        climatology_hours: trained.data.climatology_hours,
        // The times of a history may be further apart than those of that experiment.
        gaps: Gaps::Allow,
        ..config.data.clone()
    };
    let other = Data::open_others(&roles, data.paths(), &statistics)
        .map_err(|error| Error::other(format!("{PRETRAINED}, {}: {error}", folder.display())))?;
    let (odd, units) = odd_and_units(folder)?;
    let ours = properties(&config.data, data, &data.odd);
    let theirs = properties(&roles, &other, &odd);
    for ((key, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
        if ours != theirs {
            return refused(format!("trained with {key} {theirs}"), ours);
        }
    }
    same_units(&units, data, PRETRAINED)?;
    if config.data.anomalies && config.data.statistics.is_some() {
        return Err(Error::from(halocline_io::Error::Argument {
            argument: GIVEN,
            got: "statistics besides those of training.pretrained".into(),
            expected: "none with data.anomalies, whose climatology is normalised by those".into(),
        }));
    }
    Ok(())
}

/// Lists the keys that determine the values that a network receives and returns.
fn properties(config: &DataConfig, data: &Data, odd: &[String]) -> [(&'static str, String); 7] {
    let channels = &data.channels;
    let climatology = match config.climatology {
        // The network does not see it.
        _ if !config.anomalies => String::new(),
        cycle => format!("{cycle:?} with {} parts of a day", config.parts_of_day()),
    };
    let odd = if data.grid.boundary()[0].is_pole() {
        odd
    } else {
        &[]
    };
    [
        ("data.history", config.history.to_string()),
        ("data.anomalies", config.anomalies.to_string()),
        ("data.climatology", climatology),
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
    use crate::experiment::Experiment;
    use crate::experiment::fixture::{COLUMNS, ROWS, config_in, wave, write_waves};

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
