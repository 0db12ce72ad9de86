//! Configuration of forecasts: their steps, ensembles and starts, and the regions of their scores.

use std::collections::BTreeMap;

use halocline_core::Result;
use halocline_io::{falls_at, falls_on};
use halocline_models::Region;
use serde::{Deserialize, Serialize};

use super::data_config::deviation;
use super::errors::{invalid, refuse};

/// Forecasts: their steps, ensembles and starts, and the regions of their scores.
///
/// # Example
/// ```
/// use halocline::experiment::{ForecastConfig, RegionConfig};
///
/// let europe = RegionConfig { lat: [35.0, 75.0], lon: [-12.5, 42.5] };
/// let config = ForecastConfig {
///     steps: 20,
///     every_hours: Some(12), // from 00 and 12 UTC
///     regions: [("europe".into(), europe)].into(),
///     ..ForecastConfig::default()
/// };
/// assert_eq!(config.members, 1);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForecastConfig {
    /// Steps per forecast.
    pub steps: usize,
    /// Members per ensemble.
    pub members: usize,
    /// Standard deviation of the noise that makes members differ, in standard deviations of the
    /// inputs. It may be 0 for a model with [channels of noise](super::DataConfig::noise_channels).
    pub noise: f64,
    /// Members that a rank computes at once. Fewer need less memory: only their hidden fields are
    /// held at a time, besides inputs and predictions of all members. Results are the same up to
    /// rounding. Default all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members_at_once: Option<usize>,
    /// Hours of which the time of a start is a multiple, counted from 1970-01-01 00:00: with 12,
    /// validations, scores and forecasts start at 00 and 12 UTC. Default all times. A forecast from
    /// a date starts at that date.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_hours: Option<usize>,
    /// Hours of the day, in UTC, at which validations, scores and forecasts start, such as
    /// `[3, 15]`. Default all times. With [`every_hours`](Self::every_hours), starts fulfil both.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub at_hours: Vec<usize>,
    /// Level of the Zstandard compression of Zarr stores, from 1 (fastest) to 9 (smallest), or 0 for
    /// none. NetCDF files are not compressed. Default 3.
    #[serde(skip_serializing_if = "is_default_level")]
    pub compression: usize,
    /// Regions of scores by name, in addition to the [standard ones](Region::standard).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub regions: BTreeMap<String, RegionConfig>,
}

/// Box of latitudes and longitudes in degrees, of which there are scores.
///
/// See [`ForecastConfig`] for an example.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionConfig {
    /// Southern and northern bounds.
    pub lat: [f64; 2],
    /// Western and eastern bounds, from −360 to 360. The box extends eastward from the first one,
    /// possibly across the date line. Default around the globe.
    #[serde(default = "around")]
    pub lon: [f64; 2],
}

fn around() -> [f64; 2] {
    [0.0, 360.0]
}

/// Compression level without a setting.
const LEVEL: usize = 3;

fn is_default_level(level: &usize) -> bool {
    *level == LEVEL
}

impl Default for ForecastConfig {
    fn default() -> Self {
        Self {
            steps: 1,
            members: 1,
            noise: 0.0,
            members_at_once: None,
            every_hours: None,
            at_hours: Vec::new(),
            compression: LEVEL,
            regions: BTreeMap::new(),
        }
    }
}

impl ForecastConfig {
    /// Checks the settings, for a model with this number of channels of noise.
    pub(super) fn check(&self, noise_channels: usize) -> Result<()> {
        refuse(&[
            (
                self.steps == 0,
                "forecast.steps: 0; expected at least 1 step",
            ),
            (
                self.members == 0,
                "forecast.members: 0; expected at least 1 member",
            ),
            (
                self.members_at_once == Some(0),
                "forecast.members_at_once: 0; expected at least 1 member, or no such key for all at once",
            ),
            (
                !deviation(self.noise),
                &format!(
                    "forecast.noise: {}; expected a standard deviation from 0 on",
                    self.noise
                ),
            ),
            (
                self.members > 1 && self.noise == 0.0 && noise_channels == 0,
                "forecast.noise: 0, with which all members are the same; expected a standard deviation, such as 0.1, \
                 or data.noise_channels, or 1 member",
            ),
            (
                self.every_hours == Some(0),
                "forecast.every_hours: 0; expected at least 1 hour",
            ),
            (
                self.at_hours.iter().any(|hour| *hour >= 24),
                &format!(
                    "forecast.at_hours: {:?}; expected hours of the day, from 0 to 23",
                    self.at_hours
                ),
            ),
            (
                self.compression > 9,
                &format!(
                    "forecast.compression: {}; expected a level from 1 to 9, or 0 for none",
                    self.compression
                ),
            ),
        ])?;
        for (name, region) in &self.regions {
            let is_standard = Region::standard().iter().any(|other| other.name == *name);
            if is_standard || name.is_empty() {
                let expected = "a name of its own, not that of a standard region";
                return Err(invalid("forecast.regions", format!("{name:?}"), expected));
            }
            let [south, north] = region.lat;
            let is_lat = -90.0 <= south && south < north && north <= 90.0;
            let is_lon = region.lon.iter().all(|lon| (-360.0..=360.0).contains(lon));
            if !is_lat || !is_lon {
                return Err(invalid(
                    "forecast.regions",
                    format!("{name} with lat {:?}, lon {:?}", region.lat, region.lon),
                    "lat = [south, north] from -90 to 90, and lon = [west, east] from -360 to 360",
                ));
            }
        }
        Ok(())
    }

    /// Returns whether forecasts start at a time, in seconds since 1970-01-01 00:00.
    pub(super) fn starts_at(&self, time: f64) -> bool {
        self.every_hours.is_none_or(|hours| falls_on(time, hours)) && falls_at(time, &self.at_hours)
    }

    /// Returns the names and the values of the settings that choose starts, if there are any.
    pub(super) fn chosen_starts(&self) -> Option<(&'static str, String)> {
        let hours = &self.at_hours;
        match self.every_hours {
            None if hours.is_empty() => None,
            None => Some(("forecast.at_hours", format!("{hours:?}"))),
            Some(every) if hours.is_empty() => Some(("forecast.every_hours", every.to_string())),
            Some(every) => Some((
                "forecast.every_hours and at_hours",
                format!("{every} and {hours:?}"),
            )),
        }
    }

    /// Returns these settings without those that do not change the fields of a forecast: the choice
    /// of starts, the members computed at once, the compression and the regions of scores.
    pub(super) fn of_fields(&self) -> Self {
        Self {
            every_hours: None,
            at_hours: Vec::new(),
            ..self.of_validation()
        }
    }

    /// Returns these settings without those that do not change the score of a validation: the
    /// members computed at once, the compression of outputs and the regions beside the first.
    pub(super) fn of_validation(&self) -> Self {
        Self {
            members_at_once: None,
            compression: LEVEL,
            regions: BTreeMap::new(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_starts_and_regions_are_checked() {
        for (text, told) in [
            ("members_at_once = 0", "forecast.members_at_once: 0"),
            ("every_hours = 0", "forecast.every_hours: 0"),
            ("at_hours = [3, 24]", "forecast.at_hours: [3, 24]; expected"),
            ("compression = 10", "forecast.compression: 10; expected"),
            ("regions.globe = { lat = [0, 1] }", "got \"globe\""),
            ("regions.a = { lat = [75, 35] }", "got a with lat [75.0"),
            ("regions.a = { lat = [35, 95] }", "got a with lat [35.0"),
            (
                "regions.a = { lat = [35, 75], lon = [0, 400] }",
                "lon [0.0, 400.0], expected lat",
            ),
        ] {
            let config: ForecastConfig = toml::from_str(text).unwrap();
            let error = config.check(0).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let text = "members_at_once = 2\nevery_hours = 12\nat_hours = [0]\ncompression = 0\n\
                    regions.a = { lat = [35, 75], lon = [170, -170] }";
        let config: ForecastConfig = toml::from_str(text).unwrap();
        config.check(0).unwrap();
        assert_eq!(config.of_fields(), ForecastConfig::default());
    }

    /// Folders of earlier versions have notes of these settings without the keys added since.
    #[test]
    fn notes_of_earlier_folders_are_those_of_the_defaults() {
        let note = serde_json::to_string(&ForecastConfig::default()).unwrap();
        assert_eq!(note, r#"{"steps":1,"members":1,"noise":0.0}"#);
    }
}
