//! Gathering of cells by number.

use std::sync::Arc;

use halocline_core::comm::Operation;
use halocline_core::plan::PlanCache;
use halocline_core::{Error, Result, ShardTensor, Traffic, ops};

use super::plan::TakePlan;
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::require_dim;
use crate::kernel::taken::{Places, take};

/// Cell numbers to gather: any cells, in any order, with repetitions.
///
/// Plans for a map are cached with it and shared by its clones, not looked up by the numbers; so
/// make a map once and reuse it.
///
/// # Example
/// ```
/// use halocline_ops::graph::CellMap;
///
/// let map = CellMap::new(vec![4, 0, 4]);
/// assert_eq!(map.cells(), [4, 0, 4]);
/// ```
#[derive(Clone, Debug)]
pub struct CellMap {
    places: Arc<Places>,
    plans: Arc<PlanCache>,
}

impl CellMap {
    /// Creates a map of these cells.
    pub fn new(cells: Vec<usize>) -> Self {
        Self {
            places: Places::new(cells),
            plans: Arc::default(),
        }
    }

    /// Cell numbers.
    pub fn cells(&self) -> &[usize] {
        self.places.cells()
    }
}

/// Gathers the cells of a map along a dim: part `p` of a sharded dim receives the next `extents[p]`
/// of them.
///
/// # Placement
/// Any dims may be sharded; values must be resolved. The result is sharded as `x` is, with these
/// extents.
///
/// # Communication
/// Each rank receives the cells that it takes from others, each cell once, in one message per peer.
///
/// # Adjoint
/// The cotangents of all copies of a cell are added.
///
/// # Errors
/// Fails for a dim or cell that does not exist, for a number of extents other than the number of
/// parts, for extents that do not sum to the length of the map, for partial values, and if
/// communication fails.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::graph::{CellMap, take_cells};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("cells", 2)])?;
///     let x = Tensor::<1>::from_floats([0.0, 10.0, 20.0, 30.0], world.device());
///     let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
///     // The first part takes three cells, the second two.
///     let y = take_cells(x, 0, &CellMap::new(vec![3, 0, 3, 1, 2]), &[3, 2])?;
///     let expected = [vec![30.0_f32, 0.0, 30.0], vec![10.0, 20.0]];
///     assert_eq!(y.local().to_data().iter::<f32>().collect::<Vec<_>>(), expected[world.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn take_cells<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    map: &CellMap,
    extents: &[usize],
) -> Result<ShardTensor<D>> {
    take_named("take_cells", x, dim, map, extents)
}

/// [`take_cells`] on behalf of the named operator.
pub(crate) fn take_named<const D: usize>(
    operator: &'static str,
    x: ShardTensor<D>,
    dim: usize,
    map: &CellMap,
    extents: &[usize],
) -> Result<ShardTensor<D>> {
    require_dim(operator, &x, dim)?;
    x.require_resolved(operator)?;
    let (size, parts) = (x.dims()[dim], x.layout().extents(dim).len());
    let bound = map.places.bound();
    if bound > size {
        let message = format!("cell {} of dim {dim} of {:?}", bound - 1, x.dims());
        return Err(Error::operator(operator, message));
    }
    let sum: usize = extents.iter().sum();
    if extents.len() != parts || sum != map.cells().len() {
        let message = format!(
            "extents {extents:?} of {} cells; expected one for each of {parts} parts of dim {dim}",
            map.cells().len()
        );
        return Err(Error::operator(operator, message));
    }
    let output = x.layout().resized(dim, extents.to_vec());
    let (local, layout, mesh) = x.into_parts();
    let local = fill_all(local, &layout, operator, 0.0)?;
    let local = if layout.is_sharded(dim) {
        // Ranks in threads of one process may share the map.
        let key = (layout.clone(), mesh.position(), dim, extents.to_vec());
        let plan = map.plans.get_or_make(key, |(layout, _, dim, extents)| {
            Ok(TakePlan::new(layout, &mesh, *dim, map.cells(), extents))
        })?;
        let operation = Operation::new(operator, Traffic::Exchange, Some(&layout));
        let packed = take(local, dim, &plan.packed);
        let exchange = || ops::exchange(packed, &mesh, plan.exchange.clone(), operation);
        let arrived = Error::catch(exchange)?;
        take(arrived, dim, &plan.taken)
    } else {
        match map.cells() {
            [] => local.narrow(dim, 0, 1),
            _ => take(local, dim, &map.places),
        }
    };
    without_fill(local, output, mesh, operator)
}

#[cfg(test)]
mod tests {
    use halocline_core::{Launcher, Shard};

    use super::*;

    #[test]
    fn plans_are_dropped_with_their_map() {
        let result = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("cells", 2)])?;
            let x = ShardTensor::<1>::ones([4], &mesh, &[Shard(0)])?;
            let map = CellMap::new(vec![3, 0]);
            let places = Arc::downgrade(&map.places);
            drop(take_cells(x, 0, &map, &[1, 1])?);
            drop(map);
            assert!(places.upgrade().is_none());
            Ok(())
        });
        result.unwrap();
    }
}
