//! Values that a program stores with a run.

use burn::module::Module;
use halocline_core::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Trainer;

impl<M: Module> Trainer<M> {
    /// Stores a value with the run, the same on all ranks: it is saved, and restored by a resume.
    /// NaN and infinities, which JSON lacks, become `null`, which an `Option` reads as `None`.
    ///
    /// # Errors
    /// JSON cannot represent the value, such as a map whose keys are not strings.
    pub fn note(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(value).map_err(Error::other)?;
        self.notes.insert(name.into(), value);
        self.saved = None;
        Ok(())
    }

    /// Reads a [stored](Self::note) value.
    ///
    /// # Errors
    /// The value has another form.
    pub fn noted<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        self.notes
            .get(name)
            .cloned()
            .map(serde_json::from_value)
            .transpose()
            .map_err(|error| Error::other(format!("note {name:?}: {error}")))
    }
}
