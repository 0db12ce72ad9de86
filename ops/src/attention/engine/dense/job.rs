//! Dense attention as kernels get it: sizes, and where operands and results lie.

use crate::kernel::memory::Shared;

/// The largest score of no key: smaller than any, and still a number.
pub(crate) const LOWEST: f64 = -1e30;

/// `[batch, tokens, heads, width]` elements that lie in one piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<E> {
    pub elements: Shared<E>,
    pub tokens: usize,
    pub heads: usize,
    pub width: usize,
}

impl<E: Copy> Tokens<E> {
    pub(super) fn at(&self, batch: usize, token: usize, head: usize) -> *mut E {
        let row = (batch * self.tokens + token) * self.heads + head;
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
    pub results: Results<E>,
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
    /// Adds to the gradients of queries.
    Queries {
        from: Backward<E>,
        gradient: Tokens<E>,
    },
    /// Adds to the gradients of keys and values.
    Keys {
        from: Backward<E>,
        key: Tokens<E>,
        value: Tokens<E>,
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
