//! Safetensors files, written by ranks or by other programs.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use burn::tensor::{Bytes, bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo, View};
use serde::Serialize;

use super::dtype;
use super::index::{PieceEntry, TensorEntry};
use crate::{Error, Result};

/// Largest header that is read, the same limit as in the safetensors library.
const LARGEST_HEADER: u64 = 100_000_000;
/// Prefix of checksum keys in the metadata of a file; the name of the piece follows.
const SUM: &str = "crc32 ";
/// Metadata key whose value is the first piece of the state that is not finite.
const NOT_FINITE: &str = "not finite";

/// Role of a tensor in a checkpoint, which decides whether its values must be finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Parameters and state, usable only if finite.
    State,
    /// Any other data.
    Record,
}

/// Box of a tensor to write to a file.
#[derive(Debug)]
pub(crate) struct Cells {
    pub key: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Bytes,
    pub role: Role,
}

impl Cells {
    /// Whether all values are finite; integers and booleans always are.
    fn is_finite(&self) -> bool {
        fn all<const N: usize>(bytes: &[u8], is_finite: impl Fn([u8; N]) -> bool) -> bool {
            let (values, _) = bytes.as_chunks::<N>();
            // The loop over a chunk has no branches, so that it is vectorised.
            values.chunks(1024).all(|chunk| {
                chunk
                    .iter()
                    .fold(true, |all, value| all & is_finite(*value))
            })
        }
        match self.dtype {
            Dtype::F64 => all(&self.bytes, |value| f64::from_ne_bytes(value).is_finite()),
            Dtype::F32 => all(&self.bytes, |value| f32::from_ne_bytes(value).is_finite()),
            Dtype::F16 => all(&self.bytes, |value| f16::from_ne_bytes(value).is_finite()),
            Dtype::BF16 => all(&self.bytes, |value| bf16::from_ne_bytes(value).is_finite()),
            _ => true,
        }
    }
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

/// Writes a file whose metadata hold a checksum of each tensor and the name of the first state
/// tensor that is not finite.
pub(crate) fn write(path: &Path, cells: &[Cells]) -> Result<()> {
    let sums = cells.iter().map(|cells| {
        (
            format!("{SUM}{}", cells.key),
            crc32fast::hash(&cells.bytes).to_string(),
        )
    });
    let not_finite = cells
        .iter()
        .find(|cells| cells.role == Role::State && !cells.is_finite())
        .map(|cells| (NOT_FINITE.into(), cells.key.clone()));
    let views = cells.iter().map(|cells| (&cells.key, cells));
    serialize(views, Some(sums.chain(not_finite).collect()), path)
}

/// Header of a safetensors file. Its metadata are in the order of their keys, so that equal states
/// give equal files; the library writes them in the order of a hash table.
#[derive(Serialize)]
struct Header {
    #[serde(rename = "__metadata__", skip_serializing_if = "Option::is_none")]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(flatten)]
    tensors: Metadata,
}

/// Writes a safetensors file, and waits until its bytes are on disk.
///
/// The library's own function ignores errors on closing the file, which is when network file
/// systems report theirs.
pub(crate) fn serialize<V: View>(
    views: impl IntoIterator<Item = (impl AsRef<str>, V)>,
    metadata: Option<BTreeMap<String, String>>,
    path: &Path,
) -> Result<()> {
    let mut views: Vec<_> = views.into_iter().collect();
    // Same order as in the library, which keeps all elements aligned.
    views.sort_by(|(one, a), (other, b)| {
        let by_name = one.as_ref().cmp(other.as_ref());
        b.dtype().cmp(&a.dtype()).then(by_name)
    });
    let mut end = 0;
    let infos = views.iter().map(|(name, view)| {
        let start = end;
        end += view.data_len();
        let info = TensorInfo {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data_offsets: (start, end),
        };
        (name.as_ref().to_string(), info)
    });
    let failed = |cause: String| Error::checkpoint(path, cause);
    let tensors = Metadata::new(None, infos.collect()).map_err(|e| failed(e.to_string()))?;
    let header = Header { metadata, tensors };
    let mut header = serde_json::to_vec(&header).map_err(|e| failed(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() as u64 > LARGEST_HEADER {
        let cause = "the names and shapes of its tensors take more than a header may have";
        return Err(failed(format!("{cause}: {LARGEST_HEADER} bytes")));
    }
    let write = || {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for (_, view) in &views {
            file.write_all(&view.data())?;
        }
        file.into_inner()?.sync_all()
    };
    write().map_err(|error: std::io::Error| Error::io(path, error))
}

/// Resolves the links of a path given by the user.
pub(crate) fn followed(path: &Path) -> Result<PathBuf> {
    std::fs::canonicalize(path).map_err(|error| Error::io(path, error))
}

/// Opens a regular file for reading. Refuses links, and pipes, which might block forever.
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

/// Reads a whole small file.
pub(crate) fn read_whole(path: &Path) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    let mut bytes = Vec::new();
    let read = file.take(size).read_to_end(&mut bytes);
    read.map_err(|error| Error::io(path, error))?;
    Ok(bytes)
}

/// Contents of a file.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Size of the file in bytes.
    pub size: u64,
    /// Each tensor as a single piece. Complex tensors have real and imaginary parts in a last dim.
    pub tensors: HashMap<String, TensorEntry>,
    /// Tensors of types that burn lacks, such as floats of 8 bits.
    pub unknown: BTreeMap<String, Dtype>,
    /// First piece of a checkpoint's state that is not finite.
    pub not_finite: Option<String>,
}

/// Reads the contents of a file from its header.
pub(crate) fn contents(path: &Path) -> Result<Contents> {
    let (mut file, size) = open(path)?;
    let broken = |cause: String| Error::checkpoint(path, cause);
    let mut start = [0; 8];
    let short = |_| broken("it ends within its header".into());
    file.read_exact(&mut start).map_err(short)?;
    let no_header = |cause| broken(other_format(&start).map_or(cause, str::to_string));
    let length = u64::from_le_bytes(start);
    if length > LARGEST_HEADER.min(size.saturating_sub(8)) {
        return Err(no_header(format!(
            "a header of {length} bytes in a file of {size}; is it a safetensors file, and whole?"
        )));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(short)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| no_header(e.to_string()))?;
    if (8 + length).checked_add(metadata.data_len() as u64) != Some(size) {
        return Err(broken(format!(
            "{} bytes of tensors in a file of {size}; was a copy interrupted?",
            metadata.data_len()
        )));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (mut tensors, mut unknown) = (HashMap::new(), BTreeMap::new());
    for (key, info) in metadata.tensors() {
        let mut shape = info.shape.clone();
        let real = match info.dtype {
            Dtype::C64 => {
                shape.push(2);
                Dtype::F32
            }
            dtype => dtype,
        };
        let Some(dtype) = dtype::name_in_files(real) else {
            unknown.insert(key, real);
            continue;
        };
        let (start, end) = info.data_offsets;
        let sum = metadata
            .metadata()
            .as_ref()
            .and_then(|sums| sums.get(&format!("{SUM}{key}"))?.parse().ok());
        let piece = PieceEntry {
            file: name.to_string(),
            key: key.clone(),
            start: vec![0; shape.len()],
            shape: shape.clone(),
            bytes: 8 + length + start as u64..8 + length + end as u64,
            crc32: sum,
        };
        let entry = TensorEntry {
            dtype: dtype.into(),
            shape,
            pieces: vec![piece],
        };
        tensors.insert(key, entry);
    }
    let not_finite = metadata
        .metadata()
        .as_ref()
        .and_then(|metadata| metadata.get(NOT_FINITE).cloned());
    Ok(Contents {
        size,
        tensors,
        unknown,
        not_finite,
    })
}

/// Recognises common formats other than safetensors by their first bytes; returns the name and how
/// to convert the file.
fn other_format(start: &[u8; 8]) -> Option<&'static str> {
    Some(match start {
        [b'P', b'K', 3, 4, ..] => {
            "a zip archive, as torch.save and numpy.savez write; write a safetensors file in Python: \
             safetensors.torch.save_file(model.state_dict(), path)"
        }
        [0x80, 2..=5, ..] => {
            "a Python pickle, as older versions of torch.save write; load it in Python, and write a safetensors file: \
             safetensors.torch.save_file(model.state_dict(), path)"
        }
        b"\x89HDF\r\n\x1a\n" => {
            "an HDF5 file; FieldFile::open reads fields, and safetensors.numpy.save_file in Python writes arrays of it \
             as a safetensors file"
        }
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => {
            "an array of NumPy; write a safetensors file in Python: safetensors.numpy.save_file({name: array}, path)"
        }
        _ => return None,
    })
}

/// Reads a piece and verifies its checksum. The index must have been checked against the sizes of
/// files.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;

    fn cells(key: &str, values: [f32; 2]) -> Cells {
        let values: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        Cells {
            key: key.into(),
            dtype: Dtype::F32,
            shape: vec![2],
            bytes: Bytes::from_bytes_vec(values),
            role: Role::State,
        }
    }

    #[test]
    fn a_file_has_the_bytes_that_safetensors_gives_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let flag = Cells {
            dtype: Dtype::BOOL,
            shape: vec![3],
            bytes: Bytes::from_bytes_vec(vec![1, 0, 1]),
            ..cells("a flag", [0.0; 2])
        };
        let cells = [flag, cells("weight", [1.0, 2.0]), cells("bias", [3.0, 4.0])];
        let views = || cells.iter().map(|cells| (&cells.key, cells));
        let metadata = || [("format".to_string(), "pt".to_string())];
        serialize(views(), Some(metadata().into()), &path).unwrap();
        let expected = safetensors::serialize(views(), Some(metadata().into())).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        serialize(views(), None, &path).unwrap();
        let expected = safetensors::serialize(views(), None).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
    }

    #[test]
    fn equal_states_give_equal_files() {
        let folder = tempfile::tempdir().unwrap();
        let cells: Vec<Cells> = (0..20)
            .map(|index| cells(&format!("weight {index}"), [index as f32, f32::NAN]))
            .collect();
        let bytes = |name: &str| {
            let path = folder.path().join(name);
            write(&path, &cells).unwrap();
            std::fs::read(path).unwrap()
        };
        assert_eq!(bytes("one"), bytes("other"));
    }

    /// The handle that is synced and reports errors must refer to the file itself, not to one that
    /// replaces it.
    #[test]
    fn a_file_is_written_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".rank_00000.safetensors");
        let mut file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        write(&path, &[cells("x", [1.0, 2.0])]).unwrap();
        let mut found = Vec::new();
        file.read_to_end(&mut found).unwrap();
        assert_eq!(found, std::fs::read(&path).unwrap());
        assert_eq!(contents(&path).unwrap().tensors["x"].shape, [2]);
    }

    #[test]
    fn files_of_other_formats_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        let message = |start: &[u8]| {
            let mut bytes = start.to_vec();
            bytes.resize(4096, 0);
            std::fs::write(&path, bytes).unwrap();
            Checkpoint::open(&path).unwrap_err().to_string()
        };
        // First bytes of: torch.save since 1.6 and before; a pickle of protocol 4; h5py;
        // numpy.save.
        let cases: [(&[u8], &str); 5] = [
            (b"PK\x03\x04\0\0\x08\x08", "a zip archive, as torch.save"),
            (
                b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20",
                "a Python pickle",
            ),
            (b"\x80\x04\x95\x05\0\0\0\0\0\0\0", "a Python pickle"),
            (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
            (b"\x93NUMPY\x01\0v\0", "an array of NumPy"),
        ];
        for (start, what) in cases {
            let error = message(start);
            assert!(
                error.contains(what) && error.contains("save_file") && error.contains("model.pt"),
                "{error}"
            );
        }
        let error = message(b"something");
        assert!(error.contains("is it a safetensors file"), "{error}");
        // The header has a valid length but is not JSON.
        let error = message(b"\x20\0\0\0\0\0\0\0");
        assert!(error.contains("expected"), "{error}");
    }
}
