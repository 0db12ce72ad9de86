//! Kind `transformer`: neighborhood attention between patches.

use burn::tensor::Device;
use halocline_core::{Error, Result};
use halocline_models::{FieldTransformer, FieldTransformerConfig};

use super::super::geometry::around;
use super::signature::Signature;

/// Initializes the network with the sizes of `config`, if they fit each other and the grid.
pub(super) fn init(
    signature: &Signature,
    config: FieldTransformerConfig,
    device: &Device,
) -> Result<FieldTransformer> {
    let FieldTransformerConfig {
        d_model,
        heads,
        blocks,
        dense_blocks,
        patch,
        kernel,
        ..
    } = config;
    if heads == 0 || !d_model.is_multiple_of(4 * heads) || dense_blocks > blocks {
        return Err(Error::other(format!(
            "model: d_model {d_model} with {heads} heads, {dense_blocks} dense_blocks of {blocks} blocks; \
             expected a multiple of four channels for each head, and no more dense blocks than blocks"
        )));
    }
    if patch.contains(&0) {
        return Err(Error::other(format!(
            "model.patch: {patch:?}; expected one cell or more"
        )));
    }
    if dense_blocks < blocks {
        check_kernel(signature.grid.shape(), patch, kernel)?;
    }
    let config = config
        .with_history(signature.history)
        .with_constants(signature.constants())
        .with_diagnostics(signature.diagnostics())
        .with_periodic([false, around(signature.grid)]);
    Ok(config.init(device))
}

/// Returns the numbers of patches of a grid of this shape.
pub(super) fn patches(shape: [usize; 2], patch: [usize; 2]) -> [usize; 2] {
    [0, 1].map(|dim| shape[dim].div_ceil(patch[dim]))
}

/// Refuses a kernel that does not fit the patches of a grid of this shape.
fn check_kernel(shape: [usize; 2], patch: [usize; 2], kernel: [usize; 2]) -> Result<()> {
    let patches = patches(shape, patch);
    let fits = |dim: usize| (2..=patches[dim]).contains(&kernel[dim]);
    let Some(dim) = [0, 1].into_iter().find(|dim| !fits(*dim)) else {
        return Ok(());
    };
    let axis = ["latitude", "longitude"][dim];
    let ([rows, columns], [high, wide]) = (shape, patches);
    let message = if shape[dim] < 2 {
        format!(
            "model.kind: transformer on a grid of {rows} x {columns}; expected at least 2 cells along {axis}, or \
             model.kind graph, cnn, fno, or unet with model.levels = 0"
        )
    } else if patches[dim] < 2 {
        format!(
            "model.patch: {patch:?} on a grid of {rows} x {columns}; expected at least 2 patches along {axis}"
        )
    } else {
        format!(
            "model.kernel: {kernel:?} on {high} x {wide} patches; expected from 2 to {} along {axis}, or a smaller model.patch",
            patches[dim]
        )
    };
    Err(Error::other(message))
}
