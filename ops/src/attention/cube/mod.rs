//! Attention with CubeCL kernels: every query reaches a box of keys, one step apart in every dim.
//! Both neighborhood attention and dense attention are of this kind.
//!
//! Scores are never stored: the forward pass keeps the logarithms of the sums of exponentials, and
//! the backward pass recomputes scores, once for the gradients of queries and once for those of
//! keys and values. Every number of a result is written by one unit, which adds in a fixed order.

mod kernels;
#[cfg(test)]
mod tests;
mod windows;

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use burn_cubecl::CubeDevice;
use halocline_core::ops::{BackwardPass, Operator, apply, with_memory};
use halocline_core::{Error, Result};

use super::attended::{packed, unpacked};
use super::engine::tiles::Side;
use crate::precision::cast;
pub(super) use windows::Windows;

/// Checks that attention can be computed on a device, by these kernels or by burn's operators.
///
/// # Errors
/// f64 elements on wgpu.
pub(super) fn check(operator: &str, device: &Device, dtype: DType) -> Result<()> {
    let device = device.clone().inner();
    let is_wgpu = matches!(
        device.as_dispatch(),
        DispatchDevice::Cube(CubeDevice::Wgpu(_))
    );
    if is_wgpu && dtype == DType::F64 {
        let message = "f64 on wgpu, which has exponentials of f32 only; cast to f32";
        return Err(Error::operator(operator, message));
    }
    Ok(())
}

/// Attention of queries `[batch, *cells, heads, width]`, multiplied by the scale, to keys and
/// values concatenated, `[batch, *cells, key_heads, width + value_width]`. All have f32 or f64
/// elements, and none is empty. The result has `dtype`, or that of the operands if the logarithms
/// are its last column.
pub(super) fn attention<const D: usize>(
    q: Tensor<D>,
    pairs: Tensor<D>,
    windows: Windows,
    with_lse: bool,
    dtype: DType,
) -> Tensor<D> {
    let operator = Attention { windows, with_lse };
    let y = apply(operator, [q.into_dispatch(), pairs.into_dispatch()]);
    let y = Tensor::from_dispatch(y);
    if with_lse { y } else { cast(y, dtype) }
}

/// Attention as a node of the graph.
#[derive(Debug)]
struct Attention {
    windows: Windows,
    with_lse: bool,
}

/// Outputs and logarithms of the forward pass, kept for the backward pass.
struct Saved {
    output: DispatchTensor,
    lse: DispatchTensor,
}

impl Operator for Attention {
    type Saved = Saved;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["attention", "attention (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Saved)> {
        let (pairs, q) = (inputs.remove(1), inputs.remove(0));
        let table = self.table(Side::Queries, &q);
        let [output, lse] = with_memory([q, pairs, table], |memory| {
            kernels::forward(memory, &self.windows)
        });
        let result = packed(&output, &lse, self.with_lse);
        Ok((result, Saved { output, lse }))
    }

    fn backward(&self, mut pass: BackwardPass<'_, Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let [q, pairs] = [0, 1].map(|input| pass.take_input(input));
        let (cotangent, of_lse) = unpacked(pass.cotangent, self.with_lse);
        let numbers = numbers(pass.saved, &cotangent, of_lse);
        let query = pass.wanted[0].then(|| {
            let table = self.table(Side::Queries, &q);
            let inputs = [&q, &pairs, &cotangent, &numbers, &table].map(Clone::clone);
            let [gradient] = with_memory(inputs, |memory| {
                kernels::query_gradients(memory, &self.windows)
            });
            gradient
        });
        let key = pass.wanted[1].then(|| {
            let table = self.table(Side::Keys, &q);
            let inputs = [q, pairs, cotangent, numbers, table];
            let [gradient] = with_memory(inputs, |memory| {
                kernels::key_gradients(memory, &self.windows)
            });
            gradient
        });
        Ok(vec![query, key])
    }
}

impl Attention {
    /// Copies the table of a side to the device of a tensor.
    fn table(&self, side: Side, like: &DispatchTensor) -> DispatchTensor {
        let table = self.windows.table(side);
        let entries = [table.len()];
        let data = TensorData::new(table, entries);
        Dispatch::int_from_data(data, &like.device())
    }
}

/// Returns, for every row, the logarithm, and the product of output and gradient less the gradient
/// of the logarithm: the numbers of a query that the backward pass needs in addition to vectors.
fn numbers(
    saved: &Saved,
    cotangent: &DispatchTensor,
    of_lse: Option<DispatchTensor>,
) -> DispatchTensor {
    let shape = cotangent.shape();
    let width = shape[shape.len() - 1];
    let rows = shape.num_elements() / width;
    let flat = |tensor: DispatchTensor, width: usize| {
        let tensor = Dispatch::float_reshape(tensor, Shape::from([rows, width]));
        Tensor::<2>::from_dispatch(tensor)
    };
    let products = flat(saved.output.clone(), width) * flat(cotangent.clone(), width);
    let mut products = products.sum_dim(1);
    if let Some(of_lse) = of_lse {
        products = products - flat(of_lse, 1);
    }
    Tensor::cat(vec![flat(saved.lse.clone(), 1), products], 1).into_dispatch()
}
