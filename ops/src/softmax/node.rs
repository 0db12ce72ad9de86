//! Softmax and related functions along a dim, as nodes of the graph.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Element, Tensor, activation};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply};

use super::kernel::{Kind, backward, forward};
use crate::kernel::flex::{self, with_float};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::precision::highest;
use crate::reduce::but_at_zero;

/// Softmax-like function of one shard, along a whole dim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exponentials {
    pub(super) kind: Kind,
    pub(super) dim: usize,
}

impl Exponentials {
    /// Computes the result by our kernels or, on a device without them, by burn's operators.
    pub(super) fn run<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if flex::runs_on(&x.device()) {
            Tensor::from_dispatch(apply(self, [x.into_dispatch()]))
        } else {
            self.composed(x)
        }
    }

    pub(super) fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self.kind {
            Kind::Softmax => activation::softmax(x, self.dim),
            Kind::LogSoftmax => activation::log_softmax(x, self.dim),
            Kind::LogSumExp => {
                let most = x.clone().inner().max_dim(self.dim);
                let most = if x.is_autodiff() {
                    most.autodiff()
                } else {
                    most
                };
                // An infinite shift would turn an infinite result into NaN.
                let limit = highest(most.dtype());
                let most = most.clamp(-limit, limit);
                let sum = (x - most.clone()).exp().sum_dim(self.dim);
                but_at_zero(sum, f64::NEG_INFINITY, Tensor::log) + most
            }
        }
    }
}

impl Operator for Exponentials {
    /// The result; for log-sum-exp as the kernel computes it, in `f32` at least.
    type Saved = DispatchTensor;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["softmax", "softmax (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        self.kind == Kind::LogSumExp
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, DispatchTensor)> {
        let x = inputs.remove(0);
        let (dtype, mut shape) = (x.dtype(), x.shape().to_vec());
        let lines = Lines::along(&shape, self.dim..self.dim + 1);
        if self.kind == Kind::LogSumExp {
            shape[self.dim] = 1;
        }
        let wide = with_float!(dtype, E => {
            let x = flex::operand::<E>(x)?;
            let y = forward(Isa::chosen()?, self.kind, lines, flex::elements::<E>(&x));
            flex::result(y, &shape, E::dtype())
        });
        let y = flex::in_dtype(wide.clone(), dtype);
        // Rounding it to half precision would scale the gradients of its whole line.
        let saved = match self.kind {
            Kind::LogSumExp => wide,
            _ => y.clone(),
        };
        Ok((y, saved))
    }

    fn backward(
        &self,
        mut pass: BackwardPass<'_, DispatchTensor>,
    ) -> Result<Vec<Option<DispatchTensor>>> {
        let x = self.keeps(0).then(|| pass.take_input(0));
        let (y, cotangent) = (pass.saved.clone(), pass.cotangent);
        let dtype = cotangent.dtype();
        let shape = x.as_ref().unwrap_or(&y).shape().to_vec();
        let lines = Lines::along(&shape, self.dim..self.dim + 1);
        let gradient = with_float!(dtype, E => {
            let x = x.map(flex::operand::<E>).transpose()?;
            let (y, cotangent) = (flex::operand::<E>(y)?, flex::operand::<E>(cotangent)?);
            let all = [
                x.as_ref().map_or(&[][..], flex::elements::<E>),
                flex::elements(&y),
                flex::elements(&cotangent),
            ];
            flex::result(backward(Isa::chosen()?, self.kind, lines, all), &shape, dtype)
        });
        Ok(vec![Some(gradient)])
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;
    use crate::testing::{difference, random};

    const KINDS: [Kind; 3] = [Kind::Softmax, Kind::LogSoftmax, Kind::LogSumExp];

    #[test]
    fn kernels_and_burns_operators_agree() {
        for (kind, dim) in KINDS
            .into_iter()
            .flat_map(|kind| [0, 1, 2].map(|dim| (kind, dim)))
        {
            let run = |composed: bool| {
                let x = random::<3>([3, 19, 37], "x", 0).detach().require_grad();
                let function = Exponentials { kind, dim };
                let y = if composed {
                    function.composed(x.clone() * 5.0)
                } else {
                    function.run(x.clone() * 5.0)
                };
                let weight = random::<3>(y.dims(), "y", 0).detach();
                let gradients = (y.clone() * weight).sum().backward();
                [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
            };
            for (ours, burns) in run(false).iter().zip(&run(true)) {
                let off = difference(ours, burns);
                assert!(off < 2e-6, "{kind:?} along {dim}: {off:e}");
            }
        }
    }

    #[test]
    fn half_precision_is_summed_in_single_precision() {
        for dtype in [DType::BF16, DType::F16] {
            for dim in [0, 1] {
                let shape = if dim == 0 { [4096, 2] } else { [2, 4096] };
                let zeros = Tensor::<2>::zeros(shape, (&Device::flex(), dtype));
                let run = |kind| Exponentials { kind, dim }.run(zeros.clone());
                let y = run(Kind::Softmax);
                assert_eq!(y.dtype(), dtype);
                assert!(
                    y.into_data()
                        .iter::<f32>()
                        .all(|share| share == 1.0 / 4096.0)
                );
                let y = run(Kind::LogSumExp).into_data();
                let near = |y: f32| (y - 4096.0_f32.ln()).abs() < 0.04;
                assert!(y.iter::<f32>().all(near), "{y}");
            }
        }
    }

    #[test]
    fn gradients_of_logarithms_of_sums_are_exact_in_half_precision() {
        for (dtype, dim) in [DType::BF16, DType::F16]
            .into_iter()
            .flat_map(|dtype| [0, 1].map(|dim| (dtype, dim)))
        {
            let shape = if dim == 0 { [3, 2] } else { [2, 3] };
            let x = Tensor::<2>::full(shape, 100.0, (&Device::flex().autodiff(), dtype));
            let x = x.require_grad();
            let kind = Kind::LogSumExp;
            let y = Exponentials { kind, dim }.run(x.clone());
            let gradient = x.grad(&y.sum().backward()).unwrap().into_data();
            let near = |share: f32| (3.0 * share - 1.0).abs() < 0.01;
            assert!(gradient.iter::<f32>().all(near), "{gradient}");
        }
    }

    /// As in PyTorch: a line with an infinite cell has no softmax, but has a log-sum-exp, whose
    /// gradient is NaN in that cell and zero in the others. The zero gradient of a line of minus
    /// infinity is our own choice.
    #[test]
    fn infinite_cells_and_gradients() {
        const INFINITE: f32 = f32::INFINITY;
        let lines = [[0.0, INFINITE, 1.0], [-INFINITE; 3], [-INFINITE, 2.0, 2.0]];
        for dim in [0, 1] {
            let x = Tensor::<2>::from_floats(lines, &Device::flex().autodiff());
            let x = if dim == 0 { x.transpose() } else { x };
            let x = x.detach().require_grad();
            let kind = Kind::LogSumExp;
            let y = Exponentials { kind, dim }.run(x.clone());
            let gradients = y.clone().sum().backward();
            let gradient = x.grad(&gradients).unwrap();
            let gradient = if dim == 0 {
                gradient.transpose()
            } else {
                gradient
            };
            let y: Vec<f32> = y.inner().into_data().iter().collect();
            assert_eq!(y, [INFINITE, -INFINITE, 2.0 + 2.0_f32.ln()]);
            let found: Vec<f32> = gradient.into_data().iter().collect();
            assert!(
                found[1].is_nan() && [found[0], found[2]] == [0.0; 2],
                "{found:?}"
            );
            assert_eq!(found[3..], [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]);
            let kind = Kind::Softmax;
            let y = Exponentials { kind, dim }.run(x.inner()).into_data();
            assert!(
                y.iter::<f32>().filter(|value| value.is_nan()).count() == 6,
                "{y}"
            );
        }
        let one = Tensor::<1>::from_data(TensorData::from([f32::NAN, 0.0]), &Device::flex());
        let y = Exponentials {
            kind: Kind::LogSumExp,
            dim: 0,
        }
        .run(one);
        assert!(y.into_scalar::<f32>().is_nan());
    }
}
