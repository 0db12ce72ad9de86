//! Coordinates of a container, and the roles that they give its dims.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::axis::{Axis, axis_of, is_time};
use super::planes::{lines, planes_of};
use super::time_axis::{Times, has_reference, refused_time, time_among};
use super::unstructured::{healpix_dim, is_area, place_of, positions, unplaced};
use super::variable::{Container, Kind, Variable, VariableAttributes, error_at};
use crate::formats::packing::Packing;
use crate::time::{times, units};
use crate::{Error, LeftOutReason, Result};

/// Largest number of values in a coordinate.
pub(super) const MAX_VALUES: usize = 1 << 24;

/// Role of a dim of a channel's variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// A dim of length one, which is dropped.
    Single,
    Time,
    Level,
    Row,
    /// Columns, or cells that form no rows and columns.
    Column,
}

/// Coordinates of a container.
pub(super) struct Coordinates<'a> {
    pub(super) container: &'a dyn Container,
    /// Units of times that replace those in the container.
    units: Option<&'a str>,
    /// Cached results of [`curved`](Self::curved), keyed by the dims of rows and columns.
    pub(super) curved: RefCell<BTreeMap<[String; 2], Option<String>>>,
    /// Latitudes and longitudes in two or more dims.
    pub(super) planes: Vec<(&'a Variable, Axis)>,
}

impl<'a> Coordinates<'a> {
    pub(super) fn of(container: &'a dyn Container, units: Option<&'a str>) -> Self {
        Self {
            container,
            units,
            curved: RefCell::default(),
            planes: planes_of(container),
        }
    }

    /// Finds the coordinate of a dim: the variable of the same name, else a recognised variable
    /// along the dim.
    pub(super) fn find(&self, dim: &str) -> Option<&'a Variable> {
        let on_dim = |variable: &&Variable| variable.kind != Kind::Other && variable.lies_on(dim);
        let variables = self.container.variables();
        let first = |is: &dyn Fn(&Variable) -> bool| {
            let mut along = variables.iter().filter(on_dim);
            along.find(|variable| is(variable))
        };
        let own = first(&|variable| variable.name == dim);
        let axis = own.and_then(axis_of);
        if matches!(axis, Some(Axis::Latitude | Axis::Longitude | Axis::Level)) {
            return own;
        }
        // The valid time may share the dim with the initial times or the lead times of forecasts.
        let time = time_among(variables.iter().filter(on_dim), dim);
        if time.is_some() || axis.is_some() {
            return time.or(own);
        }
        let is_index = |own: &Variable| {
            own.text("units")
                .is_none_or(|units| ["", "1"].contains(&units))
        };
        match own {
            // Degrees may share the dim with indices.
            Some(own) if is_index(own) => {
                let is_place = |axis: Axis| matches!(axis, Axis::Latitude | Axis::Longitude);
                first(&|variable| axis_of(variable).is_some_and(is_place)).or(Some(own))
            }
            Some(own) => Some(own),
            None => {
                let is_other = |axis: Axis| axis != Axis::Forecast;
                first(&|variable| axis_of(variable).is_some_and(is_other))
                    .or_else(|| first(&|variable| axis_of(variable).is_some()))
            }
        }
    }

    /// Finds the dim of a variable along which cells lie that form no rows and columns.
    fn cells<'v>(&self, variable: &'v Variable) -> Result<Option<&'v str>> {
        let dims = variable.dims.iter().map(String::as_str);
        let dims: Vec<&str> = dims.filter(|dim| !self.is_track(dim)).collect();
        let mut placed = dims.iter().copied();
        match placed.find(|dim| positions(self.container, dim).is_some()) {
            Some(dim) => Ok(Some(dim)),
            None => healpix_dim(self.container, variable, &dims),
        }
    }

    /// Whether positions along a dim are those of a track or a profile, because it has times, which
    /// may not be numbers, or levels.
    pub(super) fn is_track(&self, dim: &str) -> bool {
        let coordinate = self.find(dim);
        let is_own = coordinate.is_some_and(|coordinate| coordinate.name == dim);
        let is_unread_time = |variable: &Variable| {
            variable.kind == Kind::Other
                && variable.dims.iter().any(|own| own == dim)
                && axis_of(variable) == Some(Axis::Time)
        };
        match coordinate.and_then(axis_of) {
            Some(Axis::Time | Axis::Forecast) => true,
            Some(Axis::Level) if is_own => true,
            _ => self.container.variables().iter().any(is_unread_time),
        }
    }

    /// Returns the roles of the dims of a variable, or the reason why it is not a field.
    pub(super) fn roles(&self, variable: &Variable) -> Result<Result<Vec<Role>, LeftOutReason>> {
        let left_out = |reason: String| Ok(Err(LeftOutReason::Other(reason)));
        if variable.kind == Kind::Other {
            return left_out("not of numbers".into());
        }
        // A coordinate, such as the numbers of cells.
        if variable.dims == [variable.name.as_str()] {
            return left_out(format!("dims {:?}", variable.dims));
        }
        let found: Vec<_> = variable.dims.iter().map(|dim| self.find(dim)).collect();
        let has = |axis: Axis| {
            let mut found = found.iter().copied().flatten();
            found.any(|coordinate| axis_of(coordinate) == Some(axis))
        };
        let cells = if has(Axis::Latitude) && has(Axis::Longitude) {
            None
        } else {
            self.cells(variable)?
        };
        // Dims of rows and columns without coordinates in degrees of their own.
        let placed = match cells {
            None => self.placed_lines(variable),
            Some(_) => None,
        };
        let mut roles = Vec::new();
        for ((dim, &extent), found) in variable.dims.iter().zip(&variable.shape).zip(found) {
            let is_cells = cells == Some(dim.as_str());
            let coordinate = if is_cells {
                positions(self.container, dim).map(|[lat, _]| lat)
            } else {
                found
            };
            let axis = coordinate.and_then(axis_of);
            if let Some(coordinate) = coordinate
                && (is_cells || axis.is_some())
                && coordinate.shape.iter().product::<usize>() != extent
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
            let line = placed.and_then(|dims| dims.iter().position(|own| own == dim));
            roles.push(match axis {
                _ if is_cells || line == Some(1) => Role::Column,
                _ if line == Some(0) => Role::Row,
                Some(Axis::Time) => Role::Time,
                Some(Axis::Latitude) => Role::Row,
                Some(Axis::Longitude) => Role::Column,
                Some(Axis::Level) => Role::Level,
                Some(Axis::Forecast) | None if extent == 1 => Role::Single,
                Some(Axis::Forecast) | None => Role::Level,
            });
        }
        let count = |role| roles.iter().filter(|this| **this == role).count();
        let rows = usize::from(cells.is_none());
        if (count(Role::Row), count(Role::Column)) != (rows, 1) {
            let reason = unplaced(self.container, variable);
            return left_out(reason.unwrap_or_else(|| format!("dims {:?}", variable.dims)));
        }
        for (dim, &extent) in variable.dims.iter().zip(&variable.shape) {
            self.check_time(dim)?;
            if extent > 1 && is_time(dim) && self.find(dim).is_none() {
                return Ok(Err(LeftOutReason::NoTimes(format!(
                    "{dim}: no time coordinate along this dim"
                ))));
            }
        }
        let place = |role| roles.iter().position(|this| *this == role);
        if placed.is_none()
            && let (Some(row), Some(column)) = (place(Role::Row), place(Role::Column))
            && let Some(reason) = self.curved(&variable.dims[row], &variable.dims[column])
        {
            return left_out(reason);
        }
        // Lead times or initial times of forecasts are not levels, and a single one is not a valid
        // time.
        let is_timed = count(Role::Time) > 0 || self.single_time().is_some();
        let is_untimed = |(dim, extent): &(&String, &usize)| {
            let axis = self.find(dim).and_then(axis_of);
            axis == Some(Axis::Forecast) && (**extent != 1 || !is_timed)
        };
        let mut dims = variable.dims.iter().zip(&variable.shape);
        if let Some((dim, _)) = dims.find(is_untimed) {
            return left_out(format!(
                "{dim} is the beginning or the step of forecasts, and no coordinate has the times of its fields; in \
                 xarray, select one beginning or one step, and add the times by assign_coords(valid_time=…) and \
                 swap_dims({dim}=\"valid_time\")"
            ));
        }
        if count(Role::Time) > 1 || count(Role::Level) > 1 {
            return left_out(format!(
                "more than one level or time in dims {:?}",
                variable.dims
            ));
        }
        Ok(Ok(roles))
    }

    /// Finds the dims of rows and columns of a variable on a curvilinear grid.
    fn placed_lines(&self, variable: &Variable) -> Option<[&'a str; 2]> {
        match self.plane_positions(variable) {
            Some([lat, _]) => Some(lines(lat).0),
            None => Some(self.projected(variable)?.lines.map(|line| &*line.dims[0])),
        }
    }

    /// Refuses a dim whose coordinate is a time by name or attributes but holds neither numbers nor
    /// dates, or may be any of several, since such a dim must not be taken for levels.
    fn check_time(&self, dim: &str) -> Result<()> {
        let coordinate = self.find(dim);
        let undecided = self.container.undecided_times(dim);
        if !undecided.is_empty() && coordinate.and_then(axis_of).is_none() {
            let names = undecided.join(", ");
            let found = format!("texts of dates along {dim} in each of {names}");
            let expected =
                "one variable with the name time, Times or xtime, or the standard_name time";
            return Err(Error::shape(self.container.path(), dim, found, expected));
        }
        if coordinate.is_some() {
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
            Some((_, cause)) => Err(refused_time(self.container.path(), dim, cause.clone())),
            None => Ok(()),
        }
    }

    /// Reads and unpacks the values of a coordinate.
    pub(super) fn values(&self, variable: &Variable) -> Result<Vec<f64>> {
        let whole = variable.shape.iter().map(|&extent| 0..extent);
        self.values_in(variable, whole.collect())
    }

    /// Reads and unpacks a box of a coordinate.
    pub(super) fn values_in(
        &self,
        variable: &Variable,
        cells: Vec<Range<usize>>,
    ) -> Result<Vec<f64>> {
        let (path, name) = (self.container.path(), &variable.name);
        let count = cells.iter().map(ExactSizeIterator::len).product::<usize>();
        if count > MAX_VALUES {
            let expected = format!("at most {MAX_VALUES} values of a coordinate");
            return Err(Error::shape(
                path,
                name,
                format!("{:?}", variable.shape),
                expected,
            ));
        }
        let packing = Packing::of(&VariableAttributes(path, variable), variable.number_type())?;
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

    /// Returns the reason why a variable on the grid is a coordinate, if it is one: it has the
    /// latitudes, the longitudes or the areas of the cells, or the numbers of a mesh, or the
    /// attributes `coordinates`, `bounds` or `cell_measures` of another variable name it (CF 1.11,
    /// sections 5 and 7).
    pub(super) fn auxiliary(&self, variable: &Variable) -> Option<LeftOutReason> {
        let coordinate = |text: String| {
            Some(LeftOutReason::Coordinate(format!(
                "{text}; choose it by name to read it"
            )))
        };
        if place_of(variable).is_some() {
            return coordinate("latitudes or longitudes of the cells".into());
        }
        if is_area(variable) {
            return coordinate("areas of the cells".into());
        }
        if let Some(role) = variable.text("cf_role") {
            return coordinate(format!("a {role}"));
        }
        let names_it = |other: &&Variable| {
            let lists = ["coordinates", "bounds", "cell_measures"].into_iter();
            let mut listed = lists
                .filter_map(|attribute| other.text(attribute))
                .flat_map(str::split_whitespace);
            other.name != variable.name && listed.any(|name| name == variable.name)
        };
        let other = self.container.variables().iter().find(names_it)?;
        coordinate(format!("a coordinate of {}", other.name))
    }

    /// Finds a time coordinate with a single value. A `date` without units is not one: it holds
    /// digits such as 20180101.
    pub(super) fn single_time(&self) -> Option<&'a Variable> {
        let is_single = |variable: &&Variable| {
            let has_units = self.units.is_some() || variable.text("units").is_some();
            variable.kind != Kind::Other
                && variable.shape.iter().all(|extent| *extent == 1)
                && (has_units || !variable.name.to_lowercase().starts_with("date"))
        };
        time_among(self.container.variables().iter().filter(is_single), "")
    }

    /// Reads name, calendar and values of the time axis, in seconds since 1970-01-01. Without a
    /// time axis, there is one time, that of a coordinate with a single value, or none.
    ///
    /// # Errors
    /// Times that cannot be parsed or do not increase; the initial time of a forecast without a
    /// valid time.
    pub(super) fn times(&self, dim: Option<&str>) -> Result<Option<Times>> {
        let variable = match dim {
            Some(dim) => self.find(dim),
            None => self.single_time(),
        };
        let path: &Path = self.container.path();
        let Some(variable) = variable else {
            let variables = self.container.variables();
            let has_times = variables
                .iter()
                .any(|variable| axis_of(variable) == Some(Axis::Time));
            let is_beginning = |variable: &&Variable| {
                variable.dims.is_empty()
                    && axis_of(variable) == Some(Axis::Forecast)
                    && has_reference(variable)
            };
            return match variables.iter().find(is_beginning) {
                Some(beginning) if !has_times => Err(Error::shape(
                    path,
                    &beginning.name,
                    "the beginning of a forecast, and no time of its fields",
                    "a coordinate valid_time with this time, or no time at all",
                )),
                _ => Ok(None),
            };
        };
        let attributes = VariableAttributes(path, variable);
        if variable.kind == Kind::Single {
            units::check_single(&attributes, self.units)?;
        }
        let numbers = self.values(variable)?;
        // A dim that no field has may be unused, as in files of constants.
        let is_unused = dim.is_none() && self.units.is_none() && !variable.dims.is_empty();
        let (calendar, seconds) = match units::seconds(&attributes, self.units, numbers) {
            Err(_) if is_unused => return Ok(None),
            found => found?,
        };
        times::check_rising(path, &variable.name, &seconds, calendar)?;
        Ok(Some((variable.name.clone(), calendar, seconds)))
    }

    /// Returns the labels of the levels along a dim with the coordinate that holds them; without a
    /// usable coordinate, the labels are indices from zero.
    pub(super) fn labels(
        &self,
        dim: &str,
        extent: usize,
    ) -> Result<(Vec<String>, Option<&'a Variable>)> {
        let coordinate = self
            .find(dim)
            .filter(|variable| variable.shape.iter().product::<usize>() == extent);
        if let Some(variable) = coordinate {
            let single = variable.kind == Kind::Single;
            let label = |&value: &f64| {
                if single {
                    (value as f32).to_string()
                } else {
                    value.to_string()
                }
            };
            let mut labels: Vec<String> = self.values(variable)?.iter().map(label).collect();
            let in_order = labels.clone();
            labels.sort();
            labels.dedup();
            if labels.len() == extent {
                return Ok((in_order, Some(variable)));
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
        Ok(((0..extent).map(|index| index.to_string()).collect(), None))
    }
}
