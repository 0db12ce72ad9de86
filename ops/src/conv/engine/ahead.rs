//! Fetching what a later tile is copied from, while a strip is computed.

use crate::kernel::memory::prefetch;

/// Bytes that lie side by side and will be read soon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    /// The first of them. Not to be read through: it only says where they are.
    pub start: *const u8,
    /// Their number.
    pub bytes: usize,
}

/// Fetches stretches in so many steps, a cache line in each: more at once would keep cells that are needed now waiting.
#[derive(Debug)]
pub(crate) struct Fetcher<'a> {
    stretches: std::slice::Iter<'a, Stretch>,
    /// Steps for each stretch.
    share: usize,
    /// Steps left for this one.
    left: usize,
    next: *const u8,
    /// Bytes from one step to the next.
    pace: usize,
}

impl<'a> Fetcher<'a> {
    /// Nothing is fetched yet.
    pub(crate) fn new(stretches: &'a [Stretch], steps: usize) -> Self {
        /// What is fetched for want of anything else: an address that leads nowhere would be looked up each time.
        static NOTHING: u8 = 0;
        Self {
            stretches: stretches.iter(),
            share: (steps / stretches.len().max(1)).max(1),
            left: 0,
            next: &raw const NOTHING,
            pace: 0,
        }
    }

    /// Fetches the next line.
    #[inline(always)]
    pub(crate) fn step(&mut self) {
        if self.left == 0 {
            self.left = self.share;
            if let Some(stretch) = self.stretches.next() {
                self.next = stretch.start;
                self.pace = stretch.bytes.div_ceil(self.share);
            }
        }
        self.left -= 1;
        prefetch(self.next);
        self.next = self.next.wrapping_add(self.pace);
    }
}
