//! Helpers of tests.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{DeviceMesh, Placement, Replicate, Result, Shard, ShardTensor};

/// Distributes a tensor over a mesh. If its first dim has one cell, that dim stays whole.
pub(crate) fn distributed<const D: usize>(
    data: TensorData,
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<ShardTensor<D>> {
    let whole = Tensor::<D>::from_data(data, &mesh.device().clone().inner());
    let is_single = whole.dims()[0] == 1;
    let placements = placements.iter().map(|placement| match placement {
        Shard(0) if is_single => Replicate,
        other => *other,
    });
    let placements: Vec<Placement> = placements.collect();
    ShardTensor::distribute(whole, mesh, &placements)
}
