//! Maps from queries to the keys that they reach, and back, dim by dim.

use crate::attention::engine::tiles::{Dim, Side};

/// Box of keys that every query reaches, and box of queries that reach every key: first cells and
/// counts in every dim.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    /// Distance between the cells of a box.
    pub steps: [usize; 3],
    pub queries: [Vec<[usize; 2]>; 3],
    pub keys: [Vec<[usize; 2]>; 3],
}

impl Windows {
    /// Creates the windows of a neighborhood, for tensors with these numbers of queries and keys in
    /// every dim. A rank without queries, or without keys, has one cell of fill, which reaches
    /// nothing.
    pub(crate) fn near(dims: &[Dim; 3], queries: [usize; 3], keys: [usize; 3]) -> Self {
        let windows = |side, counts: [usize; 3]| {
            [0, 1, 2].map(|dim: usize| {
                let mut windows = dims[dim].windows(side);
                windows.resize(counts[dim], [0, 0]);
                windows
            })
        };
        Self {
            steps: dims.each_ref().map(|dim| dim.neighborhood.dilation),
            queries: windows(Side::Queries, queries),
            keys: windows(Side::Keys, keys),
        }
    }

    /// Creates windows of all keys, or, if `causal` is the position of the first query, of the keys
    /// up to each query's position.
    pub(crate) fn dense(queries: usize, keys: usize, causal: Option<usize>) -> Self {
        let of_query = |query: usize| {
            let reached = causal.map_or(keys, |first| (first + query + 1).min(keys));
            [0, reached]
        };
        let of_key = |key: usize| {
            let first = causal.map_or(0, |first| key.saturating_sub(first).min(queries));
            [first, queries - first]
        };
        let one = || vec![[0, 1]];
        Self {
            steps: [1; 3],
            queries: [one(), one(), (0..queries).map(of_query).collect()],
            keys: [one(), one(), (0..keys).map(of_key).collect()],
        }
    }

    fn of(&self, side: Side) -> &[Vec<[usize; 2]>; 3] {
        match side {
            Side::Queries => &self.queries,
            Side::Keys => &self.keys,
        }
    }

    /// Extents of queries or keys.
    pub(super) fn extents(&self, side: Side) -> [usize; 3] {
        self.of(side).each_ref().map(Vec::len)
    }

    /// First cells and counts, dim after dim.
    pub(super) fn table(&self, side: Side) -> Vec<i32> {
        let windows = self.of(side).iter().flatten().flatten();
        windows.map(|number| *number as i32).collect()
    }
}
