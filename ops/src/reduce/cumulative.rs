//! Sums and products up to each cell of a dim.
//!
//! `y[i] = Σ_{j ≤ i} x[j]`, or the product. Semantics follow PyTorch's `cumsum` and `cumprod`.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. The result has the layout of `x`.
//!
//! # Communication
//! If the dim is sharded, every rank receives the totals of the ranks before it, one cell of each line from each. In the backward
//! pass of a sum it receives those of the ranks after it on CPUs; of a product, and elsewhere, gradients of totals return.
//!
//! # Adjoint
//! Of a sum, the sum of the cotangents from each cell on; of a product, that sum of cotangents times the products of all
//! other cells, which is exact for cells that are zero.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{
    DeviceMesh, Error, IndexBox, Layout, Need, Piece, Result, ShardTensor, Source,
};

use super::check_dims;
use super::product::CumulativeProduct;
use super::scan::{CumulativeSum, scanned};
use super::sums::sums;
use crate::driver::empty::{drop_empty, fill_empty};
use crate::golden::{Golden, output, with_dims};
use crate::kernel::flex::{self, with_float};
use crate::kernel::local::LocalOperator;
use crate::kernel::simd::Isa;
use crate::precision::in_f32;

/// The sums up to each cell of a dim. See the [module](self).
///
/// # Errors
/// A dim that does not exist; partial values; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, LocalGradient, Shard, ShardTensor};
/// use halocline_ops::reduce::cumsum;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
///     let y = cumsum(x, 0)?.full_tensor(LocalGradient::Replicated);
///     y.into_data().assert_eq(&[1.0_f32, 2.0, 3.0, 4.0, 5.0].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cumsum<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "cumsum";
    if dim < D && x.layout().is_sharded(dim) && flex::runs_on(&x.device()) {
        return carried(x, NAME, dim);
    }
    cumulative(
        x,
        NAME,
        dim,
        &Scan {
            neutral: 0.0,
            scan: |x, dim| CumulativeSum { dim }.run(x),
            join: |x, before| x + before,
        },
    )
}

/// The products up to each cell of a dim. See the [module](self).
///
/// # Errors
/// Those of [`cumsum`].
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
    cumulative(
        x,
        "cumprod",
        dim,
        &Scan {
            neutral: 1.0,
            scan: |x, dim| CumulativeProduct { dim }.run(x),
            join: |x, before| x * before,
        },
    )
}

/// A sum or product.
struct Scan<const D: usize> {
    neutral: f64,
    scan: fn(Tensor<D>, usize) -> Tensor<D>,
    join: fn(Tensor<D>, Tensor<D>) -> Tensor<D>,
}

fn cumulative<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    dim: usize,
    scan: &Scan<D>,
) -> Result<ShardTensor<D>> {
    check_dims::<D>(operator, &[dim])?;
    x.require_resolved(operator)?;
    in_f32(x, |x| {
        let all: Vec<usize> = (0..D).collect();
        let (local, layout, mesh) = x.into_parts();
        let local = fill_empty(local, &layout, &all, operator, scan.neutral)?;
        let mut y = (scan.scan)(local, dim);
        if layout.is_sharded(dim) {
            let last = y.dims()[dim] - 1;
            let total = y.clone().narrow(dim, last, 1);
            let of_ranks = Totals {
                layout: &layout,
                mesh: &mesh,
                dim,
                reversed: false,
            };
            let before = of_ranks.of_others(total, operator, scan.neutral)?;
            let parts = before.dims()[dim];
            y = (scan.join)(y, (scan.scan)(before, dim).narrow(dim, parts - 1, 1));
        }
        let y = drop_empty(y, &layout, mesh.position(), operator)?;
        Ok(ShardTensor::from_parts(y, layout, mesh))
    })
}

/// Sums along a sharded dim on CPUs. The totals of other ranks come before cells are added up, so that each is read twice and
/// written once.
fn carried<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    dim: usize,
) -> Result<ShardTensor<D>> {
    x.require_resolved(operator)?;
    in_f32(x, |x| {
        let all: Vec<usize> = (0..D).collect();
        let (local, layout, mesh) = x.into_parts();
        let local = fill_empty(local, &layout, &all, operator, 0.0)?;
        let sums = Carried::<D> {
            dim,
            layout: layout.clone(),
            mesh: mesh.clone(),
        };
        let y = Error::catch(|| Tensor::from_dispatch(apply(sums, [local.into_dispatch()])))?;
        let y = drop_empty(y, &layout, mesh.position(), operator)?;
        Ok(ShardTensor::from_parts(y, layout, mesh))
    })
}

#[derive(Clone, Debug)]
struct Carried<const D: usize> {
    dim: usize,
    layout: Layout,
    mesh: DeviceMesh,
}

impl<const D: usize> Carried<D> {
    fn scan(
        &self,
        x: DispatchTensor,
        operator: &'static str,
        reversed: bool,
    ) -> Result<DispatchTensor> {
        let (dtype, shape, isa) = (x.dtype(), x.shape(), Isa::chosen()?);
        let dims = [self.dim];
        let total = sums(Tensor::<D>::from_dispatch(x.clone()), &dims, 1.0);
        let of_ranks = Totals {
            layout: &self.layout,
            mesh: &self.mesh,
            dim: self.dim,
            reversed,
        };
        let start = sums(of_ranks.of_others(total, operator, 0.0)?, &dims, 1.0).into_dispatch();
        Ok(with_float!(dtype, E => {
            let (x, start) = (flex::operand::<E>(x)?, flex::operand::<E>(start)?);
            let lines = CumulativeSum { dim: self.dim }.lines(&shape);
            let start = Some(flex::elements(&start));
            let y = scanned::<E>(isa, lines, flex::elements(&x), start, reversed);
            flex::result(y, &shape, dtype)
        }))
    }
}

impl<const D: usize> Operator for Carried<D> {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        Ok((self.scan(inputs.remove(0), "cumsum", false)?, ()))
    }

    /// The sums from each cell on.
    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(self.scan(
            pass.cotangent,
            "cumsum (backward)",
            true,
        )?)])
    }
}

/// The totals of ranks along a sharded dim.
struct Totals<'a> {
    layout: &'a Layout,
    mesh: &'a DeviceMesh,
    dim: usize,
    /// Those of ranks after this one, instead of before.
    reversed: bool,
}

impl Totals<'_> {
    /// The totals of all other ranks on one side, and neutral cells in place of the others: one cell for each rank on every
    /// rank, so that all assemble the same shape.
    fn of_others<const D: usize>(
        &self,
        total: Tensor<D>,
        operator: &'static str,
        neutral: f64,
    ) -> Result<Tensor<D>> {
        let (dim, position) = (self.dim, self.mesh.position());
        let mut extents = self.layout.all_extents().to_vec();
        extents[dim] = vec![1; self.layout.extents(dim).len()];
        let totals = self
            .layout
            .derive(self.layout.placements().to_vec(), extents);
        let total = drop_empty(total, &totals, position, operator)?;
        let total = ShardTensor::from_parts(total, totals, self.mesh.clone());
        let key = (operator, total.layout().clone(), dim, self.reversed);
        let plan = self
            .mesh
            .cache()
            .get_or_make(key, |(_, totals, dim, reversed)| {
                let parts = totals.shape()[*dim];
                let need_of = |position: usize| {
                    let mut cells = totals.local_box(position).ranges().to_vec();
                    let part = totals.part(*dim, position);
                    cells[*dim] = match reversed {
                        false => 0..part,
                        true => part + 1..parts,
                    };
                    let cells = IndexBox::new(cells);
                    let mut shape = cells.shape();
                    shape[*dim] = parts;
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
                let plan = self.mesh.exchange_plan(Source::Layout(totals), need_of);
                Ok(plan.with_fill(neutral))
            })?;
        let others = total.run_plan(operator, &plan)?;
        let all: Vec<usize> = (0..D).collect();
        fill_empty(others, total.layout(), &all, operator, neutral)
    }
}

/// Cumulative sums and products in the registry.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("cumsum", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(cumsum(case.input::<D>(0)?, dim))
        })
    })
    .with_travels([TOTALS, "totals of ranks after, if the dim is sharded"]),
    Golden::new("cumprod", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(cumprod(case.input::<D>(0)?, dim))
        })
    })
    .with_travels([TOTALS, "their gradients"]),
];

/// What travels forward.
const TOTALS: &str = "totals of ranks before, if the dim is sharded";

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, LocalGradient, Shard};

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
        check_op(&Both, &[[2, 5, 7]], &[], &[0, 1, 2], 1e-5);
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
                Ok(gradient.full_tensor(LocalGradient::Replicated).into_data())
            });
            found.unwrap().remove(0)
        };
        // The derivative of 2 + 2·0 + 2·0·3 + … by each factor.
        let expected = [1.0_f32, 8.0, 0.0, 0.0, 0.0, 0.0];
        for ranks in 1..4 {
            gradient(ranks).assert_eq(&expected.into(), true);
        }
    }
}
