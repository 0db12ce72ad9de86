//! Mean squared error with weights of latitude rows.

use halocline_core::{Error, Result};
use halocline_ops::prelude::*;

use crate::precision::{narrowed, wide};

/// Weighted mean squared error, `Σ wᵢ·(xᵢ − targetᵢ)² / Σ wᵢ`, of `[batch, channels, lat, lon]`
/// with one weight per latitude row. As with [`weighted_loss`], rows of weight zero have no effect,
/// whatever they hold; if all weights are zero, so is the loss.
///
/// Like every loss, the result is `Partial(Sum)` on the axes on which `x` is sharded, and resolved
/// in half precision, which is summed in f32.
///
/// # Errors
/// The number of weights is not that of the rows; `x` and `target` do not match.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_models::weighted_mse;
///
/// let x = Tensor::<4>::from([[[[1.0], [f32::NAN], [3.0]]]]);
/// let loss = weighted_mse(x.clone(), x.zeros_like(), &[1.0, 0.0, 3.0])?;
/// assert_eq!(loss.into_scalar::<f32>(), (1.0 + 3.0 * 9.0) / 4.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn weighted_mse<X: Field<4>>(x: X, target: X, weights: &[f64]) -> Result<WithDims<X, 1>> {
    let (dtype, [batch, channels, _, columns]) = (x.dtype(), x.dims());
    let [x, target] = [wide(x)?, wide(target)?];
    let rows = Error::catch(|| x.profile(2, weights))?;
    let sum = weighted_loss(x, target, rows, Penalty::Squared, Reduction::Sum)?;
    let total = weights.iter().sum::<f64>() * (batch * channels * columns) as f64;
    let total = if total == 0.0 { 1.0 } else { total };
    Error::catch(|| narrowed(sum / total, dtype))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Tensor};

    use super::*;

    /// The squares of these errors overflow f16.
    #[test]
    fn large_errors_have_a_loss_in_half_precision() {
        let options = (&Default::default(), DType::F16);
        let [x, zero] = [256.0, 0.0].map(|value| Tensor::<4>::full([1, 1, 1, 3], value, options));
        let x = Tensor::cat(vec![x, zero], 2);
        let loss = weighted_mse(x.clone(), x.zeros_like(), &[0.25, 0.75]).unwrap();
        assert_eq!(loss.into_scalar::<f32>(), 16384.0);
    }

    #[test]
    fn only_ratios_of_weights_matter() {
        let x = Tensor::<4>::from([[[[1.0, 2.0], [f32::NAN, 0.0], [3.0, 4.0]]]]);
        for scale in [0.5, 4.0] {
            let weights = [1.0, 0.0, 3.0].map(|weight| weight * scale);
            let loss = weighted_mse(x.clone(), x.zeros_like(), &weights).unwrap();
            assert_eq!(loss.into_scalar::<f32>(), 10.0); // (1 + 4 + 3 · (9 + 16)) / 8
        }
        let error = weighted_mse(x.clone(), x, &[1.0, 1.0]).unwrap_err();
        assert!(
            error.to_string().contains("2 values along dim 2"),
            "{error}"
        );
    }
}
