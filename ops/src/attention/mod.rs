//! Attention: a query's mean of values, weighted by the products of the query with their keys.
//!
//! [`neighborhood_attention`] for fields, where a query attends to the keys around it;
//! [`scaled_dot_product_attention`] for tokens, where it attends to all of them.

pub mod dense;
mod engine;
mod golden;
pub mod neighborhood;

pub use dense::{AttentionOptions, causal_extents, scaled_dot_product_attention};
pub(crate) use golden::OPERATORS;
pub use neighborhood::{NeighborhoodOptions, neighborhood_attention};

use crate::field::{Field, run};

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
}

impl<X: Field<4>> DenseAttentionField for X {}
