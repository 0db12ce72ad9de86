//! Neighborhood attention: a query attends to the keys around it.
//!
//! `y[i] = Σ_j softmax_j(scale · q[i]·k[j]) · v[j]` over the keys in the query's
//! [`Neighborhood`](crate::Neighborhood) in every spatial dim.
//! Semantics follow NATTEN 0.21, with periodic dims in addition.
//!
//! # Shapes
//! Global `q` is `[batch, *spatial, heads, width]`, `k` `[batch, *spatial, key_heads, width]`, `v` and the result have a width of
//! their own: `[batch, *spatial, key_heads, value_width]` and `[batch, *spatial, heads, value_width]`. One head of keys and values
//! serves `heads / key_heads` neighbouring heads of queries.
//!
//! # Placement
//! Batch, spatial dims and heads may be sharded, in any combination and with any extents, alike for all three; widths must be
//! whole, values resolved. Keys and values that other ranks hold travel together, in one exchange; queries never travel.
//!
//! # Adjoint
//! Scores are computed anew. Gradients of keys and values of other ranks travel back and add up there.

mod backward;
mod composed;
mod forward;
mod node;
mod options;
mod places;
mod prepared;
mod run;
mod shapes;
#[cfg(test)]
mod tests;

use halocline_core::{Error, Result, ShardTensor};

use crate::kernel::flex;
pub use options::NeighborhoodOptions;
use prepared::Prepared;

/// Neighborhood attention. See the [module](self).
///
/// # Errors
/// Shapes, number types or placements that do not fit; a neighborhood that does not fit its dim; a failure of
/// communication.
///
/// # Example
/// ```
/// use halocline_core::{Distribution, Launcher, RandomKey, Shard, ShardTensor};
/// use halocline_ops::{NeighborhoodOptions, attention::neighborhood_attention};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
///     // [batch, latitude, longitude, heads, width]
///     let field = |name: &str| {
///         ShardTensor::<5>::random([1, 6, 12, 2, 8], normal, RandomKey::new(0, name), &mesh, &[Shard(2)])
///     };
///     let options = NeighborhoodOptions::new([3, 5]).with_periodic([false, true]);
///     let y = neighborhood_attention(field("q")?, field("k")?, field("v")?, &options)?;
///     assert_eq!(y.dims(), [1, 6, 12, 2, 8]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn neighborhood_attention<const D: usize, const N: usize>(
    q: ShardTensor<D>,
    k: ShardTensor<D>,
    v: ShardTensor<D>,
    options: &NeighborhoodOptions<N>,
) -> Result<ShardTensor<D>> {
    let prepared = Prepared::new(&q, &k, &v, options)?;
    let mesh = q.mesh().clone();
    let y = if flex::runs_on(&q.device()) {
        let [q, k, v] = [q, k, v].map(|tensor| tensor.into_parts().0);
        Error::catch(|| node::attention(q, k, v, prepared.run))?
    } else {
        composed::attention(q, k, v, &prepared)?
    };
    Ok(ShardTensor::from_parts(y, prepared.output, mesh))
}
