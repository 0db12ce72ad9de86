//! Sums with weights, dim by dim.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, Recompute, blank};

use super::bands::{Row, Sums, of_bands};
use super::{Combine, Map, Taps};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::filled_bands;
use crate::kernel::local::planes;
use crate::kernel::simd::Isa;
use crate::precision::{cast, widened, wider};

/// Sums of cells with weights.
#[derive(Clone, Debug)]
pub(crate) struct Weighted(Arc<[Step]>);

/// The map of one dim.
#[derive(Debug)]
struct Step {
    dim: usize,
    map: Map,
}

impl Combine for Weighted {
    fn new(maps: Vec<(usize, Map)>) -> Self {
        let steps = maps.into_iter().map(|(dim, map)| Step { dim, map });
        Self(steps.collect())
    }
}

impl Operator for Weighted {
    /// The size of each dim before its step.
    type Saved = Vec<usize>;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["sample", "sample (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Vec<usize>)> {
        let x = inputs.remove(0);
        let sizes = self.0.iter().map(|step| x.shape()[step.dim]).collect();
        Ok((along_all(x, &self.0)?, sizes))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<usize>>) -> Result<Vec<Option<DispatchTensor>>> {
        let steps = self.0.iter().zip(pass.saved).rev();
        let steps: Vec<Step> = steps
            .map(|(Step { dim, map }, size)| Step {
                dim: *dim,
                map: transposed(map, *size),
            })
            .collect();
        Ok(vec![Some(along_all(pass.cotangent, &steps)?)])
    }
}

/// Applies the maps of different dims, in this order but for the last two dims, whose maps the CPU applies together, rows first.
fn along_all(mut x: DispatchTensor, steps: &[Step]) -> Result<DispatchTensor> {
    let last = x.shape().len() - 1;
    let on_cpu = flex::runs_on(&Device::new(x.device()));
    let number_of = |dim: usize| steps.iter().position(|step| step.dim == dim);
    let both = last
        .checked_sub(1)
        .and_then(|dim| Some([number_of(dim)?, number_of(last)?]));
    for (number, Step { dim, map }) in steps.iter().enumerate() {
        x = match both {
            Some([down, across]) if on_cpu && number == down.min(across) => {
                along_last(x, Some(&steps[down].map), &steps[across].map)?
            }
            Some([down, across]) if on_cpu && number == down.max(across) => x,
            _ if on_cpu && *dim == last => along_last(x, None, map)?,
            _ => along(x, *dim, map)?,
        };
    }
    Ok(x)
}

/// The adjoint of a map from `size` cells. A cell that no output takes is a sum of none.
fn transposed(map: &Map, size: usize) -> Map {
    let mut transposed = vec![Taps::new(); size];
    for (output, taps) in map.iter().enumerate() {
        for (cell, weight) in taps {
            transposed[*cell].push((output, *weight));
        }
    }
    transposed
}

/// Applies a map along a dim.
fn along(x: DispatchTensor, dim: usize, map: &Map) -> Result<DispatchTensor> {
    let mut shape = x.shape().to_vec();
    let extents = [
        shape[..dim].iter().product(),
        shape[dim],
        shape[dim + 1..].iter().product(),
    ];
    shape[dim] = map.len();
    if x.shape().contains(&0) || shape.contains(&0) {
        return Ok(blank(&x, &shape, Some(0.0)));
    }
    if !flex::runs_on(&Device::new(x.device())) {
        return Ok(composed(x, extents, map, &shape));
    }
    let dtype = x.dtype();
    with_float!(dtype, E => {
        let x = flex::operand::<E>(x)?;
        let y = sums(Isa::chosen()?, flex::elements::<E>(&x), extents, map);
        Ok(flex::result(y, &shape, dtype))
    })
}

/// Applies a map along the last dim, and one along the dim before it, on the CPU.
fn along_last(x: DispatchTensor, down: Option<&Map>, across: &Map) -> Result<DispatchTensor> {
    let mut shape = x.shape().to_vec();
    let last = shape.len() - 1;
    let extents = match down {
        Some(_) => planes(&shape),
        None => [1, shape[..last].iter().product(), shape[last]],
    };
    if let Some(down) = down {
        shape[last - 1] = down.len();
    }
    shape[last] = across.len();
    if x.shape().contains(&0) || shape.contains(&0) {
        return Ok(blank(&x, &shape, Some(0.0)));
    }
    let dtype = x.dtype();
    with_float!(dtype, E => {
        let x = flex::operand::<E>(x)?;
        let (down, across) = (down.map(Sums::<E>::new), Sums::new(across));
        let y = of_bands(Isa::chosen()?, flex::elements::<E>(&x), extents, down.as_ref(), &across);
        Ok(flex::result(y, &shape, dtype))
    })
}

/// The map by burn's operators, for devices without our kernels. What an output does not take does not reach it, NaN
/// included.
fn composed(
    x: DispatchTensor,
    [outer, size, inner]: [usize; 3],
    map: &Map,
    shape: &[usize],
) -> DispatchTensor {
    let (outputs, most) = (
        map.len(),
        map.iter().map(Vec::len).max().unwrap_or(0).max(1),
    );
    let (mut cells, mut weights, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for taps in map {
        for tap in 0..most {
            let (cell, weight) = taps.get(tap).copied().unwrap_or((0, 0.0));
            cells.push(cell as i64);
            weights.push(weight);
            missing.push(tap >= taps.len());
        }
    }
    let (device, dtype) = (Device::new(x.device()), x.dtype());
    let terms = [1, outputs, most, 1];
    let weights = Tensor::<4>::from_data(TensorData::new(weights, terms), (&device, wider(dtype)));
    let missing = Tensor::<4, Bool>::from_data(TensorData::new(missing, terms), &device);
    let cells = TensorData::new(cells, [outputs * most]);
    let cells = Tensor::<1, Int>::from_data(cells, &device);
    let x = crate::reshape::<1, 3>(Tensor::from_dispatch(x), vec![outer, size, inner]);
    let all = [outer, outputs, most, inner];
    let taken = crate::reshape::<3, 4>(x.select(1, cells), all.to_vec());
    let terms = (widened(taken) * weights).mask_fill(missing.expand(all), 0.0);
    let sums = cast(terms.sum_dim(2), dtype);
    crate::reshape::<4, 1>(sums, shape.to_vec()).into_dispatch()
}

/// `[outer, outputs, inner]` from `[outer, size, inner]`.
fn sums<E: Float>(isa: Isa, x: &[E], [outer, size, inner]: [usize; 3], map: &Map) -> Buffer<E> {
    let sums = Sums::new(map);
    let row = |[plane, row]: [usize; 2], output: &mut [E]| {
        let cells = &x[plane * size * inner..][..size * inner];
        isa.run(Row {
            cells,
            taps: sums.of(row),
            output,
        });
    };
    // SAFETY: the task writes all elements of its row.
    unsafe { filled_bands([outer, map.len(), inner], 1, row) }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::testing::{difference, random};

    #[test]
    fn kernels_and_burns_operators_agree() {
        let map: Map = vec![
            vec![(0, 0.5)],
            vec![(0, 0.25), (1, 0.75)],
            vec![(1, 1.0), (3, -2.0), (4, 0.5)],
        ];
        let x = random([5, 5, 5], "x", 0).inner().into_dispatch();
        for dim in 0..3 {
            let x = x.clone();
            let ours = match dim {
                2 => along_last(x.clone(), None, &map).unwrap(),
                dim => along(x.clone(), dim, &map).unwrap(),
            };
            let shape = ours.shape().to_vec();
            let extents = [5_usize.pow(dim as u32), 5, 5_usize.pow(2 - dim as u32)];
            let burns = composed(x, extents, &map, &shape);
            let [ours, burns] = [ours, burns].map(|y| Tensor::<3>::from_dispatch(y).into_data());
            assert!(difference(&ours, &burns) < 1e-6);
        }
    }

    #[test]
    fn an_output_is_made_of_its_cells_only() {
        let map: Map = vec![vec![(0, 0.5)], vec![(1, 1.0), (3, 2.0)], vec![]];
        let cells = [f32::INFINITY, 1.0, f32::NAN, 2.0];
        let x = Tensor::<1>::from_floats(cells, &Device::flex()).into_dispatch();
        for y in [
            composed(x.clone(), [1, 4, 1], &map, &[3]),
            along_last(x, None, &map).unwrap(),
        ] {
            let y = Tensor::<1>::from_dispatch(y).into_data();
            y.assert_eq(&[f32::INFINITY, 5.0, 0.0].into(), true);
        }
    }

    #[test]
    fn float_types_are_those_of_the_tensor() {
        let device = Device::flex();
        let x = Tensor::<1>::from_data([1.0, 2.0], (&device, DType::F16)).into_dispatch();
        let y = along(x, 0, &vec![vec![(0, 0.5), (1, 0.5)]]).unwrap();
        assert_eq!((y.dtype(), y.shape().to_vec()), (DType::F16, vec![1]));
    }
}
