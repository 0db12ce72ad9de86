//! Selection of the fields of a container: the variables that are channels, their grid and time
//! axis.

use super::axis::{Axis, axis_of, is_time};
use super::coordinates::{Coordinates, MAX_VALUES, Role};
use super::planes::lines;
use super::time_axis::{refused_time, undated};
use super::unstructured::{
    areas, healpix_cells, healpix_positions, is_in_radians, named_positions, place_of, positions,
};
use super::variable::{Container, Variable, VariableAttributes};
use crate::fields::channel::base;
use crate::fields::in_file;
use crate::formats::packing::Packing;
use crate::grid::cells;
use crate::grid::degrees::TOLERANCE;
use crate::grid::repeated::longitudes_repeated;
use crate::grid::unplaced::mark_zeros;
use crate::{Calendar, Error, Grid, LeftOut, LeftOutReason, Result};

/// Choice of the variables of a container that are channels.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Choice<'a> {
    /// All fields; all coordinates on their grid, if there are no others.
    Fields,
    /// All fields, and all coordinates on their grid.
    All,
    /// Variables, or levels of them, by name.
    Named(&'a [String]),
}

/// Variable on a grid.
#[derive(Debug)]
pub(crate) struct Field {
    /// Index of the variable in its container.
    pub(crate) variable: usize,
    /// Role of each dim.
    pub(crate) roles: Vec<Role>,
    pub(crate) packing: Packing,
    /// Attributes of the coordinate that labels the levels, if there is one.
    pub(crate) level_units: Option<String>,
    pub(crate) level_positive: Option<String>,
    pub(crate) level_standard_name: Option<String>,
}

/// Channel: a field, or one level of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Channel {
    pub(crate) field: usize,
    pub(crate) level: usize,
}

/// Channels of a container with their coordinates.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) grid: Grid,
    pub(crate) times: Vec<f64>,
    pub(crate) calendar: Calendar,
    /// Name of the time axis.
    pub(crate) time: String,
    /// Whether the container has neither a time axis nor a coordinate with the time of its fields.
    pub(crate) is_undated: bool,
    /// Whether fields without a time dim are valid at all times, which needs a time axis: without
    /// one, they are a state at a single time.
    pub(crate) are_static: bool,
    pub(crate) fields: Vec<Field>,
    pub(crate) channels: Vec<Channel>,
    pub(crate) names: Vec<String>,
    /// Variables that are not channels, each with the reason.
    pub(crate) left_out: Vec<LeftOut>,
}

impl Plan {
    /// Finds the chosen fields of a container.
    ///
    /// # Errors
    /// No field on a latitude-longitude grid or on cells with positions; coordinates that do not
    /// form a grid or are not times; dims whose length differs from that of their coordinate; a
    /// member that cannot be read, unless the chosen channels do not need it.
    pub(crate) fn of(
        container: &dyn Container,
        choice: Choice<'_>,
        units: Option<&str>,
    ) -> Result<Self> {
        let coordinates = Coordinates::of(container, units);
        let path = container.path();
        // An array of all channels is chosen with any of them.
        let choice = match choice {
            Choice::Named(_) if container.channels().is_some() => Choice::Fields,
            choice => choice,
        };
        let chosen = match choice {
            Choice::Named(names) => Some(names),
            Choice::Fields | Choice::All => None,
        };
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
            if !is_chosen(&variable.name) {
                continue;
            }
            let mut roles = coordinates.roles(variable)?;
            if matches!(choice, Choice::Fields)
                && roles.is_ok()
                && let Some(reason) = coordinates.auxiliary(variable)
            {
                roles = Err(reason);
            }
            match roles {
                Ok(roles) => candidates.push((index, roles)),
                Err(reason) => left_out.push((index, reason)),
            }
        }
        let lacks_times = left_out
            .iter()
            .any(|(_, reason)| matches!(reason, LeftOutReason::NoTimes(_)));
        if candidates.is_empty() && matches!(choice, Choice::Fields) && !lacks_times {
            // A file of coordinates only.
            return Self::of(container, Choice::All, units);
        }
        let variable = |index: usize| &container.variables()[index];
        if let Some(chosen) = chosen
            && candidates.is_empty()
            && left_out.is_empty()
        {
            let is_field = |variable: &&Variable| {
                !is_coordinate(variable) && matches!(coordinates.roles(variable), Ok(Ok(_)))
            };
            let names = container.variables().iter().filter(is_field);
            let names: Vec<&str> = names.map(|variable| variable.name.as_str()).collect();
            let found = format!("none of {}", chosen.join(", "));
            let expected = format!("some of its channels {}", names.join(", "));
            return Err(Error::shape(path, "/", found, expected));
        }
        let named = |left_out: Vec<(usize, LeftOutReason)>| -> Vec<LeftOut> {
            let named = |(index, reason)| LeftOut::new(&variable(index).name, reason);
            left_out.into_iter().map(named).collect()
        };
        let dim = |(index, roles): &(usize, Vec<Role>), role: Role| {
            let dim = roles.iter().position(|this| *this == role)?;
            Some(variable(*index).dims[dim].as_str())
        };
        // Fields of stations may lie beside those of a grid.
        let main = candidates.iter().min_by_key(|field| {
            let lacks = |role| dim(field, role).is_none();
            (lacks(Role::Row), lacks(Role::Time))
        });
        let Some(main) = main.cloned() else {
            let names = named(left_out);
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let names = names.join(", ");
            let expected = if lacks_times {
                "variables whose dim of times has a time coordinate: numbers with units such as \
                 \"hours since 1970-01-01\", or texts of dates such as 2020-01-01_06:00:00"
            } else {
                "variables on the dims of a latitude and a longitude, which have coordinates with \
                 units of degrees_north and degrees_east, or their names, on two dims along which \
                 both latitudes and longitudes of the cells lie, as \"Curvilinear grids\" in \
                 docs/data.md shows, or on one dim of cells that has both"
            };
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
            let reason = format!("another grid or time axis: dims {:?}", other.dims);
            (*index, LeftOutReason::Other(reason))
        });
        left_out.extend(others.collect::<Vec<_>>());
        candidates.retain(fits);
        // Coordinates are never fields, so they need not be reported as left out.
        left_out.retain(|(index, _)| !is_coordinate(variable(*index)));
        let column = main.1.iter().position(|role| *role == Role::Column);
        let column = column.expect("a field has columns");
        let extent = variable(main.0).shape[column];
        let columns = (variable(main.0).dims[column].as_str(), extent);
        let row = dim(&main, Role::Row);
        let grid = grid(&coordinates, variable(main.0), row, columns);
        let mut grid = grid
            .map_err(|error| in_file(path, error))?
            .without_repeats();
        let mut description =
            coordinates.description(variable(main.0), row.map(|row| [row, columns.0]));
        let width = grid.shape()[1];
        if let Some([_, line]) = &mut description.lines {
            line.values.truncate(width);
        }
        description.area_units = grid.description.area_units.take();
        grid.description = description;
        // Time axis of other variables in the file, for chosen fields that have no time dim.
        let timed_beside = || {
            let mut variables = container.variables().iter().enumerate();
            variables.find_map(|(index, variable)| {
                let other = (index, coordinates.roles(variable).ok()?.ok()?);
                let fits = dim(&other, Role::Time).is_some()
                    && shares(&other, Role::Row)
                    && shares(&other, Role::Column);
                fits.then_some(other)
            })
        };
        let is_static = chosen.is_some() && dim(&main, Role::Time).is_none();
        let beside = is_static.then(timed_beside).flatten();
        let time = dim(beside.as_ref().unwrap_or(&main), Role::Time);
        let are_static = time.is_some();
        let found = match coordinates.times(time) {
            // Fields without a time dim do not need the time axis of other variables.
            Err(_) if beside.is_some() => None,
            found => found?,
        };
        let is_undated = found.is_none();
        let (time, calendar, times) = found.unwrap_or_else(undated);
        let mut plan = Self {
            grid,
            times,
            calendar,
            time,
            is_undated,
            are_static,
            fields: Vec::new(),
            channels: Vec::new(),
            names: Vec::new(),
            left_out: named(left_out),
        };
        let repeated = match extent - width {
            0 => None,
            1 => Some("its last column repeats the first".into()),
            count => Some(format!("its last {count} columns repeat the first")),
        };
        let repeated = repeated.map(|text| LeftOut::new(columns.0, LeftOutReason::Other(text)));
        plan.left_out.extend(repeated);
        for (index, roles) in candidates {
            plan.add(&coordinates, index, roles)?;
        }
        Ok(plan)
    }

    /// Adds the channels of a variable to the plan.
    fn add(&mut self, coordinates: &Coordinates<'_>, index: usize, roles: Vec<Role>) -> Result<()> {
        let container = coordinates.container;
        let variable = &container.variables()[index];
        let level = roles.iter().position(|role| *role == Role::Level);
        let labels = level.map(|dim| coordinates.labels(&variable.dims[dim], variable.shape[dim]));
        let (labels, coordinate) = labels.transpose()?.unzip();
        let coordinate = coordinate.flatten();
        let text = |attribute| coordinate?.text(attribute).map(String::from);
        // Other standard names would prevent the coordinate from being recognised as levels when it
        // is written and read again.
        let is_level = coordinate.and_then(axis_of) == Some(Axis::Level);
        for level in 0..labels.as_ref().map_or(1, Vec::len) {
            let suffix = labels.as_ref().map(|labels| format!("@{}", labels[level]));
            let name = || variable.name.clone() + &suffix.unwrap_or_default();
            let names = container.channels();
            self.names
                .push(names.map_or_else(name, |names| names[level].clone()));
            let field = self.fields.len();
            self.channels.push(Channel { field, level });
        }
        let attributes = VariableAttributes(container.path(), variable);
        self.fields.push(Field {
            variable: index,
            roles,
            packing: Packing::of(&attributes, variable.number_type())?,
            level_units: text("units"),
            level_positive: text("positive"),
            level_standard_name: text("standard_name").filter(|_| is_level),
        });
        Ok(())
    }
}

/// Whether a variable is a coordinate of a dim, or has the positions of cells.
fn is_coordinate(variable: &Variable) -> bool {
    axis_of(variable).is_some() || place_of(variable).is_some()
}

/// Creates the grid of the dims of rows and columns of a variable or, without rows, of its dim of
/// cells; the columns are given as dim and extent.
fn grid(
    coordinates: &Coordinates<'_>,
    variable: &Variable,
    row: Option<&str>,
    (column, columns): (&str, usize),
) -> Result<Grid> {
    let line = |dim: &str| {
        let coordinate = coordinates.find(dim);
        coordinates.values(coordinate.expect("it gave the dim its role"))
    };
    let container = coordinates.container;
    if row.is_some()
        && let Some(positions) = coordinates.plane_positions(variable)
    {
        return curvilinear_grid(coordinates, variable, positions);
    }
    if row.is_some()
        && let Some(projected) = coordinates.projected(variable)
    {
        return coordinates.projected_grid(&projected);
    }
    let positions = match row {
        Some(row) => {
            let (lat, mut lon) = (line(row)?, line(column)?);
            match named_positions(container, column) {
                Some(positions) if lat.len() == 1 => positions,
                _ => {
                    lon.truncate(lon.len() - longitudes_repeated(&lon));
                    return Grid::new(lat, lon);
                }
            }
        }
        None => match positions(container, column) {
            Some(positions) => positions,
            // An extent in a damaged store may exceed the memory.
            None if columns > MAX_VALUES => {
                let expected = format!("at most {MAX_VALUES} cells");
                let found = columns.to_string();
                return Err(Error::shape(container.path(), column, found, expected));
            }
            None => {
                let numbers = healpix_cells(container, column);
                let numbers = numbers.map(|numbers| coordinates.values(numbers));
                let found = healpix_positions(container, variable, columns, numbers.transpose()?)?;
                return match found {
                    Some([lat, lon]) => Grid::unstructured(lat, lon),
                    None => Grid::new(vec![0.0], cells::columns(columns)),
                };
            }
        },
    };
    let [lat, lon] = positions.map(|variable| {
        let values = coordinates.values(variable)?;
        in_degrees(coordinates, variable, values)
    });
    let grid = Grid::unstructured(lat?, lon?)?;
    match areas(container, variable, column) {
        Some(areas) => with_areas(grid, coordinates.values(areas)?, areas),
        None => Ok(grid),
    }
}

/// Creates the grid of rows and columns with these latitudes and longitudes of the cells of a
/// variable.
fn curvilinear_grid(
    coordinates: &Coordinates<'_>,
    variable: &Variable,
    positions: [&Variable; 2],
) -> Result<Grid> {
    let (_, shape) = lines(positions[0]);
    let [lat, lon] = positions.map(|variable| {
        let values = coordinates.plane(variable)?;
        in_degrees(coordinates, variable, values)
    });
    let (mut lat, mut lon) = (lat?, lon?);
    mark_zeros(shape, [&mut lat, &mut lon]);
    let Some(plane) = coordinates.plane_areas(variable, positions[0]) else {
        return Grid::curvilinear(shape, lat, lon);
    };
    // Cells without a position do not count, whatever their areas.
    let mut areas = coordinates.plane(plane)?;
    for (area, (lat, lon)) in areas.iter_mut().zip(lat.iter().zip(&lon)) {
        if lat.is_nan() || lon.is_nan() {
            *area = 0.0;
        }
    }
    with_areas(Grid::curvilinear(shape, lat, lon)?, areas, plane)
}

/// Sets the areas of cells, in the units of their variable. Cells without a field, such as land in
/// an ocean model, may lack one.
fn with_areas(grid: Grid, areas: Vec<f64>, variable: &Variable) -> Result<Grid> {
    let known = |area: f64| if area.is_nan() { 0.0 } else { area };
    let mut grid = grid.with_cell_areas(areas.into_iter().map(known).collect())?;
    grid.description.area_units = variable.text("units").map(String::from);
    Ok(grid)
}

/// Returns the latitudes or the longitudes of cells, in degrees.
///
/// # Errors
/// Latitudes in radians beyond a pole, which probably are degrees.
fn in_degrees(
    coordinates: &Coordinates<'_>,
    variable: &Variable,
    values: Vec<f64>,
) -> Result<Vec<f64>> {
    if !is_in_radians(variable) {
        return Ok(values);
    }
    let is_beyond = |value: &&f64| value.to_degrees().abs() > 90.0 + TOLERANCE;
    if place_of(variable) == Some(Axis::Latitude)
        && let Some(beyond) = values.iter().find(is_beyond)
    {
        let source = match variable.text("units") {
            None | Some("") => "by its name, as it has no units",
            Some(_) => "by its units",
        };
        let found = format!("{beyond} in radians, {source}");
        let expected =
            "latitudes within π/2, or the units \"degrees_north\" if they are in degrees";
        let path = coordinates.container.path();
        return Err(Error::shape(path, &variable.name, found, expected));
    }
    Ok(values.into_iter().map(f64::to_degrees).collect())
}
