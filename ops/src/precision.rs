//! Computation in at least f32.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_std::{bf16, f16};
use halocline_core::{Error, Result, ShardTensor};

/// Number type in which a computation with elements of this type runs.
pub(crate) fn wider(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// Largest finite value of a dtype.
pub(crate) fn highest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F16 => f16::MAX.to_f64(),
        DType::BF16 => bf16::MAX.to_f64(),
        _ => f64::from(f32::MAX),
    }
}

/// Casts a tensor to f32 if its elements are narrower: squares and sums in half precision overflow,
/// or keep three digits.
///
/// # Example
/// ```
/// use burn::tensor::{DType, FloatDType, Tensor};
/// use halocline_ops::widened;
///
/// let half = Tensor::<1>::from([1.0, 2.0]).cast(FloatDType::BF16);
/// assert_eq!(widened(half).dtype(), DType::F32);
/// ```
pub fn widened<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let dtype = wider(x.dtype());
    cast(x, dtype)
}

/// [`widened`] for a tracked tensor, whose gradient is then accumulated in at least f32.
pub(crate) fn widened_for_gradient<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.is_tracked() { widened(x) } else { x }
}

/// Casts a tensor to a dtype, unless it already has it.
pub(crate) fn cast<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype {
        return x;
    }
    x.cast(FloatDType::from(dtype))
}

/// Casts a sharded tensor to a dtype, unless it already has it.
pub(crate) fn cast_shard<const D: usize>(x: ShardTensor<D>, dtype: DType) -> ShardTensor<D> {
    if x.local().dtype() == dtype {
        return x;
    }
    x.cast(FloatDType::from(dtype))
}

/// Casts a result back to a narrower type. A partial sum is resolved first, so that it is rounded
/// once.
pub(crate) fn narrowed<const D: usize>(x: ShardTensor<D>, dtype: DType) -> ShardTensor<D> {
    if x.local().dtype() == dtype {
        x
    } else {
        cast_shard(x.resolve(), dtype)
    }
}

/// Applies a function in at least f32. The result has the dtype of `x`, and is resolved if
/// that type is narrower.
pub(crate) fn in_f32<const D: usize>(
    x: ShardTensor<D>,
    f: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<D>>,
) -> Result<ShardTensor<D>> {
    let dtype = x.local().dtype();
    let y = f(Error::catch(|| cast_shard(x, wider(dtype)))?)?;
    Error::catch(|| narrowed(y, dtype))
}
