//! Bytes of tensors that are alive, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static PEAK: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// The bytes alive now.
pub(crate) fn now() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// The most bytes that were alive at once since [`begin`].
pub(crate) fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Begins to look for a peak.
pub(crate) fn begin() {
    PEAK.store(now(), Ordering::Relaxed);
}

/// Counts the bytes of large blocks, which are the tensors.
struct Counting;

const TENSOR: usize = 4096;

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        if block.size() >= TENSOR {
            let alive = BYTES.fetch_add(block.size(), Ordering::Relaxed) + block.size();
            PEAK.fetch_max(alive, Ordering::Relaxed);
        }
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, block: Block) {
        if block.size() >= TENSOR {
            BYTES.fetch_sub(block.size(), Ordering::Relaxed);
        }
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.dealloc(pointer, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
