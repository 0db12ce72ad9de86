//! Weighted sums, dim by dim.

use std::sync::{Arc, OnceLock};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, Recompute, blank};

use super::bands::{Row, Sums, of_rows};
use super::{Combine, Map};
use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lanes::filled_bands;
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::precision::{cast, wider};

/// Weighted sums of cells.
#[derive(Clone, Debug)]
pub(crate) struct Weighted(Arc<[Step]>);

/// Map of one dim.
#[derive(Debug)]
struct Step {
    dim: usize,
    sums: Sums<f64>,
    adjoint: OnceLock<Sums<f64>>,
}

impl Step {
    /// Adjoint map, back to `size` cells.
    fn adjoint_from(&self, size: usize) -> &Sums<f64> {
        self.adjoint.get_or_init(|| self.sums.transposed(size))
    }
}

impl Combine for Weighted {
    fn new(maps: Vec<(usize, Map)>) -> Self {
        let steps = maps.into_iter().map(|(dim, map)| Step {
            dim,
            sums: Sums::new(&map),
            adjoint: OnceLock::new(),
        });
        Self(steps.collect())
    }
}

impl Operator for Weighted {
    /// Size of each dim before its step.
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
        let steps: Vec<_> = self.0.iter().map(|step| (step.dim, &step.sums)).collect();
        Ok((along_all(x, &steps)?, sizes))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<usize>>) -> Result<Vec<Option<DispatchTensor>>> {
        let steps = self.0.iter().zip(pass.saved).rev();
        let steps = steps.map(|(step, size)| (step.dim, step.adjoint_from(*size)));
        let steps: Vec<_> = steps.collect();
        Ok(vec![Some(along_all(pass.cotangent, &steps)?)])
    }
}

/// Applies maps of different dims, in this order.
fn along_all(x: DispatchTensor, steps: &[(usize, &Sums<f64>)]) -> Result<DispatchTensor> {
    // Rounded once. `Tensor<1>` only carries the data.
    let in_dtype = |x, dtype| cast(Tensor::<1>::from_dispatch(x), dtype).into_dispatch();
    let dtype = x.dtype();
    let mut x = in_dtype(x, wider(dtype));
    for (dim, sums) in steps {
        x = along(x, *dim, sums)?;
    }
    Ok(in_dtype(x, dtype))
}

/// Applies a map along a dim.
fn along(x: DispatchTensor, dim: usize, map: &Sums<f64>) -> Result<DispatchTensor> {
    let mut shape = x.shape().to_vec();
    let lines = Lines::along(&shape, dim..dim + 1);
    shape[dim] = map.outputs();
    if x.shape().contains(&0) || shape.contains(&0) {
        return Ok(blank(&x, &shape, Some(0.0)));
    }
    if !flex::runs_on(&Device::new(x.device())) {
        return Ok(composed(x, lines, map, &shape));
    }
    let dtype = x.dtype();
    with_float!(dtype, E => {
        let (isa, x) = (Isa::chosen()?, flex::operand::<E>(x)?);
        let x = flex::elements::<E>(&x);
        let y = match lines.inner {
            1 => of_rows(isa, x, [lines.outer, lines.cells], &map.to()),
            _ => sums(isa, x, lines, map),
        };
        Ok(flex::result(y, &shape, dtype))
    })
}

/// Applies the map with burn's operators, on devices without our kernels. A cell that an output
/// does not use does not affect it, even if it is NaN.
fn composed(
    x: DispatchTensor,
    Lines {
        outer,
        cells: size,
        inner,
    }: Lines,
    map: &Sums<f64>,
    shape: &[usize],
) -> DispatchTensor {
    let outputs = map.outputs();
    let all_taps = || (0..outputs).map(|output| map.of(output));
    let most = all_taps().map(<[_]>::len).max().unwrap_or(0).max(1);
    let (mut cells, mut weights, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for taps in all_taps() {
        for tap in 0..most {
            let (cell, weight) = taps.get(tap).copied().unwrap_or((0, 0.0));
            cells.push(cell as i64);
            weights.push(weight);
            missing.push(tap >= taps.len());
        }
    }
    let (device, dtype) = (Device::new(x.device()), x.dtype());
    let terms = [1, outputs, most, 1];
    let weights = Tensor::<4>::from_data(TensorData::new(weights, terms), (&device, dtype));
    let missing = Tensor::<4, Bool>::from_data(TensorData::new(missing, terms), &device);
    let cells = TensorData::new(cells, [outputs * most]);
    let cells = Tensor::<1, Int>::from_data(cells, &device);
    let x = crate::reshape::<1, 3>(Tensor::from_dispatch(x), vec![outer, size, inner]);
    let all = [outer, outputs, most, inner];
    let taken = crate::reshape::<3, 4>(x.select(1, cells), all.to_vec());
    let terms = (taken * weights).mask_fill(missing.expand(all), 0.0);
    crate::reshape::<4, 1>(terms.sum_dim(2), shape.to_vec()).into_dispatch()
}

/// Computes `[outer, outputs, inner]` from `[outer, cells, inner]`.
fn sums<E: Float>(isa: Isa, x: &[E], lines: Lines, map: &Sums<f64>) -> Buffer<E> {
    let (sums, size) = (map.to::<E>(), lines.cells * lines.inner);
    let row = |[plane, row]: [usize; 2], output: &mut [E]| {
        isa.run(Row {
            cells: &x[plane * size..][..size],
            taps: sums.of(row),
            output,
        });
    };
    // SAFETY: the task writes all elements of its row.
    unsafe { filled_bands([lines.outer, map.outputs(), lines.inner], 1, row) }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, FloatDType};

    use super::*;
    use crate::testing::{difference, random};

    #[test]
    fn kernels_and_burns_operators_agree() {
        let map: Map = vec![
            vec![(0, 0.5)],
            vec![(0, 0.25), (1, 0.75)],
            vec![(1, 1.0), (3, -2.0), (4, 0.5)],
        ];
        let map = Sums::new(&map);
        let x = random([5, 5, 5], "x", 0).inner().into_dispatch();
        for dim in 0..3 {
            let x = x.clone();
            let ours = along(x.clone(), dim, &map).unwrap();
            let shape = ours.shape().to_vec();
            let lines = Lines::along(&[5, 5, 5], dim..dim + 1);
            let burns = composed(x, lines, &map, &shape);
            let [ours, burns] = [ours, burns].map(|y| Tensor::<3>::from_dispatch(y).into_data());
            assert!(difference(&ours, &burns) < 1e-6);
        }
    }

    #[test]
    fn an_output_is_made_of_its_cells_only() {
        let map: Map = vec![vec![(0, 0.5)], vec![(1, 1.0), (3, 2.0)], vec![]];
        let map = Sums::new(&map);
        let cells = [f32::INFINITY, 1.0, f32::NAN, 2.0];
        let x = Tensor::<1>::from_floats(cells, &Device::flex()).into_dispatch();
        for y in [
            composed(x.clone(), Lines::along(&[4], 0..1), &map, &[3]),
            along(x, 0, &map).unwrap(),
        ] {
            let y = Tensor::<1>::from_dispatch(y).into_data();
            y.assert_eq(&[f32::INFINITY, 5.0, 0.0].into(), true);
        }
    }

    #[test]
    fn half_precision_is_rounded_once() {
        let third: Map = vec![(0..3).map(|cell| (cell, 1.0 / 3.0)).collect(); 2];
        let sums = Weighted::new(vec![(0, third.clone()), (1, third)]);
        let x = random([3, 3], "x", 0).inner().cast(FloatDType::F16);
        let of = |x: Tensor<2>| {
            let (y, _) = sums.forward(vec![x.into_dispatch()]).unwrap();
            Tensor::<2>::from_dispatch(y)
        };
        let (narrow, wide) = (of(x.clone()), of(x.cast(FloatDType::F32)));
        assert_eq!((narrow.dtype(), wide.dtype()), (DType::F16, DType::F32));
        narrow
            .into_data()
            .assert_eq(&wide.cast(FloatDType::F16).into_data(), true);
    }
}
