//! Operators that rearrange cells: concatenation, ranges, flip, roll, other orders and numbers of
//! dims, and alignment to the shards of another tensor.

mod align;
mod cat;
mod distribute_beside;
mod flatten;
mod flip;
mod narrow;
mod permute;
mod profile;
mod roll;
#[cfg(test)]
mod tests;

pub use align::align;
pub use cat::cat;
pub use distribute_beside::distribute_beside;
pub use flatten::{flatten, unflatten};
pub use flip::flip;
pub use narrow::narrow;
pub use permute::permute;
pub use profile::profile;
pub use roll::roll;

use crate::field::{Field, Rank, run};
use crate::golden::Golden;
use crate::operand::Operand;

/// The rearrangements in the registry.
pub(crate) const OPERATORS: &[Golden] =
    &[flip::GOLDEN, roll::GOLDEN, permute::GOLDEN, flatten::GOLDEN];

/// Rearrangements as methods.
pub trait RearrangeField<const D: usize>: Field<D> {
    /// Redistributes to the shards of another tensor, whose whole dims may have other sizes. See
    /// [`align`](fn@align).
    ///
    /// # Panics
    /// Panics where [`align`](fn@align) returns an error.
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
    fn align_to(self, other: &Self) -> Self {
        let other = other.clone().into_shard();
        run(self, |x| align(x, &other))
    }

    /// Concatenates tensors along a dim that is whole on every rank.
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
    fn cat(tensors: Vec<Self>, dim: usize) -> Self {
        let tensors = tensors.into_iter().map(Self::into_shard).collect();
        Self::from_shard(cat(tensors, dim).unwrap_or_else(|error| error.raise()))
    }

    /// Cuts a tensor that all ranks hold alike to the shards of this one. See
    /// [`distribute_beside`](fn@distribute_beside).
    ///
    /// # Panics
    /// Panics where [`distribute_beside`](fn@distribute_beside) returns an error.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_ops::RearrangeField;
    ///
    /// let x = Tensor::<2>::from([[1.0, 2.0], [3.0, 4.0]]);
    /// let y = x.clone() + x.distribute_beside(Tensor::<2>::from([[10.0, 20.0]]));
    /// y.into_data().assert_eq(&[[11.0_f32, 22.0], [13.0, 24.0]].into(), true);
    /// ```
    #[must_use]
    fn distribute_beside(&self, tensor: impl Into<Operand<D>>) -> Self {
        run(self.clone(), |x| distribute_beside(&x, tensor))
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
    fn flip(self, dims: &[usize]) -> Self {
        run(self, |x| flip(x, dims))
    }

    /// Makes dims `start..=end` one dim; the result has `E` dims. See [`flatten`](fn@flatten).
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
    fn flatten<const E: usize>(self, start: usize, end: usize) -> Rank<Self, E> {
        run(self, |x| flatten::<D, E>(x, start, end))
    }

    /// Makes a dim several of these sizes; the result has `E` dims. See
    /// [`unflatten`](fn@unflatten).
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
    fn unflatten<const E: usize>(self, dim: usize, sizes: &[usize]) -> Rank<Self, E> {
        run(self, |x| unflatten::<D, E>(x, dim, sizes))
    }

    /// Puts dims in another order. See [`permute`](fn@permute).
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
    fn roll(self, shifts: &[isize], dims: &[usize]) -> Self {
        run(self, |x| roll(x, shifts, dims))
    }

    /// Cuts out `length` cells of a dim, from `start`; nothing is sent.
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
    fn narrow(self, dim: usize, start: usize, length: usize) -> Self {
        run(self, |x| narrow(x, dim, start, length))
    }

    /// A constant that varies along one dim, such as weights by latitude, with one cell in all
    /// other dims and this tensor's shards in that dim; nothing is sent.
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
    fn profile(&self, dim: usize, values: &[f64]) -> Self {
        run(self.clone(), |x| profile(&x, dim, values))
    }
}

impl<const D: usize, X: Field<D>> RearrangeField<D> for X {}
