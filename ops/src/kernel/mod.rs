//! What compute kernels on the CPU share. Kernels know slices, strides and geometry; nothing of backends or ranks.

pub(crate) mod activation;
pub(crate) mod buffer;
mod lanes;
pub(crate) mod layer_norm;
mod math;
pub(crate) mod memory;
pub(crate) mod moments;
pub(crate) mod norm;
pub(crate) mod pooling;
pub(crate) mod resample;
pub(crate) mod simd;
#[cfg(test)]
pub(crate) mod testing;
