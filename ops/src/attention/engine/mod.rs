//! Kernels of attention. They work on slices, strides and geometry; they have no notion of burn,
//! ranks or layouts.

mod blocks;
mod class;
pub(super) mod dense;
pub(super) mod rows;
pub(super) mod tiles;
pub(super) mod weights;
pub(super) mod windows;
