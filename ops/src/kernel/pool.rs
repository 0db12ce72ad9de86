//! Where kernels write: results, in memory that is used again.
//!
//! An allocation of many megabytes comes fresh from the operating system, which clears every page on first touch; that
//! can cost more than the kernel. A training step makes the same results again and again, so large blocks are kept when
//! their tensor is dropped, and the next result of about that size gets one. Blocks in use and kept never take more
//! memory together than blocks in use once did at the same time.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::memory::Shared;

/// Blocks smaller than this are left to the allocator.
const SMALL: usize = 1 << 20;
/// Blocks begin at a cache line.
#[repr(align(64))]
struct Line;

/// A block of memory, given back to the pool when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block owns its memory, like a `Vec<u8>`.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

#[derive(Debug)]
struct Pool {
    /// Blocks that nobody uses, the longest kept first.
    kept: VecDeque<Block>,
    kept_bytes: usize,
    used_bytes: usize,
    peak_bytes: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    kept: VecDeque::new(),
    kept_bytes: 0,
    used_bytes: 0,
    peak_bytes: 0,
});

fn pool() -> MutexGuard<'static, Pool> {
    // The pool is consistent between statements: a panic elsewhere does not matter.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the memory of dropped results back to the system, rather than keep it for the next ones.
///
/// CPU kernels keep large blocks, never more than was once in use at a time. Worth a call where a program goes on to work
/// that needs much memory for something else.
pub fn release_memory() {
    let mut pool = pool();
    pool.peak_bytes = pool.used_bytes;
    pool.shrink();
}

impl Pool {
    /// A kept block that is at most a quarter larger than needed.
    fn take(&mut self, bytes: usize) -> Option<Block> {
        let fits = |block: &Block| (bytes..=bytes + bytes / 4).contains(&block.layout.size());
        let candidates = self
            .kept
            .iter()
            .enumerate()
            .filter(|(_, block)| fits(block));
        let (index, _) = candidates.min_by_key(|(_, block)| block.layout.size())?;
        let block = self.kept.remove(index)?;
        self.kept_bytes -= block.layout.size();
        Some(block)
    }

    /// Frees kept blocks until all blocks fit into the peak.
    fn shrink(&mut self) {
        while self.used_bytes + self.kept_bytes > self.peak_bytes
            && let Some(block) = self.kept.pop_front()
        {
            self.kept_bytes -= block.layout.size();
            block.free();
        }
    }
}

impl Block {
    /// The alignment of all blocks.
    pub(crate) const ALIGN: usize = align_of::<Line>();

    /// A block of at least so many bytes, which are initialised: zero, or left from earlier use.
    fn new(bytes: usize) -> Self {
        let layout = match Layout::from_size_align(bytes, Self::ALIGN) {
            Ok(layout) => layout,
            Err(error) => panic!("{bytes} bytes for a result: {error}"),
        };
        if bytes == 0 {
            return Self {
                start: NonNull::<Line>::dangling().cast(),
                layout,
            };
        }
        if bytes >= SMALL {
            let mut pool = pool();
            let kept = pool.take(bytes);
            pool.used_bytes += kept.as_ref().map_or(bytes, |block| block.layout.size());
            pool.peak_bytes = pool.peak_bytes.max(pool.used_bytes);
            pool.shrink();
            if let Some(block) = kept {
                return block;
            }
        }
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        Self {
            start: start.unwrap_or_else(|| handle_alloc_error(layout)),
            layout,
        }
    }

    /// Gives the memory back to the allocator.
    fn free(self) {
        let block = std::mem::ManuallyDrop::new(self);
        // SAFETY: it was allocated with this layout, and nobody uses it: the block is consumed.
        unsafe { dealloc(block.start.as_ptr(), block.layout) };
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Self { start, layout } = *self;
        let block = Self { start, layout };
        match layout.size() {
            0 => std::mem::forget(block),
            bytes if bytes < SMALL => block.free(),
            bytes => {
                let mut pool = pool();
                pool.used_bytes -= bytes;
                pool.kept_bytes += bytes;
                pool.kept.push_back(block);
                pool.shrink();
            }
        }
    }
}

/// The elements of a result.
#[derive(Debug)]
pub(crate) struct Buffer<E> {
    block: Block,
    len: usize,
    elements: PhantomData<E>,
}

impl<E: Copy> Buffer<E> {
    /// A new buffer that `fill` writes every element of.
    ///
    /// # Safety
    /// `fill` must initialise all `len` elements.
    pub(crate) unsafe fn filled(len: usize, fill: impl FnOnce(Shared<E>)) -> Self {
        const { assert!(align_of::<E>() <= Block::ALIGN) };
        let block = Block::new(len * size_of::<E>());
        fill(Shared::at_start(block.start.cast()));
        Self {
            block,
            len,
            elements: PhantomData,
        }
    }

    /// The block that holds the elements, and how many bytes of it they take.
    pub(crate) fn into_block(self) -> (Block, usize) {
        (self.block, self.len * size_of::<E>())
    }
}

impl<E> Deref for Buffer<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        // SAFETY: the block holds so many elements, which `filled` has initialised.
        unsafe { std::slice::from_raw_parts(self.block.start.cast().as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(len: usize, value: f32) -> Buffer<f32> {
        // SAFETY: all elements are written.
        unsafe {
            Buffer::filled(len, |elements| {
                for index in 0..len {
                    *elements.at(index) = value;
                }
            })
        }
    }

    #[test]
    fn buffers_hold_what_they_were_filled_with() {
        for len in [0, 1, 7, SMALL / 4 - 1, SMALL / 4, SMALL] {
            let buffer = filled(len, 3.0);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&value| value == 3.0));
        }
    }

    #[test]
    fn blocks_are_used_again_within_the_peak() {
        // Other tests use the pool too: sizes that no other has.
        let size = 3 * SMALL + 4 * 1021;
        let buffers = [filled(size, 1.0), filled(size, 2.0)];
        let starts = buffers.each_ref().map(|buffer| buffer.as_ptr());
        drop(buffers);
        let again = filled(size, 4.0);
        assert!(starts.contains(&again.as_ptr()));
        let state = pool();
        assert!(state.used_bytes + state.kept_bytes <= state.peak_bytes);
    }
}
