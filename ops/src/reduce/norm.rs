//! Norms of vectors.
//!
//! `(Σ |x|^p)^(1/p)` over dims, and the largest or smallest `|x|` for an infinite `p`. Semantics follow PyTorch's
//! `linalg.vector_norm`.
//!
//! # Shapes
//! Reduced dims keep one cell each.
//!
//! # Placement
//! All dims may be sharded; values must be resolved, and the result is.
//!
//! # Communication
//! If a reduced dim is sharded, one sum or extremum over ranks. The backward pass sends nothing for sums.
//!
//! # Adjoint
//! `sign(x) · (|x| / norm)^(p − 1)` times the cotangent, and zero where the norm is zero; to one cell of an extremum.

use halocline_core::{Error, ReduceOp, Result, ShardTensor};

use super::root::root;
use super::{check_dims, extremum_dims, rule, squares, sum_dims};
use crate::golden::{Golden, output, reduced, with_dims};
use crate::precision::in_f32;

/// The norm of this order over `dims`. See the [module](self).
///
/// # Errors
/// An order of zero or that is no number; a dim that does not exist or is given twice; partial values; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::reduce::vector_norm;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([4], &mesh, &[Shard(0)])?;
///     let norm = vector_norm(x, 2.0, &[0])?.to_local(LocalGradient::Replicated);
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
    check_dims::<D>(NAME, dims)?;
    x.require_resolved(NAME)?;
    if order == 0.0 || order.is_nan() {
        let message = format!("a norm of order {order}; expected a number other than zero");
        return Err(Error::operator(NAME, message));
    }
    in_f32(x, |x| {
        if order.is_infinite() {
            let op = if order > 0.0 {
                ReduceOp::Max
            } else {
                ReduceOp::Min
            };
            return Ok(extremum_dims(x.abs(), dims, op)?.resolve());
        }
        let sum = match order {
            1.0 => sum_dims(x.abs(), dims)?,
            2.0 => {
                let layout = rule(NAME, x.layout(), dims, ReduceOp::Sum)?;
                let (local, _, mesh) = x.into_parts();
                ShardTensor::from_parts(squares(local, None, dims, 1.0), layout, mesh)
            }
            _ => sum_dims(x.abs().powf(order), dims)?,
        };
        Ok(root(sum.resolve(), order))
    })
}

/// Norms in the registry: over all dims if the case has none.
pub(super) const GOLDEN: Golden = Golden::new("vector_norm", |case| {
    let order = case.attributes.number("ord").unwrap_or(2.0);
    let dims = case.attributes.list("dims");
    with_dims!(case.dims(), D => {
        let x = case.input::<D>(0)?;
        if !dims.is_empty() {
            return reduced(case, &dims, output(vector_norm(x, order, &dims)));
        }
        let norm = vector_norm(x, order, &Vec::from_iter(0..D))?;
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
        for order in [1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
            check_op(&Norm(order), &[[2, 5, 7]], &[], &[0, 1, 2], 1e-5);
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
