//! Variables of files and stores, and the containers that hold them.

use std::fmt::Debug;
use std::fs::Metadata;
use std::ops::Range;
use std::path::Path;
use std::time::SystemTime;

use ndarray::ArrayD;

use crate::attributes::{Attributes, Numbers};
use crate::formats::packing::NumberType;
use crate::{Error, Result};

/// Variable with its shape, the names of its dims and its attributes.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    /// Name of each dim, empty if it has none.
    pub(crate) dims: Vec<String>,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: Kind,
    /// Type of the values, in the terms of the format.
    pub(crate) dtype: String,
    /// Size of a value in bytes.
    pub(crate) width: usize,
    pub(crate) attributes: Vec<(String, Attribute)>,
    /// Extents of a chunk, the smallest unit of decoding, if the variable is chunked.
    pub(crate) chunk: Option<Vec<usize>>,
}

/// Type of the values of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Single-precision numbers.
    Single,
    /// Signed integers, read in double precision.
    Signed,
    /// Unsigned integers, read in double precision.
    Unsigned,
    /// Numbers of other types, read in double precision.
    Double,
    /// Not numbers.
    Other,
}

/// Value of an attribute.
#[derive(Clone, Debug)]
pub(crate) enum Attribute {
    Text(String),
    Numbers(Numbers),
    Other,
}

impl Variable {
    /// Returns the text of an attribute, if it is present and a text.
    pub(crate) fn text(&self, attribute: &str) -> Option<&str> {
        match self.attribute(attribute)? {
            Attribute::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the number of an attribute, if it is present and one number.
    pub(crate) fn number(&self, attribute: &str) -> Option<f64> {
        match self.numbers(attribute)?[..] {
            [number] => Some(number),
            _ => None,
        }
    }

    /// Returns the numbers of an attribute, if it is present and has numbers.
    pub(crate) fn numbers(&self, attribute: &str) -> Option<&[f64]> {
        match self.attribute(attribute)? {
            Attribute::Numbers(numbers) => Some(&numbers.values),
            _ => None,
        }
    }

    /// Whether the variable varies along this dim only; its other dims, if any, have length one.
    pub(crate) fn lies_on(&self, dim: &str) -> bool {
        let dims = self.dims.iter().zip(&self.shape);
        let mut long = dims.filter(|(_, extent)| **extent != 1);
        let is_only_long = long.next().is_some_and(|(own, _)| own == dim) && long.next().is_none();
        !dim.is_empty() && (self.dims == [dim] || is_only_long)
    }

    /// Type of the numbers, which determines their packing.
    pub(crate) fn number_type(&self) -> NumberType {
        match self.kind {
            Kind::Single => NumberType::Single,
            Kind::Signed => NumberType::Signed { bytes: self.width },
            Kind::Unsigned => NumberType::Unsigned,
            Kind::Double | Kind::Other => NumberType::Double,
        }
    }

    fn attribute(&self, attribute: &str) -> Option<&Attribute> {
        let mut attributes = self.attributes.iter();
        let (_, value) = attributes.find(|(name, _)| name == attribute)?;
        Some(value)
    }
}

/// Attributes of a variable in the file or store at a path.
pub(crate) struct VariableAttributes<'a>(pub(crate) &'a Path, pub(crate) &'a Variable);

impl Attributes for VariableAttributes<'_> {
    fn path(&self) -> &Path {
        self.0
    }

    fn name(&self) -> &str {
        &self.1.name
    }

    fn text(&self, attribute: &str) -> Result<Option<String>> {
        match self.1.attribute(attribute) {
            None => Ok(None),
            Some(Attribute::Text(text)) => Ok(Some(text.clone())),
            Some(other) => Err(self.refused(attribute, &format!("{other:?}"), "text")),
        }
    }

    fn numbers(&self, attribute: &str) -> Result<Option<Numbers>> {
        match self.1.attribute(attribute) {
            None => Ok(None),
            Some(Attribute::Numbers(numbers)) => Ok(Some(numbers.clone())),
            Some(other) => Err(self.refused(attribute, &format!("{other:?}"), "numbers")),
        }
    }
}

/// Size, modification time and inode of a file: a file with the same stamp is unchanged.
pub(crate) type Stamp = (u64, Option<SystemTime>, u64);

/// Returns the stamp of a file, if it exists.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let found = path.metadata().ok().filter(Metadata::is_file)?;
    Some(stamp_of(&found))
}

pub(crate) fn stamp_of(found: &Metadata) -> Stamp {
    #[cfg(unix)]
    let number = std::os::unix::fs::MetadataExt::ino(found);
    #[cfg(not(unix))]
    let number = 0;
    (found.len(), found.modified().ok(), number)
}

/// File or store of variables in one format. Error messages do not repeat the path.
pub(crate) trait Container: Debug + Send + Sync {
    fn path(&self) -> &Path;

    fn variables(&self) -> &[Variable];

    /// Names of members that cannot be read, each with the reason.
    fn unreadable(&self) -> &[(String, String)];

    /// Names of the channels along the levels of the only field, in formats that hold all channels
    /// in one array.
    fn channels(&self) -> Option<&[String]> {
        None
    }

    /// Reads a box of a variable of [`Kind::Single`].
    fn single(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f32>, String>;

    /// Reads a box of a numeric variable.
    fn double(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f64>, String>;

    /// Reads the texts of a variable of [`Kind::Other`] in order, if it has texts. The last dim of a
    /// variable of characters is the length of its texts.
    fn texts(&self, variable: usize) -> Result<Vec<String>, String> {
        let Variable { name, dtype, .. } = &self.variables()[variable];
        Err(format!("{name} of the type {dtype}, expected texts"))
    }

    /// Names of the variables along a dim that have texts of dates, if there is no reason to prefer
    /// one of them as its times.
    fn undecided_times(&self, _dim: &str) -> &[String] {
        &[]
    }

    /// Returns the stamp of the file that holds the chunk starting at cell `first`, or `None` if
    /// the chunk is not stored.
    fn stamp(&self, variable: usize, first: &[usize]) -> Option<Stamp>;

    /// Bytes read from the file or store so far.
    fn fetched(&self) -> u64;

    /// Size and checksum by which ranks compare the data.
    fn fingerprint(&self) -> Result<(u64, u32)>;

    /// Checksum of the modification times of the files.
    fn modified(&self) -> Result<u32>;
}

/// Error of a container for a box of a variable.
pub(crate) fn error_at(
    container: &dyn Container,
    variable: &str,
    cells: &[Range<usize>],
    cause: &str,
) -> Error {
    Error::Data {
        path: container.path().into(),
        dataset: variable.into(),
        cells: format!("{cells:?}"),
        cause: format!("{cause}; is the file damaged?"),
    }
}
