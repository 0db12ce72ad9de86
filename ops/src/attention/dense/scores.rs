//! Parameters of the scores and weights of dense attention, apart from products.

use burn::tensor::Tensor;
use halocline_core::{Error, RandomKey, Result};

use super::dims::NAME;

/// How the queries of a rank attend to keys.
#[derive(Clone, Debug, Default)]
pub(in crate::attention) struct Scores {
    /// Scale of the scores.
    pub scale: f64,
    /// Whether the result has the logarithms of the sums of exponentials as its last column.
    pub with_lse: bool,
    /// Position of this rank's first query, if a query reaches only keys up to its own position.
    pub causal: Option<usize>,
    /// Bias of the scores: `[batch, queries, heads, keys]`, of size one in dims where it is the
    /// same everywhere.
    pub bias: Option<Tensor<4>>,
    pub dropout: Option<Dropped>,
}

/// Dropout of weights, by their global index in `[batch, queries, heads, keys]`.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Dropped {
    pub probability: f64,
    pub key: RandomKey,
    pub shape: [usize; 4],
    /// This rank's first sample, query and head.
    pub first: [usize; 3],
}

impl Dropped {
    /// # Errors
    /// A probability outside `[0, 1)`.
    pub(super) fn new(
        probability: f64,
        key: RandomKey,
        shape: [usize; 4],
        first: [usize; 3],
    ) -> Result<Self> {
        if !(0.0..1.0).contains(&probability) {
            let message = format!("dropout {probability}; expected 0 or more and less than 1");
            return Err(Error::operator(NAME, message));
        }
        Ok(Self {
            probability,
            key,
            shape,
            first,
        })
    }
}
