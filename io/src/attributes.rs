//! Attributes of datasets, independent of the file format.

use std::path::Path;

use crate::{Error, Result};

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

/// Numeric values of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Numbers {
    pub(crate) values: Vec<f64>,
    /// Whether the values are stored in single precision.
    pub(crate) single: bool,
}
