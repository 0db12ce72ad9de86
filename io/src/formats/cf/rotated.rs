//! Grids of a rotated pole (CF 1.11, appendix F): latitudes and longitudes of the cells from those of
//! rows and columns on the rotated sphere, in files that lack the former.

use super::coordinates::{Coordinates, MAX_VALUES};
use super::variable::{Kind, Variable};
use crate::{Error, Grid, Result};

/// Standard names and common names of the coordinates of rows and of columns.
const LINES: [[&str; 2]; 2] = [["grid_latitude", "rlat"], ["grid_longitude", "rlon"]];

/// Rows and columns of a variable on a rotated sphere.
pub(super) struct Rotated<'a> {
    /// Coordinates of rows and of columns, in degrees.
    pub(super) lines: [&'a Variable; 2],
    pole: Pole,
}

/// North pole of a rotated sphere, in degrees.
#[derive(Clone, Copy, Debug)]
struct Pole {
    lat: f64,
    lon: f64,
    /// Longitude of the true north pole on the rotated sphere.
    origin: f64,
}

impl<'a> Coordinates<'a> {
    /// Finds the rows and columns of a variable whose grid mapping is a rotated pole.
    pub(super) fn rotated(&self, variable: &Variable) -> Option<Rotated<'a>> {
        let mapping = self.grid_mapping(variable)?;
        if mapping.text("grid_mapping_name") != Some("rotated_latitude_longitude") {
            return None;
        }
        let pole = Pole {
            lat: mapping.number("grid_north_pole_latitude")?,
            lon: mapping.number("grid_north_pole_longitude")?,
            origin: mapping.number("north_pole_grid_longitude").unwrap_or(0.0),
        };
        let line = |names: [&str; 2]| {
            let mut variables = self.container.variables().iter();
            variables.find(|line| {
                let [standard, common] = names;
                let is_named = match line.text("standard_name") {
                    Some(name) => name == standard,
                    None => [standard, common].contains(&line.name.as_str()),
                };
                let [dim] = &line.dims[..] else {
                    return false;
                };
                is_named && line.kind != Kind::Other && variable.dims.contains(dim)
            })
        };
        let [rows, columns] = LINES.map(line);
        Some(Rotated {
            lines: [rows?, columns?],
            pole,
        })
    }

    /// Creates the grid of rows and columns on a rotated sphere: a regular one if the poles are the
    /// true ones, else a curvilinear one.
    ///
    /// # Errors
    /// Coordinates that cannot be read, too many cells, and errors of the grid.
    pub(super) fn rotated_grid(&self, rotated: &Rotated<'_>) -> Result<Grid> {
        let [rows, columns] = rotated.lines.map(|line| self.values(line));
        let (rows, columns) = (rows?, columns?);
        let shape = [rows.len(), columns.len()];
        if shape[0].saturating_mul(shape[1]) > MAX_VALUES {
            let expected = format!("at most {MAX_VALUES} cells");
            let (path, name) = (self.container.path(), &rotated.lines[1].name);
            return Err(Error::shape(path, name, format!("{shape:?}"), expected));
        }
        let Pole { lat, lon, origin } = rotated.pole;
        if lat == 90.0 {
            let lon = columns.iter().map(|column| column - origin + lon + 180.0);
            return Grid::new(rows, lon.collect());
        }
        let cells = rows.iter().flat_map(|row| {
            let columns = columns.iter();
            columns.map(|column| rotated.pole.position(*row, *column))
        });
        let (lat, lon) = cells.map(|[lat, lon]| (lat, lon)).unzip();
        Grid::curvilinear(shape, lat, lon)
    }
}

impl Pole {
    /// Latitude and longitude of a position on the rotated sphere, all in degrees.
    fn position(self, lat: f64, lon: f64) -> [f64; 2] {
        let (sin_pole, cos_pole) = self.lat.to_radians().sin_cos();
        let (sin_lat, cos_lat) = lat.to_radians().sin_cos();
        let (sin_lon, cos_lon) = (lon - self.origin).to_radians().sin_cos();
        let up = cos_pole * cos_lat * cos_lon + sin_pole * sin_lat;
        let north = cos_pole * sin_lat - sin_pole * cos_lat * cos_lon;
        let east = (-cos_lat * sin_lon).atan2(north).to_degrees();
        [up.clamp(-1.0, 1.0).asin().to_degrees(), self.lon + east]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::degrees::meridian;

    #[test]
    fn positions_are_those_of_cordex() {
        let pole = Pole {
            lat: 39.25,
            lon: -162.0,
            origin: 0.0,
        };
        // Corners of EUR-11 and its centre (CORDEX domain description, table of EUR-11).
        for (rotated, expected) in [
            ([0.0, 0.0], [50.75, 18.0]),
            ([21.835, -28.375], [60.21, 315.86]),
            ([21.835, 18.155], [66.65, 64.40]),
            ([-23.375, -28.375], [22.20, 350.01]),
            ([-23.375, 18.155], [25.36, 36.30]),
        ] {
            let [lat, lon] = pole.position(rotated[0], rotated[1]);
            let off = [lat - expected[0], meridian(lon) - expected[1]];
            assert!(
                off.iter().all(|off| off.abs() < 0.3),
                "{rotated:?}: {lat} {lon}"
            );
        }
    }

    #[test]
    fn the_true_pole_lies_where_the_mapping_says() {
        let pole = Pole {
            lat: 35.0,
            lon: 20.0,
            origin: 40.0,
        };
        let [lat, _] = pole.position(35.0, 40.0);
        assert!((lat - 90.0).abs() < 1e-5, "{lat}");
        let [lat, lon] = pole.position(90.0, 0.0);
        assert!(
            (lat - 35.0).abs() < 1e-9 && (lon - 20.0).abs() < 1e-9,
            "{lat} {lon}"
        );
    }
}
