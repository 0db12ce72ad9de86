//! Stores of anemoi-datasets, in which one array holds all variables of all cells.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use ndarray::{ArrayD, Axis, Slice};

use super::cf::axis::CELLS;
use super::cf::variable::{Attribute, Container, Kind, Stamp, Variable};
use super::zarr::ZarrStore;
use crate::grid::cells::columns;
use crate::{Calendar, Error, Grid, Result, parse_time};

/// Array of all fields, `[time, variable, member, cell]`.
const DATA: &str = "data";
/// Array of the times.
const DATES: &str = "dates";
/// Largest number of cells, and of times.
const MOST: usize = 1 << 24;

/// Store of anemoi-datasets as fields on a grid. Cells that do not form one are the columns of a
/// single row.
#[derive(Debug)]
struct AnemoiStore {
    store: ZarrStore,
    /// Index of the array of all fields.
    data: usize,
    names: Vec<String>,
    /// Variable `[time, variable, slow, fast]`, where the slow and the fast dim form the cells, and
    /// its coordinates: those of its dims without that of the variables, and the positions of cells
    /// that are one row.
    variables: Vec<Variable>,
    /// Values of the coordinates.
    values: Vec<Vec<f64>>,
    /// Indices of the times that are not missing.
    times: Vec<usize>,
}

/// Returns a store of anemoi-datasets as fields on a grid, and any other store as it is.
///
/// # Errors
/// Several ensemble members; dates that are not `datetime64`; coordinates that cannot be read.
pub(crate) fn container(store: ZarrStore) -> Result<Box<dyn Container>> {
    let Some((names, data, places)) = recognised(&store) else {
        return Ok(Box::new(store));
    };
    let path = store.path().to_path_buf();
    let shape = store.variables()[data].shape.clone();
    let (times, members, cells) = (shape[0], shape[2], shape[3]);
    if members != 1 {
        let found = format!("{members} ensemble members");
        let expected = "one; write each member to a store of its own";
        return Err(Error::shape(&path, DATA, found, expected));
    }
    if !(1..=MOST).contains(&cells) || times > MOST {
        let found = format!("{times} times of {cells} cells");
        let expected = format!("at most {MOST} of each, and a cell");
        return Err(Error::shape(&path, DATA, found, expected));
    }
    let dates = store.dates(DATES);
    let dates = dates.map_err(|cause| Error::data(&path, DATES, cause))?;
    if dates.len() != times {
        let found = format!("{} times", dates.len());
        let expected = format!("{times}, those of {DATA}");
        return Err(Error::shape(&path, DATES, found, expected));
    }
    let missing = serde_json::from_value(store.attribute("missing_dates"));
    let missing: Vec<String> = missing.unwrap_or_default();
    let missing = missing.iter().map(|date| {
        let seconds = parse_time(date, Calendar::Gregorian)?;
        Ok::<_, Error>(seconds.round() as i64)
    });
    let missing = missing.collect::<Result<BTreeSet<i64>>>()?;
    let is_there = |time: &usize| !missing.contains(&(dates[*time].round() as i64));
    let kept: Vec<usize> = (0..times).filter(is_there).collect();
    let dates = kept.iter().map(|time| dates[*time]).collect();
    let coordinate = |place: usize| {
        let read = store.double(place, std::slice::from_ref(&(0..cells)));
        let name = &store.variables()[place].name;
        let read = read.map_err(|cause| Error::data(&path, name, cause))?;
        Ok::<Vec<f64>, Error>(read.into_iter().collect())
    };
    let (latitudes, longitudes) = (coordinate(places[0])?, coordinate(places[1])?);
    let lines = lines(&latitudes, &longitudes);
    let is_grid = lines.is_some();
    let row = || one_row(latitudes.len());
    let [(slow_name, slow), (fast_name, fast)] = lines.unwrap_or_else(row);
    let source = &store.variables()[data];
    let mut variables = vec![
        Variable {
            dims: ["time", "variable", slow_name, fast_name]
                .map(String::from)
                .into(),
            shape: vec![kept.len(), names.len(), slow.len(), fast.len()],
            chunk: chunk(source, kept.len() == times, fast.len()),
            ..source.clone()
        },
        described("time", "time", kept.len(), "seconds since 1970-01-01"),
        described(slow_name, slow_name, slow.len(), units(slow_name)),
        described(fast_name, fast_name, fast.len(), units(fast_name)),
    ];
    let mut values = vec![dates, slow, fast];
    if !is_grid {
        let positions = CELLS.into_iter().zip(["degrees_north", "degrees_east"]);
        let along_row = |(name, units)| described(name, fast_name, cells, units);
        variables.extend(positions.map(along_row));
        values.extend([latitudes, longitudes]);
    }
    Ok(Box::new(AnemoiStore {
        store,
        data,
        names,
        variables,
        values,
        times: kept,
    }))
}

/// Returns the names of the variables, the index of their array, and those of the latitudes and
/// longitudes of the cells, if a store has the layout of anemoi-datasets.
fn recognised(store: &ZarrStore) -> Option<(Vec<String>, usize, [usize; 2])> {
    let names: Vec<String> = serde_json::from_value(store.attribute("variables")).ok()?;
    let variables = store.variables();
    let index = |name: &str| variables.iter().position(|variable| variable.name == name);
    let data = index(DATA)?;
    let &[_, count, _, cells] = &variables[data].shape[..] else {
        return None;
    };
    let latitudes = index("latitudes").or_else(|| index("latitude"))?;
    let longitudes = index("longitudes").or_else(|| index("longitude"))?;
    let places = [latitudes, longitudes];
    let is_on_cells = |place: usize| variables[place].shape == [cells];
    let is_numeric = |place: usize| variables[place].kind != Kind::Other;
    let fits = places.into_iter().all(is_on_cells)
        && places.into_iter().chain([data]).all(is_numeric)
        && names.len() == count
        && count > 0;
    fits.then_some((names, data, places))
}

/// Coordinate of a dim of the cells: its name and values.
type Line = (&'static str, Vec<f64>);

/// Splits cells that form a grid into a slow and a fast dim.
fn lines(latitudes: &[f64], longitudes: &[f64]) -> Option<[Line; 2]> {
    let is_grid = |lat: &[f64], lon: &[f64]| Grid::new(lat.to_vec(), lon.to_vec()).is_ok();
    if let Some([lat, lon]) = product(latitudes, longitudes)
        && is_grid(&lat, &lon)
    {
        return Some([("latitude", lat), ("longitude", lon)]);
    }
    if let Some([lon, lat]) = product(longitudes, latitudes)
        && is_grid(&lat, &lon)
    {
        return Some([("longitude", lon), ("latitude", lat)]);
    }
    None
}

/// Returns the dims of a row of cells, whose coordinates are not positions.
fn one_row(cells: usize) -> [Line; 2] {
    [("latitude", vec![0.0]), ("longitude", columns(cells))]
}

/// Returns the values of two coordinates whose product the cells are, if there are such.
fn product(slow: &[f64], fast: &[f64]) -> Option<[Vec<f64>; 2]> {
    let columns = slow.iter().take_while(|value| **value == slow[0]).count();
    let is_product = columns > 0
        && slow.len().is_multiple_of(columns)
        && slow
            .chunks(columns)
            .all(|row| row.iter().all(|value| *value == row[0]))
        && fast.chunks(columns).all(|row| *row == fast[..columns]);
    let rows = || slow.iter().step_by(columns).copied().collect();
    is_product.then(|| [rows(), fast[..columns].to_vec()])
}

/// Returns the extents of a chunk `[times, variables, slow, fast]`, if chunks are boxes of these
/// dims.
fn chunk(source: &Variable, has_all_times: bool, columns: usize) -> Option<Vec<usize>> {
    let &[times, variables, _, cells] = source.chunk.as_deref()? else {
        return None;
    };
    let cells = cells.min(source.shape[3]);
    let is_box = (has_all_times || times == 1) && cells % columns == 0;
    is_box.then(|| vec![times, variables, cells / columns, columns])
}

/// Creates a coordinate variable along a dim.
fn described(name: &str, dim: &str, extent: usize, units: &str) -> Variable {
    Variable {
        name: name.into(),
        dims: vec![dim.into()],
        shape: vec![extent],
        kind: Kind::Double,
        dtype: "float64".into(),
        width: 8,
        attributes: vec![("units".into(), Attribute::Text(units.into()))],
        chunk: None,
    }
}

fn units(name: &str) -> &'static str {
    match name {
        "latitude" => "degrees_north",
        _ => "degrees_east",
    }
}

impl AnemoiStore {
    /// Reads a box of the fields by a function that reads one of the array of the store, in
    /// row-major order.
    fn fields<T>(
        &self,
        cells: &[Range<usize>],
        read: impl Fn(&[Range<usize>]) -> Result<ArrayD<T>, String>,
    ) -> Result<ArrayD<T>, String> {
        let [times, variables, rows, columns] = cells else {
            return Err(format!("{} dims, expected 4", cells.len()));
        };
        let width = self.variables[0].shape[3];
        // Of several rows all columns are read, because they are contiguous.
        let (held, chosen) = if rows.len() == 1 {
            (columns.clone(), 0..columns.len())
        } else {
            (0..width, columns.clone())
        };
        let line = rows.start * width + held.start..(rows.end.max(1) - 1) * width + held.end;
        let mut values = Vec::new();
        let runs = self.times[times.clone()].chunk_by(|one, next| one + 1 == *next);
        for run in runs.filter(|_| !rows.is_empty()) {
            let run = run[0]..run[0] + run.len();
            let block = read(&[run, variables.clone(), 0..1, line.clone()])?;
            let (block, _) = block.into_raw_vec_and_offset();
            values.extend(block);
        }
        let extents = vec![times.len(), variables.len(), rows.len(), held.len()];
        let values = ArrayD::from_shape_vec(extents, values);
        let mut values = values.map_err(|error| error.to_string())?;
        values.slice_axis_inplace(Axis(3), Slice::from(chosen));
        Ok(values)
    }
}

impl Container for AnemoiStore {
    fn path(&self) -> &Path {
        self.store.path()
    }

    fn variables(&self) -> &[Variable] {
        &self.variables
    }

    fn unreadable(&self) -> &[(String, String)] {
        &[]
    }

    fn channels(&self) -> Option<&[String]> {
        Some(&self.names)
    }

    fn single(&self, _: usize, cells: &[Range<usize>]) -> Result<ArrayD<f32>, String> {
        self.fields(cells, |cells| self.store.single(self.data, cells))
    }

    fn double(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f64>, String> {
        match variable {
            0 => self.fields(cells, |cells| self.store.double(self.data, cells)),
            _ => {
                let values = self.values[variable - 1][cells[0].clone()].to_vec();
                Ok(ndarray::Array1::from(values).into_dyn())
            }
        }
    }

    fn stamp(&self, _: usize, first: &[usize]) -> Option<Stamp> {
        let &[time, variable, row, column] = first else {
            return None;
        };
        let cell = row * self.variables[0].shape[3] + column;
        let first = [self.times[time], variable, 0, cell];
        self.store.stamp(self.data, &first)
    }

    fn fetched(&self) -> u64 {
        self.store.fetched()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        self.store.fingerprint()
    }

    fn modified(&self) -> Result<u32> {
        self.store.modified()
    }
}
