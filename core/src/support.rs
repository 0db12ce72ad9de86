//! Tools for libraries and programs built on this crate: suggestions for mistyped names, the limit
//! of file descriptors, and the generator of random words.

pub use crate::descriptors::raise_descriptor_limit;
pub use crate::near::nearest_names;
pub use crate::rng::philox4x32_10;
