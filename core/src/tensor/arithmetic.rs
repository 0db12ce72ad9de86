//! Elementwise arithmetic and comparison, with broadcasting over replicated operands.

use std::ops::{Add, Div, Mul, Neg, Sub};

use burn::tensor::kind::{Basic, Kind, Numeric, Ordered};
use burn::tensor::{Bool, ElementConversion, Float, Int, Tensor};

use super::{ShardTensor, require_same_mesh};
use crate::layout::{Layout, Partial, Placement, ReduceOp, Replicate, Shard};
use crate::ops::fan_out;
use crate::replicas::require_replicas;
use crate::{Error, Result};

/// Which combinations of partial values an operator permits.
#[derive(Clone, Copy, PartialEq)]
enum Linearity {
    /// Both may be sums: addition.
    Additive,
    /// One may be a sum: multiplication.
    Multiplicative,
    /// The left may be a sum: division.
    LeftLinear,
    /// None may.
    None,
}

/// The common layout of two operands, and for each the axes over which it must fan out.
struct Pairing {
    layout: Layout,
    fan_out: [Vec<usize>; 2],
}

/// The rule of elementwise operators: per axis, which placements go together.
fn pair(operator: &str, operands: [&Layout; 2], linearity: Linearity) -> Result<Pairing> {
    let [lhs, rhs] = operands;
    require_same_mesh(operator, lhs.mesh(), rhs.mesh())?;
    let dims = lhs.shape().len();
    for dim in 0..dims {
        let (l, r) = (lhs.shape()[dim], rhs.shape()[dim]);
        if l != r && l != 1 && r != 1 {
            return Err(Error::operator(
                operator,
                format!(
                    "shapes {:?} and {:?} do not broadcast",
                    lhs.shape(),
                    rhs.shape()
                ),
            ));
        }
    }
    let mut fan_out = [Vec::new(), Vec::new()];
    let mut placements = Vec::with_capacity(lhs.placements().len());
    for (axis, (&l, &r)) in lhs.placements().iter().zip(rhs.placements()).enumerate() {
        let sum = Partial(ReduceOp::Sum);
        let broadcasts = |layout: &Layout, dim: usize| layout.shape()[dim] == 1;
        let (placement, fans) = match (l, r) {
            (Replicate, Replicate) => (Replicate, None),
            (Shard(a), Shard(b)) if a == b && lhs.extents(a) == rhs.extents(a) => (l, None),
            (Shard(dim), Replicate) if broadcasts(rhs, dim) => (l, Some(1)),
            (Replicate, Shard(dim)) if broadcasts(lhs, dim) => (r, Some(0)),
            (l, r) if l == sum && r == sum && linearity == Linearity::Additive => (sum, None),
            (l, Replicate)
                if l == sum
                    && matches!(linearity, Linearity::Multiplicative | Linearity::LeftLinear) =>
            {
                (sum, Some(1))
            }
            (Replicate, r) if r == sum && linearity == Linearity::Multiplicative => (sum, Some(0)),
            _ => {
                return Err(Error::Placement {
                    operator: operator.into(),
                    placement: format!("{lhs} with {rhs} on axis \"{}\"", lhs.mesh().names()[axis]),
                    help: if matches!((l, r), (Partial(_), _) | (_, Partial(_))) {
                        "call resolve() on the partial operand first".into()
                    } else {
                        format!(
                            "redistribute one operand to {l} or {r}, with the other's extents, first"
                        )
                    },
                });
            }
        };
        placements.push(placement);
        if let Some(operand) = fans {
            fan_out[operand].push(axis);
        }
    }
    let extents = (0..dims)
        .map(|dim| {
            // The operand that is sharded there, or else the one that is not broadcast.
            let shards = |layout: &Layout| layout.is_sharded(dim);
            let of = if shards(lhs) || (!shards(rhs) && lhs.shape()[dim] != 1) {
                lhs
            } else {
                rhs
            };
            of.extents(dim).to_vec()
        })
        .collect();
    let layout = if fan_out.iter().all(Vec::is_empty) && lhs.shape() == rhs.shape() {
        lhs.clone()
    } else {
        lhs.derive(placements, extents)
    };
    Ok(Pairing { layout, fan_out })
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
        let [lhs_axes, rhs_axes] = &pairing.fan_out;
        let lhs = fan_out(self.local, &self.mesh, lhs_axes, operator);
        let rhs = fan_out(other.local, &self.mesh, rhs_axes, operator);
        Ok(((pairing.layout, self.mesh), lhs, rhs))
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
        Kind::Float => Linearity::LeftLinear,
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
