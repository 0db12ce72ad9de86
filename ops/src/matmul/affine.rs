//! Graph node of the linear layer on one shard.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Element as BurnElement, Tensor};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};

use crate::kernel::flex::{self, Float, with_factors};
use crate::kernel::matrices::Matrix;
use crate::kernel::panels::{product, product_and_sums_over_rows, product_over_rows};
use crate::kernel::products::Products;
use crate::kernel::simd::Isa;

/// Computes `x · weight + bias` for the rows of `x`, with our kernel or, on a device without it,
/// with burn's operators.
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

/// Inputs are `x`, `weight` and, optionally, `bias`.
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
        let isa = Isa::chosen()?;
        let y = with_factors!(isa, inputs[0].dtype(), E, P => forward::<E, P>(isa, inputs));
        Ok((y?, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let isa = Isa::chosen()?;
        with_factors!(isa, pass.cotangent.dtype(), E, P => backward::<E, P>(isa, pass))
    }
}

fn forward<E: Float, P: Products<E>>(
    isa: Isa,
    inputs: Vec<DispatchTensor>,
) -> Result<DispatchTensor>
where
    P::Number: BurnElement + bytemuck::Pod,
{
    let dtype = inputs[0].dtype();
    let ([rows, size], [_, outputs]) = (dims(&inputs[0]), dims(&inputs[1]));
    let inputs = inputs.into_iter().map(flex::operand::<P::Number>);
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let x = Matrix::new(flex::elements(&inputs[0]), [rows, size]);
    let weight = Matrix::new(flex::elements(&inputs[1]), [size, outputs]);
    let y = product::<E, P>(isa, x, weight, inputs.get(2).map(flex::elements));
    Ok(flex::result(y, &[rows, outputs], dtype))
}

fn backward<E: Float, P: Products<E>>(
    isa: Isa,
    mut pass: BackwardPass<'_, ()>,
) -> Result<Vec<Option<DispatchTensor>>>
where
    P::Number: BurnElement + bytemuck::Pod,
{
    let [x, weight] = [0, 1].map(|input| pass.take_input(input));
    let dtype = pass.cotangent.dtype();
    let ([rows, size], [_, outputs]) = (dims(&x), dims(&weight));
    let wanted = pass.wanted;
    let mut gradients = vec![None; wanted.len()];
    let cotangent = flex::operand::<P::Number>(pass.cotangent)?;
    let y = Matrix::new(flex::elements(&cotangent), [rows, outputs]);
    if wanted[0] {
        let weight = flex::operand::<P::Number>(weight)?;
        let weight = Matrix::new(flex::elements(&weight), [size, outputs]);
        let gradient = product::<E, P>(isa, y, weight.transposed(), None);
        gradients[0] = Some(flex::result(gradient, &[rows, size], dtype));
    }
    let bias_wanted = wanted.get(2) == Some(&true);
    if wanted[1] || bias_wanted {
        // If only the bias wants a gradient, the product has no columns of `x`.
        let x = wanted[1]
            .then(|| flex::operand::<P::Number>(x))
            .transpose()?;
        let x = match &x {
            Some(x) => Matrix::new(flex::elements(x), [rows, size]),
            None => Matrix::new(&[], [rows, 0]),
        };
        let weight = match bias_wanted {
            false => product_over_rows::<E, P>(isa, x, y),
            true => {
                let [weight, bias] = product_and_sums_over_rows::<E, P>(isa, x, y);
                gradients[2] = Some(flex::result(bias, &[outputs], dtype));
                weight
            }
        };
        if wanted[1] {
            gradients[1] = Some(flex::result(weight, &[size, outputs], dtype));
        }
    }
    Ok(gradients)
}

fn dims(tensor: &DispatchTensor) -> [usize; 2] {
    let shape = tensor.shape();
    [shape[0], shape[1]]
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData, Tolerance};

    use super::*;
    use crate::testing::random;

    /// Result, and gradients of all inputs.
    fn results(
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
        // The rows of the last case are multiplied in parts.
        for sizes in [
            [1, 1, 1],
            [5, 7, 3],
            [300, 70, 90],
            [70, 1, 130],
            [5000, 9, 12],
        ] {
            for with_bias in [false, true] {
                let found = results(affine, sizes, with_bias);
                let expected = results(composed, sizes, with_bias);
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    found.assert_approx_eq(expected, Tolerance::<f32>::rel_abs(1e-4, 1e-4));
                }
            }
        }
    }

    #[test]
    fn a_bias_has_its_gradient_without_that_of_the_weight() {
        let [x, weight] = [[300, 7], [7, 90]].map(|shape| random::<2>(shape, "x", 0).detach());
        let bias = random::<1>([90], "bias", 0).detach().require_grad();
        let [found, expected] = [affine, composed].map(|function| {
            let y = function(x.clone(), weight.clone(), Some(bias.clone()));
            let gradients = (y.clone() * y.detach().cos()).sum().backward();
            bias.grad(&gradients).unwrap().into_data()
        });
        found.assert_approx_eq(&expected, Tolerance::<f32>::rel_abs(1e-4, 1e-4));
    }

    /// Adding up 4,096 ones in half precision would stop at 256 or 2,048.
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
