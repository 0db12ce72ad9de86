//! Reductions of CPU tensors, in one pass and in memory of the pool.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};

use super::Payload;
use super::wire::{Outgoing, bytes};
use crate::cells::in_order;
use crate::dispatch::{here, of_cpu};
use crate::layout::ReduceOp;
use crate::memory::Block;

/// Number of elements of a result that are combined at a time, so that they stay in the first-level
/// cache.
const STRETCH: usize = 2048;

/// Numbers that this module combines and concatenates: all except 16-bit floats, with which the CPU
/// does not calculate.
trait Number: bytemuck::Pod + PartialOrd {
    fn sum(self, other: Self) -> Self;

    fn product(self, other: Self) -> Self;

    fn is_nan(self) -> bool;
}

macro_rules! number_types {
    ($($number:ident: $dtype:ident, $sum:expr, $product:expr, $is_nan:expr;)*) => {
        $(impl Number for $number {
            fn sum(self, other: Self) -> Self {
                $sum(self, other)
            }

            fn product(self, other: Self) -> Self {
                $product(self, other)
            }

            fn is_nan(self) -> bool {
                $is_nan(self)
            }
        })*

        /// Returns the function that combines numbers of a type.
        fn combine_of(dtype: DType) -> Option<Combine> {
            match dtype {
                $(DType::$dtype => Some(combine::<$number>),)*
                _ => None,
            }
        }
    };
}

number_types! {
    f32: F32, std::ops::Add::add, std::ops::Mul::mul, f32::is_nan;
    f64: F64, std::ops::Add::add, std::ops::Mul::mul, f64::is_nan;
    i64: I64, i64::wrapping_add, i64::wrapping_mul, |_| false;
    i32: I32, i32::wrapping_add, i32::wrapping_mul, |_| false;
    i16: I16, i16::wrapping_add, i16::wrapping_mul, |_| false;
    i8: I8, i8::wrapping_add, i8::wrapping_mul, |_| false;
    u64: U64, u64::wrapping_add, u64::wrapping_mul, |_| false;
    u32: U32, u32::wrapping_add, u32::wrapping_mul, |_| false;
    u16: U16, u16::wrapping_add, u16::wrapping_mul, |_| false;
    u8: U8, u8::wrapping_add, u8::wrapping_mul, |_| false;
}

/// Returns the tensor if it holds numbers on the CPU that this module combines and concatenates.
fn numbers(tensor: &DispatchTensor) -> Option<&FlexTensor> {
    here(tensor).filter(|tensor| combine_of(tensor.dtype()).is_some())
}

/// Whether a tensor holds numbers on the CPU that this module combines and concatenates.
pub(super) fn holds(tensor: &DispatchTensor) -> bool {
    numbers(tensor).is_some()
}

/// Returns the tensor, made contiguous if this module combines it.
pub(super) fn in_one_piece(tensor: DispatchTensor) -> DispatchTensor {
    if holds(&tensor) {
        in_order(tensor)
    } else {
        tensor
    }
}

/// The bytes of a range of elements of a contiguous tensor of numbers on the CPU.
pub(super) fn cells(tensor: &DispatchTensor, elements: Range<usize>) -> &[u8] {
    let size = tensor.dtype().size();
    let tensor = numbers(tensor).expect("a tensor of the CPU");
    &bytes(tensor)[elements.start * size..elements.end * size]
}

/// CPU tensor under construction: some parts are computed here, others are received into their
/// place.
///
/// Several threads write and read parts at the same time. Therefore no reference covers the whole
/// memory before [`into_tensor`](Self::into_tensor): a [`Place`] is an address, and a [`Part`]
/// yields references only to its own bytes.
#[derive(Debug)]
pub(super) struct Room {
    /// Keeps the memory alive; not dereferenced before all parts are written.
    memory: Arc<Bytes>,
    start: NonNull<u8>,
    elements: usize,
    dtype: DType,
}

/// Part of a tensor that its owner writes once, while other threads read and write other parts.
#[derive(Clone, Debug)]
pub struct Place {
    /// Keeps the memory alive.
    _memory: Arc<Bytes>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a place is written by one thread at a time, and nothing else uses its bytes until then.
unsafe impl Send for Place {}
// SAFETY: as above; a shared place exposes only its address.
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

    /// Returns a copy of the written bytes.
    pub(super) fn read(&self) -> Vec<u8> {
        // SAFETY: the place has this many bytes, and its owner has written them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }.to_vec()
    }

    /// Writes a tensor of this size to the place.
    pub(super) fn fill(&self, tensor: DispatchTensor) {
        self.write(Outgoing::of(Payload::Tensors(vec![tensor])).bytes());
    }

    /// Writes bytes of this size to the place.
    pub(super) fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: the place has this many bytes, and no tensor refers to it yet.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr(), bytes.len());
        }
    }
}

/// Bytes of a part that has been written, as the memory of a separate tensor.
struct Part {
    /// Keeps the memory alive.
    _memory: Arc<Bytes>,
    start: NonNull<u8>,
    bytes: usize,
    align: usize,
    /// A copy of the part for writes, because other tensors share the part itself.
    copy: Option<Block>,
}

impl AllocationController for Part {
    fn alloc_align(&self) -> usize {
        self.align
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        if self.copy.is_none() {
            if !policy.copy_allowed() {
                return Err(AccessError::WouldCopy);
            }
            // SAFETY: as in `memory`.
            let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) };
            self.copy = Some(Block::copy_of(bytes));
        }
        let copy = self.copy.as_mut().expect("it has been made");
        // SAFETY: the caller writes only initialised bytes.
        unsafe { copy.memory_mut(policy) }
    }

    fn memory(&self, policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        if let Some(copy) = &self.copy {
            return copy.memory(policy);
        }
        // SAFETY: the part has been written, its memory is kept alive, and nothing writes to it any
        // more.
        Ok(unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.bytes) })
    }
}

impl Room {
    /// Makes room for `elements` elements.
    pub(super) fn new(elements: usize, dtype: DType) -> Self {
        let bytes = elements * dtype.size();
        let block = Block::new(bytes);
        Self {
            start: block.start(),
            memory: Arc::new(block.into_bytes(bytes)),
            elements,
            dtype,
        }
    }

    /// Returns a part of the tensor, to be written.
    pub(super) fn place(&self, elements: Range<usize>) -> Place {
        assert!(elements.start <= elements.end && elements.end <= self.elements);
        let size = self.dtype.size();
        Place {
            _memory: self.memory.clone(),
            // SAFETY: within the memory.
            start: unsafe { self.start.add(elements.start * size) },
            bytes: elements.len() * size,
        }
    }

    /// Returns a part of the tensor that has been written and will not be written again.
    pub(super) fn part(&self, elements: Range<usize>) -> DispatchTensor {
        let place = self.place(elements);
        let bytes = place.bytes;
        let part = Part {
            _memory: place._memory,
            start: place.start,
            bytes,
            align: self.dtype.size(),
            copy: None,
        };
        // SAFETY: the part has this many bytes, and they are initialised, as all bytes of a `Block`
        // are even before they are written.
        self.tensor(unsafe { Bytes::from_controller(Box::new(part), bytes) }.into())
    }

    /// Makes a tensor of this element type on some memory.
    fn tensor(&self, memory: Arc<Bytes>) -> DispatchTensor {
        let elements = memory.len() / self.dtype.size();
        let layout = Layout::contiguous(Shape::from([elements]));
        of_cpu(FlexTensor::from_arc(memory, layout, self.dtype))
    }

    /// Writes the combination of values, in order, to a part: the same bits as combining one value
    /// after another.
    pub(super) fn combine(&self, op: ReduceOp, elements: Range<usize>, values: &[&[u8]]) {
        let combine = combine_of(self.dtype).expect("a type that is combined here");
        combine(op, &self.place(elements), values);
    }

    /// Returns the tensor, once every part has been written.
    pub(super) fn into_tensor(self) -> DispatchTensor {
        self.tensor(self.memory.clone())
    }
}

/// Combines flat tensors of numbers on the CPU, all of the same size, in order.
pub(super) fn combination(op: ReduceOp, tensors: Vec<DispatchTensor>) -> DispatchTensor {
    let (elements, dtype) = (tensors[0].shape().num_elements(), tensors[0].dtype());
    let tensors: Vec<DispatchTensor> = tensors.into_iter().map(in_one_piece).collect();
    let values: Vec<&[u8]> = tensors
        .iter()
        .map(|part| cells(part, 0..elements))
        .collect();
    let room = Room::new(elements, dtype);
    room.combine(op, 0..elements, &values);
    room.into_tensor()
}

/// Concatenates tensors of numbers on the CPU.
pub(super) fn concatenation(tensors: Vec<DispatchTensor>) -> DispatchTensor {
    let dtype = tensors[0].dtype();
    let parts: Vec<DispatchTensor> = tensors.into_iter().map(in_one_piece).collect();
    let elements = |part: &DispatchTensor| part.shape().num_elements();
    let room = Room::new(parts.iter().map(elements).sum(), dtype);
    let mut start = 0;
    for part in &parts {
        let end = start + elements(part);
        room.place(start..end).write(cells(part, 0..end - start));
        start = end;
    }
    room.into_tensor()
}

/// Writes the combination of values to a place.
type Combine = fn(ReduceOp, &Place, &[&[u8]]);

fn combine<E: Number>(op: ReduceOp, place: &Place, values: &[&[u8]]) {
    match op {
        ReduceOp::Sum => fold(place, values, E::sum),
        ReduceOp::Product => fold(place, values, E::product),
        ReduceOp::Max => fold(place, values, extremum(|first: &E, second| second > first)),
        ReduceOp::Min => fold(place, values, extremum(|first: &E, second| second < first)),
    }
}

/// Makes a function that returns the better of two values. NaN always propagates.
fn extremum<E: Number>(is_better: impl Fn(&E, &E) -> bool) -> impl Fn(E, E) -> E {
    move |first, second| {
        if is_better(&first, &second) || second.is_nan() {
            second
        } else {
            first
        }
    }
}

/// Returns a range of elements of a value.
fn part<'a, E: Number>(value: &'a [u8], cells: &Range<usize>) -> &'a [E] {
    &bytemuck::cast_slice(value)[cells.clone()]
}

fn fold<E: Number>(place: &Place, values: &[&[u8]], combine: impl Fn(E, E) -> E) {
    // SAFETY: nothing else uses the place, and its bytes are initialised.
    let results = unsafe { std::slice::from_raw_parts_mut(place.start.as_ptr(), place.bytes) };
    let results: &mut [E] = bytemuck::cast_slice_mut(results);
    // The outer loop is over stretches, the inner one over values: the results stay in cache and
    // reach memory once.
    for (stretch, results) in results.chunks_mut(STRETCH).enumerate() {
        let cells = stretch * STRETCH..stretch * STRETCH + results.len();
        let (first, rest) = values.split_first().expect("a value");
        let first = part::<E>(first, &cells);
        let Some((second, rest)) = rest.split_first() else {
            results.copy_from_slice(first);
            continue;
        };
        let pairs = first.iter().zip(part::<E>(second, &cells));
        results
            .iter_mut()
            .zip(pairs)
            .for_each(|(result, (first, second))| *result = combine(*first, *second));
        for value in rest {
            let pairs = results.iter_mut().zip(part::<E>(value, &cells));
            pairs.for_each(|(result, more)| *result = combine(*result, *more));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution, Tensor};

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
            let all: Vec<_> = parts.iter().cloned().map(Tensor::into_dispatch).collect();
            let sum = combination(ReduceOp::Sum, all.clone());
            let data = |tensor| Tensor::<1>::from_dispatch(tensor).into_data();
            data(sum).assert_eq(&added.into_data(), true);
            data(concatenation(all)).assert_eq(&Tensor::cat(parts, 0).into_data(), true);
        }
        let halves = Tensor::<1>::ones([3], (&device, DType::F16));
        assert!(!holds(&halves.into_dispatch()));
    }

    #[test]
    fn parts_are_read_while_others_are_written() {
        let room = Room::new(8, DType::F32);
        let bytes = |value: f32, elements: usize| value.to_ne_bytes().repeat(elements);
        room.place(0..3).write(&bytes(1.0, 3));
        let part = room.part(0..3);
        assert_eq!(numbers(&part).unwrap().bytes().len(), 3 * 4);
        std::thread::scope(|scope| {
            let (place, written) = (room.place(3..8), bytes(2.0, 5));
            scope.spawn(move || place.write(&written));
            assert_eq!(cells(&part, 0..3), bytes(1.0, 3));
        });
        // A write to a part goes to a copy of it.
        let mut sole = numbers(&part).unwrap().clone();
        drop(part);
        sole.storage_mut::<f32>()[0] = 3.0;
        assert_eq!(sole.storage::<f32>(), [3.0, 1.0, 1.0]);
        let all = Tensor::<1>::from_dispatch(room.into_tensor()).into_data();
        all.assert_eq(&[1.0_f32, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0].into(), true);
    }
}
