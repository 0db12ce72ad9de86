//! Opening of fields of any format.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use burn::config::Config;
use halocline_core::support::raise_descriptor_limit;

use super::anemoi;
use super::cf::text_times::dated;
use super::cf::variable::Container;
use super::cf::{CfFields, Choice};
use super::field_file::is_field_file;
use super::netcdf::NetCdf;
use super::zarr::{self, ZarrStore};
use crate::fields::aligned::aligned;
use crate::fields::joined::Joined;
use crate::fields::listing::listed;
use crate::fields::merged::{Merged, by_channels, merge_each};
use crate::fields::period::Within;
use crate::fields::selected::{Selected, find};
use crate::grid::order::difference;
use crate::{Error, FieldFile, Fields, Gaps, Grid, Missing, Period, Result};

/// Opens a field file, a Zarr store or a NetCDF file. The format is recognised by content, not by
/// name.
///
/// # Errors
/// Errors of [`OpenConfig::open`].
///
/// # Example
/// ```no_run
/// let fields = halocline_io::open("era5.zarr")?;
/// println!("{:?} on {}", fields.channels(), fields.grid());
/// # Ok::<(), halocline_io::Error>(())
/// ```
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn Fields>> {
    OpenConfig::new().open(path)
}

/// Configuration for opening fields: channels, missing values, gaps in time, units of time, period,
/// order of rows and columns.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{FieldWriter, Fields, Grid, OpenConfig, WriterConfig};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// let grid = Grid::cell_centered(4, 8)?;
/// let channels = ["z@850", "z@500", "t2m"];
/// let mut writer = FieldWriter::create(&path, &grid, &channels, &WriterConfig::new())?;
/// writer.append(0.0, Array3::from_shape_fn((3, 4, 8), |(channel, _, _)| channel as f32).view())?;
/// writer.finish()?;
///
/// let fields = OpenConfig::of_channels(&["t2m", "z@850"]).open(&path)?;
/// assert_eq!(fields.channels(), ["t2m", "z@850"]);
/// assert_eq!(fields.read([0..1, 0..2, 0..1, 0..1])?[[0, 0, 0, 0]], 2.0);
/// // A name without a level selects all levels.
/// let fields = OpenConfig::of_channels(&["z"]).open(&path)?;
/// assert_eq!(fields.channels(), ["z@850", "z@500"]);
/// // Rows from south to north, as another store has them.
/// let rising = Grid::new(grid.lat().iter().rev().copied().collect(), grid.lon().to_vec())?;
/// let fields = OpenConfig::new().with_grid(Some(rising)).open(&path)?;
/// assert_eq!(fields.grid().lat(), [-67.5, -22.5, 22.5, 67.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Config, Debug)]
pub struct OpenConfig {
    /// Names of the channels, in the order in which they are read: a variable, one level of it as
    /// `z@500`, or all its levels as `z`. Default all channels, in the order of the file.
    pub channels: Option<Vec<String>>,
    /// Handling of missing values.
    #[config(default = "Missing::Reject")]
    pub missing: Missing,
    /// Handling of uneven time steps.
    #[config(default = "Gaps::Reject")]
    pub gaps: Gaps,
    /// Units of the time axis of Zarr stores and NetCDF files, such as `hours since 1940-01-01`, in
    /// place of those in the file.
    pub time_units: Option<String>,
    /// Part of the time axis that is read. Default all of it.
    pub period: Option<Period>,
    /// Grid in whose order rows and columns are read: latitudes may run in the other direction in
    /// the file, and longitudes may start at another meridian, such as -180 in place of 0. Default
    /// the order of the file, or that of the first of several files.
    pub grid: Option<Grid>,
}

impl OpenConfig {
    /// Creates the default configuration with these channels.
    pub fn of_channels(channels: &[impl AsRef<str>]) -> Self {
        let names = channels.iter().map(|name| name.as_ref().to_owned());
        Self::new().with_channels(Some(names.collect()))
    }

    /// Opens a field file, a Zarr store or a NetCDF file. The format is recognised by content.
    ///
    /// Every variable on the dims of a latitude and a longitude is a channel; if it has one more
    /// dim, every level is a channel. So is a variable on one dim of cells that has a latitude and a
    /// longitude, as on the grids of ICON, and on the cells of a HEALPix sphere: the cells are a
    /// single row. Latitudes, longitudes and areas of the cells, and variables that the attributes
    /// `coordinates`, `bounds` or `cell_measures` of another one name, are channels only if they
    /// are chosen by name, or if there is no other. Variables on another grid or time axis than the
    /// first one are left out. A variable without a time dim has the same values at all times. A
    /// file without a time axis has one time, that of its scalar time coordinate, or else zero. A
    /// store of anemoi-datasets has a channel for each of its variables; cells that form no grid are
    /// a single row.
    ///
    /// # Errors
    /// A path that does not exist; a file or folder of another format, or damaged; a channel that
    /// does not exist; coordinates that do not form a grid, or another one than
    /// [`grid`](Self::grid); times that do not increase, or whose units or calendar are not
    /// supported; `time_units` for a field file.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Box<dyn Fields>> {
        let choice = self.channels.as_deref();
        self.open_choice(path.as_ref(), choice.map_or(Choice::Fields, Choice::Named))
    }

    /// Opens a file or store with all its channels, also those that otherwise are channels only if
    /// they are chosen by name.
    pub(crate) fn open_all(&self, path: &Path) -> Result<Box<dyn Fields>> {
        let all = self.clone().with_channels(None);
        all.open_choice(path, Choice::All)
    }

    fn open_choice(&self, path: &Path, choice: Choice<'_>) -> Result<Box<dyn Fields>> {
        let fields: Box<dyn Fields> = match format(path)? {
            Format::FieldFile => {
                if let Some(units) = &self.time_units {
                    let expected =
                        "none for a field file, whose units are an attribute of timestamp";
                    return Err(Error::argument("time_units", units, expected));
                }
                let file = FieldFile::open(path)?;
                Box::new(file.with_missing(self.missing).with_gaps(self.gaps))
            }
            Format::Zarr => {
                let container = anemoi::container(ZarrStore::open(path)?)?;
                Box::new(self.cf(container, choice)?)
            }
            Format::NetCdf => Box::new(self.cf(Box::new(NetCdf::open(path)?), choice)?),
        };
        let fields = self.in_order(self.selected(fields, &[path])?)?;
        match &self.period {
            Some(period) => Ok(Box::new(Within::new(fields, period)?)),
            None => Ok(fields),
        }
    }

    /// Returns fields in the order of the chosen grid.
    fn in_order(&self, fields: Box<dyn Fields>) -> Result<Box<dyn Fields>> {
        let Some(grid) = &self.grid else {
            return Ok(fields);
        };
        let fields = aligned(fields, grid);
        let found = fields.grid();
        if found.agrees_with(grid) {
            return Ok(fields);
        }
        let (path, difference) = (fields.path().display(), difference(found, grid));
        let got = format!("{found} of {path} ({difference})");
        let order = if grid.has_rows() {
            "in this order or another one"
        } else {
            "in the same order"
        };
        Err(Error::OtherGrid {
            got,
            expected: format!("{grid}, {order}"),
        })
    }

    /// Opens several files or stores, each with its own time axis. Leaves out those without a time
    /// in the [period](Self::period). Merges files with the same times and grid but different
    /// channels, such as surface and pressure levels. Rows and columns are read in the order of the
    /// [grid](Self::grid) or else of the first file.
    ///
    /// # Errors
    /// Errors of [`open`](Self::open); no time in the period; files with different channels that
    /// differ in times or grid, or share some channels.
    pub fn open_each(&self, paths: &[impl AsRef<Path>]) -> Result<Vec<Box<dyn Fields>>> {
        let mut groups = by_channels(self.in_period(paths)?)?;
        let files = match groups.len() {
            0 | 1 => groups.pop().unwrap_or_default(),
            _ => merge_each(groups)?,
        };
        // A chosen channel may be in none of the files that have times in the period.
        files
            .into_iter()
            .map(|fields| self.selected(fields, paths))
            .collect()
    }

    /// Opens several files or stores as one time axis, in the order of their times. Files with the
    /// same channels are joined first; the results are then merged. Rows and columns are read in
    /// the order of the [grid](Self::grid) or else of the first file.
    ///
    /// # Errors
    /// Errors of [`open_each`](Self::open_each); no paths; grids that differ; times that overlap.
    pub fn open_joined(&self, paths: &[impl AsRef<Path>]) -> Result<Box<dyn Fields>> {
        let mut groups = by_channels(self.in_period(paths)?)?;
        if groups.len() < 2 {
            let joined = Joined::new(groups.pop().unwrap_or_default())?;
            return self.selected(Box::new(joined), paths);
        }
        let joined = groups
            .into_iter()
            .map(|group| Ok(Box::new(Joined::new(group)?) as Box<dyn Fields>));
        let merged = Merged::new(joined.collect::<Result<_>>()?)?;
        self.selected(Box::new(merged), paths)
    }

    /// Opens files, leaving out those without a time in the period.
    fn in_period(&self, paths: &[impl AsRef<Path>]) -> Result<Vec<Box<dyn Fields>>> {
        let mut parts = self.open_parts(paths)?;
        let count = parts.len();
        parts.retain(|fields| !fields.times().is_empty());
        if let Some(first) = parts.first() {
            let grid = first.grid().clone();
            let parts = parts.into_iter().map(|part| aligned(part, &grid));
            return Ok(parts.collect());
        }
        if count == 0 {
            return Ok(parts);
        }
        let (mut whole, period) = (self.clone(), self.period.as_ref());
        whole.period = None;
        let mut held = Vec::new();
        for fields in whole.open_parts(paths)? {
            let ends = fields.times().first().zip(fields.times().last());
            held.extend(ends.map(|(first, last)| {
                let [first, last] = [first, last].map(|time| fields.calendar().date(*time));
                format!("{first} to {last} of {}", fields.path().display())
            }));
        }
        let expected = if held.is_empty() {
            "files with times".into()
        } else {
            format!("one with some of the times {}", held.join(", "))
        };
        let got = period.map_or("all times".into(), ToString::to_string);
        Err(Error::argument("period", got, expected))
    }

    /// Opens each file with all chosen channels or, if some file lacks one, each with those that it
    /// has.
    fn open_parts(&self, paths: &[impl AsRef<Path>]) -> Result<Vec<Box<dyn Fields>>> {
        // Each file takes a descriptor or two.
        raise_descriptor_limit();
        let whole: Result<Vec<_>> = paths.iter().map(|path| self.open(path)).collect();
        let (Err(error), Some(chosen)) = (&whole, &self.channels) else {
            return whole;
        };
        if paths.len() < 2 || !matches!(error, Error::Argument { .. } | Error::Shape { .. }) {
            return whole;
        }
        let first = chosen.first().map_or("", String::as_str);
        let part = |path: &Path| {
            let all = self.open_all(path)?;
            let own = chosen
                .iter()
                .filter(|name| !find(all.channels(), name).is_empty());
            let own: Vec<String> = own.cloned().collect();
            if own.is_empty() {
                Err(Error::argument(
                    "channels",
                    format!("{chosen:?}"),
                    format!(
                        "some of the channels of each file; {} has none of these, but {}",
                        path.display(),
                        listed(first, all.channels())
                    ),
                ))
            } else {
                self.clone().with_channels(Some(own)).open(path)
            }
        };
        let parts: Vec<_> = paths
            .iter()
            .map(|path| part(path.as_ref()))
            .collect::<Result<_>>()?;
        // If all files have the same channels, a chosen channel is in none of them.
        if parts
            .windows(2)
            .all(|pair| pair[0].channels() == pair[1].channels())
        {
            whole
        } else {
            Ok(parts)
        }
    }

    /// Selects the chosen channels of fields from these paths, in the chosen order.
    fn selected(
        &self,
        fields: Box<dyn Fields>,
        paths: &[impl AsRef<Path>],
    ) -> Result<Box<dyn Fields>> {
        match &self.channels {
            Some(channels) => {
                Selected::of(fields, channels).map_err(|error| self.with_all_channels(error, paths))
            }
            None => Ok(fields),
        }
    }

    /// Lists all channels of the files in an error about a channel, because the fields have only
    /// the chosen ones.
    fn with_all_channels(&self, error: Error, paths: &[impl AsRef<Path>]) -> Error {
        let Error::Argument {
            argument: "channels",
            got,
            ..
        } = &error
        else {
            return error;
        };
        let mut names: Vec<String> = Vec::new();
        // Also those of files on another grid, of which a channel may be missing too.
        let any = self.clone().with_grid(None);
        for fields in paths.iter().flat_map(|path| any.open_all(path.as_ref())) {
            for name in fields.channels() {
                if !names.contains(name) {
                    names.push(name.clone());
                }
            }
        }
        if names.is_empty() {
            return error;
        }
        let files = match paths {
            [path] => path.as_ref().display().to_string(),
            _ => "the files".into(),
        };
        let expected = format!("channels of {files}, each once: {}", listed(got, &names));
        Error::argument("channels", got, expected)
    }

    fn cf(&self, container: Box<dyn Container>, choice: Choice<'_>) -> Result<CfFields> {
        let units = self.time_units.as_deref();
        // Given units are those of numbers.
        let container = match units {
            None => dated(container)?,
            Some(_) => container,
        };
        CfFields::new(container, choice, units, self.missing, self.gaps)
    }
}

/// Format, by its reader.
enum Format {
    FieldFile,
    Zarr,
    NetCdf,
}

/// Name of the format of field files, whose chunks local ranks do not share.
pub(crate) const FIELD_FILE: &str = "field file (HDF5)";

/// Returns the name of the format of a file or folder.
pub(crate) fn format_name(path: &Path) -> Result<&'static str> {
    Ok(match format(path)? {
        Format::FieldFile => FIELD_FILE,
        Format::NetCdf => "NetCDF",
        Format::Zarr if path.join("zarr.json").is_file() => "Zarr version 3",
        Format::Zarr => "Zarr version 2",
    })
}

/// Recognises the format of a file or folder by its content.
fn format(path: &Path) -> Result<Format> {
    let found = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if found.is_dir() {
        if zarr::is_group(path) {
            return Ok(Format::Zarr);
        }
        let cause = "it is a folder without the metadata of a Zarr group (zarr.json or .zgroup); \
                     expected a Zarr store, a NetCDF file or a field file";
        let error = std::io::Error::new(ErrorKind::IsADirectory, cause);
        return Err(Error::io(path, error));
    }
    // Opening a pipe without a writer would block forever.
    if !found.is_file() {
        return FieldFile::open(path).map(|_| Format::FieldFile);
    }
    let mut magic = Vec::new();
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    file.take(8)
        .read_to_end(&mut magic)
        .map_err(|e| Error::io(path, e))?;
    match &magic[..] {
        [b'G', b'R', b'I', b'B', ..] => {
            let cause = "it is a GRIB file, which is not read; convert it first, for example by \
                         xarray.open_dataset(path, engine=\"cfgrib\").to_netcdf(\"fields.nc\")";
            let error = std::io::Error::new(ErrorKind::Unsupported, cause);
            Err(Error::io(path, error))
        }
        [b'C', b'D', b'F', 1 | 2 | 5, ..] => Ok(Format::NetCdf),
        b"\x89HDF\r\n\x1a\n" if !is_field_file(path) => Ok(Format::NetCdf),
        // HDF5, possibly after a user block, or a file for which `FieldFile` reports the error.
        _ => Ok(Format::FieldFile),
    }
}
