//! Halocline io.
