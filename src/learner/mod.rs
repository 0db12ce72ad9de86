//! Training with burn's [`Learner`] on a mesh: burn's metrics, dashboard, checkpoints and early
//! stopping, with every step taken by all ranks.
//!
//! Requires the feature `learner`. A [`Trainer`](crate::Trainer) also saves in the middle of an
//! epoch, saves sharded parameters, and stops at values that are not finite.

mod batches;
mod strategy;

use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{ExecutionError, Tensor};
use burn_train::logger::InMemoryMetricLogger;
use burn_train::metric::{Adaptor, LossInput};
use burn_train::renderer::CliMetricsRenderer;
use burn_train::{
    ItemLazy, Learner, LearnerModel, LearningResult, SupervisedTraining, TrainOutput,
    TrainingStrategy,
};
use halocline_core::{Result, World};
use halocline_ops::{Field, backward};
use strategy::MeshStrategy;

use crate::check_optimizer;

pub use batches::FieldBatches;

/// Launch of burn's [`SupervisedTraining`] on all ranks.
pub trait LaunchOn<M: LearnerModel> {
    /// Trains on all ranks, like `training.launch(Learner::new(model, optimizer, schedule))` on one
    /// device. All ranks must call this together with the same settings.
    ///
    /// Every rank takes every step, with its shards of the batches. Rank 0 alone processes events:
    /// it renders, computes metrics, writes logs and checkpoints, and runs the strategies for
    /// checkpoints and early stopping. The outputs of steps, which metrics read, must therefore be
    /// whole on rank 0, as those of [`train_output`] are. Early stopping, or a stop by the
    /// [`Interrupter`](burn_train::Interrupter) of any rank, ends all ranks after the same step.
    ///
    /// Accumulated gradients are summed, as by burn on one device, while a
    /// [`Trainer`](crate::Trainer) averages them. `gradient_checkpointing` has no effect; use
    /// [`ShardTensor::recompute`](halocline_core::ShardTensor::recompute) instead.
    /// `checkpoint(epoch)` reads burn's files on every rank.
    ///
    /// # Errors
    /// Returned on all ranks: batches cannot be read, or metrics or checkpoints fail, on any rank;
    /// ranks have different numbers of batches; the model's parameters differ between ranks; burn's
    /// checkpoints are used with sharded parameters; the optimizer does not work on shards;
    /// communication fails.
    ///
    /// # Panics
    /// Panics where burn does: if a checkpoint cannot be loaded.
    ///
    /// # Example
    /// ```
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::nn::conv::{Conv2d, Conv2dConfig};
    /// use burn::optim::SgdConfig;
    /// use burn_train::metric::LossMetric;
    /// use burn_train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
    /// use halocline::core::OrRaise;
    /// use halocline::io::Batch;
    /// use halocline::learner::{FieldBatches, LaunchOn, StepLoss, train_output};
    /// use halocline::ops::{Reduction, mse_loss};
    /// use halocline::prelude::*;
    /// # use halocline::io::{DatasetConfig, FieldDataset, FieldLoader, FieldWriter, Grid, LoaderConfig, WriterConfig};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("2018.h5");
    /// # let grid = Grid::cell_centered(5, 8)?;
    /// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
    /// # for step in 0..5 {
    /// #     let field = halocline::io::ndarray::Array3::from_elem((1, 5, 8), step as f32);
    /// #     writer.append(f64::from(step) * 21600.0, field.view())?;
    /// # }
    /// # writer.finish()?;
    ///
    /// #[derive(Module, Debug)]
    /// struct Net {
    ///     conv: Conv2d,
    /// }
    ///
    /// impl Net {
    ///     fn loss(&self, batch: Batch) -> ShardTensor<1> {
    ///         let y = batch.input.apply(&self.conv);
    ///         mse_loss(y, batch.target, Reduction::Mean).or_raise()
    ///     }
    /// }
    ///
    /// impl TrainStep for Net {
    ///     type Input = Batch;
    ///     type Output = StepLoss;
    ///
    ///     fn step(&self, batch: Batch) -> TrainOutput<StepLoss> {
    ///         train_output(self, self.loss(batch))
    ///     }
    /// }
    ///
    /// impl InferenceStep for Net {
    ///     type Input = Batch;
    ///     type Output = StepLoss;
    ///
    ///     fn step(&self, batch: Batch) -> StepLoss {
    ///         StepLoss::new(self.loss(batch))
    ///     }
    /// }
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let open = || {
    ///         let open = || FieldDataset::open(&[&path], &DatasetConfig::new());
    ///         FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(2), open).map(FieldBatches::new)
    ///     };
    ///     let model = world.init(|device| Net { conv: Conv2dConfig::new([1, 1], [1, 1]).init(device) })?;
    ///     let result = SupervisedTraining::new(folder.path(), open()?, open()?)
    ///         .metrics((LossMetric::new(),))
    ///         .num_epochs(2)
    ///         .launch_on(&world, model, SgdConfig::new().init(), ModuleLrScheduler::new(1e-3))?;
    ///     assert!(result.interrupted.is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn launch_on(
        self,
        world: &World,
        model: M,
        optimizer: impl Into<ModuleOptimizer>,
        schedule: ModuleLrScheduler,
    ) -> Result<LearningResult<M>>;
}

impl<M: LearnerModel> LaunchOn<M> for SupervisedTraining<M> {
    fn launch_on(
        self,
        world: &World,
        model: M,
        optimizer: impl Into<ModuleOptimizer>,
        schedule: ModuleLrScheduler,
    ) -> Result<LearningResult<M>> {
        let optimizer = optimizer.into();
        check_optimizer(&optimizer, &model)?;
        let strategy = Arc::new(MeshStrategy::new(world)?);
        let training = self.with_training_strategy(TrainingStrategy::Custom(strategy.clone()));
        let training = if world.is_root() {
            training
        } else {
            // These ranks receive no events: no terminal, no files.
            training
                .renderer(Box::new(CliMetricsRenderer::new()))
                .with_metric_logger(InMemoryMetricLogger::new())
                .with_application_logger(None)
        };
        let result = training.launch(Learner::new(model, optimizer, schedule));
        let failure = strategy.failure().take();
        failure.map_or(Ok(result), Err)
    }
}

/// Loss of a step, whole on every rank, as a step output for burn's
/// [`LossMetric`](burn_train::metric::LossMetric). [`LaunchOn`] has an example.
///
/// For outputs with more than the loss, define a type that holds whole tensors, such as those from
/// [`full_tensor`](halocline_core::ShardTensor::full_tensor).
#[derive(Clone, Debug)]
pub struct StepLoss {
    /// Loss, `[1]`, detached from the graph.
    pub loss: Tensor<1>,
}

impl StepLoss {
    /// Takes the value of a loss of shape `[1]`. A partial loss is resolved, on all ranks together.
    pub fn new<X: Field<1>>(loss: X) -> Self {
        let loss = loss.into_shard().resolve().local().clone();
        Self {
            loss: loss.without_autodiff(),
        }
    }
}

impl Adaptor<LossInput> for StepLoss {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone())
    }
}

impl ItemLazy for StepLoss {
    fn sync(self) -> std::result::Result<Self, ExecutionError> {
        self.loss.device().flush()?;
        Ok(self)
    }
}

/// Computes the gradients of a loss of shape `[1]`, as the result of a
/// [`TrainStep`](burn_train::TrainStep) on a mesh. A partial loss is resolved. [`LaunchOn`] has an
/// example.
pub fn train_output<M: Module, X: Field<1>>(model: &M, loss: X) -> TrainOutput<StepLoss> {
    let loss = loss.into_shard().resolve();
    let item = StepLoss::new(loss.clone());
    TrainOutput::new(model, backward(loss), item)
}
