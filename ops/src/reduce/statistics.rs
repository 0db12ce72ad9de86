//! Statistics and cumulative operators as methods.

use burn::tensor::Int;
use halocline_core::{OrRaise, ShardTensor};

use super::{argmax, argmin, cumprod, cumsum, std_dims, topk_with_indices, var_dims, vector_norm};
use crate::field::{Field, run};

/// Statistics and cumulative operators along dims, as methods.
pub trait StatisticsField<const D: usize>: Field<D> {
    /// Computes the variance over dims, which keep one cell. See [`var_dims`](fn@var_dims).
    ///
    /// # Panics
    /// Panics where [`var_dims`](fn@var_dims) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let y = Tensor::<1>::from([1.0, 3.0]).var_dims(&[0], 1.0);
    /// assert_eq!(y.into_scalar::<f32>(), 2.0);
    /// ```
    #[must_use]
    #[track_caller]
    fn var_dims(self, dims: &[usize], correction: f64) -> Self {
        run(self, |x| var_dims(x, dims, correction))
    }

    /// Computes the standard deviation over dims, which keep one cell. See
    /// [`std_dims`](fn@std_dims).
    ///
    /// # Panics
    /// Panics where [`std_dims`](fn@std_dims) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let y = Tensor::<1>::from([1.0, 3.0]).std_dims(&[0], 0.0);
    /// assert_eq!(y.into_scalar::<f32>(), 1.0);
    /// ```
    #[must_use]
    #[track_caller]
    fn std_dims(self, dims: &[usize], correction: f64) -> Self {
        run(self, |x| std_dims(x, dims, correction))
    }

    /// Computes the norm over dims, which keep one cell. See [`vector_norm`](fn@vector_norm).
    ///
    /// # Panics
    /// Panics where [`vector_norm`](fn@vector_norm) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let y = Tensor::<1>::from([1.0, -3.0]).vector_norm(f64::INFINITY, &[0]);
    /// assert_eq!(y.into_scalar::<f32>(), 3.0);
    /// ```
    #[must_use]
    #[track_caller]
    fn vector_norm(self, order: f64, dims: &[usize]) -> Self {
        run(self, |x| vector_norm(x, order, dims))
    }

    /// Computes the cumulative sum along a dim. See [`cumsum`](fn@cumsum).
    ///
    /// # Panics
    /// Panics where [`cumsum`](fn@cumsum) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let y = StatisticsField::cumsum(Tensor::<1>::from([1.0, 3.0]), 0);
    /// y.into_data().assert_eq(&[1.0_f32, 4.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn cumsum(self, dim: usize) -> Self {
        run(self, |x| cumsum(x, dim))
    }

    /// Computes the cumulative product along a dim. See [`cumprod`](fn@cumprod).
    ///
    /// # Panics
    /// Panics where [`cumprod`](fn@cumprod) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let y = StatisticsField::cumprod(Tensor::<1>::from([2.0, 3.0]), 0);
    /// y.into_data().assert_eq(&[2.0_f32, 6.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn cumprod(self, dim: usize) -> Self {
        run(self, |x| cumprod(x, dim))
    }

    /// Finds the index of the first maximum along a dim, which keeps one cell. See
    /// [`argmax`](fn@argmax).
    ///
    /// # Panics
    /// Panics where [`argmax`](fn@argmax) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let index = StatisticsField::argmax(Tensor::<1>::from([1.0, 3.0]), 0);
    /// assert_eq!(index.into_local().into_scalar::<i64>(), 1);
    /// ```
    #[track_caller]
    fn argmax(self, dim: usize) -> ShardTensor<D, Int> {
        argmax(self.into_shard(), dim).or_raise()
    }

    /// Finds the index of the first minimum along a dim, which keeps one cell. See
    /// [`argmin`](fn@argmin).
    ///
    /// # Panics
    /// Panics where [`argmin`](fn@argmin) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let index = StatisticsField::argmin(Tensor::<1>::from([1.0, 3.0]), 0);
    /// assert_eq!(index.into_local().into_scalar::<i64>(), 0);
    /// ```
    #[track_caller]
    fn argmin(self, dim: usize) -> ShardTensor<D, Int> {
        argmin(self.into_shard(), dim).or_raise()
    }

    /// Finds the `count` largest cells along a whole dim, in descending order, and their indices.
    /// See [`topk_with_indices`](fn@topk_with_indices).
    ///
    /// # Panics
    /// Panics where [`topk_with_indices`](fn@topk_with_indices) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::StatisticsField;
    ///
    /// let (largest, _) = StatisticsField::topk_with_indices(Tensor::<1>::from([1.0, 3.0, 2.0]), 2, 0);
    /// largest.into_data().assert_eq(&[3.0_f32, 2.0].into(), true);
    /// ```
    #[track_caller]
    fn topk_with_indices(self, count: usize, dim: usize) -> (Self, ShardTensor<D, Int>) {
        let found = topk_with_indices(self.into_shard(), count, dim);
        let (values, indices) = found.or_raise();
        (Self::from_shard(values), indices)
    }
}

impl<const D: usize, X: Field<D>> StatisticsField<D> for X {}
