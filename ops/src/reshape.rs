//! Operators that compute nothing: joining, ranges, the shards of another tensor, profiles, dropping dims.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Error, IndexBox, Replicate, Result, Shard, ShardTensor};

use crate::empty::{drop_empty, fill_empty, keep};

/// Joins tensors along a dim that is whole on every rank; all else must agree.
///
/// # Adjoint
/// Each part gets its piece of the cotangent.
///
/// # Errors
/// No tensors, a dim that is sharded, layouts that differ elsewhere.
pub fn join<const D: usize>(parts: Vec<ShardTensor<D>>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "join";
    let Some(first) = parts.first() else {
        return Err(Error::operator(NAME, "no tensors"));
    };
    let mut extents = first.layout().all_extents().to_vec();
    if dim >= D {
        return Err(Error::operator(
            NAME,
            format!("dim {dim} of tensors of {D} dims"),
        ));
    }
    extents[dim] = vec![parts.iter().map(|part| part.dims()[dim]).sum()];
    for part in &parts {
        part.require_whole(NAME, dim)?;
        let others = |t: &ShardTensor<D>| {
            let mut extents = t.layout().all_extents().to_vec();
            extents[dim].clear();
            extents
        };
        let differ = |how: String| {
            let message = format!("{} and {} {how}", first.layout(), part.layout());
            Err(Error::operator(NAME, message))
        };
        if part.layout().mesh() != first.layout().mesh() {
            return differ("are on two meshes".into());
        }
        if part.placements() != first.placements() {
            return differ(
                "lie differently; bring one to the shards of the other by align_to".into(),
            );
        }
        if others(part) != others(first) {
            return differ(format!("differ in another dim than {dim}"));
        }
    }
    let layout = first.layout().derive(first.placements().to_vec(), extents);
    let mesh = first.mesh().clone();
    let locals = parts.into_iter().map(|part| part.into_parts().0).collect();
    Ok(ShardTensor::from_parts(
        Tensor::cat(locals, dim),
        layout,
        mesh,
    ))
}

/// A tensor with the shards of another one, which may differ in the size of dims that are whole there.
///
/// # Adjoint
/// The way back.
///
/// # Errors
/// A dim that is sharded there and of another size here, another mesh, a failure of communication.
pub fn align<const D: usize>(x: ShardTensor<D>, other: &ShardTensor<D>) -> Result<ShardTensor<D>> {
    if x.layout() == other.layout() {
        return Ok(x);
    }
    let extents = (0..D).map(|dim| {
        if other.layout().is_sharded(dim) {
            other.layout().extents(dim).to_vec()
        } else {
            vec![x.dims()[dim]]
        }
    });
    let layout = other
        .layout()
        .derive(other.placements().to_vec(), extents.collect());
    x.try_redistribute(&layout)
}

/// A range of a dim. Where the dim is sharded, each rank keeps what it has of the range: nothing travels.
///
/// # Adjoint
/// The cotangent in the range, zero elsewhere.
///
/// # Errors
/// A dim that is not there, a range without cells or beyond its end.
pub fn narrow<const D: usize>(
    x: ShardTensor<D>,
    dim: usize,
    range: Range<usize>,
) -> Result<ShardTensor<D>> {
    const NAME: &str = "narrow";
    if dim >= D || range.end > x.dims()[dim] || range.is_empty() {
        return Err(Error::operator(
            NAME,
            format!("{range:?} of dim {dim} of {:?}", x.dims()),
        ));
    }
    if range == (0..x.dims()[dim]) {
        return Ok(x);
    }
    let mut extents = x.layout().all_extents().to_vec();
    let mut start = 0;
    for extent in &mut extents[dim] {
        let cells = start..start + *extent;
        start = cells.end;
        *extent = common(&cells, &range).len();
    }
    let layout = x.layout().derive(x.placements().to_vec(), extents);
    let all: Vec<usize> = (0..D).collect();
    let (local, from, mesh) = x.into_parts();
    if from.extents(dim).len() > 1 {
        let own = from.local_box(mesh.position());
        let mut kept = IndexBox::whole(&own.shape()).ranges().to_vec();
        let cells = &own.ranges()[dim];
        let found = common(cells, &range);
        kept[dim] = found.start - cells.start..found.end - cells.start;
        let local = keep(local, &IndexBox::new(kept), NAME)?;
        return Ok(ShardTensor::from_parts(local, layout, mesh));
    }
    // burn cuts a slice without cells off from the graph, on that rank alone.
    let local = fill_empty(local, &from, &all, NAME, 0.0)?.narrow(dim, range.start, range.len());
    let local = drop_empty(local, &layout, mesh.position(), NAME)?;
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// The cells of a range that are in another one, or nothing at one of its ends.
fn common(cells: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let within = |cell: usize| cell.clamp(cells.start, cells.end);
    within(other.start)..within(other.end)
}

/// A tensor that varies along one dim only, with one cell in all others and the shards that `x` has in that dim.
///
/// # Errors
/// A number of values that differs from the dim's size.
pub fn profile<const D: usize>(
    x: &ShardTensor<D>,
    dim: usize,
    values: &[f64],
) -> Result<ShardTensor<D>> {
    const NAME: &str = "profile";
    if dim >= D || values.len() != x.dims()[dim] {
        let message = format!("{} values along dim {dim} of {:?}", values.len(), x.dims());
        return Err(Error::operator(NAME, message));
    }
    let own = x.layout().local_box(x.mesh().position()).ranges()[dim].clone();
    let mut shape = [1; D];
    shape[dim] = own.len();
    let local = Tensor::from_data(
        TensorData::new(values[own].to_vec(), shape),
        (&x.device().inner(), x.local().dtype()),
    );
    let placements = x.placements().iter().map(|placement| match placement {
        Shard(sharded) if *sharded == dim => *placement,
        _ => Replicate,
    });
    let mut extents = vec![vec![1]; D];
    extents[dim] = x.layout().extents(dim).to_vec();
    let layout = x.layout().derive(placements.collect(), extents);
    Ok(ShardTensor::from_parts(local, layout, x.mesh().clone()))
}

/// The first two dims of a tensor whose other dims have one cell.
///
/// # Errors
/// A further dim with more than one cell, or sharded.
pub fn leading<const D: usize>(x: ShardTensor<D>) -> Result<ShardTensor<2>> {
    let shape = x.dims();
    if D < 2 || shape[2..].iter().any(|&size| size != 1) {
        return Err(Error::operator(
            "leading",
            format!("{shape:?}; expected [batch, channels, 1, ..]"),
        ));
    }
    for dim in 2..D {
        x.require_whole("leading", dim)?;
    }
    let layout = x.layout().derive(
        x.placements().to_vec(),
        x.layout().all_extents()[..2].to_vec(),
    );
    let (local, _, mesh) = x.into_parts();
    let dims = local.dims();
    Ok(ShardTensor::from_parts(
        local.reshape([dims[0], dims[1]]),
        layout,
        mesh,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halocline_core::Launcher;

    /// One of the ranks holds none of the dim's one cell.
    #[test]
    fn a_sharded_dim_is_not_dropped() {
        let job = Launcher::local(2).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let x = ShardTensor::<4>::ones([2, 3, 1, 1], &mesh, &[Shard(2)])?;
            let error = leading(x).unwrap_err().to_string();
            assert!(
                error.contains("redistribute(&[Replicate]) first"),
                "{error}"
            );
            Ok(())
        });
        job.unwrap();
    }
}
