use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use halocline_core::IndexBox;
use hdf5_metno::types::{FloatSize, TypeDescriptor};
use hdf5_metno::{Dataset, H5Type, Hyperslab, SliceOrIndex};
use ndarray::{Array4, ArrayD};

use super::cf::axis::{AREA, CELLS};
use super::cf::variable::stamp;
use super::data_json::DataJson;
use super::hdf5::attributes::DatasetAttributes;
use super::hdf5::chunked::Chunked;
use super::hdf5::{inside, names};
use super::layout::{CHANNEL, FIELDS, LAT, LON, SCALES, TIMESTAMP};
use super::packing::{NumberType, Packing, Stored};
use crate::attributes::Attributes;
use crate::fields::traffic::{Counter, covered};
use crate::fields::{check_box, in_file};
use crate::ranks::alike::{fingerprint, modified};
use crate::time::{times, units};
use crate::{Calendar, Channel, Error, Fields, Gaps, Grid, Missing, Result, Traffic};

/// Open field file: fields on a latitude-longitude grid over time, in Makani's HDF5 layout.
///
/// | dataset | type | shape | content |
/// |---|---|---|---|
/// | `fields` | f32 | [time, channel, lat, lon] | values in the units of the channels |
/// | `timestamp` | f64 | \[time\] | seconds since 1970-01-01 UTC |
/// | `channel` | string | \[channel\] | names |
/// | `lat` | f64 | \[lat\] | degrees north, from 90 to −90 |
/// | `lon` | f64 | \[lon\] | degrees east, from 0 to below 360 |
///
/// The last four are attached to the first as dimension scales, where h5py, netCDF and xarray find
/// them. Reading does not depend on this, and accepts latitudes in either direction, longitudes
/// from any start (see [`Grid::new`]), any dtype for coordinates, and any kind of string.
///
/// Coordinates that a file lacks are those of a `data.json` of Makani beside the file, in the folder
/// above, or in the folder `metadata` there. Times start with the year that is the name of the file
/// (`2018.h5`), and lie `dhours` apart.
///
/// The positions of [cells](Grid::cells) that have their own are `cell_latitude` and
/// `cell_longitude`, in degrees, and their areas are `cell_area`: of shape \[lon\] for the cells of a
/// single row, and \[lat, lon\] on a curvilinear grid.
///
/// These attributes of the CF conventions are supported. Other values of them are errors.
///
/// | attribute | of | meaning |
/// |---|---|---|
/// | `units` | `timestamp` | `<unit> since <date>`, from days to nanoseconds; without it the numbers are seconds since 1970-01-01 UTC |
/// | `calendar` | `timestamp` | one of the calendars of [`Calendar`](crate::Calendar) |
/// | `_FillValue`, `missing_value` | `fields` | values that mark missing ones, see [`Missing`] |
/// | `scale_factor`, `add_offset` | `fields` | values are `scale_factor · stored + add_offset`, computed in f64; stored may be integers of at most 32 bits |
///
/// All datasets must store their values in the file itself. External and soft links, external
/// storage and virtual datasets are refused, because a file could use them to make the reader read
/// any file on the machine.
///
/// Chunks of f32 of at most 64 MiB, either unfiltered or with HDF5's own shuffle, deflate and
/// checksum filters, are read and decompressed on all threads. Other data is read by the HDF5
/// library, which serializes calls from different threads.
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
    /// The same dataset, readable on all threads at once, if it is supported.
    chunked: Option<Chunked>,
    times: Vec<f64>,
    calendar: Calendar,
    channels: Vec<String>,
    grid: Grid,
    packing: Packing,
    missing: Missing,
    gaps: Gaps,
    traffic: Counter,
    /// Extents of a chunk.
    chunk: Option<Vec<usize>>,
    width: usize,
    /// Average number of bytes in the file per byte of values.
    compression: f64,
}

impl FieldFile {
    /// Opens a file and checks its layout.
    ///
    /// # Errors
    /// A file that does not exist, is not HDF5 or is truncated; a dataset that is missing, has
    /// another shape or type, or stores its values elsewhere; a `data.json` in its place that cannot
    /// be read or does not fit; coordinates that do not form a grid; times that do not increase;
    /// attribute values that are not supported.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let size = check_is_file(path)?;
        let found = stamp(path);
        let file = hdf5_metno::File::open(path).map_err(|e| match e.to_string() {
            cause if size > 0 && cause.contains("signature not found") => {
                let cause = "it is neither NetCDF nor HDF5, nor a Zarr store";
                Error::io(path, std::io::Error::new(ErrorKind::InvalidData, cause))
            }
            cause => Error::Unreadable {
                path: path.into(),
                format: "HDF5 file",
                cause,
            },
        })?;
        let members = inside::members(path, &file)?;
        let dataset = |name: &'static str| {
            let Some((_, link)) = members.iter().find(|(member, _)| member == name) else {
                return Err(Error::MissingDataset {
                    path: path.into(),
                    dataset: name.into(),
                    found: members.iter().map(|(member, _)| member.clone()).collect(),
                });
            };
            inside::open(path, &file, name, *link)
        };
        let fields = dataset(FIELDS)?;
        let (packing, _) = packing_of(path, FIELDS, &fields)?;
        let shape = check_fields(path, &fields, &packing)?;
        // An extent larger than the file means damage, since each index takes up some bytes.
        // Checked first, because coordinates of that length would be read whole into memory.
        if let Some(extent) = shape.iter().find(|extent| **extent as u64 > size) {
            let found = format!("{shape:?}, with an extent of {extent}");
            let expected = format!("extents that a file of {size} bytes can hold");
            return Err(Error::shape(path, FIELDS, found, expected));
        }
        let coordinate = |name: &'static str| {
            let scale = dataset(name)?;
            check_scale(path, &scale, name, &shape)?;
            // As above, for positions of the cells of rows and columns.
            if scale.size() as u64 > size {
                let found = format!("{} values", scale.size());
                let expected = format!("values that a file of {size} bytes can hold");
                return Err(Error::shape(path, name, found, expected));
            }
            let (packing, attributes) = packing_of(path, name, &scale)?;
            let stored = scale
                .read_raw::<f64>()
                .map_err(|e| Error::data(path, name, e))?;
            let values = stored
                .into_iter()
                .map(|number| packing.value(number))
                .collect();
            match name {
                TIMESTAMP => {
                    let units = attributes.text("units")?;
                    let seconds = "seconds since 1970-01-01";
                    units::seconds(&attributes, units.is_none().then_some(seconds), values)
                }
                _ => Ok((Calendar::Gregorian, values)),
            }
        };
        let has = |name: &str| members.iter().any(|(member, _)| member == name);
        let json = if SCALES.into_iter().all(has) {
            None
        } else {
            DataJson::near(path)?
        };
        let json_without = |names: &[&str]| {
            json.as_ref()
                .filter(|_| names.iter().any(|name| !has(name)))
        };
        let times = match json_without(&[TIMESTAMP]) {
            Some(json) => {
                let times = json.times(path, shape[0]);
                times.map(|times| (Calendar::Gregorian, times))
            }
            None => coordinate(TIMESTAMP),
        };
        let [lat, lon] = [LAT, LON].map(coordinate);
        let grid = || {
            if let Some(json) = json_without(&[LAT, LON]) {
                return json.grid(path, [shape[2], shape[3]]);
            }
            if CELLS.into_iter().all(has) {
                let [lat, lon] = CELLS.map(coordinate);
                let grid = Grid::curvilinear([shape[2], shape[3]], lat?.1, lon?.1)?;
                if has(AREA) {
                    return grid.with_cell_areas(coordinate(AREA)?.1);
                }
                return Ok(grid);
            }
            Grid::new(lat?.1, lon?.1)
        };
        let channels = match json_without(&[CHANNEL]) {
            Some(json) => json.channels(path, shape[1])?,
            None => {
                let channel = dataset(CHANNEL)?;
                check_scale(path, &channel, CHANNEL, &shape)?;
                names::of_dataset(path, CHANNEL, &channel)?
            }
        };
        let (calendar, times) = times?;
        times::check_rising(path, TIMESTAMP, &times, calendar)?;
        let width = fields.dtype().map_or(1, |dtype| dtype.size());
        let bytes = fields.size().saturating_mul(width).max(1);
        let plain = packing.is_plain().then_some(&fields);
        Ok(Self {
            chunked: plain.and_then(|fields| Chunked::open(path, fields, found)),
            chunk: fields.chunk(),
            width,
            compression: fields.storage_size() as f64 / bytes as f64,
            gaps: Gaps::Reject,
            traffic: Counter::default(),
            fields,
            times,
            calendar,
            channels,
            grid: grid().map_err(|error| in_file(path, error))?,
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

    /// Sets the handling of uneven time steps. Default [`Gaps::Reject`].
    #[must_use]
    pub fn with_gaps(mut self, gaps: Gaps) -> Self {
        self.gaps = gaps;
        self
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the numbers of times, channels, rows and columns.
    pub fn shape(&self) -> [usize; 4] {
        let [rows, columns] = self.grid.shape();
        [self.times.len(), self.channels.len(), rows, columns]
    }

    /// Returns the times, in seconds since 1970-01-01 UTC.
    pub fn times(&self) -> &[f64] {
        &self.times
    }

    /// Returns the names of the channels.
    pub fn channels(&self) -> &[String] {
        &self.channels
    }

    /// Returns the grid.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Returns the time between consecutive fields, in seconds.
    ///
    /// # Errors
    /// Fewer than two times; uneven steps, unless [gaps are permitted](Self::with_gaps). The error
    /// names the first step that differs.
    pub fn time_step(&self) -> Result<f64> {
        times::step(&self.path, TIMESTAMP, &self.times, self.gaps)
    }

    /// Reads a box of cells, given by ranges of times, channels, rows and columns. Reads only the
    /// chunks that intersect it.
    ///
    /// # Shapes
    /// Returns [times, channels, rows, columns], with the lengths of the ranges.
    ///
    /// # Errors
    /// A box that exceeds the file; a damaged chunk; missing values, if they are
    /// [rejected](Missing::Reject).
    pub fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, FIELDS, &cells)?;
        let extents = cells.each_ref().map(ExactSizeIterator::len);
        if extents.contains(&0) {
            return Ok(Array4::zeros(extents));
        }
        // On failure, falls back to the library, which reports the error.
        let by_all = self.chunked.as_ref().and_then(|fields| fields.read(&cells));
        let numbers = match by_all {
            Some(numbers) => Stored::Single(numbers),
            None if self.packing.is_plain() => Stored::Single(self.stored(&cells)?),
            None => Stored::Double(self.stored(&cells)?),
        };
        let decoded = covered(&cells, &self.shape(), self.chunk.as_deref()) * self.width as u64;
        self.traffic.add(
            (decoded as f64 * self.compression).round() as u64,
            decoded,
            covered(&cells, &self.shape(), None) * self.width as u64,
        );
        let place = (&*self.path, FIELDS);
        self.packing.values(numbers, self.missing, place, &cells)
    }

    /// Reads a box of numbers in their stored type.
    fn stored<T: H5Type>(&self, cells: &[Range<usize>; 4]) -> Result<Array4<T>> {
        let ranges: Vec<SliceOrIndex> = cells.iter().cloned().map(Into::into).collect();
        let values: ArrayD<T> = self
            .fields
            .read_slice(Hyperslab::from(ranges))
            .map_err(|e| Error::Data {
                path: self.path.clone(),
                dataset: FIELDS.into(),
                cells: IndexBox::new(cells.to_vec()).to_string(),
                cause: format!("{e}; is the file damaged?"),
            })?;
        let extents = cells.each_ref().map(ExactSizeIterator::len);
        Ok(values
            .into_shape_with_order(extents)
            .expect("HDF5 gives the selected shape"))
    }
}

impl Fields for FieldFile {
    fn path(&self) -> &Path {
        self.path()
    }

    fn times(&self) -> &[f64] {
        self.times()
    }

    fn calendar(&self) -> Calendar {
        self.calendar
    }

    fn channels(&self) -> &[String] {
        self.channels()
    }

    fn describe(&self, channel: usize) -> Channel {
        let chunk = self
            .chunk
            .as_deref()
            .and_then(|chunk| chunk.try_into().ok());
        Channel::new(self.channels[channel].clone()).with_chunk(chunk)
    }

    fn grid(&self) -> &Grid {
        self.grid()
    }

    fn gaps(&self) -> Gaps {
        self.gaps
    }

    fn missing(&self) -> Missing {
        self.missing
    }

    fn time_step(&self) -> Result<f64> {
        self.time_step()
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        self.read(cells)
    }

    fn traffic(&self) -> Traffic {
        self.traffic.total()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        fingerprint(&self.path)
    }

    fn modified(&self) -> Result<u32> {
        modified([&self.path])
    }
}

/// Whether an HDF5 file has the dataset `fields`. Also true if HDF5 cannot open the file, so that
/// [`FieldFile::open`] reports the error.
pub(crate) fn is_field_file(path: &Path) -> bool {
    hdf5_metno::File::open(path).map_or(true, |file| file.link_exists(FIELDS))
}

/// Reads the packing of a dataset, and returns it with the attributes.
fn packing_of<'a>(
    path: &'a Path,
    name: &'static str,
    dataset: &'a Dataset,
) -> Result<(Packing, DatasetAttributes<'a>)> {
    let attributes = DatasetAttributes::of(path, name, dataset)?;
    let kind = dataset.dtype().and_then(|dtype| dtype.to_descriptor());
    let stored = match kind.map_err(|e| Error::data(path, name, e))? {
        TypeDescriptor::Float(FloatSize::U4) => NumberType::Single,
        TypeDescriptor::Integer(size) => NumberType::Signed {
            bytes: size as usize,
        },
        TypeDescriptor::Unsigned(_) => NumberType::Unsigned,
        _ => NumberType::Double,
    };
    Ok((Packing::of(&attributes, stored)?, attributes))
}

/// Checks that `path` is a regular file, and returns its size.
fn check_is_file(path: &Path) -> Result<u64> {
    // HDF5's message for a missing file is a page long, and opening a pipe without a writer blocks
    // forever.
    let found = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if found.is_file() {
        return Ok(found.len());
    }
    let (kind, found) = if found.is_dir() {
        (ErrorKind::IsADirectory, "a folder")
    } else {
        (ErrorKind::InvalidInput, "not a regular file")
    };
    let cause = format!("it is {found}; expected a field file, one of HDF5 such as 2018.h5");
    Err(Error::io(path, std::io::Error::new(kind, cause)))
}

/// Checks the type and the number of dims of the fields, and returns their shape.
fn check_fields(path: &Path, fields: &Dataset, packing: &Packing) -> Result<[usize; 4]> {
    let error = |found, expected: &str| Error::shape(path, FIELDS, found, expected);
    let kind = fields
        .dtype()
        .and_then(|dtype| dtype.to_descriptor())
        .map_err(|e| Error::data(path, FIELDS, e))?;
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

/// Checks that a scale has one value per index of its dim, and positions one per cell.
fn check_scale(
    path: &Path,
    scale: &Dataset,
    name: &'static str,
    fields: &[usize; 4],
) -> Result<()> {
    let dims = match SCALES.iter().position(|&scale| scale == name) {
        Some(dim) => dim..dim + 1,
        // Positions of a single row of cells lie along the columns.
        None if fields[2] == 1 => 3..4,
        None => 2..4,
    };
    if scale.shape() == fields[dims.clone()] {
        return Ok(());
    }
    let found = format!("{:?}", scale.shape());
    let expected = format!("{:?} for fields {fields:?}", &fields[dims]);
    Err(Error::shape(path, name, found, expected))
}
