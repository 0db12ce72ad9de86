//! The coordinates of a container, and what its dims mean by them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use super::axis::{Axis, axis_of, is_time};
use super::variable::{Container, Kind, Variable, VariableAttributes, error_at};
use crate::packing::Packing;
use crate::{Calendar, Error, Result, time_units, times};

/// The largest difference of coordinates that are the same, in degrees.
const NOMINAL: f64 = 0.01;
/// Largest number of values of a coordinate.
const MAX_VALUES: usize = 1 << 24;

/// The meaning of a dim of a channel's variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// A dim of one index, which is left out.
    Single,
    Time,
    Level,
    Row,
    Column,
}

/// Whether a coordinate counts when forecasts begin, or how far they reach.
fn is_of_forecast(coordinate: &Variable) -> bool {
    let name = coordinate.text("standard_name");
    let names = ["forecast_reference_time", "forecast_period"];
    axis_of(coordinate).is_none()
        && (name.is_some_and(|name| names.contains(&name))
            || coordinate
                .text("units")
                .is_some_and(|units| units.contains(" since ")))
}

/// The error of a coordinate of times that holds no numbers.
pub(super) fn refused_time(path: &Path, name: &str, found: String) -> Error {
    let expected = "numbers with units such as \"hours since 1970-01-01\", as xarray writes times by to_zarr and \
                    to_netcdf";
    Error::shape(path, name, found, expected)
}

/// The coordinates of a container.
pub(super) struct Coordinates<'a> {
    pub(super) container: &'a dyn Container,
    /// Results of [`curved`](Self::curved), by the dims of rows and columns.
    curved: RefCell<BTreeMap<[String; 2], Option<String>>>,
}

impl<'a> Coordinates<'a> {
    pub(super) fn of(container: &'a dyn Container) -> Self {
        Self {
            container,
            curved: RefCell::default(),
        }
    }

    /// The coordinate of a dim: the variable of its name, else one that lies on it and that is
    /// recognised.
    pub(super) fn find(&self, dim: &str) -> Option<&'a Variable> {
        let on_dim = |variable: &&Variable| {
            !dim.is_empty() && variable.dims == [dim] && variable.kind != Kind::Other
        };
        let variables = self.container.variables();
        let own = variables
            .iter()
            .filter(on_dim)
            .find(|variable| variable.name == dim);
        let other = |is: &dyn Fn(Option<Axis>) -> bool| {
            let mut others = variables.iter().filter(on_dim);
            others.find(|variable| is(axis_of(variable)))
        };
        match own {
            None => other(&|axis| axis.is_some()),
            Some(own) if axis_of(own).is_some() => Some(own),
            // Beside the beginning of a forecast, or its steps, there may be the time itself.
            Some(own) => other(&|axis| axis == Some(Axis::Time)).or(Some(own)),
        }
    }

    /// Why 1-D coordinates of rows and columns are not those of its cells, if 2-D ones beside them say so: nominal ones of a
    /// curvilinear grid, such as a tripolar one.
    fn curved(&self, row: &str, column: &str) -> Option<String> {
        let key = [row, column].map(String::from);
        if let Some(found) = self.curved.borrow().get(&key) {
            return found.clone();
        }
        let mut found = None;
        for variable in self.container.variables() {
            let axis = axis_of(variable);
            let along = match axis {
                Some(Axis::Latitude) => 0,
                Some(Axis::Longitude) => 1,
                _ => continue,
            };
            let places = [row, column].map(|dim| variable.dims.iter().position(|own| own == dim));
            let ([Some(rows), Some(columns)], 2) = (places, variable.dims.len()) else {
                continue;
            };
            if variable.kind == Kind::Other {
                continue;
            }
            let line = self.find([row, column][along]);
            // What cannot be read, or is too large, tells nothing.
            let line = line.and_then(|line| self.values(line).ok());
            let (Some(line), Ok(all)) = (line, self.values(variable)) else {
                continue;
            };
            let extents = [variable.shape[rows], variable.shape[columns]];
            if line.len() != extents[along] {
                continue;
            }
            let cell = |index: usize| match rows < columns {
                true => [index / extents[1], index % extents[1]],
                false => [index % extents[0], index / extents[0]],
            };
            let is_other = |(index, value): (usize, &f64)| {
                let difference = (value - line[cell(index)[along]]).abs();
                let turn = if along == 1 {
                    difference % 360.0
                } else {
                    difference
                };
                turn.min(360.0 - turn) > NOMINAL
            };
            if all.iter().enumerate().any(is_other) {
                found = Some(format!(
                    "on a curvilinear grid, whose {} are {}; interpolate it to latitudes and longitudes first",
                    ["latitudes", "longitudes"][along],
                    variable.name
                ));
                break;
            }
        }
        self.curved.borrow_mut().insert(key, found.clone());
        found
    }

    /// The roles of the dims of a variable, or the reason why it is no field.
    pub(super) fn roles(&self, variable: &Variable) -> Result<Result<Vec<Role>, String>> {
        if variable.kind == Kind::Other {
            return Ok(Err("not of numbers".into()));
        }
        let mut roles = Vec::new();
        for (dim, &extent) in variable.dims.iter().zip(&variable.shape) {
            let coordinate = self.find(dim);
            let axis = coordinate.and_then(axis_of);
            if let Some(coordinate) = coordinate
                && axis.is_some()
                && coordinate.shape != [extent]
            {
                let found = format!("{:?} with dims {:?}", variable.shape, variable.dims);
                let expected = format!("{:?} values of {dim}", coordinate.shape);
                return Err(Error::shape(
                    self.container.path(),
                    &variable.name,
                    found,
                    expected,
                ));
            }
            roles.push(match axis {
                Some(Axis::Time) => Role::Time,
                Some(Axis::Latitude) => Role::Row,
                Some(Axis::Longitude) => Role::Column,
                Some(Axis::Level) => Role::Level,
                None if extent == 1 => Role::Single,
                None => Role::Level,
            });
        }
        let count = |role| roles.iter().filter(|this| **this == role).count();
        if (count(Role::Row), count(Role::Column)) != (1, 1) {
            return Ok(Err(format!("dims {:?}", variable.dims)));
        }
        for dim in &variable.dims {
            self.check_time(dim)?;
        }
        let place = |role| roles.iter().position(|this| *this == role);
        if let (Some(row), Some(column)) = (place(Role::Row), place(Role::Column))
            && let Some(reason) = self.curved(&variable.dims[row], &variable.dims[column])
        {
            return Ok(Err(reason));
        }
        // The steps of a forecast, or the beginnings of several, are no levels.
        let of_forecast = |dim: &&String| self.find(dim).is_some_and(is_of_forecast);
        let dims = variable.dims.iter().zip(&variable.shape);
        let mut several = dims.filter(|(_, extent)| **extent > 1).map(|(dim, _)| dim);
        if count(Role::Time) == 0
            && let Some(dim) = several.find(of_forecast)
        {
            return Ok(Err(format!(
                "{dim} is the beginning or the step of forecasts, and no coordinate has the times of its fields"
            )));
        }
        if count(Role::Time) > 1 || count(Role::Level) > 1 {
            return Ok(Err(format!(
                "more than one level or time in dims {:?}",
                variable.dims
            )));
        }
        Ok(Ok(roles))
    }

    /// Refuses a dim whose coordinate is a time by its name or attributes, and holds no numbers: it is not a level.
    fn check_time(&self, dim: &str) -> Result<()> {
        if self.find(dim).is_some() {
            return Ok(());
        }
        let mut variables = self.container.variables().iter();
        let time = variables
            .find(|variable| variable.dims == [dim] && axis_of(variable) == Some(Axis::Time));
        if let Some(time) = time {
            let found = format!("times of the type {}", time.dtype);
            return Err(refused_time(self.container.path(), &time.name, found));
        }
        let mut unreadable = self.container.unreadable().iter();
        match unreadable.find(|(name, _)| name == dim && is_time(name)) {
            Some((name, cause)) => Err(refused_time(self.container.path(), name, cause.clone())),
            None => Ok(()),
        }
    }

    /// The values of a coordinate, unpacked.
    pub(super) fn values(&self, variable: &Variable) -> Result<Vec<f64>> {
        let (path, name) = (self.container.path(), &variable.name);
        let cells: Vec<_> = variable.shape.iter().map(|&extent| 0..extent).collect();
        let count = variable.shape.iter().product::<usize>();
        if count > MAX_VALUES {
            let expected = format!("at most {MAX_VALUES} values of a coordinate");
            return Err(Error::shape(
                path,
                name,
                format!("{:?}", variable.shape),
                expected,
            ));
        }
        let packing = Packing::of(&VariableAttributes(path, variable), false)?;
        let mut variables = self.container.variables().iter();
        let index = variables.position(|other| std::ptr::eq(other, variable));
        let numbers = self
            .container
            .double(index.expect("it is of this container"), &cells);
        let numbers = numbers.map_err(|cause| error_at(self.container, name, &cells, &cause))?;
        Ok(numbers
            .into_iter()
            .map(|number| packing.value(number))
            .collect())
    }

    /// The name, calendar and values of the time axis, in seconds since 1970-01-01. Without a time
    /// axis, the one time is that of a scalar coordinate, else zero.
    pub(super) fn times(
        &self,
        dim: Option<&str>,
        units: Option<&str>,
    ) -> Result<(String, Calendar, Vec<f64>)> {
        let scalar = |variable: &&Variable| {
            variable.dims.is_empty()
                && variable.kind != Kind::Other
                && axis_of(variable) == Some(Axis::Time)
        };
        let variable = match dim {
            Some(dim) => self.find(dim),
            None => self.container.variables().iter().find(scalar),
        };
        let Some(variable) = variable else {
            return Ok(("time".into(), Calendar::Gregorian, vec![0.0]));
        };
        let path: &Path = self.container.path();
        let attributes = VariableAttributes(path, variable);
        let numbers = self.values(variable)?;
        let (calendar, seconds) = time_units::seconds(&attributes, units, numbers)?;
        times::check_rising(path, &variable.name, &seconds)?;
        Ok((variable.name.clone(), calendar, seconds))
    }

    /// The names of the levels along a dim: its coordinate, else numbers from zero.
    pub(super) fn labels(&self, dim: &str, extent: usize) -> Result<Vec<String>> {
        let coordinate = self.find(dim).filter(|variable| variable.shape == [extent]);
        if let Some(variable) = coordinate {
            let single = variable.kind == Kind::Single;
            let label = |&value: &f64| match single {
                true => (value as f32).to_string(),
                false => value.to_string(),
            };
            let mut labels: Vec<String> = self.values(variable)?.iter().map(label).collect();
            let in_order = labels.clone();
            labels.sort();
            labels.dedup();
            if labels.len() == extent {
                return Ok(in_order);
            }
        }
        if extent > MAX_VALUES {
            let expected = format!("at most {MAX_VALUES} levels");
            return Err(Error::shape(
                self.container.path(),
                dim,
                extent.to_string(),
                expected,
            ));
        }
        Ok((0..extent).map(|index| index.to_string()).collect())
    }
}
