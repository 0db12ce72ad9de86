//! Losses between a prediction and a target of the same layout.
//!
//! # Placement
//! The result has shape `[1]` and is `Partial(Sum)` on every axis over which the prediction is
//! sharded: call [`resolve`](Field::resolve) before reading it. `backward()` accepts a partial and
//! a resolved loss.
//!
//! # Arguments
//! The prediction, its target, settings of the loss, and the [`Reduction`]. Losses with a weight per
//! element, such as a mask, are functions of their own, [`weighted_loss`] and
//! [`weighted_difference_loss`], with the weights after the fields and a [`Penalty`] before the
//! reduction. [`binary_cross_entropy_with_logits`] and [`gaussian_nll_loss`] take optional weights
//! after the fields.
//!
//! # Adjoint
//! The derivative of the loss with respect to each cell, on the rank that owns it.

mod cross_entropy;
pub mod differences;
mod fused;
mod golden;
mod likelihood;
mod spectral;
pub mod ssim;
mod weighted;

pub use cross_entropy::{CrossEntropyOptions, cross_entropy, cross_entropy_cells};
pub use differences::{gradient_loss, total_variation, weighted_difference_loss};
pub(crate) use golden::OPERATORS;
pub use likelihood::{
    BinaryCrossEntropyOptions, GaussianNllOptions, binary_cross_entropy_with_logits,
    gaussian_nll_loss,
};
pub use spectral::spectral_loss;
pub use ssim::{SsimOptions, ssim, ssim_loss};
pub use weighted::{weighted_loss, weighted_mean};

use halocline_core::{OrRaise, Result, ShardTensor};

use crate::field::{Field, WithDims};
use crate::precision::highest;
use crate::reduce::ReduceField;
use fused::penalized;

/// Reduction of the losses of elements to one number.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, l1_loss};
///
/// let loss = |reduction| {
///     let (x, target) = (Tensor::<1>::from([1.0, 2.0]), Tensor::from([2.0, 5.0]));
///     l1_loss(x, target, reduction).map(|loss| loss.into_scalar::<f32>())
/// };
/// assert_eq!((loss(Reduction::Mean)?, loss(Reduction::Sum)?), (2.0, 4.0));
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Mean over all elements of the global field.
    #[default]
    Mean,
    /// Sum over all elements of the global field.
    Sum,
}

/// Loss of one element, as a function of its error `e = x − target`.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::Penalty;
///
/// let of = |penalty: Penalty| penalty.of(Tensor::<1>::from([3.0])).into_scalar::<f32>();
/// assert_eq!((of(Penalty::Squared), of(Penalty::Absolute)), (9.0, 3.0));
/// assert_eq!(of(Penalty::Huber(1.0)), 2.5);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Penalty {
    /// `e²`.
    #[default]
    Squared,
    /// `|e|`.
    Absolute,
    /// `½·e²` where `|e| ≤ δ`, else `δ·(|e| − δ/2)`, for this δ (Huber 1964).
    Huber(f64),
}

impl Penalty {
    /// Computes the loss of every element.
    ///
    /// # Panics
    /// [Raises](halocline_core::Error::raise) an error if δ is not positive.
    #[track_caller]
    pub fn of<const D: usize, X: Field<D>>(self, error: X) -> X {
        match self {
            Self::Squared => error.clone() * error,
            Self::Absolute => error.map(|error| error.abs()),
            Self::Huber(delta) => {
                self.check().or_raise();
                error.map(|error| {
                    // An infinite δ times a rest of zero would be NaN.
                    let delta = delta.min(highest(error.dtype()));
                    let size = error.abs();
                    // The quadratic part of an error, and the linear rest.
                    let quadratic = size.clone().clamp_max(delta);
                    let linear = size - quadratic.clone();
                    quadratic.clone() * quadratic * 0.5 + linear * delta
                })
            }
        }
    }
}

fn reduced<const D: usize, X: Field<D>>(losses: X, reduction: Reduction) -> WithDims<X, 1> {
    match reduction {
        Reduction::Mean => losses.mean(),
        Reduction::Sum => losses.sum(),
    }
}

/// Squared error, `(x − target)²`.
///
/// # Errors
/// Fails for fields that do not match, and for partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, mse_loss};
///
/// let x = Tensor::<1>::from([1.0, 2.0, 4.0]);
/// let loss = mse_loss(x, Tensor::from([1.0, 0.0, 3.0]), Reduction::Mean)?;
/// assert!((loss.into_scalar::<f32>() - 5.0 / 3.0).abs() < 1e-6);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn mse_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    penalized(x, target, Penalty::Squared, reduction)
}

/// Absolute error, `|x − target|`.
///
/// # Errors
/// Fails for fields that do not match, and for partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, l1_loss};
///
/// let x = Tensor::<1>::from([1.0, 2.0, 4.0]);
/// let loss = l1_loss(x, Tensor::from([1.0, 0.0, 8.0]), Reduction::Mean)?;
/// assert_eq!(loss.into_scalar::<f32>(), 2.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn l1_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    penalized(x, target, Penalty::Absolute, reduction)
}

/// Huber loss: `½·e²` where `|e| ≤ δ`, else `δ·(|e| − δ/2)`, for `e = x − target` (Huber 1964).
///
/// # Errors
/// Fails for fields that do not match, for partial values, and for a `delta` that is not positive.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Reduction, huber_loss};
///
/// let x = Tensor::<1>::from([1.0, 4.0]);
/// let loss = huber_loss(x, Tensor::from([0.0, 0.0]), 2.0, Reduction::Sum)?;
/// assert_eq!(loss.into_scalar::<f32>(), 0.5 + 6.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn huber_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    delta: f64,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    penalized(x, target, Penalty::Huber(delta), reduction)
}

/// Computes gradients by backpropagation from a loss, plain or sharded.
///
/// # Panics
/// Panics where [`ShardTensor::backward`] does.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_ops::{Reduction, backward, mse_loss};
///
/// let device = Device::default().autodiff();
/// let x = Tensor::<1>::from_floats([1.0, 4.0], &device).require_grad();
/// let target = Tensor::<1>::from_floats([0.0, 1.0], &device);
/// let gradients = backward(mse_loss(x.clone(), target, Reduction::Sum)?);
/// let gradient = x.grad(&gradients).expect("a gradient");
/// gradient.into_data().assert_eq(&[2.0_f32, 6.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn backward<X: Field<1>>(loss: X) -> burn::tensor::Gradients {
    let loss: ShardTensor<1> = loss.into_shard();
    loss.backward()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Operator, check_op, compare, random};
    use burn::tensor::{DType, Int, Tensor, TensorData};
    use halocline_core::{Error, Launcher, Placement, Replicate, Shard};

    struct Huber;

    impl Operator<3, 1> for Huber {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 1> {
            let target = inputs.remove(1);
            huber_loss(inputs.remove(0), target, 0.8, Reduction::Mean).unwrap()
        }
    }

    struct Spectral;

    impl Operator<3, 1> for Spectral {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 1> {
            let target = inputs.remove(1);
            let dims = [1, 2];
            spectral_loss::<4, _, _>(inputs.remove(0), target, &dims, Reduction::Mean).unwrap()
        }
    }

    #[test]
    fn losses_of_amplitudes_over_all_dims() {
        check_op(&Spectral, &[[2, 5, 6], [2, 5, 6]], &[], &[0, 1, 2], 1e-5);
    }

    #[test]
    fn an_infinite_delta_leaves_half_the_square_and_others_are_told() {
        for dtype in [DType::F32, DType::F16] {
            let options = (&Default::default(), dtype);
            let [x, zero] = [3.0, 0.0].map(|value| Tensor::<1>::full([2], value, options));
            let loss = huber_loss(x.clone(), zero, f64::INFINITY, Reduction::Mean);
            let of_errors = Penalty::Huber(1e39).of(x);
            assert_eq!(
                (
                    loss.unwrap().into_scalar::<f32>(),
                    of_errors.max().into_scalar::<f32>()
                ),
                (4.5, 4.5)
            );
        }
        for delta in [0.0, -1.0, f64::NAN] {
            let x = Tensor::<1>::ones([2], &Default::default());
            let error = Error::catch(|| Penalty::Huber(delta).of(x)).unwrap_err();
            assert!(
                error.to_string().contains("expected a positive number"),
                "{error}"
            );
        }
    }

    #[test]
    fn cross_entropy_keeps_its_digits_beside_a_common_offset() {
        let loss_and_gradient = |offset: f32| {
            let device = burn::tensor::Device::default().autodiff();
            let logits = [offset, offset - 1.0, offset - 2.5];
            let x = Tensor::<2>::from_data([logits], &device).require_grad();
            let target = Tensor::<1, Int>::from_data([1], &device);
            let (logits, target) = (ShardTensor::solo(x.clone()), ShardTensor::solo(target));
            let options = CrossEntropyOptions::default();
            let loss = cross_entropy(logits, target, &options, Reduction::Mean).unwrap();
            let gradients = loss.backward();
            let gradient = x.grad(&gradients).unwrap().into_data();
            let loss = loss.local().clone().into_scalar::<f32>();
            [vec![loss], gradient.iter().collect()].concat()
        };
        let expected = loss_and_gradient(0.0);
        for offset in [100.0, 1e4, 1e5] {
            for (found, expected) in loss_and_gradient(offset).iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
            }
        }
    }

    /// One rank holds the target; the others learn of it by the numbers that the mean gathers, or
    /// by a check.
    #[test]
    fn a_target_without_a_class_is_an_error_on_every_rank() {
        let errors = Launcher::local(2).check(true).collect(|world| {
            let mesh = world.mesh([("data", 2)])?;
            let logits = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
            let target = Tensor::<1, Int>::from_ints([0, 2, 1, 7], world.device());
            let target = ShardTensor::distribute(target, &mesh, &[Shard(0)])?;
            let plain = CrossEntropyOptions::default();
            let ignoring = plain.clone().with_ignore_index(9);
            let mean = |options| {
                let (logits, target) = (logits.clone(), target.clone());
                cross_entropy(logits, target, options, Reduction::Mean)
            };
            let refused = [
                mean(&ignoring).map(drop),
                mean(&plain).map(drop),
                cross_entropy_cells(logits.clone(), target.clone(), &plain).map(drop),
            ];
            Ok(refused.map(|refused| refused.unwrap_err().to_string()))
        });
        for error in errors.unwrap().as_flattened() {
            let expected = "target 7 of 3 classes; expected 0 to 2";
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Returns the mean over targets other than −100, and the gradient of the logits.
    fn mean_and_gradient(
        ranks: usize,
        placements: [Placement; 2],
        classes: usize,
        targets: (&[i64], DType),
    ) -> [TensorData; 2] {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let logits = random::<2>([targets.0.len(), classes], "logits", 0).inner();
            let target = Tensor::<1, Int>::from_data(targets.0, (&logits.device(), targets.1));
            let logits = ShardTensor::distribute(logits, &mesh, &[placements[0]])?.require_grad();
            let target = ShardTensor::distribute(target, &mesh, &[placements[1]])?;
            let options = CrossEntropyOptions::default().with_ignore_index(-100);
            let loss = cross_entropy(logits.clone(), target, &options, Reduction::Mean)?;
            let gradient = logits.grad(&loss.backward()).expect("a gradient");
            Ok([
                loss.full_tensor().into_data(),
                gradient.full_tensor().into_data(),
            ])
        });
        found.unwrap().remove(0)
    }

    /// 300 classes and −100 do not fit in eight bits, and one of three ranks has no cells.
    #[test]
    fn targets_may_be_of_any_integer_type() {
        let whole = [Replicate; 2];
        let expected = mean_and_gradient(1, whole, 300, (&[7, 255][..], DType::I64));
        for dtype in [DType::U8, DType::U32, DType::I16] {
            let targets = (&[7, 255][..], dtype);
            for (ranks, placements) in [(1, whole), (3, [Shard(0); 2])] {
                let found = mean_and_gradient(ranks, placements, 300, targets);
                let place = format!("{dtype:?} on {ranks} ranks");
                compare(&found, &expected, 1e-6, &place);
            }
        }
    }

    #[test]
    fn targets_are_ignored_where_classes_are_sharded() {
        let targets = (&[0, -100, 4, 2][..], DType::I64);
        let expected = mean_and_gradient(1, [Replicate; 2], 5, targets);
        for ranks in [2, 3] {
            let found = mean_and_gradient(ranks, [Shard(1), Replicate], 5, targets);
            compare(&found, &expected, 1e-6, &format!("{ranks} ranks"));
        }
    }

    /// The sum of these losses overflows f16.
    #[test]
    fn cross_entropy_of_many_cells_is_exact_in_half_precision() {
        let device = Default::default();
        let logits = Tensor::<4>::zeros([1, 10, 300, 300], (&device, DType::F16));
        let target = Tensor::<3, Int>::zeros([1, 300, 300], &device);
        let (logits, target) = (ShardTensor::solo(logits), ShardTensor::solo(target));
        let loss = cross_entropy(
            logits,
            target,
            &CrossEntropyOptions::default(),
            Reduction::Mean,
        );
        assert!((loss.unwrap().into_scalar::<f64>() - 10.0_f64.ln()).abs() < 1e-3);
    }

    /// The square of the error overflows f16, and kernels do not sum over a target that is
    /// broadcast.
    #[test]
    fn broadcast_targets_are_compared_in_single_precision() {
        let options = (&Default::default(), DType::F16);
        let x = Tensor::<1>::from_data([256.0, 0.0, 0.0, 0.0], options);
        let loss = mse_loss(x, Tensor::<1>::zeros([1], options), Reduction::Mean);
        assert_eq!(loss.unwrap().into_scalar::<f32>(), 16384.0);
    }

    #[test]
    fn fields_that_do_not_match_are_an_error() {
        let [x, target] = [2, 3].map(|size| Tensor::<1>::ones([size], &Default::default()));
        let error = mse_loss(x, target, Reduction::Mean)
            .unwrap_err()
            .to_string();
        assert!(error.contains("do not broadcast"), "{error}");
    }

    #[test]
    fn losses_over_all_dims() {
        check_op(&Huber, &[[2, 5, 6], [2, 5, 6]], &[], &[0, 1, 2], 1e-6);
    }
}
