//! Boundary conditions of grids.

use halocline_core::Boundary;

use super::degrees::TOLERANCE;
use crate::Grid;

impl Grid {
    /// Returns the boundary conditions of stencils along latitude and longitude: across the poles,
    /// which are the outermost rows or about half a row beyond them (as on Gaussian grids), and
    /// periodic around the globe. Where a grid does not reach a pole or around the globe, or has no
    /// opposite meridians, the last cell is repeated. So it is on grids without
    /// [rows along latitudes](Self::has_rows).
    ///
    /// # Example
    /// ```
    /// use halocline_core::Boundary::*;
    /// use halocline_io::Grid;
    ///
    /// assert_eq!(Grid::with_poles(5, 8)?.boundary(), [PoleRow, Periodic]);
    /// assert_eq!(Grid::cell_centered(4, 8)?.boundary(), [PoleEdge, Periodic]);
    /// let region = Grid::new(vec![60.0, 50.0, 40.0], vec![0.0, 10.0])?;
    /// assert_eq!(region.boundary(), [Replicate, Replicate]);
    /// let cells = Grid::unstructured(vec![60.0, 0.0, 30.0], vec![0.0, 120.0, 240.0])?;
    /// assert_eq!(cells.boundary(), [Replicate, Replicate]);
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn boundary(&self) -> [Boundary; 2] {
        // Coordinates that are not positions may look like those of a globe.
        if !self.has_rows() {
            return [Boundary::Replicate; 2];
        }
        let columns = self.lon().len();
        let step = 360.0 / columns as f64;
        let even = |pair: &[f64]| ((pair[1] - pair[0]).rem_euclid(360.0) - step).abs() < TOLERANCE;
        let around = columns > 1 && self.lon().windows(2).all(even);
        // Distance from an outermost row to the pole, in rows.
        let beyond = |outer: f64, next: f64| (90.0 - outer.abs()) / (outer - next).abs();
        let lat = match (self.lat(), self.lat()) {
            ([first, second, ..], [.., before, last]) if around && columns.is_multiple_of(2) => {
                let ends = [beyond(*first, *second), beyond(*last, *before)];
                if ends.iter().all(|end| *end < 1e-3) {
                    Boundary::PoleRow
                } else if ends.iter().all(|end| (0.3..0.9).contains(end)) {
                    Boundary::PoleEdge
                } else {
                    Boundary::Replicate
                }
            }
            _ => Boundary::Replicate,
        };
        let lon = if around {
            Boundary::Periodic
        } else {
            Boundary::Replicate
        };
        [lat, lon]
    }
}
