//! Prefetches the cells of a later tile while a strip is computed.

use crate::kernel::memory::{prefetch, prefetch_run};

/// A contiguous range of memory that will be read soon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    /// Address of the first byte; never dereferenced.
    pub start: *const u8,
    /// Number of bytes.
    pub bytes: usize,
}

/// Prefetches stretches at once.
#[inline(always)]
pub(crate) fn ask_for(stretches: &[Stretch]) {
    for stretch in stretches {
        prefetch_run(stretch.start, stretch.bytes);
    }
}

/// Divides stretches evenly among strips.
pub(crate) fn shares(ahead: &[Stretch], strips: usize) -> impl Iterator<Item = &[Stretch]> {
    let end = move |strip: usize| ahead.len() * strip / strips;
    (0..strips).map(move |strip| &ahead[end(strip)..end(strip + 1)])
}

/// Prefetches stretches in a number of steps, one cache line in each: more at once would delay the
/// cells that are needed now.
#[derive(Debug)]
pub(crate) struct Fetcher<'a> {
    stretches: std::slice::Iter<'a, Stretch>,
    /// Number of steps for each stretch.
    share: usize,
    /// Number of steps left for the current stretch.
    left: usize,
    next: *const u8,
    /// Number of bytes from one step to the next.
    pace: usize,
}

impl<'a> Fetcher<'a> {
    /// Creates a fetcher at its first step.
    pub(crate) fn new(stretches: &'a [Stretch], steps: usize) -> Self {
        /// A valid address for steps with nothing to fetch: an invalid one would miss the TLB each
        /// time.
        static NOTHING: u8 = 0;
        Self {
            stretches: stretches.iter(),
            share: (steps / stretches.len().max(1)).max(1),
            left: 0,
            next: &raw const NOTHING,
            pace: 0,
        }
    }

    /// Prefetches the next line.
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
