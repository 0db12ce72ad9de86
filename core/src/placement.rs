//! Placements: how a tensor is held along a mesh axis.

use std::fmt;

/// Operation that combines the partial values of several ranks. NaN always propagates. For booleans
/// the maximum is `or`; the minimum and the product are `and`. See the example of
/// [`resolve`](crate::ShardTensor::resolve).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum of all ranks' values.
    Sum,
    /// The largest of all ranks' values.
    Max,
    /// The smallest of all ranks' values.
    Min,
    /// The product of all ranks' values.
    Product,
}

/// Placement of a field along one mesh axis.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     assert_eq!(x.local_dims(), [[3, 3], [2, 3]][world.rank()]);
///     let whole = x.redistribute(&[Replicate]);
///     assert_eq!(whole.local_dims(), [5, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Each rank holds a piece of this tensor dim.
    Shard(usize),
    /// All ranks hold the same values, and each computes the complete gradient.
    Replicate,
    /// All ranks hold the same values but use them for different cells, so that each computes a
    /// part of the gradient; the gradient is the sum of the parts. See the example of
    /// [`redistribute`](crate::ShardTensor::redistribute).
    Fan,
    /// Each rank holds a contribution; the value is their reduction.
    Partial(ReduceOp),
}

impl Placement {
    /// Whether ranks compute different parts of a gradient: `Shard` and `Fan`. A replicated operand
    /// used together with such an operand fans out.
    pub fn varies(self) -> bool {
        matches!(self, Self::Shard(_) | Self::Fan)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
