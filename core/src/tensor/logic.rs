//! Booleans and integers: logic, and what they are as numbers of another kind.

use burn::tensor::{Bool, Int};

use super::ShardTensor;

impl<const D: usize> ShardTensor<D, Bool> {
    /// One where true, zero elsewhere.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    pub fn int(self) -> ShardTensor<D, Int> {
        self.map_elements("int", |local| local.int())
    }

    /// One where true, zero elsewhere.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    pub fn float(self) -> ShardTensor<D> {
        self.map_elements("float", |local| local.float())
    }

    /// Where this tensor is not true.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    #[must_use]
    pub fn bool_not(self) -> Self {
        self.map_elements("bool_not", |local| local.bool_not())
    }

    /// Where both are true.
    ///
    /// # Panics
    /// Panics if the layouts do not go together.
    #[must_use]
    pub fn bool_and(self, other: Self) -> Self {
        self.zip_elements(other, "bool_and", |lhs, rhs| lhs.bool_and(rhs))
    }

    /// Where one or both are true.
    ///
    /// # Panics
    /// Panics if the layouts do not go together.
    #[must_use]
    pub fn bool_or(self, other: Self) -> Self {
        self.zip_elements(other, "bool_or", |lhs, rhs| lhs.bool_or(rhs))
    }
}

impl<const D: usize> ShardTensor<D, Int> {
    /// Integers as floats.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    pub fn float(self) -> ShardTensor<D> {
        self.map_elements("float", |local| local.float())
    }
}
