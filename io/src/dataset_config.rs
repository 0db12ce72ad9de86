//! Configuration of datasets.

use std::path::PathBuf;

use burn::config::Config;

use crate::{Error, Gaps, Missing, OpenConfig};

/// The time axes that samples are taken from.
///
/// See [`DatasetConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Series {
    /// Each file or store is a trajectory, such as a year or a model run: no sample spans two.
    Separate,
    /// All files or stores together are one time axis.
    Joined,
}

/// Configuration of a [`FieldDataset`](crate::FieldDataset): the times of a sample, and how files are opened.
///
/// # Example
/// ```
/// use halocline_io::{DatasetConfig, Gaps, OpenConfig, Series};
///
/// // From two times, predict the fourth after the later one.
/// let config = DatasetConfig::new().with_history(2).with_lead(4);
/// assert_eq!(config.series, Series::Separate);
/// // From files of one day each, predict the field a day later.
/// let config = DatasetConfig::new()
///     .with_series(Series::Joined)
///     .with_lead_hours(Some(24.0))
///     .with_open(OpenConfig::of_channels(&["t2m", "z@500"]).with_gaps(Gaps::Skip));
/// assert_eq!(config.open.gaps, Gaps::Skip);
/// // Learn two steps of t2m and z@500 from both and the sun.
/// let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
/// let config = DatasetConfig::new()
///     .with_steps(2)
///     .with_inputs(Some(names(&["t2m", "z@500"])))
///     .with_forcings(names(&["land_sea_mask", "cos_solar_zenith_angle"]));
/// assert_eq!(config.targets, None); // as the inputs
/// ```
#[derive(Config, Debug)]
pub struct DatasetConfig {
    /// Number of times in an input; the last one is the present.
    #[config(default = "1")]
    pub history: usize,
    /// Hours from each time of an input to the next, in place of times that follow each other. A time without fields so many
    /// hours before gives no sample. Forecasts of several steps need the hours of their lead.
    pub history_hours: Option<f64>,
    /// Number of time steps from the present to the target.
    #[config(default = "1")]
    pub lead: usize,
    /// Hours from the present to the target, in place of a number of steps. A time without a field
    /// so many hours later gives no sample.
    pub lead_hours: Option<f64>,
    /// Number of targets, each a lead after the one before it: for training over several
    /// autoregressive steps.
    #[config(default = "1")]
    pub steps: usize,
    /// The names of the inputs. Default all channels that are not forcings.
    pub inputs: Option<Vec<String>>,
    /// The names of the targets. Default those of the inputs.
    pub targets: Option<Vec<String>>,
    /// A file or store with fields on the same grid that are the same at all times, such as
    /// orography: channels that [`forcings`](Self::forcings) may name. They are normalised by their
    /// own mean and standard deviation over the grid.
    pub constants: Option<PathBuf>,
    /// The names of constants whose missing values are their mean. Those of others are an error: the fill value
    /// of a land mask may be one of its values.
    #[config(default = "Vec::new()")]
    pub constants_missing: Vec<String>,
    /// The names of channels that are given at the time of each step, and not predicted: channels of
    /// the files or of the [constants](Self::constants), such as a land mask; `mask:NAME`, one where a channel has values and zero
    /// elsewhere; and those that are computed, `cos_latitude`, `sin_latitude`, `cos_longitude`,
    /// `sin_longitude`, `cos_julian_day`, `sin_julian_day`, `cos_local_time`, `sin_local_time`,
    /// `cos_solar_zenith_angle` (zero at night). Masks and computed channels are not normalised.
    #[config(default = "Vec::new()")]
    pub forcings: Vec<String>,
    /// The time axes that samples are taken from.
    #[config(default = "Series::Separate")]
    pub series: Series,
    /// Channels, missing values, gaps and units of time.
    #[config(default = "OpenConfig::new()")]
    pub open: OpenConfig,
}

impl DatasetConfig {
    /// Sets the handling of missing values, of [`open`](Self::open).
    #[must_use]
    pub fn with_missing(mut self, missing: Missing) -> Self {
        self.open.missing = missing;
        self
    }

    /// Sets the handling of uneven time steps, of [`open`](Self::open).
    #[must_use]
    pub fn with_gaps(mut self, gaps: Gaps) -> Self {
        self.open.gaps = gaps;
        self
    }
}

impl DatasetConfig {
    /// The error of files that are too short, which have this time step and at most this many times.
    pub(crate) fn no_samples(&self, time_step: f64, longest: usize) -> Error {
        let Self {
            history,
            lead,
            steps,
            ..
        } = *self;
        if let Some(hours) = self.lead_hours {
            let step = time_step / 3600.0;
            let apart = self
                .history_hours
                .map_or(String::new(), |hours| format!(" times {hours} h apart"));
            let expected = format!(
                "the hours between two times of a file, after a history of {history}{apart}; \
                 the time step is {step} h"
            );
            return Error::argument("lead_hours", hours, expected);
        }
        let lead = match steps {
            1 => lead.to_string(),
            _ => format!("{lead} times {steps} steps"),
        };
        Error::argument(
            "history and lead",
            format!("{history} and {lead}"),
            format!("a sum of at most the {longest} times of the longest file"),
        )
    }
}
