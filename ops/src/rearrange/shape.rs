//! Changes of shape that keep the cells: unsqueeze, squeeze, reshape, and expand.
//!
//! # Placement
//! Ranks keep their cells, and nothing is sent. A new dim is whole. Removing a sharded dim of one
//! cell leaves a partial sum of the cell and zeros. In a reshape, a sharded dim must either be
//! kept, or be the first of the dims that are merged or split; its extents must map to whole
//! extents of the new dim.
//!
//! # Adjoint
//! The inverse operator; for `expand` the sum over the copies.

use std::ops::Range;

use burn::tensor::kind::Basic;
use halocline_core::{Error, Result, ShardTensor};

use super::select::select_dim;
use crate::driver::empty::{fill_all, without_fill};
use crate::driver::place::{renumbered, require_dim};
use crate::golden::{Dims, Golden, array, output, with_dims};

/// Inserts a dim of one cell as dim `dim` of the result. The result has `E` dims, one more than
/// `x`.
///
/// # Errors
/// A dim beyond the last of the result; another number of dims.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::unsqueeze_dim;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     let y: ShardTensor<3> = unsqueeze_dim(x, 0)?;
///     assert_eq!((y.dims(), y.placements()), ([1, 5, 3], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn unsqueeze_dim<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
) -> Result<ShardTensor<E, K>> {
    if dim > D || D + 1 != E {
        let message = format!(
            "a new dim {dim} of {:?}, for a result of {E} dims",
            x.dims()
        );
        return Err(Error::operator("unsqueeze_dim", message));
    }
    let mut extents = x.layout().all_extents().to_vec();
    extents.insert(dim, vec![1]);
    Ok(renumbered(x, extents, |held| {
        held + usize::from(held >= dim)
    }))
}

/// Removes a dim of one cell. The result has `E` dims, one fewer than `x`; if the dim is sharded,
/// it is partial, like that of [`select_dim`].
///
/// # Errors
/// A dim that does not exist or has another number of cells; another number of dims; partial values
/// along a sharded dim.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::squeeze_dim;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0]]));
/// let y: ShardTensor<1> = squeeze_dim(x, 0)?;
/// y.local().to_data().assert_eq(&[1.0_f32, 2.0].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn squeeze_dim<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    dim: usize,
) -> Result<ShardTensor<E, K>> {
    require_dim("squeeze_dim", &x, dim)?;
    if x.dims()[dim] != 1 {
        let message = format!("dim {dim} of {:?}; expected one of one cell", x.dims());
        return Err(Error::operator("squeeze_dim", message));
    }
    select_dim(x, dim, 0)
}

/// Reshapes the tensor, in row-major order. The result has `E` dims.
///
/// # Errors
/// A shape with another number of cells; a sharded dim that the shape does not keep, or whose
/// extents it cuts through. The message suggests a redistribution that helps.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::reshape;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<3>::ones([6, 4, 3], &mesh, &[Shard(1)])?;
///     let y: ShardTensor<4> = reshape(x.clone(), [2, 3, 4, 3])?; // splits dim 0
///     assert_eq!(y.placements(), [Shard(2)]);
///     let error = reshape::<3, 2, _>(x, [24, 3]).unwrap_err().to_string(); // merges dims 0 and 1
///     assert!(error.ends_with("redistribute(&[Replicate]) first"));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn reshape<const D: usize, const E: usize, K: Basic>(
    x: ShardTensor<D, K>,
    shape: [usize; E],
) -> Result<ShardTensor<E, K>> {
    const NAME: &str = "reshape";
    let from = x.dims();
    let cells = |shape: &[usize]| shape.iter().product::<usize>();
    if cells(&from) != cells(&shape) {
        return Err(Error::operator(NAME, format!("{from:?} to {shape:?}")));
    }
    let groups = groups(&from, &shape);
    let mut extents: Vec<Vec<usize>> = shape.iter().map(|size| vec![*size]).collect();
    let mut moved = [None; D];
    for dim in (0..D).filter(|dim| x.layout().is_sharded(*dim)) {
        let kept = groups.iter().find(|(dims, _)| dims.contains(&dim));
        // Dims of one cell before it have no effect.
        let kept = kept.filter(|(dims, _)| from[dims.start..dim].iter().all(|size| *size == 1));
        let kept = kept.and_then(|(dims, into)| {
            let first = into
                .clone()
                .find(|target| shape[*target] != 1)
                .or(into.clone().next())?;
            let size = cells(&shape[first + 1..into.end]);
            (!moved.contains(&Some(first))).then(|| (first, cells(&from[dim + 1..dims.end]), size))
        });
        let Some((target, inner, size)) = kept else {
            x.require_whole(NAME, dim)?;
            unreachable!("dim {dim} is sharded");
        };
        let held = x.layout().extents(dim);
        if size == 0 || held.iter().any(|extent| extent * inner % size != 0) {
            let message = format!(
                "{from:?} to {shape:?}: extents {held:?} of dim {dim} cut through cells of dim {target}; redistribute to \
                 multiples of {size} cells, or with dim {dim} whole"
            );
            return Err(Error::operator(NAME, message));
        }
        extents[target] = held.iter().map(|extent| extent * inner / size).collect();
        moved[dim] = Some(target);
    }
    Ok(renumbered(x, extents, |dim| {
        moved[dim].expect("every sharded dim has its place")
    }))
}

/// Finds the shortest ranges of dims of two shapes that hold the same cells.
fn groups(from: &[usize], target: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    if from.contains(&0) {
        return vec![(0..from.len(), 0..target.len())];
    }
    let mut found = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < target.len() {
        let start = (i, j);
        let (mut left, mut right) = (1, 1);
        loop {
            if left <= right && i < from.len() && (left < right || i == start.0) {
                left *= from[i];
                i += 1;
            } else if j < target.len() && (right < left || j == start.1) {
                right *= target[j];
                j += 1;
            } else {
                break;
            }
        }
        // Dims of one cell at the end of a shape belong to its last group.
        if j == target.len() {
            i += from[i..].iter().take_while(|size| **size == 1).count();
        }
        if i == from.len() {
            j += target[j..].iter().take_while(|size| **size == 1).count();
        }
        found.push((start.0..i, start.1..j));
    }
    found
}

/// Expands dims of one cell to these sizes; other dims keep theirs. Nothing is sent: a dim that
/// grows is whole.
///
/// # Errors
/// A new size for a dim of several cells; a sharded dim that would grow (the message suggests a
/// redistribution).
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::expand;
///
/// let x = ShardTensor::solo(Tensor::<2>::from([[1.0, 2.0]]));
/// let y = expand(x, [2, 2])?;
/// y.local().to_data().assert_eq(&[[1.0_f32, 2.0], [1.0, 2.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn expand<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    sizes: [usize; D],
) -> Result<ShardTensor<D, K>> {
    const NAME: &str = "expand";
    let grows = |dim: &usize| x.dims()[*dim] != sizes[*dim];
    let mut layout = x.layout().clone();
    for dim in (0..D).filter(grows) {
        if x.dims()[dim] != 1 || sizes[dim] == 0 {
            let message = format!("{:?} to {sizes:?}; only dims of one cell grow", x.dims());
            return Err(Error::operator(NAME, message));
        }
        x.require_whole(NAME, dim)?;
        layout = layout.resized(dim, vec![sizes[dim]]);
    }
    let (local, from, mesh) = x.into_parts();
    let local = fill_all(local, &from, NAME, 0.0)?;
    let held = layout.local_shape(mesh.position());
    let shape: [usize; D] = std::array::from_fn(|dim| held[dim].max(1));
    without_fill(local.expand(shape), layout, mesh, NAME)
}

/// Registry entries of changes of shape.
pub(super) const GOLDEN: [Golden; 4] = [
    Golden::new("unsqueeze", |case| {
        let dim = case.attributes.dim("dim", case.dims() + 1);
        with_dims!(case.dims(), D => {
            output(unsqueeze_dim::<D, { D + 1 }, _>(case.input::<D>(0)?, dim))
        })
    })
    .with_method("unsqueeze_dim"),
    Golden::new("squeeze", |case| {
        let dim = case.attributes.dim("dim", case.dims());
        with_dims!(case.dims(), D => {
            output(squeeze_dim::<D, { if D > 1 { D - 1 } else { 1 } }, _>(case.input::<D>(0)?, dim))
        })
    })
    .with_method("squeeze_dim")
    .with_travels(["– (partial if the dim is sharded)", "–"]),
    Golden::new("reshape", |case| {
        let sizes = case.attributes.numbers("shape");
        let known: f64 = sizes.iter().filter(|size| **size >= 0.0).product();
        with_dims!(case.dims(), D => {
            let x = case.input::<D>(0)?;
            let cells: usize = x.dims().iter().product();
            let shape = case.attributes.sizes("shape", |_| cells / (known as usize).max(1));
            with_dims!(shape.len(), E => output(reshape::<D, E, _>(x, array(&shape)?)))
        })
    })
    .with_sharded(Dims::Leading(2)),
    Golden::new("expand", |case| {
        with_dims!(case.dims(), D => {
            let x = case.input::<D>(0)?;
            let size = case.attributes.sizes("size", |dim| x.dims().get(dim).copied().unwrap_or(1));
            output(expand(x, array(&size)?))
        })
    })
    .with_sharded(Dims::AllButChannels),
];

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::{Launcher, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    #[test]
    fn dims_that_hold_the_same_cells_are_found() {
        assert_eq!(
            groups(&[6, 4, 3], &[2, 3, 4, 3]),
            [(0..1, 0..2), (1..2, 2..3), (2..3, 3..4)]
        );
        assert_eq!(groups(&[2, 6], &[4, 3]), [(0..2, 0..2)]);
        assert_eq!(groups(&[2, 1, 3], &[2, 3, 1]), [(0..1, 0..1), (1..3, 1..3)]);
        assert_eq!(groups(&[1, 5], &[5]), [(0..2, 0..1)]);
        assert_eq!(groups(&[1], &[1, 1]), [(0..1, 0..2)]);
    }

    struct Around;

    impl Operator<3, 3> for Around {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            let x: WithDims<X, 5> = inputs.remove(0).reshape([4, 1, 5, 2, 3]);
            let x: WithDims<X, 4> = (x.clone() * x).reshape([4, 5, 6, 1]);
            let x: WithDims<X, 4> = x.squeeze_dim::<3>(3).unsqueeze_dim::<4>(1);
            x.expand([4, 3, 5, 6]).sum_dims(&[1]).squeeze_dim::<3>(1)
        }
    }

    #[test]
    fn shards_keep_their_cells() {
        check_op(&Around, &[[4, 5, 6]], &[], &[0, 1], 1e-5);
    }

    struct OneRow;

    impl Operator<3, 2> for OneRow {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> WithDims<X, 2> {
            inputs.remove(0).squeeze_dim::<2>(1)
        }
    }

    #[test]
    fn one_sharded_cell_leaves_a_partial_sum() {
        check_op(&OneRow, &[[4, 1, 6]], &[], &[0, 1, 2], 1e-6);
    }

    #[test]
    fn shapes_that_cut_through_shards_are_refused() {
        let refused = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<2>::ones([6, 5], &mesh, &[Shard(0)])?;
            let error = expand(x.clone(), [6, 6]).unwrap_err().to_string();
            assert!(error.contains("only dims of one cell"), "{error}");
            reshape::<2, 2, _>(x, [3, 10]).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("multiples of 10 cells"), "{error}");
    }
}
