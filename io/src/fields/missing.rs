use burn::config::Config;

/// Handling of missing values: NaN, and those equal to the `_FillValue` or a `missing_value` of the
/// file.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{FieldFile, FieldWriter, Grid, Missing, WriterConfig};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("sst.h5");
/// let grid = Grid::cell_centered(2, 4)?;
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
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Reading a missing value is an error that names its index. The default everywhere.
    Reject,
    /// Missing values are read as NaN, infinite values unchanged. Statistics leave NaN out.
    Allow,
    /// Like [`Allow`](Self::Allow), but samples have the mean of the channel in place of missing
    /// values, which is zero because samples are
    /// [normalised](crate::FieldDataset::with_statistics). A batch has a [mask](crate::Batch::mask)
    /// of the valid cells of its targets; the forcing `mask:NAME` provides the mask of a channel
    /// `NAME` as an input.
    Fill,
}
