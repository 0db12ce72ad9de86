//! Blocks of models, which the backward pass may recompute.

use burn::module::Module;
use halocline_core::Halos;
use halocline_ops::Field;

/// Applies a block of a model. With `recompute`, the backward pass recomputes the block, of which
/// only the input and the data received from other ranks are kept.
pub(crate) fn apply_block<const D: usize, X: Field<D>, M: Module + 'static>(
    recompute: bool,
    x: X,
    module: &M,
    block: impl Fn(&M, X) -> X + Send + Sync + 'static,
) -> X {
    if recompute {
        x.recompute(module, Halos::Keep, block)
    } else {
        block(module, x)
    }
}

/// Like [`apply_block`], for a block with a second input.
pub(crate) fn apply_block_with<const D: usize, X: Field<D>, M: Module + 'static>(
    recompute: bool,
    [x, other]: [X; 2],
    module: &M,
    block: impl Fn(&M, X, X) -> X + Send + Sync + 'static,
) -> X {
    if recompute {
        x.recompute_with::<D, _>(other, module, Halos::Keep, block)
    } else {
        block(module, x, other)
    }
}
