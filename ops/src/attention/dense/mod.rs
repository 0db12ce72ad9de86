//! Dense attention: every query attends to all keys, or to those up to its own position.
//!
//! `y[i] = Σ_j softmax_j(scale · q[i]·k[j]) · v[j]`. Semantics follow PyTorch's
//! `scaled_dot_product_attention`, except that tokens come before heads.
//!
//! # Shapes
//! Global `q` is `[batch, queries, heads, width]`, `k` `[batch, keys, key_heads, width]`, `v`
//! `[batch, keys, key_heads, value_width]`, the result `[batch, queries, heads, value_width]`. Each
//! head of keys and values serves `heads / key_heads` consecutive heads of queries.
//!
//! # Placement
//!
//! | `q` | `k` and `v` | sent |
//! |---|---|---|
//! | batch or heads sharded | the same | nothing |
//! | tokens sharded | replicated | sums of gradients of keys and values |
//! | tokens sharded | tokens sharded | keys and values, block by block round a ring |
//! | replicated | tokens sharded | a maximum and a sum over ranks of the results |
//! | replicated | replicated | nothing |
//!
//! The rules hold on each axis of a mesh for itself. Queries that are replicated where keys are
//! sharded attend to each rank's own keys, and the results are merged by their log-sum-exps; the
//! keys stay where they are, and the gradients of the queries are summed.
//!
//! On a ring of `n` ranks each receives `(n − 1)/n` of all keys and values in the forward pass, and
//! in the backward pass again, with the gradients of all of them. In causal order a rank receives
//! only those before its own. A block is in flight while the previous one is computed with, so two
//! blocks are in memory besides a rank's own.
//!
//! A bias has the layout of the queries and is not sent. A bias that is the same for all queries
//! may instead have the layout of the keys, and is sent with them. The weights that dropout sets to
//! zero depend on its key and on the global indices of query, key, head and sample, not on ranks.
//!
//! # Adjoint
//! Scores are recomputed, block by block. The gradients of a block follow it from rank to rank and
//! end at its owner; gradients that are not requested are not sent.
//!
//! A bias with gradients is learned: attention then runs with burn's operators, which store all
//! scores, on keys and values whose tokens are whole on every rank. They are not gathered: sharded
//! tokens are an error. The gradient of the bias is summed over the axes on which the queries are
//! sharded and the bias is not.

#[cfg(test)]
mod biases;
mod composed;
mod dims;
mod merge;
#[cfg(test)]
mod merges;
mod node;
mod options;
mod ring;
mod rule;
mod scores;
#[cfg(test)]
mod tests;
mod travel;

use burn::tensor::Tensor;
use halocline_core::comm::Operation;
use halocline_core::ops::fan_out;
use halocline_core::{Error, Layout, Replicate, Result, ShardTensor, Traffic};

use super::attended::{AttentionOutput, attended};
use crate::kernel::flex;
use crate::kernel::simd::Isa;
use crate::operand::fan_out_alike;
use dims::{NAME, TOKENS, WIDTH};
use node::DenseRun;
pub use options::{AttentionOptions, causal_extents};
use ring::Ring;
use rule::{Beside, both, check_bias, check_whole_tokens};
pub(super) use rule::{check, check_rows};
use scores::Dropped;
pub(super) use scores::Scores;
use travel::Travel;

/// Dense attention. See the [module](self).
///
/// # Errors
/// Shapes, dtypes or placements that do not fit; a learned bias with keys that are sharded in tokens
/// over several ranks; a probability of dropout outside `[0, 1)`; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Distribution, Launcher, RandomKey, Shard, ShardTensor};
/// use halocline_ops::{AttentionOptions, attention::scaled_dot_product_attention};
///
/// Launcher::local(3).run(|world| {
///     let mesh = world.mesh([("tokens", 3)])?;
///     let normal = Distribution::Normal(0.0, 1.0);
///     // [batch, tokens, heads, width]
///     let tokens = |name: &str| {
///         ShardTensor::<4>::random([1, 20, 2, 8], normal, RandomKey::new(0, name), &mesh, &[Shard(1)])
///     };
///     let options = AttentionOptions::default().with_causal(true);
///     let y = scaled_dot_product_attention(tokens("q")?, tokens("k")?, tokens("v")?, &options)?;
///     assert_eq!(y.placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn scaled_dot_product_attention(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    options: &AttentionOptions,
) -> Result<ShardTensor<4>> {
    let [q, k, v] = fan_out_alike([q, k, v])?;
    let mesh = q.mesh().clone();
    let (y, output) = attention(q, k, v, options, false)?;
    Ok(ShardTensor::from_parts(y, output, mesh))
}

/// Dense attention with its log-sum-exps. See [`scaled_dot_product_attention`] and [`AttentionOutput`],
/// which has an example.
///
/// # Errors
/// The errors of [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_lse(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    options: &AttentionOptions,
) -> Result<AttentionOutput<ShardTensor<4>>> {
    let [q, k, v] = fan_out_alike([q, k, v])?;
    let (mesh, dtype) = (q.mesh().clone(), q.local().dtype());
    let (both, output) = attention(q, k, v, options, true)?;
    attended(both, &output, &mesh, dtype)
}

/// Result for this rank's queries, with the logarithms if they are requested, and the layout of the
/// output.
fn attention(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    options: &AttentionOptions,
    with_lse: bool,
) -> Result<(Tensor<4>, Layout)> {
    let axes = check(&q, &k, &v)?;
    if options.learns_bias() {
        check_whole_tokens(&k)?;
    }
    #[cfg(feature = "cube")]
    super::cube::check(NAME, &q.device(), q.local().dtype())?;
    let mesh = q.mesh().clone();
    let output = q.layout().resized(WIDTH, vec![v.dims()[WIDTH]]);
    let cells = q.layout().local_box(mesh.position());
    let first = [0, 1, 2].map(|dim| cells.ranges()[dim].start);
    let [batch, queries, heads, width] = q.dims();
    let dropout = options
        .dropout
        .filter(|(probability, _)| *probability != 0.0)
        .map(|(probability, key)| {
            let shape = [batch, queries, heads, k.dims()[TOKENS]];
            Dropped::new(probability, key, shape, first)
        })
        .transpose()?;
    Isa::chosen()?;
    // The kernels compute no gradient of scores.
    let runs_kernels = flex::runs_on(&q.device()) && !options.learns_bias();
    let [bias, beside_keys] = biases(&q, &k, options, runs_kernels)?;
    let merges = runs_kernels && !axes.merges.is_empty();
    let scores = Scores {
        scale: options.scale.unwrap_or(1.0 / (width as f64).sqrt()),
        with_lse: with_lse || merges,
        causal: options.causal.then_some(first[TOKENS]),
        bias,
        dropout,
    };
    if !runs_kernels {
        return Ok((composed::attention(q, k, v, &scores)?, output));
    }
    let ring = Ring::new(
        k.layout(),
        q.layout(),
        TOKENS,
        mesh.position(),
        options.causal,
    );
    let travel = || Travel {
        operation: Operation::new(NAME, Traffic::Exchange, Some(k.layout())),
        comm: mesh.comm().clone(),
    };
    let run = DenseRun {
        scores,
        travel: (ring.parts.len() > 1).then(travel),
        beside_keys,
        ring,
    };
    let [q, k, v] = [q, k, v].map(|tensor| tensor.into_local());
    let dtype = q.dtype();
    let y = Error::catch(|| {
        let [k, v] = [k, v].map(|tensor| fan_out(tensor, &mesh, &axes.fans, NAME));
        // Where queries fan out already, their gradients are summed later.
        let mut replicated = axes.merges.clone();
        replicated.retain(|axis| output.placements()[*axis] == Replicate);
        let q = fan_out(q, &mesh, &replicated, NAME);
        node::attention(q, k, v, run)
    })?;
    if !merges {
        return Ok((y, output));
    }
    let merged = merge::over_ranks(y, &output, &mesh, &axes.merges)?;
    if with_lse {
        return Ok((merged, output));
    }
    let all = attended(merged, &output, &mesh, dtype)?;
    Ok((all.output.into_local(), output))
}

/// Sum of bias and key padding: whole in keys, or, only for kernels, with the layout of the keys.
fn biases(
    q: &ShardTensor<4>,
    k: &ShardTensor<4>,
    options: &AttentionOptions,
    runs_kernels: bool,
) -> Result<[Option<Tensor<4>>; 2]> {
    let mut sum = None;
    for added in [&options.bias, &options.key_padding].into_iter().flatten() {
        let added = check_bias(added, q, k)?;
        sum = Some(match sum {
            None => added,
            Some(sum) => both(sum, added)?,
        });
    }
    let constant = |bias: ShardTensor<4>| bias.inner().into_local();
    let bias = match sum {
        None => return Ok([None, None]),
        Some(Beside::Keys(bias)) if runs_kernels => return Ok([None, Some(constant(bias))]),
        Some(Beside::Keys(bias)) => composed::whole_in_keys(bias)?,
        Some(Beside::Queries(bias)) => bias,
    };
    let bias = if options.learns_bias() {
        composed::learned(bias, q)?
    } else {
        constant(bias)
    };
    Ok([Some(bias), None])
}

/// Attention of queries to keys and values that are all present, `[batch, tokens, heads, width]`.
/// `empty` says whether some rank lacks one of these.
pub(super) fn local(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Scores,
    empty: bool,
) -> Result<Tensor<4>> {
    if !flex::runs_on(&q.device()) {
        return composed::local(q, k, v, &scores, empty);
    }
    let run = DenseRun {
        ring: Ring::alone(k.dims()[TOKENS]),
        travel: None,
        beside_keys: None,
        scores,
    };
    Error::catch(|| node::attention(q, k, v, run))
}
