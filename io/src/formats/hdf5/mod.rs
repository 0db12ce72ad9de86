//! Parts of HDF5 files that the bindings lack, or read without bounds.

pub(crate) mod attributes;
mod chunk_index;
pub(crate) mod chunked;
mod fletcher;
pub(crate) mod inside;
pub(crate) mod names;
pub(crate) mod scales;
