//! Selection of one cell of a dim, or of several in any order.
//!
//! `select_dim` returns `x[.., index, ..]` without the dim; `index_select` returns
//! `y[.., i, ..] = x[.., indices[i], ..]`. Semantics follow PyTorch.
//!
//! # Placement
//! All dims may be sharded. `select_dim` along a sharded dim returns a partial sum, of booleans a
//! partial maximum: the cells on the rank that holds them, and zeros on the others. `index_select`
//! along a sharded dim returns a dim that is sharded as evenly as possible; values must be
//! resolved.
//!
//! # Communication
//! `select_dim` sends nothing. `index_select` along a sharded dim sends the cells that move to
//! another rank.
//!
//! # Adjoint
//! The cotangents of all copies of a cell are added.

use burn::tensor::kind::{Basic, Kind};
use burn::tensor::{Int, Tensor, TensorData};
use halocline_core::{Error, Layout, Partial, ReduceOp, Result, Shard, ShardTensor};

use super::narrow::narrow;
use crate::driver::empty::{fill, fill_all, without_fill};
use crate::driver::place::{in_place, placed, renumbered, require_dim, runs};
use crate::golden::{Golden, output, with_dims};
use crate::graph::{CellMap, take_named};
use crate::kernel::taken::{Places, take};
use crate::{as_integers, with_floats};

/// Selects one index along a dim and removes the dim. The result has `E` dims, one fewer than `x`.
/// See the [module](self).
///
/// # Errors
/// A dim or index that does not exist; another number of dims; partial values along a sharded dim.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Partial, ReduceOp, Shard, ShardTensor};
/// use halocline_ops::rearrange::select_dim;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::full([5, 3], 7.0, &mesh, &[Shard(0)])?;
///     let row: ShardTensor<1> = select_dim(x, 0, 4)?; // nothing is sent
///     assert_eq!(row.placements(), [Partial(ReduceOp::Sum)]);
///     let row = row.resolve().to_local();
///     row.into_data().assert_eq(&[7.0_f32; 3].into(), true);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn select_dim<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    index: usize,
) -> Result<ShardTensor<E, K>> {
    const NAME: &str = "select_dim";
    require_dim(NAME, &x, dim)?;
    if index >= x.dims()[dim] || E + 1 != D {
        let message = format!(
            "cell {index} of dim {dim} of {:?}, for a result of {E} dims",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    let sharded = x.layout().is_sharded(dim);
    if sharded {
        x.require_resolved(NAME)?;
    }
    let cell = narrow(x, dim, index, 1)?;
    let cell = if sharded {
        term(cell, dim, NAME)?
    } else {
        cell
    };
    let mut extents = cell.layout().all_extents().to_vec();
    extents.remove(dim);
    Ok(renumbered(cell, extents, |held| {
        held - usize::from(held > dim)
    }))
}

/// Turns a sharded dim of one cell into a partial sum of that cell and zeros; of booleans, into a
/// partial maximum.
fn term<const D: usize, K: Basic>(
    cell: ShardTensor<D, K>,
    dim: usize,
    operator: &'static str,
) -> Result<ShardTensor<D, K>> {
    let (local, layout, mesh) = cell.into_parts();
    let local = fill(1, local, &[dim], operator, 0.0)?;
    let op = match K::KIND {
        Kind::Float | Kind::Int => ReduceOp::Sum,
        Kind::Bool => ReduceOp::Max,
    };
    let placements = layout.map_placements(|placement| match placement {
        Shard(held) if held == dim => Partial(op),
        other => other,
    });
    let mut extents = layout.all_extents().to_vec();
    extents[dim] = vec![1];
    let layout = layout.derive(placements, extents);
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Takes the cells of a dim at these indices, in this order. See the [module](self). For indices
/// that are used repeatedly, [`take_cells`](crate::graph::take_cells) keeps the exchange plan.
///
/// # Errors
/// A dim or index that does not exist; no indices; partial values along a sharded dim; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::index_select;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
///     let y = index_select(x, 0, &[4, 0, 4])?;
///     assert_eq!(y.layout().extents(0), [2, 1]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn index_select<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
    indices: &[usize],
) -> Result<ShardTensor<D, K>> {
    const NAME: &str = "index_select";
    require_dim(NAME, &x, dim)?;
    let size = x.dims()[dim];
    if let Some(beyond) = indices.iter().find(|index| **index >= size) {
        let message = format!("cell {beyond} of dim {dim} of {:?}", x.dims());
        return Err(Error::operator(NAME, message));
    }
    if indices.is_empty() {
        return Err(Error::operator(NAME, "no indices"));
    }
    let mut shape = x.dims();
    shape[dim] = indices.len();
    let even = Layout::new(x.layout().mesh(), &shape, x.placements())?;
    let extents = even.extents(dim).to_vec();
    let output = x.layout().resized(dim, extents.clone());
    if !x.layout().is_sharded(dim) {
        let (local, from, mesh) = x.into_parts();
        let local = fill_all(local, &from, NAME, 0.0)?;
        return without_fill(cells_at(local, dim, indices), output, mesh, NAME);
    }
    match K::KIND {
        Kind::Float => {
            let map = CellMap::new(indices.to_vec());
            with_floats(x, |x| take_named(NAME, x, dim, &map, &extents))
        }
        Kind::Int | Kind::Bool => {
            let (key, sizes) = ((dim, indices.to_vec()), x.dims());
            placed(x, NAME, key, output, 0.0, |other, cells| {
                match other == dim {
                    true => runs(&indices[cells.clone()]),
                    false => in_place(cells, sizes[other]),
                }
            })
        }
    }
}

/// Takes cells of a shard.
fn cells_at<const D: usize, K: Basic>(
    local: Tensor<D, K>,
    dim: usize,
    indices: &[usize],
) -> Tensor<D, K> {
    if K::KIND == Kind::Float {
        let local = Tensor::<D>::from_dispatch(local.into_dispatch());
        let taken = take(local, dim, &Places::new(indices.to_vec()));
        return Tensor::from_dispatch(taken.into_dispatch());
    }
    let numbers: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
    let numbers = TensorData::new(numbers, [indices.len()]);
    let places = Tensor::<1, Int>::from_data(numbers, &local.device());
    as_integers(local, |local| local.select(dim, places))
}

/// Registry entries of selection.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("select", |case| {
        with_dims!(case.dims(), D => {
            let x = case.input::<D>(0)?;
            let dim = case.attributes.dim("dim", D);
            let size = x.dims().get(dim).copied().unwrap_or(0);
            let index = case.attributes.place("index", size);
            output(select_dim::<D, { if D > 1 { D - 1 } else { 1 } }, _>(x, dim, index))
        })
    })
    .with_method("select_dim")
    .with_travels(["– (partial if the dim is sharded)", "–"]),
    Golden::new("index_select", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        let indices = case.attributes.list("index");
        with_dims!(case.dims(), D => {
            output(index_select(case.input::<D>(0)?, dim, &indices))
        })
    })
    .with_travels([
        "cells that change their rank, if the dim is sharded",
        "the same back",
    ]),
];

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Traffic};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Cells(Vec<usize>);

    impl Operator<3, 3> for Cells {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).index_select(1, &self.0)
        }
    }

    #[test]
    fn cells_may_be_taken_several_times_and_in_any_order() {
        for indices in [vec![3], vec![4, 0, 1, 2, 2, 4, 0, 0]] {
            check_op(&Cells(indices), &[[2, 5, 3]], &[], &[0, 1, 2], 1e-6);
        }
    }

    struct Cell;

    impl Operator<3, 2> for Cell {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 2> {
            inputs.remove(0).select_dim::<2>(1, 4)
        }
    }

    #[test]
    fn one_cell_of_a_sharded_dim_is_a_partial_sum() {
        check_op(&Cell, &[[2, 5, 3]], &[], &[0, 1, 2], 1e-6);
    }

    #[test]
    fn index_select_sends_the_cells_that_it_takes_and_no_others() {
        Launcher::local(2)
            .run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let x = ShardTensor::<2>::ones([100, 3], &mesh, &[Shard(0)])?;
                // The first rank holds cells 0 to 49 and takes 10 and 70; the other one takes 20.
                let plan = x.dry_run(|x| index_select(x, 0, &[10, 70, 20]))?;
                assert_eq!(plan.bytes_sent_for(Traffic::Exchange), 3 * 4);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let error = index_select(x.clone(), 1, &[0, 4]).unwrap_err().to_string();
        assert!(error.contains("cell 4 of dim 1 of [3, 4]"), "{error}");
        let error = select_dim::<2, 1, _>(x, 2, 0).unwrap_err().to_string();
        assert!(error.contains("dim 2 of [3, 4]"), "{error}");
    }
}
