use burn::config::Config;

use crate::{Error, Existing, Result};

/// Format of an output.
///
/// See [`OutputConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum OutputFormat {
    /// Zarr version 3, a folder with a file for each chunk.
    Zarr3,
    /// Zarr version 2.
    Zarr2,
    /// NetCDF-3 with 64-bit offsets, one file without compression; CDF-5 where a variable has 4 GiB
    /// at one time or more.
    NetCdf3,
}

/// Compression of the chunks of a Zarr store.
///
/// See [`OutputConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Compression {
    /// None.
    None,
    /// Zstandard by Blosc, of bytes sorted by their significance.
    Zstd {
        /// The level, from 1 to 9.
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
    /// The format.
    #[config(default = "OutputFormat::Zarr3")]
    pub format: OutputFormat,
    /// The compression of Zarr stores.
    #[config(default = "Compression::Zstd { level: 3 }")]
    pub compression: Compression,
    /// Extents of a chunk along [time, lat, lon]; it holds one level of a variable. Default one
    /// time, and the cells of a rank, or equal parts of them of at most 512 × 512 cells. NetCDF-3
    /// files have none.
    pub chunk: Option<[usize; 3]>,
    /// Handling of a file or store of the same name.
    #[config(default = "Existing::Reject")]
    pub existing: Existing,
}

impl OutputConfig {
    /// # Errors
    /// A chunk or compression out of range; a chunk of a NetCDF file.
    pub(crate) fn check(&self) -> Result<()> {
        if let Compression::Zstd { level } = self.compression
            && !(1..=9).contains(&level)
        {
            return Err(Error::argument("compression", level, "a level from 1 to 9"));
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
