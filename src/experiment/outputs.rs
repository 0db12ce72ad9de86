//! Outputs of forecasts, and the folder of those from each state.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use halocline_core::{Error, Result, World};
use halocline_io::Existing;

use super::errors::failed;
use super::forecast_config::ForecastConfig;
use super::network::{FieldModel, OwnNetwork};
use super::patterns::expanded;
use super::record::write;
use super::setup::{Experiment, Files};
use crate::root::on_root;

/// File in a folder of forecasts that records their configuration and checkpoint.
const NOTE: &str = "forecasts.json";

/// Index of a state, and the path of the forecast from it.
pub(super) type Output = (usize, PathBuf);

/// Folder of the forecasts from each state, with a note of all that they depend on. While forecasts
/// are replaced the note is empty, so that remaining ones of another configuration or checkpoint
/// are not mistaken for new ones.
pub(super) struct OutputFolder<'a> {
    world: &'a World,
    path: &'a Path,
    note: Vec<u8>,
    existing: Existing,
}

impl<N: OwnNetwork> Experiment<N> {
    /// Refuses an output that is one of the files that are read, and a folder of outputs that is a
    /// file or a store.
    pub(super) fn check_output(&self, path: &Path, is_single: bool) -> Result<()> {
        let data = &self.config.data;
        // Some files of training may be gone.
        let files = data.files.iter().map(std::slice::from_ref);
        let trained = files.flat_map(|file| expanded(file).unwrap_or_default());
        let trained: Vec<PathBuf> = trained.collect();
        let mut inputs = self
            .data
            .paths()
            .iter()
            .chain(&trained)
            .chain(&data.constants)
            .chain(&self.data.static_fields);
        let output = path.canonicalize().ok();
        if output.is_some() && inputs.any(|input| input.canonicalize().ok() == output) {
            let fault = "one of the files that are read; choose another output";
            return Err(failed(path)(fault));
        }
        let is_store = ["zarr.json", ".zgroup"]
            .iter()
            .any(|name| path.join(name).exists());
        if !is_single && (path.is_file() || is_store) {
            let fault = "a file or a store; expected a folder for the forecasts from each state";
            return Err(failed(path)(fault));
        }
        Ok(())
    }

    /// Returns the folder of the forecasts of a model. Nothing is read or written yet.
    pub(super) fn output_folder<'a>(
        &'a self,
        model: &FieldModel<N>,
        config: &ForecastConfig,
        path: &'a Path,
        existing: Existing,
    ) -> Result<OutputFolder<'a>> {
        let others = (self.files == Files::Others).then(|| self.data.paths());
        let note = (
            &self.config.folder,
            self.config.seed,
            config.of_fields(),
            model.checkpoint,
            others,
        );
        Ok(OutputFolder {
            world: &self.world,
            path,
            note: serde_json::to_vec(&note).map_err(Error::other)?,
            existing,
        })
    }
}

impl OutputFolder<'_> {
    /// Checks the note of the folder, and writes the new one. Returns the outputs that are left to
    /// write: those that do not exist, or all that are to be replaced.
    ///
    /// # Errors
    /// Forecasts of another configuration or checkpoint that are not replaced; a failure of files
    /// or communication.
    pub(super) fn begin(&self, outputs: Vec<Output>) -> Result<Vec<Output>> {
        on_root(self.world, || self.check(&outputs))?;
        let note: &[u8] = if self.replaces() { &[] } else { &self.note };
        self.save_note(note)?;
        let is_left = |(_, path): &Output| self.replaces() || !path.exists();
        // Rank 0 decides, because a file system may show other ranks another state.
        let left: Vec<bool> = on_root(self.world, || Ok(outputs.iter().map(is_left).collect()))?;
        let left = outputs.into_iter().zip(left).filter(|(_, left)| *left);
        Ok(left.map(|(output, _)| output).collect())
    }

    /// Writes the note of a folder whose forecasts have all been replaced.
    pub(super) fn finish(&self) -> Result<()> {
        if self.replaces() {
            self.save_note(&self.note)?;
        }
        Ok(())
    }

    fn replaces(&self) -> bool {
        self.existing == Existing::Replace
    }

    /// Refuses a folder with forecasts of another configuration or checkpoint, unless all of them
    /// are among the outputs and are replaced.
    fn check(&self, outputs: &[Output]) -> Result<()> {
        let path = self.path.join(NOTE);
        let before = std::fs::read(&path).ok();
        let is_other = match &before {
            Some(before) => *before != self.note,
            None => outputs.iter().any(|(_, output)| output.exists()),
        };
        if !is_other {
            return Ok(());
        }
        if !self.replaces() {
            return Err(Error::other(format!(
                "{}: forecasts of another configuration or checkpoint, or some that are not all replaced; choose another \
                 folder, or Existing::Replace",
                path.display()
            )));
        }
        if before.is_some() {
            let stays = stores_beside(self.path, outputs)?;
            if !stays.is_empty() {
                return Err(Error::other(format!(
                    "{}: stores that may be of another configuration or checkpoint, and that this run does not replace, {}; \
                     remove them, or choose another folder",
                    self.path.display(),
                    stays.join(", ")
                )));
            }
        }
        Ok(())
    }

    fn save_note(&self, note: &[u8]) -> Result<()> {
        on_root(self.world, || {
            std::fs::create_dir_all(self.path).map_err(failed(self.path))?;
            write(&self.path.join(NOTE), note)
        })
    }
}

/// Returns the sorted names of the Zarr stores in a folder that are not among `outputs`.
fn stores_beside(folder: &Path, outputs: &[Output]) -> Result<Vec<String>> {
    let names_of_outputs = outputs.iter().filter_map(|(_, path)| path.file_name());
    let outputs: HashSet<_> = names_of_outputs.collect();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed(folder))? {
        let name = entry.map_err(failed(folder))?.file_name();
        let is_store = Path::new(&name)
            .extension()
            .is_some_and(|end| end == "zarr");
        if is_store && !outputs.contains(&*name) {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}
