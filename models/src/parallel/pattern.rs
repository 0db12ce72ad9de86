//! Patterns for module paths.

use globset::{GlobBuilder, GlobMatcher};
use halocline_core::support::nearest_names;
use halocline_core::{Error, Result};

/// Maximum number of names that an error suggests.
const PROPOSED: usize = 3;

/// Pattern for a path whose parts are joined by dots.
pub(super) struct Pattern {
    text: String,
    glob: GlobMatcher,
}

impl Pattern {
    pub(super) fn new(text: &str) -> Result<Self> {
        // In globs, slashes separate the parts.
        let glob = GlobBuilder::new(&text.replace('.', "/"))
            .literal_separator(true)
            .build()
            .map_err(|error| Error::Plan(format!("pattern {text:?}: {error}")))?;
        Ok(Self {
            text: text.into(),
            glob: glob.compile_matcher(),
        })
    }

    pub(super) fn matches(&self, path: &str) -> bool {
        self.glob.is_match(path.replace('.', "/"))
    }

    /// Returns the error for a pattern that matches no path; it suggests similar ones.
    pub(super) fn unmatched<'a>(&self, what: &str, paths: impl Iterator<Item = &'a str>) -> Error {
        let near = nearest_names(&self.text, paths, PROPOSED).join(", ");
        Error::Plan(format!(
            "{:?} matches no {what}; near it: {near}",
            self.text
        ))
    }
}
