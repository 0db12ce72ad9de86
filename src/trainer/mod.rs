//! Fault-tolerant training: steps, checkpoints, and resuming from the last checkpoint.

mod clip;
mod ema;
mod epoch;
mod gradients;
mod notes;
mod package;
pub(crate) mod precision;
mod pretrained;
mod probe;
mod running;
pub(crate) mod signals;
mod step;
mod validation;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Tensor, TensorData};
pub(crate) use ema::validated_name;
use ema::{Ema, MODEL};
use halocline_core::{DeviceMesh, Error, Result, World};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
pub(crate) use package::{CHECKPOINTS, STATISTICS, check_new, save_model};
use precision::Precision;
pub(crate) use pretrained::best_or_latest;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use step::GradientHook;
use validation::Validated;

pub use clip::clip_grad_norm;
pub use precision::LossScale;
pub use probe::check_optimizer;
pub use step::NonFinite;
pub use validation::Validation;

/// Training run: model, optimizer, progress and checkpoints. All ranks use it together.
///
/// With [`resume_or_start`](Self::resume_or_start), a program that is killed at any moment and
/// restarted produces the result of an uninterrupted one: on the same mesh bit for bit, if batches
/// and loss depend only on the seed, the [`epoch`](Self::epoch) and the [`batch`](Self::batch).
/// This includes random numbers.
///
/// # Example
/// ```
/// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
/// use burn::nn::conv::Conv2dConfig;
/// use burn::optim::AdamWConfig;
/// use halocline::prelude::*;
/// use halocline::{Ended, Trainer};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
///
/// # let run = || {
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let model = world.init(|device| Conv2dConfig::new([1, 1], [3, 3]).init(device))?;
///     let mut trainer = Trainer::new(&world, model, AdamWConfig::new().init(), ModuleLrScheduler::new(1e-3))
///         .with_save_every(2)
///         .resume_or_start(folder)?;
///     while trainer.epoch() < 3 {
///         let epoch = trainer.epoch();
///         let ended = trainer.train_epoch(|_, first| first..4, |model, batch| {
///             let normal = Distribution::Normal(0.0, 1.0);
///             let key = RandomKey::new(world.seed(), ("noise", epoch, batch));
///             let x = ShardTensor::random([1, 1, 8, 8], normal, key, &mesh, &[Shard(2)])?;
///             Ok(x.apply(model).abs().mean())
///         })?;
///         if ended == Ended::Interrupted {
///             break; // by Ctrl-C or the scheduler: everything is saved
///         }
///     }
///     trainer.finish()?;
///     assert_eq!(trainer.losses().len(), 12);
///     Ok(())
/// })
/// # };
/// # run()?;
/// # run()?; // finds the run complete
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Trainer<M: Module> {
    world: World,
    mesh: DeviceMesh,
    /// `None` while a step computes the next model.
    model: Option<M>,
    optimizer: Optimizer,
    progress: Progress,
    losses: Vec<f64>,
    /// Losses not yet read from the device.
    recent: Vec<Tensor<1>>,
    notes: BTreeMap<String, Value>,
    accumulate: usize,
    non_finite: NonFinite,
    precision: Precision<M>,
    ema: Option<Ema<M>>,
    patience: Option<usize>,
    hook: Option<GradientHook<M>>,
    /// Whether the replicas of the model have been compared in this run.
    compared: bool,
    save_every: u64,
    keep: CheckpointConfig,
    checkpoints: Option<Checkpoints>,
    /// Progress in the newest checkpoint, if unchanged since.
    saved: Option<Progress>,
    /// Last saved step, and its metric.
    metric: (u64, Option<f64>),
}

/// Optimizer and its learning-rate schedule.
#[derive(Clone)]
struct Optimizer {
    optimizer: ModuleOptimizer,
    schedule: ModuleLrScheduler,
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Optimizer")
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Progress {
    seed: u64,
    step: u64,
    epoch: usize,
    batch: usize,
    /// Loss scale.
    #[serde(default)]
    scale: Option<LossScale>,
    #[serde(default)]
    validated: Validated,
}

/// End of an epoch; [`Trainer`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "after an interruption a program should end"]
pub enum Ended {
    /// All batches of the epoch were used.
    Completed,
    /// A signal to rank 0 (SIGINT, i.e. Ctrl-C, or SIGTERM) ended the epoch after a step; the state
    /// is saved. [`Experiment::train`](crate::experiment::Experiment::train) returns it at its time
    /// limit, too.
    Interrupted,
}

impl<M: Module> Trainer<M> {
    /// Creates a run at its start. For a constant learning rate, use
    /// `ModuleLrScheduler::new(1e-3)`.
    pub fn new(
        world: &World,
        model: M,
        optimizer: impl Into<ModuleOptimizer>,
        schedule: ModuleLrScheduler,
    ) -> Self {
        let mesh = world.mesh([("rank", world.size())]);
        Self {
            mesh: mesh.expect("a world has a rank"),
            model: Some(model),
            optimizer: Optimizer {
                optimizer: optimizer.into(),
                schedule,
            },
            progress: Progress {
                seed: world.seed(),
                step: 0,
                epoch: 0,
                batch: 0,
                scale: None,
                validated: Validated::default(),
            },
            losses: Vec::new(),
            recent: Vec::new(),
            notes: BTreeMap::new(),
            accumulate: 1,
            non_finite: NonFinite::default(),
            precision: Precision::default(),
            ema: None,
            patience: None,
            hook: None,
            compared: false,
            save_every: 0,
            keep: CheckpointConfig::new().with_keep_best(1),
            checkpoints: None,
            saved: None,
            metric: (0, None),
            world: world.clone(),
        }
    }

    /// Sets the number of steps between saves. Default 0: only at [`save`](Self::save),
    /// [`validate`](Self::validate) and [`finish`](Self::finish).
    #[must_use]
    pub fn with_save_every(mut self, steps: u64) -> Self {
        self.save_every = steps;
        self
    }

    /// Sets which checkpoints to keep, by default the last three, and the direction in which the
    /// metric improves. The best by metric is always kept.
    ///
    /// # Panics
    /// Panics after [`resume_or_start`](Self::resume_or_start), which opens the folder.
    #[must_use]
    pub fn with_checkpoints(mut self, keep: CheckpointConfig) -> Self {
        self.require_no_folder("with_checkpoints");
        let keep_best = keep.keep_best.max(1);
        self.keep = keep.with_keep_best(keep_best);
        self
    }

    /// Sets the number of batches per step, which uses the mean of their gradients; remaining
    /// batches of an epoch form a step of their own. Default 1.
    ///
    /// # Panics
    /// Panics if `batches` is 0.
    #[must_use]
    pub fn with_accumulation(mut self, batches: usize) -> Self {
        assert!(
            batches > 0,
            "with_accumulation(0): expected at least 1 batch"
        );
        self.accumulate = batches;
        self
    }

    /// Sets the reaction to a loss or a gradient that is not finite. Default [`NonFinite::Stop`].
    ///
    /// Except with [`NonFinite::Allow`] and no [`LossScale`], every step reads one number per loss
    /// and gradient from the device before the optimizer's step.
    #[must_use]
    pub fn with_non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// Sets a function of the model and the gradients of every step (the mean over its batches,
    /// complete on every rank) that returns the gradients for the optimizer. The result must be the
    /// same on all ranks, or shards of the same for sharded parameters.
    ///
    /// Gradients are [checked](NonFinite) before and after the call.
    ///
    /// # Example
    /// Clips by the norm of the whole model's gradient; burn's `GradientClipping::Norm` uses the
    /// norm of each tensor.
    /// ```
    /// use halocline::prelude::*;
    /// use halocline::{Trainer, clip_grad_norm};
    ///
    /// # fn with<M: Module>(trainer: Trainer<M>) -> Trainer<M> {
    /// trainer.with_gradient_hook(|model, gradients| Ok(clip_grad_norm(model, gradients, 1.0)?.0))
    /// # }
    /// ```
    #[must_use]
    pub fn with_gradient_hook(
        mut self,
        hook: impl FnMut(&M, GradientsParams) -> Result<GradientsParams> + Send + 'static,
    ) -> Self {
        self.hook = Some(GradientHook(Box::new(hook)));
        self
    }

    /// Resumes from the newest loadable checkpoint in a folder, or starts from scratch if the
    /// folder has none. Later checkpoints are saved there.
    ///
    /// From now on, a first SIGINT (Ctrl-C) or SIGTERM [ends an epoch](Ended::Interrupted) after
    /// the step in progress; another one, more than a second later, ends the process at once.
    ///
    /// # Errors
    /// Returned on all ranks: the folder cannot be created or read; none of its checkpoints can be
    /// loaded, because they are damaged, or of another model, optimizer, schedule or seed;
    /// communication fails.
    pub fn resume_or_start(mut self, folder: impl AsRef<Path>) -> Result<Self> {
        signals::watch();
        let mut checkpoints = Checkpoints::open(&self.world, folder, &self.keep)?;
        checkpoints.resume(|checkpoint| self.restore(checkpoint))?;
        self.checkpoints = Some(checkpoints);
        Ok(self)
    }

    /// Replaces the schedule by one of the same kind, at the step reached so far.
    pub(crate) fn reschedule(&mut self, schedule: ModuleLrScheduler) {
        let reached = self.optimizer.schedule.to_record();
        self.optimizer.schedule = schedule.load_record(reached);
    }

    /// Panics if the folder has been opened, as the run is loaded from it.
    fn require_no_folder(&self, method: &str) {
        assert!(
            self.checkpoints.is_none(),
            "{method} after resume_or_start: expected before it"
        );
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let mut progress: Progress = checkpoint.value("progress")?;
        let (got, expected) = (self.world.seed(), progress.seed);
        if got != expected {
            // The checkpoint is not damaged, and earlier ones have the same seed.
            return Err(Error::from(halocline_io::Error::Argument {
                argument: "seed",
                got: got.to_string(),
                expected: format!(
                    "{expected}, the Launcher::seed of the steps before; choose another folder for another seed"
                ),
            }));
        }
        let model = checkpoint.module(&self.world, MODEL, self.model().clone())?;
        let optimizer = self.optimizer.optimizer.clone();
        let optimizer = checkpoint.optimizer(&self.world, "optimizer", optimizer, &model)?;
        let schedule = self.optimizer.schedule.clone();
        let schedule = checkpoint.schedule(&self.world, "schedule", schedule)?;
        self.restore_ema(checkpoint, &model)?;
        let losses = checkpoint.tensor_data(&self.world, "losses")?;
        self.notes = checkpoint.value("notes")?;
        self.losses = losses
            .try_to_vec()
            .map_err(|e| Error::other(format!("losses: {e:?}")))?;
        self.recent.clear();
        self.model = Some(model);
        self.forget_rounded();
        self.optimizer = Optimizer {
            optimizer,
            schedule,
        };
        self.metric = (progress.step, checkpoint.metric());
        let scale = self.progress.scale;
        progress.scale = scale.map(|scale| progress.scale.unwrap_or(scale));
        self.progress = progress;
        self.saved = Some(progress);
        Ok(())
    }

    /// Returns the model.
    pub fn model(&self) -> &M {
        self.model
            .as_ref()
            .expect("a step gives it back, or the program ends")
    }

    /// Returns the current epoch, from 0.
    pub fn epoch(&self) -> usize {
        self.progress.epoch
    }

    /// Returns the number of batches used in this epoch.
    pub fn batch(&self) -> usize {
        self.progress.batch
    }

    /// Returns the number of steps taken, over all epochs.
    pub fn step(&self) -> u64 {
        self.progress.step
    }

    /// Returns the losses of all batches so far, including those before a resume.
    pub fn losses(&mut self) -> &[f64] {
        for loss in self.recent.drain(..) {
            self.losses.push(loss.into_scalar());
        }
        &self.losses
    }

    /// Returns the newest step whose checkpoint is on disk; known on rank 0 only.
    pub fn last_committed_step(&self) -> Option<u64> {
        self.checkpoints.as_ref()?.committed()
    }

    /// Saves the run in the background, with a metric as of [`validate`](Self::validate), if any.
    ///
    /// # Errors
    /// Returned on all ranks: the run has no folder; the model's parameters differ between ranks;
    /// the previous save, or communication, fails.
    pub fn save(&mut self, metric: Option<f64>) -> Result<()> {
        self.world.check_replicas(self.model())?;
        self.losses();
        let mut snapshot = Snapshot::new(&self.world);
        snapshot.value("progress", &self.progress)?;
        snapshot.value("notes", &self.notes)?;
        snapshot.module(MODEL, self.model())?;
        snapshot.optimizer("optimizer", &self.optimizer.optimizer, self.model())?;
        snapshot.schedule("schedule", &self.optimizer.schedule)?;
        self.save_ema(&mut snapshot)?;
        let losses = TensorData::new(self.losses.clone(), [self.losses.len()]);
        snapshot.data("losses", &losses)?;
        let Some(checkpoints) = &mut self.checkpoints else {
            return Err(Error::other(
                "Trainer::save: no folder; call resume_or_start first",
            ));
        };
        self.saved = None;
        self.metric = (self.progress.step, metric);
        checkpoints.save(self.progress.step, snapshot, metric)?;
        self.saved = Some(self.progress);
        Ok(())
    }

    /// Saves the run if it changed since the last save, and waits until it is on disk.
    ///
    /// # Errors
    /// Returned on all ranks: saving or communication fails.
    pub fn finish(&mut self) -> Result<()> {
        if self.checkpoints.is_some() && self.saved != Some(self.progress) {
            let (step, metric) = self.metric;
            self.save(metric.filter(|_| step == self.progress.step))?;
        }
        let saved = self.saved.take();
        self.checkpoints
            .as_mut()
            .map_or(Ok(()), Checkpoints::wait)?;
        self.saved = saved;
        Ok(())
    }
}
