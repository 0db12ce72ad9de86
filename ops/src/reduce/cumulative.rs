//! Cumulative sums and products along a dim.
//!
//! `y[i] = Σ_{j ≤ i} x[j]`, or the product. Semantics follow PyTorch's `cumsum` and `cumprod`.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. The result has the layout of `x`.
//!
//! # Communication
//! If the dim is sharded, every rank receives the totals of the ranks before it, one cell per line
//! from each; backward, their gradients return. For products each rank first multiplies its own
//! cells, in f64 on the CPU; where such a product overflows f64, a zero on an earlier rank makes it
//! NaN.
//!
//! # Adjoint
//! For a sum, the sum of the cotangents from each cell on. For a product, the sum from each cell on
//! of the cotangents times the products without that cell, exact for cells that are zero.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use halocline_core::comm::Operation;
use halocline_core::ops::{Exchange, apply};
use halocline_core::plan::{ExchangePlan, Need, Piece, Source};
use halocline_core::{DeviceMesh, Error, Layout, Result, ShardTensor, Traffic};

use super::product::CumulativeProduct;
use super::scan::{CarriedSum, CumulativeSum};
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::exchange_of;
use crate::driver::place::require_dim;
use crate::golden::{Golden, output, with_dims};
use crate::kernel::flex;
use crate::kernel::local::LocalOperator;
use crate::precision::{cast_shard, in_f32};

/// Computes the cumulative sum along a dim. See the [module](self).
///
/// # Errors
/// A dim that does not exist; partial values; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::reduce::cumsum;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
///     let y = cumsum(x, 0)?.full_tensor();
///     y.into_data().assert_eq(&[1.0_f32, 2.0, 3.0, 4.0, 5.0].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cumsum<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    cumulative(
        x,
        "cumsum",
        dim,
        &Scan {
            neutral: 0.0,
            scan: |x, dim| CumulativeSum { dim }.run(x),
            carried: Some(|x, dim, totals| {
                Tensor::from_dispatch(apply(CarriedSum { dim, totals }, [x.into_dispatch()]))
            }),
            join: |x, before| x + before,
        },
    )
}

/// Computes the cumulative product along a dim. See the [module](self).
///
/// # Errors
/// The errors of [`cumsum`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::cumprod;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([2.0, 3.0, -1.0]));
/// let y = cumprod(x, 0)?;
/// y.local().to_data().assert_eq(&[2.0_f32, 6.0, -6.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cumprod<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    x.require_resolved("cumprod")?;
    let dtype = x.local().dtype();
    // A single rank's product may overflow or underflow f32 even where the product over all ranks
    // does not.
    let is_joined = x.layout().is_sharded(dim) && flex::runs_on(&x.local().device());
    let x = if is_joined {
        cast_shard(x, DType::F64)
    } else {
        x
    };
    let y = cumulative(
        x,
        "cumprod",
        dim,
        &Scan {
            neutral: 1.0,
            scan: |x, dim| CumulativeProduct { dim }.run(x),
            carried: None,
            join: |x, before| x * before,
        },
    )?;
    Ok(cast_shard(y, dtype))
}

/// A cumulative sum or product.
struct Scan<const D: usize> {
    neutral: f64,
    scan: fn(Tensor<D>, usize) -> Tensor<D>,
    /// The whole operator by our kernels, given the exchange of totals.
    carried: Option<fn(Tensor<D>, usize, Exchange) -> Tensor<D>>,
    join: fn(Tensor<D>, Tensor<D>) -> Tensor<D>,
}

fn cumulative<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    dim: usize,
    scan: &Scan<D>,
) -> Result<ShardTensor<D>> {
    require_dim(operator, &x, dim)?;
    x.require_resolved(operator)?;
    in_f32(x, |x| {
        let (local, layout, mesh) = x.into_parts();
        let is_sharded = layout.is_sharded(dim);
        if let Some(carried) = scan.carried
            && is_sharded
            && flex::runs_on(&local.device())
        {
            let (totals, plan) = totals(&layout, &mesh, operator, dim, scan.neutral)?;
            let operation = Operation::new(operator, Traffic::Exchange, Some(&totals));
            let exchange = exchange_of(plan, operation, &mesh);
            let y = Error::catch(|| carried(local, dim, exchange))?;
            return Ok(ShardTensor::from_parts(y, layout, mesh));
        }
        let local = fill_all(local, &layout, operator, scan.neutral)?;
        let mut y = (scan.scan)(local, dim);
        if is_sharded {
            let last = y.dims()[dim] - 1;
            let total = y.clone().narrow(dim, last, 1);
            let before = before(total, &layout, &mesh, operator, dim, scan)?;
            y = (scan.join)(y, before);
        }
        without_fill(y, layout, mesh, operator)
    })
}

/// Totals of all ranks before this one along a dim, joined.
fn before<const D: usize>(
    total: Tensor<D>,
    layout: &Layout,
    mesh: &DeviceMesh,
    operator: &'static str,
    dim: usize,
    scan: &Scan<D>,
) -> Result<Tensor<D>> {
    let (totals, plan) = totals(layout, mesh, operator, dim, scan.neutral)?;
    let total = without_fill(total, totals, mesh.clone(), operator)?;
    let others = total.run_plan(operator, &plan)?;
    let others = fill_all(others, total.layout(), operator, scan.neutral)?;
    let ranks = layout.extents(dim).len();
    Ok((scan.scan)(others, dim).narrow(dim, ranks - 1, 1))
}

/// Layout of the ranks' totals along a dim, and the plan that fetches those of the ranks before.
fn totals(
    layout: &Layout,
    mesh: &DeviceMesh,
    operator: &'static str,
    dim: usize,
    neutral: f64,
) -> Result<(Layout, Arc<ExchangePlan>)> {
    let totals = layout.resized(dim, vec![1; layout.extents(dim).len()]);
    let key = (operator, totals.clone(), dim);
    let plan = mesh.cache().get_or_make(key, |(_, totals, dim)| {
        // One cell per rank on every rank, so that all ranks assemble the same shape.
        let need_of = |position: usize| {
            let before = 0..totals.part(*dim, position);
            let cells = totals.local_box(position).with_range(*dim, before);
            let mut shape = cells.shape();
            shape[*dim] = totals.shape()[*dim];
            let pieces = (cells.volume() > 0).then(|| Piece {
                dst: vec![0; shape.len()],
                flip: vec![false; shape.len()],
                src: cells,
            });
            Need {
                shape,
                pieces: pieces.into_iter().collect(),
            }
        };
        let plan = mesh.exchange_plan(Source::Layout(totals), need_of);
        Ok(plan.with_fill(neutral))
    })?;
    Ok((totals, plan))
}

/// Registry entries of cumulative sums and products.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("cumsum", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(cumsum(case.input::<D>(0)?, dim))
        })
    })
    .with_travels(TRAVELS),
    Golden::new("cumprod", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(cumprod(case.input::<D>(0)?, dim))
        })
    })
    .with_travels(TRAVELS),
];

/// Communication, forward and backward.
const TRAVELS: [&str; 2] = [
    "totals of ranks before, if the dim is sharded",
    "their gradients",
];

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Both;

    impl Operator<3, 3> for Both {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            let x = inputs.remove(0);
            x.clone().cumsum(2) + x.cumprod(1)
        }
    }

    #[test]
    fn totals_are_carried_between_ranks() {
        // With one sample, some ranks have no cells.
        for samples in [1, 2] {
            check_op(&Both, &[[samples, 5, 7]], &[], &[0, 1, 2], 1e-5);
        }
    }

    #[test]
    fn products_of_a_rank_may_be_beyond_f32() {
        let found = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let factors = [vec![0.5_f32; 200], vec![2.0; 200]].concat();
            let x = Tensor::<1>::from_floats(&factors[..], world.device());
            let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?.require_grad();
            let y = cumprod(x.clone(), 0)?;
            let gradients = ReduceField::sum(y.clone()).backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            let whole = [y, gradient];
            Ok(whole.map(|x| x.full_tensor().into_data()))
        });
        let [y, gradient] = found.unwrap().remove(0);
        let y: Vec<f32> = y.iter().collect();
        assert_eq!((y[300], y[399]), (0.5_f32.powi(99), 1.0));
        assert!(gradient.iter::<f32>().all(f32::is_finite));
    }

    #[test]
    fn products_with_zeros_have_exact_gradients_across_ranks() {
        let gradient = |ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("x", ranks)])?;
                let x = Tensor::<1>::from_floats([2.0, 0.0, 3.0, 0.0, 5.0, 7.0], world.device());
                let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?.require_grad();
                let gradients = ReduceField::sum(cumprod(x.clone(), 0)?).backward();
                let gradient = x.grad(&gradients).expect("a gradient");
                Ok(gradient.full_tensor().into_data())
            });
            found.unwrap().remove(0)
        };
        // The derivatives of 2 + 2·0 + 2·0·3 + … with respect to each factor.
        let expected = [1.0_f32, 8.0, 0.0, 0.0, 0.0, 0.0];
        for ranks in 1..4 {
            gradient(ranks).assert_eq(&expected.into(), true);
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<1>::ones([3], &Default::default()));
        let error = cumsum(x, 1).unwrap_err().to_string();
        assert!(error.contains("dim 1 of [3]"), "{error}");
    }
}
