use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use halocline_core::IndexBox;
use hdf5_metno::{Dataset, H5Type, Hyperslab, SliceOrIndex};
use ndarray::{Array4, ArrayD};

use crate::attributes::Attributes;
use crate::packing::Packing;
use crate::{Error, Grid, Result, inside, names, time_units};

pub(crate) const FIELDS: &str = "fields";
pub(crate) const TIMESTAMP: &str = "timestamp";
pub(crate) const CHANNEL: &str = "channel";
pub(crate) const LAT: &str = "lat";
pub(crate) const LON: &str = "lon";
/// The dimension scales, in the order of the dims of [`FIELDS`].
pub(crate) const SCALES: [&str; 4] = [TIMESTAMP, CHANNEL, LAT, LON];

/// Largest difference between two steps of a uniform time series, as a fraction of the step.
const STEP_TOLERANCE: f64 = 1e-4;

/// Handling of missing values: NaN, infinite values, and those equal to the `_FillValue` or a
/// `missing_value` of the file.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{FieldFile, FieldWriter, Grid, Missing, WriterConfig};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("sst.h5");
/// let grid = Grid::cell_centred(2, 4)?;
/// let mut writer = FieldWriter::create(&path, &grid, &["sst"], &WriterConfig::new())?;
/// writer.append(0.0, Array3::from_elem((1, 2, 4), f32::NAN).view())?; // land
/// writer.finish()?;
///
/// let cells = || [0..1, 0..1, 0..2, 0..4];
/// let file = FieldFile::open(&path)?;
/// assert!(file.read(cells()).is_err());
/// let file = file.with_missing(Missing::Allow);
/// assert!(file.read(cells())?[[0, 0, 1, 3]].is_nan());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(burn::config::Config, Debug, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Reading one is an error that names its index. The default everywhere.
    Reject,
    /// They are read as NaN (infinite values as they are), and statistics leave NaN out.
    Allow,
}

/// An open field file: fields on a latitude-longitude grid over time, in Makani's HDF5 layout.
///
/// | dataset | type | shape | content |
/// |---|---|---|---|
/// | `fields` | f32 | [time, channel, lat, lon] | values in the units of the channels |
/// | `timestamp` | f64 | \[time\] | seconds since 1970-01-01 UTC |
/// | `channel` | string | \[channel\] | names |
/// | `lat` | f64 | \[lat\] | degrees north, from 90 to −90 |
/// | `lon` | f64 | \[lon\] | degrees east, from 0 to below 360 |
///
/// The last four are the dimension scales of the first, so that h5py, netCDF and xarray find them.
/// A reader does not depend on this, and accepts latitudes in either direction, longitudes from any
/// start (see [`Grid::new`]), any number type for coordinates, and any kind of string.
///
/// It supports these attributes of the CF conventions. Other values of them are errors.
///
/// | attribute | of | meaning |
/// |---|---|---|
/// | `units` | `timestamp` | `<unit> since <date>`, from days to nanoseconds; without it the numbers are seconds since 1970-01-01 UTC |
/// | `calendar` | `timestamp` | `standard`, `gregorian` or `proleptic_gregorian` |
/// | `_FillValue`, `missing_value` | `fields` | values that stand for missing ones, see [`Missing`] |
/// | `scale_factor`, `add_offset` | `fields` | values are `scale_factor · stored + add_offset`, computed in f64; stored may be integers of at most 32 bits |
///
/// All five datasets store their values in the file itself. External and soft links, external
/// storage and virtual datasets are refused: through them, a file could make the reader read any
/// file of the machine.
///
/// HDF5 works on one thread at a time; calls from several threads wait for each other.
///
/// # Example
/// ```
/// use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// use halocline_io::ndarray::Array3;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("2018.h5");
/// let grid = Grid::with_poles(7, 12)?;
/// let mut writer = FieldWriter::create(&path, &grid, &["u10m", "v10m"], &WriterConfig::new())?;
/// for hour in 0..4 {
///     let field = Array3::from_elem((2, 7, 12), hour as f32); // [channel, lat, lon]
///     writer.append(f64::from(hour) * 3600.0, field.view())?;
/// }
/// writer.finish()?;
///
/// let file = FieldFile::open(&path)?;
/// assert_eq!(file.shape(), [4, 2, 7, 12]);
/// assert_eq!(file.channels(), ["u10m", "v10m"]);
/// assert_eq!((file.times()[3], file.time_step()?), (10800.0, 3600.0)); // s
/// assert_eq!(file.grid().lat()[0], 90.0);
/// let northern = file.read([1..3, 0..2, 0..4, 0..12])?; // [time, channel, lat, lon]
/// assert_eq!(northern[[1, 0, 3, 5]], 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FieldFile {
    path: PathBuf,
    fields: Dataset,
    times: Vec<f64>,
    channels: Vec<String>,
    grid: Grid,
    packing: Packing,
    missing: Missing,
}

impl FieldFile {
    /// Opens a file and checks its layout.
    ///
    /// # Errors
    /// A file that does not exist, is not HDF5 or is truncated; a dataset that is missing, has
    /// another shape or type, or stores its values elsewhere; coordinates that are not a grid;
    /// times that do not rise; attributes that are not supported.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let size = check_is_file(path)?;
        let file = hdf5_metno::File::open(path).map_err(|e| Error::Unreadable {
            path: path.into(),
            cause: e.to_string(),
        })?;
        let members = inside::members(path, &file)?;
        let dataset = |name: &'static str| {
            let Some((_, link)) = members.iter().find(|(member, _)| member == name) else {
                return Err(Error::MissingDataset {
                    path: path.into(),
                    dataset: name,
                    found: members.iter().map(|(member, _)| member.clone()).collect(),
                });
            };
            inside::open(path, &file, name, *link)
        };
        let fields = dataset(FIELDS)?;
        let packing = Packing::of(path, FIELDS, &fields)?;
        let shape = check_fields(path, &fields, &packing)?;
        // An extent beyond the size of the file is damage: each index has some bytes. Coordinates
        // are read whole, and would take memory for it.
        if let Some(extent) = shape.iter().find(|extent| **extent as u64 > size) {
            return Err(Error::Shape {
                path: path.into(),
                dataset: FIELDS,
                found: format!("{shape:?}, with an extent of {extent}"),
                expected: format!("extents that a file of {size} bytes can hold"),
            });
        }
        let [times, lat, lon] = [TIMESTAMP, LAT, LON].map(|name| {
            let scale = dataset(name)?;
            check_scale(path, &scale, name, &shape)?;
            let packing = Packing::of(path, name, &scale)?;
            let stored = scale
                .read_raw::<f64>()
                .map_err(|e| Error::hdf5(path, name, e))?;
            let values = stored
                .into_iter()
                .map(|number| packing.value(number))
                .collect();
            match name {
                TIMESTAMP => time_units::seconds(&Attributes::of(path, name, &scale)?, values),
                _ => Ok(values),
            }
        });
        let channel = dataset(CHANNEL)?;
        check_scale(path, &channel, CHANNEL, &shape)?;
        let times = times?;
        check_times(path, &times)?;
        Ok(Self {
            fields,
            times,
            channels: names::of_dataset(path, CHANNEL, &channel)?,
            grid: Grid::new(lat?, lon?).map_err(|error| in_file(path, error))?,
            packing,
            missing: Missing::Reject,
            path: path.into(),
        })
    }

    /// Sets the handling of missing values. Default [`Missing::Reject`].
    #[must_use]
    pub fn with_missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of times, channels, rows and columns.
    pub fn shape(&self) -> [usize; 4] {
        let [rows, columns] = self.grid.shape();
        [self.times.len(), self.channels.len(), rows, columns]
    }

    /// The times, in seconds since 1970-01-01 UTC.
    pub fn times(&self) -> &[f64] {
        &self.times
    }

    /// The names of the channels.
    pub fn channels(&self) -> &[String] {
        &self.channels
    }

    /// The grid.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// The time between two fields, in seconds.
    ///
    /// # Errors
    /// Fewer than two times; steps that differ, of which the first is named.
    pub fn time_step(&self) -> Result<f64> {
        let [first, second, ..] = self.times[..] else {
            return Err(self.shape_error(
                TIMESTAMP,
                format!("{:?}", [self.times.len()]),
                "at least two times",
            ));
        };
        let step = second - first;
        for (index, pair) in self.times.windows(2).enumerate() {
            let this = pair[1] - pair[0];
            if (this - step).abs() > STEP_TOLERANCE * step {
                return Err(Error::Value {
                    path: self.path.clone(),
                    dataset: TIMESTAMP,
                    index: vec![index + 1],
                    found: format!("a time step of {this} s"),
                    expected: format!(
                        "{step} s, as at the beginning of the file; write each stretch of equal steps into a \
                         file of its own, of which a FieldDataset takes several"
                    ),
                });
            }
        }
        Ok(step)
    }

    /// Reads a box of cells, given by ranges of times, channels, rows and columns. Only the chunks
    /// that it meets are read.
    ///
    /// # Shapes
    /// The result is [times, channels, rows, columns] of the ranges.
    ///
    /// # Errors
    /// A box that is not inside the file; a damaged chunk; missing values, if they are
    /// [rejected](Missing::Reject).
    pub fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        let shape = self.shape();
        if cells
            .iter()
            .zip(shape)
            .any(|(range, size)| range.start > range.end || range.end > size)
        {
            let cells = IndexBox::new(cells.to_vec());
            let expected = format!("a shape that holds the cells {cells}");
            return Err(self.shape_error(FIELDS, format!("{shape:?}"), expected));
        }
        let extents = cells.each_ref().map(ExactSizeIterator::len);
        if extents.contains(&0) {
            return Ok(Array4::zeros(extents));
        }
        if self.packing.is_plain() {
            let values = self.stored::<f32>(&cells)?;
            self.check(&values, &cells, |value| {
                (!value.is_finite()).then(|| value.to_string())
            })?;
            return Ok(values);
        }
        let stored = self.stored::<f64>(&cells)?;
        self.check(&stored, &cells, |number| {
            match self.packing.missing(number) {
                Some(sentinel) => Some(sentinel.to_string()),
                None => {
                    let value = self.packing.value(number) as f32;
                    (!value.is_finite()).then(|| value.to_string())
                }
            }
        })?;
        Ok(stored.mapv(|number| self.packing.value(number) as f32))
    }

    /// Reads a box of numbers as they are stored.
    fn stored<T: H5Type>(&self, cells: &[Range<usize>; 4]) -> Result<Array4<T>> {
        let ranges: Vec<SliceOrIndex> = cells.iter().cloned().map(Into::into).collect();
        let values: ArrayD<T> = self
            .fields
            .read_slice(Hyperslab::from(ranges))
            .map_err(|e| Error::Hdf5 {
                path: self.path.clone(),
                dataset: FIELDS,
                cells: IndexBox::new(cells.to_vec()).to_string(),
                cause: format!("{e}; is the file damaged?"),
            })?;
        let extents = cells.each_ref().map(ExactSizeIterator::len);
        Ok(values
            .into_shape_with_order(extents)
            .expect("HDF5 gives the selected shape"))
    }

    /// Checks that a box has no missing number, unless they are allowed. `missing` describes a
    /// number if it is missing.
    fn check<T: Copy>(
        &self,
        numbers: &Array4<T>,
        cells: &[Range<usize>; 4],
        missing: impl Fn(T) -> Option<String>,
    ) -> Result<()> {
        if self.missing == Missing::Allow {
            return Ok(());
        }
        let found = numbers
            .indexed_iter()
            .find_map(|(index, &number)| Some((index, missing(number)?)));
        let Some((index, found)) = found else {
            return Ok(());
        };
        let index = [index.0, index.1, index.2, index.3];
        Err(Error::Value {
            path: self.path.clone(),
            dataset: FIELDS,
            index: index
                .iter()
                .zip(cells)
                .map(|(index, range)| index + range.start)
                .collect(),
            found,
            expected: "a finite value (Missing::Allow reads missing ones as NaN)".into(),
        })
    }

    fn shape_error(
        &self,
        dataset: &'static str,
        found: String,
        expected: impl Into<String>,
    ) -> Error {
        Error::Shape {
            path: self.path.clone(),
            dataset,
            found,
            expected: expected.into(),
        }
    }
}

/// Checks that `path` is a regular file, and returns its size.
fn check_is_file(path: &Path) -> Result<u64> {
    // HDF5's message for a missing file is a page long, and opening a pipe without a writer never
    // ends.
    let found = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if found.is_file() {
        return Ok(found.len());
    }
    let (kind, found) = match found.is_dir() {
        true => (ErrorKind::IsADirectory, "a folder"),
        false => (ErrorKind::InvalidInput, "not a regular file"),
    };
    let cause = format!("it is {found}; expected a field file, one of HDF5 such as 2018.h5");
    Err(Error::io(path, std::io::Error::new(kind, cause)))
}

/// Checks the type of the fields and their number of dims, and returns their shape.
fn check_fields(path: &Path, fields: &Dataset, packing: &Packing) -> Result<[usize; 4]> {
    let error = |found, expected: &str| Error::Shape {
        path: path.into(),
        dataset: FIELDS,
        found,
        expected: expected.into(),
    };
    let kind = fields
        .dtype()
        .and_then(|dtype| dtype.to_descriptor())
        .map_err(|e| Error::hdf5(path, FIELDS, e))?;
    if !packing.permits(&kind) {
        return Err(error(
            format!("values of type {kind}"),
            "floating point values, or integers of at most 32 bits with scale_factor or add_offset",
        ));
    }
    let shape = fields.shape();
    shape
        .try_into()
        .map_err(|shape| error(format!("{shape:?}"), "4 dims [time, channel, lat, lon]"))
}

/// Checks that a scale has one value per index of its dim.
fn check_scale(
    path: &Path,
    scale: &Dataset,
    name: &'static str,
    fields: &[usize; 4],
) -> Result<()> {
    let dim = SCALES
        .iter()
        .position(|&scale| scale == name)
        .expect("a scale of the layout");
    if scale.shape() == [fields[dim]] {
        return Ok(());
    }
    Err(Error::Shape {
        path: path.into(),
        dataset: name,
        found: format!("{:?}", scale.shape()),
        expected: format!("{:?} for fields {fields:?}", [fields[dim]]),
    })
}

fn check_times(path: &Path, times: &[f64]) -> Result<()> {
    let mut before = f64::NEG_INFINITY;
    for (index, &time) in times.iter().enumerate() {
        if !time.is_finite() || time <= before {
            return Err(Error::Value {
                path: path.into(),
                dataset: TIMESTAMP,
                index: vec![index],
                found: time.to_string(),
                expected: format!("a time after {before}, in seconds"),
            });
        }
        before = time;
    }
    Ok(())
}

/// Adds the path of the file to an error about its coordinates.
fn in_file(path: &Path, error: Error) -> Error {
    match error {
        Error::Argument {
            argument,
            got,
            expected,
        } => Error::Shape {
            path: path.into(),
            dataset: argument,
            found: got,
            expected,
        },
        other => other,
    }
}
