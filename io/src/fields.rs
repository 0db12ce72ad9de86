//! The interface that field files and stores of all formats have in common.

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;

use halocline_core::IndexBox;
use ndarray::Array4;

use crate::{Calendar, Channel, Error, Gaps, Grid, Missing, Result, Traffic};

/// Fields on a latitude-longitude grid over time, in a file or store of any format.
///
/// [`open`](fn@crate::open) recognises the format. Datasets, loaders and statistics take all of them.
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
    /// The path of the file or store, or of the first of several.
    fn path(&self) -> &Path;

    /// The times, in seconds since 1970-01-01 of their [calendar](Self::calendar), UTC. They rise.
    fn times(&self) -> &[f64];

    /// The calendar of the times.
    fn calendar(&self) -> Calendar {
        Calendar::Gregorian
    }

    /// The names of the channels.
    fn channels(&self) -> &[String];

    /// Units, names and chunks of a channel.
    ///
    /// # Panics
    /// Panics if there is no such channel.
    fn describe(&self, channel: usize) -> Channel {
        Channel::new(self.channels()[channel].clone())
    }

    /// Variables that are no channels, each with the reason.
    fn left_out(&self) -> &[String] {
        &[]
    }

    /// The grid. Rows and columns have the order of the file.
    fn grid(&self) -> &Grid;

    /// The handling of uneven time steps.
    fn gaps(&self) -> Gaps;

    /// The handling of missing values.
    fn missing(&self) -> Missing;

    /// The time between two fields, in seconds; the most frequent one if [gaps](Self::gaps) are
    /// permitted.
    ///
    /// # Errors
    /// Fewer than two times; steps that differ, if they are [rejected](Gaps::Reject).
    fn time_step(&self) -> Result<f64>;

    /// Reads a box of cells, given by ranges of times, channels, rows and columns. Only the chunks
    /// that it meets are read.
    ///
    /// # Shapes
    /// The result is [times, channels, rows, columns] of the ranges.
    ///
    /// # Errors
    /// A box that is not inside the fields; a damaged chunk; missing values, if they are
    /// [rejected](crate::Missing::Reject).
    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>>;

    /// The bytes that [`read`](Self::read) has taken so far.
    fn traffic(&self) -> Traffic;

    /// A size in bytes and a checksum by which ranks compare the data that they opened, whose paths
    /// may differ.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn fingerprint(&self) -> Result<(u64, u32)>;

    /// The number of times, channels, rows and columns.
    fn shape(&self) -> [usize; 4] {
        let [rows, columns] = self.grid().shape();
        [self.times().len(), self.channels().len(), rows, columns]
    }
}

impl<T: Fields + ?Sized> Fields for Box<T> {
    fn path(&self) -> &Path {
        (**self).path()
    }

    fn times(&self) -> &[f64] {
        (**self).times()
    }

    fn calendar(&self) -> Calendar {
        (**self).calendar()
    }

    fn channels(&self) -> &[String] {
        (**self).channels()
    }

    fn describe(&self, channel: usize) -> Channel {
        (**self).describe(channel)
    }

    fn left_out(&self) -> &[String] {
        (**self).left_out()
    }

    fn grid(&self) -> &Grid {
        (**self).grid()
    }

    fn gaps(&self) -> Gaps {
        (**self).gaps()
    }

    fn missing(&self) -> Missing {
        (**self).missing()
    }

    fn time_step(&self) -> Result<f64> {
        (**self).time_step()
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        (**self).read(cells)
    }

    fn traffic(&self) -> Traffic {
        (**self).traffic()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        (**self).fingerprint()
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

/// Checks that the channels of a file have the units of those of another one.
pub(crate) fn check_units(file: &dyn Fields, reference: &dyn Fields) -> Result<()> {
    same_units(
        (&described(file), file.path()),
        (&described(reference), reference.path()),
    )
}

/// The channels of a file.
pub(crate) fn described(file: &dyn Fields) -> Vec<Channel> {
    (0..file.channels().len())
        .map(|channel| file.describe(channel))
        .collect()
}

/// Requires that channels of a file have the units of those of another one.
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
            return Err(Error::Differs {
                path: path.into(),
                what: "units",
                found: told(found),
                expected: format!(
                    "{} (convert the values of one file, write its attribute units, or leave it out)",
                    told(expected)
                ),
                reference: reference.into(),
            });
        }
    }
    Ok(())
}

/// Requires that times are counted in one calendar.
pub(crate) fn same_calendar(file: &dyn Fields, reference: &dyn Fields) -> Result<()> {
    let [found, expected] = [file, reference].map(|file| file.calendar());
    if found == expected {
        return Ok(());
    }
    Err(Error::Differs {
        path: file.path().into(),
        what: "calendar",
        found: found.to_string(),
        expected: expected.to_string(),
        reference: reference.path().into(),
    })
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
