//! Attention of a field's queries to tokens that all of them reach, for cell and neighborhood
//! attention.

use burn::tensor::Tensor;
use halocline_core::{Error, Fan, IndexBox, Replicate, Result, Shard, ShardTensor};

use super::attended::{AttentionOutput, attended};
use super::dense::{self, Scores};
use crate::driver::empty::keep;
use crate::reshape;

/// Attention of the queries of a field to the keys and values of tokens, whose heads and samples
/// are placed like those of the field's queries.
pub(super) fn attention<const D: usize>(
    operator: &'static str,
    q: ShardTensor<D>,
    [k, v]: [&ShardTensor<D>; 2],
    [keys, values]: [ShardTensor<4>; 2],
    scale: Option<f64>,
) -> Result<AttentionOutput<ShardTensor<D>>> {
    let (heads, width) = (D - 2, D - 1);
    let [batch, tokens, key_heads, key_width] = keys.dims();
    let value_width = v.dims()[width];
    let fits = [key_heads, key_width] == [k.dims()[heads], k.dims()[width]]
        && tokens > 0
        && (batch == k.dims()[0] || batch == 1)
        && values.dims() == [batch, tokens, key_heads, value_width];
    if !fits {
        let message = format!(
            "tokens with keys {:?} and values {:?} beside keys {:?} and values {:?}; expected [batch, tokens, key_heads, width]",
            keys.dims(),
            values.dims(),
            k.dims(),
            v.dims()
        );
        return Err(Error::operator(operator, message));
    }
    let placements = q.layout().map_placements(|placement| match placement {
        Shard(0) if batch > 1 => Shard(0),
        Shard(dim) if dim == heads => Shard(2),
        // Ranks use them for different queries.
        Shard(_) | Fan => Fan,
        _ => Replicate,
    });
    let fans = |axis: usize| placements.get(axis) == Some(&Fan);
    let [keys, values] = [keys.try_fan_out(fans)?, values.try_fan_out(fans)?];
    for tensor in [&keys, &values] {
        let [found, expected] = [tensor.local().dtype(), k.local().dtype()];
        if found != expected {
            let message = format!("tokens of {found:?} beside keys of {expected:?}");
            return Err(Error::operator(operator, message));
        }
        let alike = tensor.layout().mesh() == k.layout().mesh()
            && tensor.placements() == placements
            && (batch == 1 || tensor.layout().extents(0) == k.layout().extents(0))
            && tensor.layout().extents(2) == k.layout().extents(heads);
        if !alike {
            return Err(Error::placement(
                operator,
                format!("tokens {} with keys {}", tensor.layout(), k.layout()),
                format!("redistribute the tokens to {placements:?}, with the extents of the keys"),
            ));
        }
    }
    let (q, layout, mesh) = q.into_parts();
    let dtype = q.dtype();
    let mut shape = q.dims();
    let of_samples = |tensor: ShardTensor<4>| -> Result<Tensor<4>> {
        let tensor = tensor.into_local();
        if batch > 1 {
            return Ok(tensor);
        }
        // A rank without samples takes the same steps.
        let tensor = tensor.repeat_dim(0, shape[0].max(1));
        if !layout.extents(0).contains(&0) {
            return Ok(tensor);
        }
        let mut kept = tensor.dims();
        kept[0] = shape[0];
        keep(tensor, &IndexBox::whole(&kept), operator)
    };
    let (keys, values) = (of_samples(keys)?, of_samples(values)?);
    let cells: usize = shape[1..heads].iter().product();
    let flat: Tensor<4> = reshape(q, vec![shape[0], cells, shape[heads], shape[width]]);
    let scores = Scores {
        scale: scale.unwrap_or(1.0 / (key_width as f64).sqrt()),
        with_lse: true,
        ..Scores::default()
    };
    let both = dense::local(flat, keys, values, scores, layout.has_empty_shard())?;
    shape[width] = both.dims()[3];
    let output = layout.resized(width, vec![value_width]);
    attended(reshape(both, shape.to_vec()), &output, &mesh, dtype)
}
