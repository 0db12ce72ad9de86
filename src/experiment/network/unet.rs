//! Kind `unet`: an encoder and decoder with skip connections.

use burn::tensor::Device;
use halocline_core::{Error, Result};
use halocline_models::{UNet, UNetConfig};

use super::super::geometry::halved;
use super::signature::Signature;

/// Initializes the network with the sizes of `config`, if the grid can be halved that often.
pub(super) fn init(signature: &Signature, config: UNetConfig, device: &Device) -> Result<UNet> {
    let (grid, levels) = (signature.grid, config.levels);
    let [rows, columns] = grid.shape();
    // A level needs at least two cells to halve.
    let least = rows.min(columns);
    let most = least.saturating_sub(1).checked_ilog2();
    let most = most.map_or(0, |log| log as usize + 1);
    if levels > most {
        let other = if rows == 1 && grid.has_positions() {
            ", or model.kind graph"
        } else {
            ""
        };
        return Err(Error::other(format!(
            "model.levels: {levels} on a grid of {rows} x {columns}; expected at most {most}{other}"
        )));
    }
    let config = config
        .with_boundary(grid.boundary())
        .with_boundary_halved(Some(halved(grid, levels)))
        .with_odd(signature.odd_places());
    Ok(config.init(device))
}

/// Returns the rows of the layers of halved fields, by path, for this number of samples with this
/// number of cells.
pub(super) fn rows(levels: usize, samples: usize, cells: usize) -> Vec<(String, usize)> {
    let rows = |level: usize| samples * (cells >> (2 * level)).max(1);
    let halved = (1..levels).map(|level| (format!("{{down,up}}.{level}.**"), rows(level)));
    let bottom = ("bottom.**".to_string(), rows(levels));
    halved.chain([bottom]).collect()
}
