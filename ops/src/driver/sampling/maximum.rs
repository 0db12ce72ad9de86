//! Maxima, dim by dim.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, blank};
use halocline_core::tasks;
use pulp::{Simd, WithSimd};

use super::{Combine, Map, Taps};
use crate::kernel::buffer::{self, Buffer};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::{CHUNK, WIDEST};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::reshape;

/// Maximum of cells; weights are ignored. Of equal cells the first is taken, in row-major order.
#[derive(Clone, Debug)]
pub(crate) struct Maximum(Arc<[(usize, Map)]>);

impl Combine for Maximum {
    fn new(mut maps: Vec<(usize, Map)>) -> Self {
        maps.sort_by_key(|(dim, _)| *dim);
        Self(maps.into())
    }
}

/// Dim of a step, the shape before it, and the cell that each of its outputs takes, as
/// `[outer, outputs, inner]`.
#[derive(Debug)]
pub(crate) struct Chosen {
    dim: usize,
    shape: Vec<usize>,
    cells: Cells,
}

/// Cells that outputs take.
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
        let (mut chosen, mut places) = (Vec::new(), None::<Vec<u32>>);
        // The first dim goes first because its rows are long; ties are then broken by the positions
        // in earlier dims. Without positions the last dim goes first.
        let cells: usize = self.0.iter().map(|(dim, _)| x.shape()[*dim]).product();
        let moves = |(dim, map): &&(usize, Map)| !is_identity(map, x.shape()[*dim]);
        let mut steps: Vec<_> = self.0.iter().filter(moves).collect();
        let in_order = flex::runs_on(&Device::new(x.device())) && u32::try_from(cells).is_ok();
        if !in_order {
            steps.reverse();
        }
        for (number, (dim, map)) in steps.iter().enumerate() {
            let shape = x.shape().to_vec();
            let (y, cells) = along(x, *dim, map, places.as_deref())?;
            if let Cells::OfKernel(cells) = &cells
                && in_order
                && number + 1 < steps.len()
            {
                let lines = Lines::along(&shape, *dim..*dim + 1);
                places = Some(match places {
                    None => cells.clone(),
                    Some(before) => places_of(lines, cells, &before),
                });
            }
            let dim = *dim;
            chosen.push(Chosen { dim, shape, cells });
            x = y;
        }
        Ok((x, chosen))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<Chosen>>) -> Result<Vec<Option<DispatchTensor>>> {
        let mut gradient = pass.cotangent;
        for Chosen { dim, shape, cells } in pass.saved.iter().rev() {
            let lines = Lines::along(shape, *dim..*dim + 1);
            gradient = match cells {
                Cells::None => blank(&gradient, shape, Some(0.0)),
                Cells::OfKernel(cells) => {
                    let dtype = gradient.dtype();
                    with_float!(dtype, E => {
                        let gradient = flex::operand::<E>(gradient)?;
                        let gradient = lines.added::<E>(None, cells, flex::elements(&gradient));
                        let gradient = gradient.expect("cells of the lines");
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

/// Computes the maxima along a dim and the cells that they come from. NaN is larger than all
/// numbers. Of equal cells the first is taken; if `places` lists positions in earlier dims, the one
/// with the lowest position.
fn along(
    x: DispatchTensor,
    dim: usize,
    map: &Map,
    places: Option<&[u32]>,
) -> Result<(DispatchTensor, Cells)> {
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
        let (y, cells) = maxima::<E>(lines, flex::elements(&x), map, places, Isa::chosen()?);
        (flex::result(y, &shape, dtype), Cells::OfKernel(cells))
    }))
}

#[expect(clippy::eq_op, reason = "what floats of both widths have")]
#[inline(always)]
fn is_nan<E: Float>(x: E) -> bool {
    x != x
}

/// Whether every output is the cell of the same index.
fn is_identity(map: &Map, size: usize) -> bool {
    let is_same = |(output, taps): (usize, &Taps)| taps.len() == 1 && taps[0].0 == output;
    map.len() == size && map.iter().enumerate().all(is_same)
}

/// Positions that outputs come from, in this dim and the earlier ones.
fn places_of(lines: Lines, chosen: &[u32], before: &[u32]) -> Vec<u32> {
    let Lines { cells, inner, .. } = lines;
    let outputs = chosen.len() / lines.outer;
    const PART: usize = CHUNK / 16;
    let mut places = vec![0; chosen.len()];
    tasks::for_each_part(&mut places, PART, 16, |part, places| {
        for (index, place) in (part * PART..).zip(places) {
            let row = index / outputs * cells + chosen[index] as usize;
            *place = before[row * inner + index % inner] * cells as u32 + chosen[index];
        }
    });
    places
}

/// The kernel of [`along`].
fn maxima<E: Float>(
    lines: Lines,
    x: &[E],
    map: &Map,
    places: Option<&[u32]>,
    isa: Isa,
) -> (Buffer<E>, Vec<u32>) {
    let Lines {
        outer,
        cells,
        inner,
    } = lines;
    let mut chosen = vec![0; outer * map.len() * inner];
    let mut y = buffer::filled::<E>(chosen.len(), 0.0);
    let each = map.iter().map(Vec::len).sum::<usize>() * inner / map.len();
    let together = CHUNK / each.max(1);
    let y_rows = y.shared();
    tasks::for_each_part(&mut chosen, inner, together, |row, chosen| {
        // SAFETY: only this task accesses this row.
        let y = unsafe { y_rows.slice(row * inner..(row + 1) * inner) };
        let start = row / map.len() * cells * inner;
        isa.run(Row {
            x: &x[start..][..cells * inner],
            places: places.map(|places| &places[start..][..cells * inner]),
            taps: &map[row % map.len()],
            y,
            chosen,
        });
    });
    (y, chosen)
}

/// Maxima of one output along a dim.
struct Row<'a, E> {
    /// `[cells, inner]`; only the cells of the taps are read.
    x: &'a [E],
    places: Option<&'a [u32]>,
    taps: &'a [(usize, f64)],
    y: &'a mut [E],
    chosen: &'a mut [u32],
}

impl<E: Float> WithSimd for Row<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            x,
            places,
            taps,
            y,
            chosen,
        } = self;
        let (inner, first) = (y.len(), taps[0].0);
        let in_one_piece = inner == 1 && taps[taps.len() - 1].0 + 1 == first + taps.len();
        if in_one_piece {
            let cells = &x[first..][..taps.len()];
            let mut found = first_of_largest(cells);
            y[0] = cells[found];
            if let Some(places) = places {
                let places = &places[first..][..taps.len()];
                for (cell, x) in cells.iter().enumerate().skip(found + 1) {
                    if is_equal(*x, y[0]) && places[cell] < places[found] {
                        found = cell;
                    }
                }
            }
            chosen[0] = (first + found) as u32;
            return;
        }
        y.copy_from_slice(&x[first * inner..][..inner]);
        chosen.fill(first as u32);
        let Some(places) = places else {
            for (cell, _) in &taps[1..] {
                let row = &x[cell * inner..][..inner];
                for ((y, chosen), x) in y.iter_mut().zip(&mut *chosen).zip(row) {
                    (*y, *chosen) = if is_larger(*x, *y) {
                        (*x, *cell as u32)
                    } else {
                        (*y, *chosen)
                    };
                }
            }
            return;
        };
        // Some columns at a time, together with the positions of the chosen cells.
        for start in (0..inner).step_by(WIDEST) {
            let columns = start..inner.min(start + WIDEST);
            let (y, chosen) = (&mut y[columns.clone()], &mut chosen[columns.clone()]);
            let mut best = [0; WIDEST];
            best[..y.len()].copy_from_slice(&places[first * inner..][columns.clone()]);
            for (cell, _) in &taps[1..] {
                let row = &x[cell * inner..][columns.clone()];
                let places = &places[cell * inner..][columns.clone()];
                for (column, (x, place)) in row.iter().zip(places).enumerate() {
                    let (y, best) = (&mut y[column], &mut best[column]);
                    if is_larger(*x, *y) | (is_equal(*x, *y) & (place < best)) {
                        (*y, *best, chosen[column]) = (*x, *place, *cell as u32);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn is_equal<E: Float>(x: E, y: E) -> bool {
    (x == y) | (is_nan(x) & is_nan(y))
}

/// Whether `x` is larger than `y`. NaN is larger than all numbers.
#[inline(always)]
fn is_larger<E: Float>(x: E, y: E) -> bool {
    (x > y) | (is_nan(x) & !is_nan(y))
}

/// Position of the largest cell, and of equal ones the first. NaN is larger than all numbers.
#[inline(always)]
fn first_of_largest<E: Float>(cells: &[E]) -> usize {
    const LANES: usize = 8;
    let (parts, rest) = cells.as_chunks::<LANES>();
    // Finds the maximum in vectors, then its position.
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
    let found = if missing {
        cells.iter().position(|cell| is_nan(*cell))
    } else {
        cells.iter().position(|cell| Some(*cell) == most)
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
    // Pads all outputs to the same number of cells by repeating the last one.
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
            let (ours, cells) = along(x.clone(), dim, &map, None).unwrap();
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

    /// Ties are many if cells take few values; the first cell along all dims is taken, whichever
    /// dim goes first.
    #[test]
    fn of_equal_cells_the_first_is_chosen() {
        let window = |cells: &[usize]| cells.iter().map(|cell| (*cell, 1.0)).collect::<Vec<_>>();
        let maps = vec![
            (1, vec![window(&[0, 1, 2, 3]), window(&[3, 4])]),
            (2, vec![window(&[0, 1, 2]), window(&[2, 3, 4, 5])]),
            (3, vec![window(&[0, 1, 2, 3, 4]), window(&[1, 3, 6])]),
        ];
        let pool = Maximum::new(maps.clone());
        let number = |cell: usize| match cell * 7919 % 11 {
            0 if cell.is_multiple_of(3) => f32::NAN,
            value => (value / 4) as f32,
        };
        let shape = [2, 5, 6, 7];
        let values: Vec<f32> = (0..shape.iter().product()).map(number).collect();
        let x = TensorData::new(values.clone(), shape);
        let x = Tensor::<4>::from_data(x, &Device::default());
        let (y, chosen) = pool.forward(vec![x.clone().into_dispatch()]).unwrap();
        let y: Vec<f32> = Tensor::<4>::from_dispatch(y).into_data().iter().collect();
        // A gradient equal to each output's number arrives at the cell that the output takes.
        let numbers = Tensor::<1>::from_floats(
            std::array::from_fn::<f32, 16, _>(|number| number as f32 + 1.0),
            &Device::default(),
        );
        let mut gradient = numbers.reshape([2, 2, 2, 2]).into_dispatch();
        for Chosen { dim, shape, cells } in chosen.iter().rev() {
            let Cells::OfKernel(cells) = cells else {
                panic!("{cells:?}; expected those of a kernel");
            };
            let lines = Lines::along(shape, *dim..*dim + 1);
            let values = flex::operand::<f32>(gradient).unwrap();
            let sum = lines
                .added::<f32>(None, cells, flex::elements(&values))
                .unwrap();
            gradient = flex::result(sum, shape, burn::tensor::DType::F32);
        }
        let gradient: Vec<f32> = Tensor::<4>::from_dispatch(gradient)
            .into_data()
            .iter()
            .collect();
        let mut expected = vec![0.0; values.len()];
        for (output, y) in y.into_iter().enumerate() {
            let [sample, i, j, k] = [output / 8, output / 4 % 2, output / 2 % 2, output % 2];
            let [planes, rows, columns] = [&maps[0].1[i], &maps[1].1[j], &maps[2].1[k]];
            let mut best: Option<usize> = None;
            for (plane, _) in planes {
                for (row, _) in rows {
                    for (column, _) in columns {
                        let cell = ((sample * 5 + plane) * 6 + row) * 7 + column;
                        let larger = |best: usize| is_larger(values[cell], values[best]);
                        if best.is_none_or(larger) {
                            best = Some(cell);
                        }
                    }
                }
            }
            let best = best.unwrap();
            assert_eq!(y.to_bits(), values[best].to_bits());
            expected[best] += output as f32 + 1.0;
        }
        assert_eq!(gradient, expected);
    }

    #[test]
    fn no_number_is_larger_than_all() {
        let lines = Lines::along(&[4], 0..1);
        let map: Map = vec![[0, 1, 2, 3].map(|cell| (cell, 1.0)).to_vec()];
        let isa = Isa::chosen().unwrap();
        let (y, cells) = maxima(
            lines,
            &[1.0, f32::NAN, f32::INFINITY, f32::NAN],
            &map,
            None,
            isa,
        );
        assert!(y[0].is_nan() && cells == [1]);
        assert_eq!(
            *lines.added(None, &cells, &[2.0]).unwrap(),
            [0.0, 2.0, 0.0, 0.0]
        );
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
