//! The fields of a container: which variables are channels, on which grid and time axis.

use std::path::Path;

use super::axis::{Axis, axis_of, is_time};
use super::variable::{Container, Kind, Variable, VariableAttributes, error_at};
use crate::fields::in_file;
use crate::packing::Packing;
use crate::{Calendar, Error, Grid, Result, time_units, times};

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

/// A variable on a grid.
#[derive(Debug)]
pub(crate) struct Field {
    /// Index of the variable in its container.
    pub(crate) variable: usize,
    /// The role of every dim.
    pub(crate) roles: Vec<Role>,
    pub(crate) packing: Packing,
    /// Units of the coordinate of levels.
    pub(crate) level_units: Option<String>,
}

/// A channel: a field, or one level of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Channel {
    pub(crate) field: usize,
    pub(crate) level: usize,
}

/// The channels of a container, and their coordinates.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) grid: Grid,
    pub(crate) times: Vec<f64>,
    pub(crate) calendar: Calendar,
    /// The name of the time axis.
    pub(crate) time: String,
    /// Whether fields have a dim of times.
    pub(crate) has_times: bool,
    pub(crate) fields: Vec<Field>,
    pub(crate) channels: Vec<Channel>,
    pub(crate) names: Vec<String>,
    /// The variables that are no channels, with the reason.
    pub(crate) left_out: Vec<String>,
}

impl Plan {
    /// Finds the fields of a container; of `chosen` channels only, if they are given.
    ///
    /// # Errors
    /// No fields on a latitude-longitude grid; coordinates that are no grid or no times; dims whose
    /// length is not that of their coordinate; a member that cannot be read, unless channels are
    /// chosen from others.
    pub(crate) fn of(
        container: &dyn Container,
        chosen: Option<&[String]>,
        units: Option<&str>,
    ) -> Result<Self> {
        let coordinates = Coordinates(container);
        let path = container.path();
        let is_chosen = |name: &str| {
            chosen.is_none_or(|chosen| {
                let is_name = |channel: &String| channel == name || base(channel) == name;
                chosen.iter().any(is_name)
            })
        };
        let mut unreadable = container.unreadable().iter();
        if let Some((name, cause)) = unreadable.find(|(name, _)| is_chosen(name)) {
            if is_time(name) {
                return Err(refused_time(path, name, cause.clone()));
            }
            let cause = format!("{cause}; choose channels by name to leave it out");
            return Err(Error::data(path, name, cause));
        }
        let mut left_out = Vec::new();
        let mut candidates = Vec::new();
        for (index, variable) in container.variables().iter().enumerate() {
            if is_chosen(&variable.name) {
                match coordinates.roles(variable)? {
                    Ok(roles) => candidates.push((index, roles)),
                    Err(reason) => left_out.push((index, reason)),
                }
            }
        }
        let variable = |index: usize| &container.variables()[index];
        if let Some(chosen) = chosen
            && candidates.is_empty()
            && left_out.is_empty()
        {
            let names = container.variables().iter();
            let names: Vec<&str> = names.map(|variable| variable.name.as_str()).collect();
            let found = format!("none of {}", chosen.join(", "));
            let expected = format!("some of its variables {}", names.join(", "));
            return Err(Error::shape(path, "/", found, expected));
        }
        let named = |left_out: &[(usize, String)]| -> Vec<String> {
            let text =
                |(index, reason): &(usize, String)| format!("{} ({reason})", variable(*index).name);
            left_out.iter().map(text).collect()
        };
        let dim = |(index, roles): &(usize, Vec<Role>), role: Role| {
            let dim = roles.iter().position(|this| *this == role)?;
            Some(variable(*index).dims[dim].as_str())
        };
        let timed = candidates
            .iter()
            .find(|field| dim(field, Role::Time).is_some());
        let Some(main) = timed.or(candidates.first()).cloned() else {
            let names = named(&left_out).join(", ");
            let expected = "variables on the dims of a latitude and a longitude, which have \
                            coordinates with units of degrees_north and degrees_east, or their names; fields \
                            on curvilinear or rotated grids must be interpolated to such a grid first";
            return Err(Error::shape(
                path,
                "/",
                format!("no field among [{names}]"),
                expected,
            ));
        };
        let shares = |field: &(usize, Vec<Role>), role: Role| dim(field, role) == dim(&main, role);
        let fits = |field: &(usize, Vec<Role>)| {
            let time = dim(field, Role::Time).is_none() || shares(field, Role::Time);
            time && shares(field, Role::Row) && shares(field, Role::Column)
        };
        if chosen.is_some()
            && let Some(other) = candidates.iter().find(|field| !fits(field))
        {
            let [other, first] = [other.0, main.0].map(variable);
            let found = format!("dims {:?}", other.dims);
            let expected = format!("the grid and time axis of {}: {:?}", first.name, first.dims);
            return Err(Error::shape(path, &other.name, found, expected));
        }
        let others = candidates.iter().filter(|field| !fits(field));
        let others = others.map(|(index, _)| {
            let other = variable(*index);
            (
                *index,
                format!("another grid or time axis: dims {:?}", other.dims),
            )
        });
        left_out.extend(others.collect::<Vec<_>>());
        candidates.retain(fits);
        // Coordinates are no fields, and nobody expects it.
        left_out.retain(|(index, _)| axis_of(variable(*index)).is_none());
        let values = |role| {
            let dim = dim(&main, role).expect("a field has rows and columns");
            coordinates.values(coordinates.find(dim).expect("it gave the dim its role"))
        };
        let grid = Grid::new(values(Role::Row)?, values(Role::Column)?)
            .map_err(|error| in_file(path, error))?;
        let time = dim(&main, Role::Time);
        let has_times = time.is_some();
        let (time, calendar, times) = coordinates.times(time, units)?;
        let mut plan = Self {
            grid,
            times,
            calendar,
            time,
            has_times,
            fields: Vec::new(),
            channels: Vec::new(),
            names: Vec::new(),
            left_out: named(&left_out),
        };
        for (index, roles) in candidates {
            plan.add(&coordinates, index, roles)?;
        }
        Ok(plan)
    }

    /// Adds the channels of a variable.
    fn add(&mut self, coordinates: &Coordinates<'_>, index: usize, roles: Vec<Role>) -> Result<()> {
        let container = coordinates.0;
        let variable = &container.variables()[index];
        let level = roles.iter().position(|role| *role == Role::Level);
        let labels = level.map(|dim| coordinates.labels(&variable.dims[dim], variable.shape[dim]));
        let labels = labels.transpose()?;
        let level_units = level.and_then(|dim| {
            let coordinate = coordinates.find(&variable.dims[dim])?;
            coordinate.text("units").map(String::from)
        });
        for level in 0..labels.as_ref().map_or(1, Vec::len) {
            let suffix = labels.as_ref().map(|labels| format!("@{}", labels[level]));
            self.names
                .push(variable.name.clone() + &suffix.unwrap_or_default());
            let field = self.fields.len();
            self.channels.push(Channel { field, level });
        }
        let attributes = VariableAttributes(container.path(), variable);
        self.fields.push(Field {
            variable: index,
            roles,
            packing: Packing::of(&attributes, variable.kind == Kind::Single)?,
            level_units,
        });
        Ok(())
    }
}

/// The name of the variable of a channel: without its level.
pub(crate) fn base(channel: &str) -> &str {
    channel.rsplit_once('@').map_or(channel, |(name, _)| name)
}

/// The error of a coordinate of times that holds no numbers.
fn refused_time(path: &Path, name: &str, found: String) -> Error {
    let expected = "numbers with units such as \"hours since 1970-01-01\", as xarray writes times by to_zarr and \
                    to_netcdf";
    Error::shape(path, name, found, expected)
}

/// The coordinates of a container.
struct Coordinates<'a>(&'a dyn Container);

impl<'a> Coordinates<'a> {
    /// The coordinate of a dim: the variable of its name, else one that lies on it and that is
    /// recognised.
    fn find(&self, dim: &str) -> Option<&'a Variable> {
        let on_dim = |variable: &&Variable| {
            !dim.is_empty() && variable.dims == [dim] && variable.kind != Kind::Other
        };
        let variables = self.0.variables();
        let own = variables
            .iter()
            .filter(on_dim)
            .find(|variable| variable.name == dim);
        own.or_else(|| {
            let mut others = variables.iter().filter(on_dim);
            others.find(|variable| axis_of(variable).is_some())
        })
    }

    /// The roles of the dims of a variable, or the reason why it is no field.
    fn roles(&self, variable: &Variable) -> Result<Result<Vec<Role>, String>> {
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
                return Err(Error::shape(self.0.path(), &variable.name, found, expected));
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
        let mut variables = self.0.variables().iter();
        let time = variables
            .find(|variable| variable.dims == [dim] && axis_of(variable) == Some(Axis::Time));
        if let Some(time) = time {
            let found = format!("times of the type {}", time.dtype);
            return Err(refused_time(self.0.path(), &time.name, found));
        }
        let mut unreadable = self.0.unreadable().iter();
        match unreadable.find(|(name, _)| name == dim && is_time(name)) {
            Some((name, cause)) => Err(refused_time(self.0.path(), name, cause.clone())),
            None => Ok(()),
        }
    }

    /// The values of a coordinate, unpacked.
    fn values(&self, variable: &Variable) -> Result<Vec<f64>> {
        let (path, name) = (self.0.path(), &variable.name);
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
        let mut variables = self.0.variables().iter();
        let index = variables.position(|other| std::ptr::eq(other, variable));
        let numbers = self
            .0
            .double(index.expect("it is of this container"), &cells);
        let numbers = numbers.map_err(|cause| error_at(self.0, name, &cells, &cause))?;
        Ok(numbers
            .into_iter()
            .map(|number| packing.value(number))
            .collect())
    }

    /// The name, calendar and values of the time axis, in seconds since 1970-01-01. Without a time
    /// axis, the one time is that of a scalar coordinate, else zero.
    fn times(
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
            None => self.0.variables().iter().find(scalar),
        };
        let Some(variable) = variable else {
            return Ok(("time".into(), Calendar::Gregorian, vec![0.0]));
        };
        let path: &Path = self.0.path();
        let attributes = VariableAttributes(path, variable);
        let numbers = self.values(variable)?;
        let (calendar, seconds) = time_units::seconds(&attributes, units, numbers)?;
        times::check_rising(path, &variable.name, &seconds)?;
        Ok((variable.name.clone(), calendar, seconds))
    }

    /// The names of the levels along a dim: its coordinate, else numbers from zero.
    fn labels(&self, dim: &str, extent: usize) -> Result<Vec<String>> {
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
                self.0.path(),
                dim,
                extent.to_string(),
                expected,
            ));
        }
        Ok((0..extent).map(|index| index.to_string()).collect())
    }
}
