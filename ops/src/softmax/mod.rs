//! Softmax, log-softmax and log-sum-exp.
//!
//! `softmax(x)[i] = exp(x[i]) / Σ_j exp(x[j])` over the cells `j` of a dim, computed from
//! `x − max(x)`. Semantics follow PyTorch.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. The result has the layout of `x`; `logsumexp`
//! keeps one cell of the dim, which every rank then holds.
//!
//! # Communication
//! None if the dim is whole. Otherwise maxima and sums are reduced over the ranks that share it,
//! forward and backward.

mod kernel;
mod node;
mod ranges;

use halocline_core::{ReduceOp, Result, ShardTensor};

use crate::constant;
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::require_dim;
use crate::field::{Field, run};
use crate::golden::{Golden, output, reduced, with_dims};
use crate::precision::{highest, in_f32};
use crate::reduce::{but_at_zero, extremum_dims, sum_dims};
use kernel::Kind;
use node::Exponentials;
pub(crate) use ranges::{backward_of_ranges, forward_of_ranges};

/// Computes the softmax along a dim. See the [module](self).
///
/// # Errors
/// A dim that does not exist; partial values; a sharded dim without cells.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::softmax::softmax;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let x = ShardTensor::<2>::ones([3, 4], &mesh, &[Shard(1)])?;
///     let y = softmax(x, 1)?.full_tensor();
///     assert_eq!(y.into_data().iter::<f32>().next(), Some(0.25));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn softmax<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "softmax";
    if is_whole(&x, dim, NAME)? {
        return local(x, NAME, Kind::Softmax, dim);
    }
    in_f32(x, |x| {
        let shifted = shifted(x, dim)?;
        let exponentials = shifted.exp();
        let sum = sum_dims(exponentials.clone(), &[dim])?.resolve();
        Ok(exponentials / sum)
    })
}

/// Computes the logarithm of the softmax along a dim, accurate also where the softmax is close to
/// zero. See the [module](self).
///
/// # Errors
/// The errors of [`softmax`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::softmax::log_softmax;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([0.0, 200.0]));
/// let y = log_softmax(x, 0)?.into_local();
/// y.into_data().assert_eq(&[-200.0_f32, 0.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn log_softmax<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "log_softmax";
    if is_whole(&x, dim, NAME)? {
        return local(x, NAME, Kind::LogSoftmax, dim);
    }
    in_f32(x, |x| {
        let shifted = shifted(x, dim)?;
        let sum = sum_dims(shifted.clone().exp(), &[dim])?.resolve();
        Ok(shifted - sum.log())
    })
}

/// Computes the logarithm of the sum of exponentials along a dim, which keeps one cell. See the
/// [module](self).
///
/// # Errors
/// A dim that does not exist or has no cells; partial values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::softmax::logsumexp;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([1000.0, 1000.0]));
/// let y = logsumexp(x, 0)?.into_local().into_scalar::<f32>();
/// assert_eq!(y, 1000.0 + 2.0_f32.ln());
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn logsumexp<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "logsumexp";
    if is_whole(&x, dim, NAME)? && x.dims()[dim] > 0 {
        return local(x, NAME, Kind::LogSumExp, dim);
    }
    in_f32(x, |x| {
        // An infinite shift would turn an infinite result into NaN; any value near the largest
        // number serves.
        let limit = highest(x.local().dtype());
        let most = largest(&x, dim)?.clamp(-limit, limit);
        let sum = sum_dims((x - most.clone()).exp(), &[dim])?.resolve();
        // A line whose sum is zero gets no gradient.
        let (local, layout, mesh) = sum.into_parts();
        let log = but_at_zero(local, f64::NEG_INFINITY, |sum| sum.log());
        Ok(ShardTensor::from_parts(log, layout, mesh) + most)
    })
}

/// Returns whether a dim is whole; checks that it exists and that values are resolved.
fn is_whole<const D: usize>(x: &ShardTensor<D>, dim: usize, operator: &str) -> Result<bool> {
    x.require_resolved(operator)?;
    require_dim(operator, x, dim)?;
    Ok(!x.layout().is_sharded(dim))
}

/// Applies a function along a whole dim of each shard.
fn local<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    kind: Kind,
    dim: usize,
) -> Result<ShardTensor<D>> {
    let (local, layout, mesh) = x.into_parts();
    let y = Exponentials { kind, dim }.run(fill_all(local, &layout, operator, 0.0)?);
    let layout = match kind {
        Kind::LogSumExp => layout.resized(dim, vec![1]),
        _ => layout,
    };
    without_fill(y, layout, mesh, operator)
}

/// Subtracts the maximum along a dim. The shift cancels from every result, hence from gradients.
fn shifted<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    let most = largest(&x, dim)?;
    Ok(x - most)
}

/// Computes the maximum along a dim, without gradient.
fn largest<const D: usize>(x: &ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    extremum_dims(constant(x), &[dim], ReduceOp::Max)
}

/// Softmax as methods.
pub trait SoftmaxField<const D: usize>: Field<D> {
    /// Computes the softmax along a dim. See the [module](self).
    ///
    /// # Panics
    /// Panics where [`softmax`](fn@softmax) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::SoftmaxField;
    ///
    /// let y = Tensor::<1>::from([3.0, 3.0]).softmax(0);
    /// y.into_data().assert_eq(&[0.5_f32, 0.5].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn softmax(self, dim: usize) -> Self {
        run(self, |x| softmax(x, dim))
    }

    /// Computes the logarithm of the softmax along a dim. See [`log_softmax`](fn@log_softmax).
    ///
    /// # Panics
    /// Panics where [`log_softmax`](fn@log_softmax) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::SoftmaxField;
    ///
    /// let y = Tensor::<1>::from([3.0]).log_softmax(0);
    /// assert_eq!(y.into_scalar::<f32>(), 0.0);
    /// ```
    #[must_use]
    #[track_caller]
    fn log_softmax(self, dim: usize) -> Self {
        run(self, |x| log_softmax(x, dim))
    }

    /// Computes the logarithm of the sum of exponentials along a dim, which keeps one cell. See
    /// [`logsumexp`](fn@logsumexp).
    ///
    /// # Panics
    /// Panics where [`logsumexp`](fn@logsumexp) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::SoftmaxField;
    ///
    /// let y = Tensor::<1>::from([3.0]).logsumexp(0);
    /// assert_eq!(y.into_scalar::<f32>(), 3.0);
    /// ```
    #[must_use]
    #[track_caller]
    fn logsumexp(self, dim: usize) -> Self {
        run(self, |x| logsumexp(x, dim))
    }
}

impl<const D: usize, X: Field<D>> SoftmaxField<D> for X {}

/// Registry entries of softmax and related functions.
pub(crate) const OPERATORS: &[Golden] = &[
    Golden::new("softmax", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(softmax(case.input::<D>(0)?, dim))
        })
    })
    .with_travels(["maxima and sums, if the dim is sharded", "sums, if it is"]),
    Golden::new("logsumexp", |case| {
        let dims = case.attributes.dims("dims", case.dims());
        with_dims!(case.dims(), D => {
            let x = case.input::<D>(0)?;
            reduced(case, &dims, output(dims.iter().try_fold(x, |x, dim| logsumexp(x, *dim))))
        })
    })
    .with_travels(["maxima and sums, if the dim is sharded", "sums, if it is"]),
    Golden::new("log_softmax", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(log_softmax(case.input::<D>(0)?, dim))
        })
    })
    .with_travels(["maxima and sums, if the dim is sharded", "sums, if it is"]),
];

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::testing::{Operator, check_op};

    #[test]
    fn lines_of_minus_infinity_have_no_gradient_on_any_ranks() {
        for ranks in 1..3 {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let x = Tensor::<1>::full([4], f64::NEG_INFINITY, world.device());
                let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?.require_grad();
                let y = logsumexp(x.clone(), 0)?;
                let value = y.local().clone().into_scalar::<f32>();
                let gradient = x.grad(&y.backward()).expect("a gradient");
                Ok((value, gradient.into_local().into_data()))
            });
            for (value, gradient) in found.unwrap() {
                assert_eq!(value, f32::NEG_INFINITY);
                assert!(
                    gradient.iter::<f32>().all(|cell| cell == 0.0),
                    "{ranks} ranks"
                );
            }
        }
    }

    struct Along(Kind);

    impl Operator<3, 3> for Along {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            let x = inputs.remove(0) * 30.0; // its exponentials overflow
            match self.0 {
                Kind::Softmax => x.softmax(1),
                Kind::LogSoftmax => x.log_softmax(1),
                Kind::LogSumExp => x.logsumexp(1),
            }
        }
    }

    #[test]
    fn any_dim_may_be_sharded() {
        for kind in [Kind::Softmax, Kind::LogSoftmax, Kind::LogSumExp] {
            check_op(&Along(kind), &[[2, 7, 5]], &[], &[0, 1, 2], 1e-5);
        }
    }

    #[test]
    fn infinite_values_give_infinite_results() {
        let logsumexp = |values: [f32; 2]| {
            let x = Tensor::<1>::from_floats(values, &Default::default());
            x.logsumexp(0).into_scalar::<f32>()
        };
        assert_eq!(logsumexp([f32::NEG_INFINITY; 2]), f32::NEG_INFINITY);
        assert_eq!(logsumexp([1.0, f32::INFINITY]), f32::INFINITY);
    }

    #[test]
    fn logarithms_of_sums_reach_beyond_f32_in_f64() {
        for value in [1e300, -1e300] {
            let found = Launcher::local(2).collect(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let options = (world.device(), burn::tensor::DType::F64);
                let x = Tensor::<1>::full([2], value, options);
                let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
                let y = logsumexp(x, 0)?.full_tensor();
                Ok(y.into_scalar::<f64>())
            });
            assert_eq!(found.unwrap(), [value; 2]);
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let error = softmax(x, 2).unwrap_err().to_string();
        assert!(error.contains("dim 2 of [3, 4]"), "{error}");
    }
}
