//! Convolution engine for CPUs.

mod ahead;
pub(crate) mod correlate;
pub(crate) mod geometry;
mod rows;
pub(crate) mod strip;
#[cfg(test)]
mod tests;
pub(crate) mod tile;
pub(crate) mod weight;
