//! Sums with weights, dim by dim.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, Recompute, blank};
use pulp::{Simd, WithSimd};

use super::{Combine, Map, Taps};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::filled_bands;
use crate::kernel::simd::{Element, Isa};

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
        let mut x = inputs.remove(0);
        let mut sizes = Vec::new();
        for Step { dim, map } in self.0.iter() {
            sizes.push(x.shape()[*dim]);
            x = along(x, *dim, map)?;
        }
        Ok((x, sizes))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<usize>>) -> Result<Vec<Option<DispatchTensor>>> {
        let mut gradient = pass.cotangent;
        for (Step { dim, map }, size) in self.0.iter().zip(pass.saved).rev() {
            gradient = along(gradient, *dim, &transposed(map, *size))?;
        }
        Ok(vec![Some(gradient)])
    }
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
        return Ok(by_product(x, extents, map, &shape));
    }
    let dtype = x.dtype();
    with_float!(dtype, E => {
        let x = flex::operand::<E>(x)?;
        let y = sums(Isa::chosen()?, flex::elements::<E>(&x), extents, map);
        Ok(flex::result(y, &shape, dtype))
    })
}

/// The map as a matrix, for devices without our kernels.
fn by_product(
    x: DispatchTensor,
    [outer, size, inner]: [usize; 3],
    map: &Map,
    shape: &[usize],
) -> DispatchTensor {
    let mut matrix = vec![0.0; map.len() * size];
    for (output, taps) in map.iter().enumerate() {
        for (cell, weight) in taps {
            matrix[output * size + cell] += weight;
        }
    }
    let dtype = x.dtype();
    let options = (&Device::new(x.device()), dtype);
    let matrix = Tensor::<3>::from_data(TensorData::new(matrix, [1, map.len(), size]), options);
    let x = crate::reshape::<1, 3>(Tensor::from_dispatch(x), vec![outer, size, inner]);
    crate::reshape::<3, 1>(matrix.matmul(x), shape.to_vec()).into_dispatch()
}

/// `[outer, outputs, inner]` from `[outer, size, inner]`.
fn sums<E: Float>(isa: Isa, x: &[E], [outer, size, inner]: [usize; 3], map: &Map) -> Buffer<E> {
    let cast = |taps: &Taps| {
        taps.iter()
            .map(|(cell, weight)| (*cell, E::from_f64(*weight)))
            .collect()
    };
    let map: Vec<Vec<(usize, E)>> = map.iter().map(cast).collect();
    let outputs = map.len();
    if inner == 1 {
        let sum = |cells: &[E], taps: &[(usize, E)]| {
            let terms = taps.iter().map(|(cell, weight)| cells[*cell] * *weight);
            terms.fold(E::default(), |sum, term| sum + term)
        };
        // Neighbours may be of the same cells: in the adjoint of a mean of areas, or when cells are repeated.
        let runs: Vec<&[Vec<(usize, E)>]> = map.chunk_by(|one, next| one == next).collect();
        let line = |[_, line]: [usize; 2], mut output: &mut [E]| {
            let cells = &x[line * size..][..size];
            if 2 * runs.len() > outputs {
                for (output, taps) in output.iter_mut().zip(&map) {
                    *output = sum(cells, taps);
                }
                return;
            }
            for run in &runs {
                let (same, rest) = output.split_at_mut(run.len());
                same.fill(sum(cells, &run[0]));
                output = rest;
            }
        };
        // SAFETY: the task writes all elements of its line.
        return unsafe { filled_bands([1, outer, outputs], 1, line) };
    }
    let row = |[plane, row]: [usize; 2], output: &mut [E]| {
        let cells = &x[plane * size * inner..][..size * inner];
        isa.run(Row {
            cells,
            taps: &map[row],
            output,
        });
    };
    // SAFETY: the task writes all elements of its row.
    unsafe { filled_bands([outer, outputs, inner], 1, row) }
}

/// One output of many lines side by side.
struct Row<'a, E> {
    cells: &'a [E],
    taps: &'a [(usize, E)],
    output: &'a mut [E],
}

impl<E: Element> WithSimd for Row<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            cells,
            taps,
            output,
        } = self;
        let inner = output.len();
        let row = |cell: usize| &cells[cell * inner..][..inner];
        match taps {
            [] => output.fill(E::default()),
            [(cell, weight)] => {
                let pairs = output.iter_mut().zip(row(*cell));
                pairs.for_each(|(output, x)| *output = *x * *weight);
            }
            [(first, low), (second, high), rest @ ..] => {
                let pairs = row(*first).iter().zip(row(*second));
                let pairs = output.iter_mut().zip(pairs);
                pairs.for_each(|(output, (a, b))| *output = *a * *low + *b * *high);
                for (cell, weight) in rest {
                    let pairs = output.iter_mut().zip(row(*cell));
                    pairs.for_each(|(output, x)| *output += *x * *weight);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::testing::{difference, random};

    #[test]
    fn kernels_and_products_agree() {
        let map: Map = vec![
            vec![(0, 0.5)],
            vec![(0, 0.25), (1, 0.75)],
            vec![(1, 1.0), (3, -2.0), (4, 0.5)],
        ];
        for dim in 0..3 {
            let x = random([5, 5, 5], "x", 0).inner().into_dispatch();
            let ours = along(x.clone(), dim, &map).unwrap();
            let shape = ours.shape().to_vec();
            let extents = [5_usize.pow(dim as u32), 5, 5_usize.pow(2 - dim as u32)];
            let product = by_product(x, extents, &map, &shape);
            let [ours, product] =
                [ours, product].map(|y| Tensor::<3>::from_dispatch(y).into_data());
            assert!(difference(&ours, &product) < 1e-6);
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
