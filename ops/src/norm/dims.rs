//! Normalization over several dims, which may be sharded.

use burn::tensor::Tensor;
use halocline_core::comm::Operation;
use halocline_core::{Error, Result, Shard, ShardTensor, Traffic};

use super::kernel::group::Extents;
use super::node::{GroupRun, Norm};
use super::parameter::affine;
use super::require_epsilon;
use crate::kernel::flex;
use crate::kernel::simd::Isa;
use crate::operand::Operand;
use crate::precision::in_f32;
use crate::rearrange::distribute_operand;
use crate::reduce::{mean_dims, scaled, sum_of_squares};

/// Normalizes every sample over the last `dims` dims. Weight and bias are optional, with size one
/// in the other dims. See the [module](super).
///
/// # Errors
/// Fails for zero dims or more than there are, for parameters of another shape or element type, for
/// a negative ε, for partial values, and if communication fails.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::norm::layer_norm_dims;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([2, 5, 4], &mesh, &[Shard(1)])?;
///     let y = layer_norm_dims(x, 2, None, None, 1e-5)?; // all cells are equal to their mean
///     assert_eq!(y.full_tensor().abs().max().into_scalar::<f32>(), 0.0);
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
    require_epsilon("layer_norm_dims", epsilon)?;
    over(
        "layer_norm_dims",
        x,
        dims,
        [weight, bias],
        |x, normalized| {
            if flex::runs_on(&x.device()) {
                by_kernel(x, normalized[0], epsilon)
            } else {
                let mean = mean_dims(x.clone(), normalized)?.resolve();
                by_root_mean_square(x - mean, normalized, epsilon, "layer_norm_dims")
            }
        },
    )
}

/// Divides every sample by its root mean square over the last `dims` dims. The weight is optional,
/// with size one in the other dims. See the [module](super).
///
/// # Errors
/// Errors of [`layer_norm_dims`].
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
    require_epsilon("rms_norm_dims", epsilon)?;
    over("rms_norm_dims", x, dims, [weight, None], |x, normalized| {
        by_root_mean_square(x, normalized, epsilon, "rms_norm_dims")
    })
}

/// Normalizes over the dims from `first` on, as [`group_norm`](super::group_norm) does with one
/// group.
fn by_kernel<const D: usize>(
    x: ShardTensor<D>,
    first: usize,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    // Here, not in a kernel, so that an unknown HALOCLINE_ISA fails before anything is sent.
    Isa::chosen()?;
    let axes = x
        .layout()
        .axes_where(|placement| matches!(placement, Shard(dim) if dim >= first));
    let count: usize = x.dims()[first..].iter().product();
    let (local, layout, mesh) = x.into_parts();
    let held = local.dims();
    let run = Norm::Group(GroupRun {
        extents: Extents {
            batch: held[..first].iter().product(),
            channels: 1,
            cells: held[first..].iter().product(),
            groups: 1,
        },
        count: count as f64,
        epsilon,
        comm: mesh.comm().clone(),
        ranks: mesh.ranks_along(&axes),
        operation: Operation::new("layer_norm_dims", Traffic::Reduce, Some(&layout)),
        together: None,
    });
    let options = (&local.device(), local.dtype());
    let [weight, bias] = [1.0, 0.0].map(|value| Tensor::full([1], value, options));
    let y = Error::catch(|| run.apply(local, weight, bias))?;
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

pub(super) fn by_root_mean_square<const D: usize>(
    x: ShardTensor<D>,
    normalized: &[usize],
    epsilon: f64,
    operator: &'static str,
) -> Result<ShardTensor<D>> {
    let count: usize = normalized.iter().map(|dim| x.dims()[*dim]).product();
    let scale = (count as f64).recip();
    let mean = sum_of_squares(x.clone(), normalized, scale, operator)?.resolve();
    scaled(x, (mean + epsilon).sqrt().recip(), operator)
}

/// Runs a normalization over the last `dims` dims in at least f32, and applies weight and bias.
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
    let placed = |parameter| beside(parameter, &x, first, operator);
    let parameters = [
        weight.map(placed).transpose()?,
        bias.map(placed).transpose()?,
    ];
    let y = in_f32(x, |x| normalize(x, &normalized))?;
    Ok(affine(y, parameters))
}

/// Distributes a parameter as a field is.
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
    distribute_operand(x, parameter)
}
