//! Indices of extrema, and the largest cells of a dim.
//!
//! `argmax` and `argmin` return the global index of the first cell of a dim that holds the
//! extremum; `topk_with_indices` returns the largest cells of a dim in descending order, and their
//! indices. Semantics follow PyTorch.
//!
//! # Placement
//! `argmax`, `argmin`: all dims may be sharded; the dim keeps one cell, which every rank then
//! holds. `topk_with_indices`: the dim must be whole. Values must be resolved.
//!
//! # Communication
//! `argmax`, `argmin`: if the dim is sharded, the extremum and the index are reduced over ranks.
//! `topk_with_indices`: none.
//!
//! # Adjoint
//! Indices have none. The cotangent of a cell of `topk_with_indices` goes to the input cell it was
//! taken from.

use burn::tensor::{Int, Tensor};
use halocline_core::ops::blank;
use halocline_core::{Error, ReduceOp, Result, ShardTensor};

use super::largest::largest;
use super::{extremum_dims, holders, rule};
use crate::driver::empty::{drop_empty, fill_all};
use crate::driver::place::require_dim;
use crate::golden::{Dims, Golden, output, reduced, with_dims, without_gradients};
use crate::kernel::flex;

/// Finds the index of the first maximum along a dim, which keeps one cell. See the [module](self).
///
/// # Errors
/// A dim that does not exist or has no cells; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::reduce::argmax;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let cells = Tensor::<1>::from_floats([0.0, 3.0, 1.0, 3.0], world.device());
///     let x = ShardTensor::distribute(cells, &mesh, &[Shard(0)])?;
///     let index = argmax(x, 0)?.into_local();
///     assert_eq!(index.into_scalar::<i64>(), 1);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn argmax<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D, Int>> {
    first_extremum(x, "argmax", dim, ReduceOp::Max)
}

/// Finds the index of the first minimum along a dim, which keeps one cell. See the [module](self).
///
/// # Errors
/// The errors of [`argmax`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::argmin;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([2.0, 0.0, 1.0]));
/// assert_eq!(argmin(x, 0)?.into_local().into_scalar::<i64>(), 1);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn argmin<const D: usize>(x: ShardTensor<D>, dim: usize) -> Result<ShardTensor<D, Int>> {
    first_extremum(x, "argmin", dim, ReduceOp::Min)
}

fn first_extremum<const D: usize>(
    x: ShardTensor<D>,
    operator: &'static str,
    dim: usize,
    op: ReduceOp,
) -> Result<ShardTensor<D, Int>> {
    require_dim(operator, &x, dim)?;
    x.require_resolved(operator)?;
    if x.dims()[dim] == 0 {
        return Err(Error::operator(operator, format!("dim {dim} has no cells")));
    }
    let x = x.detach();
    let extremum = extremum_dims(x.clone(), &[dim], op)?;
    let layout = rule(operator, x.layout(), &[dim], ReduceOp::Min)?;
    let start = x.layout().local_box(x.mesh().position()).ranges()[dim].start as i64;
    // An index beyond all cells, for ranks that do not hold the extremum.
    let beyond = x.dims()[dim] as i64;
    let (local, _, mesh) = x.into_parts();
    let shape = local.dims();
    let mut result = shape;
    result[dim] = 1;
    let device = local.device().inner();
    let index: Tensor<D, Int> = if shape.contains(&0) {
        let like = Tensor::<1, Int>::full([1], beyond, &device).into_dispatch();
        Tensor::from_dispatch(blank(&like, &result, Some(beyond as f64)))
    } else {
        let holds = holders(&local, extremum.into_local().expand(shape));
        let mut along = [1; D];
        along[dim] = shape[dim];
        let cells = Tensor::<1, Int>::arange(start..start + shape[dim] as i64, &device);
        let cells = cells.reshape(along).expand(shape);
        let nothing = Tensor::<D, Int>::full(shape, beyond, &device);
        nothing.mask_where(holds, cells).min_dim(dim)
    };
    Ok(ShardTensor::from_parts(index, layout, mesh).resolve())
}

/// Finds the `count` largest cells along a whole dim, in descending order, and their indices. See
/// the [module](self).
///
/// # Errors
/// A dim that does not exist or is sharded; a count of zero or beyond the cells of the dim; partial
/// values.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::reduce::topk_with_indices;
///
/// let x = ShardTensor::solo(Tensor::<1>::from([2.0, 7.0, 1.0, 5.0]));
/// let (values, indices) = topk_with_indices(x, 2, 0)?;
/// values.local().to_data().assert_eq(&[7.0_f32, 5.0].into(), true);
/// assert_eq!(indices.local().to_data().iter::<i64>().collect::<Vec<_>>(), [1, 3]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn topk_with_indices<const D: usize>(
    x: ShardTensor<D>,
    count: usize,
    dim: usize,
) -> Result<(ShardTensor<D>, ShardTensor<D, Int>)> {
    const NAME: &str = "topk_with_indices";
    require_dim(NAME, &x, dim)?;
    x.require_resolved(NAME)?;
    if count == 0 || count > x.dims()[dim] {
        let message = format!("{count} cells of dim {dim} of {:?}", x.dims());
        return Err(Error::operator(NAME, message));
    }
    x.require_whole(NAME, dim)?;
    let (local, from, mesh) = x.into_parts();
    let layout = from.resized(dim, vec![count]);
    let local = fill_all(local, &from, NAME, 0.0)?;
    let (values, indices) = if flex::runs_on(&local.device()) {
        largest(local, count, dim)?
    } else {
        let (values, indices) = local.sort_descending_with_indices(dim);
        (values.narrow(dim, 0, count), indices.narrow(dim, 0, count))
    };
    let values = drop_empty(values, &layout, mesh.position(), NAME)?;
    let held = layout.local_shape(mesh.position());
    let indices = if held.contains(&0) {
        Tensor::from_dispatch(blank(&indices.into_dispatch(), &held, None))
    } else {
        indices
    };
    let values = ShardTensor::from_parts(values, layout.clone(), mesh.clone());
    Ok((values, ShardTensor::from_parts(indices, layout, mesh)))
}

/// Registry entries of indices and largest cells.
pub(super) const GOLDEN: [Golden; 3] = [
    Golden::new("argmax", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            reduced(case, &[dim], without_gradients(argmax(case.input::<D>(0)?, dim)))
        })
    })
    .with_travels(["an extremum and an index", "–"]),
    Golden::new("argmin", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            reduced(case, &[dim], without_gradients(argmin(case.input::<D>(0)?, dim)))
        })
    })
    .with_travels(["an extremum and an index", "–"]),
    Golden::new("topk", |case| {
        let count = case.attributes.list("k")[0];
        with_dims!(case.dims(), D => {
            let dim = case.attributes.dim("dim", D);
            output(topk_with_indices(case.input::<D>(0)?, count, dim).map(|(values, _)| values))
        })
    })
    .with_method("topk_with_indices")
    .with_sharded(Dims::AllButDim),
];

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Shard};

    use super::*;

    #[test]
    fn the_first_of_equal_cells_is_found_on_any_rank() {
        let cells = [0.0, 7.0, -2.0, 7.0, -2.0];
        for extents in [vec![5], vec![2, 3], vec![0, 1, 4], vec![3, 0, 2]] {
            let found = Launcher::local(extents.len()).collect(|world| {
                let mesh = world.mesh([("x", extents.len())])?;
                let x = Tensor::<2>::from_floats([cells, cells], world.device());
                let layout = halocline_core::Layout::new(mesh.shape(), &[2, 5], &[Shard(1)])?;
                let x = ShardTensor::distribute(x, &mesh, &layout.with_extents(1, &extents)?)?;
                let both = [argmax(x.clone(), 1)?, argmin(x, 1)?];
                Ok(both.map(|index| {
                    index
                        .into_local()
                        .into_data()
                        .iter::<i64>()
                        .collect::<Vec<_>>()
                }))
            });
            for rank in found.unwrap() {
                assert_eq!(rank, [vec![1, 1], vec![2, 2]], "{extents:?}");
            }
        }
    }
}
