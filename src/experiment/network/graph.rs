//! Kind `graph`: a graph network between the cells of a grid and an icosahedral mesh.

use burn::tensor::Device;
use halocline_core::Result;
use halocline_models::{GraphCastNet, GraphCastNetConfig, GridMesh};

use super::super::errors::invalid;
use super::super::geometry::positions;
use super::signature::Signature;

/// Initializes the network with the sizes of `config` for a grid with positions, on a mesh that is
/// not finer than the grid.
pub(super) fn init(
    signature: &Signature,
    config: GraphCastNetConfig,
    mesh_level: usize,
    device: &Device,
) -> Result<GraphCastNet> {
    if config.layers == 0 {
        return Err(invalid("model.layers", config.layers, "at least 1 layer"));
    }
    if !(1..=GridMesh::FINEST).contains(&mesh_level) {
        let expected = format!("a level from 1 to {}", GridMesh::FINEST);
        return Err(invalid("model.mesh_level", mesh_level, expected));
    }
    let mesh = mesh_of(&positions(signature.grid)?, mesh_level)?;
    Ok(config.init(&mesh, device))
}

/// Returns the mesh of cells at these positions.
///
/// # Errors
/// A level above 1 whose mesh has more cells than the grid: the messages of a few layers reach fewer
/// grid cells on a finer mesh.
fn mesh_of(positions: &[[f64; 2]], level: usize) -> Result<GridMesh> {
    let mesh = GridMesh::new(positions, level)?;
    let (cells, size) = (positions.len(), mesh.size());
    if level == 1 || size <= cells {
        return Ok(mesh);
    }
    let mut most = level - 1;
    while most > 1 && GridMesh::new(positions, most)?.size() > cells {
        most -= 1;
    }
    Err(invalid(
        "model.mesh_level",
        format!("{level}, a mesh of {size} cells for a grid of {cells} cells"),
        format!(
            "at most {most}, because the layers connect fewer grid cells by a mesh finer than the grid"
        ),
    ))
}
