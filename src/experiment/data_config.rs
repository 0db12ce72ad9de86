//! Configuration of an experiment's data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use halocline_core::Result;
use halocline_io::{Calendar, Gaps, Missing, Period};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::cycle::Cycle;
use super::errors::{invalid, refuse};

/// Data of an experiment: files, channels by role, time steps, and the periods for training,
/// validation and test.
///
/// See [`ExperimentConfig`](super::ExperimentConfig) for an example.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Zarr stores, NetCDF files or field files. The last part of a path may be a pattern, such as
    /// `era5/*.nc`, which stands for the files that match it, sorted by name.
    pub files: Vec<PathBuf>,
    /// Whether all files form one time axis; otherwise each is a separate trajectory.
    #[serde(default)]
    pub joined: bool,
    /// Time units, such as `hours since 1940-01-01`, in place of those of the files.
    pub time_units: Option<String>,
    /// Input channels, such as `t2m` and `z@500`. Default all channels that are not forcings.
    pub inputs: Option<Vec<String>>,
    /// Target channels. Default the inputs.
    pub targets: Option<Vec<String>>,
    /// Channels known at every step: from the files or the constants, or computed.
    #[serde(default)]
    pub forcings: Vec<String>,
    /// File of fields that do not change in time.
    pub constants: Option<PathBuf>,
    /// Constants whose missing values are filled with their mean. Missing values of other constants
    /// are an error.
    #[serde(default)]
    pub constants_missing: Vec<String>,
    /// Inputs and forcings that change sign across a pole, such as `["u10", "v10", "u"]`; a
    /// variable stands for all its levels. Default the eastward and northward components,
    /// recognized by the standard names in the files or by usual names.
    pub odd: Option<Vec<String>>,
    /// Width in cells of the lateral boundary of a region: a rim whose values forecasts take from
    /// the data at each step, and which losses and scores leave out. Default 0, no boundary.
    #[serde(default)]
    pub boundary: usize,
    /// Lower bounds, or lower and upper bounds, of targets in their units, such as `[0.0, 1.0]`; a
    /// variable stands for all its levels. Predictions beyond them are set to the bound, in
    /// training and in forecasts. Default none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bounds: BTreeMap<String, Vec<f64>>,
    /// Folder of statistics that normalise the values, such as one of `halocline stats`. Default
    /// those of the training period, or of the [pretrained](super::TrainingConfig::pretrained)
    /// network.
    pub statistics: Option<PathBuf>,
    /// Number of times in an input.
    #[serde(default = "one")]
    pub history: usize,
    /// Number of channels of noise that the model receives after the forcings: standard normal
    /// values, drawn anew for each member at each step, in training and in forecasts, so that
    /// members differ. Default 0.
    #[serde(default)]
    pub noise_channels: usize,
    /// Hours of a step. By default a step leads to the next time of the files, however far away.
    pub lead_hours: Option<f64>,
    /// Hours of which the time of an input of training is a multiple, counted from 1970-01-01 00:00:
    /// with 12, samples start at 00 and 12 UTC. Default all times. See
    /// [`ForecastConfig::every_hours`](super::ForecastConfig::every_hours) for forecasts.
    pub every_hours: Option<usize>,
    /// Hours of the day, in UTC, of inputs of training, such as `[3, 15]`. Default all times. With
    /// [`every_hours`](Self::every_hours), inputs fulfil both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at_hours: Vec<usize>,
    /// Handling of uneven time steps: `reject` (an error), `skip` samples that span one, or
    /// `allow`.
    #[serde(default = "reject_gaps", with = "GapsName")]
    pub gaps: Gaps,
    /// Handling of missing values: `reject` (an error), or `fill` them with the mean and leave them
    /// out of losses and scores.
    #[serde(default = "reject_missing", with = "MissingName")]
    pub missing: Missing,
    /// Resolution of the climatology over the year. Default `month` if the training period is a
    /// year or longer, otherwise `mean`; with `anomalies`, that of the
    /// [pretrained](super::TrainingConfig::pretrained) network.
    pub climatology: Option<Cycle>,
    /// Hours of the day, UTC, that share a mean of the climatology; a divisor of 24, such as 6.
    /// Default 24; with `anomalies`, that of the pretrained network.
    pub climatology_hours: Option<usize>,
    /// Whether the model sees and predicts differences from the climatology.
    #[serde(default)]
    pub anomalies: bool,
    /// Period for training, statistics and climatology. Default all times, if there is no other
    /// period. Periods must not overlap.
    #[serde(default, deserialize_with = "period")]
    pub train: Period,
    /// Period for the validation after each epoch. Default none.
    #[serde(default, deserialize_with = "period")]
    pub validation: Option<Period>,
    /// Period for forecasts and scores. Default none.
    #[serde(default, deserialize_with = "period")]
    pub test: Option<Period>,
}

impl DataConfig {
    pub(super) fn check(&self) -> Result<()> {
        let others = self.validation.is_some() || self.test.is_some();
        refuse(&[
            (
                self.files.is_empty(),
                "data.files: none; expected at least one",
            ),
            (
                (1..self.files.len()).any(|file| self.files[..file].contains(&self.files[file])),
                "data.files: a file that is named twice",
            ),
            (
                self.history == 0,
                "data.history: 0; expected at least 1 time",
            ),
            (
                self.noise_channels > MOST_NOISE_CHANNELS,
                &format!(
                    "data.noise_channels: {}; expected at most {MOST_NOISE_CHANNELS}",
                    self.noise_channels
                ),
            ),
            (
                self.anomalies && self.history > 1,
                "data.anomalies: with a history of several times; expected a history of 1",
            ),
            (
                self.lead_hours.is_some_and(|hours| !positive(hours)),
                "data.lead_hours: expected more than 0 hours",
            ),
            (
                self.every_hours == Some(0),
                "data.every_hours: 0; expected at least 1 hour",
            ),
            (
                self.at_hours.iter().any(|hour| *hour >= 24),
                &format!(
                    "data.at_hours: {:?}; expected hours of the day, from 0 to 23",
                    self.at_hours
                ),
            ),
            (
                self.climatology_hours
                    .is_some_and(|hours| hours == 0 || 24 % hours != 0),
                "data.climatology_hours: expected a divisor of 24, such as 6",
            ),
            (
                self.missing == Missing::Allow,
                "data.missing: expected reject or fill",
            ),
            (
                !self.constants_missing.is_empty() && self.constants.is_none(),
                "data.constants_missing: without data.constants, whose missing values it fills",
            ),
            (
                others && self.train == Period::default(),
                "data.train: all times, of which data.validation or data.test are a part; expected a period of its own, \
                 such as train = { until = \"2020-01-01\" }",
            ),
        ])?;
        for (target, bounds) in &self.bounds {
            let is_valid = match bounds[..] {
                [lower] => lower.is_finite(),
                [lower, upper] => lower < upper,
                _ => false,
            };
            if !is_valid {
                let expected = "a lower bound, or a lower one and a higher one";
                return Err(invalid(
                    "data.bounds",
                    format!("{bounds:?} of {target}"),
                    expected,
                ));
            }
        }
        for (key, period) in self.periods() {
            // The dates of any calendar are those of one of these, in the same order. A period has
            // dates in common with itself, unless it ends before it begins.
            let calendars = [Calendar::Gregorian, Calendar::AllLeap, Calendar::Day360];
            let overlaps = |calendar: Calendar| period.overlaps(period, calendar).ok();
            if calendars.into_iter().find_map(overlaps) == Some(false) {
                return Err(invalid(key, period, "an end after the beginning"));
            }
        }
        Ok(())
    }

    /// Returns the periods that are given, and that of training, with their keys.
    fn periods(&self) -> Vec<(&'static str, &Period)> {
        let periods = [
            ("data.train", Some(&self.train)),
            ("data.validation", self.validation.as_ref()),
            ("data.test", self.test.as_ref()),
        ];
        let given = periods.map(|(key, period)| Some((key, period?)));
        given.into_iter().flatten().collect()
    }

    /// Returns the number of parts of a day with separate means in the climatology.
    pub(super) fn parts_of_day(&self) -> usize {
        self.climatology_hours.map_or(1, |hours| 24 / hours)
    }

    /// Returns whether this cycle and number of parts of a day are those of the keys of the
    /// climatology. A key that is left out agrees with any.
    pub(super) fn has_resolution(&self, cycle: Cycle, parts: usize) -> bool {
        let is_cycle = self.climatology.is_none_or(|wanted| wanted == cycle);
        let hours = self.climatology_hours;
        is_cycle && hours.is_none_or(|hours| 24 / hours == parts)
    }

    /// Rejects periods that have dates in common.
    pub(super) fn check_periods(&self, calendar: Calendar) -> Result<()> {
        let periods = self.periods();
        for (index, (name, period)) in periods.iter().enumerate() {
            for (other_name, other) in &periods[..index] {
                if period.overlaps(other, calendar)? {
                    let expected = format!(
                        "dates outside {other_name}, which is {other}; the last date of a period does not belong to it"
                    );
                    return Err(invalid(name, period, expected));
                }
            }
        }
        Ok(())
    }
}

/// Largest number of channels of noise.
const MOST_NOISE_CHANNELS: usize = 1 << 10;

/// Returns whether a number is positive and finite.
pub(super) fn positive(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

/// Returns whether a number is a standard deviation: finite and not negative.
pub(super) fn deviation(value: f64) -> bool {
    value >= 0.0 && value.is_finite()
}

/// Deserializes a period whose dates are strings or TOML dates.
fn period<'de, D: Deserializer<'de>, P: From<Period>>(deserializer: D) -> Result<P, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Dates {
        from: Option<toml::Value>,
        until: Option<toml::Value>,
    }
    let text = |date: Option<toml::Value>| match date {
        None => Ok(None),
        Some(toml::Value::String(text)) => Ok(Some(text)),
        Some(toml::Value::Datetime(date)) => Ok(Some(date.to_string())),
        Some(other) => Err(D::Error::custom(format!(
            "{other}: expected a date, such as 2018-01-01 or \"2018-01-01T06:00\""
        ))),
    };
    let Dates { from, until } = Dates::deserialize(deserializer)?;
    let (from, until) = (text(from)?, text(until)?);
    Ok(Period { from, until }.into())
}

fn one() -> usize {
    1
}

fn reject_gaps() -> Gaps {
    Gaps::Reject
}

fn reject_missing() -> Missing {
    Missing::Reject
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Gaps", rename_all = "lowercase")]
enum GapsName {
    Reject,
    Skip,
    Allow,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Missing", rename_all = "lowercase")]
enum MissingName {
    Reject,
    Allow,
    Fill,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_keys_without_effect_are_refused() {
        let check = |lines: &str| {
            let text = format!("files = [\"a.zarr\"]\n{lines}");
            let checked = toml::from_str::<DataConfig>(&text).unwrap().check();
            checked.map_or_else(|error| error.to_string(), |()| String::new())
        };
        for (lines, told) in [
            (
                "train = { from = \"2019-01-01\", until = \"2018-01-01\" }",
                "data.train: got from 2019-01-01 until 2018-01-01, expected an end after",
            ),
            (
                "train = { from = \"2019-02-30\", until = \"2019-02-29\" }",
                "data.train: got from 2019-02-30",
            ),
            (
                "constants_missing = [\"lsm\"]",
                "data.constants_missing: without data.constants",
            ),
            ("noise_channels = 2000", "data.noise_channels: 2000;"),
            ("at_hours = [24]", "data.at_hours: [24]; expected hours"),
            (
                "bounds = { tp = [] }",
                "data.bounds: got [] of tp, expected a lower bound",
            ),
            ("bounds = { tp = [nan] }", "data.bounds: got [NaN] of tp"),
            (
                "bounds = { tp = [1, 0.5] }",
                "data.bounds: got [1.0, 0.5] of tp",
            ),
        ] {
            let error = check(lines);
            assert!(error.starts_with(told), "{error}");
        }
        let valid =
            "constants = \"a.nc\"\nconstants_missing = [\"lsm\"]\ntrain = { until = 2018-01-01 }";
        assert_eq!(check(valid), "");
    }

    #[test]
    fn dates_are_texts_or_dates_of_toml() {
        let read = |dates: &str| {
            let text = format!("files = [\"a.zarr\"]\ntest = {{ {dates} }}");
            toml::from_str::<DataConfig>(&text)
        };
        let found = read("from = 2018-01-01, until = 2019-01-01T06:00:00").unwrap();
        let expected = read("from = \"2018-01-01\", until = \"2019-01-01T06:00:00\"").unwrap();
        assert_eq!(found, expected);
        assert!(found.test.is_some() && found.validation.is_none());
        for (wrong, told) in [
            ("from = 2018", "expected a date"),
            ("since = \"2018\"", "since"),
        ] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
