//! What reductions do with tensors of the CPU, in one pass and in memory that is used again.

use std::ops::AddAssign;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{BackendTensor, DispatchKindConversion, DispatchTensor, Flex};
use burn::tensor::{DType, Shape, Tensor};

use crate::memory::Block;

/// Elements that are added before the next ones: they stay in the first-level cache.
const STRETCH: usize = 2048;

/// The sum of tensors in their order, if they are floats of the CPU: the bits that adding one after the other gives.
pub(super) fn sum(tensors: &[Tensor<1>]) -> Option<Tensor<1>> {
    let tensors = all_on_host(tensors)?;
    match tensors.first()?.dtype() {
        DType::F32 => Some(sum_of::<f32>(&tensors)),
        DType::F64 => Some(sum_of::<f64>(&tensors)),
        _ => None,
    }
}

/// Tensors one after the other, if they are floats of the CPU.
pub(super) fn concatenation(tensors: &[Tensor<1>]) -> Option<Tensor<1>> {
    let tensors = all_on_host(tensors)?;
    let bytes = tensors.iter().map(bytes);
    let mut block = Block::new(bytes.clone().map(<[u8]>::len).sum());
    let mut rest = block.bytes_mut();
    for bytes in bytes {
        let (to, after) = rest.split_at_mut(bytes.len());
        to.copy_from_slice(bytes);
        rest = after;
    }
    let elements = tensors.iter().map(|tensor| tensor.layout().num_elements());
    Some(tensor(block, elements.sum(), tensors.first()?.dtype()))
}

/// The tensors, contiguous, if all of them are floats of the CPU.
fn all_on_host(tensors: &[Tensor<1>]) -> Option<Vec<FlexTensor>> {
    let on_host = tensors.iter().map(|tensor| {
        let tensor = tensor.clone().into_dispatch();
        match DispatchTensor::try_into_backend(tensor) {
            Ok(BackendTensor::<Flex>::Float(tensor)) => Some(tensor.to_contiguous()),
            _ => None,
        }
    });
    on_host.collect()
}

/// The bytes of a contiguous tensor.
fn bytes(tensor: &FlexTensor) -> &[u8] {
    let (layout, size) = (tensor.layout(), tensor.dtype().size());
    match layout.num_elements() {
        // A view of nothing may begin anywhere.
        0 => &[],
        elements => &tensor.bytes()[layout.start_offset() * size..][..elements * size],
    }
}

fn sum_of<E: bytemuck::Pod + AddAssign>(tensors: &[FlexTensor]) -> Tensor<1> {
    let [first, rest @ ..] = tensors else {
        unreachable!("a group has at least one rank");
    };
    let elements = first.layout().num_elements();
    let mut block = Block::new(elements * size_of::<E>());
    let sums: &mut [E] =
        bytemuck::cast_slice_mut(&mut block.bytes_mut()[..elements * size_of::<E>()]);
    let values = |tensor| -> &[E] { bytemuck::cast_slice(bytes(tensor)) };
    for (stretch, sums) in sums.chunks_mut(STRETCH).enumerate() {
        let cells = stretch * STRETCH..stretch * STRETCH + sums.len();
        sums.copy_from_slice(&values(first)[cells.clone()]);
        for tensor in rest {
            let more = &values(tensor)[cells.clone()];
            sums.iter_mut()
                .zip(more)
                .for_each(|(sum, more)| *sum += *more);
        }
    }
    tensor(block, elements, first.dtype())
}

/// The first elements of a block as a tensor.
fn tensor(block: Block, elements: usize, dtype: DType) -> Tensor<1> {
    let bytes = block.into_bytes(elements * dtype.size());
    let layout = Layout::contiguous(Shape::from([elements]));
    let tensor = FlexTensor::new(bytes, layout, dtype);
    Tensor::from_dispatch(DispatchTensor::from_backend(BackendTensor::<Flex>::Float(
        tensor,
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    #[test]
    fn sums_and_concatenations_have_the_bits_of_burns() {
        let device = Device::flex();
        for (elements, dtype) in [
            (1, DType::F32),
            (2 * STRETCH + 5, DType::F32),
            (77, DType::F64),
        ] {
            let normal = Distribution::Normal(0.0, 1.0);
            let parts: Vec<Tensor<1>> = (0..3)
                .map(|_| Tensor::<1>::random([2 * elements], normal, (&device, dtype)))
                .map(|whole| whole.narrow(0, elements, elements))
                .collect();
            let added = parts.iter().cloned().reduce(|lhs, rhs| lhs + rhs).unwrap();
            let ours = sum(&parts).unwrap();
            ours.into_data().assert_eq(&added.into_data(), true);
            let ours = concatenation(&parts).unwrap();
            ours.into_data()
                .assert_eq(&Tensor::cat(parts, 0).into_data(), true);
        }
        let integers = Tensor::<1>::ones([3], (&device, DType::F16));
        assert!(sum(&[integers]).is_none());
    }
}
