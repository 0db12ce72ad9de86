//! Loop over epochs and steps, synchronized across ranks.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::optim::GradientsAccumulator;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearnerModel, LearningCheckpointer, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingItem,
    ValidLoader,
};
use halocline_core::comm::Operation;
use halocline_core::{
    DeviceMesh, Error, LayerKeys, ParamShard, RandomKey, Result, Traffic, World, gather_ahead, ops,
    param_shards,
};

type TrainItem<M> = <M as TrainStep>::Output;
type ValidItem<M> = <M as InferenceStep>::Output;

/// Training strategy for burn's learner in which all ranks take each step, and rank 0 processes
/// events.
pub(super) struct MeshStrategy {
    world: World,
    mesh: DeviceMesh,
    failure: Mutex<Option<Error>>,
}

/// Next action proposed by a rank.
#[derive(Clone, Debug, PartialEq)]
enum Next {
    /// Take a step.
    Step,
    /// Continue after the last step.
    End,
    /// End training on all ranks: early stopping.
    Done,
    /// End training: interruption.
    Stop,
    /// End training: failure.
    Fail(String),
}

/// Next action of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Agreed {
    Step,
    End,
    Done,
    /// The rank at this position asked to stop.
    Stop(usize),
    /// The rank at this position failed.
    Fail(usize),
    /// The ranks at these two positions disagree: the first has another step, the second is at the
    /// end.
    Differ(usize, usize),
}

const STEP: f64 = 0.0;
const END: f64 = 1.0;
const DONE: f64 = 2.0;
const STOP: f64 = 3.0;
const FAIL: f64 = 4.0;

impl Next {
    fn code(&self) -> f64 {
        match self {
            Self::Step => STEP,
            Self::End => END,
            Self::Done => DONE,
            Self::Stop => STOP,
            Self::Fail(_) => FAIL,
        }
    }
}

/// Combines proposals: the largest code wins, except that ranks must take equal numbers of steps.
fn agreed(codes: &[f64]) -> Agreed {
    let first = |code: f64| codes.iter().position(|found| *found == code);
    if let Some(position) = first(FAIL) {
        Agreed::Fail(position)
    } else if let Some(position) = first(STOP) {
        Agreed::Stop(position)
    } else if first(DONE).is_some() {
        Agreed::Done
    } else {
        match (first(STEP), first(END)) {
            (Some(step), Some(end)) => Agreed::Differ(step, end),
            (Some(_), None) => Agreed::Step,
            _ => Agreed::End,
        }
    }
}

impl MeshStrategy {
    pub(super) fn new(world: &World) -> Result<Self> {
        Ok(Self {
            mesh: world.mesh([("rank", world.size())])?,
            world: world.clone(),
            failure: Mutex::default(),
        })
    }

    /// Returns the failure that ended training, the same on all ranks.
    pub(super) fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Agrees with the other ranks on the next action. A stop on one rank stops all.
    fn agree(&self, next: Next, interrupter: &Interrupter) -> Result<Agreed> {
        let next = match (next, interrupter.error()) {
            (Next::Fail(cause), _) => Next::Fail(cause),
            (_, Some(error)) => Next::Fail(error.to_string()),
            _ if interrupter.should_stop() => Next::Stop,
            (next, None) => next,
        };
        let ranks = self.mesh.shape().ranks();
        let operation = Operation::new("learner", Traffic::Control, None);
        let codes = ops::all_gather_numbers(self.mesh.comm(), ranks, &operation, &[next.code()])?;
        let codes: Vec<f64> = codes.into_iter().map(|code| code[0]).collect();
        let agreed = agreed(&codes);
        match agreed {
            Agreed::Stop(position) if next != Next::Stop => {
                interrupter.stop(Some(&format!("rank {} was stopped", ranks[position])));
            }
            Agreed::Fail(position) => {
                let rank = ranks[position];
                let sent = match next {
                    Next::Fail(cause) if rank == self.world.rank() => Some(cause.into()),
                    _ => None,
                };
                let cause = self.mesh.broadcast_bytes("learner", rank, sent)?;
                let cause = String::from_utf8_lossy(&cause).into_owned();
                return Err(Error::Rank { rank, cause });
            }
            Agreed::Differ(step, end) => {
                return Err(Error::other(format!(
                    "learner: rank {} has another batch of this epoch and rank {} has none; give all ranks equal numbers of batches",
                    ranks[step], ranks[end],
                )));
            }
            _ => {}
        }
        Ok(agreed)
    }

    /// Returns the next batch on all ranks with the progress after it, or the action to take
    /// instead.
    fn next<I>(
        &self,
        batches: &mut dyn DataLoaderIterator<I>,
        interrupter: &Interrupter,
    ) -> Result<std::result::Result<(I, Progress), Agreed>> {
        let batch = batches.next();
        let next = match &batch {
            None => Next::End,
            Some(Ok(_)) => Next::Step,
            Some(Err(error)) => Next::Fail(error.to_string()),
        };
        Ok(match (self.agree(next, interrupter)?, batch) {
            (Agreed::Step, Some(Ok(batch))) => Ok((batch, batches.progress())),
            (agreed, _) => Err(agreed),
        })
    }

    /// Trains on the batches of an epoch; returns the action that ended it.
    fn train_epoch<M: LearnerModel>(
        &self,
        learner: &mut Learner<M>,
        loader: &TrainLoader<M>,
        events: &mut Events<M>,
        (epoch, accumulation): (usize, usize),
    ) -> Result<Agreed> {
        let mut batches = loader.iter();
        let (mut sum, mut summed) = (GradientsAccumulator::new(), 0);
        let mut iteration = 0;
        loop {
            let (batch, progress) = match self.next(batches.as_mut(), &events.interrupter)? {
                Ok(next) => next,
                Err(end) => return Ok(end),
            };
            // Layers draw the same random numbers as under a `Trainer`, which counts epochs from 0.
            let key = ("layers", epoch - 1, iteration);
            LayerKeys::new(RandomKey::new(self.world.seed(), key)).install();
            iteration += 1;
            let model = learner.model();
            let ahead = gather_ahead(&model);
            let output = learner.train_step(batch);
            drop(ahead);
            sum.accumulate(&model, output.grads);
            summed += 1;
            if summed == accumulation || progress.is_completed() {
                learner.lr_step();
                learner.optimizer_step(sum.grads());
                summed = 0;
            }
            let rate = Some(learner.lr_current());
            let item = TrainingItem::new(output.item, progress, Some(iteration), rate);
            events.train(LearnerEvent::ProcessedItem(item));
        }
    }

    /// Validates on all batches; returns the action that ended it.
    fn validate<M: LearnerModel>(
        &self,
        learner: &Learner<M>,
        loader: &ValidLoader<M>,
        events: &mut Events<M>,
    ) -> Result<Agreed> {
        let model = learner.model().valid();
        let mut batches = loader.iter();
        let mut iteration = 0;
        loop {
            let (batch, progress) = match self.next(batches.as_mut(), &events.interrupter)? {
                Ok(next) => next,
                Err(end) => return Ok(end),
            };
            iteration += 1;
            let output = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(output, progress, Some(iteration), None);
            events.valid(LearnerEvent::ProcessedItem(item));
        }
    }

    fn epochs<M: LearnerModel>(
        &self,
        learner: &mut Learner<M>,
        (train, valid): (TrainLoader<M>, ValidLoader<M>),
        events: &mut Events<M>,
        mut settings: Settings<M>,
    ) -> Result<()> {
        let model = learner.model();
        let is_sharded = || param_shards(&model).values().any(ParamShard::is_divided);
        if settings.checkpointer.is_some() && is_sharded() {
            return Err(Error::other(
                "learner: burn's checkpoints hold the parameters of rank 0, and this model's are sharded; train without \
                 checkpointers, or by a Trainer, which saves shards",
            ));
        }
        self.world.check_replicas(&model)?;
        drop(model);
        for epoch in settings.epochs {
            events.train(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: train.num_items(),
            });
            let end = self.train_epoch(learner, &train, events, (epoch, settings.accumulation))?;
            events.train(LearnerEvent::EndSplit(epoch));
            if end != Agreed::End {
                break;
            }
            events.valid(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: valid.num_items(),
            });
            let end = self.validate(learner, &valid, events)?;
            events.valid(LearnerEvent::EndSplit(epoch));
            events.train(LearnerEvent::EndEpoch(epoch));
            if end != Agreed::End {
                break;
            }
            // Metrics must be complete before strategies read them.
            events.flush();
            let mut next = Next::Step;
            if self.world.is_root() {
                if let Some(checkpointer) = &mut settings.checkpointer {
                    checkpointer.checkpoint(learner, epoch, &settings.event_store);
                }
                let stopping = settings.early_stopping.as_mut();
                if stopping.is_some_and(|s| s.should_stop(epoch, &settings.event_store)) {
                    next = Next::Done;
                }
            }
            if self.agree(next, &events.interrupter)? != Agreed::Step {
                break;
            }
        }
        Ok(())
    }
}

/// Components of burn's training that the epoch loop uses.
struct Settings<M: LearnerModel> {
    epochs: RangeInclusive<usize>,
    accumulation: usize,
    checkpointer: Option<LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    event_store: Arc<EventStoreClient>,
}

/// Events, which rank 0 processes and the others drop. Errors go to the interrupter, where the next
/// agreement finds them.
struct Events<M: LearnerModel> {
    processor: SupervisedTrainingEventProcessor<M>,
    interrupter: Interrupter,
    is_root: bool,
}

impl<M: LearnerModel> Events<M> {
    fn train(&mut self, event: LearnerEvent<TrainItem<M>>) {
        if self.is_root {
            let result = self.processor.process_train(event);
            self.interrupter.fail_on_error(result);
        }
    }

    fn valid(&mut self, event: LearnerEvent<ValidItem<M>>) {
        if self.is_root {
            let result = self.processor.process_valid(event);
            self.interrupter.fail_on_error(result);
        }
    }

    /// Waits until all events are processed.
    fn flush(&mut self) {
        let result = self.processor.flush();
        self.interrupter.fail_on_error(result);
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for MeshStrategy {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        mut components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        let first = components.checkpoint.unwrap_or(0) + 1;
        let interrupter = components.interrupter.clone();
        let summary = components.summary.take();
        let start = LearnerEvent::Start {
            total_epochs: components.num_epochs,
            starting_epoch: first,
            label: components.label.clone(),
        };
        if self.world.is_root() {
            interrupter.fail_on_error(components.event_processor.process_train(start));
        }
        let (model, processor) = self.fit(components, learner, train, valid, first);
        let mut events = Events::<M> {
            processor,
            interrupter,
            is_root: self.world.is_root(),
        };
        let summary = summary.filter(|_| events.is_root);
        // Without the model's text, which only burn-train can add.
        let summary = summary.and_then(|summary| summary.init().ok());
        events.train(LearnerEvent::End(summary));
        events.flush();
        // Last errors of rank 0, from metrics and checkpoints.
        if self.failure().is_none() {
            *self.failure() = self.agree(Next::End, &events.interrupter).err();
        }
        LearningResult {
            model: model.valid(),
            interrupted: events.interrupter.interruption(),
            error: events.interrupter.error(),
            renderer: events.processor.renderer(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let settings = Settings {
            epochs: first..=components.num_epochs,
            accumulation: components.grad_accumulation.unwrap_or(1),
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            event_store: components.event_store,
        };
        let mut events = Events {
            processor: components.event_processor,
            interrupter: components.interrupter,
            is_root: self.world.is_root(),
        };
        *self.failure() = self
            .epochs(&mut learner, (train, valid), &mut events, settings)
            .err();
        (learner.model(), events.processor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_do_what_one_must() {
        assert_eq!(agreed(&[STEP, STEP]), Agreed::Step);
        assert_eq!(agreed(&[END, END]), Agreed::End);
        assert_eq!(agreed(&[DONE, STEP]), Agreed::Done);
        assert_eq!(agreed(&[STEP, STOP, DONE]), Agreed::Stop(1));
        assert_eq!(agreed(&[STOP, STEP, FAIL, FAIL]), Agreed::Fail(2));
        assert_eq!(agreed(&[END, END, STEP]), Agreed::Differ(2, 0));
    }
}
