//! Input of the kernels of neighborhood attention: sizes, and the memory of operands and results.

use crate::attention::engine::rows::Rows;
use crate::attention::engine::tiles::{Dim, Side};
use crate::kernel::simd::Element;

/// Attention of a rank's queries to the keys that are present.
#[derive(Clone, Debug)]
pub(crate) struct Windows<'a, E> {
    pub dims: [Dim; 3],
    pub batch: usize,
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of query heads that share a head of keys and values.
    pub shared: usize,
    /// Elements per head of queries and keys, and of values.
    pub widths: [usize; 2],
    pub scale: f64,
    pub queries: Rows<'a, E>,
    pub keys: Rows<'a, E>,
    pub values: Rows<'a, E>,
    pub results: Results<'a, E>,
}

/// The requested results, and the values of the forward pass that they need.
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

/// Inputs of a backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Backward<'a, E> {
    /// Gradient of the output.
    pub cotangent: Rows<'a, E>,
    /// Logarithms of the sums of exponentials.
    pub lse: Rows<'a, E>,
    /// Products of output and cotangent.
    pub products: Rows<'a, E>,
}

impl<E: Element> Windows<'_, E> {
    /// The side whose cells are targets.
    pub(super) fn side(&self) -> Side {
        match self.results {
            Results::Keys { .. } => Side::Keys,
            _ => Side::Queries,
        }
    }

    /// Number of multiplications for one query and key.
    pub(super) fn products(&self) -> usize {
        let [key, value] = self.widths;
        match self.results {
            Results::Forward { .. } => key + value,
            Results::Queries { .. } => 2 * key + value,
            Results::Keys { .. } => 2 * (key + value),
        }
    }
}
