//! Cells that form no rows and columns, and lie along one dim: those of unstructured grids, reduced
//! Gaussian grids and HEALPix, and stations.

use halocline_core::sphere::HealpixOrder;

use super::axis::{AREA, Axis, CELLS, axis_of};
use super::variable::{Container, Kind, Variable, VariableAttributes};
use crate::attributes::Attributes;
use crate::grid::healpix::positions_in;
use crate::{Error, Result};

/// Names of positions that are in radians if they have no units: those of ICON and MPAS.
const IN_RADIANS: [&str; 4] = ["clat", "clon", "latcell", "loncell"];
/// Names of areas of cells, besides those that `cell_measures` names: those of ICON, MPAS and CMIP.
const AREAS: [&str; 4] = [AREA, "areaCell", "areacella", "areacello"];
/// Names of the dim of HEALPix cells, if the grid mapping has no number of cells.
const HEALPIX_DIMS: [&str; 4] = ["cell", "cells", "value", "values"];

/// Returns the axis of the positions that a variable has: latitudes or longitudes, in degrees or
/// radians.
pub(super) fn place_of(variable: &Variable) -> Option<Axis> {
    if let Some(axis @ (Axis::Latitude | Axis::Longitude)) = axis_of(variable) {
        return Some(axis);
    }
    let units = variable.text("units").unwrap_or_default().to_lowercase();
    let is_angle = ["deg", "°", "rad"]
        .iter()
        .any(|unit| units.starts_with(*unit));
    if !units.is_empty() && !is_angle {
        return None;
    }
    let own = variable.name.to_lowercase();
    let standard = variable.text("standard_name").map(str::to_lowercase);
    // The grid files of ICON name them `grid_latitude`, although no pole is rotated.
    let standard = standard.filter(|_| !IN_RADIANS.contains(&own.as_str()));
    match standard.unwrap_or(own).as_str() {
        "lat" | "latitude" | "clat" | "latcell" | "grid_center_lat" => Some(Axis::Latitude),
        "lon" | "longitude" | "clon" | "loncell" | "grid_center_lon" => Some(Axis::Longitude),
        _ => None,
    }
}

/// Whether latitudes or longitudes are in radians rather than in degrees.
pub(super) fn is_in_radians(variable: &Variable) -> bool {
    match variable.text("units") {
        None | Some("") => IN_RADIANS.contains(&variable.name.to_lowercase().as_str()),
        Some(units) => units.to_lowercase().starts_with("rad"),
    }
}

/// Finds the latitudes and longitudes of the cells along a dim by the names of Halocline's outputs.
pub(super) fn named_positions<'a>(
    container: &'a dyn Container,
    dim: &str,
) -> Option<[&'a Variable; 2]> {
    let [lat, lon] = CELLS.map(|name| along(container, dim, |variable| variable.name == name));
    Some([lat?, lon?])
}

/// Finds the latitudes and longitudes of the cells along a dim.
pub(super) fn positions<'a>(container: &'a dyn Container, dim: &str) -> Option<[&'a Variable; 2]> {
    named_positions(container, dim).or_else(|| {
        let [lat, lon] = [Axis::Latitude, Axis::Longitude]
            .map(|axis| along(container, dim, |variable| place_of(variable) == Some(axis)));
        Some([lat?, lon?])
    })
}

/// Whether a variable has the areas of cells, by its name.
pub(super) fn is_area(variable: &Variable) -> bool {
    AREAS.contains(&variable.name.as_str())
}

/// Returns the name of the areas in the attribute `cell_measures` of a variable, if there is one.
pub(super) fn area_name(variable: &Variable) -> Option<&str> {
    let measures = variable.text("cell_measures").unwrap_or_default();
    let mut words = measures.split_whitespace();
    words.find(|word| *word == "area:")?;
    words.next()
}

/// Finds the areas of the cells along a dim of a variable: those that its attribute `cell_measures`
/// names (CF 1.11, section 7.2), else those with a common name.
pub(super) fn areas<'a>(
    container: &'a dyn Container,
    variable: &Variable,
    dim: &str,
) -> Option<&'a Variable> {
    let named = area_name(variable);
    let is_named = |other: &Variable| named.is_some_and(|name| other.name == name);
    along(container, dim, is_named).or_else(|| along(container, dim, is_area))
}

/// Finds a variable of numbers along a dim.
fn along<'a>(
    container: &'a dyn Container,
    dim: &str,
    is_wanted: impl Fn(&Variable) -> bool,
) -> Option<&'a Variable> {
    container.variables().iter().find(|variable| {
        variable.kind != Kind::Other && variable.lies_on(dim) && is_wanted(variable)
    })
}

/// Finds the HEALPix grid mapping of a variable: the one that it names or, if it names none, any.
fn healpix<'a>(container: &'a dyn Container, variable: &Variable) -> Option<&'a Variable> {
    let named = variable.text("grid_mapping");
    container.variables().iter().find(|other| {
        other.text("grid_mapping_name") == Some("healpix")
            && named.is_none_or(|named| named.split([' ', ':']).any(|name| name == other.name))
    })
}

/// Finds the dim of the cells of a whole HEALPix sphere among `dims`, some of the dims of a
/// variable, by the grid mapping of the variable.
///
/// # Errors
/// A size of faces in the grid mapping that is no number.
pub(super) fn healpix_dim<'v>(
    container: &dyn Container,
    variable: &Variable,
    dims: &[&'v str],
) -> Result<Option<&'v str>> {
    let Some(mapping) = healpix(container, variable) else {
        return Ok(None);
    };
    let attributes = VariableAttributes(container.path(), mapping);
    let size = match attributes.number("healpix_nside")? {
        Some(size) => Some(size),
        None => attributes.number("refinement_level")?.map(f64::exp2),
    };
    let fits = |dim: &&str| {
        let mut extents = variable.dims.iter().zip(&variable.shape);
        let extent = extents.find(|(other, _)| other == dim);
        let extent = extent.map_or(0, |(_, extent)| *extent);
        match size {
            Some(size) => extent as f64 == 12.0 * size * size,
            None => {
                let size = (extent / 12).isqrt();
                HEALPIX_DIMS.contains(dim) && extent == 12 * size * size
            }
        }
    };
    Ok(dims.iter().copied().find(fits))
}

/// Finds the variable with the number of each HEALPix cell along a dim.
pub(super) fn healpix_cells<'a>(container: &'a dyn Container, dim: &str) -> Option<&'a Variable> {
    along(container, dim, |variable| {
        variable.name == dim || variable.text("standard_name") == Some("healpix_index")
    })
}

/// Computes the latitudes and longitudes, in degrees, of a whole HEALPix sphere of `count` cells,
/// in the order that the grid mapping of a variable names, or of the cells with these numbers in
/// it. Returns `None` for other orders and numbers.
///
/// # Errors
/// Nested order with faces whose size is not a power of two.
pub(super) fn healpix_positions(
    container: &dyn Container,
    variable: &Variable,
    count: usize,
    numbers: Option<Vec<f64>>,
) -> Result<Option<[Vec<f64>; 2]>> {
    let Some(mapping) = healpix(container, variable) else {
        return Ok(None);
    };
    let order = mapping.text("indexing_scheme");
    let order = match order.or_else(|| mapping.text("healpix_order")) {
        Some("nest" | "nested" | "NEST" | "NESTED") => HealpixOrder::Nested,
        Some("ring" | "RING") => HealpixOrder::Ring,
        _ => return Ok(None),
    };
    let size = (count / 12).isqrt();
    let mut positions = positions_in(size, order)
        .map_err(|error| Error::data(container.path(), &mapping.name, error))?;
    if let Some(numbers) = numbers {
        let position = |number: f64| {
            let is_index = number >= 0.0 && number.fract() == 0.0;
            positions.get(number as usize).filter(|_| is_index).copied()
        };
        match numbers
            .into_iter()
            .map(position)
            .collect::<Option<Vec<_>>>()
        {
            Some(found) if found.len() == count => positions = found,
            _ => return Ok(None),
        }
    }
    Ok(Some([0, 1].map(|axis| {
        positions.iter().map(|position| position[axis]).collect()
    })))
}

/// Returns the reason why a variable on cells is not a field, if it is on cells without positions.
pub(super) fn unplaced(container: &dyn Container, variable: &Variable) -> Option<String> {
    let shape = format!("dims {:?} of {:?}", variable.dims, variable.shape);
    let is_unstructured = ["CDI_grid_type", "grid_type"]
        .iter()
        .any(|attribute| variable.text(attribute) == Some("unstructured"));
    if is_unstructured || variable.text("mesh").is_some() {
        return Some(format!(
            "{shape} with cells without positions; put those of the file of the grid, such as clat and clon, along \
             the dim of the cells"
        ));
    }
    let mut dims = variable.dims.iter();
    let is_named = dims.any(|dim| HEALPIX_DIMS.contains(&dim.as_str()));
    if variable.text("grid_mapping").is_none() && !is_named {
        return None;
    }
    let mapping = healpix(container, variable)?;
    Some(format!(
        "{shape}, none with the 12 · n² cells of the grid mapping {}, where n is healpix_nside or two to the power of \
         refinement_level; for a part of the sphere, put the latitudes and longitudes lat and lon along the dim of \
         the cells",
        mapping.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::cf::variable::Attribute;

    fn coordinate(name: &str, units: &str) -> Variable {
        Variable {
            name: name.into(),
            dims: vec!["cell".into()],
            shape: vec![3],
            kind: Kind::Double,
            dtype: "float64".into(),
            width: 8,
            attributes: vec![("units".into(), Attribute::Text(units.into()))],
            chunk: None,
        }
    }

    #[test]
    fn positions_are_in_radians_by_units_then_by_name() {
        for (name, units, expected) in [
            ("clat", "radian", true),
            ("latCell", "", true),
            ("lat", "rad", true),
            ("clat", "degrees", false),
            ("lat", "", false),
        ] {
            let found = coordinate(name, units);
            assert_eq!(place_of(&found), Some(Axis::Latitude), "{name} {units}");
            assert_eq!(is_in_radians(&found), expected, "{name} {units}");
        }
        assert_eq!(place_of(&coordinate("clat", "m")), None);
        assert_eq!(place_of(&coordinate("radius", "")), None);
    }
}
