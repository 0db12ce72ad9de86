//! Safetensors files: those of ranks, and single ones of other programs.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use burn::tensor::Bytes;
use safetensors::tensor::{Metadata, View};
use safetensors::{Dtype, SafeTensorError};

use super::dtype;
use super::index::{PieceEntry, TensorEntry};
use crate::{Error, Result};

/// Largest header that is read: that of safetensors.
const LARGEST_HEADER: u64 = 100_000_000;
/// Before the name of a piece in the metadata of a file: its checksum.
const SUM: &str = "crc32 ";

/// A box of a tensor on its way to a file.
#[derive(Debug)]
pub(crate) struct Cells {
    pub key: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Bytes,
}

impl View for &Cells {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes a file whose bytes are on the disk when this returns, with a checksum of each tensor.
pub(crate) fn write(path: &Path, cells: &[Cells]) -> Result<()> {
    let sums = cells.iter().map(|cells| {
        (
            format!("{SUM}{}", cells.key),
            crc32fast::hash(&cells.bytes).to_string(),
        )
    });
    let views = cells.iter().map(|cells| (&cells.key, cells));
    serialize(views, Some(sums.collect()), path)?;
    sync(path)
}

/// Writes a safetensors file in the place of one that is there, or as one that anybody may read.
pub(crate) fn serialize<V: View>(
    views: impl IntoIterator<Item = (impl AsRef<str> + Ord + Display, V)>,
    metadata: Option<HashMap<String, String>>,
    path: &Path,
) -> Result<()> {
    let io = |error| Error::io(path, error);
    // The library makes a file that only its owner may read, and puts it in this one's place.
    let file = File::options().create(true).append(true).open(path);
    let permissions = file
        .and_then(|file| file.metadata())
        .map_err(io)?
        .permissions();
    safetensors::serialize_to_file(views, metadata, path).map_err(|error| failed(path, error))?;
    std::fs::set_permissions(path, permissions).map_err(io)
}

/// Waits until a file's bytes, or the names in a folder, are on the disk.
pub(crate) fn sync(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|error| Error::io(path, error))
}

fn failed(path: &Path, error: SafeTensorError) -> Error {
    match error {
        SafeTensorError::IoError(error) => Error::io(path, error),
        other => Error::checkpoint(path, other.to_string()),
    }
}

/// What a user's path leads to.
pub(crate) fn followed(path: &Path) -> Result<PathBuf> {
    std::fs::canonicalize(path).map_err(|error| Error::io(path, error))
}

/// Opens a regular file for reading: not what a link points to, nor a pipe that would never end.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    let found = std::fs::symlink_metadata(path).map_err(|error| Error::io(path, error))?;
    if !found.is_file() {
        return Err(Error::checkpoint(path, "not a regular file"));
    }
    let file = File::open(path).map_err(|error| Error::io(path, error))?;
    let size = file
        .metadata()
        .map_err(|error| Error::io(path, error))?
        .len();
    Ok((file, size))
}

/// The whole of a small file.
pub(crate) fn read_whole(path: &Path) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    let mut bytes = Vec::new();
    let read = file.take(size).read_to_end(&mut bytes);
    read.map_err(|error| Error::io(path, error))?;
    Ok(bytes)
}

/// What a file holds: its size, and each tensor as a single piece.
pub(crate) fn contents(path: &Path) -> Result<(u64, HashMap<String, TensorEntry>)> {
    let (mut file, size) = open(path)?;
    let broken = |cause: String| Error::checkpoint(path, cause);
    let mut length = [0; 8];
    let short = |_| broken("it ends within its header".into());
    file.read_exact(&mut length).map_err(short)?;
    let length = u64::from_le_bytes(length);
    if length > LARGEST_HEADER.min(size.saturating_sub(8)) {
        return Err(broken(format!(
            "a header of {length} bytes in a file of {size}"
        )));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(short)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| broken(e.to_string()))?;
    if (8 + length).checked_add(metadata.data_len() as u64) != Some(size) {
        return Err(broken(format!(
            "{} bytes of tensors in a file of {size}; was a copy interrupted?",
            metadata.data_len()
        )));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let entries = metadata.tensors().into_iter().map(|(key, info)| {
        let dtype = dtype::name_in_files(info.dtype)
            .ok_or_else(|| broken(format!("tensor {key:?} is of type {:?}", info.dtype)))?;
        let (start, end) = info.data_offsets;
        let sum = metadata.metadata().as_ref();
        let sum = sum.and_then(|sums| sums.get(&format!("{SUM}{key}"))?.parse().ok());
        let piece = PieceEntry {
            file: name.to_string(),
            key: key.clone(),
            start: vec![0; info.shape.len()],
            shape: info.shape.clone(),
            bytes: 8 + length + start as u64..8 + length + end as u64,
            crc32: sum,
        };
        let entry = TensorEntry {
            dtype: dtype.into(),
            shape: info.shape.clone(),
            pieces: vec![piece],
        };
        Ok((key, entry))
    });
    Ok((size, entries.collect::<Result<_>>()?))
}

/// The bytes of a piece, checked. The index has been checked against the sizes of files.
pub(crate) fn read(folder: &Path, piece: &PieceEntry) -> Result<Vec<u8>> {
    let path = folder.join(&piece.file);
    let (mut file, size) = open(&path)?;
    if piece.bytes.end > size {
        return Err(Error::checkpoint(
            &path,
            format!(
                "{size} bytes, expected {} at least; was a copy interrupted?",
                piece.bytes.end
            ),
        ));
    }
    let mut bytes = vec![0; piece.len()];
    file.seek(SeekFrom::Start(piece.bytes.start))
        .and_then(|_| file.read_exact(&mut bytes))
        .map_err(|error| Error::io(&path, error))?;
    match piece.crc32 {
        Some(sum) if sum != crc32fast::hash(&bytes) => Err(Error::checkpoint(
            &path,
            format!("the checksum of {:?} is wrong: it is damaged", piece.key),
        )),
        _ => Ok(bytes),
    }
}
