//! Configuration of an experiment's data.

use std::path::PathBuf;

use halocline_core::{Error, Result};
use halocline_io::{Calendar, Gaps, Missing, Period};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::climatology::Cycle;

/// Files, channels by role, times, and the periods for training, validation and test.
///
/// See [`ExperimentConfig`](super::ExperimentConfig) for an example.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Zarr stores, NetCDF files or field files.
    pub files: Vec<PathBuf>,
    /// Whether all files are one time axis; else each is a trajectory of its own.
    #[serde(default)]
    pub joined: bool,
    /// Units of times, such as `hours since 1940-01-01`, in place of those of the files.
    pub time_units: Option<String>,
    /// Inputs by name, such as `t2m`, `z@500`. Default all channels that are not forcings.
    pub inputs: Option<Vec<String>>,
    /// Targets by name. Default the inputs.
    pub targets: Option<Vec<String>>,
    /// Channels that are given at each step, of the files, the constants, or computed.
    #[serde(default)]
    pub forcings: Vec<String>,
    /// A file of fields that are the same at all times.
    pub constants: Option<PathBuf>,
    /// Constants whose missing values are their mean. Those of others are an error.
    #[serde(default)]
    pub constants_missing: Vec<String>,
    /// Inputs and forcings that change their sign across a pole, such as `["u10", "v10", "u"]`, of all levels.
    /// Default those that the files' standard names, or usual names, tell to be eastward or northward
    /// components.
    pub odd: Option<Vec<String>>,
    /// Times of an input.
    #[serde(default = "one")]
    pub history: usize,
    /// Hours of a step. Default the step to the next time of the files, however long.
    pub lead_hours: Option<f64>,
    /// Uneven time steps: `reject` (an error), `skip` samples that span one, or `allow`.
    #[serde(default = "reject_gaps", with = "GapsName")]
    pub gaps: Gaps,
    /// Missing values: `reject` (an error), or `fill` them by the mean and leave them out of losses and
    /// scores.
    #[serde(default = "reject_missing", with = "MissingName")]
    pub missing: Missing,
    /// The times of a year that have a climatology of their own. Default by `month` if the training period
    /// is a year or longer, else one `mean`.
    pub climatology: Option<Cycle>,
    /// Hours of the day, UTC, that share a mean of the climatology, such as 6; a divisor of 24. Default all.
    pub climatology_hours: Option<usize>,
    /// Whether the model sees differences from the climatology, and predicts them.
    #[serde(default)]
    pub anomalies: bool,
    /// The period for training, of statistics and climatology. Default all times, if there is no other
    /// period. Periods do not overlap.
    #[serde(default, deserialize_with = "period")]
    pub train: Period,
    /// The period for validation after each epoch. Default none.
    #[serde(default, deserialize_with = "period")]
    pub validation: Option<Period>,
    /// The period for scores. Default none.
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
                self.anomalies && self.history > 1,
                "data.anomalies: with a history of several times; expected a history of 1",
            ),
            (
                self.lead_hours.is_some_and(|hours| !positive(hours)),
                "data.lead_hours: expected more than 0 hours",
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
                others && self.train == Period::default(),
                "data.train: all times, of which data.validation or data.test are a part; expected a period of its own, \
                 such as train = { until = \"2020-01-01\" }",
            ),
        ])
    }

    /// Parts of a day that have means of their own in the climatology.
    pub(super) fn parts_of_day(&self) -> usize {
        self.climatology_hours.map_or(1, |hours| 24 / hours)
    }

    /// Refuses periods that have dates in common.
    pub(super) fn check_periods(&self, calendar: Calendar) -> Result<()> {
        let periods = [
            ("data.train", Some(&self.train)),
            ("data.validation", self.validation.as_ref()),
            ("data.test", self.test.as_ref()),
        ];
        for (index, (name, period)) in periods.iter().enumerate() {
            for (other_name, other) in &periods[..index] {
                let (Some(period), Some(other)) = (period, other) else {
                    continue;
                };
                if period.overlaps(other, calendar)? {
                    return Err(Error::from(halocline_io::Error::Argument {
                        argument: name,
                        got: period.to_string(),
                        expected: format!(
                            "dates outside {other_name}, which is {other}; the last date of a period does not belong to it"
                        ),
                    }));
                }
            }
        }
        Ok(())
    }
}

/// Whether a number is above zero.
pub(super) fn positive(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

/// Whether a number is a standard deviation.
pub(super) fn deviation(value: f64) -> bool {
    value >= 0.0 && value.is_finite()
}

/// The first error of some, each with whether it holds.
pub(super) fn refuse(checks: &[(bool, &str)]) -> Result<()> {
    match checks.iter().find(|(wrong, _)| *wrong) {
        Some((_, message)) => Err(Error::other(*message)),
        None => Ok(()),
    }
}

/// A period whose dates are texts, or dates of TOML.
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
