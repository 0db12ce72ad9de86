//! Fields: the interface of files and stores of all formats, and fields made of other fields.

pub(crate) mod aligned;
pub(crate) mod amplification;
pub(crate) mod channel;
pub(crate) mod joined;
mod left_out;
pub(crate) mod listing;
pub(crate) mod merged;
mod missing;
pub(crate) mod period;
pub(crate) mod selected;
pub(crate) mod traffic;

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;

use halocline_core::IndexBox;
use ndarray::{Array4, Axis, Slice};

use crate::grid::order::difference;
use crate::{Calendar, Error, Gaps, Grid, Result};

pub use amplification::{amplification, assumed_ranks};
pub use channel::Channel;
pub use left_out::{LeftOut, LeftOutReason};
pub use missing::Missing;
pub use period::Period;
pub use traffic::Traffic;

/// Fields on a latitude-longitude grid over time, in a file or store of any format.
///
/// [`open`](fn@crate::open) recognises the format. Datasets, loaders and statistics accept all
/// formats.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{FieldWriter, Fields, Grid, Statistics, WriterConfig, open};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// let grid = Grid::cell_centered(4, 8)?;
/// let mut writer = FieldWriter::create(&path, &grid, &["u10m", "v10m"], &WriterConfig::new())?;
/// for hour in 0..3 {
///     writer.append(f64::from(hour) * 3600.0, Array3::ones((2, 4, 8)).view())?;
/// }
/// writer.finish()?;
///
/// let fields = open(&path)?; // or a Zarr store, or a NetCDF file
/// assert_eq!(fields.shape(), [3, 2, 4, 8]);
/// assert_eq!(fields.channels(), ["u10m", "v10m"]);
/// let northern = fields.read([1..3, 0..2, 0..2, 0..8])?; // [time, channel, lat, lon]
/// assert_eq!(northern[[1, 1, 0, 5]], 1.0);
/// assert_eq!(Statistics::compute(&[fields], 1)?.means(), [1.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Fields: Debug + Send + Sync {
    /// Returns the path of the file or store, or of the first of several.
    fn path(&self) -> &Path;

    /// Returns the times, strictly increasing, in seconds since 1970-01-01 UTC in their
    /// [calendar](Self::calendar).
    fn times(&self) -> &[f64];

    /// Returns the file that holds a time, and the index of the time in that file.
    ///
    /// # Panics
    /// Panics if there is no such time.
    fn file_time(&self, time: usize) -> (&Path, usize) {
        (self.path(), time)
    }

    /// Returns the calendar of the times.
    fn calendar(&self) -> Calendar {
        Calendar::Gregorian
    }

    /// Whether the fields have no time, neither a dim nor a coordinate; [`times`](Self::times) is
    /// then a single zero. False by default.
    fn is_undated(&self) -> bool {
        false
    }

    /// Returns the names of the channels.
    fn channels(&self) -> &[String];

    /// Returns the description of a channel: names, units, level and chunks.
    ///
    /// # Panics
    /// Panics if there is no such channel.
    fn describe(&self, channel: usize) -> Channel {
        Channel::new(self.channels()[channel].clone())
    }

    /// Returns the variables that are not channels, each with the reason.
    fn left_out(&self) -> &[LeftOut] {
        &[]
    }

    /// Returns the grid. Rows and columns are in the order of the file, unless
    /// [`OpenConfig::grid`](crate::OpenConfig::grid) sets another.
    fn grid(&self) -> &Grid;

    /// Returns the handling of uneven time steps.
    fn gaps(&self) -> Gaps;

    /// Returns the handling of missing values.
    fn missing(&self) -> Missing;

    /// Returns the time between consecutive fields, in seconds; the most frequent one if
    /// [gaps](Self::gaps) are permitted.
    ///
    /// # Errors
    /// Fewer than two times; uneven steps, if they are [rejected](Gaps::Reject).
    fn time_step(&self) -> Result<f64>;

    /// Reads a box of cells, given by ranges of times, channels, rows and columns. Reads only the
    /// chunks that intersect it.
    ///
    /// # Shapes
    /// Returns [times, channels, rows, columns], with the lengths of the ranges.
    ///
    /// # Errors
    /// A box that exceeds the fields; a damaged chunk; missing values, if they are
    /// [rejected](crate::Missing::Reject).
    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>>;

    /// Returns the bytes that [`read`](Self::read) has taken so far.
    fn traffic(&self) -> Traffic;

    /// Returns a size in bytes and a checksum, by which ranks check that they opened the same data,
    /// whose paths may differ.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn fingerprint(&self) -> Result<(u64, u32)>;

    /// Returns a checksum of the modification times of the files, by which a conversion recognises
    /// that they were rewritten; of a Zarr store, those of the metadata and of 16 chunks of each
    /// array.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn modified(&self) -> Result<u32>;

    /// Returns the numbers of times, channels, rows and columns.
    fn shape(&self) -> [usize; 4] {
        let [rows, columns] = self.grid().shape();
        [self.times().len(), self.channels().len(), rows, columns]
    }
}

/// Implements methods of [`Fields`] by those of other fields.
macro_rules! delegate {
    (
        $self:ident => $fields:expr;
        $(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*
    ) => {
        $(
            fn $name(&$self $(, $argument: $type)*) -> $result {
                $fields.$name($($argument),*)
            }
        )*
    };
}

pub(crate) use delegate;

impl<T: Fields + ?Sized> Fields for Box<T> {
    delegate! {
        self => **self;
        fn path(&self) -> &Path;
        fn times(&self) -> &[f64];
        fn file_time(&self, time: usize) -> (&Path, usize);
        fn calendar(&self) -> Calendar;
        fn is_undated(&self) -> bool;
        fn channels(&self) -> &[String];
        fn describe(&self, channel: usize) -> Channel;
        fn left_out(&self) -> &[LeftOut];
        fn grid(&self) -> &Grid;
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
        fn time_step(&self) -> Result<f64>;
        fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>>;
        fn traffic(&self) -> Traffic;
        fn fingerprint(&self) -> Result<(u64, u32)>;
        fn modified(&self) -> Result<u32>;
    }
}

/// Checks that a box lies inside the fields.
pub(crate) fn check_box(
    fields: &impl Fields,
    dataset: &str,
    cells: &[Range<usize>; 4],
) -> Result<()> {
    let shape = fields.shape();
    let mut ranges = cells.iter().zip(shape);
    if ranges.all(|(range, size)| range.start <= range.end && range.end <= size) {
        return Ok(());
    }
    let expected = format!(
        "a shape that holds the cells {}",
        IndexBox::new(cells.to_vec())
    );
    Err(Error::shape(
        fields.path(),
        dataset,
        format!("{shape:?}"),
        expected,
    ))
}

/// Checks that the channels of a file have the same units as those of another file.
pub(crate) fn check_units(file: &dyn Fields, reference: &dyn Fields) -> Result<()> {
    same_units(
        (&described(file), file.path()),
        (&described(reference), reference.path()),
    )
}

/// Checks that a grid is that of another file, in the same order. Both are given with the path of
/// their file.
pub(crate) fn same_grid(
    (grid, path): (&Grid, &Path),
    (expected, reference): (&Grid, &Path),
) -> Result<()> {
    if grid.agrees_with(expected) {
        return Ok(());
    }
    let found = format!("{grid} ({})", difference(grid, expected));
    let expected = expected.to_string();
    Err(Error::differs(path, "grid", found, expected, reference))
}

/// Returns the descriptions of all channels of a file.
pub(crate) fn described(file: &dyn Fields) -> Vec<Channel> {
    (0..file.channels().len())
        .map(|channel| file.describe(channel))
        .collect()
}

/// Checks that the channels of two files, given as descriptions and path, have the same units.
pub(crate) fn same_units(
    (channels, path): (&[Channel], &Path),
    (others, reference): (&[Channel], &Path),
) -> Result<()> {
    for (found, expected) in channels.iter().zip(others) {
        if !found.has_units_of(expected) {
            let told = |channel: &Channel| {
                let units = channel.units.as_deref().unwrap_or("none");
                let level = channel.level_units.as_ref();
                let level = level.map_or(String::new(), |units| format!(", levels in {units}"));
                format!("{units} of {}{level}", channel.name)
            };
            let expected = format!(
                "{} (convert the values of one file, write its attribute units, or leave it out)",
                told(expected)
            );
            let found = told(found);
            return Err(Error::differs(path, "units", found, expected, reference));
        }
    }
    Ok(())
}

/// Finds the part that holds an index along a dim, in which the parts lie one after another.
/// Returns it with the index in the part.
pub(crate) fn part_of(
    parts: &[Box<dyn Fields>],
    dim: usize,
    mut index: usize,
) -> Option<(&dyn Fields, usize)> {
    for part in parts {
        match index.checked_sub(part.shape()[dim]) {
            Some(rest) => index = rest,
            None => return Some((&**part, index)),
        }
    }
    None
}

/// Reads a box of parts that lie one after another along a dim.
pub(crate) fn read_parts(
    parts: &[Box<dyn Fields>],
    dim: usize,
    cells: [Range<usize>; 4],
) -> Result<Array4<f32>> {
    let mut values = Array4::zeros(cells.each_ref().map(ExactSizeIterator::len));
    let whole = cells[dim].clone();
    let mut end = 0;
    for part in parts {
        let start = end;
        end += part.shape()[dim];
        let held = whole.start.clamp(start, end)..whole.end.clamp(start, end);
        if held.is_empty() {
            continue;
        }
        let mut ranges = cells.clone();
        ranges[dim] = held.start - start..held.end - start;
        let read = part.read(ranges)?;
        if held == whole {
            return Ok(read);
        }
        let places = Slice::from(held.start - whole.start..held.end - whole.start);
        values.slice_axis_mut(Axis(dim), places).assign(&read);
    }
    Ok(values)
}

/// Sums the bytes that reading several sources has taken.
pub(crate) fn traffic_of(parts: &[Box<dyn Fields>]) -> Traffic {
    let traffic = parts.iter().map(|part| part.traffic());
    traffic.fold(Traffic::default(), |sum, part| sum + part)
}

/// Combines the fingerprints of several sources: total size and a CRC-32 of their checksums.
pub(crate) fn fingerprint_of(parts: &[Box<dyn Fields>]) -> Result<(u64, u32)> {
    let mut total = 0;
    let mut hasher = crc32fast::Hasher::new();
    for part in parts {
        let (size, sum) = part.fingerprint()?;
        total += size;
        hasher.update(&sum.to_le_bytes());
    }
    Ok((total, hasher.finalize()))
}

/// Combines the checksums of the modification times of several sources.
pub(crate) fn modified_of(parts: &[Box<dyn Fields>]) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    for part in parts {
        hasher.update(&part.modified()?.to_le_bytes());
    }
    Ok(hasher.finalize())
}

/// Checks that the times of two files have the same calendar.
pub(crate) fn same_calendar(file: &dyn Fields, reference: &dyn Fields) -> Result<()> {
    let [found, expected] = [file, reference].map(|file| file.calendar());
    if found == expected {
        return Ok(());
    }
    let [found, expected] = [found, expected].map(|calendar| calendar.to_string());
    let (path, reference) = (file.path(), reference.path());
    Err(Error::differs(path, "calendar", found, expected, reference))
}

/// Adds the path of the file to an error about its coordinates.
pub(crate) fn in_file(path: &Path, error: Error) -> Error {
    match error {
        Error::Argument {
            argument,
            got,
            expected,
        } => Error::shape(path, argument, got, expected),
        other => other,
    }
}
