//! Tensors of any backend and element kind, with a number of dims known only at run time.
//!
//! burn has separate functions for each kind of element: floats, integers and booleans. Functions
//! that move cells are the same for all kinds, so the dispatch is written here, once.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchDevice, DispatchKindConversion, DispatchTensor,
    DispatchTensorKind, Flex, TensorMetadata,
};
use burn::tensor::kind::{Kind, Ordered};
use burn::tensor::{Bool, DType, Device, Float, Int, Shape, Slice, Tensor, TensorData};

use crate::layout::ReduceOp;
use crate::{Error, IndexBox, Result};

/// The element kind of a data type.
pub(crate) fn kind_of(dtype: DType) -> Kind {
    match dtype {
        DType::Bool(_) => Kind::Bool,
        dtype if dtype.is_int() || dtype.is_uint() => Kind::Int,
        _ => Kind::Float,
    }
}

/// Calls burn's function for the element kind of a data type.
macro_rules! by_kind {
    ($dtype:expr, [$float:ident, $int:ident, $bool:ident] $arguments:tt) => {
        match kind_of($dtype) {
            Kind::Float => Dispatch::$float $arguments,
            Kind::Int => Dispatch::$int $arguments,
            Kind::Bool => Dispatch::$bool $arguments,
        }
    };
}

/// Evaluates an expression in which `$kind` stands for the element kind of a data type.
/// `Tensor<1, $kind>` may carry a tensor of any number of dims.
macro_rules! with_kind {
    ($dtype:expr, $kind:ident => $value:expr) => {
        match kind_of($dtype) {
            Kind::Float => {
                type $kind = Float;
                $value
            }
            Kind::Int => {
                type $kind = Int;
                $value
            }
            Kind::Bool => {
                type $kind = Bool;
                $value
            }
        }
    };
}

/// Wraps a tensor of a concrete backend as a tensor of any backend.
///
/// # Example
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::ops::{from_dispatch, to_dispatch};
///
/// let x = Tensor::<1>::ones([3], &Device::flex()).into_dispatch();
/// let x = to_dispatch::<Flex>(from_dispatch::<Flex>(x)?);
/// assert_eq!(Tensor::<1>::from_dispatch(x).dims(), [3]);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn to_dispatch<B: Backend>(tensor: FloatTensor<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::from_backend(BackendTensor::Float(tensor))
}

/// Inverse of [`to_dispatch`].
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

/// Wraps a CPU tensor as a tensor of any backend.
pub(crate) fn of_cpu(tensor: FlexTensor) -> DispatchTensor {
    DispatchTensor::from_backend(match kind_of(tensor.dtype()) {
        Kind::Float => BackendTensor::<Flex>::Float(tensor),
        Kind::Int => BackendTensor::Int(tensor),
        Kind::Bool => BackendTensor::Bool(tensor),
    })
}

/// Returns the tensor if it is on the CPU.
pub(crate) fn here(tensor: &DispatchTensor) -> Option<&FlexTensor> {
    match &tensor.kind {
        DispatchTensorKind::Flex(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => Some(tensor),
        _ => None,
    }
}

/// The node of a tensor in the autodiff graph; `None` for a tensor without autodiff.
pub(crate) fn node_of(tensor: &DispatchTensor) -> Option<NodeId> {
    let DispatchTensorKind::Autodiff(kind) = &tensor.kind else {
        return None;
    };
    match &**kind {
        DispatchTensorKind::Flex(BackendTensor::Autodiff(tensor)) => Some(tensor.id()),
        #[cfg(feature = "cube")]
        DispatchTensorKind::Cube(BackendTensor::Autodiff(tensor)) => Some(tensor.id()),
        _ => None,
    }
}

/// Copies the elements of a tensor to the memory of this process.
pub(crate) fn to_host(tensor: DispatchTensor) -> TensorData {
    with_kind!(tensor.dtype(), K => Tensor::<1, K>::from_dispatch(tensor).into_data())
}

/// Copies data to a tensor on a device.
pub(crate) fn from_host(data: TensorData, device: &DispatchDevice) -> DispatchTensor {
    let dtype = data.dtype();
    by_kind!(
        dtype,
        [float_from_data, int_from_data, bool_from_data](data, device)
    )
}

/// Whether two tensors share the same CPU memory.
pub(crate) fn same_memory(first: &DispatchTensor, second: &DispatchTensor) -> bool {
    match (here(first), here(second)) {
        (Some(first), Some(second)) => Arc::ptr_eq(&first.data_arc(), &second.data_arc()),
        _ => false,
    }
}

/// Returns the tensor in another shape.
pub(crate) fn reshaped(tensor: DispatchTensor, shape: Shape) -> DispatchTensor {
    if tensor.shape() == shape {
        return tensor;
    }
    by_kind!(
        tensor.dtype(),
        [float_reshape, int_reshape, bool_reshape](tensor, shape)
    )
}

/// Returns the tensor as a 1-D tensor of its elements.
pub(crate) fn flattened(tensor: DispatchTensor) -> DispatchTensor {
    let elements = tensor.shape().num_elements();
    reshaped(tensor, Shape::from([elements]))
}

/// Makes a tensor of the given shape, with the device and element type of `like`, filled with one
/// value, or with unspecified values for `None`.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use halocline_core::{IndexBox, ops::{blank, cut, paste}};
///
/// let x = Tensor::<1>::from_floats([1.0, 2.0, 3.0], &Device::default()).into_dispatch();
/// let cells = |range| IndexBox::new(Vec::from([range]));
/// let last = cut(&x, &cells(1..3));
/// let y = paste(blank(&x, &[4], Some(0.0)), &cells(0..2), last);
/// let y = Tensor::<1>::from_dispatch(y).into_data();
/// y.assert_eq(&[2.0_f32, 3.0, 0.0, 0.0].into(), false);
/// ```
pub fn blank(like: &DispatchTensor, shape: &[usize], value: Option<f64>) -> DispatchTensor {
    blank_of((like.device(), like.dtype()), shape, value)
}

/// Like [`blank`], with the given device and element type.
pub(crate) fn blank_of(
    (device, dtype): (DispatchDevice, DType),
    shape: &[usize],
    value: Option<f64>,
) -> DispatchTensor {
    let options = (&Device::new(device), dtype);
    let elements = [shape.iter().product::<usize>()];
    let flat = with_kind!(dtype, K => match value {
        Some(value) => Tensor::<1, K>::full(elements, value, options).into_dispatch(),
        None => Tensor::<1, K>::empty(elements, options).into_dispatch(),
    });
    reshaped(flat, Shape::from(shape.to_vec()))
}

fn slices(cells: &IndexBox) -> Vec<Slice> {
    let ranges = cells.ranges().iter();
    ranges.map(|range| Slice::from(range.clone())).collect()
}

/// Cuts a box out of a tensor; see the example of [`blank`].
pub fn cut(tensor: &DispatchTensor, cells: &IndexBox) -> DispatchTensor {
    let (tensor, slices) = (tensor.clone(), slices(cells));
    by_kind!(
        tensor.dtype(),
        [float_slice, int_slice, bool_slice](tensor, &slices)
    )
}

/// Overwrites a box of a tensor with other cells; see the example of [`blank`].
pub fn paste(tensor: DispatchTensor, part: &IndexBox, cells: DispatchTensor) -> DispatchTensor {
    let slices = slices(part);
    by_kind!(
        tensor.dtype(),
        [float_slice_assign, int_slice_assign, bool_slice_assign](tensor, &slices, cells)
    )
}

/// Reverses the order of cells in some dims, as [`Transfer::flip`](crate::plan::Transfer::flip)
/// specifies.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ops::flipped;
///
/// let x = Tensor::<1>::from([1.0, 2.0, 4.0]).into_dispatch();
/// let turned = Tensor::<1>::from_dispatch(flipped(x, &[true]));
/// turned.into_data().assert_eq(&[4.0_f32, 2.0, 1.0].into(), true);
/// ```
pub fn flipped(tensor: DispatchTensor, flip: &[bool]) -> DispatchTensor {
    let dims: Vec<usize> = (0..flip.len()).filter(|&dim| flip[dim]).collect();
    if dims.is_empty() {
        return tensor;
    }
    by_kind!(
        tensor.dtype(),
        [float_flip, int_flip, bool_flip](tensor, &dims)
    )
}

/// Concatenates flat tensors.
pub(crate) fn joined(tensors: Vec<DispatchTensor>) -> DispatchTensor {
    with_kind!(tensors[0].dtype(), K => {
        let tensors = tensors.into_iter().map(Tensor::<1, K>::from_dispatch);
        Tensor::cat(tensors.collect(), 0).into_dispatch()
    })
}

/// Casts a float tensor to another data type.
pub(crate) fn cast(tensor: DispatchTensor, dtype: DType) -> DispatchTensor {
    if tensor.dtype() == dtype {
        tensor
    } else {
        Dispatch::float_cast(tensor, dtype.into())
    }
}

/// The data type in which values of a data type are accumulated.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        _ => dtype,
    }
}

/// Casts a tensor of half-precision floats to f32; others are returned as they are.
pub(crate) fn widened(tensor: DispatchTensor) -> DispatchTensor {
    let dtype = wide(tensor.dtype());
    cast(tensor, dtype)
}

/// Returns the sum of two tensors of the same shape.
///
/// # Panics
/// Panics for booleans.
pub(crate) fn added(first: DispatchTensor, second: DispatchTensor) -> DispatchTensor {
    match kind_of(first.dtype()) {
        Kind::Float => Dispatch::float_add(first, second),
        Kind::Int => Dispatch::int_add(first, second),
        Kind::Bool => panic!("booleans have no sum; take that of int()"),
    }
}

/// Combines flat values of two ranks, given in rank order.
///
/// # Panics
/// Panics for a sum of booleans.
pub(crate) fn combined(
    op: ReduceOp,
    first: DispatchTensor,
    second: DispatchTensor,
) -> DispatchTensor {
    let (kind, both) = (kind_of(first.dtype()), [first, second]);
    match (kind, op) {
        (_, ReduceOp::Sum) => {
            let [first, second] = both;
            added(first, second)
        }
        (Kind::Float, op) => of_numbers::<Float>(op, both, Some(Tensor::is_nan)),
        (Kind::Int, op) => of_numbers::<Int>(op, both, None),
        (Kind::Bool, op) => {
            let [first, second] = both.map(Tensor::<1, Bool>::from_dispatch);
            let both = match op {
                ReduceOp::Max => first.bool_or(second),
                _ => first.bool_and(second),
            };
            both.into_dispatch()
        }
    }
}

/// Product or extremum of two tensors.
fn of_numbers<K: Ordered>(
    op: ReduceOp,
    both: [DispatchTensor; 2],
    is_nan: Option<fn(Tensor<1, K>) -> Tensor<1, Bool>>,
) -> DispatchTensor {
    let [first, second] = both.map(Tensor::<1, K>::from_dispatch);
    let takes_second = match op {
        ReduceOp::Max => second.clone().greater(first.clone()),
        ReduceOp::Min => second.clone().lower(first.clone()),
        _ => return (first * second).into_dispatch(),
    };
    // NaN always propagates.
    let takes_second = match is_nan {
        Some(is_nan) => takes_second.bool_or(is_nan(second.clone())),
        None => takes_second,
    };
    first.mask_where(takes_second, second).into_dispatch()
}
