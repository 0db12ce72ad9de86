//! Activations with parameters, and gated activations of one half of a dim by the other.

use burn::module::ModuleDisplayDefault;
use burn::nn::activation::{GLU, PRelu};
use halocline_core::{Error, Result, ShardTensor};

use super::ActivationField;
use crate::layers::{displayed, layers};
use crate::operand::Operand;
use crate::rearrange::{RearrangeField, distribute_operand, reshape};

/// Leaky rectified linear unit with learned slopes for negative values: one slope, or one per
/// channel (dim 1).
///
/// # Adjoint
/// The gradient of the slopes is summed over all ranks between which `x` is sharded.
///
/// # Errors
/// A wrong number of slopes, or slopes of another dtype; partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::activation::prelu;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[-2.0, -2.0], [1.0, 3.0]]));
/// let y = prelu(x, Tensor::<1>::from([0.5, 0.25]))?.into_local();
/// y.into_data().assert_eq(&[[-1.0_f32, -0.5], [1.0, 3.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn prelu<const D: usize>(
    x: ShardTensor<D>,
    slopes: impl Into<Operand<1>>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "prelu";
    x.require_resolved(NAME)?;
    let slopes = slopes.into();
    let ([count], mut shape) = (slopes.dims(), [1; D]);
    let channels = x.dims().get(1).copied();
    if count != 1 {
        if channels != Some(count) {
            let message = format!(
                "{count} slopes for {:?}; expected 1, or one for each channel",
                x.dims()
            );
            return Err(Error::operator(NAME, message));
        }
        shape[1] = count;
    }
    let (dtype, expected) = (slopes.dtype(), x.local().dtype());
    if dtype != expected {
        let message = format!("slopes of {dtype:?} for a tensor of {expected:?}");
        return Err(Error::operator(NAME, message));
    }
    let slopes: ShardTensor<D> = reshape(slopes.place_on(&x)?, shape)?;
    let slopes = distribute_operand(&x, slopes)?;
    // At zero, where the rectifier has no gradient, the other term contributes the slope.
    Error::catch(|| x.clone().relu() + x.clamp_max(0.0) * slopes)
}

/// Gated linear unit: multiplies one half of a dim by the sigmoid of the other half, with the
/// layout of the first half (Dauphin et al. 2017).
///
/// # Communication
/// If the dim is sharded, the cells of both halves move to the ranks on which they are multiplied.
///
/// # Errors
/// A dim that does not exist or has an odd size; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::activation::glu;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[4.0, 6.0, 0.0, 0.0]]));
/// let y = glu(x, 1)?.into_local();
/// y.into_data().assert_eq(&[[2.0_f32, 3.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn glu<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "glu";
    x.require_resolved(NAME)?;
    let size = x.dims().get(dim).copied().unwrap_or(1);
    if size % 2 == 1 {
        let message = format!("dim {dim} of {:?}; expected an even size", x.dims());
        return Err(Error::operator(NAME, message));
    }
    let half = |start| RearrangeField::narrow(x.clone(), dim, start, size / 2);
    Error::catch(|| {
        let value = half(0);
        let gate = half(size / 2).align_to(&value);
        value * gate.sigmoid()
    })
}

/// Dim of burn's layer, which counts from the end if it is negative.
fn dim_of(layer: &GLU, dims: usize) -> usize {
    let dim: isize = displayed(|content| layer.content(content), "dim");
    if dim < 0 {
        dims.wrapping_add_signed(dim)
    } else {
        dim as usize
    }
}

layers! {
    PRelu: |layer, x| ActivationField::prelu(x, &layer.alpha);
    GLU: |layer, x| ActivationField::glu(x, dim_of(layer, D));
}

#[cfg(test)]
mod tests {
    use burn::nn::activation::PReluConfig;
    use burn::tensor::{DType, Tensor};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, difference, random};

    struct Slopes;

    impl Operator<3, 3> for Slopes {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, mut slopes: Vec<Tensor<3>>) -> X {
            inputs.remove(0).prelu(slopes.remove(0).reshape([3]))
        }
    }

    #[test]
    fn slopes_get_the_gradients_of_all_cells() {
        check_op(&Slopes, &[[2, 3, 7]], &[[1, 3, 1]], &[0, 1, 2], 1e-6);
    }

    /// As in PyTorch. The gradient of burn's module is one.
    #[test]
    fn the_gradient_at_zero_is_the_slope() {
        let device = burn::tensor::Device::default().autodiff();
        let x = Tensor::<1>::zeros([2], &device).require_grad();
        let y = x.clone().prelu(Tensor::<1>::from_floats([0.25], &device));
        let gradient = x.grad(&y.sum().backward()).unwrap();
        gradient
            .into_data()
            .assert_eq(&[0.25_f32, 0.25].into(), true);
    }

    struct Gated(usize);

    impl Operator<3, 3> for Gated {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).glu(self.0)
        }
    }

    #[test]
    fn halves_of_a_sharded_dim_meet() {
        for dim in 0..2 {
            check_op(&Gated(dim), &[[4, 6, 5]], &[], &[0, 1, 2], 1e-6);
        }
    }

    #[test]
    fn modules_give_what_they_give_in_burn() {
        let device = Default::default();
        let x = random::<3>([2, 4, 6], "x", 0).inner();
        let (one, each) = (
            PReluConfig::new(),
            PReluConfig::new().with_num_parameters(4),
        );
        let (one, each) = (one.init(&device), each.init(&device));
        for (ours, burns) in [
            (x.clone().apply(&one), one.forward(x.clone())),
            (x.clone().apply(&each), each.forward(x.clone())),
            (
                x.clone().apply(&GLU::new(-1)),
                GLU::new(-1).forward(x.clone()),
            ),
            (
                x.clone().apply(&GLU::new(1)),
                GLU::new(1).forward(x.clone()),
            ),
        ] {
            assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-6);
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = || ShardTensor::solo(Tensor::<2>::ones([3, 5], &Default::default()));
        let error = glu(x(), 1).unwrap_err().to_string();
        assert!(
            error.contains("dim 1 of [3, 5]; expected an even size"),
            "{error}"
        );
        let error = prelu(x(), Tensor::<1>::from([0.1, 0.2]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("2 slopes for [3, 5]"), "{error}");
        let wide = Tensor::<1>::from_data([0.1_f64], (&Default::default(), DType::F64));
        let error = prelu(x(), wide).unwrap_err().to_string();
        assert!(error.contains("slopes of F64"), "{error}");
    }
}
