//! Neighborhood attention: a query attends to the keys around it.
//!
//! `y[i] = Σ_j softmax_j(scale · q[i]·k[j]) · v[j]` over the keys in the query's
//! [`Neighborhood`](crate::Neighborhood) in every spatial dim. Semantics follow NATTEN 0.21, with
//! periodic dims in addition.
//!
//! # Shapes
//! Global `q` is `[batch, *spatial, heads, width]` and `k` `[batch, *spatial, key_heads, width]`.
//! `v` and the result have a width of their own: `[batch, *spatial, key_heads, value_width]` and
//! `[batch, *spatial, heads, value_width]`. Each head of keys and values serves `heads / key_heads`
//! consecutive heads of queries.
//!
//! # Placement
//! Batch, spatial dims and heads may be sharded, in any combination and with any extents,
//! identically for all three; widths must be whole, values resolved. Keys and values of other ranks
//! are sent together, in one exchange; queries are never sent. If every query reaches all of many
//! keys, these go round a ring instead, by [`cell_attention`].
//!
//! # Adjoint
//! Scores are recomputed. Gradients of the keys and values of other ranks are sent back and added
//! there.

mod backward;
mod composed;
mod forward;
mod heads;
#[cfg(test)]
mod natten;
mod node;
mod options;
mod places;
mod prepared;
mod run;
mod shapes;
#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use halocline_core::{Error, Result, ShardTensor};

use super::attended::{AttentionOutput, attended};
use super::cells::{cell_attention, with_lse};
use super::dense::AttentionOptions;
use super::tokens;
use crate::kernel::flex;
use crate::operand::fan_out_alike;
pub use options::NeighborhoodOptions;
use prepared::Prepared;

/// Neighborhood attention. See the [module](self).
///
/// # Errors
/// Shapes, dtypes or placements that do not fit; a neighborhood that does not fit its dim; a
/// failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Distribution, Launcher, RandomKey, Shard, ShardTensor};
/// use halocline_ops::{NeighborhoodOptions, attention::neighborhood_attention};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lon", 2)])?;
///     let normal = Distribution::Normal(0.0, 1.0);
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
    let [q, k, v] = fan_out_alike([q, k, v])?;
    let prepared = Prepared::new(&q, &k, &v, options, false)?;
    if let Some(dense) = dense(&q, options) {
        return cell_attention(q, k, v, &dense);
    }
    let mesh = q.mesh().clone();
    let y = local(q, k, v, &prepared)?;
    Ok(ShardTensor::from_parts(y, prepared.output, mesh))
}

/// Neighborhood attention with its log-sum-exps. See [`neighborhood_attention`].
///
/// # Errors
/// The errors of [`neighborhood_attention`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{NeighborhoodOptions, attention::neighborhood_attention_with_lse};
///
/// // [batch, cells, heads, width]
/// let field = || ShardTensor::solo(Tensor::<4>::ones([1, 8, 1, 4], &Default::default()));
/// let options = NeighborhoodOptions::new([3]).with_scale(0.5);
/// let y = neighborhood_attention_with_lse(field(), field(), field(), &options)?;
/// let lse = y.lse.into_local().into_data(); // of three scores of 2
/// assert!(lse.iter::<f32>().all(|lse| (lse - (3.0_f32.ln() + 2.0)).abs() < 1e-6));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn neighborhood_attention_with_lse<const D: usize, const N: usize>(
    q: ShardTensor<D>,
    k: ShardTensor<D>,
    v: ShardTensor<D>,
    options: &NeighborhoodOptions<N>,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    let [q, k, v] = fan_out_alike([q, k, v])?;
    let prepared = Prepared::new(&q, &k, &v, options, true)?;
    near([q, k, v], &prepared, options)
}

/// Neighborhood attention to a field and to further tokens that every query reaches, with one
/// softmax over both.
///
/// The `keys` and `values` of these tokens are `[batch, tokens, key_heads, width]`, or of one
/// sample for all. They are whole in tokens, sharded in batch and heads like those of the field,
/// and replicated where its cells are sharded. Their gradients are summed over these axes.
///
/// # Errors
/// The errors of [`neighborhood_attention`]; tokens that do not fit.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{NeighborhoodOptions, attention::neighborhood_attention_with_tokens};
///
/// let field = |value| ShardTensor::solo(Tensor::<4>::full([1, 8, 1, 4], value, &Default::default()));
/// let token = |value| ShardTensor::solo(Tensor::<4>::full([1, 1, 1, 4], value, &Default::default()));
/// let options = NeighborhoodOptions::new([3]);
/// // Three keys of the field with values of 1, and a token with a value of 5.
/// let y = neighborhood_attention_with_tokens(
///     [field(0.0), field(0.0), field(1.0)],
///     [token(0.0), token(5.0)],
///     &options,
/// )?;
/// assert_eq!(y.into_local().into_data().iter::<f32>().next(), Some(2.0));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn neighborhood_attention_with_tokens<const D: usize, const N: usize>(
    fields: [ShardTensor<D>; 3],
    tokens: [ShardTensor<4>; 2],
    options: &NeighborhoodOptions<N>,
) -> Result<ShardTensor<D>> {
    Ok(neighborhood_attention_with_tokens_and_lse(fields, tokens, options)?.output)
}

/// Neighborhood attention to a field and to further tokens, with its log-sum-exps over both. See
/// [`neighborhood_attention_with_tokens`].
///
/// # Errors
/// The errors of [`neighborhood_attention_with_tokens`].
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::{NeighborhoodOptions, attention::neighborhood_attention_with_tokens_and_lse};
///
/// let field = || ShardTensor::solo(Tensor::<4>::zeros([1, 8, 1, 4], &Default::default()));
/// let token = || ShardTensor::solo(Tensor::<4>::zeros([1, 1, 1, 4], &Default::default()));
/// let y = neighborhood_attention_with_tokens_and_lse(
///     [field(), field(), field()],
///     [token(), token()],
///     &NeighborhoodOptions::new([3]),
/// )?;
/// let lse = y.lse.into_local().into_data(); // of three keys of the field and a token
/// assert!(lse.iter::<f32>().all(|lse| (lse - 4.0_f32.ln()).abs() < 1e-6));
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn neighborhood_attention_with_tokens_and_lse<const D: usize, const N: usize>(
    [q, k, v]: [ShardTensor<D>; 3],
    tokens: [ShardTensor<4>; 2],
    options: &NeighborhoodOptions<N>,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    const NAME: &str = "neighborhood_attention_with_tokens";
    let [q, k, v] = fan_out_alike([q, k, v])?;
    let prepared = Prepared::new(&q, &k, &v, options, true)?;
    let global = tokens::attention(NAME, q.clone(), [&k, &v], tokens, options.scale)?;
    let near = near([q, k, v], &prepared, options)?;
    Ok(AttentionOutput::merge(vec![near, global]))
}

/// Attention to the keys around every query, with log-sum-exps.
fn near<const D: usize, const N: usize>(
    [q, k, v]: [ShardTensor<D>; 3],
    prepared: &Prepared,
    options: &NeighborhoodOptions<N>,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    if let Some(dense) = dense(&q, options) {
        return with_lse([q, k, v], &dense);
    }
    let (mesh, dtype) = (q.mesh().clone(), q.local().dtype());
    let both = local(q, k, v, prepared)?;
    attended(both, &prepared.output, &mesh, dtype)
}

/// Minimum number of keys, all reached by every query, for which dense attention replaces windows,
/// whose memory grows with the number of keys.
const MANY: usize = 1024;

/// Options of dense attention, if every query reaches all of many keys.
fn dense<const D: usize, const N: usize>(
    q: &ShardTensor<D>,
    options: &NeighborhoodOptions<N>,
) -> Option<AttentionOptions> {
    let shape = q.dims();
    let mut dims = options.dims.iter().zip(&shape[1..]);
    let all = dims.all(|(dim, size)| dim.kernel == *size && !dim.causal);
    let keys: usize = shape[1..=N].iter().product();
    (all && keys >= MANY).then(|| AttentionOptions {
        scale: options.scale,
        ..AttentionOptions::default()
    })
}

/// Attention of this rank's queries.
fn local<const D: usize>(
    q: ShardTensor<D>,
    k: ShardTensor<D>,
    v: ShardTensor<D>,
    prepared: &Prepared,
) -> Result<Tensor<D>> {
    if !flex::runs_on(&q.device()) {
        return composed::attention(q, k, v, prepared);
    }
    let [q, k, v] = [q, k, v].map(|tensor| tensor.into_local());
    Error::catch(|| node::attention(q, k, v, prepared.run.clone()))
}
