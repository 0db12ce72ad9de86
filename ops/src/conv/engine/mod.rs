//! Convolution engine for CPUs.

mod ahead;
mod cells;
pub(crate) mod correlate;
mod dot;
pub(crate) mod geometry;
pub(crate) mod job;
mod matrices;
pub(crate) mod method;
mod pack;
mod pairs;
mod part;
pub(crate) mod pieces;
pub(crate) mod plan;
mod rows;
mod source;
mod strip;
#[cfg(test)]
mod tests;
pub(crate) mod tile;
pub(crate) mod weight;
pub(crate) mod winograd;
