//! Gaussian noise by global index.

use burn::nn::GaussianNoise;
use burn::tensor::{Tensor, TensorData};
use halocline_core::{Distribution, Error, LayerKeys, RandomKey, Result, ShardTensor};

use super::DropoutField;
use crate::field::Field;
use crate::layers::layers;

/// Adds normal noise with the given standard deviation. The noise depends on the key and on a
/// cell's index in the global tensor: any sharding returns the result of one device. Nothing is
/// sent.
///
/// # Adjoint
/// The cotangent.
///
/// # Errors
/// A deviation that is negative or not finite; partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{RandomKey, ShardTensor};
/// use halocline_ops::dropout::gaussian_noise;
///
/// let x = ShardTensor::solo(Tensor::<1>::zeros([1000], &Default::default()));
/// let y = gaussian_noise(x, 0.5, RandomKey::new(1, "noise"))?.into_local();
/// let deviation = y.square().mean().sqrt().into_scalar::<f32>();
/// assert!((deviation - 0.5).abs() < 0.05);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gaussian_noise<const D: usize>(
    x: ShardTensor<D>,
    deviation: f64,
    key: RandomKey,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "gaussian_noise";
    x.require_resolved(NAME)?;
    if !deviation.is_finite() || deviation < 0.0 {
        let message = format!("deviation {deviation}; expected a finite number from zero on");
        return Err(Error::operator(NAME, message));
    }
    let normal = Distribution::Normal(0.0, deviation);
    let shape = x.dims();
    let (local, layout, mesh) = x.into_parts();
    let cells = layout.local_box(mesh.position());
    let noise = TensorData::new(key.fill(normal, &shape, &cells), cells.shape());
    let noise = Tensor::from_data(noise, (&local.device(), local.dtype()));
    Ok(ShardTensor::from_parts(local + noise, layout, mesh))
}

layers! {
    GaussianNoise: |layer, x| noise_of(layer, x);
}

/// Applies burn's layer to either kind of tensor: in training, noise drawn with [`LayerKeys`];
/// otherwise the identity.
fn noise_of<const D: usize, X: Field<D>>(layer: &GaussianNoise, x: X) -> X {
    let autodiff = x.clone().into_shard().device().is_autodiff();
    if layer.training.is_enabled() && autodiff && layer.std != 0.0 {
        x.gaussian_noise(layer.std, LayerKeys::draw())
    } else {
        x
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::GaussianNoiseConfig;
    use burn::tensor::Device;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Noise;

    impl Operator<3, 3> for Noise {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).gaussian_noise(0.5, RandomKey::new(3, "x"))
        }
    }

    #[test]
    fn any_sharding_has_the_same_noise() {
        check_op(&Noise, &[[3, 5, 7]], &[], &[0, 1, 2], 0.0);
    }

    #[test]
    fn layers_are_noisy_in_training_only() {
        let layer = GaussianNoiseConfig::new(0.3).init();
        let x = Tensor::<1>::ones([100], &Device::default());
        let noisy = x.clone().autodiff().apply(&layer).inner();
        assert_ne!(noisy.into_data(), x.clone().into_data());
        assert_eq!(x.clone().apply(&layer).into_data(), x.into_data());
    }
}
