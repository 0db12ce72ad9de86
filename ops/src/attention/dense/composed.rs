//! Dense attention to keys and values that are all present, on devices other than the CPU: with
//! kernels for GPUs, or with burn's operators if a bias or dropout is given. On all devices if a
//! bias is learned.

use burn::tensor::{Tensor, TensorData};
use halocline_core::ops::fan_out;
#[cfg(feature = "cube")]
use halocline_core::ops::is_on_gpu;
use halocline_core::{
    Distribution, Error, Fan, IndexBox, Layout, Placement, Replicate, Result, Shard, ShardTensor,
};

use super::dims::{HEADS, NAME, TOKENS, WIDTH};
use super::scores::{Dropped, Scores};
use crate::attention::composed::{result, weights};
#[cfg(feature = "cube")]
use crate::attention::cube;
use crate::driver::empty::{drop_empty, fill, fill_all, keep};
use crate::precision::widened;

/// Dense attention of this rank's queries to all keys and values; those of other ranks are
/// gathered.
pub(super) fn attention(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    scores: &Scores,
) -> Result<Tensor<4>> {
    let placements = whole_tokens(q.layout(), k.layout());
    let (q, queries, mesh) = q.into_parts();
    let gathered = |tensor: ShardTensor<4>| -> Result<Tensor<4>> {
        let (tensor, layout, _) = tensor.try_redistribute(&placements)?.into_parts();
        fill_all(tensor, &layout, NAME, 0.0)
    };
    let (k, v) = (gathered(k)?, gathered(v)?);
    let q = fill_all(q, &queries, NAME, 0.0)?;
    let y = attend(q, k, v, scores);
    let output = queries.resized(WIDTH, vec![y.dims()[WIDTH]]);
    drop_empty(y, &output, mesh.position(), NAME)
}

/// Gathers the keys of a bias on every rank.
pub(super) fn whole_in_keys(bias: ShardTensor<4>) -> Result<ShardTensor<4>> {
    let whole = bias.layout().map_placements(|placement| match placement {
        Shard(WIDTH) => Replicate,
        other => other,
    });
    bias.try_redistribute(&whole)
}

/// Prepares a bias with gradients, which are summed over the ranks whose queries share it.
pub(super) fn learned(bias: ShardTensor<4>, q: &ShardTensor<4>) -> Result<Tensor<4>> {
    let pairs = q.placements().iter().zip(bias.placements()).enumerate();
    let shared = pairs.filter(|(_, (query, held))| query.varies() && !held.varies());
    let axes: Vec<usize> = shared.map(|(axis, _)| axis).collect();
    let (bias, layout, mesh) = bias.into_parts();
    let bias = Error::catch(|| fan_out(bias, &mesh, &axes, NAME))?;
    fill_all(bias, &layout, NAME, 0.0)
}

/// Dense attention to keys and values that are present. `empty` says whether some rank lacks one of
/// the operands.
pub(super) fn local(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: &Scores,
    empty: bool,
) -> Result<Tensor<4>> {
    if !empty {
        return Ok(attend(q, k, v, scores));
    }
    let mut shape = q.dims();
    let filled = |tensor| fill(1, tensor, &[0, 1, 2, 3], NAME, 0.0);
    let y = attend(filled(q)?, filled(k)?, filled(v)?, scores);
    shape[WIDTH] = y.dims()[WIDTH];
    keep(y, &IndexBox::whole(&shape), NAME)
}

/// Attention of `[batch, tokens, heads, width]`, none of whose dims is empty.
fn attend(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, scores: &Scores) -> Tensor<4> {
    let dtype = q.dtype();
    #[cfg(feature = "cube")]
    if is_on_gpu(&q.device()) && scores.bias.is_none() && scores.dropout.is_none() {
        let windows = cube::Windows::dense(q.dims()[TOKENS], k.dims()[TOKENS], scores.causal);
        let pairs = Tensor::cat(vec![widened(k), widened(v)], WIDTH);
        return cube::attention(
            widened(q) * scores.scale,
            pairs,
            windows,
            scores.with_lse,
            dtype,
        );
    }
    let shared = q.dims()[HEADS] / k.dims()[HEADS];
    // [batch, heads, keys, width], with one key head for each query head.
    let all_heads = |tensor: Tensor<4>| {
        let [batch, tokens, heads, width] = tensor.dims();
        let tensor = tensor.reshape([batch, tokens, heads, 1, width]);
        let tensor = tensor.repeat_dim(3, shared);
        let tensor = tensor.reshape([batch, tokens, heads * shared, width]);
        tensor.swap_dims(1, 2)
    };
    let (k, v) = (all_heads(k), all_heads(v));
    let q = widened(q.swap_dims(1, 2)) * scores.scale;
    let mut products = q.matmul(widened(k).swap_dims(2, 3));
    let [batch, heads, rows, columns] = products.dims();
    let device = (&products.device(), products.dtype());
    if let Some(bias) = &scores.bias {
        let bias = bias.clone().cast(device.1);
        // Nothing is kept of a rank without queries.
        if !bias.dims().contains(&0) {
            products = products + bias.swap_dims(1, 2);
        }
    }
    if let Some(first) = scores.causal {
        let later = |index: usize| index % columns > first + index / columns;
        let mask =
            (0..rows * columns).map(|index| if later(index) { f32::NEG_INFINITY } else { 0.0 });
        let mask = TensorData::new(mask.collect::<Vec<_>>(), [1, 1, rows, columns]);
        products = products + Tensor::from_data(mask, device);
    }
    let [mut weights, lse] = weights(products, 3);
    if let Some(dropped) = &scores.dropout {
        let factors = factors(dropped, [batch, rows, heads, columns]);
        weights = weights * Tensor::<4>::from_data(factors, device).swap_dims(1, 2);
    }
    let y = weights.matmul(widened(v)).swap_dims(1, 2);
    result(y, lse.swap_dims(1, 2), scores.with_lse, dtype)
}

/// Zero for dropped weights, else the inverse of the probability of being kept:
/// `[batch, queries, heads, keys]`.
fn factors(dropped: &Dropped, shape: [usize; 4]) -> TensorData {
    let probability = 1.0 - dropped.probability;
    let coin = Distribution::Bernoulli(probability);
    let [batch, query, head] = dropped.first;
    let first = [batch, query, head, 0];
    // A rank without queries has one of fill, which may lie outside.
    let ends = [0, 1, 2, 3].map(|dim| (first[dim] + shape[dim]).min(dropped.shape[dim]));
    let ranges = [0, 1, 2, 3].map(|dim| first[dim].min(ends[dim])..ends[dim]);
    let mut stays = dropped
        .key
        .fill(coin, &dropped.shape, &IndexBox::new(ranges.to_vec()));
    stays.resize(shape.iter().product(), 0.0);
    let factors = stays.into_iter().map(|stays| stays / probability as f32);
    TensorData::new(factors.collect::<Vec<_>>(), shape)
}

/// Placements of keys whose tokens are whole on every rank, for its own queries. Ranks that hold
/// the same queries all compute the same.
fn whole_tokens(queries: &Layout, keys: &Layout) -> Vec<Placement> {
    let pairs = queries.placements().iter().zip(keys.placements());
    let whole = pairs.map(|pair| match pair {
        (Shard(TOKENS), Shard(TOKENS) | Replicate) => Fan,
        (queries, Shard(TOKENS)) => *queries,
        (_, keys) => *keys,
    });
    whole.collect()
}
