use std::path::Path;

use burn::config::Config;

use crate::{Error, Existing, Result};

/// Format of an output.
///
/// See [`OutputConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum OutputFormat {
    /// Zarr version 3, a folder with one file per chunk.
    Zarr3,
    /// Zarr version 2.
    Zarr2,
    /// NetCDF-3 with 64-bit offsets, a single uncompressed file. CDF-5 if a variable has 4 GiB or
    /// more per time.
    NetCdf3,
}

/// Compression of the chunks of a Zarr store.
///
/// See [`OutputConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    None,
    /// Zstandard by Blosc, after byte shuffling.
    Zstd {
        /// Compression level, from 1 to 9.
        level: u8,
    },
}

/// Configuration of an output: format, compression, chunks.
///
/// # Example
/// ```
/// use halocline_io::{Compression, Existing, OutputConfig, OutputFormat};
///
/// let config = OutputConfig::new()
///     .with_compression(Compression::Zstd { level: 5 })
///     .with_chunk(Some([1, 90, 180]))
///     .with_existing(Existing::Replace);
/// assert_eq!(config.format, OutputFormat::Zarr3);
/// ```
#[derive(Config, Debug)]
pub struct OutputConfig {
    /// Format of the output.
    #[config(default = "OutputFormat::Zarr3")]
    pub format: OutputFormat,
    /// Compression of Zarr stores.
    #[config(default = "Compression::Zstd { level: 3 }")]
    pub compression: Compression,
    /// Extents of a chunk along [time, lat, lon]. A chunk holds one level of a variable. Default
    /// one time and the cells of a rank, divided into equal parts of at most 512 × 512 cells.
    /// NetCDF-3 files have no chunks.
    pub chunk: Option<[usize; 3]>,
    /// Handling of an existing file or store of the same name.
    #[config(default = "Existing::Reject")]
    pub existing: Existing,
}

impl OutputConfig {
    /// Checks the configuration of an output at a path.
    ///
    /// # Errors
    /// A chunk or compression level out of range; a chunk for a NetCDF file; the name of an HDF5
    /// file.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        let is_hdf5 = |end: &&str| {
            let found = path.extension();
            found.is_some_and(|found| found.eq_ignore_ascii_case(end))
        };
        if ["h5", "hdf5"].iter().any(is_hdf5) {
            let expected = "another ending, such as .zarr or .nc, as outputs are Zarr stores or NetCDF-3 files, \
                            not HDF5";
            return Err(Error::argument("path", path.display(), expected));
        }
        if let Compression::Zstd { level } = self.compression
            && !(1..=9).contains(&level)
        {
            let expected = "a level from 1 (fastest) to 9 (smallest), or Compression::None";
            return Err(Error::argument("compression", level, expected));
        }
        let Some(chunk) = self.chunk else {
            return Ok(());
        };
        if self.format == OutputFormat::NetCdf3 {
            let expected = "none, as a NetCDF-3 file has no chunks; write a Zarr store";
            return Err(Error::argument("chunk", format!("{chunk:?}"), expected));
        }
        let cells = chunk
            .iter()
            .try_fold(1_usize, |cells, extent| cells.checked_mul(*extent));
        if !cells.is_some_and(|cells| (1..1 << 29).contains(&cells)) {
            let expected = "extents from 1, of less than 2 GiB together";
            return Err(Error::argument("chunk", format!("{chunk:?}"), expected));
        }
        Ok(())
    }
}
