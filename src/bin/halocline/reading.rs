//! Options for reading that subcommands share.

use clap::{Args, ValueEnum};
use halocline::io::{Gaps, Missing, OpenConfig};

/// Options for reading files and stores.
#[derive(Args, Default)]
pub(crate) struct Reading {
    /// Channels to read, such as t2m,z@500; all by default
    #[arg(long, value_delimiter = ',')]
    channels: Option<Vec<String>>,
    /// Time units, such as "hours since 1940-01-01", in place of those of the file
    #[arg(long)]
    time_units: Option<String>,
}

/// Handling of missing values.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum MissingChoice {
    /// Treat them as an error.
    Reject,
    /// Leave them out, or write them as NaN.
    Allow,
}

/// Handling of uneven time steps.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum GapsChoice {
    /// Treat them as an error.
    Reject,
    /// Leave out increments that span them.
    Skip,
    /// Treat them like other steps.
    Allow,
}

impl Reading {
    pub(crate) fn config(&self) -> OpenConfig {
        OpenConfig::new()
            .with_channels(self.channels.clone())
            .with_time_units(self.time_units.clone())
    }
}

impl From<MissingChoice> for Missing {
    fn from(choice: MissingChoice) -> Self {
        match choice {
            MissingChoice::Reject => Self::Reject,
            MissingChoice::Allow => Self::Allow,
        }
    }
}

impl From<GapsChoice> for Gaps {
    fn from(choice: GapsChoice) -> Self {
        match choice {
            GapsChoice::Reject => Self::Reject,
            GapsChoice::Skip => Self::Skip,
            GapsChoice::Allow => Self::Allow,
        }
    }
}
