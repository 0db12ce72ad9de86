//! Operators that rearrange cells: concatenation, ranges, flip, roll, and alignment to the shards
//! of another tensor.

mod align;
mod cat;
mod flip;
mod narrow;
mod profile;
mod roll;
#[cfg(test)]
mod tests;

pub use align::align;
pub use cat::cat;
pub use flip::flip;
pub use narrow::narrow;
pub use profile::profile;
pub use roll::roll;

use crate::field::{Field, run};
use crate::golden::Golden;

/// The rearrangements in the registry.
pub(crate) const OPERATORS: &[Golden] = &[flip::GOLDEN, roll::GOLDEN];

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
