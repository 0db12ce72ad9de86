//! Operators that move cells, or none, and compute nothing: concatenation, ranges, the shards of another tensor.

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
    /// This tensor with the shards of another one, whose whole dims may have other sizes.
    ///
    /// # Panics
    /// Panics where [`align`] returns an error.
    #[must_use]
    fn align_to(self, other: &Self) -> Self {
        let other = other.clone().into_shard();
        run(self, |x| align(x, &other))
    }

    /// Concatenates tensors along a dim that is whole on every rank.
    ///
    /// # Panics
    /// Panics where [`cat`] returns an error.
    #[must_use]
    fn cat(tensors: Vec<Self>, dim: usize) -> Self {
        let tensors = tensors.into_iter().map(Self::into_shard).collect();
        Self::from_shard(cat(tensors, dim).unwrap_or_else(|error| error.raise()))
    }

    /// Reverses the order of the cells of dims. See [`flip`].
    ///
    /// # Panics
    /// Panics where [`flip`] returns an error.
    #[must_use]
    fn flip(self, dims: &[usize]) -> Self {
        run(self, |x| flip(x, dims))
    }

    /// Shifts cells along dims, periodically. See [`roll`].
    ///
    /// # Panics
    /// Panics where [`roll`] returns an error.
    #[must_use]
    fn roll(self, shifts: &[isize], dims: &[usize]) -> Self {
        run(self, |x| roll(x, shifts, dims))
    }

    /// `length` cells of a dim, from `start`; nothing is communicated.
    ///
    /// # Panics
    /// Panics where [`narrow`] returns an error.
    #[must_use]
    fn narrow(self, dim: usize, start: usize, length: usize) -> Self {
        run(self, |x| narrow(x, dim, start, length))
    }

    /// A constant that varies along one dim only, such as weights by latitude: one cell in all other dims, and this
    /// tensor's shards in that one. Nothing is communicated.
    ///
    /// # Panics
    /// Panics where [`profile`] returns an error.
    #[must_use]
    fn profile(&self, dim: usize, values: &[f64]) -> Self {
        run(self.clone(), |x| profile(&x, dim, values))
    }
}

impl<const D: usize, X: Field<D>> RearrangeField<D> for X {}
