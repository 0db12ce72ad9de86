//! Halocline models.
