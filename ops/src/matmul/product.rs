//! Graph node of matrix products on one shard.

use std::marker::PhantomData;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Element as BurnElement, Tensor};
use halocline_core::ops::{BackwardPass, Operator, apply};
use halocline_core::{Result, tasks};

use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_factors};
use crate::kernel::matrices::Matrix;
use crate::kernel::memory::Shared;
use crate::kernel::panels::{SHARED, are_few, dots_to, product_over_rows_to, product_to};
use crate::kernel::products::Products;
use crate::kernel::simd::Isa;

/// Maximum length of the summed dim without splitting it into shares: panels of more do not fit
/// into caches.
const LONG: usize = 1024;

/// Multiplies the matrices in the last two dims, with our kernel or, on a device without it, with
/// burn's operator.
///
/// `Tensor::matmul` records more nodes for some local shapes, and the graph must be the same on
/// every rank.
pub(super) fn products<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let ours = flex::runs_on(&a.device());
    let inputs = [a, b].map(Tensor::into_dispatch);
    Tensor::from_dispatch(match (ours, inputs) {
        (true, inputs) => apply(Product, inputs),
        (false, [a, b]) => Dispatch::float_matmul(a, b),
    })
}

#[derive(Debug)]
struct Product;

impl Operator for Product {
    type Saved = ();

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["matmul", "matmul (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let (isa, dtype) = (Isa::chosen()?, inputs[0].dtype());
        let y = with_factors!(isa, dtype, E, P => {
            let mut inputs = inputs.into_iter().map(Batch::new);
            let mut next = || inputs.next().expect("two operands");
            product::<E, P>(isa, &next()?, &next()?, dtype)
        });
        Ok((y, ()))
    }

    fn backward(&self, mut pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let (isa, dtype) = (Isa::chosen()?, pass.cotangent.dtype());
        let [a, b] = [0, 1].map(|input| pass.take_input(input));
        let wanted = pass.wanted;
        let [of_a, of_b] = with_factors!(isa, dtype, E, P => {
            let (a, b, y) = (Batch::new(a)?, Batch::new(b)?, Batch::new(pass.cotangent)?);
            [
                wanted[0].then(|| product::<E, P>(isa, &y, &b.transposed(), dtype)),
                wanted[1].then(|| product::<E, P>(isa, &a.transposed(), &y, dtype)),
            ]
        });
        Ok(vec![of_a, of_b])
    }
}

/// Computes the products of two batches of matrices.
fn product<E: Float, P: Products<E>>(
    isa: Isa,
    a: &Batch<P::Number>,
    b: &Batch<P::Number>,
    dtype: DType,
) -> DispatchTensor
where
    P::Number: BurnElement + bytemuck::Pod,
{
    let ([rows, summed], [_, columns]) = (a.size, b.size);
    let (count, size, each) = (a.starts.len(), rows * columns, rows * summed * columns);
    // SAFETY: all matrices of the result are written.
    let y = unsafe {
        Buffer::filled(count * size, |y| {
            let run = |number| {
                let operands = [a.matrix(number), b.matrix(number)];
                multiply::<E, P>(isa, operands, y.starting_at(number * size));
            };
            match each {
                ..SHARED => tasks::for_each(count, SHARED / 4 / each.max(1), run),
                _ => (0..count).for_each(run),
            }
        })
    };
    let shape = [&a.dims[..], &[rows, columns]].concat();
    flex::result(y, &shape, dtype)
}

/// Writes `a · b`.
///
/// # Safety
/// `y` must have room for it.
unsafe fn multiply<E: Float, P: Products<E>>(
    isa: Isa,
    [a, b]: [Matrix<'_, P::Number>; 2],
    y: Shared<P::Number>,
) {
    let [_, summed] = a.size();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match summed {
            ..=LONG => product_to::<E, P>(isa, [a, b], None, y),
            _ if are_few(a, b) => dots_to::<E, P>(isa, [a, b], y),
            _ => product_over_rows_to::<E, P>(isa, [a.transposed(), b], y, None),
        }
    }
}

/// Matrices in the last two dims of a tensor.
#[derive(Clone)]
struct Batch<N> {
    tensor: FlexTensor,
    /// Other dims, and the start of each matrix in memory.
    dims: Vec<usize>,
    starts: Vec<usize>,
    size: [usize; 2],
    strides: [usize; 2],
    numbers: PhantomData<N>,
}

impl<N: BurnElement + bytemuck::Pod> Batch<N> {
    fn new(tensor: DispatchTensor) -> Result<Self> {
        let tensor = flex::cast::<N>(tensor)?;
        Ok(Self::as_it_lies(&tensor).unwrap_or_else(|| {
            let tensor = flex::contiguous(tensor);
            Self::as_it_lies(&tensor).expect("cells next to each other")
        }))
    }

    /// `None` if a stride is negative.
    fn as_it_lies(tensor: &FlexTensor) -> Option<Self> {
        let layout = tensor.layout();
        let strides = layout
            .strides()
            .iter()
            .map(|stride| usize::try_from(*stride));
        let strides = strides.collect::<std::result::Result<Vec<_>, _>>().ok()?;
        let [dims @ .., rows, columns] = &layout.shape()[..] else {
            panic!("expected two dims or more");
        };
        let mut starts = vec![layout.start_offset()];
        for (size, stride) in dims.iter().zip(&strides) {
            let along = |start: usize| (0..*size).map(move |place| start + place * stride);
            starts = starts.into_iter().flat_map(along).collect();
        }
        Some(Self {
            tensor: tensor.clone(),
            dims: dims.to_vec(),
            starts,
            size: [*rows, *columns],
            strides: [strides[dims.len()], strides[dims.len() + 1]],
            numbers: PhantomData,
        })
    }

    fn matrix(&self, number: usize) -> Matrix<'_, N> {
        let storage = self.tensor.storage();
        Matrix::strided(&storage[self.starts[number]..], self.size, self.strides)
    }

    fn transposed(&self) -> Self {
        let mut turned = self.clone();
        turned.size.reverse();
        turned.strides.reverse();
        turned
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{FloatDType, TensorData, Tolerance};

    use super::*;
    use crate::testing::random;

    /// Products of two batches and both gradients, with our operator and with burn's, in a given
    /// element type.
    fn both(
        a: Tensor<3>,
        b: Tensor<3>,
        view: fn(Tensor<3>) -> Tensor<3>,
        dtype: FloatDType,
    ) -> [Vec<TensorData>; 2] {
        [true, false].map(|ours| {
            let [a, b] = [&a, &b].map(|x| x.clone().cast(dtype).detach().require_grad());
            let operands = [view(a.clone()), view(b.clone())];
            let y = match (ours, operands) {
                (true, [a, b]) => products(a, b),
                (false, [a, b]) => a.matmul(b),
            };
            let gradients = (y.clone() * y.clone().detach().cos()).sum().backward();
            let gradient = |x: Tensor<3>| x.grad(&gradients).expect("a gradient");
            [y.inner(), gradient(a), gradient(b)]
                .map(|x| x.cast(FloatDType::F32).into_data())
                .to_vec()
        })
    }

    /// Short and long sums, few and many columns; matrices divided among tasks, and matrices of one
    /// task each.
    #[test]
    fn kernels_and_burns_operator_agree() {
        let views: [fn(Tensor<3>) -> Tensor<3>; 3] = [
            |x| x,
            |x| (x.permute([0, 2, 1]) * 1.0).permute([0, 2, 1]),
            |x| x.flip([2]),
        ];
        for (batch, [rows, summed, columns]) in [
            (5, [3, 4, 2]),
            (1, [6, 4, 900]),
            (2, [70, 33, 80]),
            (1, [3, 5000, 5]),
            (2, [20, 1500, 40]),
        ] {
            let a = random::<3>([batch, rows, summed], "a", 0).detach();
            let b = random::<3>([batch, summed, columns], "b", 0).detach();
            for view in views {
                for (dtype, tolerance) in [(FloatDType::F32, 1e-3), (FloatDType::F64, 1e-5)] {
                    let [ours, burns] = both(a.clone(), b.clone(), view, dtype);
                    for (ours, burns) in ours.iter().zip(&burns) {
                        let tolerance = Tolerance::<f32>::rel_abs(tolerance, tolerance);
                        ours.assert_approx_eq(burns, tolerance);
                    }
                }
            }
        }
    }

    #[test]
    fn half_precision_is_summed_in_single_precision() {
        let device = burn::tensor::Device::default();
        for summed in [4095, 4096] {
            let ones = |shape: [usize; 3]| Tensor::<3>::ones(shape, (&device, DType::BF16));
            let y = products(ones([2, 3, summed]), ones([2, summed, 5]));
            assert_eq!(y.dtype(), DType::BF16);
            assert!(y.into_data().iter::<f32>().all(|sum| sum == 4096.0));
        }
    }
}
