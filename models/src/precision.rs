//! Dtypes: metrics in at least f32, and models whose parameters and input have different dtypes.

use burn::module::Param;
use burn::tensor::{DType, FloatDType, Tensor};
use halocline_core::{Error, Result};
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

/// Casts a field to the dtype of a parameter, in which a model computes.
pub(crate) fn computed<const D: usize, X: Field<D>>(x: X, like: &Param<Tensor<4>>) -> X {
    x.cast(FloatDType::from(like.base().dtype()))
}

/// Computes `state + increment · scale` in the dtype of the state; increment and scale share a
/// dtype.
pub(crate) fn stepped<X: Field<4>>(state: X, increment: X, scale: &Param<Tensor<4>>) -> X {
    if state.dtype() == increment.dtype() {
        return state.addcmul(increment, scale);
    }
    let (dtype, scale) = (
        FloatDType::from(state.dtype()),
        increment.place_operand(scale),
    );
    state + (increment * scale).cast(dtype)
}
