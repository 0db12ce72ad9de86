//! The rule of dense attention: which layouts fit.

use halocline_core::{Error, Fan, Placement, Replicate, Result, Shard, ShardTensor};

use super::dims::{BATCH, HEADS, NAME, TOKENS, WIDTH};

/// Checks that queries, keys and values fit, and gives the axes over which keys and values fan out.
pub(super) fn check(
    q: &ShardTensor<4>,
    k: &ShardTensor<4>,
    v: &ShardTensor<4>,
) -> Result<Vec<usize>> {
    let fail = |message: String| Err(Error::operator(NAME, message));
    let [shape_q, shape_k, shape_v] = [q.dims(), k.dims(), v.dims()];
    let shared = shape_q[HEADS].checked_div(shape_k[HEADS]).unwrap_or(0);
    let fits = shape_q[BATCH] == shape_k[BATCH]
        && shape_q[WIDTH] == shape_k[WIDTH]
        && shape_k[..WIDTH] == shape_v[..WIDTH]
        && shape_k[HEADS] * shared == shape_q[HEADS]
        && shared > 0
        && shape_q[WIDTH] > 0
        && shape_v[WIDTH] > 0
        && shape_k[TOKENS] > 0;
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
            (Shard(TOKENS), Fan) => {}
            (Replicate | Fan, Shard(TOKENS)) => {
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

/// Checks that a bias lies as queries do, beside so many keys.
pub(super) fn check_bias(bias: &ShardTensor<4>, q: &ShardTensor<4>, keys: usize) -> Result<()> {
    let (shape, queries) = (bias.dims(), q.dims());
    let broadcast = |dim: &usize| shape[*dim] == queries[*dim] || shape[*dim] == 1;
    // Without gradients, what fans out is replicated.
    let same_values = |placement: Placement| match placement {
        Fan => Replicate,
        other => other,
    };
    let expected = q.placements().iter().map(|placement| match placement {
        Shard(dim) if shape[*dim] == 1 => Replicate,
        other => same_values(*other),
    });
    let held = bias.placements().iter().copied().map(same_values);
    let alike = |dim: usize| {
        let (own, other) = (bias.layout().extents(dim), q.layout().extents(dim));
        shape[dim] == 1 || own == other
    };
    let fits = (0..WIDTH).all(|dim| broadcast(&dim)) && shape[WIDTH] == keys;
    let lies =
        bias.layout().mesh() == q.layout().mesh() && held.eq(expected) && (0..WIDTH).all(alike);
    if fits && lies && !bias.local().is_tracked() {
        return Ok(());
    }
    let message = match (fits, lies) {
        (false, _) => format!(
            "a bias {shape:?} for queries {queries:?} and {keys} keys; expected [batch, queries, heads, keys], or 1"
        ),
        (_, false) => format!(
            "a bias {} beside queries {}; expected the same placements, whole in keys",
            bias.layout(),
            q.layout()
        ),
        _ => "a bias with gradients; detach() it".into(),
    };
    Err(Error::operator(NAME, message))
}
