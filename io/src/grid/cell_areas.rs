//! Areas of cells with positions of their own.

use crate::{Error, Grid, Result};

/// Largest difference of the shares of a cell in two files, relative to the larger one.
const TOLERANCE: f64 = 1e-4;

impl Grid {
    /// Sets the area of each [cell](Self::cells), in any unit. A cell of area zero does not count.
    ///
    /// # Errors
    /// A grid without positions of cells; another number of areas than of cells; an area that is
    /// negative or not finite; areas that are all zero.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// let grid = Grid::unstructured(vec![60.0, 0.0], vec![10.0, 20.0])?;
    /// assert_eq!(grid.cell_weights(), None);
    /// let grid = grid.with_cell_areas(vec![1.0e9, 3.0e9])?; // m²
    /// assert_eq!(grid.cell_weights(), Some(vec![0.5, 1.5]));
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn with_cell_areas(mut self, areas: Vec<f64>) -> Result<Self> {
        let count = self.cells().map_or(0, |[lat, _]| lat.len());
        if areas.len() != count || count == 0 {
            let got = format!("{} areas", areas.len());
            let expected = format!("one for each of the {count} cells with positions");
            return Err(Error::argument("cell areas", got, expected));
        }
        let is_area = |area: &f64| area.is_finite() && *area >= 0.0;
        if let Some(cell) = areas.iter().position(|area| !is_area(area)) {
            let got = format!("{} of cell {cell}", areas[cell]);
            let expected = "finite areas of zero or more";
            return Err(Error::argument("cell areas", got, expected));
        }
        if areas.iter().all(|area| *area == 0.0) {
            return Err(Error::argument(
                "cell areas",
                "0 of all cells",
                "an area above 0",
            ));
        }
        self.areas = Some(areas);
        self.description.area_units = None;
        Ok(self)
    }

    /// Removes the areas of the cells, so that all cells count equally or, on a
    /// [curvilinear](Self::curvilinear) grid, by areas computed from their positions.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// let grid = Grid::unstructured(vec![60.0, 0.0], vec![10.0, 20.0])?;
    /// let with_areas = grid.clone().with_cell_areas(vec![1.0e9, 3.0e9])?;
    /// assert_eq!(with_areas.without_cell_areas(), grid);
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    #[must_use]
    pub fn without_cell_areas(mut self) -> Self {
        self.areas = None;
        self.description.area_units = None;
        self
    }

    /// Returns the area of each [cell](Self::cells), divided by the mean over the cells, or `None`
    /// if areas are not known. Unknown areas of a [curvilinear](Self::curvilinear) grid are computed
    /// from the positions: the corners of a cell are the midpoints between four neighbours.
    ///
    /// See [`with_cell_areas`](Self::with_cell_areas) for an example.
    pub fn cell_weights(&self) -> Option<Vec<f64>> {
        let areas = match &self.areas {
            Some(areas) => areas,
            None => &self.computed_areas()?,
        };
        let mean = areas.iter().sum::<f64>() / areas.len() as f64;
        Some(areas.iter().map(|area| area / mean).collect())
    }

    /// Whether a cell has an area that is not zero, or areas are not known.
    pub(super) fn counts(&self, cell: usize) -> bool {
        self.areas.as_ref().is_none_or(|areas| areas[cell] > 0.0)
    }

    /// Returns the first cell whose share of the area differs from that in another grid, with both
    /// shares in units of the mean, if both grids have areas that are not computed. Cells of area
    /// zero in either, such as land without a position in one of two files, are left out.
    pub(crate) fn other_area(&self, other: &Self) -> Option<(usize, [f64; 2])> {
        let (areas, others) = self.areas.as_ref().zip(other.areas.as_ref())?;
        let count = areas.len().min(others.len());
        let common: Vec<usize> = (0..count)
            .filter(|cell| self.counts(*cell) && other.counts(*cell))
            .collect();
        let mean = |areas: &[f64]| {
            let sum = common.iter().map(|cell| areas[*cell]).sum::<f64>();
            sum / common.len() as f64
        };
        let means = [mean(areas), mean(others)];
        let shares = |cell: usize| [areas[cell] / means[0], others[cell] / means[1]];
        let is_other = |[one, other]: [f64; 2]| (one - other).abs() > TOLERANCE * one.max(other);
        let mut shares = common.iter().map(|cell| (*cell, shares(*cell)));
        shares.find(|(_, shares)| is_other(*shares))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(areas: &[f64]) -> Result<Grid> {
        let cells = Grid::unstructured(vec![60.0, 0.0, -30.0], vec![0.0, 10.0, 20.0])?;
        cells.with_cell_areas(areas.into())
    }

    #[test]
    fn areas_are_kept_and_compared_in_units_of_the_mean() {
        let first = grid(&[1.0, 2.0, 3.0]).unwrap();
        let text = serde_json::to_string(&first).unwrap();
        assert_eq!(serde_json::from_str::<Grid>(&text).unwrap(), first);
        assert!(first.agrees_with(&grid(&[10.0, 20.0, 30.000_1]).unwrap()));
        let other = grid(&[2.0, 1.0, 3.0]).unwrap();
        assert!(!first.agrees_with(&other));
        assert_eq!(first.other_area(&other), Some((0, [0.5, 1.0])));
        // Files without areas are of any grid with the same positions.
        let unknown = Grid::unstructured(vec![60.0, 0.0, -30.0], vec![0.0, 10.0, 20.0]);
        assert!(first.agrees_with(&unknown.unwrap()));
    }

    #[test]
    fn numbers_that_are_no_areas_are_refused() {
        for (areas, told) in [
            (
                &[1.0, 2.0][..],
                "got 2 areas, expected one for each of the 3",
            ),
            (&[1.0, f64::NAN, 1.0], "got NaN of cell 1"),
            (&[1.0, 1.0, -2.0], "got -2 of cell 2"),
            (&[0.0; 3], "got 0 of all cells"),
        ] {
            let error = grid(areas).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let rows = Grid::cell_centered(2, 4).unwrap();
        assert!(rows.with_cell_areas(vec![1.0; 8]).is_err());
    }
}
