//! Mixed-precision training: half-precision computation, with parameters and optimizer states in
//! f32.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor};
use halocline_core::ShardTensor;
use halocline_core::paths::is_running_state;
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::clip::widened;

/// Smallest loss scale.
const LEAST: f64 = 1.0;

/// Scale for losses in f16, whose gradients would otherwise underflow. The factor is halved when a
/// gradient is not finite, and that step is skipped; it is doubled after many steps with finite
/// gradients.
///
/// # Example
/// ```
/// use burn::nn::Linear;
/// use burn::tensor::FloatDType;
/// use halocline::{LossScale, Trainer};
///
/// fn half(trainer: Trainer<Linear>) -> Trainer<Linear> {
///     let scale = LossScale::new(1024.0, 500);
///     trainer.with_precision(FloatDType::F16).with_loss_scale(scale)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// Factor that multiplies the loss.
    pub factor: f64,
    /// Number of steps with finite gradients after which the factor is doubled.
    pub growth_interval: u64,
    /// Steps with finite gradients since the last change of the factor.
    steps: u64,
}

impl LossScale {
    /// Makes a scale with an initial factor, and the number of steps after which it is doubled.
    pub fn new(factor: f64, growth_interval: u64) -> Self {
        Self {
            factor,
            growth_interval,
            steps: 0,
        }
    }

    fn succeeded(&mut self) {
        self.steps += 1;
        if self.steps == self.growth_interval {
            *self = Self::new(self.factor * 2.0, self.growth_interval);
        }
    }

    /// Halves the factor, unless it is the smallest.
    fn failed(&mut self) -> bool {
        let smaller = self.factor / 2.0;
        if smaller < LEAST {
            return false;
        }
        *self = Self::new(smaller, self.growth_interval);
        true
    }
}

/// Same as PyTorch's defaults.
impl Default for LossScale {
    fn default() -> Self {
        Self::new(65536.0, 2000)
    }
}

/// Dtype in which losses are computed.
#[derive(Debug)]
pub(super) struct Precision<M> {
    dtype: Option<FloatDType>,
    /// Model in that dtype, until the next step.
    model: Option<M>,
}

impl<M> Default for Precision<M> {
    fn default() -> Self {
        Self {
            dtype: None,
            model: None,
        }
    }
}

impl<M: Module> Trainer<M> {
    /// Computes losses and their gradients with parameters rounded to another dtype, `BF16` or
    /// `F16`. The parameters of the [model](Self::model), the sums of gradients over batches and
    /// the optimizer's states keep their dtype. The loss function receives the rounded model, and
    /// casts its input; losses are best computed in f32. With `F16`, losses are
    /// [scaled](LossScale).
    ///
    /// # Example
    /// ```
    /// use burn::tensor::FloatDType;
    /// use halocline::prelude::*;
    /// use halocline::Trainer;
    /// use burn::nn::conv::Conv2d;
    ///
    /// # fn train(trainer: Trainer<Conv2d>, fields: &[ShardTensor<4>]) -> Result<()> {
    /// let mut trainer = trainer.with_precision(FloatDType::BF16);
    /// let _ended = trainer.train_epoch(|_, first| fields[first..].to_vec(), |model, x| {
    ///     let y = x.cast(FloatDType::BF16).apply(model);
    ///     Ok(y.cast(FloatDType::F32).square().mean())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// Panics after [`resume_or_start`](Self::resume_or_start), which loads the loss scale.
    #[must_use]
    pub fn with_precision(mut self, dtype: FloatDType) -> Self {
        self.require_no_folder("with_precision");
        self.precision.dtype = Some(dtype);
        self.progress.scale = (dtype == FloatDType::F16).then(LossScale::default);
        self
    }

    /// Sets the loss scale. Call it after [`with_precision`](Self::with_precision), which resets
    /// it.
    ///
    /// # Panics
    /// Panics after [`resume_or_start`](Self::resume_or_start), which loads the loss scale.
    #[must_use]
    pub fn with_loss_scale(mut self, scale: LossScale) -> Self {
        self.require_no_folder("with_loss_scale");
        self.progress.scale = Some(scale);
        self
    }

    /// Returns the current loss scale.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.progress.scale
    }

    /// Rounds the model, if losses are computed with a rounded model that does not exist yet.
    pub(super) fn round(&mut self) {
        if let (Some(dtype), None) = (self.precision.dtype, &self.precision.model) {
            self.precision.model = Some(rounded(self.model().clone(), dtype));
        }
    }

    /// Returns the model that computes losses, after [`round`](Self::round).
    pub(super) fn computing(&self) -> &M {
        match self.precision.dtype {
            None => self.model(),
            Some(_) => self.precision.model.as_ref().expect("it is rounded"),
        }
    }

    /// Drops the rounded model, as the parameters are about to change.
    pub(super) fn forget_rounded(&mut self) {
        self.precision.model = None;
    }

    /// Scales a loss before its backward pass.
    pub(super) fn scaled(&self, loss: ShardTensor<1>) -> ShardTensor<1> {
        match self.progress.scale {
            None => loss,
            Some(scale) => loss.cast(FloatDType::F32) * scale.factor,
        }
    }

    /// Converts gradients of the rounded parameters to gradients of the model's.
    pub(super) fn unscaled(&self, gradients: GradientsParams) -> GradientsParams {
        if self.precision.dtype.is_none() && self.progress.scale.is_none() {
            return gradients;
        }
        let scale = self.progress.scale;
        let factor = scale.map_or(1.0, |scale| 1.0 / scale.factor);
        widened(self.model(), gradients, factor)
    }

    /// Whether a step with gradients that are not finite is skipped, with a smaller loss scale from
    /// then on.
    pub(super) fn scales_down(&mut self) -> bool {
        let scale = self.progress.scale.as_mut();
        scale.is_some_and(LossScale::failed)
    }

    /// Counts a step with finite gradients.
    pub(super) fn scales_up(&mut self) {
        if let Some(scale) = &mut self.progress.scale {
            scale.succeeded();
        }
    }
}

/// Casts the float parameters of a module to another dtype, as new leaves. Running statistics,
/// which both modules share, keep theirs.
pub(crate) fn rounded<M: Module>(module: M, dtype: FloatDType) -> M {
    struct Round {
        dtype: FloatDType,
        /// Whether the last entered field is a running statistic.
        running: bool,
    }

    impl ModuleMapper for Round {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.running = is_running_state(name, container);
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if self.running {
                return param;
            }
            let (id, tensor, mapper) = param.consume();
            let tracked = tensor.is_require_grad();
            let tensor = tensor.detach().cast(self.dtype).detach();
            Param::from_mapped_value(id, tensor.set_require_grad(tracked), mapper)
        }
    }

    module.map(&mut Round {
        dtype,
        running: false,
    })
}
