//! Training, with a validation after each epoch.

use std::fmt::Display;
use std::io::Write;
use std::time::Instant;

use burn::module::Module;
use halocline_core::{Error, Result};
use halocline_io::{FieldLoader, Progress, save_json};

use super::capacity::memory;
use super::checks::{check_training, warn};
use super::errors::invalid;
use super::keys::in_keys;
use super::log::{self, Epoch};
use super::network::{FieldModel, OwnNetwork};
use super::optimizer::OptimizerKind;
use super::order::check_order;
use super::pace::Pace;
use super::record::{CHECKPOINTS, lock_for_training, save_copy};
use super::setup::{Experiment, Files, States};
use super::step_log::{GradNorm, remove_later};
use super::summary::Summary;
use crate::root::on_root;
use crate::trainer::{Ended, Trainer};

impl<N: OwnNetwork> Experiment<N> {
    /// Trains the model from the newest checkpoint on, or from the start. Rank 0 prints a line for
    /// each epoch and, unless its output is a terminal, for every
    /// [`log_every`](super::TrainingConfig::log_every) steps. Training ends after the last epoch,
    /// when validation stops improving, or [interrupted](Ended::Interrupted), with epochs left, by a
    /// signal or the time limit; its state is saved in every case. A run that has ended is left
    /// unchanged.
    ///
    /// # Errors
    /// An experiment of [other files](Self::of_files); data that cannot be read; a precision that
    /// the device lacks; more samples per batch, batches per step, or autoregressive steps than the
    /// training period has; a loss that does not fit the grid; inputs that are not targets, where
    /// training or validation takes several steps; another kind of optimizer than in earlier steps;
    /// another definition of validation than in earlier epochs; other batches than those of an
    /// interrupted epoch; another job that starts in the folder at the same time; the errors of
    /// [`Trainer`].
    pub fn train(&self) -> Result<Ended> {
        if self.files == Files::Others {
            return Err(Error::other(
                "train: an experiment of other files; expected that of Experiment::new",
            ));
        }
        let training = &self.config.training;
        training.precision.check(self.world.device())?;
        let mut data = self.batches(training.most_steps())?;
        let (channels, grid) = (&self.data.channels, &self.data.grid);
        check_training(training, channels, grid, data.samples())?;
        let root = self.world.is_root();
        if root {
            warn(&self.config, &self.data, data.samples());
        }
        let validation = self.validation_states()?;
        self.warn_of_test();
        let batches = data.batches();
        let norm = GradNorm::default();
        let mut trainer = self.resume(self.trainer(batches, &norm)?, validation.is_some())?;
        let replica = match validation {
            Some(_) => self.replica()?,
            None => None,
        };
        // Those on the whole mesh are dropped.
        let validation = match (&replica, validation) {
            (Some(replica), _) => replica.validation_states()?,
            (None, validation) => validation,
        };
        // The starts are dealt out among the replicas.
        let validation = validation.map(|states| (replica.as_ref().unwrap_or(self), states));
        let unvalidated = match &validation {
            Some(validation) if is_unvalidated(&trainer)? => Some(validation),
            _ => None,
        };
        let is_done = trainer.epoch() >= training.epochs;
        let mut stop = trainer.is_out_of_patience();
        if is_done {
            let (done, all) = (trainer.epoch(), training.epochs);
            self.say(format!("{done} of {all} epochs are done"));
        }
        // Nothing is noted or saved: with another configuration the last checkpoint could lose its
        // average.
        let is_begun = trainer.step() > 0;
        if is_begun && (is_done || stop) && unvalidated.is_none() {
            self.say_patience(stop);
            return Ok(Ended::Completed);
        }
        self.check_optimizer(&mut trainer)?;
        let order = [training.batch, data.samples()];
        check_order(&mut trainer, order, &self.config.data)?;
        self.check_validation(&mut trainer)?;
        let all_steps = self.schedule(&mut trainer, batches)?;
        on_root(&self.world, || {
            remove_later(&self.config.folder, trainer.step())?;
            save_copy(&self.config)
        })?;
        let (mut pace, mut is_first, mut has_changed) = (Pace::default(), true, !is_begun);
        let mut ended = Ended::Completed;
        if let Some(validation) = unvalidated {
            // The last epoch is complete, but its validation was interrupted.
            let Some((line, stopped)) = self.validate(&mut trainer, validation)? else {
                return self.interrupted(trainer);
            };
            stop = stopped;
            has_changed = true;
            self.say(format!("epoch {}: {line}", trainer.epoch()));
        }
        while !stop && trainer.epoch() < training.epochs {
            let steps = training.steps(trainer.epoch() + 1);
            if !self.has_time(pace.epoch(steps))? {
                self.say(
                    "the time limit leaves no time for another epoch: start again for the rest",
                );
                ended = Ended::Interrupted;
                break;
            }
            has_changed = true;
            data.set_steps(steps)?;
            let (start, count) = (Instant::now(), data.batches());
            let trained = (count - trainer.batch()).max(1) as f64;
            let Some(epoch) = self.train_epoch(&mut trainer, &data, (&norm, all_steps))? else {
                return self.interrupted(trainer);
            };
            trainer.save(None)?;
            let mut line = epoch.to_string();
            if let Some(validation) = &validation {
                let Some((validated, stopped)) = self.validate(&mut trainer, validation)? else {
                    return self.interrupted(trainer);
                };
                line = format!("{line}; {validated}");
                stop = stopped;
            }
            self.say(line);
            if root && is_first {
                let parameters = trainer.model().num_params();
                let step = 1e3 * epoch.seconds / trained;
                let memory = memory("VmHWM:").map_or(String::new(), |bytes| {
                    format!(", {} MiB at most", bytes >> 20)
                });
                self.say(format!(
                    "{parameters} parameters on a rank, {step:.0} ms per batch{memory}"
                ));
            }
            is_first = false;
            // Extrapolated to a whole epoch if only the rest of an interrupted one was trained.
            let whole = count as f64 / trained * epoch.seconds;
            pace.add(steps, whole, start.elapsed().as_secs_f64() - epoch.seconds);
        }
        self.say_patience(stop);
        if has_changed {
            trainer.finish()?;
        }
        if root && data.traffic().needed > 0 {
            self.say(format!("read by rank 0: {}", data.traffic()));
        }
        Ok(ended)
    }

    /// Opens the states of the validation period, if there is one.
    ///
    /// # Errors
    /// Those of a validation, which would otherwise surface only after hours.
    fn validation_states(&self) -> Result<Option<States>> {
        let Some(period) = &self.config.data.validation else {
            return Ok(None);
        };
        let (states, forecast) = (self.states(period)?, &self.config.forecast);
        self.data.feedback(forecast.steps)?;
        Self::starts(&states, forecast)?;
        Ok(Some(states))
    }

    /// Prints a warning on rank 0 if no forecast of the test period can be scored.
    fn warn_of_test(&self) {
        let Some(period) = &self.config.data.test else {
            return;
        };
        let states = self.states(period);
        let tested = states.and_then(|states| Self::starts(&states, &self.config.forecast));
        if let Err(error) = tested
            && self.world.is_root()
        {
            let error = in_keys(&error.to_string());
            eprintln!("train: data.test has no forecast to score: {error}");
        }
    }

    /// Resumes a run, or starts it, with the lock of the folder.
    fn resume(
        &self,
        trainer: Trainer<FieldModel<N>>,
        is_validated: bool,
    ) -> Result<Trainer<FieldModel<N>>> {
        // Held until the checkpoints are locked, so that the record stays that of this run.
        let mut locked = None;
        on_root(&self.world, || {
            locked = Some(lock_for_training(&self.config)?);
            Ok(())
        })?;
        if is_validated || self.config.data.anomalies {
            // Before signals are watched, because computing the climatology does not check for
            // them.
            self.climatology()?;
        }
        let trainer = match &self.config.training.pretrained {
            None => trainer.resume_or_start(self.checkpoints())?,
            Some(pretrained) => {
                let weights = pretrained.join(CHECKPOINTS);
                trainer.resume_or_start_from(self.checkpoints(), weights)?
            }
        };
        drop(locked);
        Ok(trainer)
    }

    /// Trains the rest of an epoch with the samples of a loader, and adds the epoch to the log. The
    /// schedule has `all_steps` steps, and the clipping of gradients stores their norm in `norm`.
    /// Returns `None` if a signal interrupted the epoch.
    fn train_epoch(
        &self,
        trainer: &mut Trainer<FieldModel<N>>,
        data: &FieldLoader,
        (norm, all_steps): (&GradNorm, usize),
    ) -> Result<Option<Epoch>> {
        let start = Instant::now();
        let (training, optimizer) = (&self.config.training, &self.config.optimizer);
        let (epoch, first, before) = (trainer.epoch(), trainer.batch(), trainer.step());
        let (steps, count) = (training.steps(epoch + 1), data.batches());
        let title = format!("epoch {}", epoch + 1);
        let progress = Progress::new(self.world.rank(), title, count - first);
        let batches = |epoch, first| data.epoch_from(epoch, first);
        let mut newest = (before, start);
        let ended = trainer.train_epoch_with(
            batches,
            |model, batch| {
                let loss = self.loss(model, batch?, steps, epoch)?;
                progress.advance();
                Ok(loss)
            },
            |trainer| self.log_step(trainer, &mut newest, (norm, all_steps)),
        )?;
        progress.finish();
        if ended == Ended::Interrupted {
            return Ok(None);
        }
        let losses = trainer.losses();
        let loss = losses[losses.len() - count..].iter().sum::<f64>() / count as f64;
        let (last, seconds) = (trainer.step(), start.elapsed().as_secs_f64());
        let logged = Epoch {
            epoch: epoch + 1,
            step: last,
            rollout: steps,
            learning_rate: optimizer.rate(last.saturating_sub(1), all_steps),
            loss,
            skipped: (count - first).div_ceil(training.accumulation) - (last - before) as usize,
            seconds,
            samples_per_second: (training.batch * (count - first)) as f64 / seconds,
        };
        // Before the epoch is saved: one that is lost is repeated, with its line.
        on_root(&self.world, || log::add_epoch(&self.config.folder, &logged))?;
        Ok(Some(logged))
    }

    /// Returns whether the time limit leaves time for an epoch of this many seconds, as rank 0 sees
    /// it.
    fn has_time(&self, seconds: f64) -> Result<bool> {
        let limit = self.config.training.minutes.unwrap_or(f64::INFINITY);
        let end = self.begin.elapsed().as_secs_f64() + seconds;
        on_root(&self.world, || Ok(end <= 60.0 * limit))
    }

    /// Prints a line on rank 0. A closed pipe, as after `head`, does not end training.
    pub(super) fn say(&self, line: impl Display) {
        if self.world.is_root() {
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }

    /// Prints that validation stopped improving, if that ended training.
    fn say_patience(&self, stop: bool) {
        if stop {
            let patience = self.config.training.patience.unwrap_or(0);
            self.say(format!("{patience} validations without a better one"));
        }
    }

    /// Creates a trainer at the start of a run, for epochs of this number of batches.
    fn trainer(&self, batches: usize, norm: &GradNorm) -> Result<Trainer<FieldModel<N>>> {
        let (training, optimizer) = (&self.config.training, &self.config.optimizer);
        let steps = training.epochs * batches.div_ceil(training.accumulation);
        let schedule = optimizer.schedule(steps)?;
        let mut trainer = Trainer::new(&self.world, self.model()?, optimizer.init(), schedule)
            .with_accumulation(training.accumulation)
            .with_save_every(training.save_every);
        if let Some(most) = training.clip_norm {
            let norm = norm.clone();
            trainer = trainer
                .with_gradient_hook(move |model, gradients| norm.clip(model, gradients, most));
        }
        if let Some(dtype) = training.precision.half() {
            trainer = trainer.with_precision(dtype);
        }
        if let Some(decay) = training.ema {
            trainer = trainer.with_ema(decay);
        }
        if let Some(patience) = training.patience {
            trainer = trainer.with_patience(patience);
        }
        Ok(trainer)
    }

    /// Adjusts the learning-rate schedule to epochs of this number of batches, if earlier ones had
    /// another number of steps. Returns the number of its steps.
    fn schedule(&self, trainer: &mut Trainer<FieldModel<N>>, batches: usize) -> Result<usize> {
        let (training, optimizer) = (&self.config.training, &self.config.optimizer);
        // Epochs with another batch size or accumulation count with the steps that they took.
        const NOTE: &str = "schedule.steps";
        let now = batches.div_ceil(training.accumulation) as i64;
        let noted: Option<[i64; 2]> = trainer.noted(NOTE)?;
        let offset = match noted {
            Some([before, offset]) if before == now => offset,
            Some(_) => {
                let begun = trainer.batch().div_ceil(training.accumulation);
                trainer.step() as i64 - trainer.epoch() as i64 * now - begun as i64
            }
            None => 0,
        };
        if noted != Some([now, offset]) {
            trainer.note(NOTE, &[now, offset])?;
        }
        let steps = (training.epochs as i64 * now + offset).max(1) as usize;
        if offset != 0 {
            trainer.reschedule(optimizer.schedule(steps)?);
        }
        Ok(steps)
    }

    /// Notes the kind of the optimizer and whether it has a momentum, on which its saved states
    /// depend.
    ///
    /// # Errors
    /// Another kind than in earlier steps.
    fn check_optimizer(&self, trainer: &mut Trainer<FieldModel<N>>) -> Result<()> {
        const NOTE: &str = "optimizer.kind";
        let optimizer = &self.config.optimizer;
        let kind = (optimizer.kind, optimizer.momentum > 0.0);
        let told = |(kind, has_momentum): (OptimizerKind, bool)| {
            let name = format!("{kind:?}").to_lowercase();
            let momentum = if has_momentum { " with momentum" } else { "" };
            format!("{name}{momentum}")
        };
        match trainer.noted::<(OptimizerKind, bool)>(NOTE)? {
            Some(before) if before == kind => Ok(()),
            Some(before) if trainer.step() > 0 => Err(invalid(
                NOTE,
                told(kind),
                format!(
                    "{}, as in the steps before; choose another folder for another optimizer",
                    told(before)
                ),
            )),
            _ => trainer.note(NOTE, &kind),
        }
    }

    /// Notes the definition of validation and its files, so that the best score and patience
    /// compare scores of one kind.
    ///
    /// # Errors
    /// Another definition, or other files, than in earlier epochs.
    fn check_validation(&self, trainer: &mut Trainer<FieldModel<N>>) -> Result<()> {
        const NOTE: &str = "validation.of";
        const FILES: &str = "validation.files";
        let forecast = self.config.forecast.of_validation();
        let definition = (&self.config.data.validation, &forecast);
        let definition = serde_json::to_string(&definition).map_err(Error::other)?;
        let is_validated = !trainer.validations()?.is_empty();
        match trainer.noted::<String>(NOTE)? {
            Some(before) if before == definition => Ok(()),
            Some(before) if is_validated => Err(invalid(
                "data.validation and forecast",
                definition,
                format!(
                    "{before}, by which the epochs before were validated; `halocline score` takes other steps and members"
                ),
            )),
            _ => trainer.note(NOTE, &definition),
        }?;
        let Some(period) = &self.config.data.validation else {
            return Ok(());
        };
        let files = on_root(&self.world, || Summary::of_period(&self.data, period))?;
        match trainer.noted::<Vec<Summary>>(FILES)? {
            Some(before) if before == files => Ok(()),
            Some(_) if is_validated => Err(invalid(
                "data.validation",
                "a period of which the files have changed, or others have times",
                "the files by which the epochs before were validated",
            )),
            _ => trainer.note(FILES, &files),
        }
    }

    /// Scores forecasts from the states of the validation period, on the ranks of a replica, and
    /// saves the run with the error in standard deviations, averaged over targets and leads.
    /// Returns the text to print and whether training ends; `None` if a signal interrupted the
    /// validation.
    fn validate(
        &self,
        trainer: &mut Trainer<FieldModel<N>>,
        (replica, states): &(&Self, States),
    ) -> Result<Option<(String, bool)>> {
        let (mut report, mut interrupted) = (None, false);
        let (epoch, targets) = (trainer.epoch(), self.data.channels.targets.len());
        let validated = trainer.validate(|model| {
            let scored = replica.score_states(model, states, &self.config.forecast, None)?;
            interrupted = scored.is_none();
            let scored = scored.ok_or_else(|| Error::other("validation: interrupted"))?;
            let report = report.insert(scored);
            let score = report.mean_error(&self.scales[1]);
            on_root(&self.world, || {
                // At the first lead.
                let rows = report.first_region().take(targets);
                let errors = rows.map(|row| (&row.score.channel[..], row.score.metrics.rmse));
                log::add_validation(&self.config.folder, epoch, score, errors)
            })?;
            Ok(score)
        });
        if interrupted {
            return Ok(None);
        }
        let validated = validated?;
        let report = report.ok_or_else(|| Error::other("no validation"))?;
        save_json(
            &self.world,
            self.config.folder.join("validation.json"),
            &report.rows,
        )?;
        let best = if validated.is_best { " (the best)" } else { "" };
        let (metric, scores) = (validated.metric, report.line(&self.data.described));
        let line = format!("validation {metric:.4}{best}: {scores}");
        Ok(Some((line, validated.stop)))
    }

    /// Saves a run that was ended by a signal.
    fn interrupted(&self, mut trainer: Trainer<FieldModel<N>>) -> Result<Ended> {
        trainer.finish()?;
        self.say("interrupted, and saved: training goes on from there when it is started again");
        Ok(Ended::Interrupted)
    }
}

/// Returns whether the last epoch is complete but was not validated.
fn is_unvalidated<N: OwnNetwork>(trainer: &Trainer<FieldModel<N>>) -> Result<bool> {
    let validations = trainer.validations()?;
    let last = validations.last().map(|(step, _)| *step);
    Ok(trainer.epoch() > 0 && trainer.batch() == 0 && last != Some(trainer.step()))
}
