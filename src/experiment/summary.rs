//! Summary of the files of an experiment, by which changed files are known.

use std::fmt;
use std::path::Path;

use halocline_core::{Error, Result};
use halocline_io::{Channel, Fields, Gaps, OpenConfig, Period};
use serde::{Deserialize, Serialize};

use super::config::ExperimentConfig;
use super::data::Data;
use super::data_config::DataConfig;
use super::errors::failed;

/// Name of the summary in the folder of an experiment.
pub(super) const FILES: &str = "files.json";

/// Units of channels.
pub(super) type Units = Vec<(String, Option<String>)>;

/// Identity of the files of an experiment.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) files: Vec<Summary>,
    /// Units of each channel.
    pub(super) units: Units,
    /// Inputs and forcings that change sign across a pole.
    pub(super) odd: Vec<String>,
}

impl Record {
    pub(super) fn of(config: &ExperimentConfig, data: &Data) -> Result<Self> {
        let mut files = Summary::of_period(data, &config.data.train)?;
        files.extend(Summary::of_constants(config)?);
        let units = |channel: &Channel| (channel.name.clone(), channel.units.clone());
        Ok(Self {
            files,
            units: data.files.iter().map(units).collect(),
            odd: data.odd.clone(),
        })
    }

    /// Reads the record of a folder, if there is one.
    pub(super) fn load(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILES);
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read(&path).map_err(failed(&path))?;
        let record = serde_json::from_slice(&text).map_err(failed(&path))?;
        Ok(Some(record))
    }

    /// Rejects files that differ from those of this record, the one of a configuration's folder.
    pub(super) fn check(&self, found: &Self, config: &ExperimentConfig) -> Result<()> {
        let folder = &config.folder;
        // Channels that are known by their names are those of the record.
        let is_odd_same = config.data.odd.is_none() || self.odd == found.odd;
        if is_odd_same && self.files == found.files && self.units == found.units {
            return Ok(());
        }
        Err(self.changed(found, folder))
    }

    /// Rejects files that differ from those of this record, of which there are statistics but no
    /// model, apart from the constants. Channels may be left out.
    ///
    /// # Errors
    /// Other files; other units; a channel without statistics.
    pub(super) fn check_statistics(
        &self,
        found: &Self,
        [before, config]: [&DataConfig; 2],
        folder: &Path,
    ) -> Result<()> {
        let constants = |config: &DataConfig| usize::from(config.constants.is_some());
        let count = self.files.len() - constants(before);
        let is_same = found.files.len() - constants(config) == count;
        if !is_same || self.files[..count] != found.files[..count] {
            return Err(self.changed(found, folder));
        }
        for (name, units) in &found.units {
            match self.units.iter().find(|(known, _)| known == name) {
                Some((_, before)) if before == units => {}
                Some(_) => return Err(self.changed(found, folder)),
                None => {
                    return Err(Error::other(format!(
                        "{}: no statistics of {name}; choose another folder, or remove that one",
                        folder.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Returns the error for files that have changed.
    fn changed(&self, found: &Self, folder: &Path) -> Error {
        let mut pairs = self.files.iter().zip(&found.files);
        let pair = pairs.find(|(one, other)| one != other);
        let told = pair.map_or_else(
            || "others, or other units or names".into(),
            |(before, found)| format!("{found}, and before {before}"),
        );
        Error::other(format!(
            "{}: the files of data.files have changed since statistics, climatology and model were made of them: {told}; \
             choose another folder, remove {}, or name files that are only to be forecast or scored by --files",
            folder.join(FILES).display(),
            folder.display()
        ))
    }
}

/// Identity of a file of a period, or of several joined ones.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Summary {
    bytes: u64,
    /// Checksum of parts of the bytes.
    checksum: u32,
    times: usize,
    /// First and last time, in the calendar of the files.
    dates: Option<[String; 2]>,
}

impl Summary {
    pub(super) fn of_constants(config: &ExperimentConfig) -> Result<Option<Self>> {
        let open = OpenConfig::new().with_gaps(Gaps::Allow);
        let constants = config.data.constants.as_ref();
        let summary = constants.map(|constants| Self::of(&open.open(constants)?));
        summary.transpose()
    }

    /// Returns the identity of each file that has times of a period.
    pub(super) fn of_period(data: &Data, period: &Period) -> Result<Vec<Self>> {
        let files = data.files_of(period)?;
        files.iter().map(|file| Self::of(file)).collect()
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
