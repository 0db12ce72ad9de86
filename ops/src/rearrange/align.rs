//! Alignment: redistribution to the shards of another tensor.

use halocline_core::{Result, ShardTensor};

/// Redistributes `x` to the shards of `other`. Sizes may differ in dims that are whole in `other`.
///
/// # Adjoint
/// The redistribution in the opposite direction.
///
/// # Errors
/// A dim that is sharded in `other` and has another size in `x`; another mesh; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
/// use halocline_ops::rearrange::align_to;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([6, 3], &mesh, &[Replicate])?;
///     let other = ShardTensor::<2>::ones([6, 5], &mesh, &[Shard(0)])?;
///     assert_eq!(align_to(x, &other)?.local_dims(), [3, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn align_to<const D: usize>(
    x: ShardTensor<D>,
    other: &ShardTensor<D>,
) -> Result<ShardTensor<D>> {
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
