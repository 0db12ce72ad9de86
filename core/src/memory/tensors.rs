//! Elements of tensors on the CPU, for kernels.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use burn::backend::DispatchDevice;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Device, Element, Shape};

use super::Block;

/// Float type of kernels on the CPU: `f32` or `f64`.
///
/// # Example
/// ```
/// use halocline_core::memory::CpuFloat;
///
/// fn sum<E: CpuFloat>(x: &[E]) -> E {
///     x.iter().fold(E::default(), |sum, x| sum + *x)
/// }
/// assert_eq!(sum(&[1.0_f32, 2.0]), 3.0);
/// ```
pub trait CpuFloat:
    Element
    + bytemuck::Pod
    + PartialOrd
    + From<i8>
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
}

impl CpuFloat for f32 {}
impl CpuFloat for f64 {}

/// Whether tensors of a device, with or without autodiff, are in the memory of the CPU.
///
/// # Example
/// ```
/// use burn::tensor::Device;
/// use halocline_core::memory::is_cpu;
///
/// assert!(is_cpu(&Device::flex().autodiff()));
/// ```
pub fn is_cpu(device: &Device) -> bool {
    matches!(
        device.clone().inner().as_dispatch(),
        DispatchDevice::Flex(_)
    )
}

/// Makes a tensor of the CPU with unspecified values, in memory of the pool.
///
/// # Example
/// ```
/// use halocline_core::memory::{elements_mut, unwritten};
///
/// let mut x = unwritten::<f32>(&[2, 3]);
/// elements_mut::<f32>(&mut x).expect("new memory").fill(1.0);
/// ```
pub fn unwritten<E: Element>(shape: &[usize]) -> FlexTensor {
    let bytes = shape.iter().product::<usize>() * size_of::<E>();
    let layout = Layout::contiguous(Shape::from(shape.to_vec()));
    FlexTensor::new(Block::new(bytes).into_bytes(bytes), layout, E::dtype())
}

/// Returns the tensor itself if it is contiguous, else a contiguous copy. burn's own function also
/// copies contiguous views of a part.
///
/// # Example
/// ```
/// use burn::backend::flex::FlexTensor;
/// use burn::tensor::TensorData;
/// use halocline_core::memory::contiguous;
///
/// let x = FlexTensor::from_data(TensorData::new(vec![1.0_f32, 2.0], [2]));
/// assert!(contiguous(x).is_contiguous());
/// ```
pub fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// The elements of a contiguous tensor.
///
/// # Panics
/// Panics if the tensor has elements of another type.
///
/// # Example
/// ```
/// use burn::backend::flex::FlexTensor;
/// use burn::tensor::TensorData;
/// use halocline_core::memory::elements;
///
/// let x = FlexTensor::from_data(TensorData::new(vec![1.0_f32, 2.0], [2]));
/// assert_eq!(elements::<f32>(&x), [1.0, 2.0]);
/// ```
pub fn elements<E: Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    let layout = tensor.layout();
    match layout.num_elements() {
        // An empty view may start outside the storage.
        0 => &[],
        elements => &tensor.storage()[layout.start_offset()..][..elements],
    }
}

/// The elements of a contiguous tensor, if it is the only user of its memory and covers all of it;
/// else `None`.
///
/// # Panics
/// Panics if the tensor has elements of another type.
///
/// # Example
/// ```
/// use burn::backend::flex::FlexTensor;
/// use burn::tensor::TensorData;
/// use halocline_core::memory::elements_mut;
///
/// let mut x = FlexTensor::from_data(TensorData::new(vec![1.0_f32, 2.0], [2]));
/// assert!(elements_mut::<f32>(&mut x).is_some());
/// let other = x.clone();
/// assert!(elements_mut::<f32>(&mut x).is_none());
/// # drop(other);
/// ```
pub fn elements_mut<E: Element + bytemuck::Pod>(tensor: &mut FlexTensor) -> Option<&mut [E]> {
    let elements = tensor.layout().num_elements();
    let storage = tensor.try_storage_mut()?;
    (storage.len() == elements).then_some(storage)
}
