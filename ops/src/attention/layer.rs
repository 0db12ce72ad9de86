//! burn's attention modules and transformers.

use burn::nn::Linear;
use burn::nn::attention::MultiHeadAttention;
use burn::nn::transformer::{PositionWiseFeedForward, TransformerEncoder, TransformerEncoderLayer};

use super::{AttentionOptions, DenseAttentionField};
use crate::dropout::{dropout_of, training_key};
use crate::field::{Field, WithDims, run};
use crate::layer::Layer;
use crate::layer_placements::enter;
use crate::layers::layers;
use crate::matmul::activation_of;
use crate::norm::layer_norm_of;
use crate::rearrange::RearrangeField;

/// Multi-head attention with burn's module: queries `[batch, queries, d_model]` to keys and values
/// `[batch, keys, d_model]`.
///
/// Like burn's `forward`, with causal order, bias and key padding from `options`; scale and dropout
/// are those of the module. The attention weights are not returned. A `quiet_softmax` counts one
/// additional key with a score and value of zero. Padding keys count nothing, whatever the module's
/// `min_float`; a query without other keys attends to nothing, where burn returns the mean of all
/// values.
///
/// # Panics
/// Panics where [`scaled_dot_product_attention`](super::scaled_dot_product_attention) returns an
/// error.
///
/// # Example
/// ```
/// use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use halocline_ops::AttentionOptions;
/// use halocline_ops::attention::multi_head_attention;
///
/// let device = Device::default();
/// let mha = MultiHeadAttentionConfig::new(8, 2).init(&device);
/// let x = Tensor::<3>::random([1, 5, 8], Distribution::Normal(0.0, 1.0), &device);
/// let [query, key, value] = [x.clone(), x.clone(), x.clone()];
/// let ours = multi_head_attention(&mha, query, key, value, AttentionOptions::default());
/// let burns = mha.forward(MhaInput::self_attn(x)).context;
/// assert!((ours - burns).abs().max().into_scalar::<f32>() < 1e-5);
/// ```
pub fn multi_head_attention<X: Field<3>>(
    module: &MultiHeadAttention,
    query: X,
    key: X,
    value: X,
    options: AttentionOptions,
) -> X {
    let heads = |x: X, linear: &Linear| -> WithDims<X, 4> {
        x.apply(linear)
            .unflatten::<4>(2, &[module.n_heads, module.d_k])
    };
    let q = heads(query, &module.query);
    // As in burn, the device of the weights decides whether this is training.
    let device = q.clone().into_shard().device();
    let options = AttentionOptions {
        scale: Some(1.0 / (module.d_k as f64).sqrt()),
        dropout: training_key(&module.dropout, &device),
        ..options
    };
    let (k, v) = (heads(key, &module.key), heads(value, &module.value));
    let context = if module.quiet_softmax {
        let attended = q.scaled_dot_product_attention_with_lse(k, v, &options);
        // Share of the keys next to an additional one with a score of zero.
        let dtype = attended.output.clone().into_shard().local().dtype();
        attended.output * attended.lse.sigmoid().cast(dtype.into())
    } else {
        q.scaled_dot_product_attention(k, v, &options)
    };
    context.flatten::<3>(2, 3).apply(&module.output)
}

/// Attention of tokens to each other. They are redistributed to the placements of the query layer
/// once, for all three layers.
#[track_caller]
pub(super) fn self_attention<X: Field<3>>(
    module: &MultiHeadAttention,
    x: X,
    options: AttentionOptions,
) -> X {
    let x = run(x, |x| enter(&module.query.weight, x));
    multi_head_attention(module, x.clone(), x.clone(), x, options)
}

/// Self-attention.
impl<X: Field<3>> Layer<X> for MultiHeadAttention {
    type Output = X;

    #[track_caller]
    fn forward(&self, x: X) -> X {
        self_attention(self, x, AttentionOptions::default())
    }
}

layers! {
    PositionWiseFeedForward: |module, x| feed_forward(module, x);
}

pub(super) fn feed_forward<const D: usize, X: Field<D>>(
    module: &PositionWiseFeedForward,
    x: X,
) -> X {
    let x = activation_of(&module.activation, x.apply(&module.linear_inner));
    dropout_of(&module.dropout, x).apply(&module.linear_outer)
}

/// Transformer with burn's module, with causal order, bias and key padding from `options`, on
/// `[batch, tokens, d_model]`.
///
/// # Panics
/// Panics where one of its operators panics.
///
/// # Example
/// ```
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::AttentionOptions;
/// use halocline_ops::attention::transformer_encoder;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tokens", 2)])?;
///     let config = TransformerEncoderConfig::new(8, 16, 2, 1);
///     let encoder = world.init(|device| config.init(device))?;
///     let x = ShardTensor::<3>::ones([1, 10, 8], &mesh, &[Shard(1)])?;
///     let y = transformer_encoder(&encoder, x, &AttentionOptions::default().with_causal(true));
///     assert_eq!((y.dims(), y.placements()), ([1, 10, 8], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn transformer_encoder<X: Field<3>>(
    module: &TransformerEncoder,
    x: X,
    options: &AttentionOptions,
) -> X {
    let layers = module.layers.iter();
    layers.fold(x, |x, layer| encoder_layer(layer, x, options))
}

fn encoder_layer<X: Field<3>>(
    module: &TransformerEncoderLayer,
    x: X,
    options: &AttentionOptions,
) -> X {
    // In burn, `norm_2` comes first in a layer that normalizes first.
    let normalized = if module.norm_first {
        layer_norm_of(&module.norm_2, x.clone())
    } else {
        x.clone()
    };
    let attended = self_attention(&module.mha, normalized, options.clone());
    let mut x = x + dropout_of(&module.dropout, attended);
    let normalized = layer_norm_of(&module.norm_1, x.clone());
    if !module.norm_first {
        x = normalized.clone();
    }
    let x = x + dropout_of(&module.dropout, feed_forward(&module.pwff, normalized));
    if module.norm_first {
        x
    } else {
        layer_norm_of(&module.norm_2, x)
    }
}

/// Attention to all tokens.
impl<X: Field<3>> Layer<X> for TransformerEncoderLayer {
    type Output = X;

    #[track_caller]
    fn forward(&self, x: X) -> X {
        encoder_layer(self, x, &AttentionOptions::default())
    }
}

/// Attention to all tokens; [`transformer_encoder`] has options.
impl<X: Field<3>> Layer<X> for TransformerEncoder {
    type Output = X;

    #[track_caller]
    fn forward(&self, x: X) -> X {
        transformer_encoder(self, x, &AttentionOptions::default())
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
    use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
    use burn::tensor::{Bool, Tensor};
    use halocline_core::{Launcher, Replicate, Shard, ShardTensor};

    use super::*;
    use crate::layer::{Apply, PlanOf};
    use crate::reduce::ReduceField;
    use crate::testing::{difference, random};

    #[test]
    fn modules_give_what_they_give_in_burn() {
        let device = Default::default();
        let x = random::<3>([2, 9, 12], "x", 0).inner();
        for quiet in [false, true] {
            let config = MultiHeadAttentionConfig::new(12, 3).with_quiet_softmax(quiet);
            let mha = config.init(&device);
            let burns = mha.forward(MhaInput::self_attn(x.clone())).context;
            let off = difference(&x.clone().apply(&mha).into_data(), &burns.into_data());
            assert!(off < 1e-5, "quiet {quiet}: {off:e}");
        }
        for norm_first in [false, true] {
            let config = TransformerEncoderConfig::new(12, 24, 3, 2).with_norm_first(norm_first);
            let encoder = config.init(&device);
            let burns = encoder.forward(TransformerEncoderInput::new(x.clone()));
            let off = difference(&x.clone().apply(&encoder).into_data(), &burns.into_data());
            assert!(off < 1e-5, "norm first {norm_first}: {off:e}");
        }
    }

    #[test]
    fn keys_of_padding_do_not_count() {
        let device = Default::default();
        let mha = MultiHeadAttentionConfig::new(8, 2).init(&device);
        let x = random::<3>([2, 4, 8], "x", 0).inner();
        let padding =
            Tensor::<2, Bool>::from([[false, false, true, false], [false, true, true, true]]);
        let burns = mha
            .forward(MhaInput::self_attn(x.clone()).mask_pad(padding.clone()))
            .context;
        // Whole in keys, and sharded like the keys.
        for of_keys in [Replicate, Shard(1)] {
            let found = Launcher::local(4).collect(|world| {
                let mesh = world.mesh([("batch", 2), ("tokens", 2)])?;
                let shard = ShardTensor::distribute(x.clone(), &mesh, &[Shard(0), Shard(1)])?;
                let placements = [Shard(0), of_keys];
                let padding = ShardTensor::distribute(padding.clone(), &mesh, &placements)?;
                let options = AttentionOptions::default().with_key_padding(padding);
                let [q, k, v] = [shard.clone(), shard.clone(), shard];
                let y = multi_head_attention(&mha, q, k, v, options);
                Ok(y.full_tensor().into_data())
            });
            for found in found.unwrap() {
                let off = difference(&found, &burns.clone().into_data());
                assert!(off < 1e-5, "{of_keys:?}: {off:e}");
            }
        }
    }

    /// Tokens on several ranks: the same result, gradients and dropped weights, even after one of
    /// the ranks has printed a plan.
    #[test]
    fn a_transformer_on_shards_is_that_of_one_device() {
        let run = |ranks: usize| {
            let found = Launcher::local(ranks).seed(5).collect(|world| {
                let mesh = world.mesh([("tokens", ranks)])?;
                let config = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.3);
                let encoder = world.init(|device| config.init(device))?;
                let x = random::<3>([2, 7, 8], "x", 0).inner();
                let x = ShardTensor::distribute(x, &mesh, &[Shard(1)])?.require_grad();
                let options = AttentionOptions::default().with_causal(true);
                if world.rank() + 1 == ranks {
                    assert_eq!(x.plan_of(&encoder)?.is_empty(), ranks == 1);
                }
                let y = transformer_encoder(&encoder, x.clone(), &options);
                let weights = random::<3>([2, 7, 8], "weights", 0).inner();
                let weights = ShardTensor::distribute(weights, &mesh, &[Shard(1)])?;
                let gradients = (y.clone() * weights).sum().backward();
                let gradient = x.grad(&gradients).expect("a gradient");
                let weight = &encoder.layers[0].mha.key.weight;
                let weight = weight.val().grad(&gradients).expect("a gradient");
                Ok([
                    y.full_tensor().into_data(),
                    gradient.full_tensor().into_data(),
                    weight.into_data(),
                ])
            });
            found.unwrap()
        };
        let expected = run(1).remove(0);
        for ranks in [2, 3] {
            for found in run(ranks) {
                crate::testing::compare(&found, &expected, 2e-5, &format!("{ranks} ranks"));
            }
        }
    }
}
