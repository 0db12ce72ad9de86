//! Columns at the end of a grid around the globe that repeat its first ones.

use halocline_core::sphere::sphere_point;

use super::cells::{Cells, columns};
use super::degrees::{apart, meridian};
use crate::Grid;

/// Largest distance between a column and its repetition, in steps between columns.
const NEAR: f64 = 0.01;

/// Returns the number of longitudes at the end that are the first ones again, in either notation.
pub(crate) fn longitudes_repeated(lon: &[f64]) -> usize {
    let count = lon.len();
    let [first, second, _, ..] = lon else {
        return 0;
    };
    let near = NEAR * (second - first).rem_euclid(360.0);
    let is_same = |one: f64, other: f64| apart(meridian(one), meridian(other)) < near;
    let repeats = |repeated: &usize| {
        let mut pairs = lon[count - repeated..].iter().zip(lon);
        pairs.all(|(one, other)| is_same(*one, *other))
    };
    (1..=count / 2).rev().find(repeats).unwrap_or(0)
}

impl Grid {
    /// Returns the number of columns at the end of a curvilinear grid around the globe that repeat
    /// its first ones, such as the halo of NEMO's grids, or `None` of another grid: that of more than
    /// half of the rows whose cells at both ends have a position.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Grid;
    ///
    /// let lon: Vec<f64> = (0..7).map(|column| 72.0 * f64::from(column)).collect();
    /// let grid = Grid::curvilinear([2, 7], vec![50.0; 14], lon.repeat(2))?;
    /// assert_eq!(grid.columns_repeated(), Some(2));
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn columns_repeated(&self) -> Option<usize> {
        let [lat, lon] = self.cells().filter(|_| self.is_curvilinear())?;
        let [rows, columns] = self.shape();
        if columns < 4 {
            return None;
        }
        let apart = |one: usize, other: usize| {
            let [one, other] = [one, other].map(|cell| sphere_point([lat[cell], lon[cell]]));
            let squares = one
                .iter()
                .zip(other)
                .map(|(one, other)| (one - other).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let mut found = Vec::new();
        for first in (0..rows).map(|row| row * columns) {
            let last = first + columns - 1;
            let ends = [first, first + 1, last - 1, last];
            if !ends.into_iter().all(|cell| self.counts(cell)) {
                continue;
            }
            let step = apart(first, first + 1).max(apart(last - 1, last));
            found.push(match apart(last, first) {
                gap if gap > 1.5 * step || step == 0.0 => None,
                gap if gap < NEAR * step => Some(1),
                _ if apart(last, first + 1) < NEAR * step => Some(2),
                _ => Some(0),
            });
        }
        // A row on the fold of a tripolar grid meets itself, also at its ends.
        let is_most = |repeated: &Option<usize>| {
            let alike = found.iter().filter(|other| *other == repeated);
            2 * alike.count() > found.len()
        };
        found.iter().copied().find(is_most).flatten()
    }

    /// Leaves out the [repeated columns](Self::columns_repeated) of a curvilinear grid.
    pub(crate) fn without_repeats(mut self) -> Self {
        let (repeated, [_, width]) = (self.columns_repeated().unwrap_or(0), self.shape());
        if repeated == 0 {
            return self;
        }
        let kept = |values: &[f64]| -> Vec<f64> {
            let rows = values.chunks(width);
            rows.flat_map(|row| &row[..width - repeated])
                .copied()
                .collect()
        };
        let cells = self.cells().map(|positions| positions.map(kept));
        let cells = cells.map(|[lat, lon]| Cells::new(lat, lon).expect("checked before"));
        Self {
            lon: columns(width - repeated),
            cells,
            areas: self.areas.take().map(|areas| kept(&areas)),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longitudes_may_end_with_the_first_ones() {
        let lon = |count: u16, first: f64| -> Vec<f64> {
            (0..count)
                .map(|column| first + 45.0 * f64::from(column))
                .collect()
        };
        for (count, repeated) in [(7, 0), (8, 0), (9, 1), (10, 2)] {
            assert_eq!(longitudes_repeated(&lon(count, 0.0)), repeated, "{count}");
            assert_eq!(
                longitudes_repeated(&lon(count, -160.0)),
                repeated,
                "{count}"
            );
        }
        // Rounded to single precision, as in etopo20 of Ferret.
        let third: Vec<f64> = (0..=1080)
            .map(|column| 20.166_666_7 + f64::from(column) / 3.000_000_1)
            .collect();
        assert_eq!(longitudes_repeated(&third), 1);
        assert_eq!(longitudes_repeated(&[0.0, 120.0, 240.0]), 0);
        assert_eq!(longitudes_repeated(&[10.0]), 0);
        assert_eq!(longitudes_repeated(&[30.0, 20.0, 10.0, 0.0]), 0);
        assert_eq!(longitudes_repeated(&[f64::NAN; 4]), 0);
    }

    #[test]
    fn repeated_columns_are_left_out_with_their_areas() {
        let lon: Vec<f64> = (0..7).map(|column| 72.0 * f64::from(column)).collect();
        let grid = Grid::curvilinear([2, 7], vec![50.0; 14], lon.repeat(2)).unwrap();
        let areas = (1..=14).map(f64::from).collect();
        let grid = grid.with_cell_areas(areas).unwrap().without_repeats();
        assert_eq!((grid.shape(), grid.columns_repeated()), ([2, 5], Some(0)));
        assert_eq!(grid.cells().unwrap()[1], lon[..5].repeat(2));
        let expected = [1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0, 12.0];
        assert_eq!(grid.areas.as_deref(), Some(&expected[..]));
        assert_eq!(grid.clone().without_repeats(), grid);
    }
}
