//! Indices of the largest cells of lines.

use std::cmp::Ordering;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Int, Shape, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::tasks;

use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lines::Lines;

/// Largest count that is kept sorted while a line is read; for larger counts whole lines are
/// sorted.
const FEW: usize = 32;

/// Finds the `count` largest cells of a whole dim on the CPU, in descending order, and their
/// indices; of equal cells the first ones. NaN counts as larger than all numbers.
pub(super) fn largest<const D: usize>(
    x: Tensor<D>,
    count: usize,
    dim: usize,
) -> Result<(Tensor<D>, Tensor<D, Int>)> {
    let (device, mut shape) = (x.device().inner(), x.dims());
    let lines = Lines::along(&shape, dim..dim + 1);
    let cells = x.clone().inner().into_dispatch();
    let dtype = cells.dtype();
    let places = with_float!(dtype, E => {
        let cells = flex::operand::<E>(cells)?;
        places::<E>(lines, count, flex::elements(&cells))
    });
    shape[dim] = count;
    let cells = places.iter().map(|cell| *cell as u32).collect();
    let indices = Tensor::from_data(TensorData::new(places, shape), &device);
    let taken = Taken {
        lines,
        shape: shape.to_vec(),
        cells,
    };
    let values = Tensor::from_dispatch(apply(taken, [x.into_dispatch()]));
    Ok((values, indices))
}

/// Cells of lines, taken by index.
#[derive(Debug)]
struct Taken {
    lines: Lines,
    /// Shape of the result.
    shape: Vec<usize>,
    /// Indices `[outer, count, inner]`.
    cells: Vec<u32>,
}

impl Operator for Taken {
    /// Shape of the input.
    type Saved = Shape;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        let x = inputs.remove(0);
        let (dtype, shape) = (x.dtype(), x.shape());
        let y = with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let y = self.lines.taken::<E>(flex::elements(&x), &self.cells);
            flex::result(y.expect("cells of the lines"), &self.shape, dtype)
        });
        Ok((y, shape))
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let (dtype, shape) = (pass.cotangent.dtype(), pass.saved);
        Ok(vec![Some(with_float!(dtype, E => {
            let cotangent = flex::operand::<E>(pass.cotangent)?;
            let gradient = self.lines.added::<E>(None, &self.cells, flex::elements(&cotangent));
            let gradient = gradient.expect("cells of the lines");
            flex::result(gradient, shape, dtype)
        }))])
    }
}

fn places<E: Float>(lines: Lines, count: usize, x: &[E]) -> Vec<i64> {
    let Lines { cells, inner, .. } = lines;
    let mut found = vec![0; lines.count() * count];
    // Each task has the lines of one `outer`, whose results are contiguous.
    tasks::for_each_part(&mut found, inner * count, 1, |outer, found| {
        for column in 0..inner {
            let number = |cell: usize| x[(outer * cells + cell) * inner + column].to_f64();
            let best = match (count <= FEW, inner) {
                (true, 1) => few_of_row(&x[outer * cells..][..cells], count),
                (true, _) => few(cells, count, number),
                (false, _) => many(cells, count, number),
            };
            for (rank, (_, cell)) in best.into_iter().enumerate() {
                found[rank * inner + column] = cell as i64;
            }
        }
    });
    found
}

/// Descending order, NaN first.
fn order(a: f64, b: f64) -> Ordering {
    let number = |value: f64| !value.is_nan();
    let order = number(a).cmp(&number(b));
    order.then(b.partial_cmp(&a).unwrap_or(Ordering::Equal))
}

fn few(cells: usize, count: usize, number: impl Fn(usize) -> f64) -> Vec<(f64, usize)> {
    let mut best = Vec::with_capacity(count + 1);
    for cell in 0..cells {
        offer(&mut best, count, number(cell), cell);
    }
    best
}

/// [`few`] for contiguous cells; skips parts without a cell above the last of the best.
fn few_of_row<E: Float>(row: &[E], count: usize) -> Vec<(f64, usize)> {
    const PART: usize = 32;
    let mut best: Vec<(f64, usize)> = Vec::with_capacity(count + 1);
    // Cells up to this one cannot be among the best.
    let mut bound = None;
    for (part, cells) in row.chunks(PART).enumerate() {
        // The comparison is false for NaN.
        if bound.is_some_and(|bound| cells.iter().fold(true, |all, cell| all & (*cell <= bound))) {
            continue;
        }
        for (cell, value) in cells.iter().enumerate() {
            if bound.is_some_and(|bound| *value <= bound) {
                continue;
            }
            offer(&mut best, count, value.to_f64(), part * PART + cell);
            bound = (best.len() == count).then(|| E::from_f64(best[count - 1].0));
        }
    }
    best
}

/// Inserts a cell among the best, if it belongs there.
fn offer(best: &mut Vec<(f64, usize)>, count: usize, value: f64, cell: usize) {
    if best.len() == count && order(value, best[count - 1].0) != Ordering::Less {
        return;
    }
    let place = best.partition_point(|(held, _)| order(*held, value) != Ordering::Greater);
    best.insert(place, (value, cell));
    best.truncate(count);
}

fn many(cells: usize, count: usize, number: impl Fn(usize) -> f64) -> Vec<(f64, usize)> {
    let mut all: Vec<(f64, usize)> = (0..cells).map(|cell| (number(cell), cell)).collect();
    let descending = |a: &(f64, usize), b: &(f64, usize)| order(a.0, b.0).then(a.1.cmp(&b.1));
    if count < cells {
        all.select_nth_unstable_by(count, descending);
        all.truncate(count);
    }
    all.sort_unstable_by(descending);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_cells_come_first_and_nan_before_all() {
        let line = [1.0, 5.0, f64::NAN, -2.0, 5.0, f64::INFINITY];
        let expected = [2, 5, 1, 4, 0, 3];
        for count in 1..=line.len() {
            for best in [
                few(6, count, |cell| line[cell]),
                few_of_row(&line, count),
                many(6, count, |cell| line[cell]),
            ] {
                let places: Vec<usize> = best.into_iter().map(|(_, cell)| cell).collect();
                assert_eq!(places, expected[..count]);
            }
        }
    }

    #[test]
    fn rows_of_many_parts_are_read_like_any() {
        for shift in 0..40 {
            let row: Vec<f64> = (0..301)
                .map(|cell| f64::from((cell * 37 + shift) % 101))
                .collect();
            let expected = few(row.len(), 5, |cell| row[cell]);
            assert_eq!(few_of_row(&row, 5), expected);
        }
    }

    #[test]
    fn lines_may_lie_along_any_dim() {
        // `[2, 3, 2]`
        let x = [
            0.0_f32, 9.0, 4.0, 1.0, 2.0, 5.0, 7.0, 7.0, 8.0, 0.0, 6.0, 3.0,
        ];
        let lines = |dim: usize| Lines::along(&[2, 3, 2], dim..dim + 1);
        assert_eq!(places(lines(1), 2, &x), [1, 0, 2, 2, 1, 0, 0, 2]);
        assert_eq!(places(lines(2), 1, &x), [1, 0, 1, 0, 0, 0]);
        assert_eq!(places(lines(0), 1, &x), [1, 0, 1, 0, 1, 0]);
    }
}
