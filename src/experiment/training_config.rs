//! Configuration of training.

use std::collections::BTreeMap;
use std::path::PathBuf;

use halocline_core::Result;
use serde::{Deserialize, Serialize};

use super::data_config::{deviation, positive};
use super::errors::refuse;
use super::precision::Precision;

/// Training: epochs, batches, loss, precision and stopping.
///
/// # Example
/// ```
/// use halocline::experiment::TrainingConfig;
///
/// // One step in the first 10 epochs, two in the next 10, then four.
/// let curriculum = vec![[11, 2], [21, 4]];
/// let training = TrainingConfig { curriculum, ..TrainingConfig::default() };
/// assert_eq!([1, 10, 11, 20, 25].map(|epoch| training.steps(epoch)), [1, 1, 2, 2, 4]);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// [Package](super::Experiment::package), or folder of another experiment, from whose weights
    /// training starts, with its statistics. Default random weights.
    pub pretrained: Option<PathBuf>,
    /// Passes over the samples.
    pub epochs: usize,
    /// Time limit of a run in minutes, including the opening of the experiment: no epoch begins
    /// that is expected to exceed it. Default no limit.
    pub minutes: Option<f64>,
    /// Samples per batch, over all ranks; at most those of the training period.
    pub batch: usize,
    /// Batches per optimizer step, at most those of an epoch.
    pub accumulation: usize,
    /// Autoregressive steps of training by epoch, as pairs `[epoch, steps]`: the number of steps
    /// from that epoch on, counted from 1, as in the log. One step before the first pair.
    pub curriculum: Vec<[usize; 2]>,
    /// Standard deviation of the noise on inputs, in standard deviations of their channels.
    pub noise: f64,
    /// Number type in which the model computes; parameters, increments and losses are in f32.
    pub precision: Precision,
    /// Training loss.
    pub loss: Loss,
    /// Error, in standard deviations of the increments of a step, at which [`Loss::Huber`] turns
    /// from a square to a line. Default 1, as in PyTorch.
    pub huber_delta: f64,
    /// Weight α of the fair estimator in [`Loss::Crps`] and [`Loss::Energy`], from 0 to 1; the rest
    /// is that of the biased one. Default 1; 0.95 is the almost fair score of Lang et al. (2024),
    /// which tells ensembles apart of which one member is off.
    pub alpha: f64,
    /// Factors of the loss by target, of one level (`z@500`) or of a variable (`z`). Default 1.
    pub weights: BTreeMap<String, f64>,
    /// Factor of the loss of each autoregressive step relative to the one before, above 0 and at
    /// most 1. The mean factor of the steps is 1. Default 1.
    pub discount: f64,
    /// Autoregressive steps through which gradients flow.
    pub gradient: RolloutGradient,
    /// Ensemble size of [`Loss::Crps`] and [`Loss::Energy`]; members differ by the noise, or by the
    /// [channels of noise](super::DataConfig::noise_channels).
    pub members: usize,
    /// Whether the backward pass recomputes each autoregressive step: less memory, more time.
    pub recompute: bool,
    /// Largest norm of the gradient of all parameters. Default no limit.
    pub clip_norm: Option<f64>,
    /// Decay, per optimizer step, of an exponential moving average of the parameters, which
    /// validations and forecasts use. Default no average.
    pub ema: Option<f64>,
    /// Number of validations without a better score after which training ends. Default no limit.
    pub patience: Option<usize>,
    /// Optimizer steps between lines of the log of steps. 0 for no such log.
    pub log_every: u64,
    /// Optimizer steps between checkpoints, in addition to one after each epoch.
    pub save_every: u64,
}

/// Training loss of area-weighted errors, in standard deviations of the increments of a step.
///
/// See [`TrainingConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Mean squared error.
    Mse,
    /// Mean absolute error.
    Mae,
    /// Half the squared error up to [`huber_delta`](TrainingConfig::huber_delta), linear in larger
    /// errors.
    Huber,
    /// Continuous ranked probability score of ensembles, by its fair estimator or, with
    /// [`alpha`](TrainingConfig::alpha), an almost fair one.
    Crps,
    /// Energy score of ensembles, by the same estimators: the continuous ranked probability score
    /// of whole fields, which also rewards the right patterns in space, between targets, and over
    /// the steps of a rollout.
    Energy,
    /// Mean squared error plus the squared error of the amplitudes of zonal waves, which penalizes
    /// blur. On grids with rows along latitudes.
    Spectral,
    /// Adjusted mean squared error (Subich et al. 2025), by which damped waves of spherical
    /// harmonics do not pay. On global grids, as `model.kind = "sfno"` takes them.
    Amse,
}

impl Loss {
    /// Whether the loss is a score of ensembles.
    pub(super) fn is_of_ensembles(self) -> bool {
        matches!(self, Self::Crps | Self::Energy)
    }
}

/// Autoregressive steps through which the gradients of a training loss flow.
///
/// See [`TrainingConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RolloutGradient {
    /// All steps.
    All,
    /// The last step, whose loss alone counts: the steps before it only make its input, as in the
    /// pushforward trick of Brandstetter et al. (2022). Memory is about that of one step.
    Last,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            pretrained: None,
            epochs: 10,
            minutes: None,
            batch: 1,
            accumulation: 1,
            curriculum: Vec::new(),
            noise: 0.0,
            precision: Precision::F32,
            loss: Loss::Mse,
            huber_delta: HUBER_DELTA,
            alpha: 1.0,
            weights: BTreeMap::new(),
            discount: 1.0,
            gradient: RolloutGradient::All,
            members: 1,
            recompute: false,
            clip_norm: None,
            ema: None,
            patience: None,
            log_every: 100,
            save_every: 100,
        }
    }
}

/// Default error at which the Huber loss becomes linear.
const HUBER_DELTA: f64 = 1.0;

impl TrainingConfig {
    /// Returns the number of autoregressive steps of an epoch, counted from 1.
    pub fn steps(&self, epoch: usize) -> usize {
        let begun = self.curriculum.iter().rfind(|[first, _]| *first <= epoch);
        begun.map_or(1, |[_, steps]| *steps)
    }

    /// Returns the largest number of autoregressive steps of the curriculum, for which the samples
    /// of all epochs have targets.
    pub(super) fn most_steps(&self) -> usize {
        let steps = self.curriculum.iter().map(|[_, steps]| *steps);
        steps.max().unwrap_or(1)
    }

    /// Returns the largest number of autoregressive steps of an epoch.
    pub(super) fn most_steps_trained(&self) -> usize {
        let reached = self.curriculum.iter();
        let reached = reached.filter(|[first, _]| *first <= self.epochs);
        reached.map(|[_, steps]| *steps).max().unwrap_or(1)
    }

    /// Returns the sum of the numbers of autoregressive steps of all epochs.
    pub(super) fn sum_of_steps(&self) -> f64 {
        let (mut sum, mut before) = (self.epochs as f64, 1.0);
        for &[first, steps] in &self.curriculum {
            let epochs = self.epochs.saturating_add(1).saturating_sub(first.max(1));
            sum += epochs as f64 * (steps as f64 - before);
            before = steps as f64;
        }
        sum
    }

    /// Returns the factor of the loss of each of the autoregressive steps, with a mean of 1.
    pub(super) fn step_weights(&self, steps: usize) -> Vec<f64> {
        let factors = (0..steps).map(|step| self.discount.powf(step as f64));
        let factors: Vec<f64> = factors.collect();
        let mean = factors.iter().sum::<f64>() / steps as f64;
        factors.into_iter().map(|factor| factor / mean).collect()
    }

    pub(super) fn check(&self) -> Result<()> {
        let mut pairs = self.curriculum.windows(2);
        let rises = pairs.all(|pair| pair[0][0] < pair[1][0]);
        refuse(&[
            (
                self.batch == 0,
                "training.batch: 0; expected at least 1 sample",
            ),
            (
                self.accumulation == 0,
                "training.accumulation: 0; expected at least 1 batch",
            ),
            (
                self.patience == Some(0),
                "training.patience: 0; expected at least 1 validation",
            ),
            (
                !self.weights.values().all(|weight| positive(*weight)),
                "training.weights: expected factors above 0",
            ),
            (
                self.minutes.is_some_and(|minutes| !positive(minutes)),
                "training.minutes: expected more than 0 minutes",
            ),
            (
                self.ema.is_some_and(|decay| !(0.0..1.0).contains(&decay)),
                "training.ema: expected a decay from 0 to less than 1, such as 0.999",
            ),
            (
                self.clip_norm.is_some_and(|norm| !positive(norm)),
                "training.clip_norm: expected a norm above 0",
            ),
            (
                !rises || self.curriculum.iter().any(|[_, steps]| *steps == 0),
                "training.curriculum: expected pairs [epoch, steps] with rising epochs and at least 1 step",
            ),
            (
                !positive(self.huber_delta),
                &format!(
                    "training.huber_delta: {}; expected an error above 0",
                    self.huber_delta
                ),
            ),
            (
                self.loss != Loss::Huber && self.huber_delta != HUBER_DELTA,
                "training.huber_delta: of another loss; expected training.loss = \"huber\"",
            ),
            (
                !(0.0..=1.0).contains(&self.alpha),
                &format!(
                    "training.alpha: {}; expected a weight from 0 to 1",
                    self.alpha
                ),
            ),
            (
                !self.loss.is_of_ensembles() && self.alpha != 1.0,
                "training.alpha: of a loss of one member; expected training.loss = \"crps\" or \"energy\"",
            ),
            (
                !(self.discount > 0.0 && self.discount <= 1.0),
                &format!(
                    "training.discount: {}; expected a factor above 0, to 1",
                    self.discount
                ),
            ),
            (
                self.gradient == RolloutGradient::Last && self.discount != 1.0,
                "training.discount: with training.gradient = \"last\", where the loss of one step counts; expected 1",
            ),
            (
                self.loss.is_of_ensembles() && self.members < 2,
                "training.loss: crps or energy of one member; expected training.members from 2 on",
            ),
            (
                !self.loss.is_of_ensembles() && self.members != 1,
                "training.members: of a loss of one member; expected 1, or training.loss = \"crps\" or \"energy\"",
            ),
            (
                !deviation(self.noise),
                "training.noise: expected a standard deviation from 0 on",
            ),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(lines: &str) -> TrainingConfig {
        toml::from_str(lines).unwrap()
    }

    #[test]
    fn steps_of_all_epochs_are_those_of_the_curriculum() {
        for (curriculum, most) in [
            ("[]", 1),
            ("[[1, 3]]", 3),
            ("[[2, 4], [4, 2]]", 4),
            ("[[3, 2], [6, 8]]", 2),
        ] {
            let training = training(&format!("epochs = 5\ncurriculum = {curriculum}"));
            let steps: Vec<usize> = (1..=5).map(|epoch| training.steps(epoch)).collect();
            let sum = steps.iter().sum::<usize>() as f64;
            assert_eq!(training.sum_of_steps(), sum, "{curriculum}");
            assert_eq!(training.most_steps_trained(), most, "{curriculum}");
        }
    }

    #[test]
    fn discounted_steps_have_a_mean_factor_of_one() {
        assert_eq!(training("").step_weights(3), [1.0; 3]);
        let weights = training("discount = 0.5").step_weights(3);
        for (weight, expected) in weights.iter().zip([12.0, 6.0, 3.0]) {
            assert!((weight - expected / 7.0).abs() < 1e-12, "{weights:?}");
        }
    }

    #[test]
    fn losses_and_discounts_out_of_range_are_refused() {
        for (lines, told) in [
            (
                "loss = \"huber\"\nhuber_delta = 0.0",
                "training.huber_delta: 0;",
            ),
            ("huber_delta = 2.0", "training.huber_delta: of another loss"),
            (
                "loss = \"crps\"\nmembers = 2\nalpha = 1.5",
                "training.alpha: 1.5;",
            ),
            ("alpha = 0.95", "training.alpha: of a loss of one member"),
            ("discount = 0.0", "training.discount: 0;"),
            ("discount = 1.5", "training.discount: 1.5;"),
            ("discount = nan", "training.discount: NaN;"),
            ("loss = \"energy\"", "training.loss: crps or energy of one"),
            (
                "discount = 0.9\ngradient = \"last\"",
                "training.discount: with training.gradient",
            ),
        ] {
            let error = training(lines).check().unwrap_err().to_string();
            assert!(error.starts_with(told), "{error}");
        }
        let error = toml::from_str::<TrainingConfig>("gradient = \"first\"").unwrap_err();
        assert!(error.to_string().contains("`last`"), "{error}");
        training("loss = \"huber\"\nhuber_delta = 2.0")
            .check()
            .unwrap();
    }
}
