//! Coordinates in `data.json`, from which Makani takes those that a field file lacks.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::layout::{FIELDS, TIMESTAMP};
use super::metadata::Metadata;
use crate::{Calendar, Error, Grid, Result};

/// Seconds per day.
const DAY: f64 = 86400.0;

/// Metadata near a field file.
#[derive(Debug)]
pub(crate) struct DataJson {
    folder: PathBuf,
    metadata: Metadata,
}

impl DataJson {
    /// Reads the `data.json` beside a file, in the folder above, or in the folder `metadata` there;
    /// the first one that exists.
    ///
    /// # Errors
    /// A `data.json` that cannot be read.
    pub(crate) fn near(file: &Path) -> Result<Option<Self>> {
        let file = std::path::absolute(file).map_err(|e| Error::io(file, e))?;
        let beside = file.parent();
        let above = beside.and_then(Path::parent);
        let folders = [
            beside.map(Path::to_path_buf),
            above.map(Path::to_path_buf),
            above.map(|above| above.join("metadata")),
        ];
        let mut folders = folders.into_iter().flatten();
        let Some(folder) = folders.find(|folder| Metadata::exists(folder.as_path())) else {
            return Ok(None);
        };
        let metadata = Metadata::load(&folder)?;
        Ok(Some(Self { folder, metadata }))
    }

    /// Returns the times of `count` fields: from the beginning of the year that is the name of the
    /// file, a time step apart.
    pub(crate) fn times(&self, file: &Path, count: usize) -> Result<Vec<f64>> {
        let name = file.file_stem().and_then(OsStr::to_str);
        let year = name.and_then(|name| name.parse::<u16>().ok());
        let start = year.and_then(|year| Calendar::Gregorian.days(year.into(), 1, 1));
        let Some(start) = start else {
            let expected = "such a dataset, or a year as the name of the file, such as 2018.h5";
            return Err(Error::shape(file, TIMESTAMP, "none", expected));
        };
        let time = |index: usize| start as f64 * DAY + index as f64 * self.metadata.time_step();
        Ok((0..count).map(time).collect())
    }

    /// Returns the names of the channels, of which there must be `count`.
    pub(crate) fn channels(&self, file: &Path, count: usize) -> Result<Vec<String>> {
        let channels = self.metadata.channels();
        if channels.len() == count {
            return Ok(channels.into());
        }
        let found = format!("{count} channels");
        Err(self.differs(file, found, channels.len().to_string()))
    }

    /// Returns the grid, which must have these numbers of rows and columns.
    pub(crate) fn grid(&self, file: &Path, [rows, columns]: [usize; 2]) -> Result<Grid> {
        let grid = self.metadata.grid();
        if grid.shape() == [rows, columns] {
            return Ok(grid.clone());
        }
        let found = format!("{rows} x {columns} cells");
        let [rows, columns] = grid.shape();
        Err(self.differs(file, found, format!("{rows} x {columns}")))
    }

    fn differs(&self, file: &Path, found: String, expected: String) -> Error {
        let json = self.folder.join("data.json");
        let expected = format!("{expected} as in {}", json.display());
        Error::shape(file, FIELDS, found, expected)
    }
}
