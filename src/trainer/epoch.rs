//! Steps of an epoch.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use halocline_core::{LayerKeys, RandomKey, Result, gather_ahead};
use halocline_ops::{Field, backward};

use super::signals::is_interrupted;
use super::{Ended, Progress, Trainer, check_optimizer};

impl<M: Module> Trainer<M> {
    /// Trains on the batches of an epoch: computes the loss and the gradients of each, and takes
    /// the optimizer's steps, then moves on to the next epoch. A partial `loss` is resolved.
    ///
    /// # Resuming
    /// `batches` receives the number of the epoch and the number of its first batch not yet trained
    /// on, which is zero except after a resume within the epoch. It returns the batches from there:
    /// `|epoch, first| loader.epoch_from(epoch, first)` with a loader, `|_, first| first..4` with
    /// numbers, and `.skip(first)` after the last filter of an iterator.
    ///
    /// # Errors
    /// `loss` fails, as for a batch that could not be read; a loss or a gradient is [not
    /// finite](super::NonFinite); the model's parameters differ between ranks (compared before the
    /// first step of a run and at every save); saving or communication fails.
    pub fn train_epoch<B, I: IntoIterator<Item = B>, X: Field<1>>(
        &mut self,
        batches: impl FnOnce(usize, usize) -> I,
        loss: impl FnMut(&M, B) -> Result<X>,
    ) -> Result<Ended> {
        self.train_epoch_with(batches, loss, |_| Ok(()))
    }

    /// Trains on the batches of an epoch, and calls `after` after each step, taken or left out.
    pub(crate) fn train_epoch_with<B, I: IntoIterator<Item = B>, X: Field<1>>(
        &mut self,
        batches: impl FnOnce(usize, usize) -> I,
        mut loss: impl FnMut(&M, B) -> Result<X>,
        mut after: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<Ended> {
        if !self.compared {
            self.world.check_replicas(self.model())?;
            check_optimizer(&self.optimizer.optimizer, self.model())?;
            self.compared = true;
        }
        let mut gradients = GradientsAccumulator::new();
        let (mut pending, mut statistics) = (Vec::new(), None);
        let Progress {
            seed, epoch, batch, ..
        } = self.progress;
        for batch in batches(epoch, batch) {
            if pending.is_empty() {
                statistics = self.running_statistics();
            }
            let number = self.progress.batch + pending.len();
            LayerKeys::new(RandomKey::new(seed, ("layers", epoch, number))).install();
            self.round();
            let ahead = gather_ahead(self.computing());
            let value = loss(self.computing(), batch)?.into_shard().resolve();
            pending.push(value.local().clone().inner());
            let found = backward(self.scaled(value));
            drop(ahead);
            let found = GradientsParams::from_grads(found, self.computing());
            gradients.accumulate(self.model(), self.unscaled(found));
            if pending.len() == self.accumulate {
                self.update(gradients.grads(), &mut pending, statistics.take())?;
                after(self)?;
                if self.is_interrupted()? {
                    self.finish()?;
                    return Ok(Ended::Interrupted);
                }
            }
        }
        if !pending.is_empty() {
            self.update(gradients.grads(), &mut pending, statistics)?;
            after(self)?;
            // Before the epoch ends, so that the program validates it, even after a restart.
            if self.is_interrupted()? {
                self.finish()?;
                return Ok(Ended::Interrupted);
            }
        }
        self.progress.epoch += 1;
        self.progress.batch = 0;
        Ok(Ended::Completed)
    }

    /// Whether a signal has asked rank 0 to stop; the same on all ranks.
    fn is_interrupted(&self) -> Result<bool> {
        Ok(self.checkpoints.is_some() && is_interrupted(&self.mesh)?)
    }
}
