//! Messages as bytes: the payload, padding, and a trailer with the payload's length and the operation's fingerprint.
//!
//! The payload comes first, so that a received buffer becomes a tensor as it is. Ranks are of one architecture: numbers
//! are in its byte order.

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{BackendTensor, Dispatch, DispatchKindConversion, DispatchTensor, Flex};
use burn::tensor::{Bytes, DType, Device, Shape, TensorData};

use super::raw::BLOCK;
use crate::comm::{Expected, Payload};
use crate::{Error, Result};

const WORD: usize = size_of::<u32>();
/// Length and fingerprint, a `u64` each.
const TRAILER: usize = 16;

/// The buffer to send for a payload.
pub(super) fn pack(payload: &Payload, fingerprint: u64) -> Result<Vec<u8>> {
    let length = payload.bytes();
    let blocks = (length + TRAILER).div_ceil(BLOCK);
    let mut buffer = Vec::with_capacity(blocks * BLOCK);
    match payload {
        Payload::Bytes(bytes) => buffer.extend_from_slice(bytes),
        Payload::Tensors(tensors) => {
            for tensor in tensors {
                append(&mut buffer, tensor.clone())?;
            }
        }
    }
    buffer.resize(blocks * BLOCK - TRAILER, 0);
    buffer.extend_from_slice(&(length as u64).to_ne_bytes());
    buffer.extend_from_slice(&fingerprint.to_ne_bytes());
    Ok(buffer)
}

fn append(buffer: &mut Vec<u8>, tensor: DispatchTensor) -> Result<()> {
    let tensor: BackendTensor<Flex> = DispatchTensor::try_into_backend(tensor)
        .map_err(|error| Error::Engine(format!("mpi sends tensors of the CPU: {error}")))?;
    let tensor = match tensor {
        BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor) => {
            tensor
        }
        other => {
            return Err(Error::Engine(format!(
                "mpi cannot send a {} tensor",
                other.name()
            )));
        }
    };
    let size = tensor.dtype().size();
    match tensor.layout().contiguous_offsets() {
        Some((start, end)) => buffer.extend_from_slice(&tensor.bytes()[start * size..end * size]),
        None => buffer.extend_from_slice(tensor.to_contiguous().bytes()),
    }
    Ok(())
}

/// What a peer sent, not yet of any form.
pub(super) struct Message {
    words: Vec<u32>,
    /// The size of the payload in bytes.
    pub(super) length: usize,
    /// The fingerprint of the peer's operation.
    pub(super) fingerprint: u64,
}

impl Message {
    /// Takes a received buffer apart; `None` if it is no message of this engine.
    pub(super) fn open(words: Vec<u32>) -> Option<Self> {
        let (payload, trailer) = as_bytes(&words).split_last_chunk::<TRAILER>()?;
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
        let (length, fingerprint) = trailer.split_at(TRAILER / 2);
        let (length, fingerprint) = (number(length)? as usize, number(fingerprint)?);
        (length <= payload.len()).then_some(Self {
            words,
            length,
            fingerprint,
        })
    }

    /// Whether the payload has the size of what is expected.
    pub(super) fn fits(&self, expected: &Expected) -> bool {
        match expected {
            Expected::Bytes => true,
            Expected::Tensors { shapes, dtype, .. } => {
                let bytes = |shape: &Vec<usize>| size(shape, *dtype);
                self.length == shapes.iter().map(bytes).sum::<usize>()
            }
        }
    }

    /// The payload, which must [fit](Self::fits).
    pub(super) fn unpack(mut self, expected: &Expected) -> Payload {
        let Expected::Tensors {
            shapes,
            dtype,
            device,
        } = expected
        else {
            return Payload::Bytes(as_bytes(&self.words)[..self.length].to_vec());
        };
        let whole_words = dtype.size().is_multiple_of(WORD);
        let aligned = self.words.as_ptr().addr().is_multiple_of(dtype.size());
        if let [shape] = &shapes[..]
            && whole_words
            && aligned
        {
            self.words.truncate(self.length / WORD);
            let tensor = tensor(Bytes::from_elems(self.words), shape, *dtype, device);
            return Payload::Tensors(vec![tensor]);
        }
        let mut rest = as_bytes(&self.words);
        let mut next = |shape: &Vec<usize>| {
            let (bytes, after) = rest.split_at(size(shape, *dtype));
            rest = after;
            tensor(Bytes::from_bytes_vec(bytes.to_vec()), shape, *dtype, device)
        };
        Payload::Tensors(shapes.iter().map(&mut next).collect())
    }
}

fn as_bytes(words: &[u32]) -> &[u8] {
    // SAFETY: every bit pattern is a `u8`, whose alignment is one.
    unsafe { words.align_to().1 }
}

fn size(shape: &[usize], dtype: DType) -> usize {
    shape.iter().product::<usize>() * dtype.size()
}

fn tensor(bytes: Bytes, shape: &[usize], dtype: DType, device: &Device) -> DispatchTensor {
    let data = TensorData::from_bytes(bytes, Shape::from(shape.to_vec()), dtype);
    let device = device.as_dispatch();
    match dtype {
        DType::Bool(_) => Dispatch::bool_from_data(data, device),
        dtype if dtype.is_float() => Dispatch::float_from_data(data, device),
        _ => Dispatch::int_from_data(data, device),
    }
}
