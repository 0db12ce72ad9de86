//! [`RearrangeField`]: rearrangements as methods.

use std::ops::Range;

use burn::tensor::Int;
use halocline_core::{Boundary, OrRaise, ShardTensor};

use super::{
    align_to, cat, distribute_operand, flatten, flip, gather, index_select, map_chunks, narrow,
    pad, pad_fold, pad_poles, permute, pixel_shuffle, pixel_unshuffle, profile, repeat_all, roll,
    scatter, scatter_add, shift, slice_dim, tril, triu, unflatten,
};
use crate::driver::Padding;
use crate::field::{Field, WithDims, run};
use crate::graph::Fold;
use crate::operand::Operand;

/// Rearrangements as methods.
pub trait RearrangeField<const D: usize>: Field<D> {
    /// Redistributes to the shards of another tensor, which may have other sizes in its whole dims.
    /// See [`align_to`](fn@align_to).
    ///
    /// # Panics
    /// Panics where [`align_to`](fn@align_to) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let x = Tensor::<1>::from([1.0, 2.0]);
    /// let y = x.clone().align_to(&x); // one device: the same tensor
    /// y.into_data().assert_eq(&x.into_data(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn align_to(self, other: &Self) -> Self {
        let other = other.clone().into_shard();
        run(self, |x| align_to(x, &other))
    }

    /// Concatenates tensors along a dim. See [`cat`](fn@cat).
    ///
    /// # Panics
    /// Panics where [`cat`](fn@cat) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let parts = vec![Tensor::<1>::from([1.0, 2.0]), Tensor::<1>::from([3.0])];
    /// let y = RearrangeField::cat(parts, 0);
    /// y.into_data().assert_eq(&[1.0_f32, 2.0, 3.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn cat(tensors: Vec<Self>, dim: usize) -> Self {
        let tensors = tensors.into_iter().map(Self::into_shard).collect();
        Self::from_shard(cat(tensors, dim).or_raise())
    }

    /// Cuts a tensor that all ranks hold in full to the shards of this one. See
    /// [`distribute_operand`](fn@distribute_operand).
    ///
    /// # Panics
    /// Panics where [`distribute_operand`](fn@distribute_operand) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let x = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]);
    /// let y = x.clone() + x.distribute_operand(Tensor::<2>::from([[10.0, 20.0]]));
    /// y.into_data().assert_eq(&[[11.0_f32, 22.0], [13.0, 24.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn distribute_operand(&self, tensor: impl Into<Operand<D>>) -> Self {
        run(self.clone(), |x| distribute_operand(&x, tensor))
    }

    /// Reverses the order of the cells of dims. See [`flip`](fn@flip).
    ///
    /// # Panics
    /// Panics where [`flip`](fn@flip) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::flip(Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]), &[0, 1]);
    /// y.into_data().assert_eq(&[[4.0_f32, 3.0], [2.0, 1.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn flip(self, dims: &[usize]) -> Self {
        run(self, |x| flip(x, dims))
    }

    /// Merges dims `start..=end` into one; the result has `E` dims. See [`flatten`](fn@flatten).
    ///
    /// # Panics
    /// Panics where [`flatten`](fn@flatten) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let x = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]);
    /// let y = RearrangeField::flatten::<1>(x, 0, 1);
    /// y.into_data().assert_eq(&[1.0_f32, 2.0, 3.0, 4.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn flatten<const E: usize>(self, start: usize, end: usize) -> WithDims<Self, E> {
        run(self, |x| flatten::<D, E, _>(x, start, end))
    }

    /// Splits a dim into several; the result has `E` dims. See [`unflatten`](fn@unflatten).
    ///
    /// # Panics
    /// Panics where [`unflatten`](fn@unflatten) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = Tensor::<1>::from([1.0, 2.0, 3.0, 4.0]).unflatten::<2>(0, &[2, 2]);
    /// y.into_data().assert_eq(&[[1.0_f32, 2.0], [3.0, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn unflatten<const E: usize>(self, dim: usize, sizes: &[usize]) -> WithDims<Self, E> {
        run(self, |x| unflatten::<D, E, _>(x, dim, sizes))
    }

    /// Permutes dims. See [`permute`](fn@permute).
    ///
    /// # Panics
    /// Panics where [`permute`](fn@permute) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::permute(Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]), [1, 0]);
    /// y.into_data().assert_eq(&[[1.0_f32, 3.0], [2.0, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn permute(self, axes: [usize; D]) -> Self {
        run(self, |x| permute(x, axes))
    }

    /// Shifts cells along dims, periodically. See [`roll`](fn@roll).
    ///
    /// # Panics
    /// Panics where [`roll`](fn@roll) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::roll(Tensor::<1>::from([1.0, 2.0, 3.0]), &[-1], &[0]);
    /// y.into_data().assert_eq(&[2.0_f32, 3.0, 1.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn roll(self, shifts: &[isize], dims: &[usize]) -> Self {
        run(self, |x| roll(x, shifts, dims))
    }

    /// Moves the values of a dim by `offset` cells: `y[i] = x[i − offset]`. See
    /// [`shift`](fn@shift).
    ///
    /// # Panics
    /// Panics where [`shift`](fn@shift) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::Boundary;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = Tensor::<1>::from([1.0, 2.0, 3.0]).shift(0, 1, Boundary::Replicate);
    /// y.into_data().assert_eq(&[1.0_f32, 1.0, 2.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn shift(self, dim: usize, offset: isize, boundary: Boundary) -> Self {
        run(self, |x| shift(x, dim, offset, boundary))
    }

    /// Applies a block of a model to `count` chunks of a dim, one after the other, to save memory.
    /// See [`map_chunks`](fn@map_chunks).
    ///
    /// # Panics
    /// Panics where [`map_chunks`](fn@map_chunks) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let x = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    /// let y = x.map_chunks(2, 0, |samples| samples.exp().log());
    /// assert_eq!(y.dims(), [3, 2]);
    /// ```
    #[must_use]
    #[track_caller]
    fn map_chunks<const E: usize>(
        self,
        count: usize,
        dim: usize,
        block: impl Fn(Self) -> WithDims<Self, E>,
    ) -> WithDims<Self, E> {
        let block = |x| Ok(Field::into_shard(block(Self::from_shard(x))));
        run(self, |x| map_chunks(x, count, dim, block))
    }

    /// Takes `length` cells of a dim, from `start` on; nothing is sent.
    ///
    /// # Panics
    /// Panics where [`narrow`](fn@narrow) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::narrow(Tensor::<1>::from([1.0, 2.0, 3.0]), 0, 1, 2);
    /// y.into_data().assert_eq(&[2.0_f32, 3.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn narrow(self, dim: usize, start: usize, length: usize) -> Self {
        run(self, |x| narrow(x, dim, start, length))
    }

    /// Pads dims, each by its own padding; cells beyond a zero boundary are set to `value`. See
    /// [`pad`](fn@pad).
    ///
    /// # Panics
    /// Panics where [`pad`](fn@pad) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::Boundary;
    /// use halocline_ops::{Padding, RearrangeField};
    ///
    /// let ring = Padding::new(1, Boundary::Periodic);
    /// let y = RearrangeField::pad(Tensor::<1>::from([1.0, 2.0, 3.0]), &[(0, ring)], 0.0);
    /// y.into_data().assert_eq(&[3.0_f32, 1.0, 2.0, 3.0, 1.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn pad(self, paddings: &[(usize, Padding)], value: f64) -> Self {
        run(self, |x| pad(x, paddings, value))
    }

    /// Pads latitudes by rows from across the poles. See [`pad_poles`](fn@pad_poles) for an
    /// example.
    ///
    /// # Panics
    /// Panics where [`pad_poles`](fn@pad_poles) returns an error.
    #[must_use]
    #[track_caller]
    fn pad_poles(self, widths: [usize; 2], boundary: Boundary, odd: &[usize]) -> Self {
        run(self, |x| pad_poles(x, widths, boundary, odd))
    }

    /// Pads the rows and columns of a tripolar grid. See [`pad_fold`](fn@pad_fold) for an example.
    ///
    /// # Panics
    /// Panics where [`pad_fold`](fn@pad_fold) returns an error.
    #[must_use]
    #[track_caller]
    fn pad_fold(self, width: usize, fold: Fold, odd: &[usize]) -> Self {
        run(self, |x| pad_fold(x, width, fold, odd))
    }

    /// Takes every `step`-th cell of a range of a dim. See [`slice_dim`](fn@slice_dim).
    ///
    /// # Panics
    /// Panics where [`slice_dim`](fn@slice_dim) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::slice_dim(Tensor::<1>::from([1.0, 2.0, 3.0]), 0, 0..3, 2);
    /// y.into_data().assert_eq(&[1.0_f32, 3.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn slice_dim(self, dim: usize, range: Range<usize>, step: usize) -> Self {
        run(self, |x| slice_dim(x, dim, range, step))
    }

    /// Takes the cells of a dim at these indices, in order. See [`index_select`](fn@index_select).
    ///
    /// # Panics
    /// Panics where [`index_select`](fn@index_select) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = Tensor::<1>::from([1.0, 2.0, 3.0]).index_select(0, &[2, 0, 2]);
    /// y.into_data().assert_eq(&[3.0_f32, 1.0, 3.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn index_select(self, dim: usize, indices: &[usize]) -> Self {
        run(self, |x| index_select(x, dim, indices))
    }

    /// Takes cells of a whole dim by a tensor of indices. See [`gather`](fn@gather).
    ///
    /// # Panics
    /// Panics where [`gather`](fn@gather) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Int, Tensor};
    /// use halocline_core::ShardTensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let index = ShardTensor::solo(Tensor::<1, Int>::from([1, 1]));
    /// let y = RearrangeField::gather(Tensor::<1>::from([1.0, 2.0]), 0, index);
    /// y.into_data().assert_eq(&[2.0_f32, 2.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn gather(self, dim: usize, index: ShardTensor<D, Int>) -> Self {
        run(self, |x| gather(x, dim, index))
    }

    /// Adds values to cells of a whole dim by a tensor of indices. See
    /// [`scatter_add`](fn@scatter_add).
    ///
    /// # Panics
    /// Panics where [`scatter_add`](fn@scatter_add) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Int, Tensor};
    /// use halocline_core::ShardTensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let index = ShardTensor::solo(Tensor::<1, Int>::from([1, 1]));
    /// let values = Tensor::<1>::from([3.0, 4.0]);
    /// let y = Tensor::<1>::from([1.0, 2.0]).scatter_add(0, index, values);
    /// y.into_data().assert_eq(&[1.0_f32, 9.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn scatter_add(self, dim: usize, index: ShardTensor<D, Int>, values: Self) -> Self {
        run(self, |x| scatter_add(x, dim, index, values.into_shard()))
    }

    /// Replaces cells of a whole dim by values, by a tensor of indices. See [`scatter`](fn@scatter)
    /// for an example.
    ///
    /// # Panics
    /// Panics where [`scatter`](fn@scatter) returns an error.
    #[must_use]
    #[track_caller]
    fn scatter(self, dim: usize, index: ShardTensor<D, Int>, values: Self) -> Self {
        run(self, |x| scatter(x, dim, index, values.into_shard()))
    }

    /// Repeats the field `times[dim]` times along each dim. See [`repeat_all`](fn@repeat_all).
    ///
    /// # Panics
    /// Panics where [`repeat_all`](fn@repeat_all) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::repeat_all(Tensor::<1>::from([1.0, 2.0]), [2]);
    /// y.into_data().assert_eq(&[1.0_f32, 2.0, 1.0, 2.0].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn repeat_all(self, times: [usize; D]) -> Self {
        run(self, |x| repeat_all(x, times))
    }

    /// Keeps the cells on and below a diagonal of the last two dims. See [`tril`](fn@tril).
    ///
    /// # Panics
    /// Panics where [`tril`](fn@tril) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::tril(Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]), 0);
    /// y.into_data().assert_eq(&[[1.0_f32, 0.0], [3.0, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn tril(self, diagonal: i64) -> Self {
        run(self, |x| tril(x, diagonal))
    }

    /// Keeps the cells on and above a diagonal of the last two dims. See [`triu`](fn@triu).
    ///
    /// # Panics
    /// Panics where [`triu`](fn@triu) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = RearrangeField::triu(Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]), 0);
    /// y.into_data().assert_eq(&[[1.0_f32, 2.0], [0.0, 4.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn triu(self, diagonal: i64) -> Self {
        run(self, |x| triu(x, diagonal))
    }

    /// Rearranges channels into blocks of cells. See [`pixel_shuffle`](fn@pixel_shuffle).
    ///
    /// # Panics
    /// Panics where [`pixel_shuffle`](fn@pixel_shuffle) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = Tensor::<4>::ones([1, 8, 2, 3], &Default::default()).pixel_shuffle(2);
    /// assert_eq!(y.dims(), [1, 2, 4, 6]);
    /// ```
    #[must_use]
    #[track_caller]
    fn pixel_shuffle(self, factor: usize) -> Self {
        run(self, |x| pixel_shuffle(x, factor))
    }

    /// Rearranges blocks of cells into channels. See [`pixel_unshuffle`](fn@pixel_unshuffle).
    ///
    /// # Panics
    /// Panics where [`pixel_unshuffle`](fn@pixel_unshuffle) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let y = Tensor::<4>::ones([1, 2, 4, 6], &Default::default()).pixel_unshuffle(2);
    /// assert_eq!(y.dims(), [1, 8, 2, 3]);
    /// ```
    #[must_use]
    #[track_caller]
    fn pixel_unshuffle(self, factor: usize) -> Self {
        run(self, |x| pixel_unshuffle(x, factor))
    }

    /// Creates a constant that varies along one dim, such as weights by latitude, with one cell in
    /// all other dims and this tensor's shards in that dim; nothing is sent.
    ///
    /// # Panics
    /// Panics where [`profile`](fn@profile) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let x = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]);
    /// let y = x.clone() * x.profile(0, &[1.0, 10.0]);
    /// y.into_data().assert_eq(&[[1.0_f32, 2.0], [30.0, 40.0]].into(), true);
    /// ```
    #[must_use]
    #[track_caller]
    fn profile(&self, dim: usize, values: &[f64]) -> Self {
        run(self.clone(), |x| profile(&x, dim, values))
    }
}

impl<const D: usize, X: Field<D>> RearrangeField<D> for X {}
