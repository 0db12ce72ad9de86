//! Bytes of live tensors, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static PEAK: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns the bytes alive now.
pub(crate) fn now() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// Returns the peak of live bytes since [`begin`].
pub(crate) fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Starts recording the peak.
pub(crate) fn begin() {
    PEAK.store(now(), Ordering::Relaxed);
}

/// Allocator that counts the bytes of large blocks, which are the tensors.
struct Counting;

const TENSOR: usize = 4096;

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        if block.size() >= TENSOR {
            let alive = BYTES.fetch_add(block.size(), Ordering::Relaxed) + block.size();
            PEAK.fetch_max(alive, Ordering::Relaxed);
        }
        // SAFETY: the caller upholds the contract, which is the same as this function's.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, block: Block) {
        if block.size() >= TENSOR {
            BYTES.fetch_sub(block.size(), Ordering::Relaxed);
        }
        // SAFETY: the caller upholds the contract, which is the same as this function's.
        unsafe { System.dealloc(pointer, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
