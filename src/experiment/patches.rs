//! Patches of a grid, on which a transformer computes.

use halocline_core::{Error, Result};

/// Refuses a kernel that does not fit the patches of a grid of this shape.
pub(super) fn check_kernel(shape: [usize; 2], patch: [usize; 2], kernel: [usize; 2]) -> Result<()> {
    let patches = [0, 1].map(|dim| shape[dim].div_ceil(patch[dim]));
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
