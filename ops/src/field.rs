use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Range, Sub};

use burn::tensor::Tensor;
use halocline_core::{Boundary, ReduceOp, Result, ShardTensor};

use crate::Apply;
use crate::activation::Activation;
use crate::conv::{self, ConvOptions};
use crate::local::LocalOperator;
use crate::pool::{self, PoolOptions};
use crate::{matmul, norm, reduce, resample, reshape};

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $f:expr;)*) => {
        $($(#[$doc])*
        #[must_use]
        fn $name(self $(, $argument: $type)*) -> Self {
            Self::same_rank(self.into_shard().$name($($argument),*))
        })*
    };
}

/// A tensor on one device or on many: what model code is written for.
///
/// Implemented for burn's [`Tensor<D>`] and for [`ShardTensor<D>`], with the same results. On a `Tensor` nothing is
/// communicated and [`resolve`](Field::resolve) is the identity.
///
/// Methods panic where their operator has no rule, as burn's do on shapes that do not fit. The functions that they call
/// return the typed error instead: `x.try_op(|x| conv(x, weight, bias, &options))` with [`conv`](crate::conv::conv).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::Field;
///
/// fn energy<X: Field<2>>(x: X) -> X::Rank<1> {
///     (x.clone() * x).mean().resolve()
/// }
///
/// Launcher::local(2).run(|world| {
///     let cells = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], world.device());
///     let mesh = world.mesh([("lat", 2)])?;
///     let sharded = ShardTensor::distribute(cells.clone(), &mesh, &[Shard(0)])?;
///     let on_two = energy(sharded).to_local(LocalGradient::Replicated);
///     assert_eq!(on_two.into_scalar::<f32>(), energy(cells).into_scalar::<f32>());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub trait Field<const D: usize>:
    Apply
    + Clone
    + Debug
    + Sized
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Add<f64, Output = Self>
    + Sub<f64, Output = Self>
    + Mul<f64, Output = Self>
    + Div<f64, Output = Self>
{
    /// The same kind of tensor with another number of dims.
    type Rank<const E: usize>: Field<E>;

    /// This tensor as a sharded one; a plain tensor becomes one of a single rank.
    fn into_shard(self) -> ShardTensor<D>;

    /// The inverse of [`into_shard`](Field::into_shard), for the result of an operator on it.
    fn from_shard<const E: usize>(shard: ShardTensor<E>) -> Self::Rank<E>;

    /// [`from_shard`](Field::from_shard) for the same number of dims.
    fn same_rank(shard: ShardTensor<D>) -> Self;

    /// The global shape.
    fn global_dims(&self) -> [usize; D];

    /// A tensor that every rank holds alike, beside this one. With checks on
    /// ([`Settings::check`](halocline_core::Settings::check)) ranks compare a hash of it.
    fn beside<const E: usize>(&self, tensor: Tensor<E>) -> Self::Rank<E> {
        Self::from_shard(self.clone().into_shard().replicate_beside(tensor))
    }

    /// [`beside`](Field::beside) for the same number of dims.
    #[must_use]
    fn beside_same(&self, tensor: Tensor<D>) -> Self {
        Self::same_rank(self.clone().into_shard().replicate_beside(tensor))
    }

    /// Runs an operator of one's own on either kind of tensor.
    ///
    /// # Errors
    /// Those of the operator.
    fn try_op<const E: usize>(
        self,
        operator: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<E>>,
    ) -> Result<Self::Rank<E>> {
        operator(self.into_shard()).map(Self::from_shard)
    }

    /// Applies an elementwise closure, on one device as on many.
    ///
    /// What it gives for a cell must depend on the value of that cell alone. Parameters and what varies by cell are
    /// operands: `x * x.beside_same(scale)`.
    ///
    /// # Panics
    /// Panics where [`ShardTensor::map_local`] does: if `f` changes the shape or captures a tensor with gradients; with
    /// checks on, if what it gives for a cell depends on other cells or on the cell's place.
    #[must_use]
    fn map(self, f: impl Fn(Tensor<D>) -> Tensor<D>) -> Self {
        Self::same_rank(self.into_shard().map_local(f))
    }

    /// Partial values made whole.
    #[must_use]
    fn resolve(self) -> Self {
        Self::same_rank(self.into_shard().resolve())
    }

    /// This tensor with the shards of another one, whose whole dims may have other sizes.
    #[must_use]
    fn align_to(self, other: &Self) -> Self {
        let other = other.clone().into_shard();
        same(self, |x| reshape::align(x, &other))
    }

    /// Convolution with weights that all ranks hold alike. See the [module](crate::conv).
    #[must_use]
    fn conv<const N: usize>(
        self,
        weight: Tensor<D>,
        bias: Option<Tensor<1>>,
        options: &ConvOptions<N>,
    ) -> Self {
        same(self, |x| conv::conv(x, weight, bias, options))
    }

    /// The maximum over windows. See the [module](crate::pool).
    #[must_use]
    fn max_pool<const N: usize>(self, options: &PoolOptions<N>) -> Self {
        same(self, |x| pool::max_pool(x, options))
    }

    /// The average over windows. See the [module](crate::pool).
    #[must_use]
    fn avg_pool<const N: usize>(self, options: &PoolOptions<N>) -> Self {
        same(self, |x| pool::avg_pool(x, options))
    }

    /// The sum over dims, which stay with one cell. See the [module](crate::reduce).
    #[must_use]
    fn sum_over(self, dims: &[usize]) -> Self {
        same(self, |x| reduce::sum_dims(x, dims))
    }

    /// The mean over dims, which stay with one cell.
    #[must_use]
    fn mean_over(self, dims: &[usize]) -> Self {
        same(self, |x| reduce::mean_dims(x, dims))
    }

    /// The maximum over dims, which stay with one cell.
    #[must_use]
    fn max_over(self, dims: &[usize]) -> Self {
        same(self, |x| reduce::extremum_dims(x, dims, ReduceOp::Max))
    }

    /// The minimum over dims, which stay with one cell.
    #[must_use]
    fn min_over(self, dims: &[usize]) -> Self {
        same(self, |x| reduce::extremum_dims(x, dims, ReduceOp::Min))
    }

    /// The sum of all elements, of shape `[1]`.
    fn sum(self) -> Self::Rank<1> {
        or_panic(self.try_op(reduce::sum))
    }

    /// The mean of all elements, of shape `[1]`.
    fn mean(self) -> Self::Rank<1> {
        or_panic(self.try_op(reduce::mean))
    }

    /// The mean over the spatial dims, resolved: `[batch, channels]`, ready for a linear head.
    fn global_avg_pool(self) -> Self::Rank<2> {
        let spatial: Vec<usize> = (2..D).collect();
        or_panic(self.try_op(|x| reshape::leading(reduce::mean_dims(x, &spatial)?.resolve())))
    }

    /// The matrix product. See the [module](crate::matmul).
    #[must_use]
    fn matmul(self, other: Self) -> Self {
        let other = other.into_shard();
        same(self, |x| matmul::matmul(x, other))
    }

    /// `x · weight + bias` over the last dim, with `weight` `[features_in, features_out]`.
    #[must_use]
    fn linear(self, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Self {
        same(self, |x| matmul::linear(x, weight, bias))
    }

    /// Joins tensors along a dim that is whole on every rank.
    #[must_use]
    fn join(parts: Vec<Self>, dim: usize) -> Self {
        let parts = parts.into_iter().map(Self::into_shard).collect();
        Self::same_rank(or_panic(reshape::join(parts, dim)))
    }

    /// A range of a dim; nothing is communicated.
    #[must_use]
    fn slice_of(self, dim: usize, range: Range<usize>) -> Self {
        same(self, |x| reshape::narrow(x, dim, range))
    }

    /// A constant that varies along one dim only, such as weights by latitude: one cell in all other dims, and this
    /// tensor's shards in that one. Nothing is communicated.
    #[must_use]
    fn profile(&self, dim: usize, values: &[f64]) -> Self {
        Self::same_rank(or_panic(reshape::profile(
            &self.clone().into_shard(),
            dim,
            values,
        )))
    }

    /// Repeats every cell of the spatial dims `factor` times: upsampling to the nearest.
    #[must_use]
    fn upsample_nearest(self, factor: usize) -> Self {
        same(self, |x| resample::upsample_nearest(x, factor))
    }

    /// Twice the resolution of rows and columns, `[batch, channels, rows, columns]`, by bilinear interpolation. See the
    /// [module](crate::resample).
    #[must_use]
    fn upsample_bilinear(self, boundary: [Boundary; 2]) -> Self {
        same(self, |x| resample::upsample_bilinear(x, boundary))
    }

    /// Group normalization. See the [module](crate::norm).
    #[must_use]
    fn group_norm(
        self,
        groups: usize,
        weight: Option<Tensor<1>>,
        bias: Option<Tensor<1>>,
        epsilon: f64,
    ) -> Self {
        same(self, |x| norm::group_norm(x, groups, weight, bias, epsilon))
    }

    /// Layer normalization over the last dim. See the [module](crate::norm).
    #[must_use]
    fn layer_norm(self, weight: Option<Tensor<1>>, bias: Option<Tensor<1>>, epsilon: f64) -> Self {
        same(self, |x| norm::layer_norm(x, weight, bias, epsilon))
    }

    halocline_core::elementwise!(methods);

    /// The rectified linear unit.
    #[must_use]
    fn relu(self) -> Self {
        same(self, |x| activation("relu", Activation::Relu, x))
    }

    /// The Gaussian error linear unit, by the error function.
    #[must_use]
    fn gelu(self) -> Self {
        same(self, |x| activation("gelu", Activation::Gelu, x))
    }

    /// `x · sigmoid(x)`.
    #[must_use]
    fn silu(self) -> Self {
        same(self, |x| activation("silu", Activation::Silu, x))
    }
}

fn same<const D: usize, X: Field<D>>(
    x: X,
    operator: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<D>>,
) -> X {
    X::same_rank(or_panic(operator(x.into_shard())))
}

fn activation<const D: usize>(
    operator: &str,
    activation: Activation,
    x: ShardTensor<D>,
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    let (local, layout, mesh) = x.into_parts();
    let local = activation.run(local);
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

fn or_panic<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| error.raise())
}

impl<const D: usize> Field<D> for ShardTensor<D> {
    type Rank<const E: usize> = ShardTensor<E>;

    fn into_shard(self) -> Self {
        self
    }

    fn from_shard<const E: usize>(shard: ShardTensor<E>) -> ShardTensor<E> {
        shard
    }

    fn same_rank(shard: Self) -> Self {
        shard
    }

    fn global_dims(&self) -> [usize; D] {
        self.dims()
    }
}

impl<const D: usize> Field<D> for Tensor<D> {
    type Rank<const E: usize> = Tensor<E>;

    fn into_shard(self) -> ShardTensor<D> {
        ShardTensor::solo(self)
    }

    fn from_shard<const E: usize>(shard: ShardTensor<E>) -> Tensor<E> {
        shard.into_parts().0
    }

    fn same_rank(shard: ShardTensor<D>) -> Self {
        shard.into_parts().0
    }

    fn global_dims(&self) -> [usize; D] {
        self.dims()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Operator, check_op, difference, random};
    use burn::tensor::{FloatDType, TensorData};

    /// The error function, by Simpson's rule.
    fn erf(x: f64) -> f64 {
        let parts = 2000;
        let density = |i: usize| (-(x * i as f64 / parts as f64).powi(2)).exp();
        let weight = |i: usize| [2.0, 4.0][i % 2] * density(i);
        let inner: f64 = (1..parts).map(weight).sum();
        let integral = (density(0) + inner + density(parts)) * x / parts as f64 / 3.0;
        integral * 2.0 / std::f64::consts::PI.sqrt()
    }

    fn gelu(x: f64) -> f64 {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    }

    /// Checks functions on shards against one device, and there against their definition in f64.
    macro_rules! check_functions {
        ($($name:ident($($argument:expr),*) of $domain:ident is $expected:expr;)*) => {{
            $({
                struct Function;

                impl Operator<2, 2> for Function {
                    fn apply<X: Field<2>>(&self, mut x: Vec<X>, _: Vec<Tensor<2>>) -> X::Rank<2> {
                        let y = $domain(x.remove(0)).$name($($argument),*);
                        X::from_shard(y.cast(FloatDType::F32).into_shard())
                    }
                }

                check_op(&Function, &[[5, 3]], &[], &[0, 1], 1e-6);
                let x = $domain(random([5, 3], "input", 0).inner());
                let expected: fn(f64) -> f64 = $expected;
                let values: Vec<f64> = x.clone().into_data().iter().map(expected).collect();
                let found = Field::$name(x $(, $argument)*).into_data();
                let off = difference(&found, &TensorData::new(values, [5, 3]));
                assert!(off < 1e-5, "{}: {off:e}", stringify!($name));
            })*
            [$(stringify!($name)),*]
        }};
    }

    fn all<X: Field<2>>(x: X) -> X {
        x * 2.0
    }

    fn positive<X: Field<2>>(x: X) -> X {
        x.square() + 0.5
    }

    fn above_one<X: Field<2>>(x: X) -> X {
        x.square() + 1.5
    }

    fn unit<X: Field<2>>(x: X) -> X {
        x.sin() * 0.9
    }

    #[test]
    fn elementwise_functions_are_those_of_one_device() {
        let tested = check_functions! {
            abs() of all is f64::abs;
            sign() of all is f64::signum;
            square() of all is |x| x * x;
            sqrt() of positive is f64::sqrt;
            recip() of positive is f64::recip;
            powf(1.7) of positive is |x| x.powf(1.7);
            powi(3) of all is |x| x.powi(3);
            exp() of all is f64::exp;
            log() of positive is f64::ln;
            log1p() of positive is f64::ln_1p;
            erf() of all is erf;
            sin() of all is f64::sin;
            cos() of all is f64::cos;
            tan() of unit is f64::tan;
            asin() of unit is f64::asin;
            acos() of unit is f64::acos;
            atan() of all is f64::atan;
            sinh() of all is f64::sinh;
            cosh() of all is f64::cosh;
            tanh() of all is f64::tanh;
            asinh() of all is f64::asinh;
            acosh() of above_one is f64::acosh;
            atanh() of unit is f64::atanh;
            floor() of all is f64::floor;
            ceil() of all is f64::ceil;
            round() of all is f64::round_ties_even;
            trunc() of all is f64::trunc;
            clamp(-0.5, 1.0) of all is |x| x.clamp(-0.5, 1.0);
            clamp_min(-0.5) of all is |x| x.max(-0.5);
            clamp_max(1.0) of all is |x| x.min(1.0);
            cast(FloatDType::F64) of all is |x| x;
            sigmoid() of all is |x| 1.0 / (1.0 + (-x).exp());
            softplus(2.0) of all is |x| (2.0 * x).exp().ln_1p() / 2.0;
            leaky_relu(0.1) of all is |x| if x < 0.0 { 0.1 * x } else { x };
            gelu_approximate() of all is gelu;
        };
        macro_rules! names {
            ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $f:expr;)*) => {
                [$(stringify!($name)),*]
            };
        }
        let listed = halocline_core::elementwise!(names);
        assert_eq!(tested, listed, "each function of the list is tested");
    }

    #[test]
    fn map_takes_no_parameter_on_one_device_either() {
        let device = burn::tensor::Device::default().autodiff();
        let scale = Tensor::<2>::ones([1, 1], &device).require_grad();
        let x = Tensor::<2>::ones([2, 3], &device);
        let mapped = || Field::map(x.clone(), |x| x.tanh() * scale.clone());
        let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(mapped)).unwrap_err();
        let message = payload.downcast_ref::<String>().expect("a message");
        assert!(
            message.contains("captures a tensor with gradients"),
            "{message}"
        );
        let scaled = x.clone().tanh() * x.beside_same(scale.clone());
        let gradients = scaled.sum().backward();
        assert!(scale.grad(&gradients).is_some());
    }
}
