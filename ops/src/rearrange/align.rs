//! The shards of another tensor.

use halocline_core::{Result, ShardTensor};

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
