//! What compute kernels on the CPU share. Kernels know slices, strides and geometry; nothing of backends or ranks.

pub(crate) mod memory;
pub(crate) mod pool;
pub(crate) mod simd;
