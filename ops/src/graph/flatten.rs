//! Cells of several dims as one dim, and back.

use std::ops::Range;

use halocline_core::{Error, IndexBox, Layout, Result, Shard, ShardTensor};

use crate::reshape;

/// Merges dims into one dim of cells, in the order in which ranks hold them: the cells of the first
/// part row by row, then those of the next. [`cell_numbers`] lists that order. Unlike
/// [`flatten`](crate::rearrange::flatten()), whose order does not depend on the shards, it takes
/// shards of all these dims. Nothing is sent.
///
/// # Adjoint
/// [`unflatten_cells`].
///
/// # Errors
/// Fails for a range of dims that does not leave `E` dims.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::graph::{flatten_cells, unflatten_cells};
///
/// Launcher::local(4).run(|world| {
///     let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 3, 4], &mesh, &[Shard(2), Shard(3)])?;
///     let layout = x.layout().clone();
///     let cells: ShardTensor<3> = flatten_cells(x, 2..4)?;
///     assert_eq!(cells.layout().extents(2), [4, 4, 2, 2]);
///     let x: ShardTensor<4> = unflatten_cells(cells, 2..4, &layout)?;
///     assert_eq!(x.dims(), [1, 3, 3, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn flatten_cells<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dims: Range<usize>,
) -> Result<ShardTensor<E>> {
    if dims.is_empty() || dims.end > D || D + 1 - dims.len() != E {
        let message = format!("dims {dims:?} of {:?} for a result of {E} dims", x.dims());
        return Err(Error::operator("flatten_cells", message));
    }
    Ok(merged(x, dims))
}

/// [`flatten_cells`] of dims that exist.
pub(crate) fn merged<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dims: Range<usize>,
) -> ShardTensor<E> {
    let (local, layout, mesh) = x.into_parts();
    let layout = flat_layout(&layout, dims);
    let local = reshape(local, layout.local_shape(mesh.position()));
    ShardTensor::from_parts(local, layout, mesh)
}

/// Splits a dim of cells into the dims of a field of this layout: the inverse of [`flatten_cells`],
/// which has an example. Nothing is sent.
///
/// # Adjoint
/// [`flatten_cells`].
///
/// # Errors
/// Fails for a layout without `E` dims or these dims, and for cells in another layout than that of
/// the flattened field.
pub fn unflatten_cells<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    dims: Range<usize>,
    layout: &Layout,
) -> Result<ShardTensor<E>> {
    let exist = !dims.is_empty() && dims.end <= E && layout.shape().len() == E;
    if !exist || flat_layout(layout, dims.clone()) != *x.layout() {
        let message = format!(
            "cells {} for dims {dims:?} of a field {layout}; expected the layout of that field with these dims merged",
            x.layout()
        );
        return Err(Error::operator("unflatten_cells", message));
    }
    let (local, _, mesh) = x.into_parts();
    let local = reshape(local, layout.local_shape(mesh.position()));
    Ok(ShardTensor::from_parts(local, layout.clone(), mesh))
}

/// Layout of a field of this layout after [`flatten_cells`].
///
/// # Panics
/// Panics for dims that the layout does not have.
///
/// # Example
/// ```
/// use halocline_core::{Layout, MeshShape, Shard};
/// use halocline_ops::graph::flat_layout;
///
/// let mesh = MeshShape::new(&[("lon", 2)], vec![0, 1])?.into();
/// let layout = Layout::new(&mesh, &[1, 3, 5], &[Shard(2)])?;
/// assert_eq!(flat_layout(&layout, 1..3).extents(1), [9, 6]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn flat_layout(layout: &Layout, dims: Range<usize>) -> Layout {
    let moved = |dim: usize| match dim {
        dim if dim < dims.start => dim,
        dim if dim < dims.end => dims.start,
        dim => dim + 1 - dims.len(),
    };
    let placements = layout.map_placements(|placement| match placement {
        Shard(dim) => Shard(moved(dim)),
        other => other,
    });
    let mut extents = layout.all_extents().to_vec();
    let parts: usize = extents[dims.clone()].iter().map(Vec::len).product();
    extents.splice(dims.clone(), [vec![0; parts]]);
    // The numbers of the parts do not depend on their extents.
    let numbered = layout.derive(placements.clone(), extents.clone());
    for position in 0..layout.mesh().size() {
        let shape = layout.local_shape(position);
        let part = numbered.part(dims.start, position);
        extents[dims.start][part] = shape[dims.clone()].iter().product();
    }
    layout.derive(placements, extents)
}

/// Lists the cells in the order of [`flatten_cells`] by their numbers, which count the cells of
/// these dims row by row.
///
/// # Panics
/// Panics for dims that the layout does not have.
///
/// # Example
/// ```
/// use halocline_core::{Layout, MeshShape, Shard};
/// use halocline_ops::graph::cell_numbers;
///
/// let mesh = MeshShape::new(&[("lon", 2)], vec![0, 1])?.into();
/// let layout = Layout::new(&mesh, &[1, 2, 5], &[Shard(2)])?;
/// // Three columns, then two.
/// assert_eq!(cell_numbers(&layout, 1..3), [0, 1, 2, 5, 6, 7, 3, 4, 8, 9]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cell_numbers(layout: &Layout, dims: Range<usize>) -> Vec<usize> {
    let flat = flat_layout(layout, dims.clone());
    let mut boxes = vec![None; flat.extents(dims.start).len()];
    for position in 0..layout.mesh().size() {
        boxes[flat.part(dims.start, position)] = Some(layout.local_box(position));
    }
    let sizes = &layout.shape()[dims.clone()];
    let numbers = |cells: IndexBox| -> Vec<usize> {
        let ranges = cells.ranges()[dims.clone()].iter().zip(sizes);
        ranges.fold(vec![0], |numbers, (range, size)| {
            let next = |number: usize| range.clone().map(move |index| number * size + index);
            numbers.into_iter().flat_map(next).collect()
        })
    };
    boxes.into_iter().flatten().flat_map(numbers).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, MeshShape};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Cells;

    impl Operator<4, 4> for Cells {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            let squares = |x: ShardTensor<4>| {
                let layout = x.layout().clone();
                let cells: ShardTensor<3> = flatten_cells(x, 2..4)?;
                unflatten_cells::<3, 4>(cells.square(), 2..4, &layout)
            };
            inputs.remove(0).try_op(squares).unwrap()
        }
    }

    #[test]
    fn fields_of_any_shards_are_lists_of_cells() {
        check_op(&Cells, &[[2, 3, 5, 4]], &[], &[0, 2, 3], 1e-6);
    }

    #[test]
    fn cells_are_numbered_by_parts_in_the_order_of_the_axes() {
        for (axes, expected) in [
            (["lat", "lon"], [0, 1, 2, 4, 5, 6, 3, 7, 8, 9, 10, 11]),
            (["lon", "lat"], [0, 1, 2, 4, 5, 6, 8, 9, 10, 3, 7, 11]),
        ] {
            let mesh = MeshShape::new(&axes.map(|axis| (axis, 2)), (0..4).collect());
            let placed = axes.map(|axis| Shard(usize::from(axis == "lon")));
            let layout = Layout::new(&mesh.unwrap().into(), &[3, 4], &placed).unwrap();
            let layout = layout.with_extents(1, &[3, 1]).unwrap();
            assert_eq!(cell_numbers(&layout, 0..2), expected, "{axes:?}");
        }
    }

    #[test]
    fn misuse_is_told() {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lon", 2)])?;
            let x = ShardTensor::<3>::ones([2, 3, 4], &mesh, &[Shard(2)])?;
            let error = flatten_cells::<3, 3>(x.clone(), 1..3).unwrap_err();
            assert!(error.to_string().contains("a result of 3 dims"), "{error}");
            let rows = x.layout().with_extents(2, &[3, 1])?;
            let cells = flatten_cells::<3, 2>(x, 1..3)?;
            unflatten_cells::<2, 3>(cells, 1..3, &rows).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("with these dims merged"), "{error}");
    }
}
