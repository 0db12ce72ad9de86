//! Dense attention by burn's operators, for devices that our kernels do not run on.

use burn::tensor::activation::softmax;
use burn::tensor::{Tensor, TensorData};
use halocline_core::ops::fan_out;
use halocline_core::{Layout, Placement, Replicate, Result, Shard, ShardTensor};

use super::dims::TOKENS;
use crate::driver::empty::{drop_empty, fill_empty};

/// Dense attention of this rank's queries, by matrix products with all keys and values: those of other ranks are gathered.
pub(super) fn attention(
    q: ShardTensor<4>,
    k: ShardTensor<4>,
    v: ShardTensor<4>,
    causal: bool,
    scale: f64,
) -> Result<Tensor<4>> {
    const NAME: &str = "scaled_dot_product_attention";
    let heads = q.dims()[2].checked_div(k.dims()[2]).unwrap_or(1);
    let fans = q.layout().axes_of(1);
    let (q, queries, mesh) = q.into_parts();
    let placements = whole_tokens(k.layout());
    // [batch, heads, keys, width], with a head of keys for each head of queries.
    let all_heads = |tensor: ShardTensor<4>| -> Result<Tensor<4>> {
        let (tensor, layout, mesh) = tensor.try_redistribute(&placements[..])?.into_parts();
        let tensor = fill_empty(tensor, &layout, &[0, 1, 2, 3], NAME, 0.0)?;
        let tensor = fan_out(tensor, &mesh, &fans, NAME);
        let [batch, tokens, key_heads, width] = tensor.dims();
        let tensor = tensor
            .reshape([batch, tokens, key_heads, 1, width])
            .repeat_dim(3, heads);
        Ok(tensor
            .reshape([batch, tokens, key_heads * heads, width])
            .swap_dims(1, 2))
    };
    let (k, v) = (all_heads(k)?, all_heads(v)?);
    let q = fill_empty(q, &queries, &[0, 1, 2, 3], NAME, 0.0)?.swap_dims(1, 2);
    let [rows, columns] = [q.dims()[2], k.dims()[2]];
    let mut scores = (q * scale).matmul(k.swap_dims(2, 3));
    if causal {
        let first = queries.local_box(mesh.position()).ranges()[1].start;
        let later = |index: usize| index % columns > first + index / columns;
        let mask =
            (0..rows * columns).map(|index| if later(index) { f32::NEG_INFINITY } else { 0.0 });
        let mask = TensorData::new(mask.collect::<Vec<_>>(), [1, 1, rows, columns]);
        scores = scores.clone() + Tensor::from_data(mask, (&scores.device(), scores.dtype()));
    }
    let y = softmax(scores, 3).matmul(v).swap_dims(1, 2);
    let mut extents = queries.all_extents().to_vec();
    extents[3] = vec![y.dims()[3]];
    let output = queries.derive(queries.placements().to_vec(), extents);
    drop_empty(y, &output, mesh.position(), NAME)
}

/// The layout of keys whose tokens every rank holds, for kernels that need all of them.
fn whole_tokens(layout: &Layout) -> Vec<Placement> {
    let placements = layout.placements().iter();
    let whole = |placement: &Placement| match placement {
        Shard(TOKENS) => Replicate,
        other => *other,
    };
    placements.map(whole).collect()
}
