//! Errors of settings and of files.

use std::fmt::Display;
use std::path::Path;

use halocline_core::{Error, Result};

/// Returns the error for a setting that is out of range or does not fit the data.
pub(super) fn invalid(
    setting: &'static str,
    got: impl ToString,
    expected: impl Into<String>,
) -> Error {
    Error::from(halocline_io::Error::Argument {
        argument: setting,
        got: got.to_string(),
        expected: expected.into(),
    })
}

/// Returns the message of the first check that holds as an error.
pub(super) fn refuse(checks: &[(bool, &str)]) -> Result<()> {
    match checks.iter().find(|(wrong, _)| *wrong) {
        Some((_, message)) => Err(Error::other(*message)),
        None => Ok(()),
    }
}

/// Returns a function that makes errors of a path, whose messages begin with it.
pub(super) fn failed<E: Display>(path: &Path) -> impl Fn(E) -> Error {
    move |error| Error::other(format!("{}: {error}", path.display()))
}
