use std::path::{Path, PathBuf};

/// The result of everything in this crate that touches files.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What was wrong with a file: where, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that is not HDF5, or not all of it.
    #[error("{}: not a complete HDF5 file ({cause}); was its writer or a copy interrupted?", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What HDF5 said.
        cause: String,
    },
    /// HDF5 could not read or write a dataset.
    #[error("{}: dataset \"{dataset}\"{cells}: {cause}", path.display())]
    Hdf5 {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: &'static str,
        /// The box of cells that was asked for, or nothing where it was the whole dataset.
        cells: String,
        /// What HDF5 said.
        cause: String,
    },
    /// A dataset of the layout that is not in the file.
    #[error(
        "{}: no dataset \"{dataset}\"; expected fields, timestamp, channel, lat and lon, found {found:?}",
        path.display()
    )]
    MissingDataset {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: &'static str,
        /// What the file has.
        found: Vec<String>,
    },
    /// A dataset of another shape or type than the layout says.
    #[error("{}: dataset \"{dataset}\": found {found}, expected {expected}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: &'static str,
        /// Its shape or type.
        found: String,
        /// What the layout says.
        expected: String,
    },
    /// A value that cannot be right.
    #[error("{}: dataset \"{dataset}\"{index:?}: found {found}, expected {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The dataset.
        dataset: &'static str,
        /// The index of the value in the dataset.
        index: Vec<usize>,
        /// The value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A file that does not go with another one.
    #[error("{}: {what}: found {found}, expected {expected} as in {}", path.display(), reference.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What the file has.
        found: String,
        /// What the other one has.
        expected: String,
        /// The other one.
        reference: PathBuf,
    },
    /// A file or folder that is no checkpoint, is damaged, or does not fit.
    #[error("{}: {cause}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// An argument that is out of range or does not fit the data.
    #[error("{argument}: got {got}, expected {expected}")]
    Argument {
        /// The argument.
        argument: &'static str,
        /// Its value.
        got: String,
        /// What would be right.
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

    pub(crate) fn hdf5(path: &Path, dataset: &'static str, cause: hdf5_metno::Error) -> Self {
        Self::Hdf5 {
            path: path.into(),
            dataset,
            cells: String::new(),
            cause: cause.to_string(),
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
