use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::layout::{CHANNEL, FIELDS, LAT, LON};
use crate::fields::same_grid;
use crate::files::json;
use crate::files::staged::Staged;
use crate::{Error, Fields, Grid, Result};

/// Name of the metadata file.
const NAME: &str = "data.json";

/// Properties that the files of a dataset share: Makani's `data.json`.
///
/// # Example
/// ```
/// # use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
/// # for step in 0..2 {
/// #     writer.append(f64::from(step) * 21600.0, halocline_io::ndarray::Array3::zeros((1, 4, 8)).view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::Metadata;
///
/// let metadata = Metadata::of(&FieldFile::open(&path)?)?;
/// assert_eq!(metadata.time_step(), 21600.0);
/// assert_eq!(metadata.channels(), ["t2m"]);
/// assert_eq!(metadata.grid().shape(), [4, 8]);
/// metadata.save(folder.path())?;
/// assert_eq!(Metadata::load(folder.path())?, metadata);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    #[serde(default = "h5_path")]
    h5_path: String,
    #[serde(default = "dims")]
    dims: Vec<String>,
    dhours: f64,
    coords: Coords,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Coords {
    #[serde(default = "grid_type")]
    grid_type: String,
    #[serde(flatten)]
    grid: Grid,
    channel: Vec<String>,
}

// Defaults of keys that Makani's own tools leave out.

fn h5_path() -> String {
    FIELDS.into()
}

fn dims() -> Vec<String> {
    ["time", CHANNEL, LAT, LON].map(String::from).into()
}

fn grid_type() -> String {
    "equiangular".into()
}

impl Metadata {
    /// Collects the metadata of a file or store.
    ///
    /// # Errors
    /// Errors of [`Fields::time_step`].
    pub fn of(file: &impl Fields) -> Result<Self> {
        Ok(Self {
            h5_path: h5_path(),
            dims: dims(),
            dhours: file.time_step()? / 3600.0,
            coords: Coords {
                grid_type: file.grid().kind().into(),
                grid: file.grid().clone(),
                channel: file.channels().into(),
            },
        })
    }

    /// Returns the names of the channels.
    pub fn channels(&self) -> &[String] {
        &self.coords.channel
    }

    /// Returns the grid.
    pub fn grid(&self) -> &Grid {
        &self.coords.grid
    }

    /// Returns the time between consecutive fields, in seconds; the most frequent one if steps
    /// differ.
    pub fn time_step(&self) -> f64 {
        self.dhours * 3600.0
    }

    /// Checks that a file has the same channels, grid and time step as `self`, the metadata of the
    /// file `reference`.
    pub(crate) fn check(&self, file: &impl Fields, reference: &Path) -> Result<()> {
        self.check_same(&Self::of(file)?, file.path(), reference)
    }

    /// Checks like [`check`](Self::check), given the metadata `other` of the file at `path`.
    pub(crate) fn check_same(&self, other: &Self, path: &Path, reference: &Path) -> Result<()> {
        let differs =
            |what, found, expected| Err(Error::differs(path, what, found, expected, reference));
        if other.channels() != self.channels() {
            let [found, expected] = [other, self].map(|m| format!("{:?}", m.channels()));
            return differs("channels", found, expected);
        }
        same_grid((other.grid(), path), (self.grid(), reference))?;
        if (other.dhours - self.dhours).abs() > 1e-4 * self.dhours {
            let [found, expected] = [other, self].map(|m| format!("{} s", m.time_step()));
            return differs("time step", found, expected);
        }
        Ok(())
    }

    /// Whether a folder has a `data.json`.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Metadata;
    ///
    /// assert!(!Metadata::exists("nowhere"));
    /// ```
    pub fn exists(folder: impl AsRef<Path>) -> bool {
        folder.as_ref().join(NAME).exists()
    }

    /// Reads `data.json` from a folder.
    ///
    /// # Errors
    /// A file that does not exist or does not hold such metadata.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join(NAME);
        let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
        serde_json::from_reader(BufReader::new(file)).map_err(|e| Error::io(&path, e))
    }

    /// Writes `data.json` into a folder, creating the folder if it does not exist.
    ///
    /// # Errors
    /// A folder that cannot be created or written.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        self.stage(folder.as_ref())?.commit()
    }

    /// Writes `data.json` under a temporary name into a folder, creating the folder if it does not
    /// exist.
    pub(crate) fn stage(&self, folder: &Path) -> Result<Staged> {
        std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        json::stage(&folder.join(NAME), self)
    }
}
