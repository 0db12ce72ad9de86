//! Kernels of attention. They know slices, strides and geometry; not burn, ranks or layouts.

mod blocks;
mod class;
pub(super) mod dense;
pub(super) mod rows;
pub(super) mod tiles;
pub(super) mod weights;
pub(super) mod windows;
