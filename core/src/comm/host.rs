//! What reductions do with tensors of the CPU, in one pass and in memory that is used again.

use std::ops::{AddAssign, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{BackendTensor, DispatchKindConversion, DispatchTensor, Flex};
use burn::tensor::{DType, Shape, Tensor};

use super::Payload;
use super::wire::{Outgoing, bytes};
use crate::memory::Block;

/// Elements that are added before the next ones: they stay in the first-level cache.
const STRETCH: usize = 2048;

/// The sum of tensors in their order, if they are floats of the CPU: the bits that adding one after the other gives.
pub(super) fn sum(tensors: &[Tensor<1>]) -> Option<Tensor<1>> {
    let first = tensors.first()?;
    let room = Room::like(first, first.dims()[0])?;
    room.add_up(0..first.dims()[0], tensors)
        .then(|| room.into_tensor())
}

/// A tensor of the CPU that is put together from parts: some are computed here, others received into their place.
#[derive(Debug)]
pub(super) struct Room {
    whole: FlexTensor,
    start: NonNull<u8>,
}

/// A part of a tensor that is written once, by whoever has it, while others read and write other parts.
#[derive(Clone, Debug)]
pub struct Place {
    /// Keeps the memory.
    _whole: FlexTensor,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a place is written by one thread at a time, and nothing else uses its bytes until then.
unsafe impl Send for Place {}
// SAFETY: as above; a shared place gives only its address.
unsafe impl Sync for Place {}

impl Place {
    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte.
    #[cfg(feature = "mpi")]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Writes a tensor of this size to the place.
    pub(super) fn fill(&self, tensor: &DispatchTensor) {
        let payload = Payload::Tensors(vec![tensor.clone()]);
        self.write(Outgoing::of(payload).bytes());
    }

    /// Writes bytes of this size to the place.
    pub(super) fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: the place has so many bytes, and is no part of a tensor that somebody has.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr(), bytes.len());
        }
    }
}

impl Room {
    /// Room for so many elements of a tensor's type, if it is one of floats of the CPU.
    pub(super) fn like(tensor: &Tensor<1>, elements: usize) -> Option<Self> {
        let dtype = tensor.dtype();
        if !matches!(dtype, DType::F32 | DType::F64) {
            return None;
        }
        all_on_host(std::slice::from_ref(tensor))?;
        let bytes = elements * dtype.size();
        let block = Block::new(bytes);
        let start = block.start();
        let layout = Layout::contiguous(Shape::from([elements]));
        let whole = FlexTensor::from_arc(Arc::new(block.into_bytes(bytes)), layout, dtype);
        Some(Self { whole, start })
    }

    /// A part of it, to be written.
    pub(super) fn place(&self, elements: Range<usize>) -> Place {
        assert!(
            elements.start <= elements.end && elements.end <= self.whole.layout().num_elements()
        );
        let size = self.whole.dtype().size();
        Place {
            _whole: self.whole.clone(),
            // SAFETY: within the memory.
            start: unsafe { self.start.add(elements.start * size) },
            bytes: elements.len() * size,
        }
    }

    /// A part of it that has been written.
    pub(super) fn part(&self, elements: Range<usize>) -> Tensor<1> {
        float(self.whole.narrow(0, elements.start, elements.len()))
    }

    /// Writes the sum of tensors, in their order, to a part; whether they are floats of the CPU.
    pub(super) fn add_up(&self, elements: Range<usize>, tensors: &[Tensor<1>]) -> bool {
        let place = self.place(elements);
        let Some(tensors) = all_on_host(tensors) else {
            return false;
        };
        match self.whole.dtype() {
            DType::F32 => add_up::<f32>(&place, &tensors),
            _ => add_up::<f64>(&place, &tensors),
        }
        true
    }

    /// All of it, when every part has been written.
    pub(super) fn into_tensor(self) -> Tensor<1> {
        float(self.whole)
    }
}

/// Tensors one after the other, if they are floats of the CPU.
pub(super) fn concatenation(tensors: &[Tensor<1>]) -> Option<Tensor<1>> {
    let parts = all_on_host(tensors)?;
    let elements = parts.iter().map(|part| part.layout().num_elements());
    let room = Room::like(tensors.first()?, elements.sum())?;
    let mut start = 0;
    for part in &parts {
        let end = start + part.layout().num_elements();
        room.place(start..end).write(bytes(part));
        start = end;
    }
    Some(room.into_tensor())
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

fn add_up<E: bytemuck::Pod + AddAssign>(place: &Place, tensors: &[FlexTensor]) {
    let [first, rest @ ..] = tensors else {
        unreachable!("a group has at least one rank");
    };
    // SAFETY: nothing else uses the place, and its bytes are initialised.
    let sums = unsafe { std::slice::from_raw_parts_mut(place.start.as_ptr(), place.bytes) };
    let sums: &mut [E] = bytemuck::cast_slice_mut(sums);
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
}

fn float(tensor: FlexTensor) -> Tensor<1> {
    let tensor = BackendTensor::<Flex>::Float(tensor);
    Tensor::from_dispatch(DispatchTensor::from_backend(tensor))
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
