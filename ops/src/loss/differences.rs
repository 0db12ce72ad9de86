//! Losses on the differences between neighbouring cells: total variation and gradient matching.
//!
//! `∂x = x[i + 1] − x[i]` along a dim. With [`Boundary::Periodic`] a dim wraps around, as longitude
//! does; with [`Boundary::Replicate`] it ends after `n − 1` differences.
//!
//! # Placement
//! All dims may be sharded; as for every loss, the result is partial.
//!
//! # Communication
//! One cell per line along each sharded dim, forward and backward.

use halocline_core::{Boundary, Error};

use super::fused::penalized;
use super::{Penalty, Reduction, reduced};
use crate::field::{Field, WithDims};
use crate::precision::{cast_shard, narrowed, wider};
use crate::rearrange::RearrangeField;

/// Total variation: absolute differences along dims, summed over the dims (L. Rudin et al.,
/// "Nonlinear total variation based noise removal algorithms", 1992, in its anisotropic form).
///
/// A mean is taken over the differences of each dim before summing over dims. `weights` multiply
/// the differences; they have the shape of `x`, or size one in dims in which they do not vary. The
/// weight of cell `i` applies to the difference between `i` and `i + 1`.
///
/// # Panics
/// Panics for an empty list of dims, a dim that does not exist, another boundary, weights that do
/// not match, and partial values; [raises](halocline_core::Error::raise) communication failures.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::Boundary;
/// use halocline_ops::{Reduction, total_variation};
///
/// let x = Tensor::<2>::from([[1.0, 4.0, 2.0]]);
/// let of = |boundary| {
///     let loss = total_variation(x.clone(), &[(1, boundary)], None, Reduction::Sum);
///     loss.into_scalar::<f32>()
/// };
/// assert_eq!((of(Boundary::Replicate), of(Boundary::Periodic)), (5.0, 6.0));
/// ```
#[track_caller]
pub fn total_variation<const D: usize, X: Field<D>>(
    x: X,
    dims: &[(usize, Boundary)],
    weights: Option<X>,
    reduction: Reduction,
) -> WithDims<X, 1> {
    of_differences(x, dims, weights, reduction, Penalty::Absolute)
}

/// Gradient matching: squared error of the differences along dims, summed over the dims; the
/// derivative term of Sobolev training (W. Czarnecki et al. 2017). It compares the edges of fields
/// and ignores offsets. For the absolute error of differences, use [`total_variation`] of
/// `x − target`.
///
/// Means and weights are as for [`total_variation`].
///
/// # Panics
/// Panics where [`total_variation`] does, and if `x` and `target` do not match.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::Boundary;
/// use halocline_ops::{Reduction, gradient_loss};
///
/// let (x, target) = (Tensor::<1>::from([1.0, 4.0, 2.0]), Tensor::from([0.0, 1.0, 2.0]));
/// let loss = gradient_loss(x, target, &[(0, Boundary::Replicate)], None, Reduction::Mean);
/// assert_eq!(loss.into_scalar::<f32>(), (2.0 * 2.0 + 3.0 * 3.0) / 2.0);
/// ```
#[track_caller]
pub fn gradient_loss<const D: usize, X: Field<D>>(
    x: X,
    target: X,
    dims: &[(usize, Boundary)],
    weights: Option<X>,
    reduction: Reduction,
) -> WithDims<X, 1> {
    of_differences(x - target, dims, weights, reduction, Penalty::Squared)
}

#[track_caller]
fn of_differences<const D: usize, X: Field<D>>(
    x: X,
    dims: &[(usize, Boundary)],
    weights: Option<X>,
    reduction: Reduction,
    penalty: Penalty,
) -> WithDims<X, 1> {
    let (shape, dtype) = (x.dims(), x.dtype());
    let wide = |x: X| X::from_shard(cast_shard(x.into_shard(), wider(dtype)));
    let along = |&(dim, boundary): &(usize, Boundary)| {
        if !matches!(boundary, Boundary::Periodic | Boundary::Replicate) {
            let message =
                format!("boundary {boundary:?} of dim {dim}; expected Periodic or Replicate");
            Error::operator("differences", message).raise();
        }
        let next = x.clone().shift(dim, -1, boundary);
        let loss = match &weights {
            Some(weights) => {
                let [difference, weights] = [next - x.clone(), weights.clone()].map(wide);
                let losses = reduced(penalty.of(difference) * weights, reduction);
                Field::from_shard(narrowed(losses.into_shard(), dtype))
            }
            None => penalized(next, x.clone(), penalty, reduction),
        };
        match reduction {
            Reduction::Sum => loss,
            Reduction::Mean => {
                let (size, last) = (shape[dim], usize::from(boundary == Boundary::Replicate));
                loss * (size as f64 / size.saturating_sub(last).max(1) as f64)
            }
        }
    };
    let sums = dims.iter().map(along);
    sums.reduce(|sum, term| sum + term)
        .expect("a dim along which there are differences")
}

#[cfg(test)]
mod tests {
    use burn::tensor::{FloatDType, Tensor};

    use super::*;
    use crate::testing::{Operator, check_op};

    const DIMS: [(usize, Boundary); 2] = [(1, Boundary::Replicate), (2, Boundary::Periodic)];

    struct Losses;

    impl Operator<3, 1> for Losses {
        fn apply<X: Field<3>>(&self, inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 1> {
            let [x, target, weights] = [0, 1, 2].map(|input: usize| inputs[input].clone());
            let variation = total_variation(x.clone(), &DIMS, None, Reduction::Mean);
            variation + gradient_loss(x, target, &DIMS, Some(weights.square()), Reduction::Sum)
        }
    }

    #[test]
    fn differences_cross_shards() {
        check_op(&Losses, &[[2, 5, 7]; 3], &[], &[0, 1, 2], 1e-5);
    }

    #[test]
    fn squares_beyond_f16_are_no_loss() {
        let cast = |x: Tensor<1>| x.cast(FloatDType::F16);
        let x = cast(Tensor::from_floats([300.0; 1], &Default::default()));
        let x = Tensor::cat(vec![x, cast(Tensor::zeros([100], &Default::default()))], 0);
        let [zeros, ones] = [x.zeros_like(), x.ones_like()];
        let dims = [(0, Boundary::Replicate)];
        let loss = gradient_loss(x, zeros, &dims, Some(ones), Reduction::Mean);
        assert!((loss.into_scalar::<f32>() - 900.0).abs() < 2.0);
    }

    #[test]
    fn weights_may_vary_along_one_dim() {
        let x = Tensor::<2>::from([[1.0, 4.0], [2.0, 2.0]]);
        let weights = x.profile(0, &[1.0, 10.0]);
        let dims = [(1, Boundary::Periodic)];
        let loss = total_variation(x, &dims, Some(weights), Reduction::Sum);
        assert_eq!(loss.into_scalar::<f32>(), 6.0);
    }

    #[test]
    #[should_panic(expected = "boundary Reflect of dim 0; expected Periodic or Replicate")]
    fn other_boundaries_have_no_differences() {
        let x = Tensor::<1>::ones([3], &Default::default());
        total_variation(x, &[(0, Boundary::Reflect)], None, Reduction::Sum);
    }

    #[test]
    fn one_cell_has_no_differences() {
        let x = Tensor::<2>::ones([3, 1], &Default::default());
        let loss = total_variation(x, &[(1, Boundary::Replicate)], None, Reduction::Mean);
        assert_eq!(loss.into_scalar::<f32>(), 0.0);
    }
}
