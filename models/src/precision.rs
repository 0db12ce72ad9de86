//! Dtypes: losses and metrics in at least f32, and models whose parameters and input have different
//! dtypes.

use burn::module::Param;
use burn::tensor::{DType, FloatDType, Tensor};
use halocline_core::{Error, Result, ShardTensor};
use halocline_ops::prelude::*;

/// Casts half precision to f32: squares and means in half precision overflow, or keep three digits.
///
/// # Errors
/// The field has partial values and is in half precision.
pub(crate) fn wide<const D: usize, X: Field<D>>(x: X) -> Result<X> {
    match x.dtype() {
        DType::F16 | DType::BF16 => Error::catch(|| x.cast(FloatDType::F32)),
        _ => Ok(x),
    }
}

/// Casts a loss back to the dtype of its fields; resolved first if that is narrower, so that a sum
/// over ranks is rounded once.
pub(crate) fn narrowed<const D: usize, X: Field<D>>(loss: X, dtype: DType) -> X {
    if loss.dtype() == dtype {
        loss
    } else {
        loss.resolve().cast(FloatDType::from(dtype))
    }
}

/// Casts a field to the dtype of a parameter, in which a model computes.
pub(crate) fn computed<const D: usize, const E: usize, X: Field<D>>(
    x: X,
    like: &Param<Tensor<E>>,
) -> X {
    x.cast(FloatDType::from(like.base().dtype()))
}

/// Computes `state + increment · scale` in the dtype of the state. The channels of the increment
/// beyond those of the state start from zero.
pub(crate) fn stepped<X: Field<4>>(state: X, increment: X, scale: &Param<Tensor<4>>) -> X {
    let (known, channels) = (state.dims()[1], increment.dims()[1]);
    let state = if known == channels {
        state
    } else {
        let zero = zeros(state.clone().narrow(1, 0, 1));
        let mut parts = vec![state];
        parts.resize(1 + channels - known, zero);
        X::cat(parts, 1)
    };
    if state.dtype() == increment.dtype() {
        return state.addcmul(increment, scale);
    }
    let dtype = FloatDType::from(state.dtype());
    let scale = increment.place_operand(scale).cast(dtype);
    state.addcmul(increment.cast(dtype), scale.into_shard())
}

/// Zeros in the place of a field, also where it is NaN.
fn zeros<X: Field<4>>(x: X) -> X {
    let (local, layout, mesh) = x.into_shard().into_parts();
    X::from_shard(ShardTensor::from_parts(local.zeros_like(), layout, mesh))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diagnostics_start_from_zero_where_the_state_is_missing() {
        let device = burn::tensor::Device::default();
        let state = Tensor::<4>::full([1, 1, 1, 2], f32::NAN, &device);
        let increment = Tensor::<4>::ones([1, 2, 1, 2], &device);
        let scale = Param::from_tensor(Tensor::<4>::ones([1, 2, 1, 1], &device));
        let next = stepped(state, increment, &scale).narrow(1, 1, 1);
        next.into_data()
            .assert_eq(&[[[[1.0_f32, 1.0]]]].into(), true);
    }

    #[test]
    fn increments_are_scaled_in_the_dtype_of_the_state() {
        let device = burn::tensor::Device::default();
        let half = |value: f32| Tensor::<4>::full([1, 1, 4, 8], value, (&device, DType::BF16));
        let scale = half(0.1).narrow(2, 0, 1).narrow(3, 0, 1);
        let factor = scale.clone().into_scalar::<f32>();
        let state = Tensor::<4>::ones([1, 1, 4, 8], &device);
        let next = stepped(state, half(3.0), &Param::from_tensor(scale));
        let expected = Tensor::<4>::full([1, 1, 4, 8], 1.0 + 3.0 * factor, &device);
        let tolerance = burn::tensor::Tolerance::absolute(1e-6);
        next.into_data()
            .assert_approx_eq::<f32>(&expected.into_data(), tolerance);
    }
}
