//! Variance and standard deviation.
//!
//! `Σ (x − mean)² / (n − correction)` over dims: the population variance for a correction of 0, the
//! unbiased estimate for 1. Deviations are from the mean over all ranks, so nothing cancels, and
//! are squared in at least f32. Semantics follow PyTorch's `var` and `std`.
//!
//! # Shapes
//! Reduced dims keep one cell each.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. A mesh axis that shards a reduced dim leaves
//! the variance as a partial sum, which in bf16 and f16 is resolved at once; the standard deviation
//! is always resolved.
//!
//! # Communication
//! If a reduced dim is sharded, the mean is summed over ranks, and for the standard deviation the
//! variance as well. The backward pass sends nothing.
//!
//! # Adjoint
//! `2 (x − mean) / (n − correction)` times the cotangent; for the standard deviation half of that
//! divided by the standard deviation, and zero where it is zero.

use halocline_core::{Error, Result, ShardTensor};

use super::root::root;
use super::{mean_dims, over, squares};
use crate::constant;
use crate::driver::place::require_dims;
use crate::golden::{Case, Golden, output, reduced, with_dims};
use crate::precision::{cast_shard, in_f32, narrowed, wider};

/// Computes the variance over `dims`. See the [module](self).
///
/// # Errors
/// A dim that does not exist or is repeated; no more cells than the correction; partial values; a
/// failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::reduce::var_dims;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::full([5], 1e6, &mesh, &[Shard(0)])?;
///     let y = var_dims(x, &[0], 1.0)?.resolve().to_local();
///     assert_eq!(y.into_scalar::<f32>(), 0.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn var_dims<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    correction: f64,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "var_dims";
    require_dims::<D>(NAME, dims)?;
    x.require_resolved(NAME)?;
    let count: usize = dims.iter().map(|&dim| x.dims()[dim]).product();
    let free = count as f64 - correction;
    if free.is_nan() || free <= 0.0 {
        let message = format!("{count} cells with a correction of {correction}; expected more");
        return Err(Error::operator(NAME, message));
    }
    let dtype = x.local().dtype();
    let x = cast_shard(x, wider(dtype));
    // The deviations sum to zero, so the gradient through the mean is zero.
    let mean = mean_dims(constant(&x), dims)?.resolve();
    let variance = over(NAME, x, dims, |local, dims| {
        squares(local, Some(mean.into_local()), dims, free.recip())
    })?;
    Ok(narrowed(variance, dtype))
}

/// Computes the standard deviation over `dims`. See the [module](self).
///
/// # Errors
/// The errors of [`var_dims`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::std_dims;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 5.0], [2.0, 2.0]]));
/// let y = std_dims(x, &[1], 0.0)?;
/// y.local().to_data().assert_eq(&[[2.0_f32], [0.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn std_dims<const D: usize>(
    x: ShardTensor<D>,
    dims: &[usize],
    correction: f64,
) -> Result<ShardTensor<D>> {
    in_f32(x, |x| {
        Ok(root(var_dims(x, dims, correction)?.resolve(), 2.0))
    })
}

/// Registry entries of variance and standard deviation.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("var", |case| {
        let (dims, correction) = arguments(case);
        with_dims!(case.dims(), D => {
            reduced(case, &dims, output(var_dims(case.input::<D>(0)?, &dims, correction)))
        })
    })
    .with_method("var_dims")
    .with_travels(["a mean (the result is partial)", "–"]),
    Golden::new("std", |case| {
        let (dims, correction) = arguments(case);
        with_dims!(case.dims(), D => {
            reduced(case, &dims, output(std_dims(case.input::<D>(0)?, &dims, correction)))
        })
    })
    .with_method("std_dims")
    .with_travels(["a mean and a variance", "–"]),
];

fn arguments(case: &Case) -> (Vec<usize>, f64) {
    let correction = case.attributes.number("correction").unwrap_or(1.0);
    (case.attributes.dims("dims", case.dims()), correction)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Deviation(f64);

    impl Operator<3, 3> for Deviation {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).std_dims(&[0, 2], self.0)
        }
    }

    #[test]
    fn reduced_dims_may_be_sharded() {
        for correction in [0.0, 1.0] {
            check_op(&Deviation(correction), &[[2, 5, 7]], &[], &[0, 1, 2], 1e-5);
        }
    }

    /// `E[x²] − E[x]²` would cancel.
    #[test]
    fn a_small_variance_around_a_large_mean_is_exact() {
        let x = Tensor::<1>::from([10_000.0, 10_001.0, 10_002.0, 10_003.0]);
        let y = x.var_dims(&[0], 0.0).into_scalar::<f32>();
        assert!((y - 1.25).abs() < 1e-6, "{y}");
    }

    #[test]
    fn too_few_cells_are_an_error() {
        let x = ShardTensor::solo(Tensor::<1>::from([1.0]));
        let error = var_dims(x, &[0], 1.0).unwrap_err().to_string();
        assert!(error.contains("1 cells with a correction of 1"), "{error}");
    }
}
