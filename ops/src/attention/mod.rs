//! Attention: a query's mean of values, weighted by the products of the query with their keys.
//!
//! [`neighborhood_attention`] for fields, where a query attends to the keys around it;
//! [`scaled_dot_product_attention`] for tokens, where it attends to all of them.

mod attended;
mod cells;
mod composed;
#[cfg(feature = "cube")]
mod cube;
pub mod dense;
mod engine;
mod golden;
#[cfg(test)]
mod identities;
mod layer;
pub mod neighborhood;
mod widths;

pub use attended::Attended;
pub use cells::cell_attention;
pub use dense::{
    AttentionOptions, causal_extents, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse,
};
pub(crate) use golden::OPERATORS;
pub use layer::{multi_head_attention, transformer_encoder};
pub use neighborhood::{
    NeighborhoodOptions, neighborhood_attention, neighborhood_attention_with_lse,
    neighborhood_attention_with_tokens,
};

use crate::field::{Field, Rank, run};

/// Attention as a method.
pub trait AttentionField<const D: usize>: Field<D> {
    /// Neighborhood attention of these queries to keys and values. See the [module](neighborhood).
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention`] returns an error.
    #[must_use]
    fn neighborhood_attention<const N: usize>(
        self,
        keys: Self,
        values: Self,
        options: &NeighborhoodOptions<N>,
    ) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |q| neighborhood_attention(q, keys, values, options))
    }

    /// Attention of every cell to all cells. See [`cell_attention`].
    ///
    /// # Panics
    /// Panics where [`cell_attention`] returns an error.
    #[must_use]
    fn cell_attention(self, keys: Self, values: Self, options: &AttentionOptions) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |q| cell_attention(q, keys, values, options))
    }

    /// Neighborhood attention with the logarithms of its sums of exponentials.
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention_with_lse`] returns an error.
    #[must_use]
    fn neighborhood_attention_with_lse<const N: usize>(
        self,
        keys: Self,
        values: Self,
        options: &NeighborhoodOptions<N>,
    ) -> Attended<Self> {
        let [q, k, v] = [self, keys, values].map(Self::into_shard);
        let found = neighborhood_attention_with_lse(q, k, v, options);
        found
            .unwrap_or_else(|error| error.raise())
            .map(Self::from_shard)
    }

    /// Neighborhood attention to a field and to tokens, keys and values, that all queries reach.
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention_with_tokens`] returns an error.
    #[must_use]
    fn neighborhood_attention_with_tokens<const N: usize>(
        self,
        keys: Self,
        values: Self,
        tokens: [Rank<Self, 4>; 2],
        options: &NeighborhoodOptions<N>,
    ) -> Self {
        let (k, v) = (keys.into_shard(), values.into_shard());
        let tokens = tokens.map(Field::into_shard);
        run(self, |q| {
            neighborhood_attention_with_tokens([q, k, v], tokens, options)
        })
    }
}

impl<const D: usize, X: Field<D>> AttentionField<D> for X {}

/// Dense attention as a method.
pub trait DenseAttentionField: Field<4> {
    /// Dense attention of these queries to keys and values. See [`scaled_dot_product_attention`].
    ///
    /// # Panics
    /// Panics where [`scaled_dot_product_attention`] returns an error.
    #[must_use]
    fn scaled_dot_product_attention(
        self,
        keys: Self,
        values: Self,
        options: &AttentionOptions,
    ) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |q| {
            scaled_dot_product_attention(q, keys, values, options)
        })
    }

    /// Dense attention with the logarithms of its sums of exponentials.
    ///
    /// # Panics
    /// Panics where [`scaled_dot_product_attention_with_lse`] returns an error.
    #[must_use]
    fn scaled_dot_product_attention_with_lse(
        self,
        keys: Self,
        values: Self,
        options: &AttentionOptions,
    ) -> Attended<Self> {
        let [q, k, v] = [self, keys, values].map(Self::into_shard);
        let found = scaled_dot_product_attention_with_lse(q, k, v, options);
        found
            .unwrap_or_else(|error| error.raise())
            .map(Self::from_shard)
    }
}

impl<X: Field<4>> DenseAttentionField for X {}
