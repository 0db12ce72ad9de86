//! Attributes of datasets, read with checks of their type and count.

use std::path::Path;

use hdf5_metno::Dataset;
use hdf5_metno::types::{FloatSize, TypeDescriptor};

use crate::{Error, Result, names};

/// Largest number of values in an attribute; longer ones are refused.
const MAX_VALUES: usize = 64;

/// Attributes of a dataset, independent of the file format.
pub(crate) trait Attributes {
    /// The file or folder.
    fn path(&self) -> &Path;

    /// The name of the dataset.
    fn name(&self) -> &str;

    /// Reads the text of an attribute, if it is present.
    fn text(&self, attribute: &str) -> Result<Option<String>>;

    /// Reads the numbers of an attribute, if it is present.
    fn numbers(&self, attribute: &str) -> Result<Option<Numbers>>;

    /// Reads an attribute that must hold exactly one number, if it is present.
    fn number(&self, attribute: &str) -> Result<Option<f64>> {
        let numbers = self.numbers(attribute)?;
        let one = |numbers: Numbers| match numbers.values[..] {
            [value] => Ok(value),
            _ => Err(self.refused(attribute, &format!("{:?}", numbers.values), "one number")),
        };
        numbers.map(one).transpose()
    }

    /// Error for an attribute whose value is not supported.
    fn refused(&self, attribute: &str, value: &str, expected: &str) -> Error {
        let found = format!("{attribute} = {value}");
        Error::shape(self.path(), self.name(), found, expected)
    }
}

/// Attributes of an HDF5 dataset.
pub(crate) struct DatasetAttributes<'a> {
    path: &'a Path,
    name: &'static str,
    dataset: &'a Dataset,
    present: Vec<String>,
}

/// Numeric values of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Numbers {
    pub(crate) values: Vec<f64>,
    /// Whether the values are stored in single precision.
    pub(crate) single: bool,
}

impl<'a> DatasetAttributes<'a> {
    /// Lists the attributes of the dataset called `name` in the file at `path`.
    pub(crate) fn of(path: &'a Path, name: &'static str, dataset: &'a Dataset) -> Result<Self> {
        let present = dataset
            .attr_names()
            .map_err(|e| Error::data(path, name, e))?;
        Ok(Self {
            path,
            name,
            dataset,
            present,
        })
    }

    fn has(&self, attribute: &str) -> bool {
        self.present.iter().any(|present| present == attribute)
    }

    fn unreadable(&self, attribute: &str, cause: &hdf5_metno::Error) -> Error {
        Error::data(
            self.path,
            self.name,
            format!("attribute {attribute}: {cause}"),
        )
    }
}

impl Attributes for DatasetAttributes<'_> {
    fn path(&self) -> &Path {
        self.path
    }

    fn name(&self) -> &str {
        self.name
    }

    fn text(&self, attribute: &str) -> Result<Option<String>> {
        if !self.has(attribute) {
            return Ok(None);
        }
        let read = || {
            let found = self.dataset.attr(attribute)?;
            match found.size() {
                1 => names::read_strings(&found),
                size => Err(format!("{size} values where one text is expected").into()),
            }
        };
        let texts = read().map_err(|e| self.unreadable(attribute, &e))?;
        Ok(texts.into_iter().next())
    }

    fn numbers(&self, attribute: &str) -> Result<Option<Numbers>> {
        if !self.has(attribute) {
            return Ok(None);
        }
        let read = || {
            let found = self.dataset.attr(attribute)?;
            let size = found.size();
            if !(1..=MAX_VALUES).contains(&size) {
                return Err(format!("{size} values where 1 to {MAX_VALUES} are expected").into());
            }
            let kind = found.dtype()?.to_descriptor()?;
            Ok(Numbers {
                values: found.read_raw()?,
                single: kind == TypeDescriptor::Float(FloatSize::U4),
            })
        };
        read().map(Some).map_err(|e| self.unreadable(attribute, &e))
    }
}
