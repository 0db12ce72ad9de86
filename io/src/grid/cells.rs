//! Positions of cells that are not those of rows and columns.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use super::degrees::{TOLERANCE, is_equal, meridian};
use super::healpix::Sphere;
use crate::{Error, Result};

/// Returns latitudes that stand for rows of cells with positions of their own; zero for one row.
pub(crate) fn rows(count: usize) -> Vec<f64> {
    (0..count).map(|row| row as f64 / count as f64).collect()
}

/// Returns longitudes that stand for the columns of a row of cells; they are not positions.
pub(crate) fn columns(cells: usize) -> Vec<f64> {
    let columns = (0..cells).map(|cell| 360.0 * cell as f64 / cells as f64);
    columns.collect()
}

/// Latitudes and longitudes.
type Pair = [Vec<f64>; 2];

/// Positions that were made last, while a grid has them.
static LAST: Mutex<Weak<Pair>> = Mutex::new(Weak::new());

/// Latitude and longitude of each cell of an unstructured or curvilinear grid, in degrees. Grids with
/// the same positions, such as those of many files, share their memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Positions", into = "Positions")]
pub(crate) struct Cells(Arc<Pair>);

/// Serialized form of [`Cells`].
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Positions {
    /// Description of a whole sphere, of which a list can have hundreds of megabytes.
    Sphere(Sphere),
    Listed(Pair),
}

impl TryFrom<Positions> for Cells {
    type Error = Error;

    fn try_from(positions: Positions) -> Result<Self> {
        let [lat, lon] = match positions {
            Positions::Sphere(sphere) => sphere.positions()?,
            Positions::Listed(positions) => positions,
        };
        Self::new(lat, lon)
    }
}

impl From<Cells> for Positions {
    fn from(cells: Cells) -> Self {
        // The description is written only for the very positions that are read from it.
        let has_cells = |sphere: &Sphere| {
            let positions = sphere.positions();
            let found = positions.and_then(|[lat, lon]| Cells::new(lat, lon));
            found.is_ok_and(|found| found == cells)
        };
        match Sphere::of_cells(cells.len()).into_iter().find(has_cells) {
            Some(sphere) => Self::Sphere(sphere),
            None => Self::Listed(Arc::unwrap_or_clone(cells.0)),
        }
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
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Self(shared([lat, lon], &mut last)))
    }

    /// Returns the number of cells.
    pub(crate) fn len(&self) -> usize {
        self.0[0].len()
    }

    /// Returns latitudes and longitudes.
    pub(crate) fn positions(&self) -> [&[f64]; 2] {
        self.0.each_ref().map(Vec::as_slice)
    }

    /// Returns the first cell that counts whose position differs from that among `others`, up to
    /// rounding to single precision.
    pub(crate) fn difference(
        &self,
        others: &Self,
        counts: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        if Arc::ptr_eq(&self.0, &others.0) {
            return None;
        }
        let ([lat, lon], [other_lat, other_lon]) = (self.positions(), others.positions());
        let is_same = |cell: usize| {
            // All longitudes of a pole are the same position.
            let is_pole = lat[cell].abs() > 90.0 - TOLERANCE;
            let is_meridian = is_pole || is_equal(lon[cell], other_lon[cell]);
            is_meridian && is_equal(lat[cell], other_lat[cell])
        };
        (0..self.len().min(others.len())).find(|cell| counts(*cell) && !is_same(*cell))
    }
}

/// Returns positions in the memory of the last ones, if these are the same.
fn shared(positions: Pair, last: &mut Weak<Pair>) -> Arc<Pair> {
    if let Some(same) = last.upgrade().filter(|last| **last == positions) {
        return same;
    }
    let new = Arc::new(positions);
    *last = Arc::downgrade(&new);
    new
}

#[cfg(test)]
mod tests {
    use halocline_core::sphere::HealpixOrder;

    use super::*;
    use crate::grid::healpix::positions_in;

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
    fn positions_of_many_files_are_kept_once() {
        let positions = |lon: f64| [vec![10.0], vec![lon]];
        let mut last = Weak::new();
        let [first, second, other] =
            [20.0, 20.0, 30.0].map(|lon| shared(positions(lon), &mut last));
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!((&*first, &*other), (&positions(20.0), &positions(30.0)));
    }

    #[test]
    fn latitudes_are_rounded_to_the_poles() {
        let cells = Cells::new(vec![90.000_05, -90.000_05], vec![0.0, 0.0]).unwrap();
        assert_eq!(cells.positions()[0], [90.0, -90.0]);
    }

    #[test]
    fn a_whole_healpix_sphere_is_written_as_its_order() {
        for (order, size) in [(HealpixOrder::Ring, 3), (HealpixOrder::Nested, 4)] {
            let positions = positions_in(size, order).unwrap();
            let [lat, lon] = [0, 1].map(|axis: usize| {
                let values = positions.iter().map(|position| position[axis]);
                values.collect::<Vec<f64>>()
            });
            let sphere = Cells::new(lat.clone(), lon.clone()).unwrap();
            let text = serde_json::to_string(&sphere).unwrap();
            assert!(text.len() < 60, "{text}");
            assert_eq!(serde_json::from_str::<Cells>(&text).unwrap(), sphere);
            // Lists, such as those of earlier versions, are read too.
            let listed = serde_json::to_string(&[&lat, &lon]).unwrap();
            assert_eq!(serde_json::from_str::<Cells>(&listed).unwrap(), sphere);
        }
        let other = Cells::new(vec![10.0; 12], vec![0.0; 12]).unwrap();
        let text = serde_json::to_string(&other).unwrap();
        assert_eq!(serde_json::from_str::<Cells>(&text).unwrap(), other);
        for (size, scheme) in [(0, "ring"), (3, "nested"), (1_u64 << 40, "ring")] {
            let text = format!(r#"{{"healpix_nside":{size},"indexing_scheme":"{scheme}"}}"#);
            let error = serde_json::from_str::<Cells>(&text).unwrap_err();
            assert!(error.to_string().contains("faces of"), "{error}");
        }
    }

    #[test]
    fn longitudes_of_a_pole_are_one_position() {
        let cells = |lon: f64| Cells::new(vec![-90.0, 10.0], vec![lon, 0.0]).unwrap();
        assert_eq!(cells(20.0).difference(&cells(70.0), |_| true), None);
    }
}
