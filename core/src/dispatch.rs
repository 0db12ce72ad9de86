//! Tensors of any backend, whose number of dims is known at run time.

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchKindConversion, DispatchTensor, TensorMetadata,
};
use burn::tensor::{Device, Shape, Slice, Tensor};

use crate::{Error, IndexBox, Result};

/// A concrete backend's tensor as one of any backend.
pub fn to_dispatch<B: Backend>(tensor: FloatTensor<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::from_backend(BackendTensor::Float(tensor))
}

/// The inverse of [`to_dispatch`].
///
/// # Errors
/// The tensor belongs to another backend.
pub fn from_dispatch<B: Backend>(tensor: DispatchTensor) -> Result<FloatTensor<B>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let tensor: BackendTensor<B> =
        DispatchTensor::try_into_backend(tensor).map_err(Error::Engine)?;
    Ok(tensor.float())
}

/// A tensor of any backend in another shape.
pub(crate) fn reshaped(tensor: DispatchTensor, shape: Shape) -> DispatchTensor {
    if tensor.shape() == shape {
        return tensor;
    }
    Dispatch::float_reshape(tensor, shape)
}

/// A tensor of the kind of `like`, of another shape, that holds one value or nothing in particular.
pub fn blank(like: &DispatchTensor, shape: &[usize], value: Option<f64>) -> DispatchTensor {
    let options = (&Device::new(like.device()), like.dtype());
    // Rank is a run-time matter here; `Tensor<1>` only carries the data.
    let elements = [shape.iter().product::<usize>()];
    let flat = match value {
        Some(value) => Tensor::<1>::full(elements, value, options),
        None => Tensor::<1>::empty(elements, options),
    };
    reshaped(flat.into_dispatch(), Shape::from(shape.to_vec()))
}

fn slices(cells: &IndexBox) -> Vec<Slice> {
    let ranges = cells.ranges().iter();
    ranges.map(|range| Slice::from(range.clone())).collect()
}

/// A box of a tensor.
pub fn cut(tensor: &DispatchTensor, cells: &IndexBox) -> DispatchTensor {
    Dispatch::float_slice(tensor.clone(), &slices(cells))
}

/// A tensor with other cells in a box.
pub fn paste(tensor: DispatchTensor, at: &IndexBox, cells: DispatchTensor) -> DispatchTensor {
    Dispatch::float_slice_assign(tensor, &slices(at), cells)
}

/// A tensor with the order of cells reversed in some dims.
pub(crate) fn flipped(tensor: DispatchTensor, flip: &[bool]) -> DispatchTensor {
    let dims: Vec<usize> = (0..flip.len()).filter(|&dim| flip[dim]).collect();
    if dims.is_empty() {
        tensor
    } else {
        Dispatch::float_flip(tensor, &dims)
    }
}
