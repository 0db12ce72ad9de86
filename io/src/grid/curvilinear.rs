//! Curvilinear grids: rows and columns of cells, each of which has a position of its own.

use halocline_core::sphere::sphere_point;
use rayon::prelude::*;

use super::cells::Cells;
use super::unplaced::place;
use crate::{Error, Grid, Result};

impl Grid {
    /// Creates a grid of rows and columns that do not follow latitudes and longitudes, such as that
    /// of an ocean model or of a projected region, from the latitude and the longitude of each cell
    /// in degrees, row by row. Its [`lat`](Self::lat) and [`lon`](Self::lon) are not positions; those
    /// are its [`cells`](Self::cells). A grid of a single row is an
    /// [unstructured](Self::unstructured) one.
    ///
    /// A cell whose latitude or longitude is NaN, such as land in files of ocean models, has area
    /// zero, and a position beside the cells that have one.
    ///
    /// # Errors
    /// No row or no column; numbers of latitudes or longitudes other than that of cells; a latitude
    /// beyond ±90; an infinite coordinate; no cell with a position.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Boundary;
    /// use halocline_io::Grid;
    ///
    /// let lat = vec![60.0, 60.5, 61.0, 59.0, 59.5, 60.0];
    /// let lon = vec![10.0, 12.0, 14.0, 10.5, 12.5, 14.5];
    /// let grid = Grid::curvilinear([2, 3], lat, lon)?;
    /// assert_eq!(grid.shape(), [2, 3]);
    /// assert!(grid.is_curvilinear() && grid.has_positions() && !grid.has_rows());
    /// assert_eq!(grid.boundary(), [Boundary::Replicate; 2]);
    /// assert_eq!(grid.to_string(), "curvilinear, 2 x 3 cells");
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn curvilinear(shape: [usize; 2], mut lat: Vec<f64>, mut lon: Vec<f64>) -> Result<Self> {
        let [rows, columns] = shape;
        let cells = rows.checked_mul(columns);
        if shape.contains(&0) || cells != Some(lat.len()) || lat.len() != lon.len() {
            let got = format!("{} positions", lat.len());
            let expected = format!("one for each cell of a grid of {rows} x {columns}");
            return Err(Error::argument("cells", got, expected));
        }
        let unplaced = place(shape, [&mut lat, &mut lon]);
        let grid = Self::of_cells(Cells::new(lat, lon)?, rows)?;
        if unplaced.is_empty() {
            return Ok(grid);
        }
        let mut areas = quadrilaterals(shape, grid.cells().expect("given"));
        unplaced.into_iter().for_each(|cell| areas[cell] = 0.0);
        grid.with_cell_areas(areas)
    }

    /// Whether the grid has several rows that do not follow latitudes. See
    /// [`curvilinear`](Self::curvilinear) for an example.
    pub fn is_curvilinear(&self) -> bool {
        self.cells.is_some() && self.lat.len() > 1
    }

    /// Computes the areas of the cells of a curvilinear grid from their positions, on a sphere of
    /// radius one.
    pub(super) fn computed_areas(&self) -> Option<Vec<f64>> {
        let cells = self.cells().filter(|_| self.is_curvilinear())?;
        Some(quadrilaterals(self.shape(), cells))
    }
}

/// Returns the two neighbours of a bound between `count` cells along a dim, with the weights of
/// their centres. Outermost bounds continue the line through the two outermost centres.
fn neighbours(bound: usize, count: usize) -> [(usize, f64); 2] {
    if bound == 0 {
        [(0, 1.5), (1, -0.5)]
    } else if bound == count {
        [(count - 1, 1.5), (count - 2, -0.5)]
    } else {
        [(bound - 1, 0.5), (bound, 0.5)]
    }
}

/// Returns the areas of the spherical quadrilaterals whose corners are the midpoints of four
/// neighbouring centres; equal areas if there is only one column, or if all are zero.
fn quadrilaterals([rows, columns]: [usize; 2], [lat, lon]: [&[f64]; 2]) -> Vec<f64> {
    let equal = || vec![1.0; rows * columns];
    if rows < 2 || columns < 2 {
        return equal();
    }
    let positions = lat.par_iter().zip(lon);
    let points = positions.map(|(lat, lon)| sphere_point([*lat, *lon]));
    let points: Vec<[f64; 3]> = points.collect();
    let width = columns + 1;
    let corner = |bound: usize| {
        let (row, column) = (bound / width, bound % width);
        let mut sum = [0.0; 3];
        for (row, part) in neighbours(row, rows) {
            for (column, share) in neighbours(column, columns) {
                let point = points[row * columns + column];
                for (sum, coordinate) in sum.iter_mut().zip(point) {
                    *sum += part * share * coordinate;
                }
            }
        }
        let length = dot(sum, sum).sqrt().max(f64::MIN_POSITIVE);
        sum.map(|coordinate| coordinate / length)
    };
    let corners = (0..(rows + 1) * width).into_par_iter().map(corner);
    let corners: Vec<[f64; 3]> = corners.collect();
    let area = |cell: usize| {
        let first = cell / columns * width + cell % columns;
        let sides = [corners[first + 1], corners[first + width]];
        let triangles =
            sides.map(|side| triangle(corners[first], side, corners[first + width + 1]));
        triangles.iter().sum::<f64>()
    };
    let areas: Vec<f64> = (0..rows * columns).into_par_iter().map(area).collect();
    if areas.iter().sum::<f64>() > 0.0 {
        areas
    } else {
        equal()
    }
}

/// Returns the area of a spherical triangle (Van Oosterom and Strackee, 1983). Differences of the
/// corners keep the digits of small triangles.
fn triangle(a: [f64; 3], b: [f64; 3], c: [f64; 3]) -> f64 {
    let difference = |one: [f64; 3]| [one[0] - a[0], one[1] - a[1], one[2] - a[2]];
    let (b_side, c_side) = (difference(b), difference(c));
    let normal = [
        b_side[1] * c_side[2] - b_side[2] * c_side[1],
        b_side[2] * c_side[0] - b_side[0] * c_side[2],
        b_side[0] * c_side[1] - b_side[1] * c_side[0],
    ];
    let volume = dot(a, normal).abs();
    2.0 * volume.atan2(1.0 + dot(a, b) + dot(b, c) + dot(c, a))
}

fn dot(one: [f64; 3], other: [f64; 3]) -> f64 {
    one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::order::GridOrder;

    /// A grid whose positions are those of rows and columns.
    fn bent(rows: &Grid) -> Grid {
        let [height, width] = rows.shape();
        let lat = rows.lat().iter().flat_map(|lat| vec![*lat; width]);
        Grid::curvilinear([height, width], lat.collect(), rows.lon().repeat(height)).unwrap()
    }

    #[test]
    fn computed_areas_are_those_of_rows_and_columns() {
        let lat = (0..9).map(|row| 70.0 - f64::from(row)).collect();
        let lon = (0..5)
            .map(|column| 355.0 + 2.0 * f64::from(column))
            .collect();
        let rows = Grid::new(lat, lon).unwrap();
        let grid = bent(&rows);
        assert_eq!(grid.latitude_weights(), [1.0; 9]);
        let weights = grid.cell_weights().unwrap();
        for (cell, weight) in weights.iter().enumerate() {
            let expected = rows.latitude_weights()[cell / 5];
            assert!(
                (weight / expected - 1.0).abs() < 1e-3,
                "{weight} {expected}"
            );
        }
        let given: Vec<f64> = (1..=45).map(f64::from).collect();
        let weights = grid.with_cell_areas(given).unwrap().cell_weights().unwrap();
        assert_eq!(weights[44], 45.0 / 23.0);
    }

    #[test]
    fn curvilinear_grids_are_kept_and_compared() {
        let rows = Grid::new(vec![60.0, 50.0], vec![0.0, 10.0, 20.0]).unwrap();
        let grid = bent(&rows);
        let text = serde_json::to_string(&grid).unwrap();
        assert_eq!(serde_json::from_str::<Grid>(&text).unwrap(), grid);
        assert_eq!(grid.kind(), "curvilinear");
        assert!(grid.agrees_with(&grid) && !grid.agrees_with(&rows));
        let error = GridOrder::of(&grid, &rows).unwrap_err();
        assert_eq!(error, "curvilinear, not equiangular");
        let [lat, lon] = grid.cells().unwrap().map(<[f64]>::to_vec);
        let turned = Grid::curvilinear([3, 2], lat.clone(), lon.clone()).unwrap();
        assert_eq!(GridOrder::of(&turned, &grid).unwrap_err(), "3 rows, not 2");
        // Areas are compared only if both files have them.
        let areas = grid
            .clone()
            .with_cell_areas(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(grid.agrees_with(&areas.unwrap()));
        let error = Grid::curvilinear([2, 2], lat, lon).unwrap_err().to_string();
        let told = "cells: got 6 positions, expected one for each cell of a grid of 2 x 2";
        assert_eq!(error, told);
        let error = serde_json::from_str::<Grid>(&text.replace("\"rows\":2", "\"rows\":4"));
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("rows: got 4, expected a divisor of 6"),
            "{error}"
        );
    }
}
