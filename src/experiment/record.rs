//! Record of an experiment in its folder: the configuration, and a summary of the files.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, TryLockError};
use std::path::Path;

use halocline_core::{Error, Result};
use halocline_io::{Channel, Fields, Gaps, OpenConfig, save_whole};
use serde::{Deserialize, Serialize};

use super::config::ExperimentConfig;
use super::data::Data;

/// Name of the copy of the configuration in the folder.
pub(super) const COPY: &str = "experiment.toml";
/// Name of the summary of the files.
pub(super) const FILES: &str = "files.json";
/// Name of the file that a job locks while it computes statistics.
const LOCK: &str = ".statistics.lock";
/// Name of the folder of statistics.
pub(super) const STATISTICS: &str = "statistics";
/// Name of the folder of the climatology.
pub(super) const CLIMATOLOGY: &str = "climatology";
/// Name of the folder of checkpoints.
pub(super) const CHECKPOINTS: &str = "checkpoints";

/// Paths in the folder that training and scoring write: once one exists, the folder belongs to its
/// configuration.
const MADE: [&str; 3] = ["statistics/data.json", CLIMATOLOGY, CHECKPOINTS];

/// Identity of the files of an experiment.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    files: Vec<Summary>,
    /// Units of each channel.
    units: Units,
    /// Inputs and forcings that change sign across a pole.
    odd: Vec<String>,
}

impl Record {
    fn of(config: &ExperimentConfig, data: &Data) -> Result<Self> {
        let files = data.training_files()?;
        let mut files: Vec<Summary> = files
            .iter()
            .map(|file| Summary::of(file))
            .collect::<Result<_>>()?;
        files.extend(Summary::of_constants(config)?);
        let units = |channel: &Channel| (channel.name.clone(), channel.units.clone());
        Ok(Self {
            files,
            units: data.files.iter().map(units).collect(),
            odd: data.odd.clone(),
        })
    }

    /// Reads the record of a folder, if there is one.
    fn load(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILES);
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read(&path).map_err(|error| failed(&path, &error))?;
        let record = serde_json::from_slice(&text).map_err(|error| failed(&path, &error))?;
        Ok(Some(record))
    }

    /// Rejects files that differ from those of this record, the one of a configuration's folder.
    fn check(&self, found: &Self, config: &ExperimentConfig) -> Result<()> {
        let folder = &config.folder;
        // Channels that are known by their names are those of the record.
        let is_odd_same = config.data.odd.is_none() || self.odd == found.odd;
        if is_odd_same && self.files == found.files && self.units == found.units {
            return Ok(());
        }
        let mut pairs = self.files.iter().zip(&found.files);
        let pair = pairs.find(|(one, other)| one != other);
        let told = pair.map_or_else(
            || "others, or other units or names".into(),
            |(before, found)| format!("{found}, and before {before}"),
        );
        Err(Error::other(format!(
            "{}: the files of data.files have changed since statistics, climatology and model were made of them: {told}; \
             choose another folder, remove {}, or name files that are only to be forecast or scored by --files",
            folder.join(FILES).display(),
            folder.display()
        )))
    }
}

/// Identity of a file of the training period, or of several joined ones.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Summary {
    bytes: u64,
    /// Checksum of parts of the bytes.
    checksum: u32,
    times: usize,
    /// First and last time, in the calendar of the files.
    dates: Option<[String; 2]>,
}

impl Summary {
    fn of_constants(config: &ExperimentConfig) -> Result<Option<Self>> {
        let open = OpenConfig::new().with_gaps(Gaps::Allow);
        let constants = config.data.constants.as_ref();
        let summary = constants.map(|constants| Self::of(&open.open(constants)?));
        summary.transpose()
    }

    fn of(fields: &dyn Fields) -> Result<Self> {
        let (bytes, checksum) = fields.fingerprint()?;
        let date = |time: &f64| fields.calendar().date(*time);
        let ends = fields.times().first().zip(fields.times().last());
        Ok(Self {
            bytes,
            checksum,
            times: fields.times().len(),
            dates: ends.map(|(first, last)| [date(first), date(last)]),
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bytes,
            checksum,
            times,
            dates,
        } = self;
        write!(
            f,
            "{bytes} bytes (checksum {checksum:08x}) of {times} times"
        )?;
        match dates {
            Some([first, last]) => write!(f, " from {first} to {last}"),
            None => Ok(()),
        }
    }
}

/// Locks a folder for the job that computes its statistics, until the returned file is dropped.
///
/// # Errors
/// A lock that another job holds; a folder that cannot be written.
pub(super) fn lock(folder: &Path) -> Result<File> {
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let path = folder.join(LOCK);
    let file = File::create(&path).map_err(|error| failed(&path, &error))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::other(format!(
            "{}: another job computes the statistics or the climatology of this folder; start this one when they are there, \
             or choose another folder",
            folder.display()
        ))),
        // File systems without locks are accepted.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

/// Writes the configuration and the summary into the folder. If training or scoring has already
/// written there, compares them with the existing ones.
///
/// # Errors
/// Other data; another model; files that have changed.
pub(super) fn record(config: &ExperimentConfig, data: &Data) -> Result<()> {
    let folder = &config.folder;
    let made = MADE.iter().any(|made| folder.join(made).exists());
    let is_copied = made && folder.join(COPY).exists();
    if is_copied {
        compare(config)?;
    }
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let found = Record::of(config, data)?;
    let before = if made { Record::load(folder)? } else { None };
    match before {
        Some(before) => before.check(&found, config)?,
        None => {
            let text = serde_json::to_vec_pretty(&found).map_err(Error::other)?;
            write(&folder.join(FILES), &text)?;
        }
    }
    if is_copied { Ok(()) } else { save_copy(config) }
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
    Error::other(format!("{}: no checkpoint; train first", folder.display()))
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
        return Err(Error::from(halocline_io::Error::Argument {
            argument: "data.constants",
            got: constants.to_string(),
            expected: "the file that training had".into(),
        }));
    }
    same_units(&record.units, data, "files")
}

/// Units of channels.
pub(super) type Units = Vec<(String, Option<String>)>;

/// Returns the channels that change sign across a pole and the units of all channels, as recorded
/// in the folder of an experiment.
pub(super) fn odd_and_units(folder: &Path) -> Result<(Vec<String>, Units)> {
    match Record::load(folder)? {
        Some(record) => Ok((record.odd, record.units)),
        None => Err(Error::other(format!(
            "{}: missing; expected the summary of the files of training",
            folder.join(FILES).display()
        ))),
    }
}

/// Rejects data whose units are not those of training. The error names `argument`.
pub(super) fn same_units(
    trained: &[(String, Option<String>)],
    data: &Data,
    argument: &'static str,
) -> Result<()> {
    for (name, units) in trained {
        let trained = Channel::new(name.clone()).with_units(units.clone());
        let mut files = data.files.iter();
        let other = files.find(|file| file.name == trained.name && !file.has_units_of(&trained));
        if let Some(other) = other {
            let units = |channel: &Channel| channel.units.clone().unwrap_or("none".into());
            return Err(Error::from(halocline_io::Error::Argument {
                argument,
                got: format!("{} of {}", units(other), other.name),
                expected: format!(
                    "{}, as in training; convert the values, or write the attribute units",
                    units(&trained)
                ),
            }));
        }
    }
    Ok(())
}

/// Compares the keys that a model depends on with the copy of an earlier configuration. The periods
/// for validation and test may differ, files may have moved, and the model may differ until there
/// is a checkpoint. Time units are not compared. The climatology may differ if the model does not
/// see it.
///
/// # Errors
/// No copy; other data; another model; without a checkpoint, a network left out whose statistics
/// the folder has.
pub(super) fn compare(config: &ExperimentConfig) -> Result<()> {
    let copy = config.folder.join(COPY);
    if !copy.exists() {
        let message = format!("{}: no experiment; train first", config.folder.display());
        return Err(Error::other(message));
    }
    let before = ExperimentConfig::load(&copy)?;
    let is_begun = has_checkpoint(&config.folder.join(CHECKPOINTS));
    let is_left_out = config.training.pretrained.is_none() && config.data.statistics.is_none();
    if let (Some(pretrained), None) = (&before.training.pretrained, &before.data.statistics)
        && is_left_out
        && !is_begun
    {
        return Err(Error::from(halocline_io::Error::Argument {
            argument: "training.pretrained",
            got: "none".into(),
            expected: format!(
                "{}, of which {} has the statistics, until there is a checkpoint; choose another folder, or remove that one",
                pretrained.display(),
                config.folder.display()
            ),
        }));
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
    data.files.clone_from(&config.data.files);
    // They show in the dates of the files of training. Those of other files may be right.
    data.time_units.clone_from(&config.data.time_units);
    // The values are compared, not the path.
    data.statistics.clone_from(&config.data.statistics);
    if !config.data.anomalies {
        data.climatology = config.data.climatology;
        data.climatology_hours = config.data.climatology_hours;
    }
    if data.constants.is_some() && config.data.constants.is_some() {
        data.constants.clone_from(&config.data.constants);
    }
    if data != config.data {
        return differs("[data]", other_keys(&data, &config.data));
    }
    if before.model != config.model && is_begun {
        return differs("[model]", other_keys(&before.model, &config.model));
    }
    Ok(())
}

/// Returns the keys whose values differ between two tables.
pub(super) fn other_keys(one: &impl Serialize, other: &impl Serialize) -> Vec<String> {
    let table = |table: Result<toml::Table, toml::ser::Error>| table.unwrap_or_default();
    let (one, other) = (
        table(toml::Table::try_from(one)),
        table(toml::Table::try_from(other)),
    );
    let keys: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let differ = keys
        .into_iter()
        .filter(|key| one.get(*key) != other.get(*key));
    differ.cloned().collect()
}

/// Writes a file of a folder whole, or leaves it as it was.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    save_whole(path, |path| {
        std::fs::write(path, bytes).map_err(|error| failed(path, &error))
    })
}

fn failed(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::other(format!("{}: {error}", path.display()))
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
        assert!(!other.folder.exists());
        open(&config).unwrap();
        other.model = serde_json::from_str(r#"{ "kind": "unet", "levels": 1 }"#).unwrap();
        open(&other).unwrap();
        assert!(config.require_trained().is_err());
        std::fs::create_dir_all(config.folder.join("checkpoints/step_000000001")).unwrap();
        let error = open(&other).unwrap_err();
        assert!(error.contains("has another [model]"), "{error}");
        config.require_trained().unwrap();
    }
}
