//! Configuration of datasets.

use std::path::PathBuf;

use burn::config::Config;

use crate::{Error, Gaps, Missing, OpenConfig};

/// Time axes from which samples are taken.
///
/// See [`DatasetConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Series {
    /// Each file or store is a trajectory, such as a year or a model run. No sample spans two.
    Separate,
    /// All files or stores together form one time axis.
    Joined,
}

/// Configuration of a [`FieldDataset`](crate::FieldDataset): times and channels of a sample, and
/// how files are opened.
///
/// # Example
/// ```
/// use halocline_io::{DatasetConfig, Gaps, OpenConfig, Series};
///
/// // From two times, predict the field four steps after the later one.
/// let config = DatasetConfig::new().with_history(2).with_lead(4);
/// assert_eq!(config.series, Series::Separate);
/// // From files of one day each, predict the field a day later.
/// let config = DatasetConfig::new()
///     .with_series(Series::Joined)
///     .with_lead_hours(Some(24.0))
///     .with_open(OpenConfig::of_channels(&["t2m", "z@500"]).with_gaps(Gaps::Skip));
/// assert_eq!(config.open.gaps, Gaps::Skip);
/// // Predict two steps of t2m and z@500 from both, land and sun.
/// let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
/// let config = DatasetConfig::new()
///     .with_steps(2)
///     .with_inputs(Some(names(&["t2m", "z@500"])))
///     .with_forcings(names(&["land_sea_mask", "cos_solar_zenith_angle"]));
/// assert_eq!(config.targets, None); // same as the inputs
/// ```
#[derive(Config, Debug)]
pub struct DatasetConfig {
    /// Number of times in an input; the last one is the present.
    #[config(default = "1")]
    pub history: usize,
    /// Hours between the times of an input, which otherwise are consecutive. A present whose
    /// earlier inputs have no fields yields no sample. Forecasts of several steps need a spacing
    /// equal to their lead.
    pub history_hours: Option<f64>,
    /// Number of time steps from the present to the target.
    #[config(default = "1")]
    pub lead: usize,
    /// Hours from the present to the target, in place of a number of steps. A present without a
    /// field at the target time yields no sample.
    pub lead_hours: Option<f64>,
    /// Hours of which the present of a sample is a multiple, counted from 1970-01-01 00:00: 12 takes
    /// the samples of 00 and 12 UTC. Default all times.
    pub every_hours: Option<usize>,
    /// Hours of the day at which the present of a sample is, from 0 to 23: `[3, 15]` takes the
    /// samples of 03 and 15 UTC. Default all times. With [`every_hours`](Self::every_hours), samples
    /// fulfil both.
    #[config(default = "Vec::new()")]
    pub at_hours: Vec<usize>,
    /// Number of targets, each one lead after the previous one, for training over several
    /// autoregressive steps.
    #[config(default = "1")]
    pub steps: usize,
    /// Names of the inputs. Default all channels that are not forcings.
    pub inputs: Option<Vec<String>>,
    /// Names of the targets. Default the inputs.
    pub targets: Option<Vec<String>>,
    /// File or store with constant fields on the same grid, such as orography, which
    /// [`forcings`](Self::forcings) may name. They are normalised by their own mean and standard
    /// deviation over the grid.
    pub constants: Option<PathBuf>,
    /// Names of constants whose missing values are replaced by their mean. Missing values in other
    /// constants are an error, because the fill value of a land mask may be one of its values.
    #[config(default = "Vec::new()")]
    pub constants_missing: Vec<String>,
    /// File or store of fields of one time on the same grid, such as the orography with which a
    /// model was trained. They are channels of each file at all times, in place of those of the same
    /// names, and are normalised like these.
    pub static_fields: Option<PathBuf>,
    /// Names of channels that are known at the time of each step and not predicted:
    /// - channels of the files or of the [constants](Self::constants), such as a land mask;
    /// - `mask:NAME`, one where a channel has values and zero elsewhere;
    /// - computed channels: `cos_latitude`, `sin_latitude`, `cos_longitude`, `sin_longitude`,
    ///   `cos_julian_day`, `sin_julian_day`, `cos_local_time`, `sin_local_time`,
    ///   `cos_solar_zenith_angle` (zero at night).
    ///
    /// Masks and computed channels are not normalised.
    #[config(default = "Vec::new()")]
    pub forcings: Vec<String>,
    /// Time axes from which samples are taken.
    #[config(default = "Series::Separate")]
    pub series: Series,
    /// How files are opened: channels, missing values, gaps, units of time, period, and the order of
    /// rows and columns.
    #[config(default = "OpenConfig::new()")]
    pub open: OpenConfig,
}

impl DatasetConfig {
    /// Sets the handling of missing values in [`open`](Self::open).
    #[must_use]
    pub fn with_missing(mut self, missing: Missing) -> Self {
        self.open.missing = missing;
        self
    }

    /// Sets the handling of uneven time steps in [`open`](Self::open).
    #[must_use]
    pub fn with_gaps(mut self, gaps: Gaps) -> Self {
        self.open.gaps = gaps;
        self
    }
}

impl DatasetConfig {
    /// Returns the error for files that are too short for any sample. The files have this time
    /// step, at most `longest` times, and samples of up to `most_steps` steps.
    pub(crate) fn too_short(&self, time_step: f64, longest: usize, most_steps: usize) -> Error {
        let too_short = |argument, got, expected| Error::TooShort {
            argument,
            got,
            expected,
            most_steps,
        };
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
            let (argument, got, times) = match steps {
                1 => (
                    "lead_hours",
                    hours.to_string(),
                    "the hours between two times",
                ),
                _ => (
                    "lead_hours and steps",
                    format!("{hours} and {steps}"),
                    "steps of these hours between times",
                ),
            };
            let expected = format!(
                "{times} of a file, after a history of {history}{apart}; the time step is {step} h, and the longest \
                 file has {longest} times"
            );
            return too_short(argument, got, expected);
        }
        if lead == 0 {
            let apart = match self.history_hours {
                Some(hours) => format!("{hours} h apart"),
                None => "that are consecutive".into(),
            };
            let held = match longest {
                1 => "1 time".into(),
                _ => format!("{longest} times, {} h apart", time_step / 3600.0),
            };
            let expected =
                format!("a file with {history} times {apart}; the longest file has {held}");
            return too_short("history", history.to_string(), expected);
        }
        let lead = match steps {
            1 => lead.to_string(),
            _ => format!("{lead} times {steps} steps"),
        };
        too_short(
            "history and lead",
            format!("{history} and {lead}"),
            format!("a sum of at most the {longest} times of the longest file"),
        )
    }
}
