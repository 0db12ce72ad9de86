//! Elementwise arithmetic and comparison, with broadcasting over replicated operands.

use std::ops::{Add, Div, Mul, Neg, Sub};

use burn::tensor::kind::{Basic, Kind, Numeric, Ordered};
use burn::tensor::{Bool, ElementConversion, Float, Int, Tensor};

use super::ShardTensor;
use crate::layout::{Layout, Partial, Placement, ReduceOp};
use crate::ops::fan_out;
use crate::pairing::{Linearity, Pairing, Role, Term};
use crate::replicas::require_replicas;
use crate::{Error, Result};

/// How two operands of an elementwise operator go together, with broadcasting of dims of one cell.
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
        let role = |(dim, &role): (usize, &Role)| {
            if meets_all(dim) {
                Role::Broadcast
            } else {
                role
            }
        };
        common.iter().enumerate().map(role).collect::<Vec<_>>()
    });
    let operands = [0, 1].map(|operand| Term {
        name: "",
        layout: operands[operand],
        roles: &roles[operand],
    });
    Pairing::new(operator, &operands, &common, linearity)
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    fn binary(
        self,
        other: Self,
        operator: &'static str,
        linearity: Linearity,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, K>,
    ) -> Self {
        let (layout, lhs, rhs) = self
            .paired(other, operator, linearity)
            .unwrap_or_else(|error| error.raise());
        Self::from_parts(f(lhs, rhs), layout.0, layout.1)
    }

    #[allow(clippy::type_complexity, reason = "three values that only meet here")]
    fn paired(
        self,
        other: Self,
        operator: &'static str,
        linearity: Linearity,
    ) -> Result<((Layout, crate::DeviceMesh), Tensor<D, K>, Tensor<D, K>)> {
        if self.layout == other.layout && self.layout.partial_axis().is_none() {
            return Ok(((self.layout, self.mesh), self.local, other.local));
        }
        let pairing = pair(operator, [&self.layout, &other.layout], linearity)?;
        let lhs = fan_out(self.local, &self.mesh, pairing.fan_out(0), operator);
        let rhs = fan_out(other.local, &self.mesh, pairing.fan_out(1), operator);
        Ok(((pairing.layout(&self.layout), self.mesh), lhs, rhs))
    }

    /// A tensor that every rank holds alike, next to this one. With checks on
    /// ([`Settings::check`](crate::Settings::check)) ranks compare a hash of it.
    ///
    /// # Panics
    /// With checks on, panics if a rank holds another tensor.
    pub fn replicate_beside<const E: usize, L: Basic>(
        &self,
        tensor: Tensor<E, L>,
    ) -> ShardTensor<E, L> {
        self.replicate_for("replicate_beside", tensor)
    }

    /// [`replicate_beside`](Self::replicate_beside) as part of an operator, which errors name.
    fn replicate_for<const E: usize, L: Basic>(
        &self,
        operator: &'static str,
        tensor: Tensor<E, L>,
    ) -> ShardTensor<E, L> {
        let (comm, ranks) = (self.mesh.comm(), self.mesh.shape().ranks());
        require_replicas(operator, comm, ranks, &tensor).unwrap_or_else(|error| error.raise());
        let layout = Layout::replicated(self.layout.mesh(), &tensor.dims());
        ShardTensor::from_parts(tensor, layout, self.mesh.clone())
    }

    /// An elementwise operator of ours on two tensors, which needs no check.
    pub(super) fn zip_elements(
        self,
        other: Self,
        operator: &'static str,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, K>,
    ) -> Self {
        self.binary(other, operator, Linearity::None, f)
    }

    fn compare(
        self,
        other: Self,
        operator: &'static str,
        f: impl FnOnce(Tensor<D, K>, Tensor<D, K>) -> Tensor<D, Bool>,
    ) -> ShardTensor<D, Bool> {
        let ((layout, mesh), lhs, rhs) = self
            .paired(other, operator, Linearity::None)
            .unwrap_or_else(|error| error.raise());
        ShardTensor::from_parts(f(lhs, rhs), layout, mesh)
    }

    /// Takes `value` where the mask is true. The layouts must be the same.
    ///
    /// # Panics
    /// Panics if the layouts differ.
    #[must_use]
    pub fn mask_where(self, mask: ShardTensor<D, Bool>, value: Self) -> Self {
        assert_eq!(
            self.layout, mask.layout,
            "mask_where: the mask's layout differs"
        );
        self.zip_elements(value, "mask_where", |local, value| {
            local.mask_where(mask.local, value)
        })
    }
}

impl<const D: usize, K: Ordered> ShardTensor<D, K> {
    /// Where each element is greater than `value`.
    pub fn greater_elem(self, value: impl ElementConversion) -> ShardTensor<D, Bool> {
        self.map_elements("greater_elem", |local| local.greater_elem(value))
    }

    /// Where each element is lower than `value`.
    pub fn lower_elem(self, value: impl ElementConversion) -> ShardTensor<D, Bool> {
        self.map_elements("lower_elem", |local| local.lower_elem(value))
    }
}

macro_rules! comparison {
    ($kind:ident; $($(#[$doc:meta])* $name:ident;)*) => {
        impl<const D: usize, K: $kind> ShardTensor<D, K> {
            $($(#[$doc])*
            ///
            /// # Panics
            /// Panics if the layouts do not go together.
            pub fn $name(self, other: Self) -> ShardTensor<D, Bool> {
                self.compare(other, stringify!($name), Tensor::$name)
            })*
        }
    };
}

comparison! {
    Basic;
    /// Where elements are equal.
    equal;
    /// Where elements are not equal.
    not_equal;
}

comparison! {
    Ordered;
    /// Where this tensor's elements are greater.
    greater;
    /// Where this tensor's elements are greater or equal.
    greater_equal;
    /// Where this tensor's elements are lower.
    lower;
    /// Where this tensor's elements are lower or equal.
    lower_equal;
}

macro_rules! operator {
    ($trait:ident, $method:ident, $linearity:expr, $($scalar:ident of $kind:ident by $map:ident),*) => {
        impl<const D: usize, K: Numeric> $trait for ShardTensor<D, K> {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                self.binary(other, stringify!($method), $linearity, $trait::$method)
            }
        }

        impl<const D: usize, K: Numeric> $trait<Tensor<D, K>> for ShardTensor<D, K> {
            type Output = Self;

            /// With a tensor that every rank holds alike; its gradient comes back complete.
            fn $method(self, other: Tensor<D, K>) -> Self {
                let other = self.replicate_for(stringify!($method), other);
                self.binary(other, stringify!($method), $linearity, $trait::$method)
            }
        }

        $(impl<const D: usize> $trait<$scalar> for ShardTensor<D, $kind> {
            type Output = Self;

            fn $method(self, other: $scalar) -> Self {
                self.$map(stringify!($method), |local| $trait::$method(local, other))
            }
        })*
    };
}

operator!(Add, add, Linearity::Additive, f64 of Float by map_elements, i64 of Int by map_elements);
operator!(Sub, sub, Linearity::Additive, f64 of Float by map_elements, i64 of Int by map_elements);
operator!(Mul, mul, Linearity::Multiplicative, f64 of Float by map_scaling, i64 of Int by map_scaling);
operator!(Div, div, of_quotient::<K>(), f64 of Float by map_scaling, i64 of Int by map_elements);

/// Quotients of integers are rounded, so that they do not add up to the quotient of a sum.
fn of_quotient<K: Basic>() -> Linearity {
    match K::KIND {
        Kind::Float => Linearity::First,
        _ => Linearity::None,
    }
}

impl<const D: usize, K: Numeric> Neg for ShardTensor<D, K> {
    type Output = Self;

    fn neg(self) -> Self {
        self.map_scaling("neg", Tensor::neg)
    }
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// A scaling, which sums permit and other partial values do not.
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
