//! Log of training: a file with a line of JSON for each epoch.

use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use halocline_core::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value};

use super::errors::failed;
use super::record::write;

/// Name of the log in the folder of an experiment.
const NAME: &str = "log.jsonl";

/// Training of an epoch.
#[derive(Serialize)]
pub(super) struct Epoch {
    /// Number of the epoch, from 1.
    pub(super) epoch: usize,
    /// Optimizer steps since the start of the run.
    pub(super) step: u64,
    /// Autoregressive steps of a sample.
    pub(super) rollout: usize,
    /// Learning rate of the last optimizer step.
    pub(super) learning_rate: f64,
    /// Mean loss of the batches.
    pub(super) loss: f64,
    /// Optimizer steps left out, because a value was not finite. This number and the next two are
    /// those since the last start of the program.
    pub(super) skipped: usize,
    /// Seconds of training, without validation.
    pub(super) seconds: f64,
    /// Samples per second, over all ranks.
    pub(super) samples_per_second: f64,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            epoch,
            rollout,
            loss,
            seconds,
            ..
        } = self;
        let loss = short(*loss);
        write!(
            f,
            "epoch {epoch}: loss {loss}, {rollout} step(s), {seconds:.1} s"
        )
    }
}

/// Formats a number with four digits after the point.
pub(super) fn short(value: f64) -> String {
    if (1e-3..1e6).contains(&value) {
        format!("{value:.4}")
    } else {
        format!("{value:.3e}")
    }
}

type Line = Map<String, Value>;

/// Writes the line of an epoch in place of an earlier one, and removes those of later epochs, which
/// training repeats.
pub(super) fn add_epoch(folder: &Path, epoch: &Epoch) -> Result<()> {
    let line = serde_json::to_value(epoch).and_then(serde_json::from_value);
    let line: Line = line.map_err(Error::other)?;
    replace(folder, epoch.epoch, |_| line)
}

/// Adds the score of a validation, and the RMSE of channels, to the line of an epoch.
pub(super) fn add_validation<'a>(
    folder: &Path,
    epoch: usize,
    score: f64,
    errors: impl IntoIterator<Item = (&'a str, f64)>,
) -> Result<()> {
    let columns = errors
        .into_iter()
        .map(|(channel, rmse)| (format!("rmse_{channel}"), rmse))
        .chain([("validation".into(), score)]);
    replace(folder, epoch, |mut line| {
        line.insert("epoch".into(), epoch.into());
        line.extend(columns.map(|(name, value)| (name, value.into())));
        line
    })
}

/// Replaces the line of an epoch by a function of it, and removes later ones. Drops lines that are
/// not JSON, such as one that was cut.
fn replace(folder: &Path, epoch: usize, change: impl FnOnce(Line) -> Line) -> Result<()> {
    let path = folder.join(NAME);
    let bytes = read(&path)?;
    let text = String::from_utf8_lossy(&bytes);
    let numbered = |line: &str| {
        let line: Line = serde_json::from_str(line).ok()?;
        let epoch = usize::try_from(line.get("epoch")?.as_u64()?).ok()?;
        Some((epoch, line))
    };
    let lines = text.lines().filter_map(numbered);
    let kept = lines.filter(|(number, _)| *number <= epoch);
    let mut lines: BTreeMap<usize, Line> = kept.collect();
    let line = lines.remove(&epoch).unwrap_or_default();
    lines.insert(epoch, change(line));
    let lines = lines.into_values().map(Value::Object);
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    write(&path, text.as_bytes())
}

/// Reads a log, which is empty if there is none.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(path)(error)),
        bytes => Ok(bytes.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_that_are_repeated_or_cut_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let train = |epoch: usize, loss: f64| {
            let line = Epoch {
                epoch,
                step: 2 * epoch as u64,
                rollout: 1,
                learning_rate: 1e-3,
                loss,
                skipped: 0,
                seconds: 2.0,
                samples_per_second: 8.0,
            };
            add_epoch(folder, &line).unwrap();
        };
        let read = || {
            let text = fs::read_to_string(folder.join(NAME)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
            lines.collect::<Vec<Value>>()
        };
        for epoch in 1..=3 {
            train(epoch, 1.0);
            add_validation(folder, epoch, 0.5, [("t2m", 2.0), ("z@500", 30.0)]).unwrap();
        }
        let lines = read();
        assert_eq!(lines.len(), 3);
        for (name, value) in [("loss", 1.0), ("validation", 0.5), ("rmse_z@500", 30.0)] {
            assert_eq!(lines[2][name], value);
        }
        // A resume from the first epoch repeats the second.
        train(2, 0.9);
        let lines = read();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1]["loss"], 0.9);
        assert!(lines[1].get("validation").is_none());
        let text = fs::read_to_string(folder.join(NAME)).unwrap();
        fs::write(folder.join(NAME), text + "{\"epoch\":3,\"lo").unwrap();
        train(4, f64::NAN);
        let lines = read();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[2]["epoch"], 4);
        assert!(lines[2]["loss"].is_null());
    }
}
