//! Optimizers and learning rates.

use burn::lr_scheduler::composed::ComposedLrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use halocline_core::{Error, Result};
use halocline_ops::optim::FusedAdamWConfig;
use serde::{Deserialize, Serialize};

/// The optimizer and the course of its learning rate over all steps of training.
///
/// # Example
/// ```
/// use halocline::experiment::OptimizerConfig;
///
/// let config = OptimizerConfig { learning_rate: 3e-3, warmup: 100, ..OptimizerConfig::default() };
/// let mut rate = config.schedule(1000)?;
/// assert!((rate.step().base() - 3e-5).abs() < 1e-9); // a hundredth of it
/// # Ok::<(), halocline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Its kind.
    pub kind: OptimizerKind,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// The learning rate after the warm-up.
    pub schedule: Schedule,
    /// Optimizer steps over which the learning rate rises from a hundredth.
    pub warmup: usize,
    /// Decay of parameters per step, times the learning rate; of `adam` and `sgd` a part of the gradient.
    pub weight_decay: f32,
    /// The momentum of `sgd`. Default none.
    pub momentum: f64,
}

/// Kind of an optimizer.
///
/// See [`OptimizerConfig`] for an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    #[default]
    AdamW,
    /// Adam.
    Adam,
    /// Stochastic gradient descent.
    Sgd,
}

/// Course of a learning rate after its warm-up.
///
/// See [`OptimizerConfig`] for an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Constant.
    Constant,
    /// Half a wave of a cosine over all steps, down to a hundredth.
    #[default]
    Cosine,
}

/// The part of the learning rate at the beginning of a warm-up and at the end of a schedule.
const LOWEST: f64 = 0.01;

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::default(),
            learning_rate: 1e-3,
            schedule: Schedule::default(),
            warmup: 0,
            weight_decay: 1e-5,
            momentum: 0.0,
        }
    }
}

impl OptimizerConfig {
    pub(super) fn check(&self) -> Result<()> {
        let Self {
            learning_rate,
            weight_decay,
            momentum,
            ..
        } = self;
        if !(*learning_rate > 0.0 && *learning_rate <= 1.0) {
            let message =
                format!("optimizer.learning_rate: {learning_rate}; expected above 0, to 1");
            return Err(Error::other(message));
        }
        if !(0.0..1.0).contains(weight_decay) || !(0.0..1.0).contains(momentum) {
            let message = format!(
                "optimizer.weight_decay and momentum: {weight_decay} and {momentum}; expected from 0 to below 1"
            );
            return Err(Error::other(message));
        }
        if *momentum > 0.0 && self.kind != OptimizerKind::Sgd {
            let message = "optimizer.momentum: that of sgd; adamw and adam have their own";
            return Err(Error::other(message));
        }
        Ok(())
    }

    /// The optimizer.
    pub fn init(&self) -> ModuleOptimizer {
        let decay = (self.weight_decay > 0.0).then(|| WeightDecayConfig::new(self.weight_decay));
        match self.kind {
            OptimizerKind::AdamW => {
                let config = FusedAdamWConfig::new().with_weight_decay(self.weight_decay);
                config.init()
            }
            OptimizerKind::Adam => AdamConfig::new().with_weight_decay(decay).init(),
            OptimizerKind::Sgd => {
                let momentum = MomentumConfig::new()
                    .with_momentum(self.momentum)
                    .with_dampening(0.0);
                let momentum = (self.momentum > 0.0).then_some(momentum);
                SgdConfig::new()
                    .with_weight_decay(decay)
                    .with_momentum(momentum)
                    .init()
            }
        }
    }

    /// The learning rates of a number of steps.
    ///
    /// # Errors
    /// A rate that is not above 0 and at most 1.
    pub fn schedule(&self, steps: usize) -> Result<ModuleLrScheduler> {
        let mut schedule = ComposedLrSchedulerConfig::new();
        schedule = match self.schedule {
            Schedule::Constant => schedule.constant(self.learning_rate),
            Schedule::Cosine => {
                let cosine =
                    CosineAnnealingLrSchedulerConfig::new(self.learning_rate, steps.max(1));
                schedule.cosine(cosine.with_min_lr(self.learning_rate * LOWEST))
            }
        };
        if self.warmup > 0 {
            schedule = schedule.linear(LinearLrSchedulerConfig::new(LOWEST, 1.0, self.warmup));
        }
        schedule.init().map_err(Error::other)
    }
}
