//! Options of dense attention.

use burn::tensor::{Bool, DType, FloatDType, Tensor};
use halocline_core::{RandomKey, ShardTensor};

use crate::driver::place::renumbered;
use crate::field::Field;

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
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
    /// Scale of the scores; default `width^-1/2`.
    pub scale: Option<f64>,
    /// Bias added to the scores, `[batch, queries, heads, keys]`; −∞ excludes a key. Any dim but
    /// the last may have size one and is then broadcast. It is sharded like the queries and whole
    /// in keys; a bias that is the same for all queries may instead be sharded like the keys. A
    /// plain tensor counts as one that every rank holds whole. A bias with gradients is learned:
    /// it costs the memory of all scores of a rank, and keys and values must be whole in tokens.
    pub bias: Option<ShardTensor<4>>,
    /// Padding mask added to the scores of all queries and heads, `[batch, 1, 1, keys]`: zero, or
    /// −∞ for excluded keys. Created by [`with_key_padding`](Self::with_key_padding).
    pub key_padding: Option<ShardTensor<4>>,
    /// Probability that a weight is set to zero, and the random key that decides which.
    pub dropout: Option<(f64, RandomKey)>,
}

impl AttentionOptions {
    /// Restricts each query to the keys up to its own position, or lifts the restriction.
    #[must_use]
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// Sets the scale of the scores.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }

    /// Adds a bias to the scores, on top of any earlier one; see [`bias`](Self::bias).
    ///
    /// # Panics
    /// Panics if the bias does not fit the earlier one.
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

    /// Excludes the keys for which `padding`, `[batch, keys]`, is true, and replaces any earlier
    /// padding. It is sharded in batch like the queries; in keys it is whole, or sharded like the
    /// keys and then sent with them. With a bias that is whole in keys, the padding must be whole
    /// in keys, too.
    #[must_use]
    pub fn with_key_padding(self, padding: ShardTensor<2, Bool>) -> Self {
        let (local, layout, mesh) = padding.into_parts();
        let zeros = Tensor::<2>::zeros(local.dims(), (&local.device(), DType::F32));
        let added = zeros.mask_fill(local, f64::NEG_INFINITY);
        let [batch, keys] = [0, 1].map(|dim| layout.extents(dim).to_vec());
        let added = ShardTensor::from_parts(added, layout, mesh);
        let moved = |dim: usize| if dim == 1 { 3 } else { dim };
        let added = renumbered(added, vec![batch, vec![1], vec![1], keys], moved);
        Self {
            key_padding: Some(added),
            ..self
        }
    }

    /// Sets weights to zero with the given probability; the others are scaled up, so that the mean
    /// of their sum is preserved.
    #[must_use]
    pub fn with_dropout(self, probability: f64, key: RandomKey) -> Self {
        Self {
            dropout: Some((probability, key)),
            ..self
        }
    }

    /// Whether the bias has gradients.
    pub(super) fn learns_bias(&self) -> bool {
        self.bias
            .as_ref()
            .is_some_and(|bias| bias.local().is_tracked())
    }
}

/// Returns extents of `tokens` over `parts` ranks that give every rank of a ring the same work in
/// causal attention: the first ranks hold more tokens, because their queries attend to fewer keys.
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
