//! Channels computed from time and position.

use std::f64::consts::TAU;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ndarray::Array2;

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

    /// Computes the values at an instant, for the latitudes of rows and the longitudes of columns in
    /// degrees. Angles are computed once per row and column.
    pub(crate) fn on_grid(self, instant: Instant, lat: &[f64], lon: &[f64]) -> Array2<f64> {
        self.values(instant, lat, lon, (lat.len(), lon.len()), |(row, _)| row)
    }

    /// Computes the values at an instant for the latitude and the longitude, in degrees, of each cell
    /// of rows and columns of this shape, row by row.
    pub(crate) fn on_cells(
        self,
        instant: Instant,
        lat: &[f64],
        lon: &[f64],
        shape: (usize, usize),
    ) -> Array2<f64> {
        let row = self.values(instant, lat, lon, (1, lon.len()), |(_, cell)| cell);
        let rows = row.into_shape_with_order(shape);
        rows.expect("a position for each cell")
    }

    /// Computes the values of an array of this shape. `lat_of` maps a row and a column to the index
    /// of the latitude; the column is the index of the longitude.
    fn values(
        self,
        instant: Instant,
        lat: &[f64],
        lon: &[f64],
        shape: (usize, usize),
        lat_of: fn((usize, usize)) -> usize,
    ) -> Array2<f64> {
        let year = TAU * instant.day_of_year / DAYS;
        // Local solar time as an angle, from midnight on.
        let local = |lon: f64| lon + TAU * instant.hours / 24.0;
        let each = |degrees: &[f64], value: &dyn Fn(f64) -> f64| -> Vec<f64> {
            degrees
                .iter()
                .map(|degrees| value(degrees.to_radians()))
                .collect()
        };
        let by_row = |value: &dyn Fn(f64) -> f64| {
            let values = each(lat, value);
            Array2::from_shape_fn(shape, |place| values[lat_of(place)])
        };
        let by_column = |value: &dyn Fn(f64) -> f64| {
            let values = each(lon, value);
            Array2::from_shape_fn(shape, |(_, column)| values[column])
        };
        match self {
            Self::CosLatitude => by_row(&f64::cos),
            Self::SinLatitude => by_row(&f64::sin),
            Self::CosLongitude => by_column(&f64::cos),
            Self::SinLongitude => by_column(&f64::sin),
            Self::CosJulianDay => Array2::from_elem(shape, year.cos()),
            Self::SinJulianDay => Array2::from_elem(shape, year.sin()),
            Self::CosLocalTime => by_column(&|lon| local(lon).cos()),
            Self::SinLocalTime => by_column(&|lon| local(lon).sin()),
            Self::CosSolarZenithAngle => {
                let (declination, equation_of_time) = sun(year);
                let sines = each(lat, &|lat| lat.sin() * declination.sin());
                let cosines = each(lat, &|lat| lat.cos() * declination.cos());
                let hours = each(lon, &|lon| {
                    (local(lon) + equation_of_time - TAU / 2.0).cos()
                });
                Array2::from_shape_fn(shape, |(row, column)| {
                    let place = lat_of((row, column));
                    // Zero while the sun is below the horizon.
                    (sines[place] + cosines[place] * hours[column]).max(0.0)
                })
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
        let instant = Instant::of(seconds, Calendar::Gregorian);
        let forcing = Forcing::of(name).unwrap();
        forcing.on_grid(instant, &[lat], &[lon])[[0, 0]]
    }

    #[test]
    fn cells_have_the_latitude_of_their_row_and_the_longitude_of_their_column() {
        let (lat, lon) = ([50.0, -10.0], [0.0, 120.0, 240.0]);
        for (name, forcing) in Forcing::NAMES {
            let instant = Instant::of(1e6, Calendar::Gregorian);
            let field = forcing.on_grid(instant, &lat, &lon);
            for ((row, column), value) in field.indexed_iter() {
                assert_eq!(*value, at(name, 1e6, lat[row], lon[column]), "{name}");
            }
        }
    }

    #[test]
    fn years_of_other_calendars_are_whole_turns() {
        for (calendar, year) in [(Calendar::NoLeap, 365.0), (Calendar::Day360, 360.0)] {
            let at = |name: &str, days: f64| {
                let instant = Instant::of(days * 86_400.0, calendar);
                let forcing = Forcing::of(name).unwrap();
                forcing.on_grid(instant, &[0.0], &[0.0])[[0, 0]]
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
