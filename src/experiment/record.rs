//! Record of an experiment in its folder: the configuration, and a summary of the files.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use halocline_core::{Error, Result};
use halocline_io::{Channel, Checkpoints, Metadata, save_whole};
use serde::Serialize;

use super::config::ExperimentConfig;
use super::data::Data;
use super::data_config::DataConfig;
use super::errors::{failed, invalid};
use super::lock::lock;
use super::summary::{FILES, Record, Summary, Units};
pub(super) use crate::trainer::{CHECKPOINTS, STATISTICS};

/// Name of the copy of the configuration in the folder.
pub(super) const COPY: &str = "experiment.toml";
/// Name of the folder of the climatology.
pub(super) const CLIMATOLOGY: &str = "climatology";

/// Writes the configuration and the summary into the folder. If training or scoring has already
/// written there, compares them with the existing ones. Before the first checkpoint, keys on which
/// statistics do not depend may differ; the climatology of other forcings is removed, because it
/// may be of other targets. `locked` is the lock of the folder, which is taken for such a change.
///
/// # Errors
/// Other data; another model; files that have changed; other keys while a job computes or trains in
/// the folder.
pub(super) fn record(
    config: &ExperimentConfig,
    data: &Data,
    locked: &mut Option<File>,
) -> Result<()> {
    let folder = &config.folder;
    // Once training or scoring has written, the folder belongs to its configuration.
    let made = Metadata::exists(folder.join(STATISTICS))
        || [CLIMATOLOGY, CHECKPOINTS]
            .iter()
            .any(|made| folder.join(made).exists());
    let is_copied = made && folder.join(COPY).exists();
    let mut earlier = if is_copied { compare(config)? } else { None };
    if earlier.is_some() {
        if locked.is_none() {
            *locked = Some(lock(folder)?);
        }
        check_idle(folder)?;
        // Another job may have changed the record before the folder was locked.
        earlier = compare(config)?;
    }
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let found = Record::of(config, data)?;
    let before = if made { Record::load(folder)? } else { None };
    match (&before, &earlier) {
        (Some(before), None) => before.check(&found, config)?,
        (Some(before), Some(earlier)) => {
            before.check_statistics(&found, [earlier, &config.data], folder)?;
        }
        (None, _) => {}
    }
    if before.is_none() || earlier.is_some() {
        let text = serde_json::to_vec_pretty(&found).map_err(Error::other)?;
        write(&folder.join(FILES), &text)?;
    }
    let climatology = folder.join(CLIMATOLOGY);
    if climatology.exists()
        && let Some(earlier) = &earlier
        && earlier.forcings != config.data.forcings
    {
        std::fs::remove_dir_all(&climatology).map_err(failed(&climatology))?;
    }
    if is_copied && earlier.is_none() {
        Ok(())
    } else {
        save_copy(config)
    }
}

/// Refuses a folder in which a job trains: the record must stay that of its checkpoints.
fn check_idle(folder: &Path) -> Result<()> {
    if !Checkpoints::is_open(folder.join(CHECKPOINTS)) {
        return Ok(());
    }
    let fault = "another job trains in this folder, with another [data]; choose another folder";
    Err(failed(folder)(fault))
}

/// Locks a folder for the job that starts to train there, until the returned file is dropped.
///
/// # Errors
/// A lock that another job holds; a record that another job has changed since this one read it.
pub(super) fn lock_for_training(config: &ExperimentConfig) -> Result<File> {
    let locked = lock(&config.folder)?;
    match compare(config)? {
        None => Ok(locked),
        Some(_) => Err(failed(&config.folder)(
            "another job has changed [data] since this one started; choose another folder",
        )),
    }
}

/// Writes the configuration of a training into its folder.
pub(super) fn save_copy(config: &ExperimentConfig) -> Result<()> {
    write(&config.folder.join(COPY), config.to_toml().as_bytes())
}

/// Rejects files of training that have changed since the folder was written.
pub(super) fn check_training_files(config: &ExperimentConfig, data: &Data) -> Result<()> {
    match Record::load(&config.folder)? {
        Some(before) => before.check(&Record::of(config, data)?, config),
        None => Ok(()),
    }
}

impl ExperimentConfig {
    /// Requires a checkpoint in the folder.
    ///
    /// # Errors
    /// No checkpoint in the folder.
    ///
    /// # Example
    /// ```
    /// use halocline::experiment::ExperimentConfig;
    ///
    /// let config = ExperimentConfig::from_toml(r#"
    ///     folder = "runs/not there"
    ///     data = { files = ["era5.zarr"] }
    ///     model = { kind = "unet" }
    /// "#)?;
    /// let error = config.require_trained().unwrap_err();
    /// assert!(error.to_string().contains("train first"));
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn require_trained(&self) -> Result<()> {
        let folder = self.folder.join(CHECKPOINTS);
        if has_checkpoint(&folder) {
            Ok(())
        } else {
            Err(untrained(&folder))
        }
    }
}

/// Returns the error for a folder without a checkpoint.
pub(super) fn untrained(folder: &Path) -> Error {
    failed(folder)("no checkpoint; train first")
}

/// Returns whether a folder has a checkpoint.
pub(super) fn has_checkpoint(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name());
    names.any(|name| name.to_string_lossy().starts_with("step_"))
}

/// Rejects files whose units are not those of training, and other constants. Takes the channels
/// that change sign across a pole from the record of training, because the files may not say.
pub(super) fn compare_files(config: &ExperimentConfig, data: &mut Data) -> Result<()> {
    let Some(record) = Record::load(&config.folder)? else {
        return Ok(());
    };
    data.odd = record.odd;
    if let Some(constants) = Summary::of_constants(config)?
        && record.files.last() != Some(&constants)
    {
        let expected = "the file that training had";
        return Err(invalid("data.constants", constants, expected));
    }
    same_units(&record.units, data, "files")
}

/// Returns the channels that change sign across a pole and the units of all channels, as recorded
/// in the folder of an experiment.
pub(super) fn odd_and_units(folder: &Path) -> Result<(Vec<String>, Units)> {
    match Record::load(folder)? {
        Some(record) => Ok((record.odd, record.units)),
        None => Err(failed(&folder.join(FILES))(
            "missing; expected the summary of the files of training",
        )),
    }
}

/// Rejects data whose units are not those of training. The error names the setting of the files.
pub(super) fn same_units(
    trained: &[(String, Option<String>)],
    data: &Data,
    setting: &'static str,
) -> Result<()> {
    for (name, units) in trained {
        let trained = Channel::new(name.clone()).with_units(units.clone());
        let mut files = data.files.iter();
        let other = files.find(|file| file.name == trained.name && !file.has_units_of(&trained));
        if let Some(other) = other {
            let units = |channel: &Channel| channel.units.clone().unwrap_or("none".into());
            return Err(invalid(
                setting,
                format!("{} of {}", units(other), other.name),
                format!(
                    "{}, as in training; convert the values, or write the attribute units",
                    units(&trained)
                ),
            ));
        }
    }
    Ok(())
}

/// Compares the keys that a model depends on with the copy of an earlier configuration. The periods
/// for validation and test may differ, files may have moved, and the model may differ until there
/// is a checkpoint. Time units are not compared. The climatology may differ if the model does not
/// see it. Before the first checkpoint, keys may differ on which statistics do not depend; the
/// earlier ones are returned if they do.
///
/// # Errors
/// No copy; other data; another model; without a checkpoint, a network left out whose statistics
/// the folder has.
pub(super) fn compare(config: &ExperimentConfig) -> Result<Option<DataConfig>> {
    let copy = config.folder.join(COPY);
    if !copy.exists() {
        return Err(failed(&config.folder)("no experiment; train first"));
    }
    let before = ExperimentConfig::load(&copy)?;
    let is_begun = has_checkpoint(&config.folder.join(CHECKPOINTS));
    let is_left_out = config.training.pretrained.is_none() && config.data.statistics.is_none();
    if let (Some(pretrained), None) = (&before.training.pretrained, &before.data.statistics)
        && is_left_out
        && !is_begun
    {
        return Err(invalid(
            "training.pretrained",
            "none",
            format!(
                "{}, of which {} has the statistics, until there is a checkpoint; choose another folder, or remove that one",
                pretrained.display(),
                config.folder.display()
            ),
        ));
    }
    let differs = |what: &str, keys: Vec<String>| {
        Err(Error::other(format!(
            "{} has another {what}, by its {}: choose another folder, or remove that one",
            copy.display(),
            keys.join(", ")
        )))
    };
    let mut data = before.data.clone();
    (data.validation, data.test) = (config.data.validation.clone(), config.data.test.clone());
    if before.data.files.len() == 1 {
        // A single file is not joined to others; those to forecast or score may be.
        data.joined = config.data.joined;
    }
    data.files.clone_from(&config.data.files);
    // Statistics and climatology are those of all times.
    data.every_hours = config.data.every_hours;
    data.at_hours.clone_from(&config.data.at_hours);
    // They show in the dates of the files of training. Those of other files may be right.
    data.time_units.clone_from(&config.data.time_units);
    // The values are compared, not the path.
    data.statistics.clone_from(&config.data.statistics);
    if !config.data.anomalies {
        data.climatology = config.data.climatology;
        data.climatology_hours = config.data.climatology_hours;
    }
    let mut earlier = None;
    if is_begun {
        if data.constants.is_some() && config.data.constants.is_some() {
            data.constants.clone_from(&config.data.constants);
        }
    } else {
        let before = data.clone();
        data.forcings.clone_from(&config.data.forcings);
        data.constants.clone_from(&config.data.constants);
        let missing = &config.data.constants_missing;
        data.constants_missing.clone_from(missing);
        data.odd.clone_from(&config.data.odd);
        data.bounds.clone_from(&config.data.bounds);
        (data.boundary, data.history) = (config.data.boundary, config.data.history);
        data.noise_channels = config.data.noise_channels;
        earlier = (data != before).then_some(before);
    }
    if data != config.data {
        return differs("[data]", other_keys(&data, &config.data));
    }
    let keys = other_model_keys(&before, config);
    if is_begun && !keys.is_empty() {
        return differs("[model]", keys);
    }
    Ok(earlier)
}

/// Returns the keys whose values differ between two tables.
fn other_keys(one: &impl Serialize, other: &impl Serialize) -> Vec<String> {
    let one = toml::Table::try_from(one).unwrap_or_default();
    let other = toml::Table::try_from(other).unwrap_or_default();
    let keys: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let differ = keys
        .into_iter()
        .filter(|key| one.get(*key) != other.get(*key));
    differ.cloned().collect()
}

/// Returns the keys of `[model]` whose values differ, apart from `recompute`: recomputed blocks
/// have the same results.
pub(super) fn other_model_keys(one: &ExperimentConfig, other: &ExperimentConfig) -> Vec<String> {
    let mut keys = other_keys(&one.model, &other.model);
    keys.retain(|key| key != "recompute");
    keys
}

/// Writes a file of a folder whole, or leaves it as it was.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    save_whole(path, |staged| {
        std::fs::write(staged, bytes).map_err(failed(path))
    })
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;

    use super::*;
    use crate::experiment::Experiment;
    use crate::experiment::fixture::{config_in, write_waves};

    #[test]
    fn one_job_computes_the_statistics_of_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let open = || {
            Launcher::local(1).run(|world| {
                Experiment::new(&world, &config)?;
                Ok(())
            })
        };
        let other = lock(&config.folder).unwrap();
        let error = open().unwrap_err().to_string();
        assert!(
            error.contains("another job computes the statistics"),
            "{error}"
        );
        drop(other);
        open().unwrap();
        // With statistics there is nothing to compute.
        let _other = lock(&config.folder).unwrap();
        open().unwrap();
    }

    #[test]
    fn a_network_is_left_out_once_there_is_a_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config_in(folder.path(), "", "[training]\npretrained = \"model\"");
        std::fs::create_dir_all(&config.folder).unwrap();
        save_copy(&config).unwrap();
        compare(&config).unwrap();
        config.training.pretrained = None;
        let error = compare(&config).unwrap_err().to_string();
        let told = "training.pretrained: got none, expected model, of which";
        assert!(error.contains(told), "{error}");
        std::fs::create_dir_all(config.folder.join("checkpoints/step_000000001")).unwrap();
        compare(&config).unwrap();
        // The starts of training may change.
        config.data.every_hours = Some(12);
        config.data.at_hours = vec![0];
        compare(&config).unwrap();
    }

    #[test]
    fn channels_that_change_sign_by_their_names_are_those_of_the_record() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let open = || {
            let found = Launcher::local(1)
                .collect(|world| Ok(Experiment::new(&world, &config)?.data.odd.clone()));
            found.unwrap().remove(0)
        };
        assert!(open().is_empty());
        let mut record = Record::load(&config.folder).unwrap().unwrap();
        record.odd = vec!["t2m".into()];
        let text = serde_json::to_vec(&record).unwrap();
        write(&config.folder.join(FILES), &text).unwrap();
        assert_eq!(open(), ["t2m"]);
    }

    #[test]
    fn forcings_are_compared_once_there_is_a_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let targets = |config: &ExperimentConfig| {
            let found = Launcher::local(1).collect(|world| {
                let experiment = Experiment::new(&world, config)?;
                let climatology = experiment.climatology()?.at(&[0.0]);
                Ok((
                    experiment.data.channels.targets.len(),
                    climatology.dims()[1],
                ))
            });
            found.map(|mut found| found.remove(0))
        };
        assert_eq!(targets(&config).unwrap(), (2, 2));
        let mut other = config.clone();
        other.data.forcings = vec!["sst".into()];
        other.data.history = 2;
        let computing = lock(&config.folder).unwrap();
        let error = targets(&other).unwrap_err().to_string();
        assert!(error.contains("another job computes"), "{error}");
        drop(computing);
        // The second start finds its own configuration.
        for _ in 0..2 {
            assert_eq!(targets(&other).unwrap(), (1, 1));
        }
        // Another job trains in the folder, until its first checkpoint.
        let checkpoints = config.folder.join(CHECKPOINTS);
        std::fs::create_dir_all(&checkpoints).unwrap();
        let training = File::create(checkpoints.join(".lock")).unwrap();
        training.lock().unwrap();
        let error = targets(&config).unwrap_err().to_string();
        assert!(error.contains("another job trains"), "{error}");
        assert_eq!(targets(&other).unwrap(), (1, 1));
        drop(training);
        let mut refused = other.clone();
        refused.data.train.until = Some("1970-01-02".into());
        let error = targets(&refused).unwrap_err().to_string();
        assert!(error.contains("another [data], by its train"), "{error}");
        std::fs::create_dir_all(config.folder.join("checkpoints/step_000000001")).unwrap();
        let error = targets(&config).unwrap_err().to_string();
        assert!(
            error.contains("another [data], by its forcings, history"),
            "{error}"
        );
    }

    #[test]
    fn training_does_not_begin_with_the_record_of_another_job() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let mut other = config.clone();
        other.data.forcings = vec!["sst".into()];
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            Experiment::new(&world, &other)?;
            let error = experiment.train().unwrap_err().to_string();
            assert!(error.contains("another job has changed [data]"), "{error}");
            assert!(!config.folder.join(CHECKPOINTS).exists());
            Ok(())
        });
        run.unwrap();
    }

    #[test]
    fn a_model_is_compared_once_there_is_a_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        let mut other = config.clone();
        other.model = serde_json::from_str(r#"{ "kind": "unet", "levels": 9 }"#).unwrap();
        let open = |config: &ExperimentConfig| {
            let opened = Launcher::local(1).run(|world| {
                Experiment::new(&world, config)?;
                Ok(())
            });
            opened.map_err(|error| error.to_string())
        };
        // A model that does not fit leaves nothing behind.
        let error = open(&other).unwrap_err();
        assert!(error.contains("model.levels: 9"), "{error}");
        // Neither do settings that do not fit the samples.
        let mut batch = config.clone();
        batch.training.batch = 99;
        let error = open(&batch).unwrap_err();
        assert!(error.contains("training.batch: got 99"), "{error}");
        assert!(!other.folder.exists());
        open(&config).unwrap();
        other.model = serde_json::from_str(r#"{ "kind": "unet", "levels": 1 }"#).unwrap();
        open(&other).unwrap();
        assert!(config.require_trained().is_err());
        std::fs::create_dir_all(config.folder.join("checkpoints/step_000000001")).unwrap();
        let error = open(&other).unwrap_err();
        assert!(error.contains("has another [model]"), "{error}");
        let again = r#"{ "kind": "unet", "width": 2, "levels": 1, "recompute": true }"#;
        other.model = serde_json::from_str(again).unwrap();
        compare(&other).unwrap();
        config.require_trained().unwrap();
    }
}
