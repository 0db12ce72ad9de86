//! Memory pool for tensors on the CPU.
//!
//! An allocation of many megabytes comes fresh from the operating system, which clears every page
//! on first touch; that can cost more than the kernel. A training step produces results of the same
//! sizes again and again, so the pool keeps large blocks when their tensors are dropped and reuses
//! them for later results of about the same size. Blocks in use and kept blocks together never
//! exceed the peak of blocks in use.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};

use crate::lock::lock;
pub use tensors::{CpuFloat, contiguous, elements, elements_mut, is_cpu, unwritten};

mod tensors;

/// Blocks smaller than this are left to the allocator.
const SMALL: usize = 1 << SMALL_BITS;
/// Small enough to pool halos of a few kilobytes, for which allocators would merge and split blocks
/// each time.
const SMALL_BITS: u32 = 10;
const LINE: usize = 64;
const PAGE: usize = 4096;
/// The largest block that counts as a halo; the smallest is a page.
const HALO: usize = 256 << 10;

/// Block of memory, returned to the pool when dropped.
///
/// # Example
/// ```
/// use halocline_core::memory::Block;
///
/// let mut block = Block::copy_of(&[1, 2, 3]);
/// block.bytes_mut()[0] = 7;
/// assert_eq!(block.into_bytes(3)[..], [7, 2, 3]);
/// ```
#[derive(Debug)]
pub struct Block {
    start: NonNull<u8>,
    layout: Layout,
    /// Bytes of the allocation before the block.
    lead: usize,
}

// SAFETY: a block owns its memory, like a `Vec<u8>`.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

#[derive(Debug)]
struct Pool {
    /// Unused blocks with the time at which each was kept, oldest first, grouped by the number of
    /// bits of their size.
    kept: [VecDeque<(u64, Block)>; (usize::BITS - SMALL_BITS) as usize],
    /// The number of blocks kept so far: the clock of `kept`.
    now: u64,
    kept_bytes: usize,
    used_bytes: usize,
    peak_bytes: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    kept: [const { VecDeque::new() }; (usize::BITS - SMALL_BITS) as usize],
    now: 0,
    kept_bytes: 0,
    used_bytes: 0,
    peak_bytes: 0,
});

fn pool() -> MutexGuard<'static, Pool> {
    lock(&POOL)
}

/// Returns the memory of dropped tensors to the system, instead of keeping it for later ones.
///
/// CPU kernels keep large blocks, never more than the peak in use, and the C library keeps smaller
/// freed blocks. Call this before work that needs much memory for other purposes.
///
/// # Example
/// ```
/// use halocline_core::memory::{Block, release_memory};
///
/// drop(Block::new(1 << 20)); // kept for the next block of about this size
/// release_memory();
/// assert!(Block::new(1 << 20).size() >= 1 << 20);
/// ```
pub fn release_memory() {
    let mut pool = pool();
    pool.peak_bytes = pool.used_bytes;
    pool.shrink();
    drop(pool);
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it releases only pages without live allocations.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The alignment of a new block: a cache line, or a page for halos, because the system copies
/// messages between processes page by page.
fn alignment(bytes: usize) -> usize {
    match bytes {
        ..SMALL => Block::ALIGN,
        PAGE..=HALO => PAGE,
        _ => LINE,
    }
}

/// The allocation for a block. Many pages are best cleared by the system when a thread first
/// touches them; for an alignment greater than its own, Rust's allocator clears the memory at once,
/// on one thread.
fn allocation(block: Layout) -> Layout {
    match block.size() {
        ..=HALO => block,
        bytes => Layout::from_size_align(bytes + LINE, Block::ALIGN).unwrap_or(block),
    }
}

/// The index in `kept` for blocks of this size.
fn place(bytes: usize) -> usize {
    (bytes.ilog2() - SMALL_BITS) as usize
}

impl Pool {
    /// Takes a kept block that is at most a quarter larger than needed.
    fn take(&mut self, bytes: usize) -> Option<Block> {
        let most = bytes + bytes / 4;
        let block = (place(bytes)..=place(most)).find_map(|place| {
            let kept = &mut self.kept[place];
            // The latest first: it is likely to be in the processor's cache.
            let latest = kept.iter().enumerate().rev();
            let sizes = latest.map(|(index, (_, block))| (index, block.layout.size()));
            let fitting = sizes.filter(|(_, size)| (bytes..=most).contains(size));
            let (index, _) = fitting.min_by_key(|(_, size)| *size)?;
            kept.remove(index)
        });
        let (_, block) = block?;
        self.kept_bytes -= block.layout.size();
        Some(block)
    }

    fn keep(&mut self, block: Block) {
        let bytes = block.layout.size();
        self.used_bytes -= bytes;
        self.kept_bytes += bytes;
        self.now += 1;
        self.kept[place(bytes)].push_back((self.now, block));
        self.shrink();
    }

    /// Frees kept blocks until the total is within the peak.
    fn shrink(&mut self) {
        while self.used_bytes + self.kept_bytes > self.peak_bytes {
            let oldest = self.kept.iter_mut().filter(|kept| !kept.is_empty());
            let oldest = oldest.min_by_key(|kept| kept.front().map(|(since, _)| *since));
            let Some((_, block)) = oldest.and_then(VecDeque::pop_front) else {
                return;
            };
            self.kept_bytes -= block.layout.size();
            block.free();
        }
    }
}

impl Block {
    /// The alignment of all blocks.
    pub const ALIGN: usize = 16;

    /// Makes a block of at least `bytes` bytes, which are initialised: zero, or left from earlier
    /// use.
    pub fn new(bytes: usize) -> Self {
        // SAFETY: the allocator initialises all bytes.
        unsafe { Self::allocate(bytes, alloc_zeroed) }
    }

    /// Makes a block of at least `bytes` bytes, which may be uninitialised.
    ///
    /// # Safety
    /// All bytes must be written before the block is used in any way other than through
    /// [`start`](Self::start).
    pub unsafe fn uninit(bytes: usize) -> Self {
        // SAFETY: guaranteed by the caller. Large blocks are reused, and must be initialised for
        // that.
        unsafe { Self::allocate(bytes, if bytes < SMALL { alloc } else { alloc_zeroed }) }
    }

    /// Makes a block that starts with a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        // SAFETY: all bytes are written, to memory that does not overlap `bytes`.
        unsafe {
            let block = Self::uninit(bytes.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), block.start.as_ptr(), bytes.len());
            block
        }
    }

    /// Takes a block from the pool, or makes one with `allocate`.
    ///
    /// # Safety
    /// If `allocate` does not initialise memory, the caller must.
    unsafe fn allocate(bytes: usize, allocate: unsafe fn(Layout) -> *mut u8) -> Self {
        let layout = match Layout::from_size_align(bytes, alignment(bytes)) {
            Ok(layout) => layout,
            Err(error) => panic!("{bytes} bytes for a result: {error}"),
        };
        if bytes == 0 {
            return Self {
                start: layout.dangling_ptr(),
                layout,
                lead: 0,
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
        let allocation = allocation(layout);
        // SAFETY: the size is not zero.
        let first = NonNull::new(unsafe { allocate(allocation) });
        let first = first.unwrap_or_else(|| handle_alloc_error(allocation));
        let lead = first.align_offset(layout.align());
        Self {
            // SAFETY: an allocation with a smaller alignment has room for the lead.
            start: unsafe { first.add(lead) },
            layout,
            lead,
        }
    }

    /// Returns the memory to the allocator.
    fn free(self) {
        let block = std::mem::ManuallyDrop::new(self);
        // SAFETY: it was allocated with this layout, and has no other user because the block is
        // consumed.
        unsafe {
            dealloc(
                block.start.sub(block.lead).as_ptr(),
                allocation(block.layout),
            )
        };
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block owns its memory, is borrowed, and its bytes are initialised.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.size()) }
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block owns its memory, is borrowed mutably, and its bytes are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size()) }
    }

    /// The size in bytes.
    pub fn size(&self) -> usize {
        self.layout.size()
    }

    /// Converts the first `len` bytes to the type from which tensors are made.
    ///
    /// # Panics
    /// Panics if the block is smaller.
    pub fn into_bytes(self, len: usize) -> Bytes {
        assert!(len <= self.size(), "{len} bytes of {}", self.size());
        // SAFETY: the block has this many bytes, and they are initialised.
        unsafe { Bytes::from_controller(Box::new(self), len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let block = Self { ..*self };
        match block.size() {
            0 => std::mem::forget(block),
            bytes if bytes < SMALL => block.free(),
            _ => pool().keep(block),
        }
    }
}

impl AllocationController for Block {
    /// The alignment that all blocks have, although many have a larger one: burn makes copies with
    /// no larger alignment.
    fn alloc_align(&self) -> usize {
        Self::ALIGN
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        // SAFETY: the block owns its memory, and is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), self.size()) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: the block owns its memory, and is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.size()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_all_sizes_can_be_copied() {
        for size in [1, SMALL, PAGE, HALO, HALO + 1] {
            let bytes = Block::copy_of(&vec![3; size]).into_bytes(size);
            assert_eq!(bytes.clone()[..], vec![3; size]);
        }
    }

    #[test]
    fn blocks_begin_at_cache_lines() {
        for size in [SMALL, PAGE, HALO, HALO + 1, 1 << 20] {
            let blocks = [Block::new(size), Block::new(size)];
            assert!(
                blocks
                    .iter()
                    .all(|block| block.start().addr().get() % LINE == 0)
            );
        }
    }

    #[test]
    fn blocks_become_bytes_of_their_length() {
        let sizes = [SMALL, PAGE, HALO].map(|size| [size - 1, size, size + 1]);
        for len in [0, 1, 7].into_iter().chain(sizes.into_iter().flatten()) {
            let bytes = Block::new(len).into_bytes(len);
            assert_eq!(bytes.len(), len);
            assert!(bytes.as_ptr().cast::<u128>().is_aligned());
        }
    }

    #[test]
    fn blocks_are_used_again_within_the_peak() {
        // Other tests use the pool too, so the size is one that no other test uses.
        let size = 3 * (1 << 16) + 4 * 1021;
        let blocks = [Block::new(size), Block::new(size)];
        let starts = blocks.each_ref().map(Block::start);
        drop(blocks);
        let again = Block::new(size);
        assert!(starts.contains(&again.start()));
        let state = pool();
        assert!(state.used_bytes + state.kept_bytes <= state.peak_bytes);
    }
}
