//! Building blocks of CPU kernels: instruction sets, memory, vectors, and tensors of the CPU
//! backend.
//!
//! Kernels work with slices, strides and geometry; ranks do not appear here.

pub(crate) mod amx;
pub(crate) mod buffer;
mod constants;
pub(crate) mod flex;
pub(crate) mod gathered;
pub(crate) mod interleave;
pub(crate) mod ints;
pub(crate) mod lanes;
pub(crate) mod lines;
pub(crate) mod local;
mod logarithm;
pub(crate) mod math;
pub(crate) mod matrices;
pub(crate) mod memory;
pub(crate) mod panels;
pub(crate) mod products;
pub(crate) mod simd;
pub(crate) mod taken;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod transpose;
pub(crate) mod widths;
pub(crate) mod work;
