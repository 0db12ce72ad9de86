//! Vector norms.
//!
//! `(Σ |x|^p)^(1/p)` over dims; the largest or smallest `|x|` for an infinite `p`, and the number
//! of cells other than zero for an order of zero. Semantics follow PyTorch's `linalg.vector_norm`.
//!
//! # Shapes
//! Reduced dims keep one cell each.
//!
//! # Placement
//! All dims may be sharded; values must be resolved, and the result is resolved.
//!
//! # Communication
//! If a reduced dim is sharded, one sum or extremum over ranks. The backward pass sends nothing for
//! sums.
//!
//! # Adjoint
//! `sign(x) · (|x| / norm)^(p − 1)` times the cotangent; zero where the norm is zero and, for
//! orders below one, where `x` is zero. Zero for an order of zero. Cells that hold an extremum
//! share its cotangent equally.

use halocline_core::{Error, ReduceOp, Result, ShardTensor};

use super::root::{at_zero, but_at_zero, root};
use super::{extremum_dims, sum_dims, sum_of_squares};
use crate::driver::place::require_dims;
use crate::golden::{Golden, output, reduced, with_dims};
use crate::precision::in_f32;

/// Computes the norm of the given order over `dims`. See the [module](self).
///
/// # Errors
/// An order of NaN; a dim that does not exist or is repeated; partial values; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::reduce::vector_norm;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([4], &mesh, &[Shard(0)])?;
///     let norm = vector_norm(x, 2.0, &[0])?.to_local();
///     assert_eq!(norm.into_scalar::<f32>(), 2.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn vector_norm<const D: usize>(
    x: ShardTensor<D>,
    order: f64,
    dims: &[usize],
) -> Result<ShardTensor<D>> {
    const NAME: &str = "vector_norm";
    require_dims::<D>(NAME, dims)?;
    x.require_resolved(NAME)?;
    if order.is_nan() {
        let message = format!("a norm of order {order}; expected a number");
        return Err(Error::operator(NAME, message));
    }
    in_f32(x, |x| {
        if order.is_infinite() {
            let op = if order > 0.0 {
                ReduceOp::Max
            } else {
                ReduceOp::Min
            };
            return extremum_dims(x.abs(), dims, op);
        }
        let sum = match order {
            0.0 => return Ok(sum_dims(ones(x), dims)?.resolve()),
            1.0 => sum_dims(x.abs(), dims)?,
            2.0 => sum_of_squares(x, dims, 1.0, NAME)?,
            _ => sum_dims(power(x.abs(), order), dims)?,
        };
        Ok(root(sum.resolve(), order))
    })
}

/// One in cells other than zero, with a gradient of zero in all cells.
fn ones<const D: usize>(x: ShardTensor<D>) -> ShardTensor<D> {
    let (local, layout, mesh) = x.into_parts();
    let is_zero = local.clone().equal_elem(0.0);
    let ones = local.mask_fill(is_zero.clone().bool_not(), 1.0);
    ShardTensor::from_parts(ones.mask_fill(is_zero, 0.0), layout, mesh)
}

/// Powers of absolute values. For an order below one the derivative at zero is infinite, and taken
/// as zero.
fn power<const D: usize>(size: ShardTensor<D>, order: f64) -> ShardTensor<D> {
    if order >= 1.0 {
        return size.powf_scalar(order);
    }
    let (local, layout, mesh) = size.into_parts();
    let power = but_at_zero(local, at_zero(order), |size| size.powf_scalar(order));
    ShardTensor::from_parts(power, layout, mesh)
}

/// Registry entry of norms, over all dims if the case has none.
pub(super) const GOLDEN: Golden = Golden::new("vector_norm", |case| {
    let order = case.attributes.number("ord").unwrap_or(2.0);
    let of_all = case.attributes.numbers("dims").is_empty();
    let dims = case.attributes.dims("dims", case.dims());
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        if !of_all {
            return reduced(case, &dims, output(vector_norm(x, order, &dims)));
        }
        let norm = vector_norm(x, order, &dims)?;
        output(crate::reduce::sum(norm))
    })
})
.with_pytorch("linalg.vector_norm")
.with_travels(["a sum", "–"]);

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Norm(f64);

    impl Operator<3, 3> for Norm {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).vector_norm(self.0, &[1, 2])
        }
    }

    #[test]
    fn any_order_over_sharded_dims() {
        for order in [0.0, 0.5, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
            check_op(&Norm(order), &[[2, 5, 7]], &[], &[0, 1, 2], 1e-5);
        }
    }

    /// As in PyTorch: the norm of `[0, 4]` of order ½ is `(0 + 2)²`, with a derivative of
    /// `√4^-1·2`.
    #[test]
    fn orders_below_one_have_finite_gradients_at_zero() {
        let device = burn::tensor::Device::default().autodiff();
        let x = Tensor::<1>::from_floats([0.0, 4.0], &device).require_grad();
        for (order, norm, gradient) in [
            (0.5, 4.0, [0.0, 1.0]),
            (0.0, 1.0, [0.0, 0.0]),
            (-1.0, 0.0, [0.0, 0.0]),
        ] {
            let y = x.clone().vector_norm(order, &[0]);
            let found = x.grad(&y.clone().sum().backward()).expect("a gradient");
            y.into_data().assert_eq(&[norm as f32].into(), true);
            found
                .into_data()
                .assert_eq(&gradient.map(|cell| cell as f32).into(), true);
        }
    }

    #[test]
    fn negative_orders_of_what_has_no_reciprocal_are_infinite() {
        for (cells, order) in [([f32::INFINITY; 2], -1.0), ([1e20; 2], -3.0)] {
            let y = Tensor::<1>::from(cells).vector_norm(order, &[0]);
            assert_eq!(y.into_scalar::<f32>(), f32::INFINITY, "order {order}");
        }
    }

    #[test]
    fn the_gradient_of_the_norm_of_nothing_is_zero() {
        let device = burn::tensor::Device::default().autodiff();
        let x = Tensor::<1>::zeros([3], &device).require_grad();
        let norm = x.clone().vector_norm(2.0, &[0]);
        let gradient = x.grad(&norm.sum().backward()).expect("a gradient");
        gradient.into_data().assert_eq(&[0.0_f32; 3].into(), true);
    }
}
