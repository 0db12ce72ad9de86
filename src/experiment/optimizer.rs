//! Optimizers and learning-rate schedules.

use std::f64::consts::PI;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use halocline_core::Result;
use halocline_ops::optim::FusedAdamWConfig;
use serde::{Deserialize, Serialize};

use super::errors::refuse;

/// Optimizer, and schedule of its learning rate over all steps of training.
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
    /// Kind of the optimizer.
    pub kind: OptimizerKind,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Learning rate after the warm-up.
    pub schedule: Schedule,
    /// Learning rate at the end of [`Schedule::Cosine`], as in PyTorch. Default a hundredth of the
    /// highest.
    pub eta_min: Option<f64>,
    /// Optimizer steps over which the learning rate rises from a hundredth of its value.
    pub warmup: usize,
    /// Weight decay: for `adamw` a decay of the parameters per step, times the learning rate; for
    /// `adam` and `sgd` a term of the gradient.
    pub weight_decay: f32,
    /// Momentum of `sgd`. Default none.
    pub momentum: f64,
    /// Whether the momentum of `sgd` is that of Nesterov.
    pub nesterov: bool,
    /// Decay rates of the running means of the gradient and of its square, of `adamw` and `adam`.
    pub betas: [f32; 2],
    /// Constant that `adamw` and `adam` add to the root of the mean square. Default 1e-8, as in
    /// PyTorch; burn's own default is 1e-5.
    pub epsilon: f32,
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

/// Schedule of a learning rate after its warm-up.
///
/// See [`OptimizerConfig`] for an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Constant.
    Constant,
    /// Half a cosine wave over all steps, down to [`eta_min`](OptimizerConfig::eta_min).
    #[default]
    Cosine,
}

/// Fraction of the learning rate at the start of a warm-up and, by default, at the end of a
/// schedule.
const LOWEST: f64 = 0.01;
/// Default decay rates of the running means of Adam.
const BETAS: [f32; 2] = [0.9, 0.999];
/// Default constant in the denominator of Adam.
const EPSILON: f32 = 1e-8;

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::default(),
            learning_rate: 1e-3,
            schedule: Schedule::default(),
            eta_min: None,
            warmup: 0,
            weight_decay: 1e-5,
            momentum: 0.0,
            nesterov: false,
            betas: BETAS,
            epsilon: EPSILON,
        }
    }
}

impl OptimizerConfig {
    pub(super) fn check(&self) -> Result<()> {
        let Self {
            learning_rate,
            eta_min,
            weight_decay,
            momentum,
            betas,
            epsilon,
            ..
        } = self;
        refuse(&[
            (
                !(*learning_rate > 0.0 && *learning_rate <= 1.0),
                &format!("optimizer.learning_rate: {learning_rate}; expected above 0, to 1"),
            ),
            (
                eta_min.is_some_and(|lowest| !(0.0..=*learning_rate).contains(&lowest)),
                &format!(
                    "optimizer.eta_min: {}; expected from 0 to learning_rate, {learning_rate}",
                    eta_min.unwrap_or_default()
                ),
            ),
            (
                eta_min.is_some() && self.schedule == Schedule::Constant,
                "optimizer.eta_min: of a constant learning rate; expected optimizer.schedule = \"cosine\"",
            ),
            (
                !(0.0..1.0).contains(weight_decay) || !(0.0..1.0).contains(momentum),
                &format!(
                    "optimizer.weight_decay and momentum: {weight_decay} and {momentum}; expected from 0 to below 1"
                ),
            ),
            (
                *momentum > 0.0 && self.kind != OptimizerKind::Sgd,
                "optimizer.momentum: that of sgd; adamw and adam have optimizer.betas",
            ),
            (
                self.nesterov && *momentum == 0.0,
                "optimizer.nesterov: without optimizer.momentum; expected one above 0",
            ),
            (
                !betas.iter().all(|beta| (0.0..1.0).contains(beta)),
                &format!("optimizer.betas: {betas:?}; expected two from 0 to below 1"),
            ),
            (
                !(*epsilon > 0.0 && *epsilon <= 1.0),
                &format!("optimizer.epsilon: {epsilon:e}; expected above 0, to 1"),
            ),
            (
                self.kind == OptimizerKind::Sgd && (*betas, *epsilon) != (BETAS, EPSILON),
                "optimizer.betas and epsilon: those of adamw and adam; sgd has optimizer.momentum",
            ),
        ])
    }

    /// Initializes the optimizer.
    pub fn init(&self) -> ModuleOptimizer {
        let decay = (self.weight_decay > 0.0).then(|| WeightDecayConfig::new(self.weight_decay));
        let [beta_1, beta_2] = self.betas;
        match self.kind {
            OptimizerKind::AdamW => {
                let config = FusedAdamWConfig::new()
                    .with_beta_1(beta_1)
                    .with_beta_2(beta_2)
                    .with_epsilon(self.epsilon)
                    .with_weight_decay(self.weight_decay);
                config.init()
            }
            OptimizerKind::Adam => AdamConfig::new()
                .with_beta_1(beta_1)
                .with_beta_2(beta_2)
                .with_epsilon(self.epsilon)
                .with_weight_decay(decay)
                .init(),
            OptimizerKind::Sgd => {
                let momentum = MomentumConfig::new()
                    .with_momentum(self.momentum)
                    .with_dampening(0.0)
                    .with_nesterov(self.nesterov);
                let momentum = (self.momentum > 0.0).then_some(momentum);
                SgdConfig::new()
                    .with_weight_decay(decay)
                    .with_momentum(momentum)
                    .init()
            }
        }
    }

    /// Returns the learning-rate schedule for this number of steps.
    ///
    /// # Errors
    /// Values out of range.
    pub fn schedule(&self, steps: usize) -> Result<ModuleLrScheduler> {
        self.check()?;
        let config = self.clone();
        Ok(Rates {
            config,
            steps,
            taken: 0,
        }
        .into())
    }

    /// Returns the learning rate of a step, counted from 0, out of `steps` steps.
    pub(super) fn rate(&self, step: u64, steps: usize) -> f64 {
        let lowest = self.eta_min.unwrap_or(self.learning_rate * LOWEST);
        let after = match self.schedule {
            Schedule::Constant => self.learning_rate,
            Schedule::Cosine => {
                let part = (step as f64 / steps.max(1) as f64).min(1.0);
                lowest + 0.5 * (self.learning_rate - lowest) * (1.0 + (PI * part).cos())
            }
        };
        let warmed = (step as f64 / self.warmup.max(1) as f64).min(1.0);
        match self.warmup {
            0 => after,
            _ => after * (LOWEST + (1.0 - LOWEST) * warmed),
        }
    }
}

/// Learning-rate schedule of a configuration. Only the number of steps taken is saved, because the
/// configuration may change.
#[derive(Clone, Debug)]
struct Rates {
    config: OptimizerConfig,
    steps: usize,
    taken: u64,
}

/// Name of the number of steps taken, in a record.
const TAKEN: &str = "taken";

impl LrScheduler for Rates {
    fn step(&mut self) -> f64 {
        let rate = self.config.rate(self.taken, self.steps);
        self.taken += 1;
        rate
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar(TAKEN, self.taken)
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        self.taken = record.scalar(TAKEN).unwrap_or(self.taken);
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Initializer, LinearConfig};
    use burn::optim::GradientsParams;
    use burn::tensor::{Device, Tensor};

    use super::*;

    /// The values are those of `torch.optim` for a weight of 1 and gradients of `scale` and twice
    /// that.
    #[test]
    fn steps_are_those_of_pytorch() {
        let weight = |lines: &str, scale: f64| {
            let config: OptimizerConfig = toml::from_str(lines).unwrap();
            config.check().unwrap();
            let device = Device::flex().autodiff();
            let mut linear = LinearConfig::new(1, 1)
                .with_bias(false)
                .with_initializer(Initializer::Constant { value: 1.0 })
                .init(&device);
            let mut optimizer = config.init();
            for gradient in [scale, 2.0 * scale] {
                let x = Tensor::<2>::full([1, 1], gradient, &device);
                let gradients = linear.forward(x).sum().backward();
                let gradients = GradientsParams::from_grads(gradients, &linear);
                linear = optimizer.step(0.1, linear, gradients);
            }
            linear.weight.val().into_scalar::<f32>()
        };
        for (lines, scale, expected) in [
            ("weight_decay = 0.1", 1.0, 0.784_581_8),
            ("kind = \"adam\"\nweight_decay = 0.1", 1.0, 0.802_947_3),
            ("kind = \"sgd\"\nweight_decay = 0.1", 1.0, 0.681_1),
            ("", 1e-7, 0.818_313_2),
            ("kind = \"adam\"", 1e-7, 0.818_313_2),
            ("betas = [0.5, 0.8]\nepsilon = 1e-6", 1e-7, 0.976_582_05),
            (
                "kind = \"adam\"\nbetas = [0.5, 0.8]\nepsilon = 1e-6",
                1e-7,
                0.976_582_05,
            ),
            ("kind = \"sgd\"\nmomentum = 0.5", 1.0, 0.65),
            (
                "kind = \"sgd\"\nmomentum = 0.5\nnesterov = true",
                1.0,
                0.525,
            ),
        ] {
            let no_decay = (!lines.contains("weight_decay")).then_some("weight_decay = 0.0\n");
            let found = weight(&format!("{}{lines}", no_decay.unwrap_or_default()), scale);
            assert!(
                (found - expected).abs() < 1e-5,
                "{lines}: {found}, expected {expected}"
            );
        }
    }

    #[test]
    fn constants_out_of_range_are_refused() {
        for (lines, told) in [
            ("betas = [0.9, 1.0]", "optimizer.betas: [0.9, 1.0]"),
            ("epsilon = 0.0", "optimizer.epsilon: 0e0"),
            (
                "eta_min = 0.1",
                "optimizer.eta_min: 0.1; expected from 0 to",
            ),
            ("eta_min = nan", "optimizer.eta_min: NaN"),
            (
                "eta_min = 0.0\nschedule = \"constant\"",
                "optimizer.eta_min: of a constant",
            ),
            ("epsilon = nan", "optimizer.epsilon: NaN"),
            ("kind = \"sgd\"\nepsilon = 1e-6", "those of adamw and adam"),
            (
                "kind = \"sgd\"\nnesterov = true",
                "without optimizer.momentum",
            ),
            ("nesterov = true", "without optimizer.momentum"),
        ] {
            let config: OptimizerConfig = toml::from_str(lines).unwrap();
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(told), "{told} in\n{error}");
        }
    }

    #[test]
    fn rates_follow_the_configuration_that_is_there_now() {
        let config = |schedule, warmup| OptimizerConfig {
            learning_rate: 0.1,
            schedule,
            warmup,
            ..OptimizerConfig::default()
        };
        let mut before = config(Schedule::Constant, 500).schedule(1000).unwrap();
        for _ in 0..50 {
            let _rate = before.step();
        }
        let after = config(Schedule::Cosine, 100).schedule(200).unwrap();
        let mut after = after.load_record(before.to_record());
        let rates: Vec<f64> = (50..=250).map(|_| after.step().base()).collect();
        let near = |one: f64, other: f64| (one - other).abs() < 1e-12;
        let first = config(Schedule::Constant, 500).rate(0, 1000);
        assert!(near(first, 1e-3), "{first}");
        let cosine = |step: f64| 1e-3 + 0.0495 * (1.0 + (PI * step / 200.0).cos());
        assert!(near(rates[0], 0.505 * cosine(50.0)), "{}", rates[0]);
        assert!(near(rates[50], cosine(100.0)), "{}", rates[50]);
        assert!(near(rates[150], 1e-3) && near(rates[200], 1e-3));
        let lower = OptimizerConfig {
            eta_min: Some(2e-4),
            ..config(Schedule::Cosine, 0)
        };
        assert!(near(lower.rate(0, 200), 0.1) && near(lower.rate(200, 200), 2e-4));
    }
}
