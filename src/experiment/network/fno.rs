//! Kinds `fno` and `sfno`: Fourier neural operators, periodic in both dims or on the sphere.

use burn::tensor::Device;
use halocline_core::{Error, Result};
use halocline_models::{Fno, FnoConfig, Sfno, SfnoConfig};

use super::super::geometry::harmonics;
use super::signature::Signature;

/// Initializes a network with no more modes than the grid has.
pub(super) fn init(
    signature: &Signature,
    modes: [usize; 2],
    width: usize,
    blocks: usize,
    device: &Device,
) -> Result<Fno> {
    let [rows, columns] = signature.grid.shape();
    let most = columns / 2 + 1;
    if modes[0] > rows || modes[1] > most || modes.contains(&0) {
        return Err(Error::other(format!(
            "model.modes: {modes:?} on a grid of {rows} x {columns}; expected 1 to {rows} and 1 to {most}"
        )));
    }
    let config = FnoConfig::new(signature.channels_in(), signature.channels_out(), modes)
        .with_width(width)
        .with_blocks(blocks);
    Ok(config.init(device))
}

/// Initializes a network on a grid with spherical harmonics.
pub(super) fn init_spherical(
    signature: &Signature,
    width: usize,
    blocks: usize,
    device: &Device,
) -> Result<Sfno> {
    let config = SfnoConfig::new(signature.channels_in(), signature.channels_out())
        .with_width(width)
        .with_blocks(blocks);
    Ok(config.init(&harmonics(signature.grid)?, device))
}
