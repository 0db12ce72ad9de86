//! Concatenation.

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

/// Concatenates tensors along a dim that is whole on every rank. Their layouts must be equal in all
/// other dims.
///
/// # Adjoint
/// The range of the cotangent that belongs to the part.
///
/// # Errors
/// No tensors, a dim that is sharded, layouts that differ in another dim.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::cat;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     assert_eq!(cat(vec![x.clone(), x], 1)?.dims(), [5, 6]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cat<const D: usize>(parts: Vec<ShardTensor<D>>, dim: usize) -> Result<ShardTensor<D>> {
    const NAME: &str = "cat";
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
