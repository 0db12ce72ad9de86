//! [`ShapeField`]: changes of shape, as methods.

use super::{
    chunk, expand, reshape, select_dim, split_with_sizes, squeeze_dim, stack, unsqueeze_dim,
};
use crate::field::{Field, WithDims, run};
use halocline_core::OrRaise;

/// Changes of shape, stacking and splitting, as methods.
pub trait ShapeField<const D: usize>: Field<D> {
    /// Inserts a dim of one cell. See [`unsqueeze_dim`](fn@unsqueeze_dim).
    ///
    /// # Panics
    /// Panics where [`unsqueeze_dim`](fn@unsqueeze_dim) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let y = Tensor::<1>::from([1.0, 2.0]).unsqueeze_dim::<2>(1);
    /// assert_eq!(y.dims(), [2, 1]);
    /// ```
    #[must_use]
    #[track_caller]
    fn unsqueeze_dim<const E: usize>(self, dim: usize) -> WithDims<Self, E> {
        run(self, |x| unsqueeze_dim::<D, E, _>(x, dim))
    }

    /// Removes a dim of one cell. See [`squeeze_dim`](fn@squeeze_dim).
    ///
    /// # Panics
    /// Panics where [`squeeze_dim`](fn@squeeze_dim) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let y = Tensor::<2>::from([[1.0, 2.0]]).squeeze_dim::<1>(0);
    /// assert_eq!(y.dims(), [2]);
    /// ```
    #[must_use]
    #[track_caller]
    fn squeeze_dim<const E: usize>(self, dim: usize) -> WithDims<Self, E> {
        run(self, |x| squeeze_dim::<D, E, _>(x, dim))
    }

    /// Selects one index along a dim and removes the dim. See [`select_dim`](fn@select_dim).
    ///
    /// # Panics
    /// Panics where [`select_dim`](fn@select_dim) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let y = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]).select_dim::<1>(0, 1);
    /// y.into_data().assert_eq(&[3.0_f32, 4.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn select_dim<const E: usize>(self, dim: usize, index: usize) -> WithDims<Self, E> {
        run(self, |x| select_dim::<D, E, _>(x, dim, index))
    }

    /// Reshapes the tensor. See [`reshape`](fn@reshape).
    ///
    /// # Panics
    /// Panics where [`reshape`](fn@reshape) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let y = ShapeField::reshape(Tensor::<1>::from([1.0, 2.0, 3.0, 4.0]), [2, 2]);
    /// y.into_data().assert_eq(&[[1.0_f32, 2.0], [3.0, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn reshape<const E: usize>(self, shape: [usize; E]) -> WithDims<Self, E> {
        run(self, |x| reshape::<D, E, _>(x, shape))
    }

    /// Expands dims of one cell to these sizes. See [`expand`](fn@expand).
    ///
    /// # Panics
    /// Panics where [`expand`](fn@expand) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let y = ShapeField::expand(Tensor::<2>::from([[1.0, 2.0]]), [2, 2]);
    /// y.into_data().assert_eq(&[[1.0_f32, 2.0], [1.0, 2.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn expand(self, sizes: [usize; D]) -> Self {
        run(self, |x| expand(x, sizes))
    }

    /// Stacks tensors along a new dim. See [`stack`](fn@stack).
    ///
    /// # Panics
    /// Panics where [`stack`](fn@stack) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let parts = vec![Tensor::<1>::from([1.0, 2.0]), Tensor::<1>::from([3.0, 4.0])];
    /// let y = ShapeField::stack::<2>(parts, 0);
    /// y.into_data().assert_eq(&[[1.0_f32, 2.0], [3.0, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn stack<const E: usize>(tensors: Vec<Self>, dim: usize) -> WithDims<Self, E> {
        let tensors = tensors.into_iter().map(Self::into_shard).collect();
        Field::from_shard(stack::<D, E, _>(tensors, dim).or_raise())
    }

    /// Splits a dim into parts of these sizes. See [`split_with_sizes`](fn@split_with_sizes).
    ///
    /// # Panics
    /// Panics where [`split_with_sizes`](fn@split_with_sizes) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let parts = ShapeField::split_with_sizes(Tensor::<1>::from([1.0, 2.0, 3.0]), &[1, 2], 0);
    /// parts[1].to_data().assert_eq(&[2.0_f32, 3.0].into(), true);
    /// ```
    #[track_caller]
    fn split_with_sizes(self, sizes: &[usize], dim: usize) -> Vec<Self> {
        let parts = split_with_sizes(self.into_shard(), sizes, dim).or_raise();
        parts.into_iter().map(Self::from_shard).collect()
    }

    /// Splits a dim into at most `count` parts. See [`chunk`](fn@chunk).
    ///
    /// # Panics
    /// Panics where [`chunk`](fn@chunk) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::ShapeField;
    ///
    /// let parts = ShapeField::chunk(Tensor::<1>::from([1.0, 2.0, 3.0]), 2, 0);
    /// parts[0].to_data().assert_eq(&[1.0_f32, 2.0].into(), true);
    /// ```
    #[track_caller]
    fn chunk(self, count: usize, dim: usize) -> Vec<Self> {
        let parts = chunk(self.into_shard(), count, dim).or_raise();
        parts.into_iter().map(Self::from_shard).collect()
    }
}

impl<const D: usize, X: Field<D>> ShapeField<D> for X {}
