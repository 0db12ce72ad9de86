//! Name of the operator, and the dims of `[batch, tokens, heads, width]`.

pub(super) const NAME: &str = "scaled_dot_product_attention";
pub(super) const BATCH: usize = 0;
pub(super) const TOKENS: usize = 1;
pub(super) const HEADS: usize = 2;
pub(super) const WIDTH: usize = 3;
