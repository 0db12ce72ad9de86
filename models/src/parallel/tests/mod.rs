//! Plans: their resolution, and their communication.

use std::sync::Arc;

use halocline_core::MeshShape;

mod automatic;
mod counts;
mod initial;
mod plans;

fn mesh(axes: &[(&str, usize)]) -> Arc<MeshShape> {
    let size = axes.iter().map(|(_, size)| size).product();
    MeshShape::new(axes, (0..size).collect()).unwrap().into()
}
