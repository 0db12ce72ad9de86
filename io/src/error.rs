use std::path::{Path, PathBuf};

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error in a file or an argument, with its location and, where they apply, the value found and the
/// value expected.
///
/// # Example
/// ```
/// use halocline_io::{Error, FieldFile};
///
/// let error = FieldFile::open("nowhere/2018.h5").unwrap_err();
/// assert!(error.to_string().starts_with("nowhere/2018.h5: "));
/// assert!(matches!(error, Error::Io { path, .. } if path.ends_with("2018.h5")));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Error of the operating system.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// A file or folder that does not have the expected format, or is incomplete.
    #[error("{}: not a complete {format} ({cause}); was its writer or a copy interrupted?", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The format, such as `HDF5 file`.
        format: &'static str,
        /// Message of the reader of that format.
        cause: String,
    },
    /// A dataset that cannot be read or written.
    #[error("{}: dataset \"{dataset}\"{cells}: {cause}", path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: String,
        /// The requested box of cells, or empty for the whole dataset.
        cells: String,
        /// Message of the reader or writer of the format.
        cause: String,
    },
    /// A file that lacks a dataset of the layout.
    #[error(
        "{}: no dataset \"{dataset}\"; expected fields, timestamp, channel, lat and lon, or a data.json of Makani near \
         the file for the last four, found {found:?}",
        path.display()
    )]
    MissingDataset {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: String,
        /// The datasets in the file.
        found: Vec<String>,
    },
    /// A dataset whose shape, type or attributes do not fit the layout.
    #[error("{}: dataset \"{dataset}\": found {found}, expected {expected}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: String,
        /// The shape, type or attribute found.
        found: String,
        /// The one that the layout requires.
        expected: String,
    },
    /// An invalid value in a dataset.
    #[error("{}: dataset \"{dataset}\"{index:?}: found {found}, expected {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: String,
        /// Index of the value in the dataset.
        index: Vec<usize>,
        /// The value.
        found: String,
        /// Description of valid values.
        expected: String,
    },
    /// A file that does not match another one.
    #[error("{}: {what}: found {found}, expected {expected} as in {}", path.display(), reference.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// The property that differs.
        what: &'static str,
        /// The value in this file.
        found: String,
        /// The value in the other file.
        expected: String,
        /// The other file.
        reference: PathBuf,
    },
    /// A file or folder that is not a checkpoint, is damaged, or does not fit the program.
    #[error("{}: {cause}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        cause: String,
    },
    /// A file on another grid than [`OpenConfig::grid`](crate::OpenConfig::grid).
    #[error("grid: got {got}, expected {expected}")]
    OtherGrid {
        /// The grid of the file.
        got: String,
        /// The chosen grid, and the orders of its cells that are accepted.
        expected: String,
    },
    /// Files that are too short for any sample.
    #[error("{argument}: got {got}, expected {expected}")]
    TooShort {
        /// The argument that requires longer files.
        argument: &'static str,
        /// Its value.
        got: String,
        /// Description of valid values.
        expected: String,
        /// Largest number of steps for which the files have samples; zero if there is none.
        most_steps: usize,
    },
    /// An argument that is out of range or does not fit the data.
    #[error("{argument}: got {got}, expected {expected}")]
    Argument {
        /// The argument.
        argument: &'static str,
        /// Its value.
        got: String,
        /// Description of valid values.
        expected: String,
    },
}

impl Error {
    pub(crate) fn io(path: &Path, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            path: path.into(),
            source: source.into(),
        }
    }

    pub(crate) fn data(path: &Path, dataset: &str, cause: impl ToString) -> Self {
        Self::Data {
            path: path.into(),
            dataset: dataset.into(),
            cells: String::new(),
            cause: cause.to_string(),
        }
    }

    pub(crate) fn shape(
        path: &Path,
        dataset: &str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Shape {
            path: path.into(),
            dataset: dataset.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }

    pub(crate) fn differs(
        path: &Path,
        what: &'static str,
        found: String,
        expected: String,
        reference: &Path,
    ) -> Self {
        Self::Differs {
            path: path.into(),
            what,
            found,
            expected,
            reference: reference.into(),
        }
    }

    pub(crate) fn checkpoint(path: &Path, cause: impl Into<String>) -> Self {
        Self::Checkpoint {
            path: path.into(),
            cause: cause.into(),
        }
    }

    pub(crate) fn argument(
        argument: &'static str,
        got: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        Self::Argument {
            argument,
            got: got.to_string(),
            expected: expected.into(),
        }
    }
}

impl From<Error> for halocline_core::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}
