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
//! On a ring of `n` ranks each sends `(n − 1)/n` of all keys and values forward, and twice as much backward, of gradients as
//! well. A block travels while the one before it is computed with; two are in memory at a time.
//!
//! # Adjoint
//! Scores are computed anew, block by block. A block's gradients travel behind it, from rank to rank, and end at its owner.

mod composed;
mod dims;
mod node;
mod ring;
#[cfg(test)]
mod tests;

use halocline_core::ops::fan_out;
use halocline_core::{Error, Layout, Operation, Replicate, Result, Shard, ShardTensor, Traffic};

use crate::kernel::flex;
use crate::kernel::simd::Isa;
use dims::{BATCH, HEADS, TOKENS, WIDTH};
use node::DenseRun;
use ring::Ring;

const NAME: &str = "scaled_dot_product_attention";

/// What queries attend to, and the scale of scores.
///
/// # Example
/// ```
/// use halocline_ops::AttentionOptions;
///
/// let options = AttentionOptions::default().with_causal(true);
/// assert!(options.causal && options.scale.is_none());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// Whether only keys up to the query's own place count.
    pub causal: bool,
    /// What scores are multiplied with: `width^-1/2` if it is not given.
    pub scale: Option<f64>,
}

impl AttentionOptions {
    /// These options with only keys up to the query's own place, or all.
    #[must_use]
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// These options with another scale of scores.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }
}

/// Extents of `tokens` over `parts` ranks that give every rank of a ring the same work in causal attention: the first ranks
/// hold more tokens, because their queries attend to fewer keys.
///
/// # Example
/// ```
/// assert_eq!(halocline_ops::attention::causal_extents(100, 4), [50, 21, 16, 13]);
/// ```
pub fn causal_extents(tokens: usize, parts: usize) -> Vec<usize> {
    // The first n tokens take n² / 2 products.
    let end = |part: usize| (tokens as f64 * (part as f64 / parts as f64).sqrt()).round() as usize;
    (0..parts).map(|part| end(part + 1) - end(part)).collect()
}

/// Dense attention. See the [module](self).
///
/// # Errors
/// Shapes, number types or placements that do not fit; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Distribution, Launcher, RandomKey, Shard, ShardTensor};
/// use halocline_ops::{AttentionOptions, attention::scaled_dot_product_attention};
///
/// Launcher::local(3).run(|world| {
///     let mesh = world.mesh([("tokens", 3)])?;
///     let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
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
    let fans = check(&q, &k, &v)?;
    Isa::chosen()?;
    let output = with_width(q.layout(), v.dims()[WIDTH]);
    let mesh = q.mesh().clone();
    let scale = options
        .scale
        .unwrap_or(1.0 / (q.dims()[WIDTH] as f64).sqrt());
    if !flex::runs_on(&q.device()) {
        let y = composed::attention(q, k, v, options.causal, scale)?;
        return Ok(ShardTensor::from_parts(y, output, mesh));
    }
    let query = q.layout().local_box(mesh.position()).ranges()[TOKENS].start;
    let ring = Ring::new(k.layout(), TOKENS, mesh.position());
    let run = DenseRun {
        operation: Operation::new(NAME, Traffic::Exchange, Some(k.layout())),
        comm: mesh.comm().clone(),
        ring,
        causal: options.causal.then_some(query),
        scale,
    };
    let (q, k, v) = (q.into_parts().0, k.into_parts().0, v.into_parts().0);
    let y = Error::catch(|| {
        let [k, v] = [k, v].map(|tensor| fan_out(tensor, &mesh, &fans, NAME));
        node::attention(q, k, v, run)
    })?;
    Ok(ShardTensor::from_parts(y, output, mesh))
}

fn with_width(layout: &Layout, width: usize) -> Layout {
    let mut extents = layout.all_extents().to_vec();
    extents[WIDTH] = vec![width];
    layout.derive(layout.placements().to_vec(), extents)
}

/// Checks that queries, keys and values fit, and gives the axes over which keys and values fan out.
fn check(q: &ShardTensor<4>, k: &ShardTensor<4>, v: &ShardTensor<4>) -> Result<Vec<usize>> {
    let fail = |message: String| Err(Error::operator(NAME, message));
    let [shape_q, shape_k, shape_v] = [q.dims(), k.dims(), v.dims()];
    let shared = shape_q[HEADS].checked_div(shape_k[HEADS]).unwrap_or(0);
    let fits = shape_q[BATCH] == shape_k[BATCH]
        && shape_q[WIDTH] == shape_k[WIDTH]
        && shape_k[..WIDTH] == shape_v[..WIDTH]
        && shape_k[HEADS] * shared == shape_q[HEADS];
    if !fits {
        return fail(format!(
            "queries {shape_q:?}, keys {shape_k:?}, values {shape_v:?}; expected [batch, queries, n·heads, width], \
             [batch, keys, heads, width] and [batch, keys, heads, value_width]"
        ));
    }
    let types = [q, k, v].map(|tensor| tensor.local().dtype());
    if types[1..].iter().any(|dtype| *dtype != types[0]) {
        return fail(format!("queries, keys and values of {types:?}"));
    }
    for tensor in [q, k, v] {
        tensor.require_resolved(NAME)?;
        tensor.require_whole(NAME, WIDTH)?;
    }
    let (queries, keys) = (q.layout(), k.layout());
    if queries.mesh() != keys.mesh() || keys.mesh() != v.layout().mesh() {
        return fail(format!(
            "{queries}, {keys} and {} are on several meshes",
            v.layout()
        ));
    }
    let same = |dim: usize| keys.extents(dim) == v.layout().extents(dim);
    if k.placements() != v.placements() || !(BATCH..WIDTH).all(same) {
        return fail(format!(
            "keys {keys} lie otherwise than values {}",
            v.layout()
        ));
    }
    let mut fans = Vec::new();
    for (axis, pair) in q.placements().iter().zip(k.placements()).enumerate() {
        match pair {
            (Shard(TOKENS), Replicate) => fans.push(axis),
            (Replicate, Shard(TOKENS)) => {
                let name = &queries.mesh().names()[axis];
                return fail(format!(
                    "keys are sharded over axis {name:?} by tokens and queries are not; shard queries by tokens, or \
                     replicate keys and values: redistribute"
                ));
            }
            (query, key) if query == key => {}
            (query, key) => {
                let name = &queries.mesh().names()[axis];
                return fail(format!(
                    "no rule for queries {query:?} with keys {key:?} on axis {name:?}"
                ));
            }
        }
    }
    let scaled = |dim: usize, factor: usize| {
        let keys = keys.extents(dim).iter().map(|extent| extent * factor);
        queries.extents(dim).iter().copied().eq(keys)
    };
    if !scaled(BATCH, 1) || !scaled(HEADS, shared) {
        return fail(format!(
            "queries {queries} have other extents than keys {keys}"
        ));
    }
    Ok(fans)
}
