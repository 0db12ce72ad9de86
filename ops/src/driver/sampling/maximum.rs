//! Maxima, dim by dim.

use std::borrow::Cow;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use halocline_core::comm::Operation;
use halocline_core::ops::{self, BackwardPass, Exchange, Operator, blank};
use halocline_core::{Error, IndexBox, Result, ShardTensor, Traffic, tasks};

use super::largest::maxima;
use super::{Combine, Map, Rest, Taps, in_stages};
use crate::kernel::flex::{self, with_float};
use crate::kernel::lanes::CHUNK;
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::{reshape, reshape_any};

/// Maximum of cells of `[batch, channels, *spatial]`; weights are ignored. Of equal cells the first
/// is taken, in row-major order of the field, of several NaN the last.
#[derive(Clone, Debug)]
pub(crate) struct Maximum(Arc<[(usize, Map)]>);

impl Combine for Maximum {
    fn new(mut maps: Vec<(usize, Map)>) -> Self {
        maps.sort_by_key(|(dim, _)| *dim);
        Self(maps.into())
    }

    /// The first cell of a part may come before that of an earlier part, unless the second stage
    /// runs over dims that come before those of the first stage.
    fn then<const D: usize>(
        &self,
        x: ShardTensor<D>,
        operator: &'static str,
        rest: &Rest<Self>,
    ) -> Result<Tensor<D>> {
        let (last, first) = (rest.stage.0.last(), self.0.first());
        let in_order = last.is_none_or(|(last, _)| first.is_none_or(|(first, _)| last <= first));
        let sizes = x.layout().shape().to_vec();
        // Positions are exchanged as i32.
        if in_order || i32::try_from(sizes[2..].iter().product::<usize>()).is_err() {
            return in_stages(self, x, operator, rest);
        }
        let held = x.layout().local_box(x.mesh().position());
        let (local, _, mesh) = x.into_parts();
        let operation = Operation::new(operator, Traffic::Exchange, Some(&rest.middle));
        let (comm, ranks) = (mesh.comm().clone(), mesh.shape().ranks().into());
        let staged = Staged {
            first: self.clone(),
            exchange: Exchange::with_adjoint(operation, comm, ranks, rest.exchange.clone()),
            rest: rest.stage.clone(),
            held,
            sizes,
        };
        Error::catch(|| Tensor::from_dispatch(ops::apply(staged, [local.into_dispatch()])))
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

impl Cells {
    /// Index of each cell in its line.
    fn indices(&self) -> Cow<'_, [u32]> {
        match self {
            Self::None => Cow::Owned(Vec::new()),
            Self::OfKernel(cells) => Cow::Borrowed(cells.as_slice()),
            Self::OfBurn(cells) => Cow::Owned((**cells).clone().into_data().iter().collect()),
        }
    }
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
        self.reduced(inputs.remove(0), None)
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<Chosen>>) -> Result<Vec<Option<DispatchTensor>>> {
        Ok(vec![Some(spread(pass.cotangent, pass.saved)?)])
    }
}

impl Maximum {
    /// Computes the maxima dim by dim. `given` are positions of the cells of `x`, if their order is
    /// not that of `x`.
    fn reduced(
        &self,
        mut x: DispatchTensor,
        given: Option<Vec<u32>>,
    ) -> Result<(DispatchTensor, Vec<Chosen>)> {
        let is_given = given.is_some();
        let (mut chosen, mut places) = (Vec::new(), given);
        // The first dim goes first because its rows are long; ties are then broken by the positions
        // in earlier dims, or by those given. Without positions the last dim goes first.
        let cells: usize = self.0.iter().map(|(dim, _)| x.shape()[*dim]).product();
        let moves = |(dim, map): &&(usize, Map)| !is_identity(map, x.shape()[*dim]);
        let mut steps: Vec<_> = self.0.iter().filter(moves).collect();
        let by_kernel = flex::runs_on(&Device::new(x.device()));
        let in_order = is_given || (by_kernel && u32::try_from(cells).is_ok());
        if !in_order {
            steps.reverse();
        }
        for (number, (dim, map)) in steps.iter().enumerate() {
            let shape = x.shape().to_vec();
            let (y, cells) = along(x, *dim, map, places.as_deref())?;
            if in_order && number + 1 < steps.len() && !matches!(cells, Cells::None) {
                let (lines, indices) = (Lines::along(&shape, *dim..*dim + 1), cells.indices());
                let extended = |place: u32, index: u32| place * lines.cells as u32 + index;
                places = Some(match places {
                    None => indices.into_owned(),
                    Some(before) if is_given => {
                        places_of(lines, &indices, &before, |place, _| place)
                    }
                    Some(before) => places_of(lines, &indices, &before, extended),
                });
            }
            let dim = *dim;
            chosen.push(Chosen { dim, shape, cells });
            x = y;
        }
        Ok((x, chosen))
    }
}

/// Adjoint of the steps: the gradient of an output goes to the cell that it takes.
fn spread(mut gradient: DispatchTensor, chosen: &[Chosen]) -> Result<DispatchTensor> {
    for Chosen { dim, shape, cells } in chosen.iter().rev() {
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
    Ok(gradient)
}

/// Both stages, in which the cells of the middle stage travel with their positions in the field.
#[derive(Debug)]
struct Staged {
    first: Maximum,
    exchange: Exchange,
    rest: Maximum,
    /// Cells of this rank.
    held: IndexBox,
    /// Shape of the field.
    sizes: Vec<usize>,
}

impl Operator for Staged {
    /// Steps of the two stages.
    type Saved = [Vec<Chosen>; 2];

    fn names(&self) -> Option<[&'static str; 2]> {
        self.first.names()
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Self::Saved)> {
        let (parts, first) = self.first.reduced(inputs.remove(0), None)?;
        let places = self.positions(&parts, &first);
        let (parts, ()) = self.exchange.forward(vec![parts])?;
        let (places, ()) = self.exchange.forward(vec![places])?;
        let count = places.shape().num_elements();
        let places = reshape_any::<1, 1, Int>(Tensor::from_dispatch(places), vec![count]);
        let places = places.into_data().iter().collect();
        let (y, rest) = self.rest.reduced(parts, Some(places))?;
        Ok((y, [first, rest]))
    }

    fn backward(&self, pass: BackwardPass<'_, Self::Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let [first, rest] = pass.saved;
        let parts = spread(pass.cotangent, rest)?;
        let (parts, ()) = self.exchange.clone().reversed().forward(vec![parts])?;
        Ok(vec![Some(spread(parts, first)?)])
    }
}

impl Staged {
    /// Positions in the spatial dims of the field, in row-major order, of the cells that the first
    /// stage takes.
    fn positions(&self, parts: &DispatchTensor, chosen: &[Chosen]) -> DispatchTensor {
        let shape = parts.shape().to_vec();
        let count: usize = shape.iter().product();
        let indices: Vec<_> = chosen.iter().map(|step| step.cells.indices()).collect();
        let mut cell = vec![0; shape.len()];
        let position = |output: usize| {
            let mut left = output;
            for (place, size) in cell.iter_mut().zip(&shape).rev() {
                *place = left % size;
                left /= size;
            }
            // From the output back to the cell; a step changes the size of its own dim alone.
            let mut after = &shape[..];
            for (step, indices) in chosen.iter().zip(&indices).rev() {
                let pairs = cell.iter().zip(after);
                let number = pairs.fold(0_usize, |number, (place, size)| number * size + place);
                cell[step.dim] = indices[number] as usize;
                after = &step.shape;
            }
            let spatial = 2..cell.len();
            spatial.fold(0_usize, |number, dim| {
                number * self.sizes[dim] + self.held.ranges()[dim].start + cell[dim]
            }) as i32
        };
        let positions: Vec<i32> = (0..count).map(position).collect();
        let device = Device::new(parts.device());
        let positions = TensorData::new(positions, [count]);
        let positions = Tensor::<1, Int>::from_data(positions, (&device, DType::I32));
        reshape_any::<1, 1, Int>(positions, shape).into_dispatch()
    }
}

/// Computes the maxima along a dim and the cells that they come from. NaN is larger than all
/// numbers. Of equal cells the first is taken; if `places` lists positions of the cells, the one
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
        let (y, cells) = by_selection(x, lines, map, shape, places);
        return Ok((y, Cells::OfBurn(Box::new(cells))));
    }
    let dtype = x.dtype();
    Ok(with_float!(dtype, E => {
        let x = flex::operand::<E>(x)?;
        let (y, cells) = maxima::<E>(lines, flex::elements(&x), map, places, Isa::chosen()?);
        (flex::result(y, &shape, dtype), Cells::OfKernel(cells))
    }))
}

/// Whether every output is the cell of the same index.
fn is_identity(map: &Map, size: usize) -> bool {
    let is_same = |(output, taps): (usize, &Taps)| taps.len() == 1 && taps[0].0 == output;
    map.len() == size && map.iter().enumerate().all(is_same)
}

/// Positions that outputs come from: `position` of that before this step, and the index in this
/// dim.
fn places_of(
    lines: Lines,
    chosen: &[u32],
    before: &[u32],
    position: impl Fn(u32, u32) -> u32 + Sync,
) -> Vec<u32> {
    let Lines { cells, inner, .. } = lines;
    let outputs = chosen.len() / lines.outer;
    const PART: usize = CHUNK / 16;
    let mut places = vec![0; chosen.len()];
    tasks::for_each_part(&mut places, PART, 16, |part, places| {
        for (index, place) in (part * PART..).zip(places) {
            let row = index / outputs * cells + chosen[index] as usize;
            *place = position(before[row * inner + index % inner], chosen[index]);
        }
    });
    places
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
    places: Option<&[u32]>,
) -> (DispatchTensor, Tensor<3, Int>) {
    // Pads all outputs to the same number of cells by repeating the last one.
    let longest = map.iter().map(Vec::len).max().unwrap_or(1);
    let cells = map
        .iter()
        .flat_map(|taps| (0..longest).map(|tap| taps[tap.min(taps.len() - 1)].0 as i64));
    let cells = TensorData::new(cells.collect::<Vec<i64>>(), [map.len() * longest]);
    let device = Device::new(x.device());
    let cells = Tensor::<1, Int>::from_data(cells, &device);
    let x = reshape::<1, 3>(Tensor::from_dispatch(x), vec![outer, size, inner]);
    let taken = x.select(1, cells.clone());
    let taken = taken.reshape([outer, map.len(), longest, inner]);
    let (y, tap) = match places {
        None => taken.max_dim_with_indices(2),
        Some(places) => {
            let places: Vec<i32> = places.iter().map(|place| *place as i32).collect();
            let places = TensorData::new(places, [outer, size, inner]);
            let places = Tensor::<3, Int>::from_data(places, (&device, DType::I32));
            let places = places.select(1, cells.clone());
            let places = places.reshape([outer, map.len(), longest, inner]);
            let y = taken.clone().max_dim(2);
            let lower = taken.lower(y.clone().expand([outer, map.len(), longest, inner]));
            (y, places.mask_fill(lower, i32::MAX).argmin(2))
        }
    };
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
    use crate::driver::sampling::largest::is_larger;
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
            let (burns, places) = by_selection(x, lines, &map, ours.shape().to_vec(), None);
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
    fn of_equal_cells_that_with_the_lowest_position_is_chosen() {
        let map: Map = vec![[0, 1, 2].map(|cell| (cell, 1.0)).to_vec()];
        let places = [5, 0, 2, 1, 3, 4]; // [cells, columns]
        let x = Tensor::<2>::from([[7.0, 7.0], [7.0, 1.0], [7.0, 7.0]]).into_dispatch();
        let (_, cells) = along(x.clone(), 0, &map, Some(&places[..])).unwrap();
        assert_eq!(*cells.indices(), [1, 0]);
        let lines = Lines::along(&[3, 2], 0..1);
        let (_, cells) = by_selection(x, lines, &map, vec![1, 2], Some(&places[..]));
        assert_eq!(cells.into_data().iter::<u32>().collect::<Vec<_>>(), [1, 0]);
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
}
