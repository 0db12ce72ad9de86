//! Payloads as bytes, for engines whose ranks do not share memory.
//!
//! All ranks have the same architecture, so numbers are sent in its byte order.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{DispatchDevice, DispatchTensor};
use burn::tensor::Shape;
use burn_std::Bytes;

use super::{Expected, Payload};
use crate::cells::copied;
use crate::dispatch::{from_host, here, of_cpu, to_host};
use crate::memory::Block;

/// Size in bytes above which a view is copied by all threads.
const LONG: usize = 1 << 20;

/// Memory of an outgoing message.
pub(super) enum Outgoing {
    /// A block and the number of its leading bytes that are sent.
    Block(Block, usize),
    /// Bytes, and the offset of the first one that is sent.
    Bytes(Vec<u8>, usize),
    /// A part of a tensor's bytes, which stay unchanged as long as this second handle exists.
    Tensor(Arc<Bytes>, Range<usize>),
}

impl Outgoing {
    /// Returns the bytes of a payload: those of its tensor if it is one contiguous tensor, else a
    /// copy.
    pub(super) fn of(mut payload: Payload) -> Self {
        bring(&mut payload);
        let tensors = match payload {
            Payload::Bytes(bytes) => return Self::Bytes(bytes, 0),
            Payload::Tensors(tensors) => tensors,
        };
        let size = |tensor: &FlexTensor| tensor.layout().num_elements() * tensor.dtype().size();
        if let [tensor] = &tensors[..]
            && let Some(cells) = here(tensor)
        {
            if let Some(place) = place(cells) {
                return Self::Tensor(cells.data_arc(), place);
            }
            if size(cells) > LONG {
                return Self::of(Payload::Tensors(vec![copied(tensor)]));
            }
        }
        let cells = || tensors.iter().map(|tensor| here(tensor).expect("brought"));
        let length = cells().map(size).sum();
        let mut block = Block::new(length);
        let mut rest = &mut block.bytes_mut()[..length];
        for tensor in cells() {
            let (cells, after) = rest.split_at_mut(size(tensor));
            write_cells(tensor, cells);
            rest = after;
        }
        Self::Block(block, length)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Block(block, bytes) => &block.bytes()[..*bytes],
            Self::Bytes(bytes, from) => &bytes[*from..],
            Self::Tensor(memory, place) => &memory[place.clone()],
        }
    }
}

/// The byte range of a tensor in its memory, if it is contiguous.
fn place(tensor: &FlexTensor) -> Option<Range<usize>> {
    let (layout, size) = (tensor.layout(), tensor.dtype().size());
    let elements = layout.num_elements();
    // An empty view may start anywhere.
    let start = if elements > 0 {
        layout.start_offset()
    } else {
        0
    };
    layout
        .is_contiguous()
        .then(|| start * size..(start + elements) * size)
}

/// The bytes of a contiguous tensor.
pub(super) fn bytes(tensor: &FlexTensor) -> &[u8] {
    &tensor.bytes()[place(tensor).expect("a contiguous tensor")]
}

/// Copies tensors on a GPU to the memory of this process.
pub(super) fn bring(payload: &mut Payload) {
    let Payload::Tensors(tensors) = payload else {
        return;
    };
    for tensor in tensors.iter_mut().filter(|tensor| here(tensor).is_none()) {
        *tensor = of_cpu(FlexTensor::from_data(to_host(tensor.clone())));
    }
}

/// Writes the elements of a tensor, in order.
fn write_cells(tensor: &FlexTensor, target: &mut [u8]) {
    let (layout, size) = (tensor.layout(), tensor.dtype().size());
    let (shape, strides) = (&layout.shape()[..], layout.strides());
    // Trailing contiguous dims are copied as one run; the others are iterated like an odometer.
    let (mut outer, mut run) = (shape.len(), 1);
    while outer > 0 && (strides[outer - 1] == run as isize || shape[outer - 1] == 1) {
        outer -= 1;
        run *= shape[outer];
    }
    let mut index = vec![0; outer];
    let mut offset = layout.start_offset() as isize;
    for cells in target.chunks_exact_mut((run * size).max(1)) {
        let from = offset as usize * size;
        cells.copy_from_slice(&tensor.bytes()[from..from + run * size]);
        for dim in (0..outer).rev() {
            index[dim] += 1;
            offset += strides[dim];
            if index[dim] < shape[dim] {
                break;
            }
            offset -= strides[dim] * shape[dim] as isize;
            index[dim] = 0;
        }
    }
}

impl Expected {
    /// Makes a payload of the expected form from the first `length` bytes of a block. `length` must
    /// be the expected size.
    pub(super) fn unpack(&self, block: Block, length: usize) -> Payload {
        let Self::Tensors {
            shapes,
            dtype,
            device,
        } = self
        else {
            return Payload::Bytes(block.bytes()[..length].to_vec());
        };
        // Several boxes share the memory of their message.
        let message = Arc::new(block.into_bytes(length));
        let mut start = 0;
        let mut next = |shape: &Shape| {
            let mut layout = Layout::contiguous(shape.clone());
            if start > 0 {
                layout = Layout::new(shape.clone(), layout.strides().to_vec(), start);
            }
            start += layout.num_elements();
            let cells = FlexTensor::from_arc(message.clone(), layout, *dtype);
            on_device(cells, device)
        };
        Payload::Tensors(shapes.iter().map(&mut next).collect())
    }
}

/// Moves a tensor from the memory of this process to a device.
fn on_device(cells: FlexTensor, device: &DispatchDevice) -> DispatchTensor {
    match device {
        DispatchDevice::Flex(_) => of_cpu(cells),
        device => from_host(cells.into_data(), device),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int, Tensor};

    use super::*;

    #[test]
    fn views_are_sent_in_the_order_of_their_cells() {
        for rows in [3, 401] {
            let cells = Tensor::<1, Int>::arange(0..rows as i64 * 703, &Device::flex());
            let view = cells.reshape([rows, 703]).swap_dims(0, 1);
            let sent = Outgoing::of(Payload::Tensors(vec![view.clone().into_dispatch()]));
            assert_eq!(sent.bytes(), view.into_data().as_bytes());
            assert_eq!(matches!(sent, Outgoing::Tensor(..)), rows == 401);
        }
    }
}
