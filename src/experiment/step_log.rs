//! Log of steps: a file with a line of JSON for every few optimizer steps.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use burn::module::Module;
use burn::optim::GradientsParams;
use halocline_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;

use super::errors::failed;
use super::log::{read, short};
use super::network::{FieldModel, OwnNetwork};
use super::record::write;
use super::setup::Experiment;
use crate::root::on_root;
use crate::trainer::{Trainer, clip_grad_norm};

/// Name of the log in the folder of an experiment.
const NAME: &str = "steps.jsonl";

/// Line of the log.
#[derive(Serialize)]
struct Line {
    /// Optimizer steps since the start of the run.
    step: u64,
    /// Number of the epoch, from 1.
    epoch: usize,
    /// Mean loss of the batches of the last steps.
    loss: f64,
    /// Learning rate of the step.
    learning_rate: f64,
    /// Norm of the gradient of the step before clipping, if it was computed.
    grad_norm: Option<f64>,
    /// Seconds since the line before, or since the epoch was begun or resumed.
    seconds: f64,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, epoch, .. } = self;
        let (loss, rate) = (short(self.loss), self.learning_rate);
        write!(
            f,
            "epoch {epoch}, step {step}: loss {loss}, learning rate {rate:.3e}"
        )?;
        if let Some(norm) = self.grad_norm {
            write!(f, ", gradient norm {}", short(norm))?;
        }
        write!(f, ", {:.1} s", self.seconds)
    }
}

/// Norm of the gradient of the last step before clipping.
#[derive(Clone, Debug, Default)]
pub(super) struct GradNorm(Arc<Mutex<Option<f64>>>);

impl GradNorm {
    /// Clips gradients, and stores their norm.
    pub(super) fn clip<M: Module>(
        &self,
        model: &M,
        gradients: GradientsParams,
        max_norm: f64,
    ) -> Result<GradientsParams> {
        let (gradients, norm) = clip_grad_norm(model, gradients, max_norm)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(norm);
        Ok(gradients)
    }

    fn last(&self) -> Option<f64> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<N: OwnNetwork> Experiment<N> {
    /// Adds a line to the log, and prints it if the output is not a terminal, after every
    /// `training.log_every` steps. `last` is the last such step and its time. Ranks communicate
    /// only after these steps.
    pub(super) fn log_step(
        &self,
        trainer: &mut Trainer<FieldModel<N>>,
        last: &mut (u64, Instant),
        (norm, all_steps): (&GradNorm, usize),
    ) -> Result<()> {
        let (training, step) = (&self.config.training, trainer.step());
        let (every, (before, begin)) = (training.log_every, *last);
        // A step that is left out is not counted.
        if every == 0 || step == before || !step.is_multiple_of(every) {
            return Ok(());
        }
        *last = (step, Instant::now());
        on_root(&self.world, || {
            let epoch = trainer.epoch() + 1;
            let losses = trainer.losses();
            let count = (every as usize).saturating_mul(training.accumulation);
            let recent = &losses[losses.len().saturating_sub(count)..];
            let line = Line {
                step,
                epoch,
                loss: recent.iter().sum::<f64>() / recent.len() as f64,
                learning_rate: self.config.optimizer.rate(step - 1, all_steps),
                grad_norm: norm.last(),
                seconds: begin.elapsed().as_secs_f64(),
            };
            // On a terminal there is a progress bar.
            if !std::io::stdout().is_terminal() {
                self.say(&line);
            }
            add(&self.config.folder, &line)
        })
    }
}

fn add(folder: &Path, line: &Line) -> Result<()> {
    let path = folder.join(NAME);
    let text = serde_json::to_string(line).map_err(Error::other)?;
    let file = OpenOptions::new().create(true).append(true).open(&path);
    let mut file = file.map_err(failed(&path))?;
    file.write_all(format!("{text}\n").as_bytes())
        .map_err(failed(&path))
}

/// Removes the lines of steps after `step`, which training repeats, and lines that are not JSON,
/// such as one that was cut.
pub(super) fn remove_later(folder: &Path, step: u64) -> Result<()> {
    let path = folder.join(NAME);
    let bytes = read(&path)?;
    let text = String::from_utf8_lossy(&bytes);
    let is_kept = |line: &&str| {
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        line["step"].as_u64().is_some_and(|number| number <= step)
    };
    let lines = text.lines().filter(is_kept);
    let kept: String = lines.map(|line| format!("{line}\n")).collect();
    if kept.as_bytes() == bytes {
        return Ok(());
    }
    write(&path, kept.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_later_steps_and_cut_ones_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        remove_later(folder, 0).unwrap();
        for step in [10, 20, 30] {
            let line = Line {
                step,
                epoch: 1,
                loss: f64::NAN,
                learning_rate: 1e-3,
                grad_norm: (step > 10).then_some(2.0),
                seconds: 1.5,
            };
            add(folder, &line).unwrap();
        }
        let read = || std::fs::read_to_string(folder.join(NAME)).unwrap();
        let whole = read();
        remove_later(folder, 30).unwrap();
        assert_eq!(read(), whole);
        std::fs::write(folder.join(NAME), whole + "{\"step\":4").unwrap();
        remove_later(folder, 20).unwrap();
        let lines: Vec<Value> = read()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0]["grad_norm"].is_null() && lines[0]["loss"].is_null());
        assert_eq!(lines[1]["step"], 20);
        assert_eq!(lines[1]["grad_norm"], 2.0);
    }
}
