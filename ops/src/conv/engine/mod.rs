//! Convolution engine for CPUs.

mod ahead;
pub(crate) mod correlate;
mod dot;
pub(crate) mod geometry;
pub(crate) mod job;
pub(crate) mod method;
pub(crate) mod pieces;
mod rows;
mod source;
mod strip;
#[cfg(test)]
mod tests;
pub(crate) mod tile;
pub(crate) mod weight;
pub(crate) mod winograd;
