//! The linear layer of one shard, as a node of the graph.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use gemm::Parallelism;
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};
use rayon::prelude::*;

use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::matrices::{Matrix, multiply};
use crate::kernel::memory::Shared;
use crate::kernel::simd::Isa;
use crate::reduce::sum_of_rows;

/// Products of so many multiply-adds are shared by all threads.
const SHARED: usize = 1 << 20;
/// Elements that a task fills with the bias.
const TASK: usize = 1 << 14;

/// `x · weight + bias` of the rows of `x`, by our kernel or, on a device without it, by burn's operators.
pub(super) fn affine(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    if !flex::runs_on(&x.device()) {
        return composed(x, weight, bias);
    }
    let [x, weight] = [x, weight].map(Tensor::into_dispatch);
    Tensor::from_dispatch(match bias {
        Some(bias) => apply(Affine, [x, weight, bias.into_dispatch()]),
        None => apply(Affine, [x, weight]),
    })
}

fn composed(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let y = x.matmul(weight);
    match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    }
}

/// The inputs are `x`, `weight` and, where there is one, `bias`.
#[derive(Debug)]
struct Affine;

impl Operator for Affine {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["linear", "linear (backward)"])
    }

    fn keeps(&self, input: usize) -> bool {
        input < 2
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let dtype = inputs[0].dtype();
        let ([rows, size], [_, outputs]) = (dims(&inputs[0]), dims(&inputs[1]));
        let y = with_float!(dtype, E => {
            let inputs = inputs.into_iter().map(flex::operand::<E>);
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let x = Matrix::new(flex::elements::<E>(&inputs[0]), [rows, size]);
            let weight = Matrix::new(flex::elements(&inputs[1]), [size, outputs]);
            let y = product(x, weight, inputs.get(2).map(flex::elements));
            flex::result(y, &[rows, outputs], dtype)
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let [x, weight] = [0, 1].map(|input| pass.take_input(input));
        let dtype = pass.cotangent.dtype();
        let ([rows, size], [_, outputs]) = (dims(&x), dims(&weight));
        let wanted = |input: usize| pass.wanted.get(input) == Some(&true);
        let gradients = with_float!(dtype, E => {
            let cotangent = flex::operand::<E>(pass.cotangent)?;
            let cotangent = flex::elements::<E>(&cotangent);
            let y = Matrix::new(cotangent, [rows, outputs]);
            let of_x = wanted(0).then(|| {
                let weight = flex::operand::<E>(weight)?;
                let weight = Matrix::new(flex::elements(&weight), [size, outputs]);
                let gradient = product(y, weight.transposed(), None);
                Ok(flex::result(gradient, &[rows, size], dtype))
            });
            let of_weight = wanted(1).then(|| {
                let x = flex::operand::<E>(x)?;
                let x = Matrix::new(flex::elements(&x), [rows, size]);
                let gradient = product(x.transposed(), y, None);
                Ok(flex::result(gradient, &[size, outputs], dtype))
            });
            let of_bias = wanted(2).then(|| {
                let sums = sum_of_rows(Isa::chosen()?, cotangent, [rows, outputs]);
                Ok(flex::small_result(sums, &[outputs], dtype))
            });
            [of_x, of_weight, of_bias]
        });
        let gradients = gradients.into_iter().map(Option::transpose);
        gradients.take(pass.wanted.len()).collect()
    }
}

fn dims(tensor: &DispatchTensor) -> [usize; 2] {
    let shape = tensor.shape();
    [shape[0], shape[1]]
}

/// `a · b`, with `bias` added to every row.
fn product<E: Float>(a: Matrix<'_, E>, b: Matrix<'_, E>, bias: Option<&[E]>) -> Buffer<E> {
    let ([rows, summed], [_, columns]) = (a.size(), b.size());
    let parallelism = match rows * summed * columns {
        ..SHARED => Parallelism::None,
        _ => Parallelism::Rayon(0),
    };
    let fill = |y: Shared<E>| {
        // SAFETY: the rows of the result, which are added to only where they hold the bias.
        unsafe {
            if let Some(bias) = bias {
                fill_rows(y, rows, bias);
            }
            multiply((y.at(0), columns), a, b, bias.is_some(), parallelism);
        }
    };
    // SAFETY: a product writes all elements.
    unsafe { Buffer::filled(rows * columns, fill) }
}

/// Writes the bias to every row.
///
/// # Safety
/// The buffer must hold so many rows.
unsafe fn fill_rows<E: Float>(y: Shared<E>, rows: usize, bias: &[E]) {
    let together = (TASK / bias.len().max(1)).max(1);
    let tasks = (0..rows).into_par_iter().with_min_len(together);
    tasks.for_each(|row| {
        // SAFETY: a row of the result, of this task alone.
        unsafe {
            y.at(row * bias.len())
                .copy_from_nonoverlapping(bias.as_ptr(), bias.len());
        }
    });
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData, Tolerance};

    use super::*;
    use crate::testing::random;

    /// The result, and the gradients of all inputs.
    fn of(
        function: impl Fn(Tensor<2>, Tensor<2>, Option<Tensor<1>>) -> Tensor<2>,
        [rows, size, outputs]: [usize; 3],
        with_bias: bool,
    ) -> Vec<TensorData> {
        let x = random::<2>([rows, size], "x", 0).detach().require_grad();
        let weight = random::<2>([size, outputs], "weight", 0)
            .detach()
            .require_grad();
        let bias = with_bias.then(|| random::<1>([outputs], "bias", 0).detach().require_grad());
        let y = function(x.clone(), weight.clone(), bias.clone());
        let gradients = (y.clone() * y.clone().detach().cos()).sum().backward();
        let mut found = vec![
            y.inner(),
            x.grad(&gradients).unwrap(),
            weight.grad(&gradients).unwrap(),
        ]
        .into_iter()
        .map(Tensor::into_data)
        .collect::<Vec<_>>();
        found.extend(bias.map(|bias| bias.grad(&gradients).unwrap().into_data()));
        found
    }

    #[test]
    fn kernels_and_burns_operators_agree() {
        for sizes in [[1, 1, 1], [5, 7, 3], [300, 70, 90], [70, 1, 130]] {
            for with_bias in [false, true] {
                let found = of(affine, sizes, with_bias);
                let expected = of(composed, sizes, with_bias);
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    found.assert_approx_eq(expected, Tolerance::<f32>::rel_abs(1e-4, 1e-4));
                }
            }
        }
    }

    /// 4,096 ones in half precision would add up to 256 or 2,048.
    #[test]
    fn half_precision_is_summed_in_single_precision() {
        for dtype in [DType::BF16, DType::F16] {
            let device = burn::tensor::Device::flex();
            let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, (&device, dtype));
            let y = affine(ones([2, 4096]), ones([4096, 3]), None);
            assert_eq!(y.dtype(), dtype);
            assert!(y.into_data().iter::<f32>().all(|sum| sum == 4096.0));
        }
    }
}
