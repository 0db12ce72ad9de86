//! Positions of cells that form no rows and columns.

use serde::{Deserialize, Serialize};

use crate::degrees::{TOLERANCE, is_equal, meridian};
use crate::{Error, Result};

/// Returns longitudes that stand for the columns of a row of cells; they are not positions.
pub(crate) fn columns(cells: usize) -> Vec<f64> {
    let columns = (0..cells).map(|cell| 360.0 * cell as f64 / cells as f64);
    columns.collect()
}

/// Latitude and longitude of each cell of an unstructured grid, in degrees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "[Vec<f64>; 2]", into = "[Vec<f64>; 2]")]
pub(crate) struct Cells {
    lat: Vec<f64>,
    lon: Vec<f64>,
}

impl TryFrom<[Vec<f64>; 2]> for Cells {
    type Error = Error;

    fn try_from([lat, lon]: [Vec<f64>; 2]) -> Result<Self> {
        Self::new(lat, lon)
    }
}

impl From<Cells> for [Vec<f64>; 2] {
    fn from(cells: Cells) -> Self {
        [cells.lat, cells.lon]
    }
}

impl Cells {
    /// Maps each longitude to the same meridian in [0, 360), and latitudes that rounding put beyond
    /// a pole to the pole.
    ///
    /// # Errors
    /// No cell; numbers of latitudes and longitudes that differ; a latitude beyond ±90; a coordinate
    /// that is not finite.
    pub(crate) fn new(lat: Vec<f64>, lon: Vec<f64>) -> Result<Self> {
        let count = lat.len();
        if count == 0 || lon.len() != count {
            let got = format!("{count} latitudes and {} longitudes", lon.len());
            return Err(Error::argument("cells", got, "one of each for every cell"));
        }
        let is_valid = |cell: usize| lat[cell].abs() <= 90.0 + TOLERANCE && lon[cell].is_finite();
        if let Some(cell) = (0..count).find(|cell| !is_valid(*cell)) {
            let got = format!(
                "latitude {}, longitude {} of cell {cell}",
                lat[cell], lon[cell]
            );
            return Err(Error::argument(
                "cells",
                got,
                "finite degrees, of latitude from 90 to -90",
            ));
        }
        let lat = lat.into_iter().map(|lat| lat.clamp(-90.0, 90.0)).collect();
        let lon = lon.into_iter().map(meridian).collect();
        Ok(Self { lat, lon })
    }

    /// Returns the number of cells.
    pub(crate) fn len(&self) -> usize {
        self.lat.len()
    }

    /// Returns latitudes and longitudes.
    pub(crate) fn positions(&self) -> [&[f64]; 2] {
        [&self.lat, &self.lon]
    }

    /// Returns the first cell whose position differs from that among `others`, up to rounding to
    /// single precision.
    pub(crate) fn difference(&self, others: &Self) -> Option<usize> {
        let is_same = |cell: usize| {
            // All longitudes of a pole are the same position.
            let is_pole = self.lat[cell].abs() > 90.0 - TOLERANCE;
            let is_meridian = is_pole || is_equal(self.lon[cell], others.lon[cell]);
            is_meridian && is_equal(self.lat[cell], others.lat[cell])
        };
        (0..self.len().min(others.len())).find(|cell| !is_same(*cell))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_without_a_position_are_refused() {
        let message = |lat: &[f64], lon: &[f64]| {
            let cells = Cells::new(lat.to_vec(), lon.to_vec());
            cells.unwrap_err().to_string()
        };
        let error = message(&[1.0, 2.0], &[10.0, f64::NAN]);
        assert!(error.contains("longitude NaN of cell 1"), "{error}");
        let error = message(&[91.0], &[10.0]);
        assert!(error.contains("latitude 91"), "{error}");
        let error = message(&[1.0], &[]);
        assert!(error.contains("1 latitudes and 0 longitudes"), "{error}");
        message(&[], &[]);
    }

    #[test]
    fn latitudes_are_rounded_to_the_poles() {
        let cells = Cells::new(vec![90.000_05, -90.000_05], vec![0.0, 0.0]).unwrap();
        assert_eq!(cells.positions()[0], [90.0, -90.0]);
    }

    #[test]
    fn longitudes_of_a_pole_are_one_position() {
        let cells = |lon: f64| Cells::new(vec![-90.0, 10.0], vec![lon, 0.0]).unwrap();
        assert_eq!(cells(20.0).difference(&cells(70.0)), None);
    }
}
