//! Padding of tripolar grids, whose northern edge is folded onto itself.

use std::ops::Range;

use halocline_core::plan::{Need, Segment, segments};
use halocline_core::{Boundary, Error, IndexBox, Result, ShardTensor};

use super::pad::widen;
use super::poles::{ROWS, require_channels, turned};
use crate::driver::place::{assembled, in_place};
use crate::graph::Fold;

const NAME: &str = "pad_fold";
const COLUMNS: usize = 3;

/// Pads the rows and columns of a field on a tripolar ocean grid (R. Murray 1996) by `width` cells
/// on all sides. Columns are periodic; padding above the last row comes from the other half of the
/// fold, and padding below the first row repeats that row. Channels `odd`, such as the components
/// of currents, change sign across the fold.
///
/// Pads with the cells numbered by [`tripolar_fold`](crate::graph::tripolar_fold), for fields with
/// separate dims of rows and columns.
///
/// # Shapes
/// `[batch, channels, rows, columns, …]` → the same with `2·width` more rows and columns.
///
/// # Placement
/// All dims may be sharded; values must be resolved. Padding belongs to the first and the last rank
/// with cells.
///
/// # Communication
/// The cells that these ranks lack: those at the other end of columns, and those across the fold
/// from the ranks at the mirrored columns.
///
/// # Adjoint
/// The cotangent of a padded cell, with its sign, is added to that of the cell it copies.
///
/// # Errors
/// Fewer than four dims; an `odd` channel that does not exist; a width that is not less than the
/// number of rows, or exceeds that of columns; partial values; a failure of communication.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::graph::Fold;
/// use halocline_ops::rearrange::pad_fold;
///
/// let x = ShardTensor::solo(Tensor::<4>::from([[[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]]]));
/// let y = pad_fold(x, 1, Fold::Edge, &[])?.into_local();
/// let above = y.narrow(2, 3, 1).into_data();
/// above.assert_eq(&[[[[4.0_f32, 7.0, 6.0, 5.0, 4.0, 7.0]]]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn pad_fold<const D: usize>(
    x: ShardTensor<D>,
    width: usize,
    fold: Fold,
    odd: &[usize],
) -> Result<ShardTensor<D>> {
    let sizes = x.dims();
    if D <= COLUMNS || width >= sizes[ROWS] || width > sizes[COLUMNS] {
        let message = format!(
            "a halo of {width} cells of {sizes:?}; expected [batch, channels, rows, columns] with more rows and as many columns"
        );
        return Err(Error::operator(NAME, message));
    }
    require_channels(NAME, odd, sizes[1])?;
    let mut extents = x.layout().all_extents().to_vec();
    for extents in &mut extents[ROWS..=COLUMNS] {
        widen(extents, [width; 2]);
    }
    let output = x.layout().derive(x.placements().to_vec(), extents);
    let need_of = |cells: &IndexBox| need(cells, &sizes, width, fold);
    let y = assembled(x, NAME, (width, fold), output, 0.0, need_of)?;
    turned(y, odd, |row| row >= width + sizes[ROWS])
}

/// Source cells of a box of the padded field.
fn need(cells: &IndexBox, sizes: &[usize], width: usize, fold: Fold) -> Need {
    let shifted = |dim: usize| {
        let shift = |cell: usize| cell as isize - width as isize;
        let range = &cells.ranges()[dim];
        shift(range.start)..shift(range.end)
    };
    let (rows, columns) = (shifted(ROWS), shifted(COLUMNS));
    let [n, m] = [sizes[ROWS], sizes[COLUMNS]];
    let edge = (n as isize).clamp(rows.start, rows.end);
    let below = segments(
        rows.start..edge,
        n,
        Boundary::Replicate,
        Boundary::Replicate,
    );
    let ring = |range: Range<isize>| segments(range, m, Boundary::Periodic, Boundary::Periodic);
    // Sums of the index of a row, or column, and that of its image.
    let sums = match fold {
        Fold::Edge => [2 * n - 1, m - 1],
        Fold::Row => [2 * n - 2, m],
    };
    let mirrored = |range: Range<isize>, sum: usize| {
        sum as isize + 1 - range.end..sum as isize + 1 - range.start
    };
    let flipped = |range: &Range<isize>, runs: Vec<Segment>| -> Vec<Segment> {
        let length = (range.end - range.start) as usize;
        let flip = |run: Segment| Segment {
            dst: length - run.dst - run.src.len(),
            flip: !run.flip,
            src: run.src,
        };
        runs.into_iter().map(flip).collect()
    };
    let across = edge..rows.end;
    let images = mirrored(across.clone(), sums[0]);
    let images = segments(images, n, Boundary::Zeros, Boundary::Zeros);
    let mut above = flipped(&across, images);
    let start = (edge - rows.start) as usize;
    above.iter_mut().for_each(|run| run.dst += start);
    let image = flipped(&columns, ring(mirrored(columns.clone(), sums[1])));
    let mut need = Need::nothing(cells.shape());
    for (rows, columns) in [(below, ring(columns)), (above, image)] {
        let runs = (0..).zip(cells.ranges()).map(|(dim, range)| match dim {
            ROWS => rows.clone(),
            COLUMNS => columns.clone(),
            dim => in_place(range, sizes[dim]),
        });
        let runs: Vec<_> = runs.collect();
        need.pieces.extend(Need::product(Vec::new(), &runs).pieces);
    }
    need
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::graph::tripolar_fold;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, random};

    struct Folded(usize, Fold);

    impl Operator<4, 4> for Folded {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            inputs.remove(0).pad_fold(self.0, self.1, &[1])
        }
    }

    #[test]
    fn folds_of_rows_and_columns_that_are_sharded() {
        for (width, fold) in [(1, Fold::Edge), (2, Fold::Row), (4, Fold::Edge)] {
            check_op(
                &Folded(width, fold),
                &[[2, 2, 5, 6]],
                &[],
                &[0, 1, 2, 3],
                1e-6,
            );
        }
    }

    #[test]
    fn padding_is_that_of_numbered_cells() {
        for (width, fold) in [(1, Fold::Row), (3, Fold::Edge), (0, Fold::Edge)] {
            let x = random::<4>([1, 1, 4, 6], "x", 0).inner();
            let padded = x.clone().pad_fold(width, fold, &[]);
            let map = tripolar_fold([4, 6], width, fold);
            let x: Vec<f32> = x.into_data().iter().collect();
            let expected: Vec<f32> = map.cells().iter().map(|cell| x[*cell]).collect();
            assert_eq!(
                padded.into_data().iter::<f32>().collect::<Vec<_>>(),
                expected
            );
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<4>::ones([1, 2, 4, 6], &Default::default()));
        let told = |width, odd: &[usize], expected: &str| {
            let error = pad_fold(x.clone(), width, Fold::Edge, odd).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        told(4, &[], "a halo of 4 cells of [1, 2, 4, 6]");
        told(1, &[2], "odd channel 2 of 2");
    }
}
