//! Variables of files that are not channels.

use std::fmt;

/// Variable of a file or store that is not a channel. `Display` formats it with the reason.
///
/// # Example
/// ```
/// use halocline_io::{LeftOut, LeftOutReason};
///
/// let reason = LeftOutReason::Coordinate("a coordinate of t2m; choose it by name to read it".into());
/// let variable = LeftOut::new("XLAT", reason);
/// assert!(matches!(variable.reason, LeftOutReason::Coordinate(_)));
/// assert_eq!(variable.to_string(), "XLAT (a coordinate of t2m; choose it by name to read it)");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Name of the variable.
    pub name: String,
    /// Reason why the variable is not a channel.
    pub reason: LeftOutReason,
}

/// Reason why a variable is not a channel, with its text.
///
/// See [`LeftOut`] for an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeftOutReason {
    /// Coordinate, which is read if it is chosen by name.
    Coordinate(String),
    /// Dim of times without a time coordinate.
    NoTimes(String),
    /// Another reason.
    Other(String),
}

impl LeftOut {
    /// Makes the description of a variable that is not a channel.
    pub fn new(name: &str, reason: LeftOutReason) -> Self {
        Self {
            name: name.into(),
            reason,
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.reason)
    }
}

impl fmt::Display for LeftOutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinate(text) | Self::NoTimes(text) | Self::Other(text) => f.write_str(text),
        }
    }
}
