//! Dense attention as kernels get it: sizes, and where operands and results lie.

use halocline_core::RandomKey;

use crate::kernel::memory::Shared;

/// The largest score of no key: smaller than any, and still a number.
pub(crate) const LOWEST: f64 = -1e30;

/// `[batch, tokens, heads, width]` elements that lie in one piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<E> {
    pub elements: Shared<E>,
    /// The token that they begin with.
    pub first: usize,
    pub tokens: usize,
    pub heads: usize,
    pub width: usize,
}

impl<E: Copy> Tokens<E> {
    pub(super) fn at(&self, batch: usize, token: usize, head: usize) -> *mut E {
        let row = (batch * self.tokens + token - self.first) * self.heads + head;
        // SAFETY: an address, which is within the elements for tokens that are there.
        unsafe { self.elements.at(0) }.wrapping_add(row * self.width)
    }

    /// From a token to the next.
    pub(super) fn pitch(&self) -> usize {
        self.heads * self.width
    }
}

/// Attention of the queries of a rank to a block of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense<E> {
    pub batch: usize,
    /// Heads of queries that share one of keys and values.
    pub shared: usize,
    pub scale: f64,
    pub queries: Tokens<E>,
    pub keys: Tokens<E>,
    pub values: Tokens<E>,
    /// Where only keys up to the query's own place count: the places of the first query and of the first key.
    pub causal: Option<[usize; 2]>,
    pub bias: Option<Bias<E>>,
    pub dropout: Option<Dropout>,
    /// Whether operands are bf16 numbers, and so may be factors of products, rounded to bf16.
    pub halves: bool,
    pub results: Results<E>,
}

/// What is added to scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bias<E> {
    first: *const E,
    /// From a sample, query, head and key to the next; zero where it is the same for all.
    steps: [usize; 4],
}

// SAFETY: elements to read, which outlive the pass.
unsafe impl<E: Sync> Send for Bias<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Bias<E> {}

impl<E: Copy> Bias<E> {
    /// A bias of this shape, `[batch, queries, heads, keys]`, of which the kernel's keys begin at `first_key`.
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
    /// The pair must be there.
    pub(super) unsafe fn at(&self, [batch, query, head, key]: [usize; 4]) -> E {
        let [by_batch, by_query, by_head, by_key] = self.steps;
        let offset = batch * by_batch + query * by_query + head * by_head + key * by_key;
        // SAFETY: the caller's.
        unsafe { *self.first.wrapping_add(offset) }
    }
}

/// Dropout of weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    pub probability: f64,
    pub key: RandomKey,
    /// The whole index space, `[batch, queries, heads, keys]`.
    pub shape: [usize; 4],
    /// Where the kernel's operands begin in it.
    pub first: [usize; 4],
}

impl Dropout {
    /// The number of a pair in the whole.
    pub(super) fn number(&self, pair: [usize; 4]) -> usize {
        let dims = 0..4;
        dims.fold(0, |number, dim| {
            number * self.shape[dim] + self.first[dim] + pair[dim]
        })
    }
}

/// What is computed, and what of the forward pass it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Results<E> {
    /// Adds weighted values to `output`, relative to the largest score so far, and exponentials to `sum`.
    Forward {
        output: Tokens<E>,
        most: Tokens<E>,
        sum: Tokens<E>,
    },
    /// Adds to those gradients that are wanted, of queries, keys and values.
    Gradients {
        from: Backward<E>,
        wanted: [Option<Tokens<E>>; 3],
    },
}

/// What a backward pass starts from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward<E> {
    /// The gradient of the output.
    pub cotangent: Tokens<E>,
    /// The logarithms of the sums of exponentials.
    pub lse: Tokens<E>,
    /// The products of output and cotangent.
    pub products: Tokens<E>,
}
