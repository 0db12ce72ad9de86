//! Options of reading, which subcommands share.

use clap::{Args, ValueEnum};
use halocline::io::{Gaps, Missing, OpenConfig};

/// How files and stores are read.
#[derive(Args, Default)]
pub(crate) struct Reading {
    /// Channels by name, such as t2m,z@500; all by default
    #[arg(long, value_delimiter = ',')]
    channels: Option<Vec<String>>,
    /// Units of times, such as "hours since 1940-01-01", in place of those of the file
    #[arg(long)]
    time_units: Option<String>,
}

/// Handling of missing values.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum MissingChoice {
    /// They are an error.
    Reject,
    /// They are left out, or written as NaN.
    Allow,
}

/// Handling of uneven time steps.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum GapsChoice {
    /// They are an error.
    Reject,
    /// What would span them is left out.
    Skip,
    /// They count as others.
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
