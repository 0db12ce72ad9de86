//! Memory access of kernels: views of fields, shared buffers, prefetching, scratch.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

use super::simd::Element;

/// Size of a cache line in bytes.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Strided view of a field, `[batch, channels, depth, rows, columns]`. Strides count elements; they
/// may be negative or zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a, E> {
    first: *const E,
    shape: [usize; 5],
    strides: [isize; 5],
    data: PhantomData<&'a [E]>,
}

// SAFETY: a view is a shared borrow of a slice.
unsafe impl<E: Sync> Send for View<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for View<'_, E> {}

impl<'a, E> View<'a, E> {
    /// Creates the view whose first element is `data[start]`.
    ///
    /// # Panics
    /// Panics if an element would lie outside `data`.
    pub(crate) fn new(data: &'a [E], start: usize, shape: [usize; 5], strides: [isize; 5]) -> Self {
        let (mut low, mut high) = (start as isize, start as isize);
        for (size, stride) in shape.iter().zip(strides) {
            let reach = (size.max(&1) - 1) as isize * stride;
            low += reach.min(0);
            high += reach.max(0);
        }
        let empty = shape.contains(&0);
        assert!(
            empty || (low >= 0 && high < data.len() as isize),
            "a view of {shape:?} with strides {strides:?} leaves its {} elements",
            data.len()
        );
        // `wrapping_add`, because an empty view may start outside `data`.
        let first = data.as_ptr().wrapping_add(start);
        Self {
            first,
            shape,
            strides,
            data: PhantomData,
        }
    }

    /// Number of elements in each dim.
    pub(crate) fn shape(&self) -> [usize; 5] {
        self.shape
    }

    /// Strides.
    pub(crate) fn strides(&self) -> [isize; 5] {
        self.strides
    }

    /// Pointer to an element. Reading it is sound for indices within the shape.
    pub(crate) fn at(&self, index: [usize; 5]) -> *const E {
        let offset: isize = (0..5)
            .map(|dim| index[dim] as isize * self.strides[dim])
            .sum();
        self.first.wrapping_offset(offset)
    }
}

/// Buffer whose disjoint elements are written by tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared<E>(*mut E);

// SAFETY: writers promise that no two tasks access the same element.
unsafe impl<E: Send> Send for Shared<E> {}
// SAFETY: as above.
unsafe impl<E: Send> Sync for Shared<E> {}

impl<E> Shared<E> {
    /// Creates a buffer that begins at a pointer.
    pub(crate) fn at_start(start: std::ptr::NonNull<E>) -> Self {
        Self(start.as_ptr())
    }

    /// Shares the elements of a slice, which must outlive this buffer.
    pub(crate) fn new(elements: &mut [E]) -> Self {
        Self(elements.as_mut_ptr())
    }

    /// Shares the elements of a slice for reading only; it must outlive this buffer.
    pub(crate) fn to_read(elements: &[E]) -> Self {
        Self(elements.as_ptr().cast_mut())
    }

    /// Reinterprets the elements as another type of the same size.
    pub(crate) fn cast<F>(self) -> Shared<F> {
        assert_eq!(size_of::<E>(), size_of::<F>());
        Shared(self.0.cast())
    }

    /// Buffer of the elements from an index on.
    pub(crate) fn starting_at(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }

    /// Pointer to an element.
    ///
    /// # Safety
    /// `index` must lie in the buffer.
    pub(crate) unsafe fn at(self, index: usize) -> *mut E {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.add(index) }
    }

    /// Elements of a range.
    ///
    /// # Safety
    /// The elements must lie in the buffer and be initialised, or written before they are read;
    /// nothing else may access them meanwhile.
    pub(crate) unsafe fn slice<'a>(self, range: Range<usize>) -> &'a mut [E] {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at(range.start), range.len()) }
    }
}

/// Prefetches a cache line into the L2 cache, if the instruction set can.
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults; every processor of this architecture has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches `count` elements into the L2 cache, for use soon. On Zen 4, prefetching rows of heads
/// into L1 was no faster than not prefetching.
#[inline(always)]
pub(crate) fn prefetch_run<E>(first: *const E, count: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let first = first.cast::<u8>();
        let lead = first.addr() % LINE;
        let mut ahead = 0;
        while ahead < lead + count * size_of::<E>() {
            prefetch(first.wrapping_add(ahead).wrapping_sub(lead));
            ahead += LINE;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, count);
}

/// Prefetches the cache lines of a block to be written: `rows` rows of `elements` elements,
/// `stride` apart.
///
/// A write to a line that is in no cache waits until the line is fetched.
#[inline(always)]
pub(crate) fn prefetch_to_write<E>(first: *const E, [rows, elements]: [usize; 2], stride: usize) {
    #[cfg(target_arch = "x86_64")]
    for row in 0..rows {
        for column in (0..elements).step_by(LINE / size_of::<E>()) {
            let address = first.wrapping_add(row * stride + column);
            // SAFETY: a hint that never faults; every processor of this architecture has it.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_ET0>(address.cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, rows, elements, stride);
}

/// Calls `f` with a scratch buffer of this thread, which holds leftover values.
///
/// Inlined, so that `f` is compiled for the instruction set of the caller.
#[inline(always)]
pub(crate) fn with_scratch<E: Element>(len: usize, f: impl FnOnce(&mut [E])) {
    thread_local! {
        static SCRATCH: Cell<Vec<u64>> = const { Cell::new(Vec::new()) };
    }
    const {
        assert!(
            align_of::<E>() <= align_of::<u64>() && size_of::<u64>().is_multiple_of(size_of::<E>())
        )
    };
    // Taken out during use: if rayon runs another kernel on this thread meanwhile, it gets its own
    // buffer.
    let mut scratch = SCRATCH.take();
    // Eight extra words, so that the buffer can begin at a cache line.
    let words = (len * size_of::<E>()).div_ceil(size_of::<u64>()) + 8;
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    let skip = scratch.as_ptr().align_offset(64);
    let room = &mut scratch[skip..];
    // SAFETY: aligned for `E`, initialised, long enough, and any bits are a float.
    let elements = unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast::<E>(), len) };
    f(elements);
    SCRATCH.set(scratch);
}
