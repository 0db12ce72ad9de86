//! Neighborhood attention as kernels get it: sizes, and where operands and results lie.

use crate::attention::engine::rows::Rows;
use crate::attention::engine::tiles::{Dim, Side};
use crate::kernel::simd::Element;

/// Attention of the queries of a rank to the keys that are there.
#[derive(Clone, Debug)]
pub(crate) struct Windows<'a, E> {
    pub dims: [Dim; 3],
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of queries that share one of keys and values.
    pub shared: usize,
    /// Elements of a head of queries and keys, and of values.
    pub widths: [usize; 2],
    pub scale: f64,
    pub queries: Rows<'a, E>,
    pub keys: Rows<'a, E>,
    pub values: Rows<'a, E>,
    pub results: Results<'a, E>,
}

/// What is computed, and what of the forward pass it needs.
#[derive(Clone, Debug)]
pub(crate) enum Results<'a, E> {
    /// Weighted means of values, and the logarithms of the sums of exponentials.
    Forward {
        output: Rows<'a, E>,
        lse: Rows<'a, E>,
    },
    /// Gradients of queries.
    Queries {
        from: Backward<'a, E>,
        gradient: Rows<'a, E>,
    },
    /// Gradients of keys and values.
    Keys {
        from: Backward<'a, E>,
        key: Rows<'a, E>,
        value: Rows<'a, E>,
    },
}

/// What a backward pass starts from.
#[derive(Clone, Debug)]
pub(crate) struct Backward<'a, E> {
    /// The gradient of the output.
    pub cotangent: Rows<'a, E>,
    /// The logarithms of the sums of exponentials.
    pub lse: Rows<'a, E>,
    /// The products of output and cotangent.
    pub products: Rows<'a, E>,
}

impl<E: Element> Windows<'_, E> {
    /// Which cells are targets.
    pub(super) fn side(&self) -> Side {
        match self.results {
            Results::Keys { .. } => Side::Keys,
            _ => Side::Queries,
        }
    }

    /// The multiplications for one query and key.
    pub(super) fn products(&self) -> usize {
        let [key, value] = self.widths;
        match self.results {
            Results::Forward { .. } => key + value,
            Results::Queries { .. } => 2 * key + value,
            Results::Keys { .. } => 2 * (key + value),
        }
    }
}
