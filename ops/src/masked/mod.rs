//! Operators on fields in which some cells do not count: land in the ocean, missing values.
//!
//! A mask holds a weight for each cell, zero (or less) where the cell does not count and mostly one
//! elsewhere. It has the shape of the field, or size one in dims in which it does not vary, such as
//! `[1, 1, lat, lon]`, and is sharded as the field is. Whatever a field holds in cells of weight
//! zero, NaN included, reaches no result and no gradient. Masks have no gradients.
//!
//! [`present`] computes the mask of the cells that are not NaN, and [`apply_mask`] replaces the
//! masked cells of a field by zero.
//!
//! # Placement
//! As for the operator without a mask.
//!
//! # Communication
//! As for the operator without a mask, plus the same for the mask, forward only. Attention instead
//! sends keys that are one element wider, and batch normalization nothing more.
//!
//! # Adjoint
//! Adjoint of the formula, with weights as constants.

mod apply;
mod attention;
mod batch;
mod interpolate;
mod norm;
mod window;

pub use apply::apply_mask;
pub(crate) use apply::require_fit;
pub use attention::{masked_cell_attention, masked_neighborhood_attention};
pub use batch::{masked_batch_norm, masked_batch_norm_train};
pub use interpolate::masked_interpolate;
pub use norm::{masked_group_norm, masked_layer_norm};
pub use window::{masked_avg_pool, masked_conv, masked_conv_transpose, masked_max_pool};

use burn::tensor::{DType, FloatDType};
use halocline_core::{Error, Result, Shard, ShardTensor};

use crate::field::Field;
use crate::precision::{cast_shard, wider};
use crate::rearrange::expand;
use crate::reduce::sum_dims;

/// Computes the mask of the cells that are not NaN: one there, zero elsewhere.
///
/// # Errors
/// Fails for partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::{masked_mean_dims, present};
///
/// let x = Tensor::<2>::from([[1.0, f32::NAN, 5.0]]);
/// let mask = present(&x)?;
/// mask.clone().into_data().assert_eq(&[[1.0_f32, 0.0, 1.0]].into(), true);
/// let mean = masked_mean_dims(x, mask, &[1])?;
/// mean.into_data().assert_eq(&[[3.0_f32]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn present<const D: usize, X: Field<D>>(x: &X) -> Result<X> {
    x.clone().try_op(|x| {
        x.require_resolved("present")?;
        let (local, layout, mesh) = x.inner().into_parts();
        let dtype = local.dtype();
        let mask = local.is_nan().bool_not().float();
        let mask = mask.cast(FloatDType::from(dtype));
        Ok(ShardTensor::from_parts(mask, layout, mesh))
    })
}

/// Mean over dims of the cells that count, `Σ m·x / Σ m`; zero where none counts. Reduced dims keep
/// size one.
///
/// # Communication
/// Two sums if a reduced dim is sharded.
///
/// # Errors
/// Errors of [`apply_mask`] and [`sum_dims`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::masked_mean_dims;
///
/// let x = Tensor::<2>::from([[1.0, f32::NAN, 4.0], [f32::NAN, 7.0, 8.0]]);
/// let mask = Tensor::from([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]);
/// let y = masked_mean_dims(x, mask, &[1])?;
/// y.into_data().assert_eq(&[[3.25_f32], [0.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_mean_dims<const D: usize, X: Field<D>>(x: X, mask: X, dims: &[usize]) -> Result<X> {
    in_f32(x, mask, |x, mask| {
        let mask = broadcast(&x, mask)?;
        let x = apply_mask(x, mask.clone())?;
        let sums = resolved_sums(Error::catch(|| x * mask.clone())?, dims)?;
        let weights = resolved_sums(mask, dims)?;
        Error::catch(|| sums * reciprocal(weights))
    })
}

/// Sums over dims, complete on every rank.
fn resolved_sums<const D: usize>(x: ShardTensor<D>, dims: &[usize]) -> Result<ShardTensor<D>> {
    let sums = sum_dims(x, dims)?;
    Error::catch(|| sums.resolve())
}

/// Runs an operator on a field and its mask in at least f32; the result has the element type of the
/// field.
fn in_f32<const D: usize, X: Field<D>>(
    x: X,
    mask: X,
    operator: impl FnOnce(ShardTensor<D>, ShardTensor<D>) -> Result<ShardTensor<D>>,
) -> Result<X> {
    let mask = mask.into_shard();
    x.try_op(|x| {
        let dtype = x.local().dtype();
        let mask = weights(mask, dtype)?;
        let y = operator(Error::catch(|| cast_shard(x, wider(dtype)))?, mask)?;
        Ok(cast_shard(y, dtype))
    })
}

/// Weights of a mask in at least f32, for a field of element type `dtype`. Negative ones, such as
/// the rounded cosine at a pole, become zero.
fn weights<const D: usize>(mask: ShardTensor<D>, dtype: DType) -> Result<ShardTensor<D>> {
    Error::catch(|| cast_shard(mask.inner(), wider(dtype)).clamp_min(0.0))
}

/// Broadcasts a mask to the shape of a field.
fn broadcast<const D: usize>(x: &ShardTensor<D>, mask: ShardTensor<D>) -> Result<ShardTensor<D>> {
    if mask.dims() == x.dims() {
        return Ok(mask);
    }
    let (local, layout, mesh) = x.clone().inner().into_parts();
    let zeros = ShardTensor::from_parts(local.zeros_like(), layout, mesh);
    Error::catch(|| zeros + mask)
}

/// Broadcasts a mask to the spatial dims of a field, in which windows count its cells.
fn broadcast_in_space<const D: usize>(
    x: &ShardTensor<D>,
    mask: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    let (held, shape) = (mask.dims(), x.dims());
    let sizes: [usize; D] = std::array::from_fn(|dim| if dim < 2 { held[dim] } else { shape[dim] });
    if sizes == held {
        return Ok(mask);
    }
    require_fit("apply_mask", &mask, x)?;
    let mask = expand(mask, sizes)?;
    let pairs = x.placements().iter().zip(mask.placements());
    let placements = pairs.map(|(field, held)| match field {
        Shard(2..) => *field,
        _ => *held,
    });
    let (leading, spatial) = (mask.layout().all_extents(), x.layout().all_extents());
    let extents = [&leading[..2], &spatial[2..]].concat();
    let layout = mask.layout().derive(placements.collect(), extents);
    mask.try_redistribute(&layout)
}

/// `1/x`, or zero where `x` is zero.
fn reciprocal<const D: usize>(x: ShardTensor<D>) -> ShardTensor<D> {
    let (local, layout, mesh) = x.into_parts();
    let none = local.clone().equal_elem(0.0);
    let inverse = local.mask_fill(none.clone(), 1.0).recip();
    ShardTensor::from_parts(inverse.mask_fill(none, 0.0), layout, mesh)
}

#[cfg(test)]
mod tests;
