//! Number types: metrics in f32 at least, and models whose parameters have another type than their input.

use burn::module::Param;
use burn::tensor::{DType, FloatDType, Tensor};
use halocline_core::{Error, Result};
use halocline_ops::prelude::*;

/// A field in f32 at least: squares and means of half precision overflow, or keep three digits.
///
/// # Errors
/// Partial values in half precision.
pub(crate) fn wide<const D: usize, X: Field<D>>(x: X) -> Result<X> {
    match x.dtype() {
        DType::F16 | DType::BF16 => Error::catch(|| x.cast(FloatDType::F32)),
        _ => Ok(x),
    }
}

/// A field in the number type of a parameter, in which a model computes.
pub(crate) fn computed<const D: usize, X: Field<D>>(x: X, like: &Param<Tensor<4>>) -> X {
    x.cast(FloatDType::from(like.base().dtype()))
}

/// `state + increment · scale` in the number type of the state, of an increment in that of the scale.
pub(crate) fn stepped<X: Field<4>>(state: X, increment: X, scale: &Param<Tensor<4>>) -> X {
    if state.dtype() == increment.dtype() {
        return state.addcmul(increment, scale);
    }
    let (own, scale) = (FloatDType::from(state.dtype()), increment.beside(scale));
    state + (increment * scale).cast(own)
}
