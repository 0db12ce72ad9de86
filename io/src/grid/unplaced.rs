//! Cells of curvilinear grids without a position, such as land in files of ocean models.

use halocline_core::sphere::sphere_point;

/// Cells beyond the last one with a position, along a row or column, that continue the line of its
/// positions: the corners of a cell depend on the next cells, also across the corners.
const CONTINUED: usize = 2;

/// Marks cells at latitude and longitude zero as cells without a position (NaN), if a block of two
/// rows and columns lies there, as land that NEMO does not compute. A grid whose cells all lie there
/// is left as it is.
pub(crate) fn mark_zeros([_, columns]: [usize; 2], [lat, lon]: [&mut [f64]; 2]) {
    let positions = lat.iter().zip(&*lon);
    let is_zero: Vec<bool> = positions
        .map(|(lat, lon)| *lat == 0.0 && *lon == 0.0)
        .collect();
    let block = |first: usize| {
        let cells = [first, first + 1, first + columns, first + columns + 1];
        first % columns + 1 < columns && cells.iter().all(|cell| is_zero.get(*cell) == Some(&true))
    };
    if is_zero.iter().all(|is_zero| *is_zero) || !(0..is_zero.len()).any(block) {
        return;
    }
    for (cell, _) in is_zero.iter().enumerate().filter(|(_, is_zero)| **is_zero) {
        (lat[cell], lon[cell]) = (f64::NAN, f64::NAN);
    }
}

/// Gives each cell without a position, whose latitude or longitude is NaN, one beside the cells
/// that have one, and returns these cells. There is nothing to do if no cell has a position.
pub(super) fn place([rows, columns]: [usize; 2], [lat, lon]: [&mut [f64]; 2]) -> Vec<usize> {
    let has_none = |cell: &usize| lat[*cell].is_nan() || lon[*cell].is_nan();
    let unplaced: Vec<usize> = (0..rows * columns).filter(has_none).collect();
    if unplaced.is_empty() || unplaced.len() == rows * columns {
        return unplaced;
    }
    let point = |cell: usize| sphere_point([lat[cell], lon[cell]]);
    let mut points: Vec<[f64; 3]> = (0..rows * columns).map(point).collect();
    let is_placed = |point: &[f64; 3]| !point[0].is_nan();
    for cell in &unplaced {
        points[*cell] = [f64::NAN; 3];
    }
    // The cells at this number of steps from one, in the four directions.
    let beside = |cell: usize, steps: usize| {
        let (row, column) = (cell / columns, cell % columns);
        let inside = |place: Option<usize>, count: usize| place.filter(|place| *place < count);
        [
            inside(row.checked_sub(steps), rows).map(|row| row * columns + column),
            inside(Some(row + steps), rows).map(|row| row * columns + column),
            inside(column.checked_sub(steps), columns).map(|column| row * columns + column),
            inside(Some(column + steps), columns).map(|column| row * columns + column),
        ]
    };
    let near = |cell: usize| beside(cell, 1).into_iter().flatten();
    let mut front: Vec<usize> = unplaced.clone();
    for round in 0.. {
        front.retain(|cell| near(*cell).any(|cell| is_placed(&points[cell])));
        if front.is_empty() {
            break;
        }
        let found = front.iter().map(|cell| {
            let pairs = beside(*cell, 1).into_iter().zip(beside(*cell, 2));
            let lines = pairs.filter_map(|pair| match pair {
                (Some(next), Some(second)) if round < CONTINUED => {
                    let (next, second) = (points[next], points[second]);
                    let line = [0, 1, 2].map(|axis| 2.0 * next[axis] - second[axis]);
                    Some(line).filter(is_placed)
                }
                _ => None,
            });
            let sum = lines.reduce(|one, other| [0, 1, 2].map(|axis| one[axis] + other[axis]));
            let mut copies = near(*cell).map(|cell| points[cell]).filter(is_placed);
            sum.or_else(|| copies.next()).expect("a cell beside it")
        });
        let found: Vec<[f64; 3]> = found.collect();
        for (cell, sum) in front.iter().zip(found) {
            let length = sum.iter().map(|part| part * part).sum::<f64>().sqrt();
            points[*cell] = sum.map(|part| part / length.max(f64::MIN_POSITIVE));
        }
        let mut next: Vec<usize> = front.iter().flat_map(|cell| near(*cell)).collect();
        next.sort_unstable();
        next.dedup();
        next.retain(|cell| !is_placed(&points[*cell]));
        front = next;
    }
    for cell in &unplaced {
        let [x, y, z] = points[*cell];
        lat[*cell] = z.atan2(x.hypot(y)).to_degrees();
        lon[*cell] = y.atan2(x).to_degrees();
    }
    unplaced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Grid;

    const NAN: f64 = f64::NAN;

    #[test]
    fn cells_without_a_position_continue_the_lines_of_the_others() {
        let mut lat = [[0.0, 0.0, NAN, NAN, NAN], [1.0, NAN, NAN, NAN, NAN]].concat();
        let mut lon = [[10.0, 11.0, NAN, NAN, NAN], [10.0, 11.0, NAN, NAN, NAN]].concat();
        let unplaced = place([2, 5], [&mut lat, &mut lon]);
        assert_eq!(unplaced, [2, 3, 4, 6, 7, 8, 9]);
        // Two cells of the row at the equator, then a copy.
        for (cell, expected) in [(2, 12.0), (3, 13.0), (4, 13.0)] {
            assert!(
                (lon[cell] - expected).abs() < 1e-3 && lat[cell].abs() < 1e-9,
                "{lon:?}"
            );
        }
        assert!(lat.iter().chain(&lon).all(|degrees| degrees.is_finite()));
        // None to begin with.
        let (mut lat, mut lon) = (vec![NAN; 4], vec![0.0; 4]);
        assert_eq!(place([2, 2], [&mut lat, &mut lon]).len(), 4);
        assert!(lat[0].is_nan());
    }

    #[test]
    fn blocks_at_zero_have_no_position_unless_all_cells_lie_there() {
        let marked = |zeros: &[usize]| {
            let position = |cell: usize| {
                if zeros.contains(&cell) {
                    0.0
                } else {
                    1.0 + cell as f64
                }
            };
            let mut lat: Vec<f64> = (0..12).map(position).collect();
            let mut lon = lat.clone();
            mark_zeros([3, 4], [&mut lat, &mut lon]);
            let cells = (0..12).filter(|cell| lat[*cell].is_nan());
            cells.collect::<Vec<usize>>()
        };
        assert_eq!(marked(&[0, 6, 7, 10, 11]), [0, 6, 7, 10, 11]);
        // A line, and cells that are no block.
        for zeros in [&[0, 1, 2, 3][..], &[3, 4, 7, 8], &[6, 7, 10]] {
            assert!(marked(zeros).is_empty());
        }
        let all: Vec<usize> = (0..12).collect();
        assert!(marked(&all).is_empty());
    }

    /// A coast leaves the areas of the sea as they are.
    #[test]
    fn areas_beside_cells_without_a_position_are_those_of_the_whole_grid() {
        let [rows, columns] = [8, 9];
        let positions = |is_land: &dyn Fn(usize) -> bool| {
            let value = |cell: usize, degrees: usize, first: f64| match is_land(cell) {
                true => NAN,
                false => first + degrees as f64,
            };
            let cells = 0..rows * columns;
            let lat = cells.clone().map(|cell| value(cell, cell / columns, 50.0));
            let lon = cells.map(|cell| value(cell, cell % columns, 355.0));
            Grid::curvilinear([rows, columns], lat.collect(), lon.collect()).unwrap()
        };
        let is_land = |cell: usize| cell / columns >= 5 && cell % columns >= 4;
        let (whole, coast) = (positions(&|_| false), positions(&is_land));
        let [whole, coast] = [whole, coast].map(|grid| grid.cell_weights().unwrap());
        for cell in 0..rows * columns {
            let ratio = coast[cell] / coast[0] / (whole[cell] / whole[0]);
            match is_land(cell) {
                true => assert_eq!(coast[cell], 0.0),
                false => assert!((ratio - 1.0).abs() < 2e-3, "{cell}: {ratio}"),
            }
        }
    }
}
