//! Latitude–longitude grid.

use std::f64::consts::{FRAC_PI_2, PI, TAU};

use halocline_core::{Error, Result};

/// Latitude–longitude grid with rows from north to south and cell centres half a cell away from the
/// poles.
///
/// The `rows` rows of cells are bounded by `rows + 1` rows of faces; the first and the last are the
/// poles, where faces have zero length. Longitude begins at 0 and is periodic.
///
/// # Example
/// ```
/// use halocline_models::shallow_water::Grid;
///
/// let grid = Grid::new(4, 8)?;
/// assert_eq!(grid.latitudes(), [67.5, 22.5, -22.5, -67.5]);
/// assert_eq!(grid.longitudes()[..3], [0.0, 45.0, 90.0]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    rows: usize,
    columns: usize,
}

impl Grid {
    /// Creates a grid of `rows` latitudes and `columns` longitudes.
    ///
    /// # Errors
    /// There are fewer than 2 rows or 4 columns, which resolve no wave.
    pub fn new(rows: usize, columns: usize) -> Result<Self> {
        if rows < 2 || columns < 4 {
            let message =
                format!("{rows} × {columns} cells; expected at least 2 rows and 4 columns");
            return Err(Error::operator("Grid::new", message));
        }
        Ok(Self { rows, columns })
    }

    /// Number of latitudes.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of longitudes.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the latitudes of the cell centres in degrees, from north to south.
    pub fn latitudes(&self) -> Vec<f64> {
        let row = |row| 90.0 - (row as f64 + 0.5) * 180.0 / self.rows as f64;
        (0..self.rows).map(row).collect()
    }

    /// Returns the longitudes of the cell centres in degrees, from 0.
    pub fn longitudes(&self) -> Vec<f64> {
        let column = |column| column as f64 * 360.0 / self.columns as f64;
        (0..self.columns).map(column).collect()
    }

    /// Height of a cell, in radians.
    pub(super) fn dlat(&self) -> f64 {
        PI / self.rows as f64
    }

    /// Width of a cell, in radians of longitude.
    pub(super) fn dlon(&self) -> f64 {
        TAU / self.columns as f64
    }

    /// Latitude of the centres of a row, in radians.
    pub(super) fn centre(&self, row: isize) -> f64 {
        FRAC_PI_2 - (row as f64 + 0.5) * self.dlat()
    }

    /// Latitude of the northern faces of a row, in radians.
    pub(super) fn face(&self, row: isize) -> f64 {
        FRAC_PI_2 - row as f64 * self.dlat()
    }

    /// Longitude of the centres of a column, in radians; fractions are faces, and any index is
    /// valid, as longitude is periodic.
    pub(super) fn longitude(&self, column: f64) -> f64 {
        column * self.dlon()
    }

    /// Cosine of the latitude at the centres of a row; zero for rows beyond the poles.
    pub(super) fn cos_centre(&self, row: isize) -> f64 {
        let inside = (0..self.rows as isize).contains(&row);
        if inside { self.centre(row).cos() } else { 0.0 }
    }

    /// Cosine of the latitude at the northern faces of a row, i.e. the length of a face relative to
    /// the equator. Zero at the poles and beyond.
    pub(super) fn cos_face(&self, row: isize) -> f64 {
        let inside = (1..self.rows as isize).contains(&row);
        if inside { self.face(row).cos() } else { 0.0 }
    }

    /// Area of a cell on the unit sphere; zero for rows beyond the poles.
    pub(super) fn cell_area(&self, row: isize) -> f64 {
        2.0 * self.dlon() * self.cos_centre(row) * (0.5 * self.dlat()).sin()
    }

    /// Area on the unit sphere between the four cell centres around a corner on the northern face
    /// of a row. Zero at the poles, where no corner has four cells around it.
    pub(super) fn corner_area(&self, row: isize) -> f64 {
        2.0 * self.dlon() * self.cos_face(row) * (0.5 * self.dlat()).sin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_cover_the_sphere() {
        let grid = Grid::new(7, 12).unwrap();
        let area: f64 = (-1..9).map(|row| 12.0 * grid.cell_area(row)).sum();
        assert!((area - 4.0 * PI).abs() < 1e-13, "{area}");
    }

    #[test]
    fn faces_have_no_length_at_the_poles() {
        let grid = Grid::new(5, 8).unwrap();
        assert_eq!(
            (grid.cos_face(0), grid.cos_face(5), grid.cos_face(6)),
            (0.0, 0.0, 0.0)
        );
        assert!((grid.cos_face(2) - grid.cos_face(3)).abs() < 1e-15);
    }

    #[test]
    fn a_grid_too_small_is_told() {
        let error = Grid::new(1, 8).unwrap_err().to_string();
        assert!(
            error.contains("1 × 8") && error.contains("at least 2 rows and 4"),
            "{error}"
        );
    }
}
