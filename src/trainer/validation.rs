//! Validation: metrics during training, the best checkpoint, and early stopping.

use burn::module::Module;
use halocline_core::{Error, Result};
use halocline_io::Direction;
use serde::{Deserialize, Serialize};

use super::{Trainer, validated_name};

const NOTE: &str = "validations";

/// Result of a [validation](Trainer::validate).
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "it says when to stop"]
pub struct Validation {
    /// Metric, the same on all ranks.
    pub metric: f64,
    /// Whether the metric is the best so far. NaN and infinities never are.
    pub is_best: bool,
    /// Whether the program should stop training, as the last [`patience`](Trainer::with_patience)
    /// validations brought no better metric.
    pub stop: bool,
}

/// State of validation, saved with the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Validated {
    /// Best metric.
    best: Option<f64>,
    /// Number of validations since.
    since: usize,
}

impl Validated {
    /// Records a metric; returns whether it is the best.
    fn take(&mut self, metric: f64, direction: Direction) -> bool {
        let is_better = |best| direction.is_better(metric, best);
        let is_best = metric.is_finite() && self.best.is_none_or(is_better);
        if is_best {
            self.best = Some(metric);
        }
        self.since = if is_best { 0 } else { self.since + 1 };
        is_best
    }
}

impl<M: Module> Trainer<M> {
    /// Sets the number of validations without a better metric after which
    /// [`validate`](Self::validate) recommends to stop. Default: never.
    ///
    /// # Panics
    /// Panics if `validations` is 0.
    #[must_use]
    pub fn with_patience(mut self, validations: usize) -> Self {
        assert!(
            validations > 0,
            "with_patience(0): expected at least 1 validation"
        );
        self.patience = Some(validations);
        self
    }

    /// Validates the model, without gradients; if the run has an [average](Self::with_ema),
    /// validates the averaged model. `metric` computes a metric of the model on validation data,
    /// such as an error, where lower is better. For a correlation, pass [`Direction::Highest`] to
    /// [`with_checkpoints`](Self::with_checkpoints). If the run has a folder, it is saved with the
    /// metric, and the folder keeps the best checkpoint and the newest ones. All ranks must call
    /// this together; the metric of rank 0 counts.
    ///
    /// # Errors
    /// `metric` fails; saving or communication fails.
    ///
    /// # Example
    /// ```
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::nn::conv::Conv2dConfig;
    /// use burn::optim::SgdConfig;
    /// use halocline::models::Evaluation;
    /// use halocline::prelude::*;
    /// use halocline::Trainer;
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let field = || ShardTensor::<4>::ones([1, 1, 5, 3], &mesh, &[Shard(2)]);
    ///     let model = world.init(|device| Conv2dConfig::new([1, 1], [1, 1]).init(device))?;
    ///     let rate = ModuleLrScheduler::new(1e-3);
    ///     let mut trainer = Trainer::new(&world, model, SgdConfig::new().init(), rate).with_patience(3);
    ///     let mut best = f64::INFINITY;
    ///     while trainer.epoch() < 20 {
    ///         let _ = trainer.train_epoch(
    ///             |_, first| first..4,
    ///             |model, _| Ok(field()?.apply(model).abs().mean()),
    ///         )?;
    ///         let validation = trainer.validate(|model| {
    ///             let mut scores = Evaluation::new(&[1.0; 5], 1);
    ///             scores.add_masked(field()?.inner().apply(model), field()?.inner() * 0.0, None, None)?;
    ///             Ok(scores.metrics()[0].rmse)
    ///         })?;
    ///         best = validation.metric.min(best);
    ///         if validation.stop {
    ///             break;
    ///         }
    ///     }
    ///     assert_eq!(trainer.best_metric(), Some(best));
    ///     assert_eq!(trainer.validations()?.len(), trainer.epoch());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline::Error>(())
    /// ```
    pub fn validate(&mut self, metric: impl FnOnce(&M) -> Result<f64>) -> Result<Validation> {
        let metric = match self.ema_model() {
            Some(model) => metric(model)?,
            None => metric(&self.model().valid())?,
        };
        let root = self.mesh.shape().ranks()[0];
        let bytes = metric.to_le_bytes().to_vec();
        let bytes = self.mesh.broadcast_bytes("validate", root, Some(bytes))?;
        let metric = f64::from_le_bytes(bytes[..].try_into().map_err(Error::other)?);
        let is_best = self.progress.validated.take(metric, self.keep.direction);
        let mut metrics = self.validations()?;
        metrics.push((self.step(), metric.is_finite().then_some(metric)));
        self.note(NOTE, &metrics)?;
        if self.checkpoints.is_some() {
            self.save(Some(metric))?;
        }
        Ok(Validation {
            metric,
            is_best,
            stop: self.is_out_of_patience(),
        })
    }

    /// Whether the last [validations](Self::validate), as many as the
    /// [patience](Self::with_patience), brought no better metric; includes those before a resume.
    pub fn is_out_of_patience(&self) -> bool {
        let since = self.progress.validated.since;
        self.patience.is_some_and(|patience| since >= patience)
    }

    /// Returns the best metric of a [validation](Self::validate) so far, including those before a
    /// resume.
    pub fn best_metric(&self) -> Option<f64> {
        self.progress.validated.best
    }

    /// Returns the step and the metric of every validation so far, including those before a resume;
    /// `None` for a metric that was not finite.
    ///
    /// # Errors
    /// The program has stored a note under the same name.
    pub fn validations(&self) -> Result<Vec<(u64, Option<f64>)>> {
        Ok(self.noted(NOTE)?.unwrap_or_default())
    }

    /// Returns the validated model of the best checkpoint: the averaged one, if the run has an
    /// average. `None` if the run has no folder, or no checkpoint with a metric.
    ///
    /// # Errors
    /// Returned on all ranks: the checkpoint cannot be loaded; the last save, or communication,
    /// fails.
    pub fn best_model(&mut self) -> Result<Option<M>> {
        let Some(checkpoints) = &mut self.checkpoints else {
            return Ok(None);
        };
        let Some(checkpoint) = checkpoints.best()? else {
            return Ok(None);
        };
        let name = validated_name(&checkpoint);
        // A clone would share its running statistics with the model in training.
        checkpoint
            .module(&self.world, name, self.model().valid())
            .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_better_finite_metrics_are_the_best() {
        let mut validated = Validated::default();
        let mut taken = |metric| (validated.take(metric, Direction::Lowest), validated.since);
        assert_eq!(taken(f64::NAN), (false, 1));
        assert_eq!(taken(2.0), (true, 0));
        assert_eq!(taken(2.0), (false, 1));
        assert_eq!(taken(f64::NAN), (false, 2));
        assert_eq!(taken(f64::NEG_INFINITY), (false, 3));
        assert_eq!(taken(1.5), (true, 0));
        assert_eq!(validated.best, Some(1.5));
        assert!(!validated.take(1.0, Direction::Highest));
        assert!(validated.take(2.0, Direction::Highest));
    }
}
