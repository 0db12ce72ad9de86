//! Channels computed from time and position.

use std::f64::consts::TAU;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::Calendar;

/// Mean length of a Julian year, in days.
const DAYS: f64 = 365.25;

/// Computed channel. Names and definitions follow anemoi-datasets; the solar zenith angle follows
/// ECMWF's earthkit-meteo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forcing {
    CosLatitude,
    SinLatitude,
    CosLongitude,
    SinLongitude,
    CosJulianDay,
    SinJulianDay,
    CosLocalTime,
    SinLocalTime,
    CosSolarZenithAngle,
}

impl Forcing {
    /// Whether the forcing depends on the time of day, which requires the Gregorian calendar.
    pub(crate) fn has_hour(self) -> bool {
        matches!(
            self,
            Self::CosLocalTime | Self::SinLocalTime | Self::CosSolarZenithAngle
        )
    }

    /// Whether the forcing depends on latitude or longitude.
    pub(crate) fn has_place(self) -> bool {
        !matches!(self, Self::CosJulianDay | Self::SinJulianDay)
    }

    const NAMES: [(&'static str, Self); 9] = [
        ("cos_latitude", Self::CosLatitude),
        ("sin_latitude", Self::SinLatitude),
        ("cos_longitude", Self::CosLongitude),
        ("sin_longitude", Self::SinLongitude),
        ("cos_julian_day", Self::CosJulianDay),
        ("sin_julian_day", Self::SinJulianDay),
        ("cos_local_time", Self::CosLocalTime),
        ("sin_local_time", Self::SinLocalTime),
        ("cos_solar_zenith_angle", Self::CosSolarZenithAngle),
    ];

    /// Returns the computed channel of this name, if there is one.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, forcing)| *forcing)
    }

    /// Lists the names of all computed channels, for errors.
    pub(crate) fn names() -> String {
        Self::NAMES.map(|(name, _)| name).join(", ")
    }

    /// Computes the value at an instant and a position in degrees.
    pub(crate) fn at(self, instant: Instant, lat: f64, lon: f64) -> f64 {
        let [lat, lon] = [lat, lon].map(f64::to_radians);
        let year = TAU * instant.day_of_year / DAYS;
        // Local solar time as an angle, from midnight on.
        let local = lon + TAU * instant.hours / 24.0;
        match self {
            Self::CosLatitude => lat.cos(),
            Self::SinLatitude => lat.sin(),
            Self::CosLongitude => lon.cos(),
            Self::SinLongitude => lon.sin(),
            Self::CosJulianDay => year.cos(),
            Self::SinJulianDay => year.sin(),
            Self::CosLocalTime => local.cos(),
            Self::SinLocalTime => local.sin(),
            Self::CosSolarZenithAngle => {
                let (declination, equation_of_time) = sun(year);
                let hour_angle = local + equation_of_time - TAU / 2.0;
                let height = lat.sin() * declination.sin()
                    + lat.cos() * declination.cos() * hour_angle.cos();
                // Zero while the sun is below the horizon.
                height.max(0.0)
            }
        }
    }
}

/// Returns declination and equation of time in radians, for the angle of the year. The
/// coefficients, in degrees, are those of the Fourier series in earthkit-meteo.
fn sun(year: f64) -> (f64, f64) {
    let series = |constant: f64, terms: &[[f64; 2]]| {
        let terms = (1..).zip(terms).map(|(order, [cos, sin])| {
            let angle = f64::from(order) * year;
            cos * angle.cos() + sin * angle.sin()
        });
        (constant + terms.sum::<f64>()).to_radians()
    };
    let declination = series(
        0.396372,
        &[
            [-22.91327, 4.025430],
            [-0.387205, 0.051967],
            [-0.154527, 0.084798],
        ],
    );
    let equation_of_time = series(0.004297, &[[0.107029, -1.837877], [-0.837378, -2.340475]]);
    (declination, equation_of_time)
}

/// Time as day of the year and hour of the day.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instant {
    /// Days since the beginning of the year.
    day_of_year: f64,
    /// Hours since midnight UTC.
    hours: f64,
}

impl Instant {
    /// Converts seconds since 1970-01-01 in a calendar. Years of other calendars than the Gregorian
    /// are scaled to the Julian year.
    pub(crate) fn of(seconds: f64, calendar: Calendar) -> Self {
        const DAY: f64 = 86_400.0;
        let day = (seconds / DAY).floor();
        let hours = (seconds - day * DAY) / 3600.0;
        let year = match calendar {
            Calendar::Gregorian => None,
            Calendar::NoLeap => Some(365.0),
            Calendar::AllLeap => Some(366.0),
            Calendar::Day360 => Some(360.0),
        };
        if let Some(year) = year {
            let day_of_year = (day.rem_euclid(year) + hours / 24.0) * DAYS / year;
            return Self { day_of_year, hours };
        }
        // Dates beyond the range of `jiff` have no meaningful season.
        let date = Timestamp::from_second((day * DAY) as i64).unwrap_or(Timestamp::UNIX_EPOCH);
        let date = date.to_zoned(TimeZone::UTC);
        Self {
            day_of_year: f64::from(date.day_of_year() - 1) + hours / 24.0,
            hours,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: &str, seconds: f64, lat: f64, lon: f64) -> f64 {
        Forcing::of(name)
            .unwrap()
            .at(Instant::of(seconds, Calendar::Gregorian), lat, lon)
    }

    #[test]
    fn years_of_other_calendars_are_whole_turns() {
        for (calendar, year) in [(Calendar::NoLeap, 365.0), (Calendar::Day360, 360.0)] {
            let at = |name: &str, days: f64| {
                let instant = Instant::of(days * 86_400.0, calendar);
                Forcing::of(name).unwrap().at(instant, 0.0, 0.0)
            };
            for years in [-1.0, 0.0, 30.0] {
                assert!((at("cos_julian_day", years * year) - 1.0).abs() < 1e-12);
                assert!((at("sin_julian_day", (years + 0.25) * year) - 1.0).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn the_sun_stands_where_it_does() {
        let height = |date: &str, lat, lon| {
            let date: Timestamp = date.parse().unwrap();
            at("cos_solar_zenith_angle", date.as_second() as f64, lat, lon)
        };
        // At noon of the solstice the sun is in the zenith of the tropic.
        assert!(height("2020-06-21T12:00:00Z", 23.44, 0.0) > 0.9999);
        assert!(height("2020-06-21T00:00:00Z", 23.44, 180.0) > 0.9999);
        // Polar day and polar night.
        assert!((height("2020-06-21T00:00:00Z", 90.0, 0.0) - 0.3978).abs() < 1e-3);
        assert_eq!(height("2020-06-21T12:00:00Z", -80.0, 0.0), 0.0);
        // In early November the sun is a quarter of an hour ahead of the clock.
        let noon = |date: &str| height(date, 0.0, 0.0);
        assert!(noon("2020-11-03T11:43:00Z") > noon("2020-11-03T12:00:00Z"));
    }

    #[test]
    fn times_and_places_have_their_angles() {
        let close = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-12);
        close(at("cos_local_time", 0.0, 10.0, 0.0), 1.0);
        close(at("sin_local_time", 6.0 * 3600.0, 10.0, 0.0), 1.0);
        close(at("cos_local_time", 6.0 * 3600.0, 10.0, 270.0), 1.0);
        close(at("cos_julian_day", 365.0 * 86_400.0, 0.0, 0.0), 1.0); // 1971-01-01
        close(at("sin_julian_day", 86_400.0, 0.0, 0.0), (TAU / DAYS).sin());
        // Also in a year before 1970.
        close(at("cos_julian_day", -365.0 * 86_400.0, 0.0, 0.0), 1.0);
        close(at("sin_latitude", 0.0, -30.0, 0.0), -0.5);
        close(at("cos_latitude", 0.0, 60.0, 0.0), 0.5);
        close(at("cos_longitude", 0.0, 0.0, 180.0), -1.0);
        close(at("sin_longitude", 0.0, 0.0, 270.0), -1.0);
        assert!(Forcing::of("t2m").is_none());
        assert_eq!(Forcing::names().split(", ").count(), 9);
    }
}
