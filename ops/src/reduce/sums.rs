//! Sums over dims of one shard, as nodes of the graph.

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, apply, blank};

use super::kernel::{Term, backward, forward};
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::lines::Lines;
use crate::kernel::simd::Isa;
use crate::precision::{widened, wider};

/// Sums the cells of `dims`, times `scale`, in at least f32.
pub(super) fn sums<const D: usize>(x: Tensor<D>, dims: &[usize], scale: f64) -> Tensor<D> {
    if !flex::runs_on(&x.device()) {
        return widened(x).sum_dims(dims) * scale;
    }
    let mut ranges = ranges(dims);
    let Some(last) = ranges.pop() else {
        return widened(x) * scale;
    };
    let one = |x: Tensor<D>, dims: Range<usize>, scale| {
        let sum = Sums {
            dims,
            squares: false,
            scale,
        };
        Tensor::from_dispatch(apply(sum, [x.into_dispatch()]))
    };
    let x = ranges.into_iter().fold(x, |x, dims| one(x, dims, 1.0));
    one(x, last, scale)
}

/// Sums the squared distances of the cells of `dims` from `middle`, or their squares if it is
/// `None`, times `scale`, in at least f32. `middle` has one cell in these dims and no gradient.
pub(super) fn squares<const D: usize>(
    x: Tensor<D>,
    middle: Option<Tensor<D>>,
    dims: &[usize],
    scale: f64,
) -> Tensor<D> {
    let ranges = ranges(dims);
    let kernels = flex::runs_on(&x.device());
    let ([dims], true) = (&ranges[..], kernels) else {
        let away = match middle {
            Some(middle) => x - middle,
            None => x,
        };
        return sums(widened(away).square(), dims, scale);
    };
    let sum = Sums {
        dims: dims.clone(),
        squares: true,
        scale,
    };
    let x = x.into_dispatch();
    Tensor::from_dispatch(match middle {
        Some(middle) => apply(sum, [x, middle.into_dispatch()]),
        None => apply(sum, [x]),
    })
}

/// Groups dims into ranges of adjacent ones.
pub(super) fn ranges(dims: &[usize]) -> Vec<Range<usize>> {
    let mut sorted = dims.to_vec();
    sorted.sort_unstable();
    let mut found: Vec<Range<usize>> = Vec::new();
    for dim in sorted {
        match found.last_mut() {
            Some(last) if last.end == dim => last.end += 1,
            _ => found.push(dim..dim + 1),
        }
    }
    found
}

/// Sum over adjacent dims: of cells, or of squares of their distances from the second input.
#[derive(Clone, Debug)]
struct Sums {
    dims: Range<usize>,
    squares: bool,
    scale: f64,
}

impl Sums {
    fn term<'a, E: Float>(&self, middles: Option<&'a [E]>) -> Term<'a, E> {
        match middles {
            _ if !self.squares => Term::Cell,
            Some(middles) => Term::Distance(middles),
            None => Term::Square,
        }
    }

    /// Computes the gradient of the cells.
    fn gradient(&self, pass: BackwardPass<'_, (Shape, DType)>) -> Result<DispatchTensor> {
        let (shape, dtype) = (&pass.saved.0, pass.saved.1);
        if shape.contains(&0) {
            return Ok(blank(&flex::in_dtype(pass.cotangent, dtype), shape, None));
        }
        if !self.squares {
            // A view of one number per line: operators that use it need not read a tensor of the
            // full shape.
            let one = Dispatch::float_mul_scalar(pass.cotangent, self.scale.into());
            let one = flex::in_dtype(one, dtype);
            return Ok(Dispatch::float_expand(one, shape.clone()));
        }
        let lines = Lines::along(shape, self.dims.clone());
        Ok(with_float!(dtype, E => {
            let inputs = pass.inputs.into_iter().flatten().map(flex::operand::<E>);
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let cotangent = flex::operand::<E>(pass.cotangent)?;
            let x = inputs.first().map_or(&[][..], flex::elements::<E>);
            let term = self.term(inputs.get(1).map(flex::elements::<E>));
            let cotangent = flex::elements(&cotangent);
            let found = backward(Isa::chosen()?, lines, x, term, cotangent, self.scale);
            flex::result(found, shape, dtype)
        }))
    }
}

impl Operator for Sums {
    /// Shape and dtype of the input.
    type Saved = (Shape, DType);

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(["sum", "sum (backward)"])
    }

    fn keeps(&self, _: usize) -> bool {
        self.squares
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Self::Saved)> {
        let (dtype, shape) = (inputs[0].dtype(), inputs[0].shape());
        let lines = Lines::along(&shape, self.dims.clone());
        let mut reduced = shape.to_vec();
        reduced[self.dims.clone()].fill(1);
        let y = with_float!(dtype, E => {
            let inputs = inputs.into_iter().map(flex::operand::<E>).collect::<Result<Vec<_>>>()?;
            let term = self.term(inputs.get(1).map(flex::elements::<E>));
            let y = forward(Isa::chosen()?, lines, flex::elements(&inputs[0]), term, self.scale);
            flex::small_result(y, &reduced, wider(dtype))
        });
        Ok((y, (shape, dtype)))
    }

    fn backward(&self, pass: BackwardPass<'_, Self::Saved>) -> Result<Vec<Option<DispatchTensor>>> {
        let mut gradients = vec![None; pass.wanted.len()];
        gradients[0] = Some(self.gradient(pass)?);
        Ok(gradients)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, FloatDType};

    use super::*;
    use crate::testing::{difference, random};

    /// Covers contiguous and strided lines, and lines longer than a block.
    #[test]
    fn kernels_and_burns_operators_agree() {
        for (shape, dims) in [
            ([3, 700, 37], &[1][..]),
            ([2, 5, 5000], &[2]),
            ([3, 19, 37], &[0, 1]),
            ([3, 19, 37], &[0, 2]),
            ([3, 19, 37], &[0, 1, 2]),
        ] {
            let results = |middle: Option<Tensor<3>>, composed: bool, kind: usize| {
                let x = random::<3>(shape, "x", 0).detach().require_grad();
                let y = match (kind, composed) {
                    (0, true) => x.clone().sum_dims(dims) * 0.5,
                    (0, false) => sums(x.clone(), dims, 0.5),
                    (_, true) => {
                        let middle =
                            middle.unwrap_or_else(|| x.clone().inner().zeros_like().autodiff());
                        (x.clone() - middle).square().sum_dims(dims) * 0.5
                    }
                    (_, false) => squares(x.clone(), middle, dims, 0.5),
                };
                let weight = random::<3>(y.dims(), "y", 0).detach();
                let gradients = (y.clone() * weight).sum().backward();
                [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
            };
            let mut reduced = shape;
            dims.iter().for_each(|&dim| reduced[dim] = 1);
            let middle = random::<3>(reduced, "middle", 0).detach();
            for (middle, kind) in [(None, 0), (None, 1), (Some(middle), 1)] {
                let (ours, burns) = (
                    results(middle.clone(), false, kind),
                    results(middle, true, kind),
                );
                for (ours, burns) in ours.iter().zip(&burns) {
                    assert!(
                        difference(ours, burns) < 2e-6,
                        "{shape:?}, {dims:?}, {kind}"
                    );
                }
            }
        }
    }

    /// Sums of ones in half precision would stop at 256 (bf16) or 2048 (f16).
    #[test]
    fn half_precision_is_summed_in_single_precision() {
        let device = Device::flex();
        for dtype in [DType::BF16, DType::F16] {
            let ones = Tensor::<3>::ones([2, 4096, 3], (&device, dtype));
            let all = |y: Tensor<3>, value: f32| {
                assert!(y.into_data().iter::<f32>().all(|sum| sum == value));
            };
            assert_eq!(sums(ones.clone(), &[1], 1.0).dtype(), DType::F32);
            all(sums(ones.clone(), &[1], 1.0), 4096.0);
            all(sums(ones.clone(), &[0, 2], 0.5), 3.0);
            all(squares(ones.clone(), None, &[1], 1.0), 4096.0);
            let middle = Tensor::<3>::ones([2, 1, 3], (&device, dtype)) * 3.0;
            all(squares(ones, Some(middle), &[1], 1.0), 16384.0);
            // The gradient of a mean of many cells is rounded once: the factor needs more digits
            // than half precision has.
            let x = Tensor::<3>::ones([1, 4096, 1], (&device, dtype)).autodiff();
            let x = x.require_grad();
            let loss = sums(x.clone(), &[1], 257.0 / (1 << 26) as f64) * 3072.0;
            let gradient = x.grad(&loss.backward()).unwrap();
            let exact = Tensor::<1>::from_floats([771.0 / 65536.0], &device);
            let expected: f32 = exact.cast(FloatDType::from(dtype)).into_scalar();
            assert_eq!(gradient.dtype(), dtype);
            all(gradient, expected);
        }
    }
}
