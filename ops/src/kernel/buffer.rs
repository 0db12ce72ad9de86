//! Buffers for the results of kernels, in pooled memory.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use burn_std::Bytes;
use halocline_core::memory::Block;
use halocline_core::tasks;

use super::memory::Shared;
use super::simd::Element;

/// Number of elements that is worth a task.
const PART: usize = 1 << 16;

/// Elements of a result.
#[derive(Debug)]
pub(crate) struct Buffer<E> {
    block: Block,
    len: usize,
    elements: PhantomData<E>,
}

impl<E: Copy> Buffer<E> {
    /// Creates a buffer whose elements are all written by `fill`.
    ///
    /// # Safety
    /// `fill` must initialise all `len` elements.
    pub(crate) unsafe fn filled(len: usize, fill: impl FnOnce(Shared<E>)) -> Self {
        const { assert!(align_of::<E>() <= Block::ALIGN) };
        // SAFETY: `fill` writes all elements.
        let block = unsafe { Block::uninit(len * size_of::<E>()) };
        fill(Shared::at_start(block.start().cast()));
        Self {
            block,
            len,
            elements: PhantomData,
        }
    }

    /// Returns the elements.
    pub(crate) fn elements_mut(&mut self) -> &mut [E] {
        // SAFETY: the block holds `len` elements, which `filled` initialised; the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.block.start().cast().as_ptr(), self.len) }
    }

    /// Returns the elements for tasks that write disjoint parts.
    pub(crate) fn shared(&mut self) -> Shared<E> {
        Shared::at_start(self.block.start().cast())
    }

    /// Converts the elements to the type from which tensors are made.
    pub(crate) fn into_bytes(self) -> Bytes {
        self.block.into_bytes(self.len * size_of::<E>())
    }
}

/// Creates a buffer filled with one value.
pub(crate) fn filled<E: Element>(len: usize, value: f64) -> Buffer<E> {
    let value = E::from_f64(value);
    let fill = |elements: Shared<E>, range: Range<usize>| {
        for index in range {
            // SAFETY: within the buffer, and written by one task only.
            unsafe { *elements.at(index) = value };
        }
    };
    // SAFETY: all elements are written.
    unsafe {
        Buffer::filled(len, |elements| match len {
            0..PART => fill(elements, 0..len),
            _ => tasks::for_each(len.div_ceil(PART), 1, |part| {
                fill(elements, part * PART..len.min((part + 1) * PART));
            }),
        })
    }
}

/// Creates a buffer in parts of `part` elements: each is zeroed, then modified by `run` while in
/// cache.
pub(crate) fn scattered<E: Element>(
    len: usize,
    part: usize,
    run: impl Fn(usize, &mut [E]) + Sync,
) -> Buffer<E> {
    let part = part.max(1);
    let together = (PART / 4 / part).max(1);
    // SAFETY: the tasks write all elements, each task its own parts.
    unsafe {
        Buffer::filled(len, |elements| {
            tasks::for_each(len.div_ceil(part), together, |number| {
                let range = number * part..len.min((number + 1) * part);
                let start: *mut E = elements.at(range.start);
                start.write_bytes(0, range.len());
                run(number, elements.slice(range));
            });
        })
    }
}

impl<E> Deref for Buffer<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        // SAFETY: the block holds `len` elements, which `filled` initialised.
        unsafe { std::slice::from_raw_parts(self.block.start().cast().as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zeros_but_for_what_is_changed() {
        for (len, part) in [(0, 3), (7, 3), (1 << 18, 512), (5, 0)] {
            let buffer = scattered::<f32>(len, part, |number, part| part[0] = number as f32 + 1.0);
            let part = part.max(1);
            let expected = |index: usize| match index % part {
                0 => (index / part) as f32 + 1.0,
                _ => 0.0,
            };
            assert_eq!(buffer.len(), len);
            assert!((0..len).all(|index| buffer[index] == expected(index)));
        }
    }

    #[test]
    fn buffers_hold_what_they_were_filled_with() {
        for len in [0, 1, 7, 1000, 1 << 18, (1 << 18) + 1] {
            let buffer = filled::<f32>(len, 3.0);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&value| value == 3.0));
        }
    }
}
