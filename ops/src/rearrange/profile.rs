//! Profile: a constant that varies along one dim.

use burn::tensor::{Tensor, TensorData};
use halocline_core::{Error, Replicate, Result, Shard, ShardTensor};

/// Creates a constant that varies along one dim, with one cell in all others and the shards of `x`
/// in that dim. Nothing is sent.
///
/// # Errors
/// A number of values other than the size of the dim.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::profile;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
///     let weights = profile(&x, 0, &[0.5, 1.0, 1.0, 0.5])?;
///     assert_eq!((weights.dims(), weights.local_dims()), ([4, 1], [2, 1]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
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
    let cells = x.layout().local_box(x.mesh().position()).ranges()[dim].clone();
    let mut shape = [1; D];
    shape[dim] = cells.len();
    let local = Tensor::from_data(
        TensorData::new(values[cells].to_vec(), shape),
        (&x.device().inner(), x.local().dtype()),
    );
    let placements = x.layout().map_placements(|placement| match placement {
        Shard(sharded) if sharded == dim => placement,
        _ => Replicate,
    });
    let mut extents = vec![vec![1]; D];
    extents[dim] = x.layout().extents(dim).to_vec();
    let layout = x.layout().derive(placements, extents);
    Ok(ShardTensor::from_parts(local, layout, x.mesh().clone()))
}
