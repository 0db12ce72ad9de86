//! Tensor types for model code: burn's on one device, sharded ones on a mesh.

#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

use burn::module::Module;
use burn::tensor::{DType, Tensor};
use halocline_core::{Halos, OrRaise, Result, ShardTensor};

use crate::layer::Apply;
use crate::operand::Operand;

/// Family of tensor types with any number of dims: burn's on one device, or sharded ones on a mesh.
///
/// Generic functions use [`WithDims`], built on this trait, to name a tensor with another number of
/// dims.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{TensorFamily, OneDevice};
///
/// let x: <OneDevice as TensorFamily>::Of<2> = Tensor::<2>::from([[1.0, 2.0]]);
/// assert_eq!(x.dims(), [1, 2]);
/// ```
pub trait TensorFamily: Sized + 'static {
    /// Tensor with `D` dims.
    type Of<const D: usize>: Field<D> + AnyDims<Family = Self>;
}

/// [`TensorFamily`] of burn's tensors, each whole on one device. See the trait for an example.
#[derive(Clone, Copy, Debug)]
pub struct OneDevice;

/// [`TensorFamily`] of sharded tensors.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{TensorFamily, Sharded};
///
/// let x: <Sharded as TensorFamily>::Of<1> = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0]));
/// assert_eq!(x.dims(), [2]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Sharded;

impl TensorFamily for OneDevice {
    type Of<const D: usize> = Tensor<D>;
}

impl TensorFamily for Sharded {
    type Of<const D: usize> = ShardTensor<D>;
}

mod sealed {
    use burn::tensor::Tensor;
    use halocline_core::ShardTensor;

    /// Private supertrait, so that two types alone implement `AnyDims`. This closes `Field` and
    /// `TensorFamily`, too, which require `AnyDims`.
    pub trait Sealed {}

    impl<const D: usize> Sealed for Tensor<D> {}
    impl<const D: usize> Sealed for ShardTensor<D> {}
}

/// Tensor of a [`TensorFamily`] with an unspecified number of dims: burn's [`Tensor`] or
/// [`ShardTensor`]. See [`WithDims`] for an example.
pub trait AnyDims: sealed::Sealed + Sized {
    /// The family.
    type Family: TensorFamily;

    /// Applies a function that is generic over the number of dims. See [`DimGeneric`] for an
    /// example.
    #[track_caller]
    fn apply_any_dims(self, f: impl DimGeneric) -> Self;
}

impl<const D: usize> AnyDims for Tensor<D> {
    type Family = OneDevice;

    fn apply_any_dims(self, f: impl DimGeneric) -> Self {
        f.call(self)
    }
}

impl<const D: usize> AnyDims for ShardTensor<D> {
    type Family = Sharded;

    fn apply_any_dims(self, f: impl DimGeneric) -> Self {
        f.call(self)
    }
}

/// Function from a field to a field with the same number of dims, for any number of dims.
///
/// A layer built on it, such as burn's [`Linear`](burn::nn::Linear), has one implementation for all
/// of them.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::prelude::*;
/// use halocline_ops::{AnyDims, DimGeneric};
///
/// struct Scale(f64);
///
/// impl DimGeneric for &Scale {
///     fn call<const D: usize, X: Field<D>>(self, x: X) -> X {
///         x * self.0
///     }
/// }
///
/// impl<X: AnyDims> Layer<X> for Scale {
///     type Output = X;
///
///     fn forward(&self, x: X) -> X {
///         x.apply_any_dims(self)
///     }
/// }
///
/// let y = Tensor::<1>::from([1.0, 2.0]).apply(&Scale(3.0));
/// y.into_data().assert_eq(&[3.0_f32, 6.0].into(), true);
/// ```
pub trait DimGeneric {
    /// Applies the function.
    #[track_caller]
    fn call<const D: usize, X: Field<D>>(self, x: X) -> X;
}

/// Tensor with `D` dims of the same [`TensorFamily`] as `X`.
///
/// `WithDims<Tensor<4>, 1>` is `Tensor<1>`; for `X: Field<4>`, `WithDims<X, 4>` is `X`.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::{Field, WithDims, ReduceField};
///
/// fn total<X: Field<2>>(x: X) -> WithDims<X, 1> {
///     x.sum()
/// }
///
/// assert_eq!(total(Tensor::<2>::from([[1.0, 2.0]])).into_scalar::<f32>(), 3.0);
/// ```
pub type WithDims<X, const D: usize> = <<X as AnyDims>::Family as TensorFamily>::Of<D>;

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

/// Tensor on one device or on a mesh: the type that model code is written for.
///
/// burn's [`Tensor<D>`] and [`ShardTensor<D>`] alone implement it and produce the same results. On
/// a `Tensor` nothing is communicated and [`resolve`](Field::resolve) is the identity. Each family
/// of operators adds its methods through its own trait, such as
/// [`ConvField`](crate::conv::ConvField); the prelude imports all of them.
///
/// Methods panic if their operator has no rule for the sharding, as burn's do if shapes do not
/// match. The functions they call return the typed error instead:
/// `x.try_op(|x| conv(x, weight, bias, &options))` with [`conv`](crate::conv::conv()).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::{Field, WithDims, ReduceField};
///
/// fn energy<X: Field<2>>(x: X) -> WithDims<X, 1> {
///     (x.clone() * x).mean().resolve()
/// }
///
/// Launcher::local(2).run(|world| {
///     let cells = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], world.device());
///     let mesh = world.mesh([("lat", 2)])?;
///     let sharded = ShardTensor::distribute(cells.clone(), &mesh, &[Shard(0)])?;
///     let on_two = energy(sharded).to_local();
///     assert_eq!(on_two.into_scalar::<f32>(), energy(cells).into_scalar::<f32>());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub trait Field<const D: usize>:
    Apply
    + AnyDims<Family: TensorFamily<Of<D> = Self>>
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
    /// Converts to a sharded tensor; a plain tensor becomes the only shard of a one-rank mesh.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::Field;
    ///
    /// let x = Tensor::<1>::from([1.0, 2.0]).into_shard();
    /// assert_eq!(Tensor::from_shard(x).dims(), [2]);
    /// ```
    fn into_shard(self) -> ShardTensor<D>;

    /// Converts the result of an operator back: the inverse of [`into_shard`](Field::into_shard),
    /// which has an example.
    fn from_shard(shard: ShardTensor<D>) -> Self;

    /// Global shape. See [`into_shard`](Field::into_shard) for an example.
    fn dims(&self) -> [usize; D];

    /// Places an operand on the mesh of this tensor.
    ///
    /// A tensor that is equal on all ranks becomes replicated; a parameter keeps [its
    /// layout](halocline_core::ParamShard). With checks on
    /// ([`Settings::check`](halocline_core::comm::Settings::check)) the ranks compare a hash of
    /// replicated operands.
    ///
    /// # Panics
    /// Panics if a parameter lies on another mesh; [raises](halocline_core::Error::raise)
    /// communication failures.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::Field;
    ///
    /// let x = Tensor::<1>::from([1.0, 2.0]);
    /// let y = x.clone() * x.place_operand(Tensor::<1>::from([3.0, 4.0]));
    /// y.into_data().assert_eq(&[3.0_f32, 8.0].into(), true);
    /// ```
    #[track_caller]
    fn place_operand<const E: usize>(&self, operand: impl Into<Operand<E>>) -> WithDims<Self, E> {
        let x = self.clone().into_shard();
        Field::from_shard(match operand.into() {
            Operand::Replicated(tensor) => x.replicate_operand(tensor),
            // Detached, since a loss may depend on the operand alone.
            sharded => sharded.place_on(&x.inner()).or_raise(),
        })
    }

    /// Element type.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{DType, FloatDType, Tensor};
    /// use halocline_ops::Field;
    ///
    /// fn rounded<X: Field<1>>(x: X) -> X {
    ///     x.cast(FloatDType::BF16)
    /// }
    ///
    /// assert_eq!(rounded(Tensor::<1>::from([1.0, 2.0])).dtype(), DType::BF16);
    /// ```
    fn dtype(&self) -> DType {
        self.clone().into_shard().local().dtype()
    }

    /// Runs an operator for sharded tensors on this tensor, plain or sharded. The result belongs to
    /// the same [`TensorFamily`]; for `E = D` it has this tensor's type.
    ///
    /// # Errors
    /// Errors of the operator.
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
    ) -> Result<WithDims<Self, E>> {
        operator(self.into_shard()).map(Field::from_shard)
    }

    /// Applies an elementwise closure.
    ///
    /// The value at a cell must depend only on the input value at that cell. Parameters and factors
    /// that vary by cell are operands: `x * x.place_operand(scale)`.
    ///
    /// # Panics
    /// Panics where [`ShardTensor::map_local`] does: if `f` changes the shape or captures a tensor
    /// with gradients; with checks on, also if the value at a cell depends on other cells or on the
    /// position of the cell.
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

    /// Applies a block of a model and keeps only its input; the backward pass recomputes the block.
    /// A tensor with gradients that the block uses besides, such as a state that is carried from
    /// step to step, must not be captured: pass it by [`recompute_with`](Self::recompute_with). See
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

    /// [`recompute`](Self::recompute) for a block with a second operand, which also receives its
    /// gradient.
    ///
    /// # Panics
    /// Panics where [`ShardTensor::recompute_with`] does.
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
    /// let state = x.clone().require_grad();
    /// let y = x.recompute_with::<2, _>(state.clone(), &linear, Halos::Keep, |linear, x, state| {
    ///     (x + state).apply(linear).tanh()
    /// });
    /// assert!(state.grad(&y.sum().backward()).is_some());
    /// ```
    #[must_use]
    fn recompute_with<const E: usize, M: Module + 'static>(
        self,
        other: WithDims<Self, E>,
        module: &M,
        halos: Halos,
        block: impl Fn(&M, Self, WithDims<Self, E>) -> Self + Send + Sync + 'static,
    ) -> Self {
        let block = move |module: &M, x, other| {
            let (x, other) = (Self::from_shard(x), Field::from_shard(other));
            block(module, x, other).into_shard()
        };
        let x = self.into_shard();
        Self::from_shard(x.recompute_with(other.into_shard(), module, halos, block))
    }

    /// Completes partial values by a reduction over the ranks. Other tensors are returned
    /// unchanged.
    ///
    /// # Panics
    /// [Raises](halocline_core::Error::raise) communication failures.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    /// use halocline_ops::{Field, ReduceField};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
    ///     let total = Field::resolve(x.sum()).to_local();
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

/// Runs an operator on either kind of tensor and panics with its error.
#[track_caller]
pub(crate) fn run<const D: usize, const E: usize, X: Field<D>>(
    x: X,
    operator: impl FnOnce(ShardTensor<D>) -> Result<ShardTensor<E>>,
) -> WithDims<X, E> {
    x.try_op(operator).or_raise()
}

impl<const D: usize> Field<D> for ShardTensor<D> {
    fn into_shard(self) -> Self {
        self
    }

    fn from_shard(shard: Self) -> Self {
        shard
    }

    fn dims(&self) -> [usize; D] {
        self.dims()
    }
}

impl<const D: usize> Field<D> for Tensor<D> {
    fn into_shard(self) -> ShardTensor<D> {
        ShardTensor::solo(self)
    }

    fn from_shard(shard: ShardTensor<D>) -> Self {
        shard.into_local()
    }

    fn dims(&self) -> [usize; D] {
        self.dims()
    }
}
