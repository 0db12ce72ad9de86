//! Losses on the differences between neighbouring cells: total variation and gradient matching.
//!
//! `∂x = x[i + 1] − x[i]` along a dim. With [`Boundary::Periodic`] a dim wraps around, as longitude
//! does; with [`Boundary::Replicate`] it ends after `n − 1` differences.
//!
//! # Placement
//! All dims may be sharded; as for every loss, the result is partial.
//!
//! # Communication
//! One cell per line along each sharded dim, forward and backward; also of weights that vary along
//! the dim, forward. A mean with weights sums them over all ranks in one small message per dim.

use halocline_core::{Boundary, Error, Result};

use super::fused::penalized;
use super::weighted::weighted_loss;
use super::{Penalty, Reduction};
use crate::field::{Field, WithDims};
use crate::masked::apply_mask;
use crate::rearrange::RearrangeField;

const NAME: &str = "differences";

/// Total variation: absolute differences along dims, summed over the dims (L. Rudin et al.,
/// "Nonlinear total variation based noise removal algorithms", 1992, in its anisotropic form).
///
/// A mean is taken over the differences of each dim before summing over dims.
///
/// # Errors
/// Fails for an empty list of dims, a dim that does not exist, another boundary, and partial values,
/// and if communication fails.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::Boundary;
/// use halocline_ops::{Reduction, total_variation};
///
/// let x = Tensor::<2>::from([[1.0, 4.0, 2.0]]);
/// let of = |boundary| {
///     let loss = total_variation(x.clone(), &[(1, boundary)], Reduction::Sum)?;
///     Ok::<f32, halocline_core::Error>(loss.into_scalar())
/// };
/// assert_eq!((of(Boundary::Replicate)?, of(Boundary::Periodic)?), (5.0, 6.0));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn total_variation<const D: usize, X: Field<D>>(
    x: X,
    dims: &[(usize, Boundary)],
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    of_differences(x, None, dims, Penalty::Absolute, reduction)
}

/// Gradient matching: squared error of the differences along dims, summed over the dims; the
/// derivative term of Sobolev training (W. Czarnecki et al. 2017). It compares the edges of fields
/// and ignores offsets. For the absolute error of differences, use [`total_variation`] of
/// `x − target`.
///
/// Means are as for [`total_variation`].
///
/// # Errors
/// Fails where [`total_variation`] does, and if `x` and `target` do not match.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::Boundary;
/// use halocline_ops::{Reduction, gradient_loss};
///
/// let (x, target) = (Tensor::<1>::from([1.0, 4.0, 2.0]), Tensor::from([0.0, 1.0, 2.0]));
/// let loss = gradient_loss(x, target, &[(0, Boundary::Replicate)], Reduction::Mean)?;
/// assert_eq!(loss.into_scalar::<f32>(), (2.0 * 2.0 + 3.0 * 3.0) / 2.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn gradient_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    dims: &[(usize, Boundary)],
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let error = Error::catch(|| x - target)?;
    of_differences(error, None, dims, Penalty::Squared, reduction)
}

/// Weighted penalties of the differences of `x` along dims, summed over the dims:
/// [`total_variation`] with [`Penalty::Absolute`], and with [`Penalty::Squared`] and a prediction
/// minus its target [`gradient_loss`], each with a weight per cell, such as a mask.
///
/// Weights multiply the penalties, and a mean divides by their sum, as for [`weighted_loss`]; they
/// have the shape of `x`, or size one in dims in which they do not vary. The weight of cell `i`
/// applies to the difference between `i` and `i + 1`, which has no effect if one of the two cells
/// has weight zero, whatever `x` holds there. Weights have no gradient.
///
/// # Errors
/// Fails where [`total_variation`] does, and for weights that do not match.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::Boundary;
/// use halocline_ops::{Penalty, Reduction, weighted_difference_loss};
///
/// let x = Tensor::<1>::from([1.0, f32::NAN, 4.0, 6.0]);
/// let mask = Tensor::from([1.0, 0.0, 1.0, 1.0]);
/// let dims = [(0, Boundary::Replicate)];
/// let loss = weighted_difference_loss(x, mask, &dims, Penalty::Squared, Reduction::Mean)?;
/// assert_eq!(loss.into_scalar::<f32>(), 4.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn weighted_difference_loss<const D: usize, X: Field<D>>(
    x: X,
    weight: X,
    dims: &[(usize, Boundary)],
    penalty: Penalty,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    of_differences(x, Some(weight), dims, penalty, reduction)
}

fn of_differences<const D: usize, X: Field<D>>(
    x: X,
    weights: Option<X>,
    dims: &[(usize, Boundary)],
    penalty: Penalty,
    reduction: Reduction,
) -> Result<WithDims<X, 1>> {
    let shape = x.dims();
    let along = |&(dim, boundary): &(usize, Boundary)| -> Result<WithDims<X, 1>> {
        if !matches!(boundary, Boundary::Periodic | Boundary::Replicate) {
            let message =
                format!("boundary {boundary:?} of dim {dim}; expected Periodic or Replicate");
            return Err(Error::operator(NAME, message));
        }
        let next = x.clone().shift(dim, -1, boundary);
        let varies = weights
            .as_ref()
            .is_some_and(|weights| weights.dims()[dim] > 1);
        let loss = match weights.clone() {
            None => penalized(next, x.clone(), penalty, reduction)?,
            Some(mut weights) => {
                if varies {
                    weights = weights_of_differences(weights, dim, boundary)?;
                }
                weighted_loss(next, x.clone(), weights, penalty, reduction)?
            }
        };
        match reduction {
            Reduction::Sum => Ok(loss),
            Reduction::Mean => {
                // Weights that vary along the dim are zero after the last difference.
                let last = usize::from(boundary == Boundary::Replicate && !varies);
                let size = shape[dim];
                Ok(loss * (size as f64 / size.saturating_sub(last).max(1) as f64))
            }
        }
    };
    Error::catch(|| {
        let terms = dims.iter().map(along);
        let sum = terms.reduce(|sum, term| Ok(sum? + term?));
        sum.unwrap_or_else(|| Err(Error::operator(NAME, "no dims; expected at least one")))
    })?
}

/// Returns the weights of the differences along a dim: the weight of the first cell, or zero if a
/// cell of the pair has weight zero, and after the last cell of a dim that ends.
fn weights_of_differences<const D: usize, X: Field<D>>(
    weights: X,
    dim: usize,
    boundary: Boundary,
) -> Result<X> {
    let mut next = weights.clone().shift(dim, -1, boundary);
    if boundary == Boundary::Replicate {
        let size = weights.dims()[dim];
        let mut inside = vec![1.0; size];
        inside[size - 1] = 0.0;
        next = next * weights.profile(dim, &inside);
    }
    apply_mask(weights, next)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{FloatDType, Tensor, TensorData};

    use super::*;
    use crate::testing::{Operator, check_op};

    const SHAPE: [usize; 3] = [2, 5, 7];
    const DIMS: [(usize, Boundary); 2] = [(1, Boundary::Replicate), (2, Boundary::Periodic)];

    struct Losses;

    impl Operator<3, 1> for Losses {
        fn apply<X: Field<3>>(&self, inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 1> {
            let [x, target] = [0, 1].map(|input: usize| inputs[input].clone());
            // Zero, one and two.
            let weights = (0..SHAPE.iter().product()).map(|i: usize| (i * 5 % 7 % 3) as f32);
            let weights = TensorData::new(weights.collect::<Vec<_>>(), SHAPE);
            let device = x.clone().into_shard().device();
            let weights = x.distribute_operand(Tensor::from_data(weights, &device.inner()));
            let mean = Reduction::Mean;
            let variation = total_variation(x.clone(), &DIMS, mean).unwrap();
            let error = x - target;
            let matching = weighted_difference_loss(error, weights, &DIMS, Penalty::Squared, mean);
            variation + matching.unwrap()
        }
    }

    #[test]
    fn differences_cross_shards() {
        check_op(&Losses, &[SHAPE; 2], &[], &[0, 1, 2], 1e-5);
    }

    #[test]
    fn squares_beyond_f16_are_no_loss() {
        let cast = |x: Tensor<1>| x.cast(FloatDType::F16);
        let x = cast(Tensor::from_floats([300.0; 1], &Default::default()));
        let x = Tensor::cat(vec![x, cast(Tensor::zeros([100], &Default::default()))], 0);
        let (ones, dims) = (x.ones_like(), [(0, Boundary::Replicate)]);
        let loss = weighted_difference_loss(x, ones, &dims, Penalty::Squared, Reduction::Mean);
        assert!((loss.unwrap().into_scalar::<f32>() - 900.0).abs() < 2.0);
    }

    #[test]
    fn weights_may_vary_along_one_dim() {
        let x = Tensor::<2>::from([[1.0, 4.0], [2.0, 2.0]]);
        let weights = x.profile(0, &[1.0, 10.0]);
        let dims = [(1, Boundary::Periodic)];
        let loss = weighted_difference_loss(x, weights, &dims, Penalty::Absolute, Reduction::Sum);
        assert_eq!(loss.unwrap().into_scalar::<f32>(), 6.0);
    }

    #[test]
    fn cells_of_weight_zero_have_no_effect_and_means_divide_by_the_weights() {
        let x = Tensor::<1>::from([1.0, f32::NAN, 4.0, 6.0]);
        let weights = Tensor::from([1.0, 0.0, 2.0, 5.0]);
        let dims = [(0, Boundary::Replicate)];
        let loss = weighted_difference_loss(x, weights, &dims, Penalty::Absolute, Reduction::Mean);
        assert_eq!(loss.unwrap().into_scalar::<f32>(), 2.0);
    }

    #[test]
    fn wrong_arguments_are_errors() {
        let x = || Tensor::<1>::ones([3], &Default::default());
        let refused = |dims: &[(usize, Boundary)]| {
            let loss = total_variation(x(), dims, Reduction::Sum);
            loss.unwrap_err().to_string()
        };
        let error = refused(&[(0, Boundary::Reflect)]);
        assert!(
            error.contains("boundary Reflect of dim 0; expected Periodic or Replicate"),
            "{error}"
        );
        let error = refused(&[]);
        assert!(error.contains("expected at least one"), "{error}");
        let weights = Tensor::<1>::ones([2], &Default::default());
        let dims = [(0, Boundary::Periodic)];
        let loss = weighted_difference_loss(x(), weights, &dims, Penalty::Squared, Reduction::Sum);
        let error = loss.unwrap_err().to_string();
        assert!(error.contains("expected the field's shape"), "{error}");
    }

    #[test]
    fn one_cell_has_no_differences() {
        let x = Tensor::<2>::ones([3, 1], &Default::default());
        let loss = total_variation(x, &[(1, Boundary::Replicate)], Reduction::Mean);
        assert_eq!(loss.unwrap().into_scalar::<f32>(), 0.0);
    }
}
