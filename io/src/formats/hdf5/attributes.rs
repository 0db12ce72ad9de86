//! Attributes of HDF5 datasets.

use std::path::Path;

use hdf5_metno::Dataset;
use hdf5_metno::types::{FloatSize, TypeDescriptor};

use super::names;
use crate::attributes::{Attributes, Numbers};
use crate::{Error, Result};

/// Largest number of values in an attribute; longer ones are refused.
const MAX_VALUES: usize = 64;

/// Attributes of an HDF5 dataset.
pub(crate) struct DatasetAttributes<'a> {
    path: &'a Path,
    name: &'static str,
    dataset: &'a Dataset,
    present: Vec<String>,
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
