//! Files that are complete under their name, and durable on the disk.

pub(crate) mod durable;
pub(crate) mod json;
pub(crate) mod staged;

pub use json::save_json;
pub use staged::save_whole;
