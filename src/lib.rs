//! Halocline
