//! Tensors of a file, by name.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{BoolStore, DType};
use pytorch_reader::PytorchReader;

use crate::checkpoint::Checkpoint;
use crate::{Error, Result};

/// Tensor of a file, read on demand.
pub(super) struct Stored {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) read: Box<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
}

/// Tensors of a file, by name.
pub(super) struct Tensors {
    pub(super) tensors: BTreeMap<String, Stored>,
    /// Tensors of types that burn lacks, and these types.
    pub(super) unknown: BTreeMap<String, String>,
}

/// Lists the tensors of a safetensors file.
pub(super) fn safetensors(path: &Path) -> Result<Tensors> {
    let file = Arc::new(Checkpoint::open(path)?);
    let unknown = file.unknown.iter();
    let unknown = unknown.map(|(name, dtype)| (name.clone(), format!("{dtype:?}")));
    let entries = file.index.tensors.iter().map(|(name, entry)| {
        let (file, key) = (file.clone(), name.clone());
        let stored = Stored {
            dtype: entry.element_type(),
            shape: entry.shape.clone(),
            read: Box::new(move || Ok(file.data(&key)?.as_bytes().to_vec())),
        };
        (name.clone(), stored)
    });
    Ok(Tensors {
        tensors: entries.collect(),
        unknown: unknown.collect(),
    })
}

/// Lists the tensors of a file written by `torch.save`.
pub(super) fn pickled(path: &Path) -> Result<Tensors> {
    let opened = PytorchReader::new(path).map_err(|error| {
        let cause = error.to_string();
        let hint = if cause.contains("Complex") {
            " Save complex tensors as torch.view_as_real(tensor), or all by safetensors.torch.save_file."
        } else {
            ""
        };
        Error::checkpoint(path, cause + hint)
    })?;
    let entries = opened.into_tensors().into_iter().map(|(name, tensor)| {
        let (path, shape) = (path.to_path_buf(), tensor.shape().to_vec());
        let stored = Stored {
            dtype: element_type(tensor.dtype()),
            shape,
            read: Box::new(move || {
                let bytes = tensor.read();
                bytes.map_err(|error| Error::checkpoint(&path, error.to_string()))
            }),
        };
        (name, stored)
    });
    Ok(Tensors {
        tensors: entries.collect(),
        unknown: BTreeMap::new(),
    })
}

fn element_type(dtype: pytorch_reader::DType) -> DType {
    use pytorch_reader::DType as Pickled;
    match dtype {
        Pickled::F64 => DType::F64,
        Pickled::F32 => DType::F32,
        Pickled::F16 => DType::F16,
        Pickled::BF16 => DType::BF16,
        Pickled::I64 => DType::I64,
        Pickled::I32 => DType::I32,
        Pickled::I16 => DType::I16,
        Pickled::I8 => DType::I8,
        Pickled::U64 => DType::U64,
        Pickled::U32 => DType::U32,
        Pickled::U16 => DType::U16,
        Pickled::U8 => DType::U8,
        Pickled::Bool => DType::Bool(BoolStore::Native),
    }
}
