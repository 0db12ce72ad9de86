//! Kernels of normalization on one shard.

pub(super) mod group;
pub(super) mod layer;
pub(super) mod moments;
