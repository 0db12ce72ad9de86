//! Halocline ops.
