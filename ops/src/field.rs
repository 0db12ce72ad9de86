//! Tensors of model code: burn's on one device, sharded ones on many.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

use burn::module::Module;
use burn::tensor::Tensor;
use halocline_core::{Halos, OrRaise, Result, ShardTensor};

use crate::layer::Apply;
use crate::operand::Operand;

/// Family of tensors with any number of dims: those of one device, or those of a mesh.
///
/// Generic functions name a tensor with another number of dims by [`Rank`], which uses it.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Carrier, OneDevice};
///
/// let x: <OneDevice as Carrier>::Of<2> = Tensor::<2>::from([[1.0, 2.0]]);
/// assert_eq!(x.dims(), [1, 2]);
/// ```
pub trait Carrier: Sized + 'static {
    /// Tensor with `D` dims.
    type Of<const D: usize>: Field<D> + Carried<Carrier = Self>;
}

/// [`Carrier`] of burn's tensors, each whole on one device. See its example.
#[derive(Clone, Copy, Debug)]
pub struct OneDevice;

/// [`Carrier`] of sharded tensors.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{Carrier, Sharded};
///
/// let x: <Sharded as Carrier>::Of<1> = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0]));
/// assert_eq!(x.dims(), [2]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Sharded;

impl Carrier for OneDevice {
    type Of<const D: usize> = Tensor<D>;
}

impl Carrier for Sharded {
    type Of<const D: usize> = ShardTensor<D>;
}

/// A tensor of a [`Carrier`], whose number of dims need not be known. See [`Rank`] for an example.
pub trait Carried: Sized {
    /// The carrier.
    type Carrier: Carrier;

    /// Applies a function of fields with any number of dims. See [`KeepsDims`] for an example.
    #[track_caller]
    fn keeping_dims(self, f: impl KeepsDims) -> Self;
}

impl<const D: usize> Carried for Tensor<D> {
    type Carrier = OneDevice;

    fn keeping_dims(self, f: impl KeepsDims) -> Self {
        f.call(self)
    }
}

impl<const D: usize> Carried for ShardTensor<D> {
    type Carrier = Sharded;

    fn keeping_dims(self, f: impl KeepsDims) -> Self {
        f.call(self)
    }
}

/// A function of fields with any number of dims, which keeps this number: by it a layer, such as burn's
/// [`Linear`](burn::nn::Linear), is one for all of them.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::prelude::*;
/// use halocline_ops::{Carried, KeepsDims};
///
/// struct Scale(f64);
///
/// impl KeepsDims for &Scale {
///     fn call<const D: usize, X: Field<D>>(self, x: X) -> X {
///         x * self.0
///     }
/// }
///
/// impl<X: Carried> Layer<X> for Scale {
///     type Output = X;
///
///     fn forward(&self, x: X) -> X {
///         x.keeping_dims(self)
///     }
/// }
///
/// let y = Tensor::<1>::from([1.0, 2.0]).apply(&Scale(3.0));
/// y.into_data().assert_eq(&[3.0_f32, 6.0].into(), true);
/// ```
pub trait KeepsDims {
    /// Applies the function.
    #[track_caller]
    fn call<const D: usize, X: Field<D>>(self, x: X) -> X;
}

/// Tensor with `D` dims of the same [`Carrier`] as `X`: `Rank<Tensor<4>, 1>` is `Tensor<1>`, and
/// for `X: Field<4>` `Rank<X, 4>` is `X`.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Field, Rank, ReduceField};
///
/// fn total<X: Field<2>>(x: X) -> Rank<X, 1> {
///     x.sum()
/// }
///
/// assert_eq!(total(Tensor::<2>::from([[1.0, 2.0]])).into_scalar::<f32>(), 3.0);
/// ```
pub type Rank<X, const D: usize> = <<X as Carried>::Carrier as Carrier>::Of<D>;

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $f:expr;)*) => {
        $($(#[$doc])*
        #[must_use]
        #[track_caller]
        fn $name(self $(, $argument: $type)*) -> Self {
            Self::from_shard(self.into_shard().$name($($argument),*))
        })*
    };
}

/// A tensor on one device or on many: the type of model code.
///
/// burn's [`Tensor<D>`] and [`ShardTensor<D>`] implement it, with the same results. On a `Tensor`
/// nothing is communicated and [`resolve`](Field::resolve) is the identity. Each family of
/// operators adds its methods by a trait of its own, such as [`ConvField`](crate::conv::ConvField);
/// the prelude imports all of them.
///
/// Methods panic where their operator has no rule, as burn's do on shapes that do not fit. The
/// functions that they call return the typed error:
/// `x.try_op(|x| conv(x, weight, bias, &options))` with [`conv`](crate::conv::conv()).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::{Field, Rank, ReduceField};
///
/// fn energy<X: Field<2>>(x: X) -> Rank<X, 1> {
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
    + Carried<Carrier: Carrier<Of<D> = Self>>
    + Clone
    + Debug
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
    /// Converts to a sharded tensor; a plain tensor becomes one of a single rank.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::Field;
    ///
    /// let x = Tensor::<1>::from([1.0, 2.0]).into_shard();
    /// assert_eq!(Tensor::from_shard(x).global_dims(), [2]);
    /// ```
    fn into_shard(self) -> ShardTensor<D>;

    /// Converts the result of an operator back: the inverse of [`into_shard`](Field::into_shard),
    /// with its example.
    fn from_shard(shard: ShardTensor<D>) -> Self;

    /// The global shape. See [`into_shard`](Field::into_shard) for an example.
    fn global_dims(&self) -> [usize; D];

    /// Puts an operand on the mesh of this tensor: one that is equal on all ranks, replicated, and a
    /// parameter as [its layout](halocline_core::ParamShard) has it. With checks on
    /// ([`Settings::check`](halocline_core::Settings::check)) ranks compare a hash of what is replicated.
    ///
    /// # Panics
    /// Panics for a parameter on another mesh; [raises](halocline_core::Error::raise) a failure of
    /// communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::Field;
    ///
    /// let x = Tensor::<1>::from([1.0, 2.0]);
    /// let y = x.clone() * x.beside(Tensor::<1>::from([3.0, 4.0]));
    /// y.into_data().assert_eq(&[3.0_f32, 8.0].into(), true);
    /// ```
    #[track_caller]
    fn beside<const E: usize>(&self, operand: impl Into<Operand<E>>) -> Rank<Self, E> {
        let x = self.clone().into_shard();
        Field::from_shard(match operand.into() {
            Operand::Replicated(tensor) => x.replicate_beside(tensor),
            // Detached: a loss may depend on the operand alone.
            laid => laid.beside(&x.inner()).or_raise(),
        })
    }

    /// Runs an operator on sharded tensors on this one, plain or sharded. The result has the same
    /// carrier: for `E = D` it is of this tensor's type.
    ///
    /// # Errors
    /// Those of the operator.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::{Field, reduce};
    ///
    /// let y = Tensor::<1>::from([1.0, 2.0]).try_op(reduce::sum)?;
    /// assert_eq!(y.into_scalar::<f32>(), 3.0);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    fn try_op<const E: usize>(
        self,
        operator: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<E>>,
    ) -> Result<Rank<Self, E>> {
        operator(self.into_shard()).map(Field::from_shard)
    }

    /// Applies an elementwise closure.
    ///
    /// Its value for a cell must depend on the value of that cell alone. Parameters and factors
    /// that vary by cell are operands: `x * x.beside(scale)`.
    ///
    /// # Panics
    /// Panics where [`ShardTensor::map_local`] does: if `f` changes the shape or captures a tensor
    /// with gradients; with checks on, if its value for a cell depends on other cells or on the
    /// cell's place.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::Field;
    ///
    /// let y = Field::map(Tensor::<1>::from([1.0, 2.0]), |x| x * 2.0 + 1.0);
    /// y.into_data().assert_eq(&[3.0_f32, 5.0].into(), true);
    /// ```
    #[must_use]
    fn map(self, f: impl Fn(Tensor<D>) -> Tensor<D>) -> Self {
        Self::from_shard(self.into_shard().map_local(f))
    }

    /// Applies a block of a model and keeps only its input: the backward pass computes the block again. See
    /// [`ShardTensor::recompute`].
    ///
    /// # Panics
    /// Panics where [`ShardTensor::recompute`] does.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Tensor;
    /// use halocline_core::Halos;
    /// use halocline_ops::{Apply, Field};
    ///
    /// let device = burn::tensor::Device::default().autodiff();
    /// let linear = LinearConfig::new(3, 3).init(&device);
    /// let x = Tensor::<2>::ones([2, 3], &device);
    /// let y = x.recompute(&linear, Halos::Keep, |linear, x| x.apply(linear).tanh());
    /// assert!(linear.weight.grad(&y.sum().backward()).is_some());
    /// ```
    #[must_use]
    fn recompute<M: Module + 'static>(
        self,
        module: &M,
        halos: Halos,
        block: impl Fn(&M, Self) -> Self + Send + Sync + 'static,
    ) -> Self {
        let block = move |module: &M, x| block(module, Self::from_shard(x)).into_shard();
        Self::from_shard(self.into_shard().recompute(module, halos, block))
    }

    /// [`recompute`](Self::recompute) of a block with a second operand, which receives its gradient, too.
    ///
    /// # Panics
    /// Panics where [`ShardTensor::recompute_with`] does.
    #[must_use]
    fn recompute_with<const E: usize, M: Module + 'static>(
        self,
        other: Rank<Self, E>,
        module: &M,
        halos: Halos,
        block: impl Fn(&M, Self, Rank<Self, E>) -> Self + Send + Sync + 'static,
    ) -> Self {
        let block = move |module: &M, x, other| {
            let (x, other) = (Self::from_shard(x), Field::from_shard(other));
            block(module, x, other).into_shard()
        };
        let x = self.into_shard();
        Self::from_shard(x.recompute_with(other.into_shard(), module, halos, block))
    }

    /// Completes partial values by a reduction over the ranks. Other tensors pass unchanged.
    ///
    /// # Panics
    /// [Raises](halocline_core::Error::raise) a failure of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
    /// use halocline_ops::{Field, ReduceField};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
    ///     let total = Field::resolve(x.sum()).to_local(LocalGradient::Replicated);
    ///     assert_eq!(total.into_scalar::<f32>(), 5.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[must_use]
    fn resolve(self) -> Self {
        Self::from_shard(self.into_shard().resolve())
    }

    halocline_core::elementwise!(methods);
}

/// Runs an operator on either kind of tensor, and panics with its error.
#[track_caller]
pub(crate) fn run<const D: usize, const E: usize, X: Field<D>>(
    x: X,
    operator: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<E>>,
) -> Rank<X, E> {
    x.try_op(operator).or_raise()
}

impl<const D: usize> Field<D> for ShardTensor<D> {
    fn into_shard(self) -> Self {
        self
    }

    fn from_shard(shard: Self) -> Self {
        shard
    }

    fn global_dims(&self) -> [usize; D] {
        self.dims()
    }
}

impl<const D: usize> Field<D> for Tensor<D> {
    fn into_shard(self) -> ShardTensor<D> {
        ShardTensor::solo(self)
    }

    fn from_shard(shard: ShardTensor<D>) -> Self {
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
                    fn apply<X: Field<2>>(&self, mut x: Vec<X>, _: Vec<Tensor<2>>) -> Rank<X, 2> {
                        let y = $domain(x.remove(0)).$name($($argument),*);
                        y.cast(FloatDType::F32)
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
        let scaled = x.clone().tanh() * x.beside(scale.clone());
        let gradients = scaled.sum().backward();
        assert!(scale.grad(&gradients).is_some());
    }
}
