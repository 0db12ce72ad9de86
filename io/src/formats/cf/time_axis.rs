//! Time coordinates: their selection among the variables of a container, and their values.

use std::path::Path;

use super::axis::{Axis, axis_of, is_time};
use super::variable::Variable;
use crate::{Calendar, Error};

/// Name, calendar and values of a time axis.
pub(super) type Times = (String, Calendar, Vec<f64>);

/// Time axis of fields without a time: a single time, zero.
pub(super) fn undated() -> Times {
    ("time".into(), Calendar::Gregorian, vec![0.0])
}

/// Selects the time coordinate among variables: one with a standard name, else one with a common
/// name and a reference date, else any other. Ties go to the variable named like the dim, then to
/// the first one.
pub(super) fn time_among<'a>(
    variables: impl Iterator<Item = &'a Variable>,
    dim: &str,
) -> Option<&'a Variable> {
    let times = variables.filter(|variable| axis_of(variable) == Some(Axis::Time));
    times.min_by_key(|variable| {
        let rank = match variable.text("standard_name") {
            Some(_) => 0,
            None if is_time(&variable.name) && has_reference(variable) => 1,
            None => 2,
        };
        (rank, variable.name != dim)
    })
}

/// Whether the units of a variable have a reference date, as in `hours since 1970-01-01`.
pub(super) fn has_reference(variable: &Variable) -> bool {
    let units = variable.text("units");
    units.is_some_and(|units| units.contains(" since "))
}

/// Error for a dim of times whose coordinate holds neither numbers nor texts of dates.
pub(super) fn refused_time(path: &Path, name: &str, found: String) -> Error {
    let expected = "numbers with units such as \"hours since 1970-01-01\", as xarray writes times by to_zarr and \
                    to_netcdf, or texts of dates such as 2020-01-01T06:00";
    Error::shape(path, name, found, expected)
}
