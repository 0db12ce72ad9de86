//! Normalization over several dims, which may be sharded.

use halocline_core::{Error, Result, ShardTensor};

use crate::operand::Operand;
use crate::precision::in_f32;
use crate::rearrange::distribute_beside;
use crate::reduce::mean_dims;

/// Normalizes every sample over the last `dims` dims. Weight and bias have one cell in the other dims, or are missing.
/// See the [module](super).
///
/// # Errors
/// More dims than there are, or none; parameters of another shape or number type; partial values; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::norm::layer_norm_dims;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([2, 5, 4], &mesh, &[Shard(1)])?;
///     let y = layer_norm_dims(x, 2, None, None, 1e-5)?; // all cells are equal to their mean
///     assert_eq!(y.full_tensor(LocalGradient::Replicated).abs().max().into_scalar::<f32>(), 0.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn layer_norm_dims<const D: usize>(
    x: ShardTensor<D>,
    dims: usize,
    weight: Option<Operand<D>>,
    bias: Option<Operand<D>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    over(
        "layer_norm_dims",
        x,
        dims,
        [weight, bias],
        |x, normalized| {
            let mean = mean_dims(x.clone(), normalized)?.resolve();
            by_root_mean_square(x - mean, normalized, epsilon)
        },
    )
}

/// Divides every sample by its root mean square over the last `dims` dims. The weight has one cell in the other dims, or is
/// missing. See the [module](super).
///
/// # Errors
/// Those of [`layer_norm_dims`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::norm::rms_norm_dims;
///
/// let x = ShardTensor::solo(Tensor::<3>::from([[[1.0, 7.0], [5.0, 5.0]]]));
/// let y = rms_norm_dims(x, 2, None, 0.0)?;
/// let expected = [[[0.2_f32, 1.4], [1.0, 1.0]]];
/// y.local().to_data().assert_approx_eq::<f32>(&expected.into(), burn::tensor::Tolerance::default());
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rms_norm_dims<const D: usize>(
    x: ShardTensor<D>,
    dims: usize,
    weight: Option<Operand<D>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    over("rms_norm_dims", x, dims, [weight, None], |x, normalized| {
        by_root_mean_square(x, normalized, epsilon)
    })
}

fn by_root_mean_square<const D: usize>(
    x: ShardTensor<D>,
    normalized: &[usize],
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    let mean = mean_dims(x.clone().square(), normalized)?.resolve();
    Ok(x / (mean + epsilon).sqrt())
}

/// Runs a normalization of the last `dims` dims in f32 at least, and applies weight and bias.
fn over<const D: usize>(
    operator: &'static str,
    x: ShardTensor<D>,
    dims: usize,
    [weight, bias]: [Option<Operand<D>>; 2],
    normalize: impl FnOnce(ShardTensor<D>, &[usize]) -> Result<ShardTensor<D>>,
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    if dims == 0 || dims > D {
        let message = format!("the last {dims} dims of {:?}", x.dims());
        return Err(Error::operator(operator, message));
    }
    let first = D - dims;
    let normalized: Vec<usize> = (first..D).collect();
    let parameter = |parameter: Option<Operand<D>>| {
        let beside = |parameter| beside(parameter, &x, first, operator);
        parameter.map(beside).transpose()
    };
    let (weight, bias) = (parameter(weight)?, parameter(bias)?);
    let y = in_f32(x, |x| normalize(x, &normalized))?;
    let y = match weight {
        Some(weight) => y * weight,
        None => y,
    };
    Ok(match bias {
        Some(bias) => y + bias,
        None => y,
    })
}

/// This rank's part of a parameter, in the shards of a field.
fn beside<const D: usize>(
    parameter: Operand<D>,
    x: &ShardTensor<D>,
    first: usize,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let mut shape = x.dims();
    shape[..first].fill(1);
    let (dtype, expected) = (parameter.dtype(), x.local().dtype());
    if parameter.dims() != shape || dtype != expected {
        let message = format!(
            "a parameter {:?} of {dtype:?}; expected {shape:?} of {expected:?}",
            parameter.dims()
        );
        return Err(Error::operator(operator, message));
    }
    distribute_beside(x, parameter)
}
