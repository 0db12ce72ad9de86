//! Losses with a weight per element, such as a mask of valid elements.

use halocline_core::{Error, Result, ShardTensor};

use super::fused::by_kernels;
use super::{Penalty, Reduction, reduced};
use crate::field::{Field, WithDims};
use crate::masked::{apply_mask, require_fit};
use crate::precision::{cast_shard, narrowed, wider};
use crate::reduce::ReduceField;

const NAME: &str = "weighted_loss";

/// Weighted loss, `Σ wᵢ·ℓ(xᵢ − targetᵢ) / Σ wᵢ`, without the division for [`Reduction::Sum`].
/// Semantics follow `weight` of PyTorch's `mse_loss` and `l1_loss`; its `huber_loss` divides by the
/// number of elements instead.
///
/// An element of weight zero has no effect, whatever prediction and target hold there: a NaN
/// reaches neither the loss nor a gradient, although zero times NaN is NaN. If all elements have
/// weight zero, the mean is zero.
///
/// # Shapes
/// `x` and `target` have one shape. `weight` has the same shape, or size one in dims over which it
/// is broadcast: a mask of `[batch, channels, lat, lon]`, a weight per channel
/// `[1, channels, 1, 1]`.
///
/// # Placement
/// As for the [module](super). Dims of the weights are sharded as those of `x`, except dims that
/// are broadcast. A mean sums the weights over all ranks in one small message.
///
/// # Adjoint
/// Adjoint of the loss of each element, times its weight. Weights have no gradient.
///
/// # Errors
/// Fails for fields that do not match, for partial values, for weights with another shape or other
/// shards, and if communication fails.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Penalty, Reduction, weighted_loss};
///
/// let x = Tensor::<1>::from([1.0, 2.0, 4.0]);
/// let target = Tensor::from([2.0, f32::NAN, 1.0]); // the second is missing
/// let mask = Tensor::from([1.0, 0.0, 1.0]);
/// let loss = weighted_loss(x, target, mask, Penalty::Squared, Reduction::Mean)?;
/// assert!((loss.into_scalar::<f32>() - (1.0 + 9.0) / 2.0).abs() < 1e-5);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn weighted_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    weight: X,
    penalty: Penalty,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let (x, target, weight) = (x.into_shard(), target.into_shard(), weight.into_shard());
    let loss = Error::catch(|| {
        let dtype = x.local().dtype();
        let weight = cast_shard(weight.inner(), wider(dtype));
        require_fit(NAME, &weight, &x)?;
        let fields = [x.clone(), target.clone()];
        let loss = match by_kernels(fields, Some(weight.clone()), penalty, reduction)? {
            Some(loss) => loss,
            None => {
                let error = apply_mask(cast_shard(x - target, wider(dtype)), weight.clone())?;
                reduced(penalty.of(error) * weight.clone(), reduction)
            }
        };
        let loss = match reduction {
            Reduction::Sum => loss,
            Reduction::Mean => loss / mean_weight(weight),
        };
        Ok(narrowed(loss, dtype))
    })?;
    loss.map(Field::from_shard)
}

/// Weighted mean, `Σ wᵢ·xᵢ / Σ wᵢ`. Elements of weight zero have no effect; shapes, placements and
/// errors are as for [`weighted_loss`]. If all elements have weight zero, the mean is zero.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::weighted_mean;
///
/// let x = Tensor::<1>::from([1.0, f32::NAN, 4.0]);
/// let mean = weighted_mean(x, Tensor::from([1.0, 0.0, 3.0]))?;
/// assert_eq!(mean.into_scalar::<f32>(), 13.0 / 4.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn weighted_mean<const D: usize, X: Field<D>>(x: X, weight: X) -> Result<WithDims<X, 1>> {
    let (x, weight) = (x.into_shard(), weight.into_shard());
    let found = Error::catch(|| {
        let dtype = x.local().dtype();
        let weight = cast_shard(weight.inner(), wider(dtype));
        let x = apply_mask(cast_shard(x, wider(dtype)), weight.clone())?;
        let mean = ReduceField::mean(x * weight.clone()) / mean_weight(weight);
        Ok(narrowed(mean, dtype))
    })?;
    found.map(Field::from_shard)
}

/// Returns the mean of weights, or one if it is zero.
pub(super) fn mean_weight<const D: usize>(weight: ShardTensor<D>) -> ShardTensor<1> {
    let (local, layout, mesh) = ReduceField::mean(weight).resolve().into_parts();
    let none = local.clone().equal_elem(0.0);
    ShardTensor::from_parts(local.mask_fill(none, 1.0), layout, mesh)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::testing::{Operator, check_op, random};

    const SHAPE: [usize; 4] = [2, 3, 5, 7];

    /// Zero, one and two.
    fn values(shape: [usize; 4]) -> Vec<f32> {
        let count: usize = shape.iter().product();
        (0..count).map(|i| (i * 5 % 7 % 3) as f32).collect()
    }

    fn weights(shape: [usize; 4]) -> TensorData {
        TensorData::new(values(shape), shape)
    }

    struct Weighted(Penalty, Reduction, [usize; 4]);

    impl Operator<4, 1> for Weighted {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> WithDims<X, 1> {
            use crate::rearrange::RearrangeField;
            let Self(penalty, reduction, shape) = *self;
            let (target, x) = (inputs.remove(1), inputs.remove(0));
            let device = x.clone().into_shard().device();
            let weight = Tensor::from_data(weights(shape), &device.inner());
            // Replicated in dims of one cell, else in the shards of `x`.
            let weight = x.distribute_operand(weight);
            weighted_loss(x, target, weight, penalty, reduction).unwrap()
        }
    }

    #[test]
    fn losses_with_weights_on_any_mesh() {
        let penalties = [Penalty::Squared, Penalty::Absolute, Penalty::Huber(0.8)];
        let shapes = [SHAPE, [1, 3, 1, 1], [1, 1, 5, 1]];
        for (penalty, shape) in penalties.into_iter().zip(shapes) {
            for reduction in [Reduction::Mean, Reduction::Sum] {
                let operator = Weighted(penalty, reduction, shape);
                check_op(&operator, &[SHAPE; 2], &[], &[0, 2, 3], 1e-6);
            }
        }
    }

    #[test]
    fn means_in_half_precision_are_resolved() {
        let means = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let field = |values: [f32; 3]| {
                let device = world.device().clone().inner();
                let x = Tensor::<1>::from_data(values, (&device, burn::tensor::DType::BF16));
                ShardTensor::distribute(x, &mesh, &[Shard(0)])
            };
            let mean = weighted_mean(field([1.0, 2.0, 4.0])?, field([1.0, 0.0, 3.0])?)?;
            Ok(mean.to_local().into_scalar::<f32>())
        });
        assert_eq!(means.unwrap(), [3.25; 2]);
    }

    /// Cells of weight zero hold NaN in `x` and target; loss and gradients equal those with zeros
    /// there, and the gradient there is zero.
    #[test]
    fn what_has_no_weight_reaches_neither_loss_nor_gradient() {
        let run = |hole: f32, ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("lat", ranks)])?;
                let shard = |data| {
                    let whole = Tensor::<4>::from_data(data, &world.device().clone().inner());
                    ShardTensor::distribute(whole, &mesh, &[Shard(2)])
                };
                let holed = |name| {
                    let drawn = random(SHAPE, name, 0).into_data();
                    let pairs = drawn.iter::<f32>().zip(values(SHAPE));
                    let holed = pairs.map(|(x, weight)| if weight == 0.0 { hole } else { x });
                    TensorData::new(holed.collect(), SHAPE)
                };
                let x = shard(holed("x"))?.require_grad();
                let target = shard(holed("target"))?;
                let weight = shard(weights(SHAPE))?;
                let (squared, mean) = (Penalty::Squared, Reduction::Mean);
                let loss = weighted_loss(x.clone() * 2.0, target, weight, squared, mean)?;
                let value = loss.clone().resolve().local().clone().into_scalar::<f64>();
                let gradient = x.grad(&loss.backward()).expect("a gradient");
                let gradient = gradient.full_tensor().into_data();
                Ok((value, gradient))
            });
            found.unwrap()
        };
        let (expected, gradient) = run(0.0, 1).remove(0);
        assert!(expected > 0.1);
        for ranks in [1, 3] {
            for (value, found) in run(f32::NAN, ranks) {
                assert!((value - expected).abs() < 1e-6, "{value} for {expected}");
                found.assert_approx_eq::<f32>(&gradient, burn::tensor::Tolerance::absolute(1e-6));
                let cells = found.iter::<f32>().zip(values(SHAPE));
                assert!(
                    cells
                        .into_iter()
                        .all(|(found, weight)| weight > 0.0 || found == 0.0)
                );
            }
        }
    }

    #[test]
    fn a_mean_over_nothing_is_zero() {
        let x = Tensor::<1>::from([f32::NAN, 2.0]);
        let zeros = Tensor::zeros([2], &x.device());
        let (squared, mean) = (Penalty::Squared, Reduction::Mean);
        let loss = weighted_loss(x.clone(), zeros.clone(), zeros, squared, mean).unwrap();
        assert_eq!(loss.into_scalar::<f32>(), 0.0);
    }
}
