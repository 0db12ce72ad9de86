//! Elementwise arithmetic and comparison, with broadcasting.

use std::ops::{Add, Div, Mul, Neg, Sub};

use burn::tensor::kind::{Basic, Kind, Numeric, Ordered};
use burn::tensor::{Bool, ElementConversion, Float, Int, Tensor};

use super::ShardTensor;
use super::binary::{Binary, are_served};
use super::unary::{Unary, minus, plus, times};
use crate::layout::{Layout, Partial, Placement, ReduceOp};
use crate::ops::{fan_out, fan_out_with};
use crate::pairing::{Linearity, Pairing, Role, Term};
use crate::replicas::require_replicas;
use crate::{Error, OrRaise, Result};

/// Pairs two operands of an elementwise operator, with broadcasting of dims of one cell.
fn pair(operator: &str, operands: [&Layout; 2], linearity: Linearity) -> Result<Pairing> {
    let shapes = operands.map(Layout::shape);
    let broadcast = |(lhs, rhs): (&usize, &usize)| lhs == rhs || *lhs == 1 || *rhs == 1;
    if !shapes[0].iter().zip(shapes[1]).all(broadcast) {
        let message = format!(
            "shapes {:?} and {:?} do not broadcast",
            shapes[0], shapes[1]
        );
        return Err(Error::operator(operator, message));
    }
    let common: Vec<Role> = (0..shapes[0].len()).map(Role::Common).collect();
    let roles = operands.map(|layout| {
        let meets_all = |dim: usize| layout.shape()[dim] == 1 && !layout.is_sharded(dim);
        let role = |common: &Role| match *common {
            Role::Common(dim) if meets_all(dim) => Role::Broadcast,
            other => other,
        };
        common.iter().map(role).collect::<Vec<_>>()
    });
    let operands = [0, 1].map(|operand| Term {
        name: "",
        layout: operands[operand],
        roles: &roles[operand],
    });
    Pairing::new(operator, &operands, &common, linearity)
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    #[track_caller]
    fn binary(
        self,
        other: Self,
        operator: &'static str,
        linearity: Linearity,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, K>,
    ) -> Self {
        let (layout, lhs, rhs) = self.paired(other, operator, linearity, true).or_raise();
        Self::from_parts(f(lhs, rhs), layout.0, layout.1)
    }

    /// Returns the paired operands. With `beside`, the gradient of each is summed at this operator,
    /// for operators that give every operand a gradient.
    #[allow(clippy::type_complexity, reason = "three values that only meet here")]
    pub(super) fn paired(
        self,
        other: Self,
        operator: &'static str,
        linearity: Linearity,
        beside: bool,
    ) -> Result<((Layout, crate::DeviceMesh), Tensor<D, K>, Tensor<D, K>)> {
        let mesh = if other.mesh.comm().stands_in() && !self.mesh.comm().stands_in() {
            other.mesh
        } else {
            self.mesh
        };
        if self.layout == other.layout && self.layout.partial_axis().is_none() {
            return Ok(((self.layout, mesh), self.local, other.local));
        }
        let pairing = pair(operator, [&self.layout, &other.layout], linearity)?;
        let [lhs, rhs] = [&self.local, &other.local];
        let fanned = |operand, tensor: &Tensor<D, K>, other| {
            let (axes, tensor) = (pairing.fan_out(operand), tensor.clone());
            if beside {
                fan_out_with(tensor, other, &mesh, axes, operator)
            } else {
                fan_out(tensor, &mesh, axes, operator)
            }
        };
        let (lhs, rhs) = (fanned(0, lhs, rhs), fanned(1, rhs, lhs));
        Ok(((pairing.layout(&self.layout), mesh), lhs, rhs))
    }

    /// Like [`binary`](Self::binary), by a kernel on pairs of floats if both operands have the same
    /// layout, or if it serves operands of their shapes.
    #[track_caller]
    fn arithmetic(
        self,
        other: Self,
        operator: &'static str,
        linearity: Linearity,
        of_pairs: Option<Binary>,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, K>,
    ) -> Self {
        let of_pairs = of_pairs.filter(|_| K::KIND == Kind::Float);
        let is_same = self.layout == other.layout;
        self.binary(other, operator, linearity, |lhs, rhs| match of_pairs {
            Some(of_pairs) if is_same || are_served(&lhs, &rhs) => of_pairs.of(lhs, rhs),
            _ => f(lhs, rhs),
        })
    }

    /// Makes a replicated tensor on this tensor's mesh from a tensor that is equal on all ranks.
    /// With checks enabled ([`Settings::check`](crate::comm::Settings::check)), the ranks compare a
    /// hash of it.
    ///
    /// # Panics
    /// With checks enabled, panics if a rank holds another tensor.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
    ///     let scale = Tensor::<2>::full([1, 3], 2.0, world.device());
    ///     let scale = x.replicate_operand(scale);
    ///     assert_eq!(scale.placements(), [Replicate]);
    ///     assert_eq!((x * scale).placements(), [Shard(0)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn replicate_operand<const E: usize, L: Basic>(
        &self,
        tensor: Tensor<E, L>,
    ) -> ShardTensor<E, L> {
        self.replicate_for("replicate_operand", tensor)
    }

    /// Like [`replicate_operand`](Self::replicate_operand), as part of an operator, which errors
    /// name.
    #[track_caller]
    fn replicate_for<const E: usize, L: Basic>(
        &self,
        operator: &'static str,
        tensor: Tensor<E, L>,
    ) -> ShardTensor<E, L> {
        let (comm, ranks) = (self.mesh.comm(), self.mesh.shape().ranks());
        require_replicas(operator, comm, ranks, &tensor).or_raise();
        let layout = Layout::replicated(self.layout.mesh(), &tensor.dims());
        ShardTensor::from_parts(tensor, layout, self.mesh.clone())
    }

    /// Applies an elementwise function of this library, which needs no check, to two tensors.
    #[track_caller]
    pub(super) fn zip_elements(
        self,
        other: Self,
        operator: &'static str,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, K>,
    ) -> Self {
        self.binary(other, operator, Linearity::None, f)
    }

    #[track_caller]
    fn compare(
        self,
        other: Self,
        operator: &'static str,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, Bool>,
    ) -> ShardTensor<D, Bool> {
        let paired = self.paired(other, operator, Linearity::None, false);
        let ((layout, mesh), lhs, rhs) = paired.or_raise();
        ShardTensor::from_parts(f(lhs, rhs), layout, mesh)
    }

    /// Replaces elements by those of `value` where the mask is true. The mask must have this
    /// tensor's layout.
    ///
    /// # Panics
    /// Panics if the mask's layout differs, or if the layouts of the tensors cannot be paired.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::full([5], -3.0, &mesh, &[Shard(0)])?;
    ///     let negative = x.clone().lower_elem(0.0);
    ///     let y = x.clone().mask_where(negative, -x); // the absolute value
    ///     assert_eq!(y.local().clone().into_data().iter::<f32>().next(), Some(3.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[must_use]
    #[track_caller]
    pub fn mask_where(self, mask: ShardTensor<D, Bool>, value: Self) -> Self {
        if self.layout != mask.layout {
            let (found, expected) = (mask.dims(), self.dims());
            if found != expected {
                let message = format!("a mask {found:?} for values {expected:?}");
                Error::operator("mask_where", message).raise();
            }
            let placement = format!("a mask {} with values {}", mask.layout, self.layout);
            let help = "redistribute the mask to the layout of the values";
            Error::placement("mask_where", placement, help).raise();
        }
        self.zip_elements(value, "mask_where", |local, value| {
            local.mask_where(mask.local, value)
        })
    }
}

impl<const D: usize, K: Ordered> ShardTensor<D, K> {
    /// True where an element is greater than `value`.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
    ///     let inside = x.clone().greater_elem(0.5).bool_and(x.lower_elem(2.0));
    ///     assert!(inside.into_local().all().into_data().iter::<bool>().all(|all| all));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn greater_elem(self, value: impl ElementConversion) -> ShardTensor<D, Bool> {
        self.map_elements("greater_elem", |local| local.greater_elem(value))
    }

    /// True where an element is lower than `value`; see the example of
    /// [`greater_elem`](Self::greater_elem).
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    #[track_caller]
    pub fn lower_elem(self, value: impl ElementConversion) -> ShardTensor<D, Bool> {
        self.map_elements("lower_elem", |local| local.lower_elem(value))
    }
}

macro_rules! comparison {
    ($kind:ident; $($(#[$doc:meta])* $name:ident;)*) => {
        /// Comparisons, with broadcasting of dims of one cell.
        ///
        /// # Example
        /// ```
        /// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
        ///
        /// Launcher::local(2).run(|world| {
        ///     let mesh = world.mesh([("lat", 2)])?;
        ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
        ///     let limit = ShardTensor::<1>::full([1], 0.5, &mesh, &[Replicate])?;
        ///     let differs = x.clone().not_equal(limit.clone()).int();
        ///     let above = x.greater(limit).int();
        ///     assert_eq!(above.local().to_data(), differs.local().to_data());
        ///     Ok(())
        /// })?;
        /// # Ok::<(), halocline_core::Error>(())
        /// ```
        impl<const D: usize, K: $kind> ShardTensor<D, K> {
            $($(#[$doc])*
            ///
            /// # Panics
            /// Panics if the layouts cannot be paired.
            #[track_caller]
            pub fn $name(self, other: Self) -> ShardTensor<D, Bool> {
                self.compare(other, stringify!($name), Tensor::$name)
            })*
        }
    };
}

comparison! {
    Basic;
    /// True where elements are equal.
    equal;
    /// True where elements are not equal.
    not_equal;
}

comparison! {
    Ordered;
    /// True where this tensor's elements are greater.
    greater;
    /// True where this tensor's elements are greater or equal.
    greater_equal;
    /// True where this tensor's elements are lower.
    lower;
    /// True where this tensor's elements are lower or equal.
    lower_equal;
}

macro_rules! operator {
    ($trait:ident, $method:ident, $linearity:expr, $of_pairs:expr, $($scalar:ident of $kind:ident by $map:ident($function:path)),*) => {
        impl<const D: usize, K: Numeric> $trait for ShardTensor<D, K> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: Self) -> Self {
                self.arithmetic(other, stringify!($method), $linearity, $of_pairs, $trait::$method)
            }
        }

        impl<const D: usize, K: Numeric> $trait<Tensor<D, K>> for ShardTensor<D, K> {
            type Output = Self;

            /// Computes with a tensor that is equal on all ranks; its gradient is complete on each
            /// of them.
            #[track_caller]
            fn $method(self, other: Tensor<D, K>) -> Self {
                let other = self.replicate_for(stringify!($method), other);
                self.arithmetic(other, stringify!($method), $linearity, $of_pairs, $trait::$method)
            }
        }

        $(impl<const D: usize> $trait<$scalar> for ShardTensor<D, $kind> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: $scalar) -> Self {
                self.$map(stringify!($method), |local| $function(local, other))
            }
        })*
    };
}

operator!(Add, add, Linearity::Additive, Some(Binary::Sum), f64 of Float by map_elements(plus), i64 of Int by map_elements(Add::add));
operator!(Sub, sub, Linearity::Additive, Some(Binary::Difference), f64 of Float by map_elements(minus), i64 of Int by map_elements(Sub::sub));
operator!(Mul, mul, Linearity::Multiplicative, Some(Binary::Product), f64 of Float by map_scaling(times), i64 of Int by map_scaling(Mul::mul));
operator!(Div, div, of_quotient::<K>(), None, f64 of Float by map_scaling(Div::div), i64 of Int by map_elements(Div::div));

/// Linearity of a quotient. Quotients of integers are rounded, so they do not add up to the
/// quotient of a sum.
fn of_quotient<K: Basic>() -> Linearity {
    match K::KIND {
        Kind::Float => Linearity::First,
        _ => Linearity::None,
    }
}

impl<const D: usize, K: Numeric> Neg for ShardTensor<D, K> {
    type Output = Self;

    fn neg(self) -> Self {
        self.map_scaling("neg", |local| Unary::Negative.of(local, Tensor::neg))
    }
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Applies a scaling, which permits partial sums but no other partial values.
    #[track_caller]
    fn map_scaling(self, operator: &str, f: impl FnOnce(Tensor<D, K>) -> Tensor<D, K>) -> Self {
        let sums =
            |placement: &Placement| !matches!(placement, Partial(op) if *op != ReduceOp::Sum);
        if self.placements().iter().all(sums) {
            self.map_linear(f)
        } else {
            self.map_elements(operator, f)
        }
    }
}
