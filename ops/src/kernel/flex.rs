//! Conversion between tensors of the CPU backend and the views and buffers of kernels.

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{
    BackendTensor, Dispatch, DispatchTensor, DispatchTensorKind, Flex, TensorMetadata,
};
use burn::tensor::{DType, Element as BurnElement, Int, IntDType, Shape, Tensor};
use burn_std::Bytes;
pub(crate) use halocline_core::memory::{elements, elements_mut, is_cpu as runs_on};
use halocline_core::ops::{from_dispatch, in_order, to_dispatch};
use halocline_core::{IndexBox, Result};

use crate::kernel::buffer::Buffer;
use crate::kernel::memory::View;
use crate::kernel::simd::Element;
use crate::kernel::widths;

/// Float type of both burn and kernels.
pub(crate) trait Float: Element + BurnElement + bytemuck::Pod {}

impl Float for f32 {}
impl Float for f64 {}

/// Views a tensor `[batch, channels, *spatial]` with three spatial dims; missing leading ones have
/// size one.
pub(crate) fn field<N: BurnElement + bytemuck::Pod>(tensor: &FlexTensor) -> View<'_, N> {
    let whole = IndexBox::whole(&tensor.layout().shape()[..]);
    field_box(tensor, &whole, &[])
}

/// Views a box of a tensor as [`field`] does, with some dims reversed.
pub(crate) fn field_box<'a, N: BurnElement + bytemuck::Pod>(
    tensor: &'a FlexTensor,
    cells: &IndexBox,
    flip: &[bool],
) -> View<'a, N> {
    let layout = tensor.layout();
    let mut start = layout.start_offset() as isize;
    let (mut shape, mut strides) = ([1; 5], [0; 5]);
    let missing = 5 - cells.ranges().len();
    for (dim, range) in cells.ranges().iter().enumerate() {
        let place = if dim < 2 { dim } else { dim + missing };
        let stride = layout.strides()[dim];
        let flipped = flip.get(dim) == Some(&true) && !range.is_empty();
        let first = if flipped { range.end - 1 } else { range.start };
        start += first as isize * stride;
        shape[place] = range.len();
        strides[place] = if flipped { -stride } else { stride };
    }
    View::new(tensor.storage(), start as usize, shape, strides)
}

/// Evaluates an expression with the float type that kernels use for a dtype: `f64` for `f64`,
/// otherwise `f32`.
macro_rules! with_float {
    ($dtype:expr, $float:ident => $expression:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $float = f64;
                $expression
            }
            _ => {
                type $float = f32;
                $expression
            }
        }
    };
}
pub(crate) use with_float;

/// Evaluates an expression with the stored element type of a tensor, for kernels that only move
/// elements.
macro_rules! with_numbers {
    ($dtype:expr, $number:ident => $expression:expr) => {
        match $dtype {
            burn::tensor::DType::BF16 => {
                type $number = burn::tensor::bf16;
                $expression
            }
            burn::tensor::DType::F16 => {
                type $number = burn::tensor::f16;
                $expression
            }
            dtype => crate::kernel::flex::with_float!(dtype, $number => $expression),
        }
    };
}
pub(crate) use with_numbers;

/// Evaluates an expression with the types of sums and of products for a dtype, for kernels that
/// read factors in place. bf16 is read in place, as pairs, if the instruction set multiplies pairs
/// fast; other types except `f64` are cast to `f32`.
macro_rules! with_factors {
    ($isa:expr, $dtype:expr, $float:ident, $products:ident => $expression:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $float = f64;
                type $products = crate::kernel::products::Numbers;
                $expression
            }
            burn::tensor::DType::BF16 if crate::kernel::products::Pairs::are_fast($isa) => {
                type $float = f32;
                type $products = crate::kernel::products::Pairs;
                $expression
            }
            _ => {
                type $float = f32;
                type $products = crate::kernel::products::Numbers;
                $expression
            }
        }
    };
}
pub(crate) use with_factors;

/// [`with_factors`] for kernels that widen bf16 numbers as they read them if pairs are not
/// multiplied fast.
macro_rules! with_products {
    ($isa:expr, $dtype:expr, $float:ident, $products:ident => $expression:expr) => {
        match $dtype {
            burn::tensor::DType::BF16 if !crate::kernel::products::Pairs::are_fast($isa) => {
                type $float = f32;
                type $products = crate::kernel::products::Halves;
                $expression
            }
            dtype => crate::kernel::flex::with_factors!(
                $isa, dtype, $float, $products => $expression
            ),
        }
    };
}
pub(crate) use with_products;

/// Casts a tensor to the element type of a kernel.
pub(crate) fn cast<E: BurnElement>(tensor: DispatchTensor) -> Result<FlexTensor> {
    from_dispatch::<Flex>(in_dtype(tensor, E::dtype()))
}

/// Returns the tensor, copied in parallel if it is not contiguous.
pub(crate) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        from_dispatch::<Flex>(in_order(to_dispatch::<Flex>(tensor))).expect("a tensor of the CPU")
    }
}

/// Casts a tensor to the element type of a kernel and makes it contiguous.
pub(crate) fn operand<E: BurnElement>(tensor: DispatchTensor) -> Result<FlexTensor> {
    cast::<E>(tensor).map(contiguous)
}

/// Casts narrow and unsigned integers to signed ones that hold every cell number: `i64` on CPUs,
/// `i32` on other devices. Operators convert a scalar to the type of their tensor: as a `u8`, 256
/// is 0.
pub(crate) fn signed<const D: usize>(x: Tensor<D, Int>) -> Tensor<D, Int> {
    match x.dtype() {
        DType::I64 | DType::I32 => x,
        _ if runs_on(&x.device()) => x.cast(IntDType::I64),
        _ => x.cast(IntDType::I32),
    }
}

/// Returns the elements of a CPU tensor as contiguous `i64` or `i32`.
pub(crate) fn integers<const D: usize>(x: Tensor<D, Int>) -> FlexTensor {
    // Integer tensors have no gradients, also on a device with autodiff.
    match signed(x).into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Int(x)) => x.to_contiguous(),
        other => panic!("expected integers of the CPU: {other:?}"),
    }
}

/// Evaluates an expression with the elements of [`integers`].
macro_rules! with_integers {
    ($tensor:expr, $elements:ident => $expression:expr) => {
        match $tensor.dtype() {
            burn::tensor::DType::I32 => {
                let $elements = crate::kernel::flex::elements::<i32>($tensor);
                $expression
            }
            _ => {
                let $elements = crate::kernel::flex::elements::<i64>($tensor);
                $expression
            }
        }
    };
}
pub(crate) use with_integers;

/// Converts the result of a kernel to a tensor of a dtype.
pub(crate) fn result<E: BurnElement>(
    elements: Buffer<E>,
    shape: &[usize],
    dtype: DType,
) -> DispatchTensor {
    debug_assert_eq!(elements.len(), shape.iter().product::<usize>());
    from_bytes::<E>(elements.into_bytes(), shape, dtype)
}

/// Converts a small result of a kernel to a tensor of a dtype.
pub(crate) fn small_result<E: Float>(
    elements: Vec<E>,
    shape: &[usize],
    dtype: DType,
) -> DispatchTensor {
    from_bytes::<E>(Bytes::from_elems(elements), shape, dtype)
}

fn from_bytes<E: BurnElement>(bytes: Bytes, shape: &[usize], dtype: DType) -> DispatchTensor {
    let layout = Layout::contiguous(Shape::from(shape.to_vec()));
    let tensor = FlexTensor::new(bytes, layout, E::dtype());
    in_dtype(to_dispatch::<Flex>(tensor), dtype)
}

/// Casts a tensor to another float type.
pub(crate) fn in_dtype(tensor: DispatchTensor, dtype: DType) -> DispatchTensor {
    if tensor.dtype() == dtype {
        return tensor;
    }
    if let DispatchTensorKind::Flex(BackendTensor::Float(x)) = &tensor.kind
        && let Some(cast) = widths::cast(x, dtype)
    {
        return to_dispatch::<Flex>(cast);
    }
    Dispatch::float_cast(tensor, dtype.into())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, FloatDType};

    use super::*;

    /// Every half-precision value, and values between neighbours: above, below and at the midpoint.
    #[test]
    fn casts_have_the_bits_of_burns() {
        let device = Device::flex();
        let near = |bits: u32| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| bits << 16 | low);
        let numbers = (0..1_u32 << 16).flat_map(near).map(f32::from_bits);
        let wide = Tensor::<1>::from_floats(&numbers.collect::<Vec<_>>()[..], &device);
        for (half, dtype) in [
            (FloatDType::BF16, DType::BF16),
            (FloatDType::F16, DType::F16),
        ] {
            let burns = wide.clone().cast(half);
            let narrow = in_dtype(wide.clone().into_dispatch(), dtype);
            let ours = Tensor::<1>::from_dispatch(narrow.clone());
            assert_eq!(ours.into_data().bytes(), burns.clone().into_data().bytes());
            let ours = Tensor::<1>::from_dispatch(in_dtype(narrow, DType::F32));
            let burns = burns.cast(FloatDType::F32);
            assert_eq!(ours.into_data().bytes(), burns.into_data().bytes());
        }
    }
}
