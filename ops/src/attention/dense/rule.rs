//! Placement rule of dense attention: which layouts fit.

use halocline_core::{Error, Fan, Layout, Placement, Replicate, Result, Shard, ShardTensor};

use super::dims::{BATCH, HEADS, NAME, TOKENS, WIDTH};
use crate::precision::cast_shard;

/// Axes on which queries and keys have different placements.
#[derive(Debug, Default)]
pub(in crate::attention) struct Axes {
    /// Axes over which keys and values fan out.
    pub fans: Vec<usize>,
    /// Axes of several ranks over which keys are sharded by tokens and queries are not: every rank
    /// attends to its own keys, and the results are merged.
    pub merges: Vec<usize>,
}

/// Checks that queries, keys and values fit, and returns the axes on which they differ.
pub(in crate::attention) fn check(
    q: &ShardTensor<4>,
    k: &ShardTensor<4>,
    v: &ShardTensor<4>,
) -> Result<Axes> {
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
    check_rows(NAME, [q, k, v])?;
    let (queries, keys) = (q.layout(), k.layout());
    if queries.mesh() != keys.mesh() || keys.mesh() != v.layout().mesh() {
        return fail(format!(
            "{queries}, {keys} and {} are on several meshes",
            v.layout()
        ));
    }
    let same = |dim: usize| keys.extents(dim) == v.layout().extents(dim);
    if k.placements() != v.placements() || !(BATCH..WIDTH).all(same) {
        return Err(Error::placement(
            NAME,
            format!("keys {keys} with values {}", v.layout()),
            "redistribute the values to the layout of the keys",
        ));
    }
    let mut axes = Axes::default();
    for (axis, pair) in q.placements().iter().zip(k.placements()).enumerate() {
        match pair {
            (Shard(TOKENS), Replicate) => axes.fans.push(axis),
            (Shard(TOKENS), Fan) => {}
            // A single rank has all keys.
            (Replicate | Fan, Shard(TOKENS)) if queries.mesh().sizes()[axis] == 1 => {}
            (Replicate | Fan, Shard(TOKENS)) => axes.merges.push(axis),
            (query, key) if query == key => {}
            (query, key) => {
                let name = &queries.mesh().names()[axis];
                return Err(Error::placement(
                    NAME,
                    format!("{query} of queries with {key} of keys on axis \"{name}\""),
                    "redistribute so that samples and heads are sharded alike, and tokens in either one or both",
                ));
            }
        }
    }
    let scaled = |dim: usize, factor: usize| {
        let keys = keys.extents(dim).iter().map(|extent| extent * factor);
        queries.extents(dim).iter().copied().eq(keys)
    };
    if !scaled(BATCH, 1) || !scaled(HEADS, shared) {
        return Err(Error::placement(
            NAME,
            format!("queries {queries} with keys {keys}"),
            format!(
                "redistribute to a layout by Layout::with_extents, with the same samples on every rank, and {shared} \
                 heads of queries for each of its heads of keys"
            ),
        ));
    }
    Ok(axes)
}

/// Checks that no other rank holds tokens of keys that a learned bias needs.
pub(super) fn check_whole_tokens(k: &ShardTensor<4>) -> Result<()> {
    let layout = k.layout();
    if layout.extents(TOKENS).len() == 1 {
        return Ok(());
    }
    let whole = layout.map_placements(|placement| match placement {
        Shard(TOKENS) => Replicate,
        other => other,
    });
    Err(Error::placement(
        NAME,
        format!("a learned bias with keys {layout}"),
        format!(
            "redistribute keys and values to {whole:?}, which gathers their tokens on every rank, or detach the bias"
        ),
    ))
}

/// Checks that queries, keys and values have the same dtype, and rows that are whole and resolved.
pub(in crate::attention) fn check_rows<const D: usize>(
    operator: &str,
    operands: [&ShardTensor<D>; 3],
) -> Result<()> {
    let types = operands.map(|tensor| tensor.local().dtype());
    if types[1..].iter().any(|dtype| *dtype != types[0]) {
        let message = format!("queries, keys and values of {types:?}");
        return Err(Error::operator(operator, message));
    }
    for tensor in operands {
        tensor.require_resolved(operator)?;
        tensor.require_whole(operator, D - 1)?;
    }
    Ok(())
}

/// A bias, by the operand whose layout it has.
#[derive(Clone, Debug)]
pub(super) enum Beside {
    /// With the layout of the queries, whole in keys.
    Queries(ShardTensor<4>),
    /// The same for all queries, with the layout of the keys, and sent with their parts.
    Keys(ShardTensor<4>),
}

/// Checks that a bias has the layout of the queries, or that of the keys if it is the same for all
/// queries. A plain tensor, which every rank holds whole, is cut to each rank's part.
pub(super) fn check_bias(
    bias: &ShardTensor<4>,
    q: &ShardTensor<4>,
    k: &ShardTensor<4>,
) -> Result<Beside> {
    let fail = |message: String| Err(Error::operator(NAME, message));
    let (shape, queries, keys) = (bias.dims(), q.dims(), k.dims()[TOKENS]);
    let broadcast = |dim: usize| shape[dim] == queries[dim] || shape[dim] == 1;
    if !(0..WIDTH).all(broadcast) || shape[WIDTH] != keys {
        return fail(format!(
            "a bias {shape:?} for queries {queries:?} and {keys} keys; expected [batch, queries, heads, keys], or 1"
        ));
    }
    let plain = bias.mesh().size() == 1 && bias.layout().mesh() != q.layout().mesh();
    let at_keys = !plain && bias.placements().contains(&Shard(WIDTH)) && shape[TOKENS] == 1;
    // A bias is replicated where queries fan out.
    let same_values = |placement: Placement| match placement {
        Fan => Replicate,
        other => other,
    };
    let pairs = q.placements().iter().zip(k.placements());
    let expected = pairs.map(|pair| match pair {
        (Shard(TOKENS) | Replicate | Fan, Shard(TOKENS)) if at_keys => Shard(WIDTH),
        (Shard(dim), _) if shape[*dim] == 1 => Replicate,
        (other, _) => same_values(*other),
    });
    let expected: Vec<Placement> = expected.collect();
    let mut extents: Vec<Vec<usize>> = (0..WIDTH)
        .map(|dim| match shape[dim] {
            1 => vec![1],
            _ => q.layout().extents(dim).to_vec(),
        })
        .collect();
    extents.push(if at_keys {
        k.layout().extents(TOKENS).to_vec()
    } else {
        vec![keys]
    });
    if plain {
        let layout = q.layout().derive(expected, extents);
        let whole = bias.clone().into_local();
        if !whole.is_tracked() {
            return ShardTensor::distribute(whole, q.mesh(), &layout).map(Beside::Queries);
        }
        let replicated = Layout::replicated(q.layout().mesh(), &shape);
        let whole = ShardTensor::from_parts(whole, replicated, q.mesh().clone());
        return whole.try_redistribute(&layout).map(Beside::Queries);
    }
    let held = bias.placements().iter().copied().map(same_values);
    let lies = bias.layout().mesh() == q.layout().mesh()
        && held.eq(expected)
        && bias.layout().all_extents() == extents;
    if !lies {
        return Err(Error::placement(
            NAME,
            format!(
                "a bias {} with queries {} and keys {}",
                bias.layout(),
                q.layout(),
                k.layout()
            ),
            "redistribute the bias to the placements of queries, whole in keys, or to those of keys if it is the same \
             for all queries, or give a plain tensor that every rank holds whole",
        ));
    }
    // Uses the mesh of the queries, which may be that of a dry run.
    let (local, layout, _) = bias.clone().into_parts();
    let bias = ShardTensor::from_parts(local, layout, q.mesh().clone());
    Ok(if at_keys {
        Beside::Keys(bias)
    } else {
        Beside::Queries(bias)
    })
}

/// Adds a bias and key padding.
pub(super) fn both(bias: Beside, padding: Beside) -> Result<Beside> {
    let sum = |bias: ShardTensor<4>, padding: ShardTensor<4>| {
        let padding = cast_shard(padding, bias.local().dtype());
        Error::catch(|| bias + padding)
    };
    Ok(match (bias, padding) {
        (Beside::Queries(bias), Beside::Queries(padding)) => Beside::Queries(sum(bias, padding)?),
        (Beside::Keys(bias), Beside::Keys(padding)) => Beside::Keys(sum(bias, padding)?),
        (Beside::Queries(one), Beside::Keys(other))
        | (Beside::Keys(one), Beside::Queries(other)) => {
            return Err(Error::placement(
                NAME,
                format!("a bias {} with padding {}", one.layout(), other.layout()),
                "redistribute one, so that both are whole in keys, or both sharded in them",
            ));
        }
    })
}
