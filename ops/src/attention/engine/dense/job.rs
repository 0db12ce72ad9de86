//! Input of the kernels of dense attention: sizes, and the memory of operands and results.

use halocline_core::RandomKey;

use crate::kernel::memory::Shared;

/// Largest score of a query without keys: smaller than any score, and still finite.
pub(crate) const LOWEST: f64 = -1e30;

/// Elements `[batch, tokens, heads, width]`, contiguous in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<E> {
    pub elements: Shared<E>,
    /// First token of these elements.
    pub first: usize,
    pub tokens: usize,
    pub heads: usize,
    pub width: usize,
}

impl<E: Copy> Tokens<E> {
    pub(super) fn at(&self, batch: usize, token: usize, head: usize) -> *mut E {
        let row = (batch * self.tokens + token - self.first) * self.heads + head;
        // SAFETY: only computes an address, which is within the elements for tokens that exist.
        unsafe { self.elements.at(0) }.wrapping_add(row * self.width)
    }

    /// Distance between tokens.
    pub(super) fn pitch(&self) -> usize {
        self.heads * self.width
    }
}

/// Attention of the queries of a rank to a block of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense<E> {
    pub batch: usize,
    /// Number of query heads that share a head of keys and values.
    pub shared: usize,
    pub scale: f64,
    pub queries: Tokens<E>,
    pub keys: Tokens<E>,
    pub values: Tokens<E>,
    /// Positions of the first query and of the first key, if a query reaches only keys up to its
    /// own position.
    pub causal: Option<[usize; 2]>,
    pub bias: Option<Bias<E>>,
    pub dropout: Option<Dropout>,
    /// Whether operands are bf16 numbers, so that factors of products may be rounded to bf16.
    pub halves: bool,
    pub results: Results<E>,
}

/// Bias added to the scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bias<E> {
    first: *const E,
    /// Distances between samples, queries, heads and keys; zero where the bias is the same for all.
    steps: [usize; 4],
}

// SAFETY: elements to read, which outlive the pass.
unsafe impl<E: Sync> Send for Bias<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Bias<E> {}

impl<E: Copy> Bias<E> {
    /// Bias of this shape, `[batch, queries, heads, keys]`; the kernel's keys begin at `first_key`.
    pub(crate) fn new(elements: &[E], shape: &[usize], first_key: usize) -> Self {
        let mut steps = [0; 4];
        let mut step = 1;
        for (dim, size) in shape.iter().enumerate().rev() {
            steps[dim] = if *size == 1 { 0 } else { step };
            step *= size;
        }
        Self {
            first: elements.as_ptr().wrapping_add(first_key * steps[3]),
            steps,
        }
    }

    /// # Safety
    /// The pair must exist.
    pub(super) unsafe fn at(&self, [batch, query, head, key]: [usize; 4]) -> E {
        let [by_batch, by_query, by_head, by_key] = self.steps;
        let offset = batch * by_batch + query * by_query + head * by_head + key * by_key;
        // SAFETY: guaranteed by the caller.
        unsafe { *self.first.wrapping_add(offset) }
    }
}

/// Dropout of weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    pub probability: f64,
    pub key: RandomKey,
    /// Global index space, `[batch, queries, heads, keys]`.
    pub shape: [usize; 4],
    /// Start of the kernel's operands in it.
    pub first: [usize; 4],
}

impl Dropout {
    /// Global index of a pair.
    pub(super) fn number(&self, pair: [usize; 4]) -> usize {
        let dims = 0..4;
        dims.fold(0, |number, dim| {
            number * self.shape[dim] + self.first[dim] + pair[dim]
        })
    }
}

/// The requested results, and the values of the forward pass that they need.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Results<E> {
    /// Adds weighted values to `output`, relative to the largest score so far, and exponentials to
    /// `sum`.
    Forward {
        output: Tokens<E>,
        most: Tokens<E>,
        sum: Tokens<E>,
    },
    /// Adds to the requested gradients of queries, keys and values.
    Gradients {
        from: Backward<E>,
        wanted: [Option<Tokens<E>>; 3],
    },
}

/// Inputs of a backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward<E> {
    /// Gradient of the output.
    pub cotangent: Tokens<E>,
    /// Logarithms of the sums of exponentials.
    pub lse: Tokens<E>,
    /// Products of output and cotangent.
    pub products: Tokens<E>,
}
