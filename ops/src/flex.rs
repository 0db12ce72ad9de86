//! Tensors of the CPU backend as what kernels read and write.

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{DispatchDevice, Flex};
use burn::tensor::{DType, Device, Element as BurnElement, FloatDType, Shape};
use burn_std::Bytes;
use halocline_core::IndexBox;
pub(crate) use halocline_core::memory::contiguous;

use crate::kernel::buffer::Buffer;
use crate::kernel::memory::View;
use crate::kernel::simd::Element;

/// Whether our kernels run on a device.
pub(crate) fn runs_on(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Flex(_)
    )
}

/// A float that both burn and kernels know.
pub(crate) trait Float: Element + BurnElement + bytemuck::Pod {}

impl Float for f32 {}
impl Float for f64 {}

/// A tensor `[batch, channels, *spatial]` with three spatial dims, the leading ones of one cell.
pub(crate) fn field<E: Float>(tensor: &FlexTensor) -> View<'_, E, 5> {
    let whole = IndexBox::whole(&tensor.layout().shape()[..]);
    field_box(tensor, &whole, &[])
}

/// A box of a tensor, with some dims in reverse order, as [`field`] gives it.
pub(crate) fn field_box<'a, E: Float>(
    tensor: &'a FlexTensor,
    cells: &IndexBox,
    flip: &[bool],
) -> View<'a, E, 5> {
    let layout = tensor.layout();
    let mut start = layout.start_offset() as isize;
    let (mut shape, mut strides) = ([1; 5], [0; 5]);
    let missing = 5 - cells.ranges().len();
    for (dim, range) in cells.ranges().iter().enumerate() {
        let to = if dim < 2 { dim } else { dim + missing };
        let stride = layout.strides()[dim];
        let flipped = flip.get(dim) == Some(&true) && !range.is_empty();
        let first = if flipped { range.end - 1 } else { range.start };
        start += first as isize * stride;
        shape[to] = range.len();
        strides[to] = if flipped { -stride } else { stride };
    }
    View::new(tensor.storage(), start as usize, shape, strides)
}

/// A kernel's result as a tensor.
pub(crate) fn tensor<E: Float>(elements: Buffer<E>, shape: &[usize]) -> FlexTensor {
    debug_assert_eq!(elements.len(), shape.iter().product::<usize>());
    let (block, len) = elements.into_block();
    let bytes = block.into_bytes(len);
    let layout = Layout::contiguous(Shape::from(shape.to_vec()));
    FlexTensor::new(bytes, layout, E::dtype())
}

/// A kernel's small result as a tensor.
pub(crate) fn small_tensor<E: Float>(elements: Vec<E>, shape: &[usize]) -> FlexTensor {
    let layout = Layout::contiguous(Shape::from(shape.to_vec()));
    FlexTensor::new(Bytes::from_elems(elements), layout, E::dtype())
}

/// The elements of a contiguous tensor.
pub(crate) fn elements<E: Float>(tensor: &FlexTensor) -> &[E] {
    let layout = tensor.layout();
    match layout.num_elements() {
        // A view of nothing may begin anywhere.
        0 => &[],
        elements => &tensor.storage()[layout.start_offset()..][..elements],
    }
}

/// A tensor of a narrow float as `f32`, in which it is computed with.
pub(crate) fn widened(tensor: FlexTensor) -> FlexTensor {
    Flex::float_cast(tensor, FloatDType::F32)
}

/// The inverse of [`widened`], but for rounding.
pub(crate) fn narrowed(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    Flex::float_cast(tensor, dtype.into())
}
