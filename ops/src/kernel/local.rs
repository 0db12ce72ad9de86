//! Operators on one shard with kernels of our own.

use std::fmt::Debug;

use burn::backend::{DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use halocline_core::Result;
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply, to_dispatch};

use crate::kernel::buffer::Buffer;
use crate::kernel::flex::{self, Float, with_float};
use crate::kernel::simd::Isa;

/// Operator on one contiguous tensor that does not communicate.
pub(crate) trait LocalOperator: Copy + Debug + Send + Sync + 'static {
    /// Names of the two passes on timelines.
    const NAMES: [&'static str; 2];

    /// Whether the gradient depends on the input's elements, not only on its shape.
    const KEEPS_INPUT: bool;

    /// Computes the result and its shape.
    fn forward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize]) -> (Buffer<E>, Vec<usize>);

    /// Computes the gradient of an input of this shape; `x` is empty if it is not
    /// [kept](Self::KEEPS_INPUT).
    fn backward<E: Float>(self, isa: Isa, x: &[E], shape: &[usize], cotangent: &[E]) -> Buffer<E>;

    /// Overwrites an unshared input with the result; returns `false` if the operator cannot.
    fn forward_in_place<E: Float>(self, _: Isa, _: &mut [E]) -> bool {
        false
    }

    /// Overwrites an unshared cotangent with the gradient of `x`; returns `false` if the operator
    /// cannot.
    fn backward_in_place<E: Float>(self, _: Isa, _x: &[E], _cotangent: &mut [E]) -> bool {
        false
    }

    /// Computes the result with burn's operators, for devices without our kernels.
    fn composed<const D: usize>(self, x: Tensor<D>) -> Tensor<D>;

    /// Computes the result with our kernels or, on a device without them, with burn's operators.
    fn run<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        if flex::runs_on(&x.device()) {
            Tensor::from_dispatch(apply(Local(self), [x.into_dispatch()]))
        } else {
            self.composed(x)
        }
    }
}

/// Graph node of a local operator.
#[derive(Debug)]
struct Local<O>(O);

impl<O: LocalOperator> Operator for Local<O> {
    /// Shape of the input.
    type Saved = Shape;

    fn names(&self) -> Option<[&'static str; 2]> {
        Some(O::NAMES)
    }

    fn keeps(&self, _: usize) -> bool {
        O::KEEPS_INPUT
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        let x = inputs.remove(0);
        let (dtype, shape, isa) = (x.dtype(), x.shape(), Isa::chosen()?);
        let y = with_float!(dtype, E => {
            let mut x = flex::operand::<E>(x)?;
            if flex::elements_mut(&mut x).is_some_and(|x: &mut [E]| self.0.forward_in_place(isa, x)) {
                return Ok((flex::in_dtype(to_dispatch::<Flex>(x), dtype), shape));
            }
            let (y, shape) = self.0.forward(isa, flex::elements::<E>(&x), &shape);
            flex::result(y, &shape, dtype)
        });
        Ok((y, shape))
    }

    fn backward(&self, mut pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let x = O::KEEPS_INPUT.then(|| pass.take_input(0));
        let (cotangent, shape, isa) = (pass.cotangent, pass.saved, Isa::chosen()?);
        let dtype = cotangent.dtype();
        let gradient = with_float!(dtype, E => {
            let x = x.map(flex::operand::<E>).transpose()?;
            let mut cotangent = flex::operand::<E>(cotangent)?;
            let x = x.as_ref().map_or(&[][..], flex::elements::<E>);
            let unshared = flex::elements_mut(&mut cotangent);
            if unshared.is_some_and(|cotangent| self.0.backward_in_place(isa, x, cotangent)) {
                return Ok(vec![Some(flex::in_dtype(to_dispatch::<Flex>(cotangent), dtype))]);
            }
            let gradient = self.0.backward(isa, x, shape, flex::elements(&cotangent));
            flex::result(gradient, shape, dtype)
        });
        Ok(vec![Some(gradient)])
    }
}

/// `[planes, rows, columns]` of a shape of at least two dims; planes combine all dims but the last
/// two.
pub(crate) fn planes(shape: &[usize]) -> [usize; 3] {
    let [outer @ .., rows, columns] = shape else {
        panic!("{shape:?}; expected two spatial dims");
    };
    [outer.iter().product(), *rows, *columns]
}

/// Replaces the last two dims of a shape.
pub(crate) fn with_planes(shape: &[usize], [_, rows, columns]: [usize; 3]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    let dims = shape.len();
    shape[dims - 2..].copy_from_slice(&[rows, columns]);
    shape
}

/// Applies a function of `[1, planes, rows, columns]` to the planes of a tensor.
pub(crate) fn by_planes<const D: usize>(
    x: Tensor<D>,
    function: impl FnOnce(Tensor<4>) -> Tensor<4>,
) -> Tensor<D> {
    let shape = x.dims();
    let [planes, rows, columns] = planes(&shape);
    let y = function(x.reshape([1, planes, rows, columns]));
    let [_, planes, rows, columns] = y.dims();
    y.reshape(Shape::from(with_planes(&shape, [planes, rows, columns])))
}

/// Checks that kernels and burn's operators produce the same values and gradients.
#[cfg(test)]
pub(crate) fn check_composed(operator: impl LocalOperator) {
    check_composed_of([2, 3, 8, 6], operator);
}

/// [`check_composed`] on a tensor of this shape.
#[cfg(test)]
pub(crate) fn check_composed_of(shape: [usize; 4], operator: impl LocalOperator) {
    check_composed_as(shape, burn::tensor::DType::F32, operator);
}

/// [`check_composed`] on a tensor of this shape and element type.
#[cfg(test)]
pub(crate) fn check_composed_as(
    shape: [usize; 4],
    dtype: burn::tensor::DType,
    operator: impl LocalOperator,
) {
    check_same(shape, dtype, |x| operator.run(x), |x| operator.composed(x));
}

/// Checks that two functions produce the same values and gradients.
#[cfg(test)]
pub(crate) fn check_same(
    shape: [usize; 4],
    dtype: burn::tensor::DType,
    ours: impl Fn(Tensor<4>) -> Tensor<4>,
    composed: impl Fn(Tensor<4>) -> Tensor<4>,
) {
    use burn::tensor::{DType, Device, Distribution, Tolerance};

    let device = Device::flex().autodiff();
    let x = Tensor::<4>::random(shape, Distribution::Uniform(-3.0, 3.0), &device).cast(dtype);
    let run = |function: &dyn Fn(Tensor<4>) -> Tensor<4>| {
        let x = x.clone().detach().require_grad();
        let y = function(x.clone());
        let weight = y.clone().detach().cos();
        let gradients = (y.clone() * weight).sum().backward();
        [y.inner(), x.grad(&gradients).unwrap()].map(Tensor::into_data)
    };
    for (ours, burns) in run(&ours).iter().zip(&run(&composed)) {
        match dtype {
            DType::F64 => ours.assert_approx_eq(burns, Tolerance::<f64>::rel_abs(1e-12, 1e-12)),
            _ => ours.assert_approx_eq(burns, Tolerance::<f32>::rel_abs(1e-6, 2e-5)),
        }
    }
}
