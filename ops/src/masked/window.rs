//! Convolution, its transpose, and averages over the cells of windows that count.

use burn::tensor::{DType, Tensor};
use halocline_core::{Error, Result, ShardTensor};

use super::{apply_mask, broadcast_in_space, in_f32, reciprocal, weights};
use crate::conv::{ConvOptions, ConvTransposeOptions, conv, conv_transpose};
use crate::field::Field;
use crate::operand::Operand;
use crate::pool::{PaddingCount, PoolOptions, avg_pool, max_pool};
use crate::precision::{cast_shard, narrowed, wider};
use crate::rearrange::{distribute_operand, reshape};

/// Convolution over the cells that count: `Σ_k w_k·m·x · n / Σ_k m + bias`, where `n` is the number
/// of cells of the window; zero if none of them counts (partial convolution, Liu et al. 2018).
/// Cells beyond a boundary of zeros do not count.
///
/// # Shapes
/// `x` is `[batch, channels_in, *spatial]`. The mask has one channel, and may have size one in
/// other dims, too.
///
/// # Errors
/// Fails for a mask with more than one channel; otherwise errors of [`conv`] and [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::ConvOptions;
/// use halocline_ops::masked::masked_conv;
///
/// let x = Tensor::<3>::from([[[1.0, f32::NAN, 3.0, 5.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0, 1.0]]]);
/// let sums = Tensor::<3>::ones([1, 1, 2], &Default::default());
/// let y = masked_conv::<3, 1, _>(x, mask, sums, None, &ConvOptions::default())?;
/// y.into_data().assert_eq(&[[[2.0_f32, 6.0, 8.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_conv<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    mask: X,
    weight: impl Into<Operand<D>>,
    bias: Option<Operand<1>>,
    options: &ConvOptions<N>,
) -> Result<X> {
    let sums = |x: ShardTensor<D>, weight: Operand<D>| conv(x, weight, None, options);
    let share =
        |mask: ShardTensor<D>, kernel: Tensor<D>| conv(mask, kernel, None, &options.with_groups(1));
    renormalized("masked_conv", x, mask, (weight.into(), bias), sums, share)
}

/// Transposed convolution over the cells that count: `Σ w·m·x · n / Σ m + bias` over the cells that
/// reach an output, where `n` is their number; zero if none of them counts. Without cells that do
/// not count, it is [`conv_transpose`] wherever a cell reaches the output.
///
/// # Shapes
/// `x` is `[batch, channels_in, *spatial]`. The mask has one channel, and may have size one in
/// other dims, too.
///
/// # Errors
/// Fails for a mask with more than one channel; otherwise errors of [`conv_transpose`] and
/// [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::ConvTransposeOptions;
/// use halocline_ops::masked::masked_conv_transpose;
///
/// let x = Tensor::<3>::from([[[1.0, f32::NAN, 3.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0]]]);
/// let sums = Tensor::<3>::ones([1, 1, 2], &Default::default());
/// let options = ConvTransposeOptions::default();
/// let y = masked_conv_transpose::<3, 1, _>(x, mask, sums, None, &options)?;
/// y.into_data().assert_eq(&[[[1.0_f32, 2.0, 6.0, 3.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_conv_transpose<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    mask: X,
    weight: impl Into<Operand<D>>,
    bias: Option<Operand<1>>,
    options: &ConvTransposeOptions<N>,
) -> Result<X> {
    let sums = |x: ShardTensor<D>, weight: Operand<D>| conv_transpose(x, weight, None, options);
    let share = |mask: ShardTensor<D>, kernel: Tensor<D>| {
        let options = options.with_groups(1);
        let (local, layout, mesh) = mask.clone().into_parts();
        let all = ShardTensor::from_parts(local.ones_like(), layout, mesh);
        let present = conv_transpose(mask, kernel.clone(), None, &options)?;
        let all = conv_transpose(all, kernel, None, &options)?;
        Error::catch(|| present * reciprocal(all))
    };
    let name = "masked_conv_transpose";
    renormalized(name, x, mask, (weight.into(), bias), sums, share)
}

/// Weight and bias.
type Parameters<const D: usize> = (Operand<D>, Option<Operand<1>>);

/// Divides sums over the cells that count by the share of these cells, and adds a bias where there
/// are any. `share` receives the mask and a kernel whose elements have a sum of one.
fn renormalized<const D: usize, X: Field<D>>(
    operator: &str,
    x: X,
    mask: X,
    (weight, bias): Parameters<D>,
    sums: impl FnOnce(ShardTensor<D>, Operand<D>) -> Result<ShardTensor<D>>,
    share: impl FnOnce(ShardTensor<D>, Tensor<D>) -> Result<ShardTensor<D>>,
) -> Result<X> {
    if D < 3 || mask.dims()[1] != 1 {
        let message = format!(
            "a mask {:?}; expected [batch or 1, 1, *spatial]",
            mask.dims()
        );
        return Err(Error::operator(operator, message));
    }
    let mask = mask.into_shard();
    x.try_op(|x| {
        let dtype = x.local().dtype();
        if dtype != DType::F16 {
            return by_present(x, mask, (weight, bias), sums, share);
        }
        // Weights such as areas, and their reciprocals, exceed the range of f16.
        let in_single = |x: ShardTensor<D>| Error::catch(|| cast_shard(x, DType::F32));
        let weight = in_single(weight.place_on(&x)?)?;
        let bias = bias.map(|bias| {
            let bias = bias.place_on(&x)?;
            Error::catch(|| cast_shard(bias, DType::F32))
        });
        let bias = bias.transpose()?.map(Operand::from);
        let y = by_present(in_single(x)?, mask, (weight.into(), bias), sums, share)?;
        Error::catch(|| narrowed(y, dtype))
    })
}

fn by_present<const D: usize>(
    x: ShardTensor<D>,
    mask: ShardTensor<D>,
    (weight, bias): Parameters<D>,
    sums: impl FnOnce(ShardTensor<D>, Operand<D>) -> Result<ShardTensor<D>>,
    share: impl FnOnce(ShardTensor<D>, Tensor<D>) -> Result<ShardTensor<D>>,
) -> Result<ShardTensor<D>> {
    let mut kernel = weight.dims();
    kernel[..2].fill(1);
    let cells: usize = kernel[2..].iter().product();
    let dtype = x.local().dtype();
    let mask = broadcast_in_space(&x, weights(mask, dtype)?)?;
    let each = (cells as f64).recip();
    let kernel = Tensor::<D>::full(kernel, each, (&mask.device(), wider(dtype)));
    let present = share(mask.clone(), kernel)?;
    let mask = cast_shard(mask, dtype);
    let x = apply_mask(x, mask.clone())?;
    let y = sums(Error::catch(|| x * mask)?, weight)?;
    let factor = cast_shard(reciprocal(present.clone()), dtype);
    let y = Error::catch(|| y * factor)?;
    let Some(bias) = bias else {
        return Ok(y);
    };
    let mut shape = [1; D];
    shape[1] = y.dims()[1];
    let bias: ShardTensor<D> = reshape(bias.place_on(&y)?, shape)?;
    let bias = distribute_operand(&y, bias)?;
    let some = cast_shard(some(present), dtype);
    Error::catch(|| y + bias * some)
}

/// One where a value is positive, else zero.
fn some<const D: usize>(x: ShardTensor<D>) -> ShardTensor<D> {
    let (local, layout, mesh) = x.into_parts();
    let some = local.clone().greater_elem(0.0);
    ShardTensor::from_parts(local.zeros_like().mask_fill(some, 1.0), layout, mesh)
}

/// Mean of the cells of each window that count, `Σ m·x / Σ m`; zero where none counts. Padding does
/// not count.
///
/// # Shapes
/// `[batch, channels, *spatial]`; the mask may have size one in any dim.
///
/// # Errors
/// Errors of [`avg_pool`] and [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::PoolOptions;
/// use halocline_ops::masked::masked_avg_pool;
///
/// let x = Tensor::<3>::from([[[1.0, f32::NAN, 3.0, 5.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0, 1.0]]]);
/// let y = masked_avg_pool::<3, 1, _>(x, mask, &PoolOptions::new([2]).with_stride([2]))?;
/// y.into_data().assert_eq(&[[[1.0_f32, 4.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_avg_pool<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    mask: X,
    options: &PoolOptions<N>,
) -> Result<X> {
    // Both averages divide by the same count, which cancels.
    let options = options.with_count(PaddingCount::Included);
    in_f32(x, mask, |x, mask| {
        let mask = broadcast_in_space(&x, mask)?;
        let x = apply_mask(x, mask.clone())?;
        let sums = avg_pool(Error::catch(|| x * mask.clone())?, &options)?;
        let weights = avg_pool(mask, &options)?;
        Error::catch(|| sums * reciprocal(weights))
    })
}

/// Largest of the cells of each window that count; zero where none counts. Padding does not count.
/// Positive weights have no other effect.
///
/// # Shapes
/// `[batch, channels, *spatial]`; the mask may have size one in any dim.
///
/// # Errors
/// Errors of [`max_pool`] and [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::PoolOptions;
/// use halocline_ops::masked::masked_max_pool;
///
/// let x = Tensor::<3>::from([[[-1.0, f32::NAN, 3.0, 5.0, 7.0, 8.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]]);
/// let y = masked_max_pool::<3, 1, _>(x, mask, &PoolOptions::new([2]))?;
/// y.into_data().assert_eq(&[[[-1.0_f32, 3.0, 0.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_max_pool<const D: usize, const N: usize, X: Field<D>>(
    x: X,
    mask: X,
    options: &PoolOptions<N>,
) -> Result<X> {
    in_f32(x, mask, |x, mask| {
        let mask = broadcast_in_space(&x, mask)?;
        let x = apply_mask(x, mask.clone())?;
        let lowest = lowest_beside(&mask);
        let largest = max_pool(Error::catch(|| x + lowest)?, options)?;
        apply_mask(largest, max_pool(mask, options)?)
    })
}

/// Minus infinity where a mask is zero, else zero.
fn lowest_beside<const D: usize>(mask: &ShardTensor<D>) -> ShardTensor<D> {
    let (local, layout, mesh) = mask.clone().into_parts();
    let none = local.clone().equal_elem(0.0);
    let lowest = local.zeros_like().mask_fill(none, f64::NEG_INFINITY);
    ShardTensor::from_parts(lowest, layout, mesh)
}
