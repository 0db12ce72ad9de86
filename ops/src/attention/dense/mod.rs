//! Dense attention: every query attends to all keys, or to those up to its own place.
//!
//! `y[i] = Σ_j softmax_j(scale · q[i]·k[j]) · v[j]`. Semantics follow PyTorch's `scaled_dot_product_attention`, whose heads
//! come before its tokens.
//!
//! # Shapes
//! Global `q` is `[batch, queries, heads, width]`, `k` `[batch, keys, key_heads, width]`, `v` `[batch, keys, key_heads,
//! value_width]`, the result `[batch, queries, heads, value_width]`. One head of keys and values serves `heads / key_heads`
//! neighbouring heads of queries.
//!
//! # Placement
//!
//! | `q` | `k` and `v` | travels |
//! |---|---|---|
//! | batch or heads sharded | the same | nothing |
//! | tokens sharded | replicated | sums of gradients of keys and values |
//! | tokens sharded | tokens sharded | keys and values, block by block round a ring |
//! | replicated | replicated | nothing |
//!
//! On a ring of `n` ranks each receives `(n − 1)/n` of all keys and values forward; backward the same, and gradients of all of
//! them. In causal order it receives those before its own only. A block travels while the one before it is computed with: two
//! are in memory beside a rank's own.
//!
//! A bias lies as queries do, and does not travel; one that is the same for all queries may lie as keys do, and travels with
//! them. Which weights dropout makes zero depends on its key and on the places of
//! query, key, head and sample in the whole, not on ranks.
//!
//! # Adjoint
//! Scores are computed anew, block by block. A block's gradients travel behind it, from rank to rank, and end at its owner;
//! gradients that are not wanted are not sent.
//!
//! A bias with gradients is learned: attention then runs by burn's operators, on all keys at once, which are gathered where they
//! are sharded. Its gradient is summed over the axes on which queries are sharded and it is not.

#[cfg(test)]
mod biases;
mod composed;
mod dims;
mod node;
mod options;
mod ring;
mod rule;
mod scores;
#[cfg(test)]
mod tests;
mod travel;

use burn::tensor::Tensor;
use halocline_core::ops::fan_out;
use halocline_core::{Error, Operation, Result, ShardTensor, Traffic};

use super::attended::{Attended, attended};
use super::widths::with_width;
use crate::kernel::flex;
use crate::kernel::simd::Isa;
use crate::operand::fan_out_alike;
use dims::{NAME, TOKENS, WIDTH};
use node::DenseRun;
pub use options::{AttentionOptions, causal_extents};
use ring::Ring;
pub(super) use rule::check;
use rule::{Beside, both, check_bias};
use scores::Dropped;
pub(super) use scores::Scores;
use travel::Travel;

/// Dense attention. See the [module](self).
///
/// # Errors
/// Shapes, number types or placements that do not fit; a probability of dropout outside `[0, 1)`; a failure of
/// communication.
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
    let output = with_width(q.layout(), v.dims()[WIDTH]);
    let mesh = q.mesh().clone();
    let y = attention(q, k, v, options, false)?;
    Ok(ShardTensor::from_parts(y, output, mesh))
}

/// Dense attention, and the logarithms of its sums of exponentials. See [`scaled_dot_product_attention`] and
/// [`Attended`], which has an example.
///
/// # Errors
/// Those of [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_lse(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    options: &AttentionOptions,
) -> Result<Attended<ShardTensor<4>>> {
    let [q, k, v] = fan_out_alike([q, k, v])?;
    let output = with_width(q.layout(), v.dims()[WIDTH]);
    let (mesh, dtype) = (q.mesh().clone(), q.local().dtype());
    let both = attention(q, k, v, options, true)?;
    attended(both, &output, &mesh, dtype)
}

/// The result of this rank's queries, beside the logarithms if they are asked for.
fn attention(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    options: &AttentionOptions,
    with_lse: bool,
) -> Result<Tensor<4>> {
    let fans = check(&q, &k, &v)?;
    #[cfg(feature = "cube")]
    super::cube::check(NAME, &q.device(), q.local().dtype())?;
    let own = q.layout().local_box(q.mesh().position());
    let own: Vec<usize> = own.ranges().iter().map(|range| range.start).collect();
    let [batch, queries, heads, width] = q.dims();
    let dropout = options
        .dropout
        .filter(|(probability, _)| *probability != 0.0);
    let dropout = dropout.map(|(probability, key)| {
        let shape = [batch, queries, heads, k.dims()[TOKENS]];
        Dropped::new(probability, key, shape, [own[0], own[1], own[2]])
    });
    let dropout = dropout.transpose()?;
    let mut bias = None;
    for added in [&options.bias, &options.key_padding].into_iter().flatten() {
        let added = check_bias(added, &q, &k)?;
        bias = Some(match bias {
            None => added,
            Some(bias) => both(bias, added)?,
        });
    }
    Isa::chosen()?;
    let learned = options
        .bias
        .as_ref()
        .is_some_and(|bias| bias.local().is_tracked());
    // Kernels know no gradient of scores.
    let runs_kernels = flex::runs_on(&q.device()) && !learned;
    let (bias, beside_keys) = match bias {
        None => (None, None),
        Some(Beside::Queries(bias)) => (Some(bias), None),
        Some(Beside::Keys(bias)) if runs_kernels => (None, Some(bias)),
        Some(Beside::Keys(bias)) => (Some(composed::whole_in_keys(bias)?), None),
    };
    let constant = |bias: ShardTensor<4>| bias.inner().into_local();
    let bias = match bias {
        Some(bias) if learned => Some(composed::learned(bias, &q)?),
        constants => constants.map(constant),
    };
    let beside_keys = beside_keys.map(constant);
    let mesh = q.mesh().clone();
    let scores = Scores {
        scale: options.scale.unwrap_or(1.0 / (width as f64).sqrt()),
        with_lse,
        causal: options.causal.then_some(own[TOKENS]),
        bias,
        dropout,
    };
    if !runs_kernels {
        return composed::attention(q, k, v, &scores);
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
    Error::catch(|| {
        let [k, v] = [k, v].map(|tensor| fan_out(tensor, &mesh, &fans, NAME));
        node::attention(q, k, v, run)
    })
}

/// Attention of queries to keys and values that are all there, `[batch, tokens, heads, width]`. `empty` says whether some
/// rank has none of these.
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
