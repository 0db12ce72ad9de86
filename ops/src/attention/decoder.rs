//! burn's transformer decoder.

use burn::nn::transformer::{TransformerDecoder, TransformerDecoderLayer};

use super::AttentionOptions;
use super::layer::{feed_forward, multi_head_attention, self_attention};
use crate::dropout::dropout_of;
use crate::field::Field;
use crate::norm::layer_norm_of;

/// Decoder with burn's module: tokens `[batch, tokens, d_model]` that attend to each other and to a
/// memory `[batch, memory tokens, d_model]`, with causal order, bias and key padding of the one and
/// of the other from `options`. A forecast by attention to another field has its tokens as memory.
///
/// # Panics
/// Panics where one of its operators panics.
///
/// # Example
/// ```
/// use burn::nn::transformer::TransformerDecoderConfig;
/// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
/// use halocline_ops::AttentionOptions;
/// use halocline_ops::attention::transformer_decoder;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tokens", 2)])?;
///     let config = TransformerDecoderConfig::new(8, 16, 2, 1);
///     let decoder = world.init(|device| config.init(device))?;
///     let x = ShardTensor::<3>::ones([1, 10, 8], &mesh, &[Shard(1)])?;
///     let memory = ShardTensor::<3>::ones([1, 7, 8], &mesh, &[Shard(1)])?;
///     let causal = AttentionOptions::default().with_causal(true);
///     let y = transformer_decoder(&decoder, x, memory, [&causal, &AttentionOptions::default()]);
///     assert_eq!((y.dims(), y.placements()), ([1, 10, 8], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn transformer_decoder<X: Field<3>>(
    module: &TransformerDecoder,
    x: X,
    memory: X,
    options: [&AttentionOptions; 2],
) -> X {
    let layers = module.layers.iter();
    layers.fold(x, |x, layer| {
        decoder_layer(layer, x, memory.clone(), options)
    })
}

fn decoder_layer<X: Field<3>>(
    module: &TransformerDecoderLayer,
    x: X,
    memory: X,
    [of_tokens, of_memory]: [&AttentionOptions; 2],
) -> X {
    // In burn, `norm_3` comes first in a layer that normalizes first.
    let normalized = if module.norm_first {
        layer_norm_of(&module.norm_3, x.clone())
    } else {
        x.clone()
    };
    let attended = self_attention(&module.self_attn, normalized, of_tokens.clone());
    let mut x = x + dropout_of(&module.dropout, attended);
    let normalized = layer_norm_of(&module.norm_1, x.clone());
    if !module.norm_first {
        x = normalized.clone();
    }
    let attention = &module.cross_attn;
    let attended = multi_head_attention(
        attention,
        normalized,
        memory.clone(),
        memory,
        of_memory.clone(),
    );
    let mut x = x + dropout_of(&module.dropout, attended);
    let normalized = layer_norm_of(&module.norm_2, x.clone());
    if !module.norm_first {
        x = normalized.clone();
    }
    let x = x + dropout_of(&module.dropout, feed_forward(&module.pwff, normalized));
    if module.norm_first {
        x
    } else {
        layer_norm_of(&module.norm_3, x)
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::attention::generate_autoregressive_mask;
    use burn::nn::transformer::{TransformerDecoderConfig, TransformerDecoderInput};
    use halocline_core::{Launcher, Shard, ShardTensor};

    use super::*;
    use crate::testing::{difference, random};

    #[test]
    fn a_decoder_gives_what_it_gives_in_burn_on_any_number_of_ranks() {
        let device = Default::default();
        let x = random::<3>([2, 9, 12], "x", 0).inner();
        let memory = random::<3>([2, 5, 12], "memory", 0).inner();
        let causal = AttentionOptions::default().with_causal(true);
        let options = [&causal, &AttentionOptions::default()];
        for norm_first in [false, true] {
            let config = TransformerDecoderConfig::new(12, 24, 3, 2).with_norm_first(norm_first);
            let decoder = config.init(&device);
            let mask = generate_autoregressive_mask(2, 9, &device);
            let input = TransformerDecoderInput::new(x.clone(), memory.clone());
            let burns = decoder.forward(input.target_mask_attn(mask)).into_data();
            let ours = transformer_decoder(&decoder, x.clone(), memory.clone(), options);
            let off = difference(&ours.clone().into_data(), &burns);
            assert!(off < 1e-5, "norm first {norm_first}: {off:e}");
            let found = Launcher::local(3).collect(|world| {
                let mesh = world.mesh([("tokens", 3)])?;
                let place = |x| ShardTensor::distribute(x, &mesh, &[Shard(1)]);
                let (x, memory) = (place(x.clone())?, place(memory.clone())?);
                let y = transformer_decoder(&decoder, x, memory, options);
                Ok(y.full_tensor().into_data())
            });
            for found in found.unwrap() {
                let off = difference(&found, &burns);
                assert!(off < 2e-5, "3 ranks: {off:e}");
            }
        }
    }
}
