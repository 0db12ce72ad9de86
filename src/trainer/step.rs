//! Optimizer steps, which are skipped or fail when a value is not finite.

use std::fmt;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use halocline_core::{Error, Result};

use super::running::RunningStatistics;
use super::{Optimizer, Progress, Trainer, gradients};

/// Reaction of a [`Trainer`] to a loss or a gradient that is NaN or infinite.
///
/// Losses, and gradients of whole parameters, are the same on all ranks. If ranks hold shards of
/// parameters, they exchange in every step whether they found such a value, and react alike.
///
/// # Example
/// ```
/// use burn::nn::Linear;
/// use halocline::{NonFinite, Trainer};
///
/// fn lenient(trainer: Trainer<Linear>) -> Trainer<Linear> {
///     trainer.with_non_finite(NonFinite::Skip)
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// Ends the run with an error that names the step, the batch and the first parameter.
    /// Parameters are unchanged; running statistics, as of batch norms, may have changed.
    #[default]
    Stop,
    /// Skips the step: its batches change neither the model nor the optimizer and its schedule, and
    /// do not count as a step. Their losses are kept, and rank 0 writes a line to stderr.
    Skip,
    /// Takes the step. Nothing is checked, unless a [`LossScale`](crate::LossScale) has to adapt,
    /// which skips the step.
    Allow,
}

type Hook<M> = dyn FnMut(&M, GradientsParams) -> Result<GradientsParams> + Send;

/// User function of the gradients, called before the optimizer's step.
pub(super) struct GradientHook<M>(pub(super) Box<Hook<M>>);

impl<M> fmt::Debug for GradientHook<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientHook")
    }
}

impl<M: Module> Trainer<M> {
    /// Takes a step with the gradients of the batches that have these losses. `statistics` are the
    /// running statistics from before those batches.
    pub(super) fn update(
        &mut self,
        gradients: GradientsParams,
        losses: &mut Vec<Tensor<1>>,
        statistics: Option<RunningStatistics>,
    ) -> Result<()> {
        let gradients = gradients::mean(gradients, losses.len(), self.model());
        let Some(gradients) = self.acceptable(gradients, losses)? else {
            if let Some(statistics) = statistics {
                statistics.put_back(self.model());
            }
            self.progress.batch += losses.len();
            self.recent.append(losses);
            return Ok(());
        };
        let model = self.model.take().expect("a step gives it back");
        let Optimizer {
            optimizer,
            schedule,
        } = &mut self.optimizer;
        self.model = Some(optimizer.step(schedule.step(), model, gradients));
        self.forget_rounded();
        self.update_ema();
        self.progress.step += 1;
        self.progress.batch += losses.len();
        self.recent.append(losses);
        if self.save_every > 0 && self.progress.step.is_multiple_of(self.save_every) {
            self.save(None)?;
        }
        Ok(())
    }

    /// Returns the running statistics, if the next step may be skipped.
    pub(super) fn running_statistics(&self) -> Option<RunningStatistics> {
        let may_be = self.non_finite == NonFinite::Skip || self.progress.scale.is_some();
        may_be.then(|| RunningStatistics::of(self.model()))
    }

    /// Returns the gradients for the optimizer, or `None` if the step is skipped.
    fn acceptable(
        &mut self,
        mut gradients: GradientsParams,
        losses: &[Tensor<1>],
    ) -> Result<Option<GradientsParams>> {
        let mut found = self.non_finite(&gradients, losses)?;
        if found.is_none()
            && let Some(mut hook) = self.hook.take()
        {
            let hooked = hook.0(self.model(), gradients);
            self.hook = Some(hook);
            gradients = hooked?;
            found = self
                .non_finite(&gradients, losses)?
                .map(|found| format!("after the gradient hook, {found}"));
        }
        let Some(found) = found else {
            self.scales_up();
            return Ok(Some(gradients));
        };
        let is_finite = |loss: &Tensor<1>| loss.clone().into_scalar::<f64>().is_finite();
        let Progress { step, epoch, .. } = self.progress;
        let text = format!("step {} (epoch {epoch}): {found}", step + 1);
        if losses.iter().all(is_finite) && self.scales_down() {
            if let (true, Some(scale)) = (self.world.is_root(), self.loss_scale()) {
                let factor = scale.factor;
                eprintln!("halocline: left out {text}; losses are scaled by {factor} from here on");
            }
            return Ok(None);
        }
        if self.non_finite == NonFinite::Allow {
            return Ok(Some(gradients));
        }
        if self.non_finite == NonFinite::Stop {
            return Err(Error::other(format!(
                "{text}; Trainer::with_non_finite(NonFinite::Skip) leaves out such steps"
            )));
        }
        if self.world.is_root() {
            eprintln!("halocline: left out {text}");
        }
        Ok(None)
    }

    fn non_finite(
        &self,
        gradients: &GradientsParams,
        losses: &[Tensor<1>],
    ) -> Result<Option<String>> {
        if self.non_finite == NonFinite::Allow && self.progress.scale.is_none() {
            return Ok(None);
        }
        let (batch, model) = (self.progress.batch, self.model());
        let found = gradients::non_finite(losses, batch, gradients, model);
        gradients::agree(found, model, &self.mesh)
    }
}
