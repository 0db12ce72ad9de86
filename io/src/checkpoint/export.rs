//! Export of modules from checkpoints to single safetensors files.

use std::borrow::Cow;
use std::cell::RefCell;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::View;

use super::index::{PieceEntry, TensorEntry};
use super::{Checkpoint, dtype, file};
use crate::files::staged::Staged;
use crate::{Error, Result};

impl Checkpoint {
    /// Writes the tensors of a module, or all tensors if `name` is empty, into one safetensors file
    /// under their names within the module. Holds one tensor at a time in memory.
    ///
    /// # Errors
    /// See [`module_record`](Self::module_record); also fails if the file cannot be written.
    ///
    /// # Example
    /// ```
    /// use burn::nn::LinearConfig;
    /// use halocline_core::Launcher;
    /// use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    ///
    /// Launcher::local(2).run(|world| {
    ///     let model = world.init(|device| LinearConfig::new(3, 2).init(device))?;
    ///     let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
    ///     let mut snapshot = Snapshot::new(&world);
    ///     snapshot.module("model", &model)?;
    ///     checkpoints.save(1, snapshot, None)?;
    ///     checkpoints.wait()
    /// })?;
    /// let path = folder.join("model.safetensors");
    /// Checkpoint::open(folder.join("step_000000001"))?.export("model", &path)?;
    /// let single = Checkpoint::open(&path)?;
    /// assert_eq!(single.names().collect::<Vec<_>>(), ["bias", "weight"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn export(&self, name: &str, path: impl AsRef<Path>) -> Result<()> {
        let names = self.names_in(name)?;
        let failure = RefCell::new(None);
        let views = names.iter().map(|(whole, short)| {
            let view = Lazy {
                checkpoint: self,
                name: whole,
                entry: &self.index.tensors[whole],
                failure: &failure,
            };
            (short, view)
        });
        let staged = Staged::new(path.as_ref())?;
        let written = file::serialize(views, None, staged.path());
        if let Some(error) = failure.take() {
            return Err(error);
        }
        written?;
        staged.commit()
    }
}

/// Tensor that is read only when it is serialized.
struct Lazy<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    entry: &'a TensorEntry,
    /// First read error, which `data` cannot return.
    failure: &'a RefCell<Option<Error>>,
}

impl View for Lazy<'_> {
    fn dtype(&self) -> Dtype {
        dtype::in_files(&self.entry.dtype).expect("the index was checked")
    }

    fn shape(&self) -> &[usize] {
        &self.entry.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = match self.checkpoint.data(self.name) {
            Ok(data) => data.as_bytes().to_vec(),
            Err(error) => {
                self.failure.borrow_mut().get_or_insert(error);
                vec![0; self.data_len()]
            }
        };
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.entry.pieces.iter().map(PieceEntry::len).sum()
    }
}
