//! Options of dense attention.

use burn::tensor::{Bool, DType, FloatDType, Tensor};
use halocline_core::{RandomKey, Shard, ShardTensor};

use crate::field::Field;
use crate::reshape;

/// Options of dense attention: causal order, scale, bias and dropout.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_ops::AttentionOptions;
///
/// // Scores that fall with the distance of five tokens, the same in all samples and heads.
/// let bias = [[0.0, -1.0, -2.0, -3.0, -4.0]; 5];
/// let bias = Tensor::<2>::from(bias).reshape([1, 5, 1, 5]);
/// let options = AttentionOptions::default().with_causal(true).with_bias(bias);
/// assert!(options.causal && options.scale.is_none());
/// ```
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// Whether only keys up to the query's own place count.
    pub causal: bool,
    /// What scores are multiplied with: `width^-1/2` if it is not given.
    pub scale: Option<f64>,
    /// What is added to scores, `[batch, queries, heads, keys]`, with one cell in dims but the last in which it is the same
    /// everywhere; −∞ for keys that do not count. Sharded as queries are, whole in keys; one that is the same for all queries
    /// may be sharded in keys as these are. A plain tensor is one that every rank holds whole. One with gradients is learned, and costs the
    /// memory of all scores of a rank.
    pub bias: Option<ShardTensor<4>>,
    /// Numbers added to the scores of all queries and heads, `[batch, 1, 1, keys]`: zero, and −∞ for keys that do not count.
    /// [`with_key_padding`](Self::with_key_padding) makes them.
    pub key_padding: Option<ShardTensor<4>>,
    /// The probability that a weight becomes zero, and the key that decides which.
    pub dropout: Option<(f64, RandomKey)>,
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

    /// These options with something to add to scores, beside what they have; see [`bias`](Self::bias).
    ///
    /// # Panics
    /// Panics for a bias that does not fit the one before.
    #[must_use]
    pub fn with_bias(self, bias: impl Field<4>) -> Self {
        let bias = bias.into_shard();
        let bias = match self.bias {
            None => bias,
            Some(before) => {
                let dtype = FloatDType::from(bias.local().dtype());
                before.cast(dtype) + bias
            }
        };
        Self {
            bias: Some(bias),
            ..self
        }
    }

    /// These options without the keys for which `padding`, `[batch, keys]`, is true, in place of padding that they have.
    /// Sharded in batch as queries are; in keys whole, or as these are: then it travels with them. Beside a bias that is whole
    /// in keys it must be, too.
    #[must_use]
    pub fn with_key_padding(self, padding: ShardTensor<2, Bool>) -> Self {
        let (local, layout, mesh) = padding.into_parts();
        let zeros = Tensor::<2>::zeros(local.dims(), (&local.device(), DType::F32));
        let [batch, keys] = local.dims();
        let added = zeros.mask_fill(local, f64::NEG_INFINITY);
        let extents = layout.all_extents();
        let extents = vec![extents[0].clone(), vec![1], vec![1], extents[1].clone()];
        let placements = layout.placements().iter().map(|placement| match placement {
            Shard(1) => Shard(3),
            other => *other,
        });
        let layout = layout.derive(placements.collect(), extents);
        let added = reshape(added, vec![batch, 1, 1, keys]);
        let added = ShardTensor::from_parts(added, layout, mesh);
        Self {
            key_padding: Some(added),
            ..self
        }
    }

    /// These options with weights that become zero with a probability; the others grow, so that their sum keeps its mean.
    #[must_use]
    pub fn with_dropout(self, probability: f64, key: RandomKey) -> Self {
        Self {
            dropout: Some((probability, key)),
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
