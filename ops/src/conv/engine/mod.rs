//! The convolution engine of the CPU.

pub(crate) mod correlate;
pub(crate) mod geometry;
pub(crate) mod strip;
#[cfg(test)]
mod tests;
pub(crate) mod tile;
pub(crate) mod weight;
