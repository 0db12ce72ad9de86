//! Boundary conditions of grids.

use halocline_core::Boundary;

use super::degrees::TOLERANCE;
use crate::Grid;

impl Grid {
    /// Returns the boundary conditions of stencils along latitude and longitude: across the poles,
    /// which are the outermost rows or about half a row beyond them (as on Gaussian grids), and
    /// periodic around the globe. Where a grid does not reach a pole or around the globe, or has no
    /// opposite meridians, the last cell is repeated. So it is on grids without
    /// [rows along latitudes](Self::has_rows), except that a [curvilinear](Self::curvilinear) grid
    /// is periodic along its rows if the last cell of each lies beside the first, as on global grids
    /// of ocean models.
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
            let lon = match self.columns_repeated() {
                Some(0) => Boundary::Periodic,
                _ => Boundary::Replicate,
            };
            return [Boundary::Replicate, lon];
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A globe of columns that follow meridians in lines that bend, from a column on, of which
    /// `count` exist.
    fn globe(first: usize, count: usize, land: &[usize]) -> Grid {
        let cells = (0..3 * count).map(|cell| {
            let (row, column) = (cell / count, (first + cell % count) % 12);
            let (row, column) = (row as f64, column as f64);
            (
                40.0 + 10.0 * row + (column * 0.3).sin(),
                30.0 * column + 2.0 * row,
            )
        });
        let (mut lat, lon): (Vec<f64>, Vec<f64>) = cells.unzip();
        land.iter().for_each(|cell| lat[*cell] = f64::NAN);
        Grid::curvilinear([3, count], lat, lon).unwrap()
    }

    #[test]
    fn curvilinear_grids_around_the_globe_are_periodic_unless_columns_are_repeated() {
        let periodic = [Boundary::Replicate, Boundary::Periodic];
        assert_eq!(globe(0, 12, &[]).boundary(), periodic);
        // Land at one end of a row, and at both ends of all.
        assert_eq!(globe(5, 12, &[12, 5]).boundary(), periodic);
        let coasts = globe(5, 12, &[0, 12, 23, 24]);
        assert_eq!(coasts.columns_repeated(), None);
        // A last row on the fold of a tripolar grid, whose second and last cells are one.
        let [mut lat, mut lon] = globe(0, 12, &[]).cells().unwrap().map(<[f64]>::to_vec);
        (lat[35], lon[35]) = (lat[25], lon[25]);
        let folded = Grid::curvilinear([3, 12], lat, lon).unwrap();
        assert_eq!(folded.boundary(), periodic);
        for (count, repeated) in [(11, None), (7, None), (13, Some(1)), (14, Some(2))] {
            let grid = globe(3, count, &[]);
            assert_eq!(grid.columns_repeated(), repeated, "{count} columns");
            assert_eq!(grid.boundary(), [Boundary::Replicate; 2]);
        }
    }
}
