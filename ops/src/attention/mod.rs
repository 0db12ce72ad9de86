//! Attention: for each query, the mean of values weighted by the softmax of the products of the
//! query with their keys.
//!
//! [`neighborhood_attention`] is for fields, where a query attends to the keys around it;
//! [`scaled_dot_product_attention`] is for tokens, where it attends to all of them.

mod attended;
#[cfg(test)]
mod bits;
mod cells;
mod composed;
#[cfg(feature = "cube")]
mod cube;
mod decoder;
pub mod dense;
mod engine;
mod golden;
#[cfg(test)]
mod identities;
mod layer;
#[cfg(test)]
mod messages;
pub mod neighborhood;
pub mod rotary;
mod tokens;

pub use attended::AttentionOutput;
pub use cells::{cell_attention, cell_attention_with_tokens, cell_attention_with_tokens_and_lse};
pub use decoder::transformer_decoder;
pub use dense::{
    AttentionOptions, causal_extents, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse,
};
pub(crate) use golden::OPERATORS;
pub use layer::{multi_head_attention, transformer_encoder};
pub use neighborhood::{
    NeighborhoodOptions, neighborhood_attention, neighborhood_attention_with_lse,
    neighborhood_attention_with_tokens, neighborhood_attention_with_tokens_and_lse,
};
pub use rotary::{rotary, rotary_in_groups};

use crate::field::{Field, WithDims, run};
use halocline_core::OrRaise;

/// Attention as a method.
pub trait AttentionField<const D: usize>: Field<D> {
    /// Neighborhood attention of these queries to keys and values. See the [module](neighborhood).
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// // [batch, latitude, longitude, heads, width]
    /// let field = || Tensor::<5>::ones([1, 6, 8, 2, 4], &Default::default());
    /// let options = NeighborhoodOptions::new([3, 5]).with_periodic([false, true]);
    /// let y = field().neighborhood_attention(field(), field(), &options);
    /// assert_eq!(y.dims(), [1, 6, 8, 2, 4]);
    /// ```
    #[must_use]
    #[track_caller]
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
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let field = || Tensor::<5>::ones([1, 3, 4, 2, 8], &Default::default());
    /// let y = field().cell_attention(field(), field(), &AttentionOptions::default());
    /// assert_eq!(y.dims(), [1, 3, 4, 2, 8]);
    /// ```
    #[must_use]
    #[track_caller]
    fn cell_attention(self, keys: Self, values: Self, options: &AttentionOptions) -> Self {
        let (keys, values) = (keys.into_shard(), values.into_shard());
        run(self, |q| cell_attention(q, keys, values, options))
    }

    /// Attention of every cell to all cells, and to tokens (keys and values). See
    /// [`cell_attention_with_tokens`].
    ///
    /// # Panics
    /// Panics where [`cell_attention_with_tokens`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let field = || Tensor::<5>::ones([2, 3, 4, 2, 8], &Default::default());
    /// let token = || Tensor::<4>::ones([1, 6, 2, 8], &Default::default()); // of all samples
    /// let options = AttentionOptions::default();
    /// let y = field().cell_attention_with_tokens(field(), field(), [token(), token()], &options);
    /// assert_eq!(y.dims(), [2, 3, 4, 2, 8]);
    /// ```
    #[must_use]
    #[track_caller]
    fn cell_attention_with_tokens(
        self,
        keys: Self,
        values: Self,
        tokens: [WithDims<Self, 4>; 2],
        options: &AttentionOptions,
    ) -> Self {
        let (k, v) = (keys.into_shard(), values.into_shard());
        let tokens = tokens.map(Field::into_shard);
        run(self, |q| {
            cell_attention_with_tokens([q, k, v], tokens, options)
        })
    }

    /// Attention of every cell to all cells and to tokens, with its log-sum-exps. See
    /// [`cell_attention_with_tokens_and_lse`] and [`AttentionOutput`].
    ///
    /// # Panics
    /// Panics where [`cell_attention_with_tokens_and_lse`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let field = || Tensor::<4>::ones([2, 8, 2, 4], &Default::default());
    /// let tokens = || [(); 2].map(|()| Tensor::<4>::ones([1, 6, 2, 4], &Default::default()));
    /// let options = AttentionOptions::default();
    /// let y = field().cell_attention_with_tokens_and_lse(field(), field(), tokens(), &options);
    /// assert_eq!((y.output.dims(), y.lse.dims()), ([2, 8, 2, 4], [2, 8, 2, 1]));
    /// ```
    #[must_use]
    #[track_caller]
    fn cell_attention_with_tokens_and_lse(
        self,
        keys: Self,
        values: Self,
        tokens: [WithDims<Self, 4>; 2],
        options: &AttentionOptions,
    ) -> AttentionOutput<Self> {
        let fields = [self, keys, values].map(Self::into_shard);
        let tokens = tokens.map(Field::into_shard);
        let found = cell_attention_with_tokens_and_lse(fields, tokens, options);
        found.or_raise().map(Self::from_shard)
    }

    /// Neighborhood attention with its log-sum-exps. See [`AttentionOutput`].
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention_with_lse`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let field = || Tensor::<4>::ones([1, 8, 2, 4], &Default::default());
    /// let options = NeighborhoodOptions::new([3]);
    /// let y = field().neighborhood_attention_with_lse(field(), field(), &options);
    /// assert_eq!((y.output.dims(), y.lse.dims()), ([1, 8, 2, 4], [1, 8, 2, 1]));
    /// ```
    #[must_use]
    #[track_caller]
    fn neighborhood_attention_with_lse<const N: usize>(
        self,
        keys: Self,
        values: Self,
        options: &NeighborhoodOptions<N>,
    ) -> AttentionOutput<Self> {
        let [q, k, v] = [self, keys, values].map(Self::into_shard);
        let found = neighborhood_attention_with_lse(q, k, v, options);
        found.or_raise().map(Self::from_shard)
    }

    /// Neighborhood attention to a field, and to tokens (keys and values) that all queries reach.
    /// See [`neighborhood_attention_with_tokens`].
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention_with_tokens`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let field = || Tensor::<4>::ones([2, 8, 2, 4], &Default::default());
    /// let token = || Tensor::<4>::ones([1, 6, 2, 4], &Default::default()); // of all samples
    /// let options = NeighborhoodOptions::new([3]);
    /// let y = field().neighborhood_attention_with_tokens(field(), field(), [token(), token()], &options);
    /// assert_eq!(y.dims(), [2, 8, 2, 4]);
    /// ```
    #[must_use]
    #[track_caller]
    fn neighborhood_attention_with_tokens<const N: usize>(
        self,
        keys: Self,
        values: Self,
        tokens: [WithDims<Self, 4>; 2],
        options: &NeighborhoodOptions<N>,
    ) -> Self {
        let (k, v) = (keys.into_shard(), values.into_shard());
        let tokens = tokens.map(Field::into_shard);
        run(self, |q| {
            neighborhood_attention_with_tokens([q, k, v], tokens, options)
        })
    }

    /// Neighborhood attention to a field and to tokens, with its log-sum-exps. See
    /// [`neighborhood_attention_with_tokens_and_lse`] and [`AttentionOutput`].
    ///
    /// # Panics
    /// Panics where [`neighborhood_attention_with_tokens_and_lse`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let field = || Tensor::<4>::ones([2, 8, 2, 4], &Default::default());
    /// let tokens = [(); 2].map(|()| Tensor::<4>::ones([1, 6, 2, 4], &Default::default()));
    /// let options = NeighborhoodOptions::new([3]);
    /// let y = field().neighborhood_attention_with_tokens_and_lse(field(), field(), tokens, &options);
    /// assert_eq!((y.output.dims(), y.lse.dims()), ([2, 8, 2, 4], [2, 8, 2, 1]));
    /// ```
    #[must_use]
    #[track_caller]
    fn neighborhood_attention_with_tokens_and_lse<const N: usize>(
        self,
        keys: Self,
        values: Self,
        tokens: [WithDims<Self, 4>; 2],
        options: &NeighborhoodOptions<N>,
    ) -> AttentionOutput<Self> {
        let fields = [self, keys, values].map(Self::into_shard);
        let tokens = tokens.map(Field::into_shard);
        let found = neighborhood_attention_with_tokens_and_lse(fields, tokens, options);
        found.or_raise().map(Self::from_shard)
    }
}

impl<const D: usize, X: Field<D>> AttentionField<D> for X {}

/// Dense attention as a method.
pub trait DenseAttentionField: Field<4> {
    /// Dense attention of these queries to keys and values. See [`scaled_dot_product_attention`].
    ///
    /// # Panics
    /// Panics where [`scaled_dot_product_attention`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// // [batch, tokens, heads, width]
    /// let tokens = |count| Tensor::<4>::ones([1, count, 2, 4], &Default::default());
    /// let options = AttentionOptions::default();
    /// let y = tokens(5).scaled_dot_product_attention(tokens(9), tokens(9), &options);
    /// assert_eq!(y.dims(), [1, 5, 2, 4]);
    /// ```
    #[must_use]
    #[track_caller]
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

    /// Dense attention with its log-sum-exps. See [`AttentionOutput`].
    ///
    /// # Panics
    /// Panics where [`scaled_dot_product_attention_with_lse`] returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::prelude::*;
    ///
    /// let tokens = || Tensor::<4>::ones([1, 5, 2, 4], &Default::default());
    /// let options = AttentionOptions::default();
    /// let y = tokens().scaled_dot_product_attention_with_lse(tokens(), tokens(), &options);
    /// assert_eq!((y.output.dims(), y.lse.dims()), ([1, 5, 2, 4], [1, 5, 2, 1]));
    /// ```
    #[must_use]
    #[track_caller]
    fn scaled_dot_product_attention_with_lse(
        self,
        keys: Self,
        values: Self,
        options: &AttentionOptions,
    ) -> AttentionOutput<Self> {
        let [q, k, v] = [self, keys, values].map(Self::into_shard);
        let found = scaled_dot_product_attention_with_lse(q, k, v, options);
        found.or_raise().map(Self::from_shard)
    }
}

impl<X: Field<4>> DenseAttentionField for X {}
