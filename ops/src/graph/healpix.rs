//! Halo of the faces of a HEALPix grid.
//!
//! The twelve faces of `n × n` cells form one dim, rows and columns of a face two more, in the
//! order of the HEALPix library. Each face is padded on all sides with `width` cells of its
//! neighbours. Where only three faces meet, a corner has no neighbour: it becomes the mean of the
//! cells across its two sides. The cells are those of [`healpix_padding`](super::healpix_padding).
//!
//! # Shapes
//! `[batch, channels, 12, n, n]` → `[batch, channels, 12, n + 2·width, n + 2·width]`.
//!
//! # Placement
//! All dims may be sharded; values must be resolved. The first and the last part of rows and of
//! columns grow by `width`.
//!
//! # Communication
//! Cells of neighbouring faces on other ranks, once for each side on which they are needed.
//!
//! # Adjoint
//! The cotangents of all copies of a cell are added.

use std::ops::Range;
use std::sync::Arc;

use halocline_core::plan::{ExchangePlan, Need, Piece, Source};
use halocline_core::{Error, IndexBox, Layout, Result, ShardTensor};

use super::maps::healpix_cell;
use crate::driver::empty::without_fill;
use crate::kernel::taken::{Places, take};

const NAME: &str = "pad_healpix";

/// Pads the faces of a HEALPix grid with cells of their neighbours. See the [module](self).
///
/// # Errors
/// Fails for other shapes, for a halo wider than a face, for partial values, and if communication
/// fails.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::graph::pad_healpix;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("faces", 2)])?;
///     let x = ShardTensor::<5>::ones([1, 3, 12, 4, 4], &mesh, &[Shard(2)])?;
///     let y = pad_healpix(x, 1)?;
///     assert_eq!((y.dims(), y.placements()), ([1, 3, 12, 6, 6], &[Shard(2)][..]));
///     assert_eq!(y.local().clone().min().into_scalar::<f32>(), 1.0);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn pad_healpix(x: ShardTensor<5>, width: usize) -> Result<ShardTensor<5>> {
    x.require_resolved(NAME)?;
    let [_, _, faces, rows, columns] = x.dims();
    if faces != 12 || rows != columns || width > rows {
        let message = format!(
            "a halo of {width} cells of {:?}; expected [batch, channels, 12, n, n] with no more than n cells",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    let mut extents = x.layout().all_extents().to_vec();
    for extents in &mut extents[3..] {
        let held = |extent: &usize| *extent > 0;
        let first = extents.iter().position(held).unwrap_or(0);
        let last = extents.iter().rposition(held).unwrap_or(0);
        extents[first] += width;
        extents[last] += width;
    }
    let output = x.layout().derive(x.placements().to_vec(), extents);
    let mesh = x.mesh().clone();
    let key = (NAME, x.layout().clone(), width);
    let plan = mesh.cache().get_or_make(key, |(_, layout, width)| {
        let strips = |position: usize| Strips::new(&output, position, rows, *width);
        let own = strips(mesh.position());
        let plan: ExchangePlan =
            mesh.exchange_plan(Source::Layout(layout), |position| strips(position).need);
        Ok((Arc::new(plan), own.cells.map(Places::new), own.shape))
    })?;
    let (exchange, cells, shape) = &*plan;
    let strips = x.run_plan(NAME, exchange)?;
    let [batch, channels, _, high, wide] = strips.dims();
    let strips = strips.reshape([batch, channels, high * wide]);
    let [one, other] = cells.each_ref().map(|cells| take(strips.clone(), 2, cells));
    // Both are the same cell except at corners that are a mean.
    let y = (one * 0.5 + other * 0.5).reshape(*shape);
    without_fill(y, output, mesh, NAME)
}

/// Strips of faces that hold a rank's cells, stacked, and the position of each cell in them.
struct Strips {
    need: Need,
    /// Two positions for each cell, which is their mean.
    cells: [Vec<usize>; 2],
    /// Shape of the cells; a single cell if there are none.
    shape: [usize; 5],
}

impl Strips {
    fn new(output: &Layout, position: usize, size: usize, width: usize) -> Self {
        let held = output.local_box(position);
        let [batch, channels, faces, rows, columns] = held.ranges() else {
            unreachable!("five dims")
        };
        if held.volume() == 0 {
            return Self {
                need: Need::nothing(vec![1; 5]),
                cells: [vec![0], vec![0]],
                shape: [1; 5],
            };
        }
        let (n, w) = (size as isize, width as isize);
        let inner = |range: &Range<usize>| range.start as isize - w..range.end as isize - w;
        let (rows, columns) = (inner(rows), inner(columns));
        let near = |place: isize| place.clamp(0, n - 1);
        // Source of a cell: face, row and column.
        let source = |face: usize, y: isize, x: isize, side: usize| -> [usize; 3] {
            let cell = healpix_cell(face, x, y, n).unwrap_or_else(|| {
                let (x, y) = if side == 0 {
                    (x, near(y))
                } else {
                    (near(x), y)
                };
                healpix_cell(face, x, y, n).expect("a face on every side")
            });
            [cell / (size * size), cell / size % size, cell % size]
        };
        let mut boxes: Vec<([usize; 3], [usize; 2])> = Vec::new(); // first cell, and extents
        let mut starts = vec![0];
        let mut places: [Vec<(usize, usize, usize)>; 2] = [Vec::new(), Vec::new()];
        let thirds = [-w..0, 0..n, n..n + w];
        let part = |range: &Range<isize>, third: &Range<isize>| {
            range.start.max(third.start)..range.end.min(third.end)
        };
        let count = (rows.len() * columns.len()) * faces.len();
        places
            .iter_mut()
            .for_each(|places| places.resize(count, (0, 0, 0)));
        for (slot, face) in faces.clone().enumerate() {
            for (above, left) in (0..9).map(|direction| (direction / 3, direction % 3)) {
                let (high, wide) = (part(&rows, &thirds[above]), part(&columns, &thirds[left]));
                if high.is_empty() || wide.is_empty() {
                    continue;
                }
                for (side, places) in places.iter_mut().enumerate() {
                    // Rows and columns map to rows or columns, opposite corners to opposite
                    // corners.
                    let corners = [(high.start, wide.start), (high.end - 1, wide.end - 1)];
                    let [a, b] = corners.map(|(y, x)| source(face, y, x, side));
                    let first = [a[0], a[1].min(b[1]), a[2].min(b[2])];
                    let extents = [a[1].abs_diff(b[1]) + 1, a[2].abs_diff(b[2]) + 1];
                    let known = boxes.iter().position(|held| *held == (first, extents));
                    let strip = known.unwrap_or_else(|| {
                        boxes.push((first, extents));
                        starts.push(starts[starts.len() - 1] + extents[0]);
                        boxes.len() - 1
                    });
                    for (y, x) in high.clone().flat_map(|y| wide.clone().map(move |x| (y, x))) {
                        let [_, row, column] = source(face, y, x, side);
                        let (line, place) =
                            ((y - rows.start) as usize, (x - columns.start) as usize);
                        let cell = (slot * rows.len() + line) * columns.len() + place;
                        places[cell] = (strip, row - first[1], column - first[2]);
                    }
                }
            }
        }
        let wide = boxes
            .iter()
            .map(|(_, extents)| extents[1])
            .max()
            .unwrap_or(1);
        let pieces = boxes
            .iter()
            .zip(&starts)
            .map(|((first, extents), start)| Piece {
                dst: vec![0, 0, 0, *start, 0],
                flip: vec![false; 5],
                src: IndexBox::new(vec![
                    batch.clone(),
                    channels.clone(),
                    first[0]..first[0] + 1,
                    first[1]..first[1] + extents[0],
                    first[2]..first[2] + extents[1],
                ]),
            });
        let (samples, fields) = (batch.len(), channels.len());
        Self {
            need: Need {
                shape: vec![samples, fields, 1, starts[boxes.len()], wide],
                pieces: pieces.collect(),
            },
            cells: places.map(|places| {
                let place = |(strip, row, column): (usize, usize, usize)| {
                    (starts[strip] + row) * wide + column
                };
                places.into_iter().map(place).collect()
            }),
            shape: [samples, fields, faces.len(), rows.len(), columns.len()],
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::graph::{healpix_padding, take_cells};
    use crate::prelude::*;
    use crate::testing::{Operator, check_op, difference, random};

    struct Padded(usize);

    impl Operator<5, 5> for Padded {
        fn apply<X: Field<5>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<5>>) -> X {
            inputs.remove(0).try_op(|x| pad_healpix(x, self.0)).unwrap()
        }
    }

    #[test]
    fn faces_rows_and_columns_may_be_sharded() {
        for width in [1, 3] {
            check_op(
                &Padded(width),
                &[[2, 1, 12, 3, 3]],
                &[],
                &[0, 2, 3, 4],
                1e-6,
            );
        }
    }

    #[test]
    fn cells_are_those_of_the_map() {
        for (size, width) in [(4, 1), (3, 2)] {
            let x = random::<5>([1, 2, 12, size, size], "x", 0).inner();
            let padded = pad_healpix(ShardTensor::solo(x.clone()), width).unwrap();
            let cells = ShardTensor::solo(x.reshape([1, 2, 12 * size * size]));
            let wide = size + 2 * width;
            let taken = healpix_padding(size, width)
                .map(|map| take_cells(cells.clone(), 2, &map, &[12 * wide * wide]).unwrap());
            let [one, other] = taken;
            let expected = ((one + other) / 2.0).into_local();
            let found = padded.into_local().reshape([1, 2, 12 * wide * wide]);
            assert!(difference(&found.into_data(), &expected.into_data()) < 1e-6);
        }
    }

    #[test]
    fn misuse_is_told() {
        let x = ShardTensor::solo(Tensor::<5>::ones([1, 1, 12, 2, 2], &Default::default()));
        let error = pad_healpix(x, 3).unwrap_err().to_string();
        assert!(
            error.contains("a halo of 3 cells of [1, 1, 12, 2, 2]"),
            "{error}"
        );
    }
}
