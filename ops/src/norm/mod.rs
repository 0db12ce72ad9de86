//! Group, instance, batch, layer, RMS, local response and weight normalization.
//!
//! `y = (x − mean) / √(variance + epsilon) · weight + bias`, with the population variance.
//! Semantics follow PyTorch.
//!
//! - [`group_norm`]: mean and variance over the cells of the field and the channels of a group, per
//!   sample. With as many groups as channels this is instance normalization.
//! - [`layer_norm`]: mean and variance over the last dim.
//! - [`layer_norm_dims`]: mean and variance over several last dims.
//! - [`batch_norm_train`], [`batch_norm`], [`local_response_norm`], [`weight_norm`]: on their own
//!   pages.
//! - [`rms_norm`]: `y = x / √(mean(x²) + epsilon) · weight`, with the mean over the last dim.
//! - [`rms_norm_dims`]: the same, with the mean over several last dims.
//!
//! # Placement
//! All dims may be sharded. Weight and bias are replicated, or sharded like their dim of `x`.
//! Values must be resolved.
//!
//! # Communication
//! `group_norm` gathers count, mean and sum of squared deviations, per sample and group, from the
//! ranks that hold the group's cells, and combines them in rank order; in the backward pass, two
//! sums. Where shards cut groups of several channels, it reduces a mean and a variance per group
//! instead. `layer_norm` gathers and combines the same for each row if the last dim is sharded;
//! `rms_norm` reduces one mean per row, and one in the backward pass. If the last dim is not
//! sharded, neither sends anything. `layer_norm_dims` communicates as `group_norm` among the ranks
//! that share a sample; on devices without our kernels it reduces two means, and two sums in the
//! backward pass. `rms_norm_dims` reduces one of each.
//!
//! # Adjoint
//! Gradients of weight and bias are summed over all ranks over which `x` is sharded.

pub mod batch;
mod composed;
mod cut;
mod dims;
mod golden;
mod grouped;
mod kernel;
mod layer;
pub mod local_response;
mod node;
mod parameter;
#[cfg(test)]
mod tests;
pub mod weight;

pub use batch::{BatchStatistics, batch_norm, batch_norm_train};
use dims::by_root_mean_square;
pub use dims::{layer_norm_dims, rms_norm_dims};
pub(crate) use golden::OPERATORS;
pub(crate) use kernel::moments::Moments;
pub(crate) use layer::layer_norm_of;
pub use local_response::local_response_norm;
pub use weight::weight_norm;

use burn::nn::LocalResponseNormConfig;
use halocline_core::{Error, Result, ShardTensor};

use crate::driver::empty::{drop_empty, fill_empty};
use crate::field::{Field, run};
use crate::kernel::flex;
use crate::kernel::simd::Isa;
use crate::operand::Operand;
use crate::precision::in_f32;
use grouped::{Grouped, grouped};
use kernel::group::Extents;
use kernel::layer::RowNorm;
use node::Norm;
use parameter::{affine, both_along, factors};

/// Normalizes every group of channels of every sample. See the [module](self).
///
/// # Errors
/// Fails for a tensor without channels, for groups that do not divide the channels, for parameters
/// of another size, for a negative ε, for a placement without a rule, and if communication fails.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::norm::group_norm;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([2, 4, 5], &mesh, &[Shard(2)])?;
///     let y = group_norm(x, 2, None, None, 1e-5)?; // all cells are equal to their mean
///     assert_eq!(y.full_tensor().abs().max().into_scalar::<f32>(), 0.0);
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

/// Methods for normalization.
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
    #[track_caller]
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
    #[track_caller]
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
    #[track_caller]
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
    #[track_caller]
    fn rms_norm(self, weight: Option<Operand<1>>, epsilon: f64) -> Self {
        run(self, |x| rms_norm(x, weight, epsilon))
    }

    /// RMS normalization over the last `dims` dims. See [`rms_norm_dims`](fn@rms_norm_dims).
    ///
    /// # Panics
    /// Panics where [`rms_norm_dims`](fn@rms_norm_dims) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let y = Tensor::<2>::from([[3.0], [-3.0]]).rms_norm_dims(2, None, 0.0);
    /// y.into_data().assert_eq(&[[1.0_f32], [-1.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn rms_norm_dims(self, dims: usize, weight: Option<Operand<D>>, epsilon: f64) -> Self {
        run(self, |x| rms_norm_dims(x, dims, weight, epsilon))
    }

    /// Batch normalization by the statistics of this batch, which are not returned. See
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
    #[track_caller]
    fn batch_norm(
        self,
        weight: Option<Operand<1>>,
        bias: Option<Operand<1>>,
        epsilon: f64,
    ) -> Self {
        run(self, |x| Ok(batch_norm_train(x, weight, bias, epsilon)?.0))
    }

    /// Local response normalization across channels. See
    /// [`local_response_norm`](fn@local_response_norm).
    ///
    /// # Panics
    /// Panics where [`local_response_norm`](fn@local_response_norm) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LocalResponseNormConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_ops::NormField;
    ///
    /// let config = LocalResponseNormConfig::new(1).with_alpha(1.0).with_beta(0.5);
    /// let y = Tensor::<3>::from([[[0.0], [1.0]]]).local_response_norm(&config); // x / √(1 + x²)
    /// let expected = [[[0.0_f32], [0.5_f32.sqrt()]]];
    /// y.into_data().assert_approx_eq::<f32>(&expected.into(), Default::default());
    /// ```
    #[must_use]
    #[track_caller]
    fn local_response_norm(self, config: &LocalResponseNormConfig) -> Self {
        run(self, |x| local_response_norm(x, config))
    }

    /// Weight normalization: `self` holds the directions, `g` the lengths. See
    /// [`weight_norm`](fn@weight_norm).
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
    #[track_caller]
    fn weight_norm(self, g: impl Into<Operand<D>>, dim: impl Into<Option<usize>>) -> Self {
        run(self, |x| weight_norm(x, g, dim))
    }
}

impl<const D: usize, X: Field<D>> NormField<D> for X {}

/// Normalizes over the last dim. See the [module](self).
///
/// # Errors
/// Fails for parameters of another size, for a negative ε, and for a placement without a rule.
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
/// y.into_local().into_data().assert_eq(&[[-5.0_f32, 5.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn layer_norm<const D: usize>(
    x: ShardTensor<D>,
    weight: Option<Operand<1>>,
    bias: Option<Operand<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    let kernels = flex::runs_on(&x.device());
    rows(
        x,
        "layer_norm",
        RowNorm::Layer { epsilon },
        [weight, bias],
        kernels,
    )
}

/// Divides by the root mean square over the last dim. See the [module](self).
///
/// # Errors
/// Errors of [`layer_norm`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::norm::rms_norm;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 7.0]])); // the mean square is 25
/// let y = rms_norm(x, None, 0.0)?;
/// y.into_local().into_data().assert_eq(&[[0.2_f32, 1.4]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn rms_norm<const D: usize>(
    x: ShardTensor<D>,
    weight: Option<Operand<1>>,
    epsilon: f64,
) -> Result<ShardTensor<D>> {
    let kernels = flex::runs_on(&x.device());
    rows(
        x,
        "rms_norm",
        RowNorm::Rms { epsilon },
        [weight, None],
        kernels,
    )
}

/// Refuses an ε that could lead to roots of negative numbers.
pub(crate) fn require_epsilon(operator: &str, epsilon: f64) -> Result<()> {
    if epsilon >= 0.0 {
        Ok(())
    } else {
        let message = format!("epsilon {epsilon}; expected a number from zero on");
        Err(Error::operator(operator, message))
    }
}

/// Normalizes every row along the last dim.
fn rows<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    norm: RowNorm,
    parameters: [Option<Operand<1>>; 2],
    kernels: bool,
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    let (RowNorm::Layer { epsilon } | RowNorm::Rms { epsilon }) = norm;
    require_epsilon(operator, epsilon)?;
    if x.layout().is_sharded(D - 1) {
        return match norm {
            RowNorm::Layer { .. } => {
                let run = Grouped {
                    operator,
                    dim: D - 1,
                    axes: x.layout().axes_of(D - 1),
                    count: x.dims()[D - 1],
                    // A row is a sample with one group; each of its elements is a channel.
                    extents: |held: [usize; D]| Extents {
                        batch: held[..D - 1].iter().product(),
                        channels: held[D - 1],
                        cells: 1,
                        groups: 1,
                    },
                };
                run.apply(x, parameters, epsilon, kernels)
            }
            RowNorm::Rms { .. } => {
                let parameters = both_along(&x, D - 1, parameters, operator)?;
                let y = in_f32(x, |x| by_root_mean_square(x, &[D - 1], epsilon, operator))?;
                Ok(affine(y, parameters))
            }
        };
    }
    // As in `Grouped::apply`: before anything is sent.
    Isa::chosen()?;
    let [weight, bias] = factors(&x, D - 1, parameters, operator)?;
    let (local, layout, mesh) = x.into_parts();
    let y = if kernels {
        Norm::Rows(norm).apply(local, weight, bias)
    } else {
        let outer: Vec<usize> = (0..D - 1).collect();
        let filled = fill_empty(local, &layout, &outer, operator, 0.0)?;
        let y = composed::rows(norm, filled, [weight, bias]);
        drop_empty(y, &layout, mesh.position(), operator)?
    };
    Ok(ShardTensor::from_parts(y, layout, mesh))
}
