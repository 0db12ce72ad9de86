//! Planes: variables with the latitudes or the longitudes of the cells of rows and columns.

use super::axis::Axis;
use super::unstructured::place_of;
use super::variable::{Container, Kind, Variable};

/// Returns names and extents of the last two dims of a variable, those of rows and columns.
pub(super) fn lines(plane: &Variable) -> ([&str; 2], [usize; 2]) {
    let first = plane.dims.len() - 2;
    let dims = [0, 1].map(|line| plane.dims[first + line].as_str());
    (dims, [plane.shape[first], plane.shape[first + 1]])
}

/// Lists the latitudes and longitudes in two or more dims, without bounds of cells.
pub(super) fn planes_of(container: &dyn Container) -> Vec<(&Variable, Axis)> {
    let variables = container.variables();
    let bounds = variables
        .iter()
        .filter_map(|variable| variable.text("bounds"));
    let bounds: Vec<&str> = bounds.collect();
    let planes = variables.iter().filter_map(|variable| {
        let is_plane = variable.kind != Kind::Other
            && variable.dims.len() > 1
            && !bounds.contains(&variable.name.as_str());
        if !is_plane {
            return None;
        }
        Some((variable, place_of(variable)?))
    });
    planes.collect()
}
