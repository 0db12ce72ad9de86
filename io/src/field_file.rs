use std::ops::Range;
use std::path::{Path, PathBuf};

use halocline_core::IndexBox;
use hdf5_metno::dataset::Layout;
use hdf5_metno::types::{FixedAscii, FixedUnicode, TypeDescriptor, VarLenAscii, VarLenUnicode};
use hdf5_metno::{Dataset, Hyperslab, SliceOrIndex};
use ndarray::{Array4, ArrayD};

use crate::{Error, Grid, Result, names};

pub(crate) const FIELDS: &str = "fields";
pub(crate) const TIMESTAMP: &str = "timestamp";
pub(crate) const CHANNEL: &str = "channel";
pub(crate) const LAT: &str = "lat";
pub(crate) const LON: &str = "lon";
/// The dimension scales, in the order of the dims of [`FIELDS`].
pub(crate) const SCALES: [&str; 4] = [TIMESTAMP, CHANNEL, LAT, LON];

/// The longest channel name, in bytes, that is read from strings of fixed length.
const NAME: usize = 256;

/// How much two steps of a uniform series may differ, as a fraction of the step.
const STEP_TOLERANCE: f64 = 1e-4;

/// What to do about values that are not there: NaN, or infinite.
#[derive(burn::config::Config, Debug, Copy, PartialEq, Eq)]
pub enum Missing {
    /// A read that meets one is an error.
    Reject,
    /// They are read as they are, and statistics leave NaN out.
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
/// The last four are the dimension scales of the first, so that h5py, netCDF and xarray find them. A reader does
/// without that, and takes latitudes in either direction, any number type for coordinates, and any kind of string.
///
/// HDF5 works on one thread at a time; calls from several threads wait for each other.
///
/// # Example
/// ```
/// use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// use ndarray::Array3;
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
    missing: Missing,
}

impl FieldFile {
    /// Opens a file and checks that it has the layout.
    ///
    /// # Errors
    /// A file that is not there, is not HDF5 or is truncated; a dataset that is missing or has another shape or
    /// type; coordinates that are no grid; times that do not rise.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // HDF5's own message for a file that is not there is a page long.
        std::fs::File::open(path).map_err(|e| Error::io(path, e))?;
        let file = hdf5_metno::File::open(path).map_err(|e| Error::Unreadable {
            path: path.into(),
            cause: e.to_string(),
        })?;
        let mut found = file.member_names().map_err(|e| Error::hdf5(path, "/", e))?;
        found.sort();
        let dataset = |name: &'static str| {
            if !found.iter().any(|member| member == name) {
                return Err(Error::MissingDataset {
                    path: path.into(),
                    dataset: name,
                    found: found.clone(),
                });
            }
            file.dataset(name).map_err(|e| Error::hdf5(path, name, e))
        };
        let fields = dataset(FIELDS)?;
        let shape = check_fields(path, &fields)?;
        // Every time, channel, row and column has some bytes, and coordinates are read at once.
        let size = std::fs::metadata(path)
            .map_err(|e| Error::io(path, e))?
            .len();
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
            scale
                .read_raw::<f64>()
                .map_err(|e| Error::hdf5(path, name, e))
        });
        let channel = dataset(CHANNEL)?;
        check_scale(path, &channel, CHANNEL, &shape)?;
        let times = times?;
        check_times(path, &times)?;
        Ok(Self {
            fields,
            times,
            channels: read_names(path, &channel)?,
            grid: Grid::new(lat?, lon?).map_err(|error| coordinates(path, error))?,
            missing: Missing::Allow,
            path: path.into(),
        })
    }

    /// The same file with another way to treat missing values; [`Missing::Allow`] unless set.
    #[must_use]
    pub fn with_missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// Where the file lies.
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
    /// Fewer than two times, and steps that differ: the first that does is named.
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
                    expected: format!("{step} s, as at the beginning of the file"),
                });
            }
        }
        Ok(step)
    }

    /// Reads a box of cells: ranges of times, channels, rows and columns. Nothing else is read but whole chunks.
    ///
    /// # Shapes
    /// The result is [times, channels, rows, columns] of the ranges.
    ///
    /// # Errors
    /// A box that is not inside the file, a chunk that is damaged, and missing values if they are
    /// [rejected](Missing::Reject).
    pub fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        let shape = self.shape();
        let text = IndexBox::new(cells.to_vec()).to_string();
        if cells
            .iter()
            .zip(shape)
            .any(|(range, size)| range.start > range.end || range.end > size)
        {
            let expected = format!("a shape that holds the cells {text}");
            return Err(self.shape_error(FIELDS, format!("{shape:?}"), expected));
        }
        let extents = cells.each_ref().map(ExactSizeIterator::len);
        if extents.contains(&0) {
            return Ok(Array4::zeros(extents));
        }
        let ranges: Vec<SliceOrIndex> = cells.iter().cloned().map(Into::into).collect();
        let values: ArrayD<f32> = self
            .fields
            .read_slice(Hyperslab::from(ranges))
            .map_err(|e| Error::Hdf5 {
                path: self.path.clone(),
                dataset: FIELDS,
                cells: text,
                cause: format!("{e}; is the file damaged?"),
            })?;
        let values = values
            .into_shape_with_order(extents)
            .expect("HDF5 gives the selected shape");
        if self.missing == Missing::Reject {
            self.check_values(&values, &cells)?;
        }
        Ok(values)
    }

    fn check_values(&self, values: &Array4<f32>, cells: &[Range<usize>; 4]) -> Result<()> {
        let Some((at, value)) = values.indexed_iter().find(|(_, value)| !value.is_finite()) else {
            return Ok(());
        };
        let at = [at.0, at.1, at.2, at.3];
        Err(Error::Value {
            path: self.path.clone(),
            dataset: FIELDS,
            index: at
                .iter()
                .zip(cells)
                .map(|(at, range)| at + range.start)
                .collect(),
            found: value.to_string(),
            expected: "a finite value (Missing::Allow reads missing ones as they are)".into(),
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

fn check_fields(path: &Path, fields: &Dataset) -> Result<[usize; 4]> {
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
    if !matches!(kind, TypeDescriptor::Float(_)) {
        return Err(error(
            format!("values of type {kind}"),
            "floating point values",
        ));
    }
    let shape = fields.shape();
    shape
        .try_into()
        .map_err(|shape| error(format!("{shape:?}"), "4 dims [time, channel, lat, lon]"))
}

/// A scale has one value per index of its dim.
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

/// Reads strings of the four kinds that HDF5 knows.
fn read_names(path: &Path, dataset: &Dataset) -> Result<Vec<String>> {
    fn read<T: hdf5_metno::H5Type + ToString>(
        dataset: &Dataset,
    ) -> hdf5_metno::Result<Vec<String>> {
        let names: Vec<T> = dataset.read_raw()?;
        Ok(names.iter().map(ToString::to_string).collect())
    }
    let kind = dataset.dtype().and_then(|dtype| dtype.to_descriptor());
    // Each takes the room of the longest that is read, however short it is in the file.
    let size = std::fs::metadata(path).map_err(|error| Error::io(path, error))?;
    let most = (1 << 20) + size.len().saturating_mul(16);
    if dataset.size().saturating_mul(NAME) as u64 > most {
        return Err(Error::Hdf5 {
            path: path.into(),
            dataset: CHANNEL,
            cells: String::new(),
            cause: format!("{} names in a file of {} bytes", dataset.size(), size.len()),
        });
    }
    // As far as it is known where they lie, what HDF5 would trust is checked.
    let in_heap = matches!(
        kind,
        Ok(TypeDescriptor::VarLenUnicode | TypeDescriptor::VarLenAscii)
    );
    if let (true, Layout::Contiguous, Some(offset)) = (in_heap, dataset.layout(), dataset.offset())
    {
        let read = || {
            let mut file = std::fs::File::open(path)?;
            let usual = names::can_read(&mut file)?;
            usual
                .then(|| names::read(&mut file, offset, dataset.size()))
                .transpose()
        };
        let names = read().map_err(|error: std::io::Error| Error::Hdf5 {
            path: path.into(),
            dataset: CHANNEL,
            cells: String::new(),
            cause: error.to_string(),
        })?;
        if let Some(names) = names {
            return Ok(names);
        }
    }
    let names = kind.and_then(|kind| match kind {
        TypeDescriptor::VarLenUnicode => read::<VarLenUnicode>(dataset),
        TypeDescriptor::VarLenAscii => read::<VarLenAscii>(dataset),
        TypeDescriptor::FixedUnicode(_) => read::<FixedUnicode<NAME>>(dataset),
        TypeDescriptor::FixedAscii(_) => read::<FixedAscii<NAME>>(dataset),
        other => Err(format!("expected strings, found {other}").into()),
    });
    names.map_err(|e| Error::hdf5(path, CHANNEL, e))
}

/// Says in which file coordinates that are no grid were found.
fn coordinates(path: &Path, error: Error) -> Error {
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
