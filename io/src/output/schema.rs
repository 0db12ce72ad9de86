//! Variables and coordinates of an output by the CF conventions, derived from its channels and
//! grid.

use crate::formats::cf::axis::{AREA, CELLS};
use crate::grid::description::{Attributes, Mapping, attribute};
use crate::{Calendar, Channel, Error, Grid, Result};

pub(crate) const TIME: &str = "time";
pub(crate) const LATITUDE: &str = "latitude";
pub(crate) const LONGITUDE: &str = "longitude";
pub(crate) const MEMBER: &str = "realization";
/// Dims of curvilinear grids, along which latitudes and longitudes lie.
const ROWS: &str = "y";
const COLUMNS: &str = "x";
const LEAD: &str = "lead_time";
const START: &str = "forecast_reference_time";
const LEVEL: &str = "level";
/// Names reserved for coordinates.
const TAKEN: [&str; 8] = [
    TIME, LATITUDE, LONGITUDE, MEMBER, LEAD, START, CELLS[0], CELLS[1],
];

/// Coordinate: a variable with the values along its dims, or a scalar without a dim.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Coordinate {
    pub(crate) name: String,
    /// Name and extent of each dim.
    pub(crate) dims: Vec<(String, usize)>,
    pub(crate) values: Vec<f64>,
    pub(crate) attributes: Attributes,
}

/// Variable made of channels that differ only in level.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Output {
    pub(crate) name: String,
    pub(crate) is_static: bool,
    /// Index of its level coordinate in [`Schema::levels`].
    pub(crate) levels: Option<usize>,
    pub(crate) attributes: Attributes,
}

/// Location of a channel: index of its variable, and index of its level there.
pub(crate) type Place = (usize, usize);

/// Variables of an output, without values.
#[derive(Clone, Debug)]
pub(crate) struct Schema {
    pub(crate) grid: Grid,
    pub(crate) calendar: Calendar,
    /// Number of ensemble members; more than one get a dim of their own.
    pub(crate) members: usize,
    pub(crate) variables: Vec<Output>,
    pub(crate) levels: Vec<Coordinate>,
    /// Location of each channel.
    pub(crate) places: Vec<Place>,
}

impl Schema {
    /// Groups channels into variables, and their levels into coordinates.
    ///
    /// # Errors
    /// No channel; a name that is repeated or that a file cannot represent.
    pub(crate) fn new(grid: &Grid, calendar: Calendar, channels: &[Channel]) -> Result<Self> {
        let refused = |name: &str, expected: &str| {
            Err(Error::argument("channels", format!("{name:?}"), expected))
        };
        if channels.is_empty() {
            return refused("", "at least one channel");
        }
        let mut schema = Self {
            grid: grid.clone(),
            calendar,
            members: 1,
            variables: Vec::new(),
            levels: Vec::new(),
            places: Vec::new(),
        };
        // First channel and levels of each variable.
        let mut groups: Vec<(&Channel, Vec<f64>)> = Vec::new();
        for channel in channels {
            let name = channel.variable();
            let known = groups
                .iter()
                .position(|(first, _)| first.variable() == name);
            let index = known.unwrap_or_else(|| {
                groups.push((channel, Vec::new()));
                groups.len() - 1
            });
            let (first, levels) = &mut groups[index];
            let is_new = match channel.level() {
                Some(level) => first.level().is_some() && !levels.contains(&level),
                None => known.is_none(),
            };
            if !is_new || first.is_static != channel.is_static {
                let expected = "names that differ, of which one is not a level of the other";
                return refused(&channel.name, expected);
            }
            if !is_usable(name) || (grid.is_curvilinear() && [ROWS, COLUMNS].contains(&name)) {
                let expected = "letters, digits and any of _ - + . @, beginning with a letter or digit, \
                                and no name of a coordinate";
                return refused(name, expected);
            }
            levels.extend(channel.level());
            schema.places.push((index, levels.len().saturating_sub(1)));
        }
        for (first, levels) in groups {
            let text = [
                ("standard_name", &first.standard_name),
                ("long_name", &first.long_name),
                ("units", &first.units),
                ("cell_methods", &first.cell_methods),
            ];
            let attributes = text
                .into_iter()
                .filter_map(|(name, text)| Some(attribute(name, text.clone()?)));
            let output = Output {
                name: first.variable().into(),
                is_static: first.is_static,
                levels: (!levels.is_empty()).then(|| schema.level(levels, first)),
                attributes: attributes.collect(),
            };
            schema.variables.push(output);
        }
        Ok(schema)
    }

    /// Returns the index of the coordinate with these levels and the level attributes of a channel,
    /// creating it if needed. Variables with equal levels share a coordinate.
    fn level(&mut self, values: Vec<f64>, channel: &Channel) -> usize {
        let text = [
            ("standard_name", &channel.level_standard_name),
            ("units", &channel.level_units),
            ("positive", &channel.level_positive),
        ];
        let text = text
            .into_iter()
            .filter_map(|(name, text)| Some(attribute(name, text.clone()?)));
        let axis = std::iter::once(attribute("axis", "Z"));
        let attributes: Attributes = axis.chain(text).collect();
        let same = |known: &Coordinate| known.values == values && known.attributes == attributes;
        if let Some(index) = self.levels.iter().position(same) {
            return index;
        }
        let name = match self.levels.len() {
            0 => LEVEL.into(),
            count => format!("{LEVEL}_{}", count + 1),
        };
        self.levels.push(Coordinate {
            dims: vec![(name.clone(), values.len())],
            name,
            values,
            attributes,
        });
        self.levels.len() - 1
    }

    /// Returns the names of the dims of a variable.
    pub(crate) fn dims(&self, variable: usize) -> Vec<&str> {
        let output = &self.variables[variable];
        let time = (!output.is_static).then_some(TIME);
        let member = (self.members > 1).then_some(MEMBER);
        let level = output.levels.map(|levels| &*self.levels[levels].name);
        let leading = [time, member, level].into_iter().flatten();
        leading.chain(self.lines()).collect()
    }

    /// Returns the names of the coordinates with the positions of cells that have their own.
    fn positions(&self) -> [&'static str; 2] {
        if self.grid.is_curvilinear() {
            [LATITUDE, LONGITUDE]
        } else {
            CELLS
        }
    }

    /// Returns the names of the dims of rows and columns.
    fn lines(&self) -> [&'static str; 2] {
        if self.grid.is_curvilinear() {
            [ROWS, COLUMNS]
        } else {
            [LATITUDE, LONGITUDE]
        }
    }

    /// Returns the shape of a variable with `times` times.
    pub(crate) fn shape(&self, variable: usize, times: usize) -> Vec<usize> {
        let [rows, columns] = self.grid.shape();
        let dims = self.dims(variable).into_iter();
        dims.map(|dim| match dim {
            TIME => times,
            MEMBER => self.members,
            LATITUDE | ROWS => rows,
            LONGITUDE | COLUMNS => columns,
            _ => self.level_count(variable),
        })
        .collect()
    }

    /// Returns the number of levels of a variable, one if it has no levels.
    pub(crate) fn level_count(&self, variable: usize) -> usize {
        let levels = self.variables[variable].levels;
        levels.map_or(1, |levels| self.levels[levels].values.len())
    }

    /// Returns the attributes of a variable that name other variables: `coordinates`, those that are
    /// not of its dims (of a forecast, and the positions of cells that have their own),
    /// `cell_measures`, the areas of the cells, and `grid_mapping`, the map projection.
    pub(crate) fn auxiliary(&self, variable: usize, is_forecast: bool) -> Attributes {
        let is_timed = is_forecast && !self.variables[variable].is_static;
        let times = is_timed.then_some([LEAD, START]);
        let cells = self.grid.cells().map(|_| self.positions());
        let names: Vec<&str> = times.into_iter().chain(cells).flatten().collect();
        let names = (!names.is_empty()).then(|| attribute("coordinates", names.join(" ")));
        let areas = self
            .areas()
            .map(|_| attribute("cell_measures", format!("area: {AREA}")));
        let mapping = self
            .mapping()
            .map(|mapping| attribute("grid_mapping", &*mapping.name));
        names.into_iter().chain(areas).chain(mapping).collect()
    }

    /// Returns the grid mapping, unless another variable may have its name.
    fn mapping(&self) -> Option<&Mapping> {
        self.grid.description.mapping.as_ref().filter(|mapping| {
            let name = &*mapping.name;
            let mut outputs = self.variables.iter();
            is_usable(name)
                && ![AREA, ROWS, COLUMNS].contains(&name)
                && outputs.all(|output| output.name != name)
        })
    }

    /// Returns the coordinates of the rows and columns of a curvilinear grid in its projection, if
    /// they are known.
    fn projected(&self) -> Vec<Coordinate> {
        let lines = self.grid.description.lines.as_ref().filter(|lines| {
            let extents = lines.each_ref().map(|line| line.values.len());
            self.grid.is_curvilinear() && extents == self.grid.shape()
        });
        let named = self.lines().into_iter().zip(lines.into_iter().flatten());
        let coordinates = named.map(|(name, line)| Coordinate {
            name: name.into(),
            dims: vec![(name.into(), line.values.len())],
            values: line.values.clone(),
            attributes: line.attributes.clone(),
        });
        coordinates.collect()
    }

    /// Returns the areas of the cells, unless a channel that was chosen by name has them.
    fn areas(&self) -> Option<&Vec<f64>> {
        let has_channel = self.variables.iter().any(|output| output.name == AREA);
        self.grid.areas.as_ref().filter(|_| !has_channel)
    }

    /// Returns the coordinates that do not grow with time.
    pub(crate) fn fixed(&self) -> Vec<Coordinate> {
        let along = |name: &str, values: &[f64], units: &str, axis: &str| Coordinate {
            name: name.into(),
            dims: vec![(name.into(), values.len())],
            values: values.into(),
            attributes: vec![
                attribute("standard_name", name),
                attribute("units", units),
                attribute("axis", axis),
            ],
        };
        let mut all = vec![
            along(LATITUDE, self.grid.lat(), "degrees_north", "Y"),
            along(LONGITUDE, &eastward(self.grid.lon()), "degrees_east", "X"),
        ];
        let extents = self
            .lines()
            .map(String::from)
            .into_iter()
            .zip(self.grid.shape());
        // Dims of the cells, of which a single row has one.
        let skipped = usize::from(!self.grid.is_curvilinear());
        let plane: Vec<(String, usize)> = extents.skip(skipped).collect();
        if let Some(cells) = self.grid.cells() {
            for (index, values) in cells.into_iter().enumerate() {
                let mut positions = all[index].clone();
                positions.dims = plane.clone();
                positions.values = values.into();
                positions.attributes.retain(|(name, _)| name != "axis");
                if self.grid.is_curvilinear() {
                    all[index] = positions;
                } else {
                    positions.name = CELLS[index].into();
                    all.push(positions);
                    // Recognised by its name; with units it would pass for positions.
                    let note = format!("number without a meaning, see {}", CELLS[index]);
                    all[index].attributes = vec![attribute("long_name", note)];
                }
            }
        }
        if let Some(areas) = self.areas() {
            let units = self.grid.description.area_units.as_deref();
            let units = units.map(|units| attribute("units", units));
            let name = std::iter::once(attribute("standard_name", AREA));
            all.push(Coordinate {
                name: AREA.into(),
                dims: plane,
                values: areas.clone(),
                attributes: name.chain(units).collect(),
            });
        }
        all.extend(self.projected());
        // Only its attributes have a meaning.
        all.extend(self.mapping().map(|mapping| Coordinate {
            name: mapping.name.clone(),
            dims: Vec::new(),
            values: vec![0.0],
            attributes: mapping.attributes.clone(),
        }));
        all.extend(self.levels.iter().cloned());
        if self.members > 1 {
            let numbers: Vec<f64> = (0..self.members).map(|member| member as f64).collect();
            let mut members = along(MEMBER, &numbers, "1", "E");
            members.attributes.pop();
            all.push(members);
        }
        all
    }
}

/// Returns increasing longitudes. If columns cross the prime meridian, those before it become
/// negative or, if the first column is in the eastern hemisphere, those after it exceed 360.
fn eastward(lon: &[f64]) -> Vec<f64> {
    let crossing = lon.windows(2).position(|pair| pair[1] < pair[0]);
    let western = crossing.map_or(lon.len(), |last| last + 1);
    let [before, after] = if western < lon.len() && lon[0] >= 180.0 {
        [-360.0, 0.0]
    } else {
        [0.0, 360.0]
    };
    let turn = |(column, lon): (usize, &f64)| lon + if column < western { before } else { after };
    lon.iter().enumerate().map(turn).collect()
}

/// Whether a variable may have this name in files of all formats.
fn is_usable(name: &str) -> bool {
    let starts = name.starts_with(|first: char| first.is_alphanumeric());
    let fits = |letter: char| letter.is_alphanumeric() || "_-+.@".contains(letter);
    let is_level = name.strip_prefix(LEVEL).is_some_and(|rest| {
        rest.is_empty()
            || rest
                .strip_prefix('_')
                .is_some_and(|rest| rest.parse::<u32>().is_ok())
    });
    starts && name.chars().all(fits) && !TAKEN.contains(&name) && !is_level && name != "zarr.json"
}

/// Time axis of an output.
pub(crate) struct Times<'a> {
    /// Seconds since 1970-01-01 of the calendar.
    pub(crate) seconds: &'a [f64],
    /// Start of the forecast, from which leads are counted.
    pub(crate) start: Option<f64>,
}

impl Times<'_> {
    /// Returns the coordinates of time, or none if all variables are static.
    pub(crate) fn coordinates(&self, schema: &Schema) -> Vec<Coordinate> {
        if self.start.is_none() && schema.variables.iter().all(|output| output.is_static) {
            return Vec::new();
        }
        let along = |dim: &str| vec![(dim.to_string(), self.seconds.len())];
        let time = |name: &str, standard: &str, dim: Option<&str>, values: Vec<f64>| Coordinate {
            name: name.into(),
            dims: dim.map(along).unwrap_or_default(),
            values,
            attributes: vec![
                attribute("standard_name", standard),
                attribute("units", "seconds since 1970-01-01 00:00:00"),
                attribute("calendar", schema.calendar.name()),
            ],
        };
        let mut all = vec![time(TIME, TIME, Some(TIME), self.seconds.to_vec())];
        all[0].attributes.push(attribute("axis", "T"));
        if let Some(start) = self.start {
            let hours = self.seconds.iter().map(|time| (time - start) / 3600.0);
            all.push(Coordinate {
                name: LEAD.into(),
                dims: along(TIME),
                values: hours.collect(),
                attributes: vec![
                    attribute("standard_name", "forecast_period"),
                    attribute("units", "hours"),
                ],
            });
            all.push(time(START, START, None, vec![start]));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(names: &[&str]) -> Result<Schema> {
        let grid = Grid::with_poles(3, 4)?;
        let channels: Vec<Channel> = names
            .iter()
            .map(|name| Channel::new((*name).into()))
            .collect();
        Schema::new(&grid, Calendar::Gregorian, &channels)
    }

    #[test]
    fn levels_of_one_variable_share_it_and_variables_share_levels() {
        let found = schema(&["z@850", "t@500", "z@500", "t2m", "t@850", "q@850", "q@500"]).unwrap();
        let names: Vec<&str> = found.variables.iter().map(|output| &*output.name).collect();
        assert_eq!(names, ["z", "t", "t2m", "q"]);
        assert_eq!(
            found.places,
            [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (3, 1)]
        );
        let levels: Vec<_> = found.variables.iter().map(|output| output.levels).collect();
        assert_eq!(levels, [Some(0), Some(1), None, Some(0)]);
        assert_eq!(found.levels[1].values, [500.0, 850.0]);
        assert_eq!(found.dims(1), ["time", "level_2", "latitude", "longitude"]);
        assert_eq!(found.shape(1, 7), [7, 2, 3, 4]);
    }

    #[test]
    fn longitudes_rise() {
        assert_eq!(
            eastward(&[180.0, 270.0, 0.0, 90.0]),
            [-180.0, -90.0, 0.0, 90.0]
        );
        assert_eq!(
            eastward(&[20.0, 180.0, 340.0, 10.0]),
            [20.0, 180.0, 340.0, 370.0]
        );
        assert_eq!(eastward(&[0.0, 90.0, 180.0]), [0.0, 90.0, 180.0]);
    }

    #[test]
    fn names_that_clash_are_refused() {
        for names in [
            &["t2m", "t2m"][..],
            &["z", "z@500"],
            &["z@500", "z"],
            &["z@500", "z@500"],
            &["time"],
            &["level@3"],
            &["level_2"],
            &["a/b"],
            &[".zattrs"],
            &["__t"],
            &["zarr.json"],
            &[""],
            &[],
        ] {
            let error = schema(names).unwrap_err().to_string();
            assert!(error.starts_with("channels: got "), "{names:?}: {error}");
        }
        assert!(schema(&["z@surface", "z", "10u_x", "ω"][..2]).is_ok());
        // A dim of curvilinear grids.
        assert!(schema(&["x"]).is_ok());
        let grid = Grid::curvilinear([2, 2], vec![0.0; 4], vec![0.0; 4]).unwrap();
        let channels = [Channel::new("x".into())];
        assert!(Schema::new(&grid, Calendar::Gregorian, &channels).is_err());
    }
}
