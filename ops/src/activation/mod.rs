//! Activations: elementwise nonlinearities on resolved values of any placement.

mod gated;
mod golden;
mod kernel;

use std::f64::consts::SQRT_2;

use burn::nn::activation::{
    Celu, Elu, HardShrink, HardSigmoid, HardSwish, Hardtanh, LogSigmoid, Mish, Relu6, Selu, Shrink,
    SiLU, SoftShrink, Softplus, Softsign, Tanhshrink, Threshold, ThresholdedRelu,
};
use burn::nn::{Gelu, Identity, LeakyRelu, Relu, Sigmoid, Tanh};
use burn::tensor::{Tensor, activation as burns};
use halocline_core::{Result, ShardTensor};

use crate::field::{Field, run};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::Float;
use crate::kernel::local::LocalOperator;
use crate::kernel::simd::Isa;
use crate::layers::layers;
use crate::operand::Operand;
pub use gated::{glu, prelu};
pub(crate) use golden::OPERATORS;
pub use kernel::Activation;

/// Applies an activation to a sharded tensor; errors name `operator`.
///
/// # Errors
/// Partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::Activation;
/// use halocline_ops::activation::activation;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([-1.0, 2.0]));
/// let y = activation("relu", Activation::Relu, x)?.into_local();
/// y.into_data().assert_eq(&[0.0_f32, 2.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn activation<const D: usize>(
    operator: &str,
    activation: Activation,
    x: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    let (local, layout, mesh) = x.into_parts();
    Ok(ShardTensor::from_parts(activation.run(local), layout, mesh))
}

/// Activations as methods.
pub trait ActivationField<const D: usize>: Field<D> {
    /// The rectified linear unit, `max(x, 0)`.
    ///
    /// # Panics
    /// Panics where [`activation`](fn@activation) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ActivationField;
    ///
    /// let y = Tensor::<1>::from([-1.0, 2.0]).relu();
    /// y.into_data().assert_eq(&[0.0_f32, 2.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn relu(self) -> Self {
        run(self, |x| activation("relu", Activation::Relu, x))
    }

    /// The Gaussian error linear unit, computed with the error function.
    ///
    /// # Panics
    /// Panics where [`activation`](fn@activation) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ActivationField;
    ///
    /// let y = Tensor::<1>::from([1.0]).gelu().into_scalar::<f32>();
    /// assert!((y - 0.841_344_7).abs() < 1e-6);
    /// ```
    #[must_use]
    #[track_caller]
    fn gelu(self) -> Self {
        run(self, |x| activation("gelu", Activation::Gelu, x))
    }

    /// The sigmoid linear unit, `x · sigmoid(x)`.
    ///
    /// # Panics
    /// Panics where [`activation`](fn@activation) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ActivationField;
    ///
    /// let y = Tensor::<1>::from([1.0]).silu().into_scalar::<f32>();
    /// assert!((y - 0.731_058_6).abs() < 1e-6);
    /// ```
    #[must_use]
    #[track_caller]
    fn silu(self) -> Self {
        run(self, |x| activation("silu", Activation::Silu, x))
    }

    /// The leaky rectified linear unit with learned slopes. See [`prelu`](fn@prelu).
    ///
    /// # Panics
    /// Panics where [`prelu`](fn@prelu) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ActivationField;
    ///
    /// let y = Tensor::<1>::from([-2.0, 1.0]).prelu(Tensor::<1>::from([0.5]));
    /// y.into_data().assert_eq(&[-1.0_f32, 1.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn prelu(self, slopes: impl Into<Operand<1>>) -> Self {
        run(self, |x| prelu(x, slopes))
    }

    /// The gated linear unit: one half of a dim times the sigmoid of the other half. See
    /// [`glu`](fn@glu).
    ///
    /// # Panics
    /// Panics where [`glu`](fn@glu) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ActivationField;
    ///
    /// let y = Tensor::<1>::from([4.0, 6.0, 0.0, 0.0]).glu(0);
    /// y.into_data().assert_eq(&[2.0_f32, 3.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn glu(self, dim: usize) -> Self {
        run(self, |x| glu(x, dim))
    }
}

impl<const D: usize, X: Field<D>> ActivationField<D> for X {}

pub(crate) fn gelu_of<const D: usize, X: Field<D>>(gelu: &Gelu, x: X) -> X {
    if gelu.approximate {
        x.gelu_approximate()
    } else {
        x.gelu()
    }
}

layers! {
    Relu: |_, x| ActivationField::relu(x);
    Gelu: |gelu, x| gelu_of(gelu, x);
    SiLU: |_, x| ActivationField::silu(x);
    Sigmoid: |_, x| Field::sigmoid(x);
    Tanh: |_, x| Field::tanh(x);
    LeakyRelu: |leaky, x| Field::leaky_relu(x, leaky.negative_slope);
    Identity: |_, x| x;
}

/// Implements [`Layer`](crate::Layer) for burn's elementwise modules with their own functions.
macro_rules! elementwise {
    ($($module:ty),*) => {
        layers! { $($module: |module, x| Field::map(x, |x| module.forward(x));)* }
    };
}
elementwise!(
    Celu,
    Elu,
    HardShrink,
    HardSigmoid,
    HardSwish,
    Hardtanh,
    LogSigmoid,
    Mish,
    Relu6,
    Selu,
    Shrink,
    SoftShrink,
    Softplus,
    Softsign,
    Tanhshrink,
    Threshold,
    ThresholdedRelu
);

impl LocalOperator for Activation {
    const NAMES: [&'static str; 2] = ["activation", "activation (backward)"];
    const KEEPS_INPUT: bool = true;

    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>) {
        (kernel::forward(isa, self, x), shape.to_vec())
    }

    fn backward<E: Float>(self, isa: Isa, x: &[E], _: &[usize], cotangent: &[E]) -> Buffer<E> {
        kernel::backward(isa, self, x, cotangent)
    }

    fn forward_in_place<E: Float>(self, isa: Isa, x: &mut [E]) -> bool {
        kernel::forward_in_place(isa, self, x);
        true
    }

    fn backward_in_place<E: Float>(self, isa: Isa, x: &[E], cotangent: &mut [E]) -> bool {
        kernel::backward_in_place(isa, self, x, cotangent);
        true
    }

    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Relu => burns::relu(x),
            // Where a backend brings no gradient, burn's function has the gradient of the tanh
            // approximation, which is off by 9e-4.
            Self::Gelu => {
                let below = x.clone().div_scalar(SQRT_2).erf().add_scalar(1.0);
                x.mul(below).div_scalar(2.0)
            }
            Self::Silu => burns::silu(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::activation::{
        CeluConfig, EluConfig, HardShrinkConfig, HardSigmoidConfig, HardtanhConfig, ShrinkConfig,
        SoftShrinkConfig, SoftplusConfig, ThresholdConfig, ThresholdedReluConfig,
    };

    use super::*;
    use crate::kernel::local::check_composed;
    use crate::layer::{Apply, Layer};
    use crate::testing::{Operator, check_op};

    struct Applied<L>(L);

    impl<L> Operator<3, 3> for Applied<L>
    where
        L: Sync + Layer<ShardTensor<3>, Output = ShardTensor<3>>,
    {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            X::from_shard(inputs.remove(0).into_shard().apply(&self.0))
        }
    }

    macro_rules! check_layers {
        ($($layer:expr),*) => {$(
            check_op(&Applied($layer), &[[2, 3, 5]], &[], &[0, 2], 1e-6);
        )*};
    }

    #[test]
    fn burns_elementwise_modules_run_on_shards() {
        check_layers!(
            CeluConfig::new().init(),
            EluConfig::new().init(),
            HardShrinkConfig::new().init(),
            HardSigmoidConfig::new().init(),
            HardSwish,
            HardtanhConfig::new().init(),
            LogSigmoid,
            Mish,
            Relu6,
            Selu,
            ShrinkConfig::new().init(),
            SoftShrinkConfig::new().init(),
            SoftplusConfig::new().init(),
            Softsign,
            Tanhshrink,
            ThresholdConfig::new(0.1, 0.3).init(),
            ThresholdedReluConfig::new().init(),
            Identity::new()
        );
    }

    /// Values that are read elsewhere stay unchanged: by a clone, by another slice, or by the
    /// graph.
    #[test]
    fn values_that_are_read_again_stay() {
        let device = burn::tensor::Device::flex();
        let x = || Tensor::<1>::from_floats([-1.0, 0.5, 2.0, 3.0], &device);
        let (kept, whole) = (x(), x());
        let _ = kept.clone().gelu();
        let [low, high] = [0, 2].map(|start| whole.clone().narrow(0, start, 2));
        drop(whole);
        let _ = low.clone().gelu();
        let halves = Tensor::cat(vec![low, high], 0);
        for values in [kept, halves] {
            values.into_data().assert_eq(&x().into_data(), true);
        }
        let with_graph = device.clone().autodiff();
        let gradient = |twice: fn(Tensor<1>) -> Tensor<1>| {
            let leaf = Tensor::<1>::from_data(x().into_data(), &with_graph).require_grad();
            let gradients = twice(leaf.clone().gelu()).sum().backward();
            leaf.clone()
                .inner()
                .into_data()
                .assert_eq(&x().into_data(), true);
            leaf.grad(&gradients).unwrap().into_data()
        };
        // Both terms receive the same cotangent.
        let parts = gradient(|y| y.clone().gelu() + y.gelu());
        parts.assert_eq(&gradient(|y| y.gelu() * 2.0), true);
    }

    #[test]
    fn kernels_and_burns_operators_agree() {
        for activation in [Activation::Relu, Activation::Gelu, Activation::Silu] {
            check_composed(activation);
        }
    }
}
