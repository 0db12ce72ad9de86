//! Group, instance, layer and RMS normalization.
//!
//! `y = (x − mean) / √(variance + epsilon) · weight + bias`, with the variance of the population.
//! Semantics follow PyTorch.
//!
//! - [`group_norm`]: mean and variance over the cells of the field and the channels of a group, per
//!   sample. With as many groups as channels it is instance normalization.
//! - [`layer_norm`]: mean and variance over the last dim.
//! - [`layer_norm_dims`]: mean and variance over several last dims.
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

mod composed;
mod dims;
mod golden;
mod kernel;
mod layer;
mod node;

pub use dims::layer_norm_dims;
pub(crate) use golden::OPERATORS;
pub(crate) use layer::layer_norm_of;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, difference};
    use burn::nn::{GroupNormConfig, InstanceNormConfig, LayerNormConfig, RmsNormConfig};
    use burn::tensor::DType;
    use halocline_core::Launcher;

    struct Group(usize);

    /// [`Group`] by burn's operators.
    struct Composed(usize);

    impl<const D: usize> Operator<D, D> for Composed {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X {
            let parameters =
                [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, D - 1).into()));
            let x = inputs.remove(0).into_shard();
            X::from_shard(grouped(x, self.0, parameters, 1e-5, false).unwrap())
        }
    }

    impl<const D: usize> Operator<D, D> for Group {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X {
            let [weight, bias] =
                [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, D - 1).into()));
            inputs.remove(0).group_norm(self.0, weight, bias, 1e-5)
        }
    }

    struct LastTwo;

    impl Operator<3, 3> for LastTwo {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
            let [weight, bias] = [0, 1].map(|i| Some(parameters[i].clone().into()));
            inputs.remove(0).layer_norm_dims(2, weight, bias, 1e-5)
        }
    }

    #[test]
    fn several_dims_may_be_sharded() {
        let (x, parameters) = ([[2, 5, 7]], [[1, 5, 7]; 2]);
        check_op(&LastTwo, &x, &parameters, &[0, 1, 2], 2e-5);
    }

    struct Rms;

    impl Operator<3, 3> for Rms {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<3>>) -> X {
            let weight = parameters[0].clone().flatten::<1>(0, 2);
            inputs.remove(0).rms_norm(Some(weight.into()), 1e-5)
        }
    }

    #[test]
    fn rows_have_their_own_mean_square() {
        check_op(&Rms, &[[5, 7, 6]], &[[1, 1, 6]], &[0, 1], 2e-5);
    }

    struct Layer;

    impl<const D: usize> Operator<D, D> for Layer {
        fn apply<X: Field<D>>(&self, mut inputs: Vec<X>, parameters: Vec<Tensor<D>>) -> X {
            let [weight, bias] =
                [0, 1].map(|i| Some(parameters[i].clone().flatten::<1>(0, D - 1).into()));
            inputs.remove(0).layer_norm(weight, bias, 1e-5)
        }
    }

    #[test]
    fn groups_span_the_shards() {
        let parameters = [[1, 6, 1, 1]; 2];
        for groups in [1, 3, 6] {
            check_op(
                &Group(groups),
                &[[2, 6, 5, 7]],
                &parameters,
                &[0, 2, 3],
                2e-5,
            );
            check_op(
                &Composed(groups),
                &[[2, 6, 5, 7]],
                &parameters,
                &[0, 2, 3],
                2e-5,
            );
        }
        check_op(&Group(2), &[[2, 4, 11]], &[[1, 4, 1]; 2], &[0, 2], 2e-5);
    }

    #[test]
    fn the_last_dim_is_normalized_without_a_message() {
        check_op(
            &Layer,
            &[[2, 5, 7, 6]],
            &[[1, 1, 1, 6]; 2],
            &[0, 1, 2],
            2e-5,
        );
    }

    #[test]
    fn modules_of_burn_give_what_they_give_there() {
        let device = Default::default();
        let normal = burn::tensor::Distribution::Normal(3.0, 2.0);
        let x = Tensor::<4>::random([2, 6, 9, 11], normal, &device);
        let group = GroupNormConfig::new(3, 6).init(&device);
        let instance = InstanceNormConfig::new(6).init(&device);
        let layer = LayerNormConfig::new(11).with_epsilon(0.3).init(&device);
        let rms = RmsNormConfig::new(11).with_epsilon(0.3).init(&device);
        let pairs = [
            (x.clone().apply(&layer), layer.forward(x.clone())),
            (x.clone().apply(&rms), rms.forward(x.clone())),
            (x.clone().apply(&group), group.forward(x.clone())),
            (x.clone().apply(&instance), instance.forward(x.clone())),
        ];
        for (ours, burns) in pairs {
            assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-5);
        }
    }

    #[test]
    fn kernels_and_burns_operators_agree() {
        let device = Default::default();
        let normal = burn::tensor::Distribution::Normal(3.0, 2.0);
        let x = Tensor::<3>::random([2, 6, 9], normal, &device);
        let factors = |size| Tensor::<1>::random([size], normal, &device);
        let parameters = [factors(6), factors(6)];
        let grouped = |kernels| {
            let parameters = parameters.clone().map(|own| Some(own.into()));
            let x = ShardTensor::solo(x.clone());
            let y = grouped(x, 3, parameters, 1e-5, kernels).unwrap();
            y.into_parts().0.into_data()
        };
        assert!(difference(&grouped(true), &grouped(false)) < 1e-5);
        let [weight, bias] = [factors(9), factors(9)];
        let burns = composed::rows(
            RowNorm::Layer { epsilon: 1e-5 },
            x.clone(),
            [weight.clone(), bias.clone()],
        );
        let ours = x.layer_norm(Some(weight.into()), Some(bias.into()), 1e-5);
        assert!(difference(&ours.into_data(), &burns.into_data()) < 1e-5);
    }

    #[test]
    fn a_large_mean_costs_no_digits() {
        let wave = |offset: f64| {
            let x = Tensor::<1>::ones([4096], &Default::default()).cumsum(0);
            let x = (x * 0.37).sin() + offset;
            x.reshape([1, 2, 32, 64]).group_norm(1, None, None, 0.0)
        };
        // Cells of a thousand have a rounding error of 3e-5 themselves.
        let difference = difference(&wave(1000.0).into_data(), &wave(0.0).into_data());
        assert!(difference < 1e-4, "{difference}");
    }

    #[test]
    fn misuse_is_told() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("model", 2)])?;
                let x = ShardTensor::<4>::ones([1, 4, 6, 6], &mesh, &[Shard(1)])?;
                let error = group_norm(x.clone(), 2, None, None, 1e-5).unwrap_err();
                assert!(
                    error.to_string().contains("no rule for Shard(1)"),
                    "{error}"
                );
                let error = group_norm(x.clone(), 3, None, None, 1e-5).unwrap_err();
                assert!(
                    error.to_string().contains("3 groups of [1, 4, 6, 6]"),
                    "{error}"
                );
                let bias = Some(Tensor::<1>::ones([5], world.device()).into());
                let error = layer_norm(x.clone(), None, bias, 1e-5).unwrap_err();
                assert!(
                    error.to_string().contains("a parameter [5] for 6 elements"),
                    "{error}"
                );
                let options = (world.device(), DType::F64);
                let weight = Some(Tensor::<1>::ones([6], options).into());
                let error = layer_norm(x, weight, None, 1e-5).unwrap_err().to_string();
                assert!(
                    error.contains("a parameter of F64 for a tensor of F32"),
                    "{error}"
                );
                Ok(())
            })
            .unwrap();
    }
}
