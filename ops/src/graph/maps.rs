//! Ready-made maps of cells: halos of HEALPix and tripolar grids.

use super::cells::CellMap;

/// Neighbouring faces by direction, `3 · (down, same, up in y) + (down, same, up in x)`, or −1 for
/// none, of the twelve base faces of HEALPix (K. Górski et al. 2005) as its library numbers them.
const FACES: [[i8; 12]; 9] = [
    [8, 9, 10, 11, -1, -1, -1, -1, 10, 11, 8, 9],
    [5, 6, 7, 4, 8, 9, 10, 11, 9, 10, 11, 8],
    [-1, -1, -1, -1, 5, 6, 7, 4, -1, -1, -1, -1],
    [4, 5, 6, 7, 11, 8, 9, 10, 11, 8, 9, 10],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    [1, 2, 3, 0, 0, 1, 2, 3, 5, 6, 7, 4],
    [-1, -1, -1, -1, 7, 4, 5, 6, -1, -1, -1, -1],
    [3, 0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7],
    [2, 3, 0, 1, -1, -1, -1, -1, 0, 1, 2, 3],
];
/// Orientation of a neighbour's axes by direction and by band (north, equator, south): whether x
/// and whether y count down, and whether they are swapped.
const TURNS: [[[bool; 3]; 3]; 9] = {
    const N: [bool; 3] = [false; 3];
    const BOTH: [bool; 3] = [true, true, false];
    const X: [bool; 3] = [true, false, true];
    const Y: [bool; 3] = [false, true, true];
    [
        [N, N, BOTH],
        [N, N, Y],
        [N; 3],
        [N, N, X],
        [N; 3],
        [X, N, N],
        [N; 3],
        [Y, N, N],
        [BOTH, N, N],
    ]
};

/// Halo of the twelve faces of a HEALPix grid, `size × size` cells each, as two maps.
///
/// Cells are numbered `(face · size + y) · size + x`, in the faces and axes of the HEALPix library.
/// A map lists the cells of the padded faces in the order
/// `(face · (size + 2·width) + y) · (size + 2·width) + x`. Where only three faces meet, a corner
/// has no neighbour: it is the mean of the cells across its two sides, one in each map. Elsewhere
/// both maps agree, so the padded field is the mean of the two gathered fields.
///
/// # Panics
/// Panics if the halo is wider than a face.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::graph::{healpix_padding, take_cells};
///
/// let [one, other] = healpix_padding(4, 1);
/// let x = ShardTensor::solo(Tensor::<1>::ones([12 * 4 * 4], &Default::default()));
/// let extents = [12 * 6 * 6];
/// let padded = (take_cells(x.clone(), 0, &one, &extents)? + take_cells(x, 0, &other, &extents)?) / 2.0;
/// assert_eq!(padded.local().clone().min().into_scalar::<f32>(), 1.0);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn healpix_padding(size: usize, width: usize) -> [CellMap; 2] {
    assert!(
        width <= size,
        "healpix_padding: a halo of {width} cells of faces of {size}"
    );
    let (n, w) = (size as isize, width as isize);
    let near = |cell: isize| cell.clamp(0, n - 1);
    let [mut one, mut other] = [Vec::new(), Vec::new()];
    for face in 0..12 {
        for (y, x) in (-w..n + w).flat_map(|y| (-w..n + w).map(move |x| (y, x))) {
            let across = |x, y| healpix_cell(face, x, y, n).expect("a face on every side");
            let [first, second] = match healpix_cell(face, x, y, n) {
                Some(cell) => [cell; 2],
                None => [across(x, near(y)), across(near(x), y)],
            };
            one.push(first);
            other.push(second);
        }
    }
    [one, other].map(CellMap::new)
}

/// Cell at a position relative to a face, which may lie outside it.
pub(super) fn healpix_cell(face: usize, x: isize, y: isize, size: isize) -> Option<usize> {
    let side = |place: isize| usize::from(place >= 0) + usize::from(place >= size);
    let direction = 3 * side(y) + side(x);
    let neighbour = usize::try_from(FACES[direction][face]).ok()?;
    let [x_down, y_down, swapped] = TURNS[direction][face / 4];
    let within = |place: isize, down: bool| {
        let place = place.rem_euclid(size);
        if down { size - 1 - place } else { place }
    };
    let (x, y) = (within(x, x_down), within(y, y_down));
    let (x, y) = if swapped { (y, x) } else { (x, y) };
    Some((neighbour as isize * size * size + y * size + x) as usize)
}

/// Position of the fold at the northern edge of a tripolar grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fold {
    /// Between the last row and its mirror image.
    Edge,
    /// On the last row, whose two halves are the same cells.
    Row,
}

/// Halo of a tripolar ocean grid of `rows × columns` cells, periodic in columns, as a map. It adds
/// `width` cells on both sides of each row, and as many rows at both ends: above the last row the
/// grid is folded onto itself (R. Murray 1996), below the first row that row is repeated.
///
/// Cells are numbered row by row; the map has `rows + 2·width` rows of `columns + 2·width` cells.
/// Vector components change sign across the fold, which the caller must apply.
///
/// # Panics
/// Panics if the halo is wider than the grid.
///
/// # Example
/// ```
/// use halocline_ops::graph::{Fold, tripolar_fold};
///
/// let map = tripolar_fold([2, 4], 1, Fold::Edge);
/// // Above the row of cells 4 to 7 is its mirror image.
/// assert_eq!(map.cells()[3 * 6..], [4, 7, 6, 5, 4, 7]);
/// ```
pub fn tripolar_fold([rows, columns]: [usize; 2], width: usize, fold: Fold) -> CellMap {
    assert!(
        width < rows && width <= columns,
        "tripolar_fold: a halo of {width} cells of {rows} × {columns}"
    );
    let (n, m, w) = (rows as isize, columns as isize, width as isize);
    let cell = |row: isize, column: isize| {
        let (row, column) = match fold {
            _ if row < n => (row.max(0), column),
            Fold::Edge => (2 * n - 1 - row, m - 1 - column),
            Fold::Row => (2 * n - 2 - row, m - column),
        };
        (row * m + column.rem_euclid(m)) as usize
    };
    let cells = (-w..n + w).flat_map(|row| (-w..m + w).map(move |column| (row, column)));
    CellMap::new(cells.map(|(row, column)| cell(row, column)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Centre of a cell on the unit sphere.
    fn place(cell: usize, size: usize) -> [f64; 3] {
        let (face, y, x) = (cell / size / size, cell / size % size, cell % size);
        let ring = [2, 3, 4][face / 4] * size - x - y - 1;
        let area = 3.0 * (size * size) as f64;
        let (around, z) = if ring < size {
            (ring, 1.0 - (ring * ring) as f64 / area)
        } else if ring > 3 * size {
            let around = 4 * size - ring;
            (around, (around * around) as f64 / area - 1.0)
        } else {
            (
                size,
                (2.0 * size as f64 - ring as f64) * 2.0 / (3.0 * size as f64),
            )
        };
        let turn = [1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7][face] * around;
        let longitude = std::f64::consts::FRAC_PI_4 * (turn + x) as f64
            - std::f64::consts::FRAC_PI_4 * y as f64;
        let (sin, cos) = (longitude / around as f64).sin_cos();
        let radius = (1.0 - z * z).sqrt();
        [radius * cos, radius * sin, z]
    }

    #[test]
    fn cells_of_padded_faces_are_beside_each_other_on_the_sphere() {
        let (size, width) = (8, 3);
        let [one, other] = healpix_padding(size, width);
        let padded = size + 2 * width;
        let apart = |a: usize, b: usize| {
            let (a, b) = (place(a, size), place(b, size));
            let squares = a.iter().zip(b).map(|(a, b)| (a - b).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let cells = one.cells();
        for (index, cell) in cells.iter().enumerate() {
            let (y, x) = (index / padded % padded, index % padded);
            let inside = |place: usize| (width..width + size).contains(&place);
            // Rows and columns of the face continue beyond it without a gap.
            if inside(y) && x + 1 < padded {
                assert!(apart(*cell, cells[index + 1]) * (size as f64) < 1.4);
            }
            if inside(x) && y + 1 < padded {
                assert!(apart(*cell, cells[index + padded]) * (size as f64) < 1.4);
            }
        }
        let differ = cells.iter().zip(other.cells()).filter(|(a, b)| a != b);
        // Every face lacks a neighbour at two corners.
        assert_eq!(differ.count(), 12 * 2 * width * width);
    }

    #[test]
    fn a_fold_maps_cells_onto_each_other() {
        let [rows, columns, width] = [5, 8, 2];
        for (fold, above) in [(Fold::Edge, 1), (Fold::Row, 2)] {
            let map = tripolar_fold([rows, columns], width, fold);
            let at = |row: usize, column: usize| {
                map.cells()[(row + width) * (columns + 2 * width) + column + width]
            };
            for column in 0..columns {
                let across = at(rows, column);
                assert_eq!(across / columns, rows - above);
                // The fold is an involution.
                assert_eq!(at(rows, across % columns) % columns, column);
            }
            // Columns continue at the other end.
            assert_eq!(at(1, columns), columns);
        }
    }
}
