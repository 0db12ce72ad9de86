//! Logical operators on booleans, and conversion of booleans and integers to other kinds.

use burn::tensor::{Bool, Int};

use super::ShardTensor;

/// Logical operators, and conversion to numbers.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
///     let positive = x.clone().greater_elem(0.0);
///     let small = x.clone().lower_elem(0.5);
///     let large = positive.clone().bool_and(small.clone().bool_not());
///     assert_eq!(large.float().local().to_data(), x.local().to_data());
///     let ones = positive.bool_or(small).int().float();
///     assert_eq!(ones.local().to_data(), x.local().to_data());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
impl<const D: usize> ShardTensor<D, Bool> {
    /// Converts to integers: one where true, zero elsewhere.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    #[track_caller]
    pub fn int(self) -> ShardTensor<D, Int> {
        self.map_elements("int", |local| local.int())
    }

    /// Converts to floats: one where true, zero elsewhere.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    #[track_caller]
    pub fn float(self) -> ShardTensor<D> {
        self.map_elements("float", |local| local.float())
    }

    /// True where this tensor is false.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    #[must_use]
    #[track_caller]
    pub fn bool_not(self) -> Self {
        self.map_elements("bool_not", |local| local.bool_not())
    }

    /// True where both are true.
    ///
    /// # Panics
    /// Panics if the layouts cannot be paired.
    #[must_use]
    #[track_caller]
    pub fn bool_and(self, other: Self) -> Self {
        self.zip_elements(other, "bool_and", |lhs, rhs| lhs.bool_and(rhs))
    }

    /// True where one or both are true.
    ///
    /// # Panics
    /// Panics if the layouts cannot be paired.
    #[must_use]
    #[track_caller]
    pub fn bool_or(self, other: Self) -> Self {
        self.zip_elements(other, "bool_or", |lhs, rhs| lhs.bool_or(rhs))
    }
}

impl<const D: usize> ShardTensor<D, Int> {
    /// Converts to floats.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Int;
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let days = ShardTensor::<1, Int>::full([5], 3, &mesh, &[Shard(0)])?;
    ///     let weeks = days.float() / 7.0;
    ///     assert_eq!(weeks.local().to_data().iter::<f32>().next(), Some(3.0 / 7.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn float(self) -> ShardTensor<D> {
        self.map_elements("float", |local| local.float())
    }
}
