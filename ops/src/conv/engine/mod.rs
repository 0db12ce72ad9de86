//! The convolution engine of the CPU.

pub(crate) mod correlate;
pub(crate) mod geometry;
pub(crate) mod strip;
pub(crate) mod tile;
pub(crate) mod weight;
