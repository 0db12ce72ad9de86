//! Cells of curvilinear grids: rows and columns with latitudes and longitudes in two dims, such as
//! `XLAT` and `XLONG` of WRF, `nav_lat` and `nav_lon` of NEMO, and `geolat` and `geolon` of MOM6.

use super::axis::{Axis, axis_of, is_time};
use super::coordinates::Coordinates;
use super::planes::lines;
use super::unstructured::{area_name, is_area};
use super::variable::{Kind, Variable};
use crate::grid::degrees::TOLERANCE;
use crate::{Error, Result};

/// Tolerance for equal coordinates, in degrees.
const NOMINAL: f64 = 0.01;

/// Whether the long name of a 1-D coordinate says that its values are not the positions of the
/// cells.
fn is_nominal(coordinate: &Variable) -> bool {
    coordinate.text("long_name").is_some_and(|name| {
        let name = name.to_lowercase();
        ["nominal", "fake"].iter().any(|word| name.contains(word))
    })
}

impl<'a> Coordinates<'a> {
    /// Finds the latitudes and longitudes of the cells of a variable on a curvilinear grid: those
    /// that its attribute `coordinates` names, else the first. There are none if rows and columns
    /// have latitudes and longitudes, from which those of the cells do not differ.
    pub(super) fn plane_positions(&self, variable: &Variable) -> Option<[&'a Variable; 2]> {
        let listed = variable.text("coordinates").unwrap_or_default();
        let is_listed = |plane: &Variable| listed.split_whitespace().any(|name| name == plane.name);
        let planes = |wanted: Axis| -> Vec<&'a Variable> {
            let planes = self.planes.iter().filter(|(_, axis)| *axis == wanted);
            let planes = planes.map(|(plane, _)| *plane);
            planes.filter(|plane| self.holds(variable, plane)).collect()
        };
        let latitudes = planes(Axis::Latitude).into_iter();
        let lat = latitudes.min_by_key(|plane| !is_listed(plane))?;
        let longitudes = planes(Axis::Longitude).into_iter();
        let beside = longitudes.filter(|plane| lines(plane) == lines(lat));
        let lon = beside.min_by_key(|plane| !is_listed(plane))?;
        let (dims, _) = lines(lat);
        let along = |wanted: Axis| {
            let is_wanted = |dim: &&str| self.find(dim).and_then(axis_of) == Some(wanted);
            dims.into_iter().find(is_wanted)
        };
        let is_regular = match (along(Axis::Latitude), along(Axis::Longitude)) {
            (Some(row), Some(column)) => self.curved(row, column).is_none(),
            _ => false,
        };
        (!is_regular).then_some([lat, lon])
    }

    /// Finds the areas of the cells of a variable whose latitudes are these: those that its
    /// attribute `cell_measures` names (CF 1.11, section 7.2), else those with a common name.
    pub(super) fn plane_areas(&self, variable: &Variable, lat: &Variable) -> Option<&'a Variable> {
        let variables = self.container.variables();
        let is_plane = |areas: &&Variable| {
            areas.kind != Kind::Other
                && areas.dims.len() > 1
                && lines(areas) == lines(lat)
                && self.holds(variable, areas)
        };
        let name = area_name(variable);
        let mut planes = variables.iter().filter(is_plane);
        let named = planes.find(|areas| name == Some(areas.name.as_str()));
        let mut planes = variables.iter().filter(is_plane);
        named.or_else(|| planes.find(|areas| is_area(areas)))
    }

    /// Whether a variable has the dims of rows and columns of a plane, whose other dims have length
    /// one or are the time. Positions along a time are those of a swath.
    fn holds(&self, variable: &Variable, plane: &Variable) -> bool {
        let (dims, extents) = lines(plane);
        let has = |(dim, extent): (&str, usize)| {
            let mut own = variable.dims.iter().zip(&variable.shape);
            own.any(|(other, size)| other == dim && *size == extent)
        };
        let is_time =
            |dim: &str| is_time(dim) || self.find(dim).and_then(axis_of) == Some(Axis::Time);
        let mut others = plane.dims.iter().zip(&plane.shape).rev().skip(2);
        dims[0] != dims[1]
            && dims.into_iter().zip(extents).all(has)
            && !plane.shape.contains(&0)
            && others.all(|(dim, extent)| *extent == 1 || is_time(dim.as_str()))
            && !dims.into_iter().any(|dim| self.is_track(dim))
    }

    /// Reads the values of a plane, at the first time if it has times.
    ///
    /// # Errors
    /// Values at the last time that differ from those at the first.
    pub(super) fn plane(&self, plane: &Variable) -> Result<Vec<f64>> {
        let others = plane.shape.len() - 2;
        let values = |is_last: bool| {
            let ranges = plane.shape.iter().enumerate().map(|(dim, &extent)| {
                if dim >= others {
                    0..extent
                } else if is_last {
                    extent - 1..extent
                } else {
                    0..1
                }
            });
            self.values_in(plane, ranges.collect())
        };
        let first = values(false)?;
        if plane.shape[..others].iter().any(|extent| *extent > 1) {
            let last = values(true)?;
            let mut pairs = first.iter().zip(&last);
            if pairs.any(|(one, other)| (one - other).abs() > TOLERANCE) {
                return Err(Error::shape(
                    self.container.path(),
                    &plane.name,
                    "values that differ between the first and the last time",
                    "those of a grid that does not move",
                ));
            }
        }
        Ok(first)
    }

    /// Returns the reason why the 1-D coordinates of rows and columns are not the positions of the
    /// cells, if there is one: 2-D coordinates in the container differ from them, as on a tripolar
    /// grid or a cubed sphere, or they are nominal and no 2-D coordinates confirm them.
    pub(super) fn curved(&self, row: &str, column: &str) -> Option<String> {
        let lines = [row, column];
        let key = lines.map(String::from);
        if let Some(found) = self.curved.borrow().get(&key) {
            return found.clone();
        }
        let mut found = None;
        let mut is_confirmed = false;
        // Not those in radians.
        let planes = self.planes.iter();
        for (variable, axis) in planes.filter(|(plane, axis)| axis_of(plane) == Some(*axis)) {
            let along = usize::from(*axis == Axis::Longitude);
            let places = lines.map(|dim| variable.dims.iter().position(|own| own == dim));
            let [Some(rows), Some(columns)] = places else {
                continue;
            };
            // Corners of the cells along the last dim.
            if rows.max(columns) + 1 < variable.dims.len() {
                continue;
            }
            let line = self.find(lines[along]);
            // Coordinates that cannot be read, or are too large, are not compared.
            let line = line.and_then(|line| self.values(line).ok());
            let (Some(line), Ok(all)) = (line, self.values(variable)) else {
                continue;
            };
            let place = [rows, columns][along];
            let stride: usize = variable.shape[place + 1..].iter().product();
            if line.len() != variable.shape[place] {
                continue;
            }
            let is_other = |(index, value): (usize, &f64)| {
                let difference = (value - line[index / stride % line.len()]).abs();
                let turn = if along == 1 {
                    difference % 360.0
                } else {
                    difference
                };
                turn.min(360.0 - turn) > NOMINAL
            };
            if all.iter().enumerate().any(is_other) {
                found = Some(format!(
                    "on a curvilinear grid, whose {} are {}, without both latitudes and longitudes of its cells in two \
                     dims; add them, interpolate it to latitudes and longitudes, or stack its cells along one dim",
                    ["latitudes", "longitudes"][along],
                    variable.name
                ));
                break;
            }
            is_confirmed |= all.iter().any(|value| !value.is_nan());
        }
        let mut coordinates = lines.iter().filter_map(|dim| self.find(dim));
        if found.is_none()
            && !is_confirmed
            && let Some(nominal) = coordinates.find(|coordinate| is_nominal(coordinate))
        {
            found = Some(format!(
                "on {}, which is a {:?} by its long_name; put the latitudes and longitudes of the cells, such as \
                 geolat and geolon, into the file (at most 16 Mi cells), or change long_name if the grid is regular",
                nominal.name,
                nominal.text("long_name").unwrap_or_default()
            ));
        }
        self.curved.borrow_mut().insert(key, found.clone());
        found
    }
}
