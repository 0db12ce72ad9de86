//! Maxima, dim by dim.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, blank};
use rayon::prelude::*;

use super::{Combine, Map};
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lines::Lines;
use crate::reshape;

/// The maximum of cells; weights do not count.
#[derive(Clone, Debug)]
pub(crate) struct Maximum(Arc<[(usize, Map)]>);

impl Combine for Maximum {
    fn new(mut maps: Vec<(usize, Map)>) -> Self {
        maps.sort_by_key(|(dim, _)| std::cmp::Reverse(*dim));
        Self(maps.into())
    }
}

/// The shape before a step, and which cell each of its outputs takes, `[outer, outputs, inner]`.
#[derive(Debug)]
pub(crate) struct Chosen {
    shape: Vec<usize>,
    cells: Cells,
}

/// The cells that outputs take.
#[derive(Debug)]
enum Cells {
    /// There are no outputs, or no cells.
    None,
    OfKernel(Vec<u32>),
    OfBurn(Box<Tensor<3, Int>>),
}

impl Operator for Maximum {
    type Saved = Vec<Chosen>;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["maximum", "maximum (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Vec<Chosen>)> {
        let mut x = inputs.remove(0);
        let mut chosen = Vec::new();
        for (dim, map) in self.0.iter() {
            let shape = x.shape().to_vec();
            let (y, cells) = along(x, *dim, map)?;
            chosen.push(Chosen { shape, cells });
            x = y;
        }
        Ok((x, chosen))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<Chosen>>) -> Result<Vec<Option<DispatchTensor>>> {
        let mut gradient = pass.cotangent;
        for ((dim, _), Chosen { shape, cells }) in self.0.iter().zip(pass.saved).rev() {
            let lines = Lines::along(shape, *dim..*dim + 1);
            gradient = match cells {
                Cells::None => blank(&gradient, shape, Some(0.0)),
                Cells::OfKernel(cells) => {
                    let dtype = gradient.dtype();
                    with_float!(dtype, E => {
                        let gradient = flex::operand::<E>(gradient)?;
                        let gradient = lines.scattered::<E>(cells, flex::elements(&gradient));
                        flex::result(gradient, shape, dtype)
                    })
                }
                Cells::OfBurn(cells) => {
                    let zeros = blank(&gradient, shape, Some(0.0));
                    let extents = vec![lines.outer, lines.cells, lines.inner];
                    let zeros = reshape::<1, 3>(Tensor::from_dispatch(zeros), extents);
                    let values =
                        reshape::<1, 3>(Tensor::from_dispatch(gradient), cells.dims().to_vec());
                    let sum = zeros.scatter(1, (**cells).clone(), values, IndexingUpdateOp::Add);
                    reshape::<3, 1>(sum, shape.clone()).into_dispatch()
                }
            };
        }
        Ok(vec![Some(gradient)])
    }
}

/// The maxima along a dim, and the cells that they are of: of equal ones the first; what is not a number is larger than all.
fn along(x: DispatchTensor, dim: usize, map: &Map) -> Result<(DispatchTensor, Cells)> {
    let mut shape = x.shape().to_vec();
    let lines = Lines::along(&shape, dim..dim + 1);
    shape[dim] = map.len();
    if x.shape().contains(&0) || shape.contains(&0) {
        return Ok((blank(&x, &shape, Some(0.0)), Cells::None));
    }
    if !flex::runs_on(&Device::new(x.device())) {
        let (y, cells) = by_selection(x, lines, map, shape);
        return Ok((y, Cells::OfBurn(Box::new(cells))));
    }
    let dtype = x.dtype();
    Ok(with_float!(dtype, E => {
        let x = flex::operand::<E>(x)?;
        let (y, cells) = maxima::<E>(lines, flex::elements(&x), map);
        (flex::result(y, &shape, dtype), Cells::OfKernel(cells))
    }))
}

#[expect(clippy::eq_op, reason = "what floats of both widths have")]
fn is_nan<E: Float>(x: E) -> bool {
    x != x
}

/// The kernel of [`along`].
fn maxima<E: Float>(lines: Lines, x: &[E], map: &Map) -> (Buffer<E>, Vec<u32>) {
    let Lines { cells, inner, .. } = lines;
    let outputs = map.len() * inner;
    let mut chosen = vec![0; lines.outer * outputs];
    let mut y = buffer::filled::<E>(chosen.len(), 0.0);
    let tasks = y.elements_mut().par_chunks_mut(outputs);
    let tasks = tasks.zip(chosen.par_chunks_mut(outputs)).enumerate();
    tasks.for_each(|(outer, (y, chosen))| {
        let x = &x[outer * cells * inner..][..cells * inner];
        let rows = y
            .chunks_exact_mut(inner)
            .zip(chosen.chunks_exact_mut(inner));
        for ((y, chosen), taps) in rows.zip(map) {
            let first = taps[0].0;
            if inner == 1 && taps[taps.len() - 1].0 + 1 == first + taps.len() {
                let place = first_of_largest(&x[first..][..taps.len()]);
                (y[0], chosen[0]) = (x[first + place], (first + place) as u32);
                continue;
            }
            y.copy_from_slice(&x[first * inner..][..inner]);
            chosen.fill(first as u32);
            for (cell, _) in &taps[1..] {
                let row = &x[cell * inner..][..inner];
                for ((y, chosen), x) in y.iter_mut().zip(&mut *chosen).zip(row) {
                    let larger = *x > *y || (is_nan(*x) && !is_nan(*y));
                    (*y, *chosen) = if larger {
                        (*x, *cell as u32)
                    } else {
                        (*y, *chosen)
                    };
                }
            }
        }
    });
    (y, chosen)
}

/// The place of the largest of some cells, of equal ones the first; what is not a number is larger than all.
fn first_of_largest<E: Float>(cells: &[E]) -> usize {
    const LANES: usize = 8;
    let (parts, rest) = cells.as_chunks::<LANES>();
    // In vectors, then the place of what was found.
    let mut most = [cells[0]; LANES];
    let mut missing = false;
    for part in parts {
        for (most, cell) in most.iter_mut().zip(part) {
            *most = if *cell > *most { *cell } else { *most };
            missing |= is_nan(*cell);
        }
    }
    let most = most.iter().chain(rest).copied();
    let most = most.reduce(|a, b| if b > a { b } else { a });
    missing |= rest.iter().any(|cell| is_nan(*cell));
    let found = match missing {
        true => cells.iter().position(|cell| is_nan(*cell)),
        false => cells.iter().position(|cell| Some(*cell) == most),
    };
    found.expect("one of the cells")
}

/// [`along`], for devices without our kernels.
fn by_selection(
    x: DispatchTensor,
    Lines {
        outer,
        cells: size,
        inner,
    }: Lines,
    map: &Map,
    shape: Vec<usize>,
) -> (DispatchTensor, Tensor<3, Int>) {
    // As many cells for every output: the last one several times.
    let longest = map.iter().map(Vec::len).max().unwrap_or(1);
    let cells = map
        .iter()
        .flat_map(|taps| (0..longest).map(|tap| taps[tap.min(taps.len() - 1)].0 as i64));
    let cells = TensorData::new(cells.collect::<Vec<i64>>(), [map.len() * longest]);
    let cells = Tensor::<1, Int>::from_data(cells, &Device::new(x.device()));
    let x = reshape::<1, 3>(Tensor::from_dispatch(x), vec![outer, size, inner]);
    let taken = x.select(1, cells.clone());
    let taken = taken.reshape([outer, map.len(), longest, inner]);
    let (y, tap) = taken.max_dim_with_indices(2);
    let cells = cells.reshape([1, map.len(), longest, 1]);
    let cells = cells
        .expand([outer, map.len(), longest, inner])
        .gather(2, tap);
    let y = reshape::<4, 1>(y, shape).into_dispatch();
    (y, cells.reshape([outer, map.len(), inner]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random;

    #[test]
    fn kernels_and_selections_agree() {
        let map: Map = [&[0, 1][..], &[1], &[1, 2, 4], &[4]]
            .map(|cells| cells.iter().map(|cell| (*cell, 1.0)).collect())
            .to_vec();
        for dim in 0..3 {
            let x = random([5, 5, 5], "x", 0).inner().into_dispatch();
            let (ours, cells) = along(x.clone(), dim, &map).unwrap();
            let lines = Lines::along(&[5, 5, 5], dim..dim + 1);
            let (burns, places) = by_selection(x, lines, &map, ours.shape().to_vec());
            let [ours, burns] = [ours, burns].map(|y| Tensor::<3>::from_dispatch(y).into_data());
            ours.assert_eq(&burns, true);
            let Cells::OfKernel(cells) = cells else {
                panic!("{cells:?}; expected those of a kernel");
            };
            let places: Vec<i64> = places.into_data().iter().collect();
            assert_eq!(
                places,
                cells
                    .iter()
                    .map(|cell| i64::from(*cell))
                    .collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn no_number_is_larger_than_all() {
        let lines = Lines::along(&[4], 0..1);
        let map: Map = vec![[0, 1, 2, 3].map(|cell| (cell, 1.0)).to_vec()];
        let (y, cells) = maxima(lines, &[1.0, f32::NAN, f32::INFINITY, f32::NAN], &map);
        assert!(y[0].is_nan() && cells == [1]);
        assert_eq!(*lines.scattered(&cells, &[2.0]), [0.0, 2.0, 0.0, 0.0]);
        for count in 1..20 {
            let mut cells: Vec<f32> = (0..count).map(|cell| ((cell * 7) % 5) as f32).collect();
            let most = cells.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = cells.iter().position(|cell| *cell == most);
            assert_eq!(Some(first_of_largest(&cells)), first);
            cells[count - 1] = f32::NAN;
            assert_eq!(first_of_largest(&cells), count - 1);
        }
    }
}
