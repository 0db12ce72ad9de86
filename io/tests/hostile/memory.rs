//! Measurement of the peak memory of a call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static USED: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: isize) {
    // A thread that ends may allocate after its thread-local cells are gone.
    let _ = USED.try_with(|used| {
        used.set(used.get() + bytes);
        MOST.try_with(|most| most.set(most.get().max(used.get())))
    });
}

// SAFETY: all calls are forwarded to the system allocator with their arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Returns the result of a call and the peak number of bytes that this thread had allocated.
pub(crate) fn taken<T>(call: impl FnOnce() -> T) -> (T, usize) {
    let before = USED.get();
    MOST.set(before);
    let value = call();
    (value, (MOST.get() - before).max(0) as usize)
}
