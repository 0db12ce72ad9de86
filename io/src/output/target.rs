//! Output of any format, under its temporary name.

use std::ops::Range;
use std::path::Path;

use ndarray::ArrayView3;

use super::classic::ClassicOutput;
use super::config::{OutputConfig, OutputFormat};
use super::schema::{Place, Schema, Times};
use super::staged_folder::StagedFolder;
use super::store::ZarrOutput;
use crate::Result;

/// Name of a NetCDF file in its staged folder.
const FILE: &str = "output.nc";

/// File or store that a rank writes to.
#[derive(Debug)]
pub(crate) enum Target {
    Zarr(ZarrOutput),
    Classic(ClassicOutput),
}

impl Target {
    /// Creates an output in a staged folder or, on ranks that do not create it, opens it.
    pub(crate) fn open(
        folder: &Path,
        creates: bool,
        schema: &Schema,
        times: &Times<'_>,
        chunk: [usize; 3],
        config: &OutputConfig,
    ) -> Result<Self> {
        Ok(match config.format {
            OutputFormat::NetCdf3 => Self::Classic(ClassicOutput::open(
                &folder.join(FILE),
                creates,
                schema,
                times,
            )?),
            _ => Self::Zarr(ZarrOutput::new(folder, schema, chunk, config)?),
        })
    }

    /// Writes a box of one level and one ensemble member of a variable; in a store, the box must
    /// consist of whole chunks.
    ///
    /// # Shapes
    /// `values` is [times, lat, lon], with the lengths of the ranges.
    pub(crate) fn write(
        &self,
        schema: &Schema,
        place: Place,
        member: usize,
        ranges: [Range<usize>; 3],
        values: ArrayView3<'_, f32>,
    ) -> Result<()> {
        match self {
            Self::Zarr(output) => output.write(schema, place, member, ranges, values),
            Self::Classic(output) => output.write(schema, place, member, ranges, values),
        }
    }

    /// Writes coordinates and metadata; called last, on one rank.
    pub(crate) fn finish(&self, schema: &Schema, times: &Times<'_>) -> Result<()> {
        match self {
            Self::Zarr(output) => output.finish(schema, times),
            Self::Classic(output) => output.finish(schema, times),
        }
    }

    /// Waits until everything that this rank has written is on disk.
    pub(crate) fn sync(&self) -> Result<()> {
        match self {
            Self::Zarr(output) => output.sync(),
            Self::Classic(output) => output.sync(),
        }
    }

    /// Renames the output to its final name.
    pub(crate) fn commit(self, folder: StagedFolder) -> Result<()> {
        let file = matches!(self, Self::Classic(_)).then_some(FILE);
        drop(self);
        folder.commit(file)
    }
}
