//! Maps between the order of HEALPix cells by faces and that of files.
//!
//! Halocline orders cells by face: `(face · size + y) · size + x`, in the faces and axes of the
//! HEALPix library.

use halocline_core::Result;
use halocline_core::sphere::{HealpixOrder, healpix_numbers};

use super::cells::CellMap;

/// Map from the order of a file to the order by faces: for each cell of the twelve faces,
/// `size × size` each, its number in the file.
///
/// # Errors
/// Fails for a size of zero and, for nested order, for a size that is not a power of two.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::graph::{HealpixOrder, healpix_from_file, healpix_to_file, take_cells};
///
/// let field: Vec<f32> = (0..48).map(|cell| cell as f32).collect(); // of a file, by rings
/// let field = ShardTensor::solo(Tensor::<1>::from_floats(field.as_slice(), &Default::default()));
/// let faces = take_cells(field.clone(), 0, &healpix_from_file(2, HealpixOrder::Ring)?, &[48])?; // [12 · y · x]
/// let first = faces.local().clone().slice([0..4]);
/// first.into_data().assert_eq(&[13.0_f32, 5.0, 4.0, 0.0].into(), true);
/// let again = take_cells(faces, 0, &healpix_to_file(2, HealpixOrder::Ring)?, &[48])?;
/// again.local().to_data().assert_eq(&field.local().to_data(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn healpix_from_file(size: usize, order: HealpixOrder) -> Result<CellMap> {
    Ok(CellMap::new(healpix_numbers(size, order)?))
}

/// Map from the order by faces to the order of a file: the inverse of [`healpix_from_file`].
///
/// # Errors
/// Errors of [`healpix_from_file`].
pub fn healpix_to_file(size: usize, order: HealpixOrder) -> Result<CellMap> {
    let numbers = healpix_numbers(size, order)?;
    let mut cells = vec![0; numbers.len()];
    for (cell, number) in numbers.into_iter().enumerate() {
        cells[number] = cell;
    }
    Ok(CellMap::new(cells))
}

#[cfg(test)]
mod tests {
    use halocline_core::sphere::{healpix_centers, sphere_point};

    use super::super::maps::healpix_cell;
    use super::*;

    /// Ring numbers run from north to south and eastward, and neighbours across the edges of faces
    /// are close.
    #[test]
    fn cells_lie_where_their_numbers_and_their_neighbours_are() {
        for size in [1, 2, 5, 8] {
            let centres = healpix_centers(size);
            let by_rings = healpix_to_file(size, HealpixOrder::Ring).unwrap();
            let in_order: Vec<[f64; 2]> =
                by_rings.cells().iter().map(|cell| centres[*cell]).collect();
            let follows = |pair: &[[f64; 2]]| {
                let [one, other] = [pair[0], pair[1]];
                other[0] < one[0] - 1e-9 || ((other[0] - one[0]).abs() < 1e-9 && other[1] > one[1])
            };
            assert!(in_order.windows(2).all(follows), "{size}");
            for cell in 0..centres.len() {
                let (face, y, x) = (cell / size / size, cell / size % size, cell % size);
                for (x, y) in [(x as isize + 1, y as isize), (x as isize, y as isize - 1)] {
                    let near = healpix_cell(face, x, y, size as isize).unwrap();
                    let [one, other] = [cell, near].map(|cell| sphere_point(centres[cell]));
                    let cosine: f64 = (0..3).map(|dim| one[dim] * other[dim]).sum();
                    // A cell is about `1 / size` radians wide.
                    assert!(
                        cosine.clamp(-1.0, 1.0).acos() < 1.6 / size as f64,
                        "{size}: {cell} {near}"
                    );
                }
            }
        }
    }
}
