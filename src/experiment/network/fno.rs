//! Kinds `fno` and `sfno`: Fourier neural operators, periodic in both dims or on the sphere.

use burn::tensor::Device;
use halocline_core::{Error, Result};
use halocline_models::{Fno, FnoConfig, Sfno, SfnoConfig};
use halocline_ops::{Sht, SphereGrid};

use super::super::errors::invalid;
use super::super::geometry::harmonics;
use super::signature::Signature;

/// Initializes a network with the sizes of `config`, if the grid has as many modes.
pub(super) fn init(signature: &Signature, config: FnoConfig, device: &Device) -> Result<Fno> {
    let modes = config.modes;
    let [rows, columns] = signature.grid.shape();
    let most = columns / 2 + 1;
    if modes[0] > rows || modes[1] > most || modes.contains(&0) {
        return Err(Error::other(format!(
            "model.modes: {modes:?} on a grid of {rows} x {columns}; expected 1 to {rows} and 1 to {most}"
        )));
    }
    Ok(config.init(device))
}

/// Initializes a network with the sizes of `config` on a grid with spherical harmonics, with hidden
/// fields on a Gaussian grid that is coarser by `scale_factor`, if that is not 1.
pub(super) fn init_spherical(
    signature: &Signature,
    config: SfnoConfig,
    scale_factor: usize,
    device: &Device,
) -> Result<Sfno> {
    let (outer, shape) = (harmonics(signature.grid)?, signature.grid.shape());
    let most = (shape[0].min(shape[1]) / 2).max(1);
    if !(1..=most).contains(&scale_factor) {
        let expected = format!("1 to {most}, with which the coarser grid has two rows and columns");
        return Err(invalid("model.scale_factor", scale_factor, expected));
    }
    if scale_factor == 1 {
        return Ok(config.init(&outer, device));
    }
    let inner = Sht::new(coarser(shape, scale_factor), SphereGrid::LegendreGauss)?;
    // The coarser grid resolves fewer degrees.
    let outer = outer.with_degrees(inner.degrees())?;
    Ok(config.init_within([&outer, &inner], device))
}

/// Returns the rows and columns of the grid of hidden fields.
fn coarser(shape: [usize; 2], scale_factor: usize) -> [usize; 2] {
    shape.map(|cells| cells / scale_factor)
}

/// Returns the rows of the blocks of a spherical network on the coarser grid, by path, for this
/// number of samples. The last block leads back to the grid of the fields.
pub(super) fn rows(
    blocks: usize,
    scale_factor: usize,
    samples: usize,
    shape: [usize; 2],
) -> Vec<(String, usize)> {
    let cells: usize = coarser(shape, scale_factor).iter().product();
    let coarse = 0..blocks.saturating_sub(1);
    coarse
        .map(|block| (format!("blocks.{block}.**"), samples * cells))
        .collect()
}
