//! Kind `graph`: a graph network between the cells of a grid and an icosahedral mesh.

use burn::tensor::Device;
use halocline_core::{Error, Result};
use halocline_models::{GraphCastNet, GraphCastNetConfig, GridMesh};

use super::super::geometry::positions;
use super::signature::Signature;

/// Initializes the network for a grid with positions.
pub(super) fn init(
    signature: &Signature,
    width: usize,
    layers: usize,
    mesh_level: usize,
    device: &Device,
) -> Result<GraphCastNet> {
    if !(1..=GridMesh::FINEST).contains(&mesh_level) {
        return Err(Error::other(format!(
            "model.mesh_level: {mesh_level}; expected 1 to {}",
            GridMesh::FINEST
        )));
    }
    let config = GraphCastNetConfig::new(signature.channels_in(), signature.channels_out())
        .with_width(width)
        .with_layers(layers);
    let mesh = GridMesh::new(&positions(signature.grid)?, mesh_level)?;
    Ok(config.init(&mesh, device))
}

/// Returns the rows of the layers, by path, for this number of samples in `passes`.
pub(super) fn rows(network: &GraphCastNet, samples: usize, passes: usize) -> Vec<(String, usize)> {
    let rows = network.rows(samples, passes).into_iter();
    rows.map(|(path, rows)| (path.to_string(), rows)).collect()
}
