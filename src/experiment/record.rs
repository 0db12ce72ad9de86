//! What an experiment was made of, in its folder: the configuration, and a summary of the files.

use std::path::Path;

use halocline_core::{Error, Result};
use halocline_io::{Fields, Gaps, OpenConfig, save_whole};
use serde::{Deserialize, Serialize};

use super::config::ExperimentConfig;
use super::data::Data;

/// The name of the copy of the configuration in the folder.
const COPY: &str = "experiment.toml";
/// The name of the summary of the files.
const FILES: &str = "files.json";

/// By what a file of the training period, or several that are joined, is known.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Summary {
    bytes: u64,
    /// Of parts of the bytes.
    checksum: u32,
    times: usize,
    /// The first and the last time, by the calendar of the files.
    dates: Option<[String; 2]>,
}

impl Summary {
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

/// Writes the configuration and the summary into the folder, or compares them with those that are there.
///
/// # Errors
/// Other data, another model; files that have changed.
pub(super) fn record(config: &ExperimentConfig, data: &Data) -> Result<()> {
    let folder = &config.folder;
    let copy = folder.join(COPY);
    if copy.exists() {
        compare(&copy, config)?;
    }
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let files = data.training_files()?;
    let mut found: Vec<Summary> = files
        .iter()
        .map(|file| Summary::of(file))
        .collect::<Result<_>>()?;
    if let Some(constants) = &config.data.constants {
        let open = OpenConfig::new().with_gaps(Gaps::Allow);
        found.push(Summary::of(&open.open(constants)?)?);
    }
    let path = folder.join(FILES);
    let before = match path.exists() {
        false => None,
        true => {
            let text = std::fs::read(&path).map_err(|error| failed(&path, &error))?;
            let before: Vec<Summary> =
                serde_json::from_slice(&text).map_err(|error| failed(&path, &error))?;
            Some(before)
        }
    };
    match before {
        Some(before) if before != found => {
            let pair = before.iter().zip(&found).find(|(one, other)| one != other);
            let told = pair.map_or_else(
                || format!("{} files, and {} before", found.len(), before.len()),
                |(before, found)| format!("{found:?}, and before {before:?}"),
            );
            return Err(Error::other(format!(
                "{}: the files have changed since statistics, climatology and model were made of them: {told}; choose \
                 another folder, or remove {}",
                path.display(),
                folder.display()
            )));
        }
        Some(_) => {}
        None => write(
            &path,
            &serde_json::to_vec_pretty(&found).map_err(Error::other)?,
        )?,
    }
    write(&copy, config.to_toml().as_bytes())
}

/// Compares the configuration with a copy of an earlier one. Other periods may be scored.
fn compare(copy: &Path, config: &ExperimentConfig) -> Result<()> {
    let before = ExperimentConfig::load(copy)?;
    let differs = |what: &str| {
        Err(Error::other(format!(
            "{} has another {what}: choose another folder, or remove that one",
            copy.display()
        )))
    };
    let mut data = before.data.clone();
    (data.validation, data.test) = (config.data.validation.clone(), config.data.test.clone());
    if data != config.data {
        return differs("[data]");
    }
    if before.model != config.model {
        return differs("[model]");
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    save_whole(path, |path| {
        std::fs::write(path, bytes).map_err(|error| failed(path, &error))
    })
}

fn failed(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::other(format!("{}: {error}", path.display()))
}
