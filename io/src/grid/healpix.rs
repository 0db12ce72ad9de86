//! Whole HEALPix spheres, whose positions follow from the order of their cells.

use halocline_core::sphere::{HealpixOrder, healpix_centers, healpix_numbers};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Largest number of cells that a description can ask for, whatever a damaged file holds.
const MOST_CELLS: usize = 1 << 24;

/// Description of a whole HEALPix sphere.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sphere {
    /// Cells of a face in one dim.
    healpix_nside: usize,
    indexing_scheme: Scheme,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Scheme {
    Ring,
    Nested,
}

impl Sphere {
    /// Returns the spheres of this number of cells, in either order.
    pub(crate) fn of_cells(cells: usize) -> Vec<Self> {
        let size = (cells / 12).isqrt();
        let schemes = [Scheme::Ring, Scheme::Nested].map(|indexing_scheme| Self {
            healpix_nside: size,
            indexing_scheme,
        });
        let is_whole = cells > 0 && 12 * size * size == cells;
        schemes.into_iter().filter(|_| is_whole).collect()
    }

    /// Computes the latitudes and the longitudes of the cells, in degrees.
    ///
    /// # Errors
    /// A size of zero; too many cells; nested order with a size that is not a power of two.
    pub(crate) fn positions(self) -> Result<[Vec<f64>; 2]> {
        let Self {
            healpix_nside: size,
            indexing_scheme,
        } = self;
        let order = match indexing_scheme {
            Scheme::Ring => HealpixOrder::Ring,
            Scheme::Nested => HealpixOrder::Nested,
        };
        let is_small = size.saturating_mul(size).saturating_mul(12) <= MOST_CELLS;
        let positions = is_small.then(|| positions_in(size, order).ok()).flatten();
        let positions = positions.ok_or_else(|| {
            let got = format!("faces of {size} x {size} cells in order {order:?}");
            let expected = format!(
                "at most {MOST_CELLS} cells, on faces of one or more, in nested order a power of two"
            );
            Error::argument("cells", got, expected)
        })?;
        Ok([0, 1].map(|axis: usize| positions.iter().map(|position| position[axis]).collect()))
    }
}

/// Computes the latitude and longitude of each cell of a HEALPix sphere in an order, in degrees.
///
/// # Errors
/// The errors of [`healpix_numbers`].
pub(crate) fn positions_in(
    size: usize,
    order: HealpixOrder,
) -> halocline_core::Result<Vec<[f64; 2]>> {
    let numbers = healpix_numbers(size, order)?;
    let mut positions = vec![[0.0; 2]; numbers.len()];
    for (number, position) in numbers.into_iter().zip(healpix_centers(size)) {
        positions[number] = position;
    }
    Ok(positions)
}
