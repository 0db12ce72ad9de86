//! Normalization by mean and variance of the cells that count.

use burn::tensor::FloatDType;
use halocline_core::{Error, Result, ShardTensor};

use super::{apply_mask, broadcast, in_f32, reciprocal, resolved_sums};
use crate::field::Field;
use crate::norm::require_epsilon;
use crate::operand::Operand;
use crate::rearrange::{distribute_operand, expand, reshape};

/// Group normalization by mean and variance of the cells that count, per sample and group. Cells
/// that do not count become zero.
///
/// # Shapes
/// `x` is `[batch, channels, *spatial]`; weight and bias are `[channels]`.
///
/// # Placement
/// All dims may be sharded, channels only such that every group lies on one rank.
///
/// # Communication
/// None if only batch or channels are sharded; otherwise three sums per sample and channel, and
/// their gradients.
///
/// # Errors
/// Fails for groups that do not divide the channels, for parameters of another size, and for a
/// negative ε; otherwise errors of [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::masked_group_norm;
///
/// let x = Tensor::<3>::from([[[1.0, f32::NAN, 3.0]]]);
/// let mask = Tensor::from([[[1.0, 0.0, 1.0]]]);
/// let y = masked_group_norm(x, mask, 1, None, None, 0.0)?;
/// y.into_data().assert_eq(&[[[-1.0_f32, 0.0, 1.0]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_group_norm<const D: usize, X: Field<D>>(
    x: X,
    mask: X,
    groups: usize,
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<X> {
    const NAME: &str = "masked_group_norm";
    let shape = x.dims();
    if D < 2 || groups == 0 || shape[1] % groups != 0 {
        let message = format!("{groups} groups of channels of {shape:?}");
        return Err(Error::operator(NAME, message));
    }
    let mut of_channels = [1; D];
    of_channels[1] = shape[1];
    let spatial: Vec<usize> = (2..D).collect();
    // Sums over the cells of a group, for each of its channels.
    let sums = |x: ShardTensor<D>| {
        let sums = resolved_sums(x, &spatial)?;
        let (kept, each) = (sums.dims(), shape[1] / groups);
        let grouped: ShardTensor<3> = reshape(sums, [shape[0], groups, each])?;
        let total = resolved_sums(grouped, &[2])?;
        reshape::<3, D, _>(expand(total, [shape[0], groups, each])?, kept)
    };
    normalized(
        NAME,
        x,
        mask,
        sums,
        [(weight, of_channels), (bias, of_channels)],
        epsilon,
    )
}

/// Layer normalization over the last `dims` dims by mean and variance of the cells that count.
/// Cells that do not count become zero. Weight and bias have size one in the other dims.
///
/// # Placement
/// All dims may be sharded.
///
/// # Communication
/// Three sums per row if a normalized dim is sharded, and their gradients.
///
/// # Errors
/// Fails for zero dims or more than there are, for parameters of another shape, and for a negative
/// ε; otherwise errors of [`apply_mask`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::masked::masked_layer_norm;
///
/// let x = Tensor::<2>::from([[1.0, f32::NAN, 3.0]]);
/// let mask = Tensor::from([[1.0, 0.0, 1.0]]);
/// let y = masked_layer_norm(x, mask, 1, None, None, 0.0)?;
/// y.into_data().assert_eq(&[[-1.0_f32, 0.0, 1.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn masked_layer_norm<const D: usize, X: Field<D>>(
    x: X,
    mask: X,
    dims: usize,
    weight: Option<Operand<D>>,
    bias: Option<Operand<D>>,
    epsilon: f64,
) -> Result<X> {
    const NAME: &str = "masked_layer_norm";
    let mut shape = x.dims();
    if dims == 0 || dims > D {
        let message = format!("the last {dims} dims of {shape:?}");
        return Err(Error::operator(NAME, message));
    }
    shape[..D - dims].fill(1);
    let normalized_dims: Vec<usize> = (D - dims..D).collect();
    let sums = |x: ShardTensor<D>| resolved_sums(x, &normalized_dims);
    normalized(
        NAME,
        x,
        mask,
        sums,
        [(weight, shape), (bias, shape)],
        epsilon,
    )
}

/// Weight and bias of a normalization, with their shapes beside a field.
pub(super) type Parameters<const D: usize, const E: usize> = [(Option<Operand<E>>, [usize; D]); 2];

/// Normalizes by means that are computed from `sums` over cells.
fn normalized<const D: usize, const E: usize, X: Field<D>>(
    operator: &'static str,
    x: X,
    mask: X,
    sums: impl Fn(ShardTensor<D>) -> Result<ShardTensor<D>>,
    parameters: Parameters<D, E>,
    epsilon: f64,
) -> Result<X> {
    check(operator, &x.dims(), &parameters, epsilon)?;
    in_f32(x, mask, |x, mask| {
        let mask = broadcast(&x, mask)?;
        let x = apply_mask(x, mask.clone())?;
        let inverse = reciprocal(sums(mask.clone())?);
        let mean = |x: ShardTensor<D>| {
            let sums = sums(Error::catch(|| x * mask.clone())?)?;
            Error::catch(|| sums * inverse.clone())
        };
        let means = mean(x.clone())?;
        let centred = Error::catch(|| x - means)?;
        let variance = mean(centred.clone().square())?;
        let y = Error::catch(|| centred / (variance + epsilon).sqrt())?;
        scaled(y, mask, parameters)
    })
}

/// Checks the arguments of a normalization of a field of this shape.
pub(super) fn check<const D: usize, const E: usize>(
    operator: &str,
    shape: &[usize; D],
    parameters: &Parameters<D, E>,
    epsilon: f64,
) -> Result<()> {
    require_epsilon(operator, epsilon)?;
    for (parameter, expected) in parameters {
        let held = parameter.as_ref().map(|parameter| parameter.dims());
        let cells = |shape: &[usize]| shape.iter().product::<usize>();
        let is_other = |held: [usize; E]| match E {
            1 => held[0] != cells(expected),
            _ => held[..] != expected[..],
        };
        if held.is_some_and(is_other) {
            let message = format!("a parameter {held:?} for {shape:?}; expected {expected:?}");
            return Err(Error::operator(operator, message));
        }
    }
    Ok(())
}

/// Multiplies normalized cells by the weight and adds the bias; cells that do not count become
/// zero.
pub(super) fn scaled<const D: usize, const E: usize>(
    y: ShardTensor<D>,
    mask: ShardTensor<D>,
    parameters: Parameters<D, E>,
) -> Result<ShardTensor<D>> {
    // Clears NaN where no cell counts and ε is zero, before it reaches the gradient of the weight.
    let mut y = apply_mask(y, mask.clone())?;
    let [weight, bias] = parameters.map(|(parameter, shape)| {
        let parameter = parameter.map(|parameter| beside(&y, parameter, shape));
        parameter.transpose()
    });
    if let Some(weight) = weight? {
        y = Error::catch(|| y * weight)?;
    }
    if let Some(bias) = bias? {
        y = Error::catch(|| y + bias)?;
    }
    apply_mask(y, mask)
}

/// Distributes a parameter as a field is, in the field's element type.
pub(super) fn beside<const D: usize, const E: usize>(
    x: &ShardTensor<D>,
    parameter: Operand<E>,
    shape: [usize; D],
) -> Result<ShardTensor<D>> {
    let parameter: ShardTensor<D> = reshape(parameter.place_on(x)?, shape)?;
    distribute_operand(x, parameter.cast(FloatDType::from(x.local().dtype())))
}
