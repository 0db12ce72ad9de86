//! Order of the rows and columns of a grid in a file, relative to that of another grid.

use std::ops::Range;

use super::degrees::{apart, is_equal};
use crate::Grid;

/// Order of stored rows and columns relative to a wanted grid with the same coordinates: latitudes
/// may run in the other direction, and columns may start at another meridian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridOrder {
    shape: [usize; 2],
    /// Whether rows are reversed.
    pub(crate) flips: bool,
    /// Stored column of the first wanted column.
    first: usize,
}

impl GridOrder {
    /// Finds the order of a stored grid relative to a wanted one.
    ///
    /// # Errors
    /// Grids that differ in more than the order: the first coordinate that differs.
    pub(crate) fn of(stored: &Grid, wanted: &Grid) -> Result<Self, String> {
        if stored.is_curvilinear() != wanted.is_curvilinear() {
            return Err(format!("{}, not {}", stored.kind(), wanted.kind()));
        }
        let rises = |grid: &Grid| grid.lat().first() < grid.lat().last();
        let start = wanted.lon()[0];
        let distance = |column: &usize| apart(stored.lon()[*column], start);
        let [_, columns] = stored.shape();
        let nearest = (0..columns).min_by(|one, other| distance(one).total_cmp(&distance(other)));
        let order = Self {
            shape: stored.shape(),
            flips: rises(stored) != rises(wanted),
            first: nearest.unwrap_or(0),
        };
        let is_row = !stored.has_rows() && !wanted.has_rows();
        let is_curvilinear = wanted.is_curvilinear();
        let axes = [
            ("latitude", stored.lat(), wanted.lat()),
            ("longitude", stored.lon(), wanted.lon()),
        ];
        for (dim, (name, stored, wanted)) in axes.into_iter().enumerate() {
            if stored.len() != wanted.len() {
                let (found, expected) = (stored.len(), wanted.len());
                let name = if is_curvilinear {
                    ["row", "column"][dim]
                } else if is_row {
                    "cell"
                } else {
                    name
                };
                return Err(format!("{found} {name}s, not {expected}"));
            }
            for (index, wanted) in wanted.iter().enumerate() {
                let place = order.stored(dim, index);
                if !is_equal(stored[place], *wanted) {
                    return Err(format!(
                        "{name}[{place}] is {}, not {wanted}",
                        stored[place]
                    ));
                }
            }
        }
        if let Some(cell) = stored.other_cell(wanted)
            && let Some(cells) = stored.cells().zip(wanted.cells())
        {
            let place = |[lat, lon]: [&[f64]; 2]| {
                format!("latitude {}, longitude {}", lat[cell], lon[cell])
            };
            let (found, expected) = (place(cells.0), place(cells.1));
            return Err(format!("cell {cell} is at {found}, not {expected}"));
        }
        if let Some((cell, [found, expected])) = stored.other_area(wanted) {
            return Err(format!(
                "cell {cell} has {found} times the mean area, not {expected} times"
            ));
        }
        Ok(order)
    }

    /// Whether the stored order is the wanted one.
    pub(crate) fn is_same(&self) -> bool {
        !self.flips && self.first == 0
    }

    /// Returns the stored index of a wanted row (dim 0) or column (dim 1).
    fn stored(&self, dim: usize, index: usize) -> usize {
        match dim {
            0 if self.flips => self.shape[0] - 1 - index,
            0 => index,
            _ => (index + self.first) % self.shape[1],
        }
    }

    /// Returns the stored rows of a range of wanted ones, which are reversed if the order flips.
    pub(crate) fn rows(&self, range: Range<usize>) -> Range<usize> {
        if self.flips {
            self.shape[0] - range.end..self.shape[0] - range.start
        } else {
            range
        }
    }

    /// Returns the stored columns of a range of wanted ones: at most two ranges, as the column
    /// after the last stored one is the first.
    pub(crate) fn columns(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let count = self.shape[1];
        let (start, end) = (range.start + self.first, range.end + self.first);
        let to_last = start.min(count)..end.min(count);
        let from_first = start.max(count) - count..end.max(count) - count;
        let ranges = [to_last, from_first].into_iter();
        ranges.filter(|range| !range.is_empty())
    }
}

/// Describes the difference of a grid from another one, with which it does not agree.
pub(crate) fn difference(grid: &Grid, other: &Grid) -> String {
    match GridOrder::of(grid, other) {
        Ok(_) => "the same in another order, see OpenConfig::with_grid".into(),
        Err(difference) => difference,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(lat: &[f64], lon: &[f64]) -> Grid {
        Grid::new(lat.to_vec(), lon.to_vec()).unwrap()
    }

    #[test]
    fn boxes_of_a_wanted_grid_are_at_most_two_stored_ones() {
        let wanted = grid(&[40.0, 10.0, -30.0], &[-180.0, -90.0, -20.0, 70.0, 100.0]);
        let stored = grid(&[-30.0, 10.0, 40.0], &[70.0, 100.0, 180.0, 270.0, 340.0]);
        let order = GridOrder::of(&stored, &wanted).unwrap();
        for (index, lat) in wanted.lat().iter().enumerate() {
            assert_eq!(stored.lat()[order.rows(index..index + 1)], [*lat]);
        }
        assert_eq!(order.rows(0..2), 1..3);
        for start in 0..5 {
            for end in start..=5 {
                let ranges: Vec<_> = order.columns(start..end).collect();
                let found: Vec<f64> = ranges
                    .iter()
                    .flat_map(|range| &stored.lon()[range.clone()])
                    .copied()
                    .collect();
                assert_eq!(found, wanted.lon()[start..end]);
                assert!(ranges.len() <= 2);
            }
        }
        assert!(GridOrder::of(&wanted, &wanted).unwrap().is_same());
        assert!(!order.is_same());
    }

    #[test]
    fn the_first_coordinate_that_differs_is_named() {
        let wanted = grid(&[40.0, 10.0, -30.0], &[0.0, 90.0, 180.0]);
        let told = |lat: &[f64], lon: &[f64]| GridOrder::of(&grid(lat, lon), &wanted).unwrap_err();
        let lon = [90.0, 180.0, 360.0];
        assert_eq!(told(&[-30.0, 10.0], &lon), "2 latitudes, not 3");
        let lat = [-30.0, 10.5, 40.0];
        assert_eq!(told(&lat, &lon), "latitude[1] is 10.5, not 10");
        let lat = [-30.0, 10.0, 40.0];
        let lon = [-91.0, 0.0, 90.0];
        assert_eq!(told(&lat, &lon), "longitude[0] is 269, not 180");
        let cells = |lon: [f64; 2]| Grid::unstructured(vec![10.0, 20.0], lon.into()).unwrap();
        let error = GridOrder::of(&cells([5.0, 30.0]), &cells([5.0, 40.0])).unwrap_err();
        let expected = "cell 1 is at latitude 20, longitude 30, not latitude 20, longitude 40";
        assert_eq!(error, expected);
        let more = Grid::unstructured(vec![0.0; 3], vec![5.0, 30.0, 40.0]).unwrap();
        let error = GridOrder::of(&cells([5.0, 30.0]), &more).unwrap_err();
        assert_eq!(error, "2 cells, not 3");
        // Differences from rounding to single precision are none.
        let lon = [90.000_01, 180.0, 359.999_99];
        assert!(GridOrder::of(&grid(&lat, &lon), &wanted).is_ok());
    }
}
