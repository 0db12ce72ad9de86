//! Group, instance, batch, layer and RMS normalization, and that of weights.
//!
//! `y = (x − mean) / √(variance + epsilon) · weight + bias`, with the variance of the population.
//! Semantics follow PyTorch.
//!
//! - [`group_norm`]: mean and variance over the cells of the field and the channels of a group, per
//!   sample. With as many groups as channels it is instance normalization.
//! - [`layer_norm`]: mean and variance over the last dim.
//! - [`layer_norm_dims`]: mean and variance over several last dims.
//! - [`batch_norm_train`], [`batch_norm`], [`weight_norm`]: on their own pages.
//! - [`rms_norm`]: `y = x / √(mean(x²) + epsilon) · weight`, with the mean over the last dim.
//!
//! # Placement
//! `group_norm`: batch and spatial dims may be sharded, channels must be whole. `layer_norm` and
//! `rms_norm`: all dims but the last may be sharded. `layer_norm_dims`: all. Values must be
//! resolved.
//!
//! # Communication
//! `group_norm` gathers count, mean and sum of squared deviations, per sample and group, from the
//! ranks that hold the sample's cells, and combines them in the order of ranks; in the backward
//! pass, two sums. `layer_norm` and `rms_norm` send nothing. `layer_norm_dims` reduces two means,
//! and in the backward pass two sums, over the ranks that share a sample.
//!
//! # Adjoint
//! Gradients of weight and bias are summed over all ranks between which `x` is sharded.

pub mod batch;
mod composed;
mod dims;
mod golden;
mod kernel;
mod layer;
mod node;
#[cfg(test)]
mod tests;
pub mod weight;

pub use batch::{BatchStatistics, batch_norm, batch_norm_train};
pub use dims::layer_norm_dims;
pub(crate) use golden::OPERATORS;
pub(crate) use layer::layer_norm_of;
use layer::rms_norm_of;
pub use weight::weight_norm;

use burn::nn::{LayerNorm, RmsNorm};
use burn::tensor::Tensor;
use halocline_core::ops::{all_reduce, fan_out};
use halocline_core::{Error, Operation, ReduceOp, Result, Shard, ShardTensor, Traffic};

use crate::driver::empty::{drop_empty, fill_empty};
use crate::field::{Field, run};
use crate::kernel::flex;
use crate::kernel::simd::Isa;
use crate::operand::Operand;
use kernel::group::Extents;
use kernel::layer::RowNorm;
use node::{GroupRun, Norm};

/// Normalizes every group of channels of every sample. See the [module](self).
///
/// # Errors
/// Groups that do not divide the channels, parameters of another size, a placement without a rule,
/// a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::norm::group_norm;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([2, 4, 5], &mesh, &[Shard(2)])?;
///     let y = group_norm(x, 2, None, None, 1e-5)?; // all cells are equal to their mean
///     assert_eq!(y.full_tensor(LocalGradient::Replicated).abs().max().into_scalar::<f32>(), 0.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn group_norm<const D: usize>(
    x: ShardTensor<D>,
    groups: usize,
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    let kernels = flex::runs_on(&x.device());
    grouped(x, groups, [weight, bias], epsilon, kernels)
}

/// Normalization as methods.
pub trait NormField<const D: usize>: Field<D> {
    /// Group normalization. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`group_norm`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let x = Tensor::<3>::from([[[1.0, 3.0], [10.0, 30.0]]]);
    /// let y = x.group_norm(2, None, None, 0.0); // a group for each channel
    /// y.into_data().assert_eq(&[[[-1.0_f32, 1.0], [-1.0, 1.0]]].into(), true);
    /// ```
    #[must_use]
    fn group_norm(
        self,
        groups: usize,
        weight: Option<Operand<1>>,
        bias: Option<Operand<1>>,
        epsilon: f64,
    ) -> Self {
        run(self, |x| group_norm(x, groups, weight, bias, epsilon))
    }

    /// Layer normalization over the last dim. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`layer_norm`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let y = Tensor::<2>::from([[1.0, 3.0], [10.0, 30.0]]).layer_norm(None, None, 0.0);
    /// y.into_data().assert_eq(&[[-1.0_f32, 1.0], [-1.0, 1.0]].into(), true);
    /// ```
    #[must_use]
    fn layer_norm(
        self,
        weight: Option<Operand<1>>,
        bias: Option<Operand<1>>,
        epsilon: f64,
    ) -> Self {
        run(self, |x| layer_norm(x, weight, bias, epsilon))
    }

    /// Layer normalization over the last `dims` dims. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`layer_norm_dims`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let y = Tensor::<2>::from([[1.0, 3.0], [3.0, 1.0]]).layer_norm_dims(2, None, None, 0.0);
    /// y.into_data().assert_eq(&[[-1.0_f32, 1.0], [1.0, -1.0]].into(), true);
    /// ```
    #[must_use]
    fn layer_norm_dims(
        self,
        dims: usize,
        weight: Option<Operand<D>>,
        bias: Option<Operand<D>>,
        epsilon: f64,
    ) -> Self {
        run(self, |x| layer_norm_dims(x, dims, weight, bias, epsilon))
    }

    /// RMS normalization over the last dim. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`rms_norm`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let y = Tensor::<2>::from([[3.0, 3.0]]).rms_norm(None, 0.0);
    /// y.into_data().assert_eq(&[[1.0_f32, 1.0]].into(), true);
    /// ```
    #[must_use]
    fn rms_norm(self, weight: Option<Operand<1>>, epsilon: f64) -> Self {
        run(self, |x| rms_norm(x, weight, epsilon))
    }

    /// Batch normalization by the statistics of this batch, without them. See
    /// [`batch_norm_train`](fn@batch_norm_train).
    ///
    /// # Panics
    /// Panics where [`batch_norm_train`](fn@batch_norm_train) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let y = Tensor::<2>::from([[1.0, 10.0], [3.0, 30.0]]).batch_norm(None, None, 0.0);
    /// y.into_data().assert_eq(&[[-1.0_f32, -1.0], [1.0, 1.0]].into(), true);
    /// ```
    #[must_use]
    fn batch_norm(
        self,
        weight: Option<Operand<1>>,
        bias: Option<Operand<1>>,
        epsilon: f64,
    ) -> Self {
        run(self, |x| Ok(batch_norm_train(x, weight, bias, epsilon)?.0))
    }

    /// Weights of these directions and of the lengths `g`. See [`weight_norm`](fn@weight_norm).
    ///
    /// # Panics
    /// Panics where [`weight_norm`](fn@weight_norm) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let w = Tensor::<2>::from([[3.0, 4.0]]).weight_norm(Tensor::<2>::from([[10.0]]), 0);
    /// w.into_data().assert_eq(&[[6.0_f32, 8.0]].into(), true);
    /// ```
    #[must_use]
    fn weight_norm(self, g: impl Into<Operand<D>>, dim: usize) -> Self {
        run(self, |x| weight_norm(x, g, dim))
    }

    /// burn's layer normalization, in models that are generic over the tensor.
    ///
    /// # Panics
    /// Panics where [`layer_norm`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LayerNormConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let norm = LayerNormConfig::new(2).init(&Default::default());
    /// let y = Tensor::<2>::from([[3.0, 3.0]]).apply_layer_norm(&norm);
    /// y.into_data().assert_eq(&[[0.0_f32, 0.0]].into(), true);
    /// ```
    #[must_use]
    fn apply_layer_norm(self, layer: &LayerNorm) -> Self {
        layer_norm_of(layer, self)
    }

    /// burn's root mean square normalization, in models that are generic over the tensor.
    ///
    /// # Panics
    /// Panics where [`rms_norm`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::nn::RmsNormConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let norm = RmsNormConfig::new(2).init(&Default::default());
    /// let y = Tensor::<2>::from([[0.0, 0.0]]).apply_rms_norm(&norm);
    /// y.into_data().assert_eq(&[[0.0_f32, 0.0]].into(), true);
    /// ```
    #[must_use]
    fn apply_rms_norm(self, layer: &RmsNorm) -> Self {
        rms_norm_of(layer, self)
    }
}

impl<const D: usize, X: Field<D>> NormField<D> for X {}

/// [`group_norm`] by our kernels, or by burn's operators.
fn grouped<const D: usize>(
    x: ShardTensor<D>,
    groups: usize,
    parameters: [Option<Operand<1>>; 2],
    epsilon: f64,
    kernels: bool,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "group_norm";
    x.require_resolved(NAME)?;
    if D < 2 || groups == 0 || !x.dims()[1].is_multiple_of(groups) {
        let message = format!(
            "{groups} groups of {:?}; expected [batch, groups·n, ..]",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    x.require_whole(NAME, 1)?;
    // Here, not in a kernel: an unknown HALOCLINE_ISA is an error before anything is sent.
    Isa::chosen()?;
    let [weight, bias] = complete(&x, 1, parameters, NAME)?;
    let axes = x
        .layout()
        .axes_where(|placement| matches!(placement, Shard(dim) if dim >= 2));
    let global: usize = x.dims()[2..].iter().product();
    let (local, layout, mesh) = x.into_parts();
    let held = local.dims();
    let extents = |held: [usize; D]| Extents {
        batch: held[0],
        channels: held[1],
        cells: held[2..].iter().product(),
        groups,
    };
    let count = (global * held[1] / groups) as f64;
    let operation = Operation::new(NAME, Traffic::Reduce, Some(&layout));
    let y = if kernels {
        let run = Norm::Group(GroupRun {
            extents: extents(held),
            count,
            epsilon,
            comm: mesh.comm().clone(),
            ranks: mesh.ranks_along(&axes),
            operation,
            together: None,
        });
        Error::catch(|| run.apply(local, weight, bias))?
    } else {
        let all: Vec<usize> = (0..D).collect();
        let filled = fill_empty(local, &layout, &all, NAME, 0.0)?;
        let (extents, present) = (extents(filled.dims()), !held.contains(&0));
        let sum = |part| {
            let sum = all_reduce(part, &mesh, &axes, ReduceOp::Sum, operation.clone());
            fan_out(sum, &mesh, &axes, NAME)
        };
        let parameters = [weight, bias];
        let y = Error::catch(|| {
            composed::group_norm(filled, parameters, extents, count, epsilon, present, sum)
        })?;
        drop_empty(y, &layout, mesh.position(), NAME)?
    };
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Normalizes over the last dim. See the [module](self).
///
/// # Errors
/// Parameters of another size, a placement without a rule.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::norm::layer_norm;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 3.0]]));
/// let scale = Tensor::<1>::from([5.0, 5.0]);
/// let y = layer_norm(x, Some(scale.into()), None, 0.0)?;
/// y.into_parts().0.into_data().assert_eq(&[[-5.0_f32, 5.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn layer_norm<const D: usize>(
    x: ShardTensor<D>,
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    rows(x, "layer_norm", RowNorm::Layer { epsilon }, [weight, bias])
}

/// Divides by the root of the mean square over the last dim. See the [module](self).
///
/// # Errors
/// Those of [`layer_norm`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::norm::rms_norm;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 7.0]])); // the mean square is 25
/// let y = rms_norm(x, None, 0.0)?;
/// y.into_parts().0.into_data().assert_eq(&[[0.2_f32, 1.4]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rms_norm<const D: usize>(
    x: ShardTensor<D>,
    weight: Option<Operand<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    rows(x, "rms_norm", RowNorm::Rms { epsilon }, [weight, None])
}

/// Normalizes every row of the last dim.
fn rows<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    norm: RowNorm,
    parameters: [Option<Operand<1>>; 2],
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    x.require_whole(operator, D - 1)?;
    // As in `grouped`: before anything is sent.
    Isa::chosen()?;
    let [weight, bias] = complete(&x, D - 1, parameters, operator)?;
    let (local, layout, mesh) = x.into_parts();
    let y = if flex::runs_on(&local.device()) {
        Norm::Rows(norm).apply(local, weight, bias)
    } else {
        let outer: Vec<usize> = (0..D - 1).collect();
        let filled = fill_empty(local, &layout, &outer, operator, 0.0)?;
        let y = composed::rows(norm, filled, [weight, bias]);
        drop_empty(y, &layout, mesh.position(), operator)?
    };
    Ok(ShardTensor::from_parts(y, layout, mesh))
}

/// Weight and bias with the size of a dim, for kernels on the shards of `x`; by default ones and
/// zeros.
fn complete<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    [weight, bias]: [Option<Operand<1>>; 2],
    operator: &'static str,
) -> Result<[Tensor<1>; 2]> {
    let size = x.dims()[dim];
    let constant = |value: f64| Tensor::full([size], value, (&x.device(), x.local().dtype()));
    let parameter = |parameter: Option<Operand<1>>, default: f64| match parameter {
        None => Ok(constant(default)),
        Some(parameter) if parameter.dims() == [size] => parameter.whole_beside(x, operator),
        Some(parameter) => {
            let message = format!("a parameter {:?} for {size} elements", parameter.dims());
            Err(Error::operator(operator, message))
        }
    };
    Ok([parameter(weight, 1.0)?, parameter(bias, 0.0)?])
}
