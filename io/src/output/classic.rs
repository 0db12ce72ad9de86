//! NetCDF files in the classic format, into which every rank writes its own cells.
//!
//! The format consists of a header, the variables without a time dim, and one record per time with
//! the remaining variables in order (NetCDF User's Guide, appendix "File Format Specifications").
//! All numbers are big-endian. Offsets follow from the header alone, so that ranks need not
//! communicate.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ndarray::ArrayView3;

use super::schema::{Coordinate, Schema, TIME, Times};
use crate::grid::description::{AttributeValue, Attributes, attribute};
use crate::{Error, Result};

/// Tags and types of the format.
const DIMENSION: u64 = 10;
const VARIABLE: u64 = 11;
const ATTRIBUTE: u64 = 12;
const CHAR: u32 = 2;
const FLOAT: u32 = 5;
const DOUBLE: u32 = 6;
/// Size from which on a variable needs the 64-bit sizes of CDF-5.
const LARGE: u64 = 1 << 32;

/// NetCDF file that ranks write together.
#[derive(Debug)]
pub(crate) struct ClassicOutput {
    path: PathBuf,
    file: Mutex<File>,
    layout: FileLayout,
}

/// Variable of the file.
#[derive(Debug)]
struct Entry {
    name: String,
    dims: Vec<String>,
    attributes: Attributes,
    kind: u32,
    /// Size in bytes, per time if the variable has a time dim.
    bytes: u64,
    begin: u64,
}

impl Entry {
    fn has_time(&self) -> bool {
        self.dims.first().is_some_and(|dim| dim == TIME)
    }
}

/// Positions of all variables in the file.
#[derive(Debug)]
struct FileLayout {
    entries: Vec<Entry>,
    dims: Vec<(String, u64)>,
    /// Whether counts and sizes have 8 bytes (CDF-5).
    wide: bool,
    /// Size of a record in bytes.
    record: u64,
}

impl FileLayout {
    fn new(schema: &Schema, times: &Times<'_>) -> Self {
        let [rows, columns] = schema.grid.shape();
        let fixed = schema.fixed();
        let time_coordinates = times.coordinates(schema);
        let mut dims = Vec::new();
        if !time_coordinates.is_empty() {
            dims.push((TIME.to_string(), 0));
        }
        for (name, extent) in fixed.iter().flat_map(|coordinate| &coordinate.dims) {
            if dims.iter().all(|(known, _)| known != name) {
                dims.push((name.clone(), *extent as u64));
            }
        }
        let coordinate = |coordinate: &Coordinate| Entry {
            name: coordinate.name.clone(),
            dims: coordinate.dims.iter().map(|(dim, _)| dim.clone()).collect(),
            attributes: coordinate.attributes.clone(),
            kind: DOUBLE,
            bytes: match coordinate.dims.first() {
                Some((dim, _)) if dim == TIME => 8,
                _ => 8 * coordinate.values.len() as u64,
            },
            begin: 0,
        };
        let mut entries: Vec<Entry> = fixed.iter().map(coordinate).collect();
        entries.extend(time_coordinates.iter().map(coordinate));
        for (variable, output) in schema.variables.iter().enumerate() {
            let mut attributes = output.attributes.clone();
            attributes.extend(schema.auxiliary(variable, times.start.is_some()));
            let planes = schema.level_count(variable) * schema.members;
            entries.push(Entry {
                name: output.name.clone(),
                dims: schema
                    .dims(variable)
                    .into_iter()
                    .map(String::from)
                    .collect(),
                attributes,
                kind: FLOAT,
                bytes: 4 * (planes * rows * columns) as u64,
                begin: 0,
            });
        }
        let mut layout = Self {
            wide: entries.iter().any(|entry| entry.bytes >= LARGE),
            entries,
            dims,
            record: 0,
        };
        layout.place();
        layout
    }

    /// Assigns a position to every variable.
    fn place(&mut self) {
        // Offsets have a fixed width, so the header's length does not depend on them.
        let mut end = self.header(0).len() as u64;
        self.record = 0;
        for entry in self.entries.iter_mut().filter(|entry| !entry.has_time()) {
            entry.begin = end;
            end += entry.bytes;
        }
        for entry in self.entries.iter_mut().filter(|entry| entry.has_time()) {
            entry.begin = end;
            end += entry.bytes;
            self.record += entry.bytes;
        }
    }

    /// Encodes the header of a file with `times` times.
    fn header(&self, times: u64) -> Vec<u8> {
        let mut header = vec![b'C', b'D', b'F', if self.wide { 5 } else { 2 }];
        let put = |bytes: &mut Vec<u8>, number: u64| {
            if self.wide {
                bytes.extend(number.to_be_bytes())
            } else {
                bytes.extend((number as u32).to_be_bytes())
            }
        };
        // The width of tags and types is fixed.
        let tag = |bytes: &mut Vec<u8>, number: u64| bytes.extend((number as u32).to_be_bytes());
        let text = |bytes: &mut Vec<u8>, text: &str| {
            put(bytes, text.len() as u64);
            bytes.extend(text.as_bytes());
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        };
        let attributes = |bytes: &mut Vec<u8>, attributes: &Attributes, has_fill: bool| {
            let count = attributes.len() + usize::from(has_fill);
            tag(bytes, if count == 0 { 0 } else { ATTRIBUTE });
            put(bytes, count as u64);
            for (name, value) in attributes {
                text(bytes, name);
                match value {
                    AttributeValue::Text(value) => {
                        tag(bytes, CHAR.into());
                        text(bytes, value);
                    }
                    AttributeValue::Numbers(values) => {
                        tag(bytes, DOUBLE.into());
                        put(bytes, values.len() as u64);
                        bytes.extend(values.iter().flat_map(|value| value.to_be_bytes()));
                    }
                }
            }
            if has_fill {
                text(bytes, "_FillValue");
                tag(bytes, FLOAT.into());
                put(bytes, 1);
                bytes.extend(f32::NAN.to_be_bytes());
            }
        };
        put(&mut header, times);
        tag(&mut header, DIMENSION);
        put(&mut header, self.dims.len() as u64);
        for (name, size) in &self.dims {
            text(&mut header, name);
            put(&mut header, *size);
        }
        let conventions = vec![attribute("Conventions", "CF-1.11")];
        attributes(&mut header, &conventions, false);
        tag(&mut header, VARIABLE);
        put(&mut header, self.entries.len() as u64);
        for entry in &self.entries {
            text(&mut header, &entry.name);
            put(&mut header, entry.dims.len() as u64);
            for dim in &entry.dims {
                let index = self.dims.iter().position(|(name, _)| name == dim);
                put(&mut header, index.expect("a dim of the schema") as u64);
            }
            // Programs such as CDO recognise missing values, which are NaN, by the attribute only.
            attributes(&mut header, &entry.attributes, entry.kind == FLOAT);
            tag(&mut header, entry.kind.into());
            put(&mut header, entry.bytes);
            header.extend(entry.begin.to_be_bytes());
        }
        header
    }
}

impl ClassicOutput {
    /// Creates the file, or opens the one that another rank has created.
    pub(crate) fn open(
        path: &Path,
        creates: bool,
        schema: &Schema,
        times: &Times<'_>,
    ) -> Result<Self> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(creates)
            .truncate(creates);
        let file = options.open(path).map_err(|error| Error::io(path, error))?;
        let output = Self {
            path: path.into(),
            file: Mutex::new(file),
            layout: FileLayout::new(schema, times),
        };
        if creates {
            output.write_at(0, &output.layout.header(0))?;
        }
        Ok(output)
    }

    /// Writes a box of one level and one ensemble member of a variable.
    ///
    /// # Shapes
    /// `values` is [times, lat, lon], with the lengths of the ranges.
    pub(crate) fn write(
        &self,
        schema: &Schema,
        (variable, level): (usize, usize),
        member: usize,
        [times, rows, columns]: [Range<usize>; 3],
        values: ArrayView3<'_, f32>,
    ) -> Result<()> {
        let name = &schema.variables[variable].name;
        let entry = self.entry(name);
        let [height, width] = schema.grid.shape();
        let plane = (member * schema.level_count(variable) + level) as u64;
        for (time, field) in times.zip(values.outer_iter()) {
            let first = entry.begin + time as u64 * self.layout.record;
            let at = |row: usize| {
                let cell = (plane * height as u64 + row as u64) * width as u64;
                first + 4 * (cell + columns.start as u64)
            };
            if columns.len() == width {
                let bytes: Vec<u8> = field.iter().flat_map(|value| value.to_be_bytes()).collect();
                self.write_at(at(rows.start), &bytes)?;
                continue;
            }
            for (row, values) in rows.clone().zip(field.outer_iter()) {
                let bytes: Vec<u8> = values
                    .iter()
                    .flat_map(|value| value.to_be_bytes())
                    .collect();
                self.write_at(at(row), &bytes)?;
            }
        }
        Ok(())
    }

    /// Writes the coordinates and the number of times, and waits until everything is on disk.
    pub(crate) fn finish(&self, schema: &Schema, times: &Times<'_>) -> Result<()> {
        for coordinate in schema.fixed().into_iter().chain(times.coordinates(schema)) {
            let entry = self.entry(&coordinate.name);
            let values: Vec<[u8; 8]> = coordinate
                .values
                .iter()
                .map(|value| value.to_be_bytes())
                .collect();
            if !entry.has_time() {
                self.write_at(entry.begin, &values.concat())?;
                continue;
            }
            for (record, value) in values.iter().enumerate() {
                self.write_at(entry.begin + record as u64 * self.layout.record, value)?;
            }
        }
        let has_records = self.layout.entries.iter().any(Entry::has_time);
        let records = if has_records { times.seconds.len() } else { 0 };
        self.write_at(0, &self.layout.header(records as u64))?;
        self.sync()
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.file()
            .sync_all()
            .map_err(|error| Error::io(&self.path, error))
    }

    fn file(&self) -> MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, name: &str) -> &Entry {
        let mut entries = self.layout.entries.iter();
        entries
            .find(|entry| entry.name == name)
            .expect("a variable of the schema")
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut file = self.file();
        let written = file
            .seek(SeekFrom::Start(offset))
            .and_then(|_| file.write_all(bytes));
        written.map_err(|error| Error::io(&self.path, error))
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array3;

    use super::*;
    use crate::{Calendar, Channel, Fields, Grid, OpenConfig};

    fn schema(rows: usize, columns: usize) -> Schema {
        let grid = Grid::with_poles(rows, columns).unwrap();
        let channels = ["z@850", "t2m", "z@500"].map(|name| Channel::new(name.into()));
        Schema::new(&grid, Calendar::Gregorian, &channels).unwrap()
    }

    const TIMES: Times<'static> = Times {
        seconds: &[0.0, 3600.0],
        start: Some(0.0),
    };

    #[test]
    fn variables_begin_after_the_header_and_do_not_overlap() {
        for wide in [false, true] {
            let mut layout = FileLayout::new(&schema(5, 3), &TIMES);
            layout.wide = wide;
            layout.place();
            let mut end = layout.header(7).len() as u64;
            let (records, fixed): (Vec<_>, Vec<_>) =
                layout.entries.iter().partition(|entry| entry.has_time());
            for entry in fixed.into_iter().chain(records) {
                assert_eq!((entry.begin, entry.begin % 4), (end, 0), "{}", entry.name);
                end += entry.bytes;
            }
        }
        // Sizes just below and above 4 GiB of z per time.
        assert!(!FileLayout::new(&schema(20_000, 26_843), &TIMES).wide);
        assert!(FileLayout::new(&schema(20_000, 26_844), &TIMES).wide);
    }

    #[test]
    fn fields_have_the_fill_value_of_missing_values() {
        let header = FileLayout::new(&schema(5, 3), &TIMES).header(2);
        let kind_and_count = [0, 0, 0, FLOAT as u8, 0, 0, 0, 1];
        let fill = [
            &b"_FillValue\0\0"[..],
            &kind_and_count,
            &f32::NAN.to_be_bytes(),
        ]
        .concat();
        let found = header.windows(fill.len());
        // Two variables, and no coordinate.
        assert_eq!(found.filter(|bytes| *bytes == fill).count(), 2);
    }

    #[test]
    fn files_with_wide_sizes_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wide.nc");
        let schema = schema(5, 3);
        let mut output = ClassicOutput::open(&path, true, &schema, &TIMES).unwrap();
        output.layout.wide = true;
        output.layout.place();
        let value =
            |(time, row, column): (usize, usize, usize)| (100 * time + 10 * row + column) as f32;
        for (channel, place) in schema.places.iter().enumerate() {
            let values = Array3::from_shape_fn((2, 5, 3), value) + 1000.0 * channel as f32;
            // The columns of one rank, then those of another.
            for columns in [0..2, 2..3] {
                let part = values.slice(ndarray::s![.., .., columns.clone()]);
                output
                    .write(&schema, *place, 0, [0..2, 0..5, columns], part)
                    .unwrap();
            }
        }
        output.finish(&schema, &TIMES).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[3], 5);
        let fields = OpenConfig::of_channels(&["z@850", "t2m", "z@500"])
            .open(&path)
            .unwrap();
        assert_eq!(fields.times(), TIMES.seconds);
        let found = fields.read([0..2, 0..3, 0..5, 0..3]).unwrap();
        for ((time, channel, row, column), found) in found.indexed_iter() {
            assert_eq!(*found, value((time, row, column)) + 1000.0 * channel as f32);
        }
    }
}
