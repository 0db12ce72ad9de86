//! Optimizers whose steps read and write every element once.
//!
//! burn's optimizers consist of tensor operators, each of which passes through memory: about
//! fifteen in a step of AdamW. On the CPU, [`FusedAdamW`] computes the same step in one pass, bit
//! for bit.

mod kernel;

use std::fmt;

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{
    AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer,
};
use burn::tensor::{DType, Device, Tensor};

use crate::kernel::flex;
use kernel::Step;

/// Configuration of [`FusedAdamW`]: burn's [`AdamWConfig`] without the options that change the
/// update rule.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use halocline_ops::optim::FusedAdamWConfig;
///
/// let device = Device::flex().autodiff();
/// let mut optimizer = FusedAdamWConfig::new().with_weight_decay(0.01).init();
/// let model = LinearConfig::new(3, 2).init(&device);
/// let loss = model.forward(Tensor::<2>::ones([4, 3], &device)).sum();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let stepped = optimizer.step(1e-3, model.clone(), gradients);
/// let moved = (stepped.weight.val() - model.weight.val()).abs().max();
/// assert!((moved.into_scalar::<f32>() - 1e-3).abs() < 2e-5);
/// ```
#[derive(Config, Debug)]
pub struct FusedAdamWConfig {
    /// Decay rate of the running mean of gradients.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// Decay rate of the running mean of squared gradients.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Constant added to the denominator, the root of the mean square.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// Fraction by which a step with learning rate one decays a weight.
    #[config(default = 1e-4)]
    pub weight_decay: f32,
    /// Clipping of the gradient of each parameter.
    pub grad_clipping: Option<GradientClippingConfig>,
}

impl FusedAdamWConfig {
    /// Creates the optimizer of a module.
    pub fn init(&self) -> ModuleOptimizer {
        let composed = AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
            .build();
        let config = self.clone();
        let optimizer = ModuleOptimizer::from(FusedAdamW { config, composed });
        match &self.grad_clipping {
            Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
            None => optimizer,
        }
    }
}

/// burn's [`AdamW`] in one pass over each parameter (Loshchilov and Hutter 2019), with the same
/// state, records and bits. Parameters that are not `f32` on the CPU fall back to burn's step.
#[derive(Clone)]
pub struct FusedAdamW {
    config: FusedAdamWConfig,
    composed: AdamW,
}

impl fmt::Debug for FusedAdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FusedAdamW").field(&self.config).finish()
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        let fits =
            |tensor: &Tensor<D>| tensor.dtype() == DType::F32 && flex::runs_on(&tensor.device());
        let moments = state.as_ref().map(|state| &state.momentum);
        let moments_fit = moments.is_none_or(|moments| {
            fits(&moments.moment_1) && fits(&moments.moment_2) && moments.max_moment_2.is_none()
        });
        if !fits(&tensor) || !fits(&grad) || !moments_fit {
            return self.composed.step(lr, tensor, grad, state);
        }
        let time = moments.map_or(0, |moments| moments.time) + 1;
        let step = Step::new(&self.config, lr, time as i32);
        let moments = state.map(|AdamWState { momentum }| [momentum.moment_1, momentum.moment_2]);
        let [tensor, moment_1, moment_2] = kernel::run(&step, tensor, grad, moments);
        let momentum = AdaptiveMomentumState::new(time, moment_1, moment_2);
        (tensor, Some(AdamWState { momentum }))
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        AdamW::to_device(state, device)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;

    /// Steps of both optimizers, with and without state, on small and large parameters.
    #[test]
    fn steps_have_the_bits_of_burns() {
        let device = Device::flex();
        let normal = Distribution::Normal(0.0, 1.0);
        for rows in [1, 7, 3000] {
            let config = FusedAdamWConfig::new().with_weight_decay(0.1);
            let composed = AdamWConfig::new().with_weight_decay(0.1).build();
            let fused = FusedAdamW {
                config,
                composed: composed.clone(),
            };
            let first = Tensor::<2>::random([rows, 17], normal, &device);
            let (mut ours, mut burns) = ((first.clone(), None), (first, None));
            for step in 0..4 {
                let gradient = Tensor::<2>::random([17, rows], normal, &device).transpose();
                let lr = 1e-2 / f64::from(step + 1);
                ours = fused.step(lr, ours.0, gradient.clone(), ours.1);
                burns = composed.step(lr, burns.0, gradient, burns.1);
                let moments = |state: &Option<AdamWState<2>>| {
                    let momentum = state.clone().expect("a state").momentum;
                    [momentum.moment_1, momentum.moment_2]
                };
                let ours = [vec![ours.0.clone()], moments(&ours.1).to_vec()].concat();
                let burns = [vec![burns.0.clone()], moments(&burns.1).to_vec()].concat();
                for (ours, burns) in ours.into_iter().zip(burns) {
                    ours.into_data().assert_eq(&burns.into_data(), true);
                }
            }
        }
    }

    #[test]
    fn other_types_take_burns_steps() {
        let config = FusedAdamWConfig::new();
        let [decay, epsilon] = [config.weight_decay, config.epsilon].map(f64::from);
        let composed = AdamWConfig::new().with_weight_decay(config.weight_decay);
        let fused = FusedAdamW {
            config,
            composed: composed.build(),
        };
        let ones = Tensor::<1>::ones([5], (&Device::flex(), DType::F64));
        let (found, _) = fused.step(0.1, ones.clone(), ones, None);
        // The moments of the first step, without bias, are the gradient and its square.
        let expected = 1.0 - 0.1 * decay - 0.1 / (1.0 + epsilon);
        for value in found.into_data().iter::<f64>() {
            assert!((value - expected).abs() < 1e-14, "{value} for {expected}");
        }
    }
}
