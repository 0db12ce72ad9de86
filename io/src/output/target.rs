//! An output of any format, under its temporary name.

use std::ops::Range;
use std::path::Path;

use ndarray::ArrayView3;

use super::classic::ClassicOutput;
use super::config::{OutputConfig, OutputFormat};
use super::schema::{Place, Schema, Times};
use super::store::ZarrOutput;
use crate::Result;
use crate::staged_folder::StagedFolder;

/// The name of a NetCDF file in its staged folder.
const FILE: &str = "output.nc";

/// The file or store that a rank writes to.
#[derive(Debug)]
pub(crate) enum Target {
    Zarr(ZarrOutput),
    Classic(ClassicOutput),
}

impl Target {
    /// Begins an output in a staged folder, or, on the other ranks, joins it.
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

    /// Writes a box of a level of a member of a variable; whole chunks of a store.
    ///
    /// # Shapes
    /// [times, lat, lon] of the ranges.
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

    /// Writes what one rank writes at last: coordinates and metadata.
    pub(crate) fn finish(&self, schema: &Schema, times: &Times<'_>) -> Result<()> {
        match self {
            Self::Zarr(output) => output.finish(schema, times),
            Self::Classic(output) => output.finish(schema, times),
        }
    }

    /// Waits until what this rank has written is on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        match self {
            Self::Zarr(output) => output.sync(),
            Self::Classic(output) => output.sync(),
        }
    }

    /// Gives the output its name.
    pub(crate) fn commit(self, folder: StagedFolder) -> Result<()> {
        let file = matches!(self, Self::Classic(_)).then_some(FILE);
        drop(self);
        folder.commit(file)
    }
}
