//! Recognition of coordinates by the attributes `standard_name`, `axis` and `units` of the CF
//! conventions (CF 1.11, section 4), then by common names.

use super::variable::Variable;

/// Kind of a coordinate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    Time,
    Latitude,
    Longitude,
    Level,
    /// Initial time or lead time of forecasts.
    Forecast,
}

/// Names of the coordinates with the latitudes and the longitudes of the cells of a single row.
pub(crate) const CELLS: [&str; 2] = ["cell_latitude", "cell_longitude"];
/// Name of the coordinate with the areas of the cells of a single row.
pub(crate) const AREA: &str = "cell_area";

const LATITUDES: [&str; 6] = [
    "degrees_north",
    "degree_north",
    "degrees_n",
    "degree_n",
    "degreesn",
    "degreen",
];
const LONGITUDES: [&str; 6] = [
    "degrees_east",
    "degree_east",
    "degrees_e",
    "degree_e",
    "degreese",
    "degreee",
];
const PRESSURES: [&str; 7] = ["pa", "hpa", "mbar", "millibar", "millibars", "mb", "dbar"];
/// Units of forecast lead times. Excludes `s` and `sec`, which are units of wave periods.
const DURATIONS: [&str; 16] = [
    "days",
    "day",
    "d",
    "hours",
    "hour",
    "hrs",
    "hr",
    "h",
    "minutes",
    "minute",
    "mins",
    "min",
    "seconds",
    "milliseconds",
    "microseconds",
    "nanoseconds",
];

/// Returns the axis that a coordinate variable describes, if it is recognised.
pub(crate) fn axis_of(variable: &Variable) -> Option<Axis> {
    let lower = |attribute| variable.text(attribute).map(str::to_lowercase);
    let units = lower("units").unwrap_or_default();
    let in_degrees = units.is_empty() || units.starts_with("deg") || units.starts_with('°');
    let in_others =
        units.starts_with("rad") || ["m", "km", "metre", "meter"].contains(&units.as_str());
    if let Some(name) = lower("standard_name") {
        let level = [
            "air_pressure",
            "altitude",
            "height",
            "depth",
            "model_level_number",
        ];
        return match name.as_str() {
            "time" => Some(Axis::Time),
            "forecast_reference_time" | "forecast_period" => Some(Axis::Forecast),
            "latitude" if !in_others => Some(Axis::Latitude),
            "longitude" if !in_others => Some(Axis::Longitude),
            name if level.contains(&name) => Some(Axis::Level),
            name if name.starts_with("atmosphere_") || name.starts_with("ocean_") => {
                Some(Axis::Level)
            }
            _ if units.contains(" since ") => Some(Axis::Forecast),
            // Rotated and projected coordinates have names of their own.
            _ => None,
        };
    }
    match lower("axis").as_deref() {
        Some("t") => return Some(Axis::Time),
        Some("z") => return Some(Axis::Level),
        _ => {}
    }
    if LATITUDES.contains(&units.as_str()) {
        return Some(Axis::Latitude);
    }
    if LONGITUDES.contains(&units.as_str()) {
        return Some(Axis::Longitude);
    }
    if units.contains(" since ") {
        return Some(Axis::Time);
    }
    match variable.name.to_lowercase().as_str() {
        "lat" | "latitude" | "latitudes" | "nav_lat" if in_degrees => Some(Axis::Latitude),
        "lon" | "longitude" | "longitudes" | "nav_lon" if in_degrees => Some(Axis::Longitude),
        // Temperature is often called `t` too.
        "t" if variable.dims != [variable.name.as_str()] => None,
        name if is_time(name) => Some(Axis::Time),
        "level" | "levels" | "lev" | "plev" | "pressure" | "pressure_level" | "isobaricinhpa"
        | "height" | "depth" | "altitude" => Some(Axis::Level),
        name => {
            let is_level = PRESSURES.contains(&units.as_str()) || lower("positive").is_some();
            // Durations along other dims may be fields of one dim, such as the age of levels.
            let is_on_own_dim = variable.dims == [variable.name.as_str()];
            let is_named = ["lead", "step"].iter().any(|word| name.contains(word));
            let is_step = DURATIONS.contains(&units.as_str())
                && variable.dims.len() == 1
                && (is_on_own_dim || is_named);
            if is_level {
                Some(Axis::Level)
            } else {
                is_step.then_some(Axis::Forecast)
            }
        }
    }
}

/// Whether the name of a coordinate is a common name of the time.
pub(crate) fn is_time(name: &str) -> bool {
    let names = [
        "time",
        "times",
        "t",
        "valid_time",
        "timestamp",
        "time_index",
        "date",
        "dates",
        "datetime",
    ];
    names.contains(&name.to_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::cf::variable::{Attribute, Kind};

    fn axis(name: &str, attributes: &[(&str, &str)]) -> Option<Axis> {
        along(name, name, attributes)
    }

    /// Returns the axis of a variable along a dim.
    fn along(dim: &str, name: &str, attributes: &[(&str, &str)]) -> Option<Axis> {
        let text = |(name, value): &(&str, &str)| {
            ((*name).to_string(), Attribute::Text((*value).to_string()))
        };
        axis_of(&Variable {
            name: name.into(),
            dims: vec![dim.into()],
            shape: vec![3],
            kind: Kind::Double,
            dtype: "float64".into(),
            width: 8,
            attributes: attributes.iter().map(text).collect(),
            chunk: None,
        })
    }

    #[test]
    fn coordinates_are_recognised_by_attributes_then_by_name() {
        for (name, attributes, expected) in [
            (
                "FNOCX",
                &[("units", "degrees_east")][..],
                Some(Axis::Longitude),
            ),
            (
                "y",
                &[("standard_name", "latitude"), ("units", "degrees")],
                Some(Axis::Latitude),
            ),
            ("latitude", &[], Some(Axis::Latitude)),
            ("lat", &[("units", "m")], None),
            ("lat", &[("units", "degrees north")], Some(Axis::Latitude)),
            (
                "y",
                &[("standard_name", "latitude"), ("units", "radian")],
                None,
            ),
            ("x", &[("axis", "X"), ("units", "m")], None),
            (
                "lat",
                &[("standard_name", "grid_latitude"), ("units", "degrees")],
                None,
            ),
            (
                "TIME",
                &[("units", "hour since 1980-01-14 14:00:00")],
                Some(Axis::Time),
            ),
            ("time_index", &[], Some(Axis::Time)),
            (
                "init",
                &[("standard_name", "forecast_reference_time")],
                Some(Axis::Forecast),
            ),
            (
                "prediction_timedelta",
                &[("units", "hours")],
                Some(Axis::Forecast),
            ),
            ("time", &[("units", "hours")], Some(Axis::Time)),
            ("wave_period", &[("units", "s")], None),
            (
                "ZAXLEVITR",
                &[("positive", "down"), ("units", "METERS")],
                Some(Axis::Level),
            ),
            ("isobaric", &[("units", "hPa")], Some(Axis::Level)),
            ("member", &[], None),
        ] {
            assert_eq!(axis(name, attributes), expected, "{name} {attributes:?}");
        }
    }

    #[test]
    fn durations_along_another_dim_are_steps_by_name_only() {
        let days = [("units", "days")];
        assert_eq!(along("lev", "age", &days), None);
        assert_eq!(along("index", "lead_time", &days), Some(Axis::Forecast));
        assert_eq!(axis("age", &days), Some(Axis::Forecast));
    }
}
