//! Constants that vary along one dim.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Error, Replicate, Result, Shard, ShardTensor};

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
