//! Cells of HEALPix grids: their positions, and their numbers in files (K. Górski et al. 2005).
//!
//! Halocline orders cells by face: `(face · size + y) · size + x`, in the faces and axes of the
//! HEALPix library.

use std::f64::consts::{FRAC_PI_4, TAU};

use crate::{Error, Result};

/// Rows from the north pole, in faces, to the southern corner of each face.
const SOUTH: [usize; 12] = [2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4];
/// Longitude of the centre of each face, in eighths of a turn.
const MIDDLE: [isize; 12] = [1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7];

/// Order of the cells of a HEALPix grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealpixOrder {
    /// By rings of equal latitude from north to south, eastward within a ring.
    Ring,
    /// By face, then recursively by quarters of the face.
    Nested,
}

/// Latitude and longitude, in degrees, of the centre of each cell, in the order by faces; for
/// forcings, graphs and distances.
///
/// # Example
/// ```
/// use halocline_core::sphere::healpix_centers;
///
/// let centres = healpix_centers(1);
/// assert_eq!(centres[4], [0.0, 0.0]);
/// let [latitude, longitude] = centres[0];
/// assert!((latitude - (2.0_f64 / 3.0).asin().to_degrees()).abs() < 1e-12 && (longitude - 45.0).abs() < 1e-12);
/// ```
pub fn healpix_centers(size: usize) -> Vec<[f64; 2]> {
    let n = size as f64;
    let centre = |place: Place| {
        let ring = place.ring as f64;
        let distance = |row: f64| row * row / (3.0 * n * n);
        let sine = match place.zone(size) {
            Zone::North => 1.0 - distance(ring),
            Zone::Equator => (2.0 * n - ring) * 2.0 / (3.0 * n),
            Zone::South => distance(4.0 * n - ring) - 1.0,
        };
        let longitude = place.eighths as f64 / place.held(size) as f64 * FRAC_PI_4;
        [sine.asin(), longitude.rem_euclid(TAU)].map(f64::to_degrees)
    };
    places(size).map(centre).collect()
}

/// Position of a cell.
struct Place {
    /// Ring, counted from one at the north pole.
    ring: usize,
    /// Longitude, in units of an eighth of a turn divided by the number of the ring's cells per
    /// quarter turn.
    eighths: isize,
}

enum Zone {
    North,
    Equator,
    South,
}

impl Place {
    fn zone(&self, size: usize) -> Zone {
        match self.ring {
            ring if ring < size => Zone::North,
            ring if ring > 3 * size => Zone::South,
            _ => Zone::Equator,
        }
    }

    /// Number of cells of the ring per quarter turn.
    fn held(&self, size: usize) -> usize {
        match self.zone(size) {
            Zone::North => self.ring,
            Zone::Equator => size,
            Zone::South => 4 * size - self.ring,
        }
    }

    /// Number in ring order.
    fn number(&self, size: usize) -> usize {
        let held = self.held(size);
        let (before, odd) = match self.zone(size) {
            Zone::North => (2 * held * (held - 1), 1),
            Zone::Equator => {
                let rows = self.ring - size;
                (2 * size * (size - 1) + 4 * size * rows, 1 - rows % 2)
            }
            Zone::South => (12 * size * size - 2 * held * (held + 1), 1),
        };
        // The first cell of a ring is centred at half a cell or at zero.
        let column = (self.eighths - odd as isize) / 2;
        before + column.rem_euclid(4 * held as isize) as usize
    }
}

/// Positions of the cells, in the order by faces.
fn places(size: usize) -> impl Iterator<Item = Place> {
    let cells = (0..size).flat_map(move |y| (0..size).map(move |x| (x, y)));
    (0..12).flat_map(move |face| {
        cells.clone().map(move |(x, y)| {
            let mut place = Place {
                ring: SOUTH[face] * size - x - y - 1,
                eighths: 0,
            };
            place.eighths = MIDDLE[face] * place.held(size) as isize + x as isize - y as isize;
            place
        })
    })
}

/// Number of each cell in an order, for the cells in the order by faces.
///
/// # Errors
/// Fails for a size of zero and, for nested order, for a size that is not a power of two.
///
/// # Example
/// ```
/// use halocline_core::sphere::{HealpixOrder, healpix_numbers};
///
/// assert_eq!(healpix_numbers(2, HealpixOrder::Ring)?[..4], [13, 5, 4, 0]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn healpix_numbers(size: usize, order: HealpixOrder) -> Result<Vec<usize>> {
    let fits = match order {
        HealpixOrder::Ring => size > 0,
        HealpixOrder::Nested => size.is_power_of_two(),
    };
    if !fits {
        let message = format!(
            "faces of {size} × {size} cells; expected one cell or more, in nested order a power of two"
        );
        return Err(Error::operator("healpix", message));
    }
    Ok(match order {
        HealpixOrder::Ring => places(size).map(|place| place.number(size)).collect(),
        HealpixOrder::Nested => {
            // The bits of each row or column, at every second position.
            let spread = |place: usize| {
                let bits = 0..usize::BITS / 2;
                bits.map(|bit| (place >> bit & 1) << (2 * bit))
                    .sum::<usize>()
            };
            let spread: Vec<usize> = (0..size).map(spread).collect();
            let number = |cell: usize| {
                let (row, x) = (cell / size, cell % size);
                (row / size) * size * size + spread[x] + 2 * spread[row % size]
            };
            (0..12 * size * size).map(number).collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_one_number_in_each_order() {
        for (order, sizes) in [
            (HealpixOrder::Ring, &[1, 2, 3, 6][..]),
            (HealpixOrder::Nested, &[1, 2, 8]),
        ] {
            for &size in sizes {
                let mut numbers = healpix_numbers(size, order).unwrap();
                numbers.sort_unstable();
                assert!(
                    numbers.into_iter().eq(0..12 * size * size),
                    "{order:?} {size}"
                );
            }
        }
        assert!(
            healpix_numbers(3, HealpixOrder::Nested).is_err()
                && healpix_numbers(0, HealpixOrder::Ring).is_err()
        );
        // From healpy.nest2ring(2, …).
        let rings = healpix_numbers(2, HealpixOrder::Ring).unwrap();
        assert_eq!(
            (&rings[..4], &rings[16..20]),
            (&[13, 5, 4, 0][..], &[28, 20, 27, 12][..])
        );
    }
}
