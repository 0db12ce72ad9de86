//! Conditioning of layers on scalars such as the time of day or the lead time.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::Device;
use halocline_core::OrRaise;
use halocline_ops::prelude::*;

use crate::precision::{computed, wide};

/// Configuration of [`ConditionEmbedding`], which has an example.
#[derive(Config, Debug)]
pub struct ConditionEmbeddingConfig {
    /// Scalars per sample.
    pub numbers: usize,
    /// Channels of the result.
    pub d_model: usize,
    /// Number of frequencies; each contributes a sine and a cosine per scalar.
    #[config(default = "16")]
    pub frequencies: usize,
    /// Longest period; values are distinguishable up to it.
    #[config(default = "1000.0")]
    pub max_period: f64,
}

/// Embedding of a few scalars per sample, such as the lead time in hours: their sines and cosines,
/// computed in at least f32, followed by two linear layers in the dtype of the parameters.
///
/// # Shapes
/// `[batch, numbers]` → `[batch, d_model]`.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::ConditionEmbeddingConfig;
/// use halocline_ops::Apply;
///
/// let device = Device::default();
/// let embedding = ConditionEmbeddingConfig::new(1, 8).init(&device);
/// let hours = Tensor::<2>::from_floats([[6.0], [12.0]], &device);
/// assert_eq!(hours.apply(&embedding).dims(), [2, 8]);
/// ```
#[derive(Module, Debug)]
pub struct ConditionEmbedding {
    pub(super) first: Linear,
    second: Linear,
    frequencies: usize,
    max_period: f64,
}

impl ConditionEmbeddingConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> ConditionEmbedding {
        let inputs = 2 * self.frequencies * self.numbers;
        ConditionEmbedding {
            first: LinearConfig::new(inputs, self.d_model).init(device),
            second: LinearConfig::new(self.d_model, self.d_model).init(device),
            frequencies: self.frequencies,
            max_period: self.max_period,
        }
    }
}

impl<X: Field<2>> Layer<X> for ConditionEmbedding {
    type Output = X;

    fn forward(&self, x: X) -> X {
        // In half precision, the phases of short waves would be off by whole turns.
        let x = wide(x).or_raise();
        let angle = |wave: usize| {
            let share = wave as f64 / self.frequencies as f64;
            std::f64::consts::TAU / self.max_period.powf(1.0 - share)
        };
        let waves = (0..self.frequencies).flat_map(|wave| {
            let angles = x.clone() * angle(wave);
            [angles.clone().sin(), angles.cos()]
        });
        let y = computed(X::cat(waves.collect(), 1), &self.first.weight);
        y.apply(&self.first).silu().apply(&self.second)
    }
}

/// Configuration of [`Modulation`], which has an example.
#[derive(Config, Debug)]
pub struct ModulationConfig {
    /// Channels of the condition.
    pub condition: usize,
    /// Channels of the cells.
    pub d_model: usize,
}

/// Adaptive layer norm (W. Peebles and S. Xie, "Scalable Diffusion Models with Transformers",
/// 2023): shift, scale and gate of a block are computed from the sample's condition. They start at
/// zero, so that a new block is the identity.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_models::ModulationConfig;
///
/// let device = Device::default();
/// let modulation = ModulationConfig::new(8, 4).init(&device);
/// // [batch, lat, lon, d_model], and [batch, condition]
/// let (x, condition) = (Tensor::<4>::ones([1, 3, 5, 4], &device), Tensor::<2>::ones([1, 8], &device));
/// let y = modulation.modulate(x.clone(), condition, |normal| normal * 2.0);
/// y.into_data().assert_eq(&x.into_data(), true);
/// ```
#[derive(Module, Debug)]
pub struct Modulation {
    pub(super) linear: Linear,
    d_model: usize,
}

impl ModulationConfig {
    /// Initializes the layer.
    pub fn init(&self, device: &Device) -> Modulation {
        let linear = LinearConfig::new(self.condition, 3 * self.d_model);
        Modulation {
            linear: linear.with_initializer(Initializer::Zeros).init(device),
            d_model: self.d_model,
        }
    }
}

impl Modulation {
    /// Computes `x + gate · block((1 + scale) · norm(x) + shift)`, for cells
    /// `[batch, lat, lon, d_model]` and a condition `[batch, condition]`.
    pub fn modulate<X: Field<4>>(
        &self,
        x: X,
        condition: WithDims<X, 2>,
        block: impl FnOnce(X) -> X,
    ) -> X {
        let all = condition.silu().apply(&self.linear);
        let all: X = all.unflatten::<4>(1, &[1, 1, 3 * self.d_model]);
        let part = |index: usize| all.clone().narrow(3, index * self.d_model, self.d_model);
        let normal = x.clone().layer_norm(None, None, 1e-6);
        x + block(normal * (part(0) + 1.0) + part(1)) * part(2)
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{ModuleMapper, Param};
    use burn::tensor::{FloatDType, Tensor};

    use super::*;

    struct Half;

    impl ModuleMapper for Half {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(FloatDType::BF16))
        }
    }

    #[test]
    fn half_precision_keeps_the_phases_of_short_waves() {
        let device = Device::default();
        let embedding = ConditionEmbeddingConfig::new(1, 8).init(&device);
        let hours = Tensor::<2>::from_floats([[240.0]], &device);
        let expected = hours.clone().apply(&embedding);
        let half = embedding.map(&mut Half);
        for hours in [hours.clone(), hours.cast(FloatDType::BF16)] {
            let found = hours.apply(&half).cast(FloatDType::F32);
            let off = (found - expected.clone()).abs().max();
            assert!(off.into_scalar::<f32>() < 0.02);
        }
    }
}
