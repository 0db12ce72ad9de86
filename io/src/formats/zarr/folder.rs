//! A folder as storage for zarrs.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zarrs::storage::byte_range::{ByteRange, ByteRangeIterator};
use zarrs::storage::{Bytes, MaybeBytesIterator, ReadableStorageTraits, StorageError, StoreKey};

use crate::formats::compressed::{limit, zstandard_bound};

/// Folder that serves as storage and counts the bytes read.
#[derive(Debug)]
pub(super) struct Folder {
    pub root: PathBuf,
    /// Decoded bytes of the largest chunk of all arrays.
    pub largest: AtomicU64,
    pub fetched: AtomicU64,
}

impl Folder {
    /// Opens the file of a key, if it exists, and returns it with its size.
    fn open(&self, key: &StoreKey) -> Result<Option<(File, u64)>, StorageError> {
        let path = self.root.join(key.as_str());
        let found = match path.metadata() {
            Ok(found) if found.is_file() => found,
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            // A path component is a file.
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Ok(None),
            Err(error) => return Err(Arc::new(error).into()),
        };
        let file = File::open(path).map_err(Arc::new)?;
        Ok(Some((file, found.len())))
    }
}

impl ReadableStorageTraits for Folder {
    fn get_partial_many<'a>(
        &'a self,
        key: &StoreKey,
        byte_ranges: ByteRangeIterator<'a>,
    ) -> Result<MaybeBytesIterator<'a>, StorageError> {
        let Some((mut file, size)) = self.open(key)? else {
            return Ok(None);
        };
        let mut read = move |range: ByteRange| {
            let beyond = || {
                let cause = format!("bytes {range} of a file of {size}");
                StorageError::from(Arc::new(std::io::Error::other(cause)))
            };
            // Memory is bounded by the size of the file, whatever an index in it says.
            let (start, length) = match range {
                ByteRange::FromStart(start, None) => (start, size.checked_sub(start)),
                ByteRange::FromStart(start, Some(length)) => (start, Some(length)),
                ByteRange::Suffix(length) => (size.saturating_sub(length), Some(length)),
            };
            let length = length.ok_or_else(beyond)?;
            if start.checked_add(length).is_none_or(|end| end > size) {
                return Err(beyond());
            }
            let mut bytes = vec![0; length as usize];
            file.seek(SeekFrom::Start(start)).map_err(Arc::new)?;
            file.read_exact(&mut bytes).map_err(Arc::new)?;
            self.fetched.fetch_add(length, Ordering::Relaxed);
            // Decoders allocate the size that compressed data claims before they look at the data.
            let most = limit(self.largest.load(Ordering::Relaxed));
            if claim(&bytes).is_some_and(|claim| claim > most) {
                let cause = "compressed data that claims more bytes than a chunk has";
                return Err(Arc::new(std::io::Error::other(cause)).into());
            }
            Ok(Bytes::from(bytes))
        };
        let pieces: Vec<_> = byte_ranges.map(&mut read).collect();
        Ok(Some(Box::new(pieces.into_iter())))
    }

    fn size_key(&self, key: &StoreKey) -> Result<Option<u64>, StorageError> {
        Ok(self.open(key)?.map(|(_, size)| size))
    }

    fn supports_get_partial(&self) -> bool {
        true
    }
}

/// Returns the decoded size that compressed data claims, if it is Zstandard or Blosc.
fn claim(bytes: &[u8]) -> Option<u64> {
    match *bytes {
        // Zstandard frame, or a skippable frame before it.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
            Some(zstandard_bound(bytes).unwrap_or(u64::MAX))
        }
        // Blosc header: version, flags, then decoded size, block size and compressed size. A
        // checksum may follow the data.
        [2, _, _, _, a, b, c, d, _, _, _, _, e, f, g, h, ..]
            if (bytes.len() - 4..=bytes.len())
                .contains(&(u32::from_le_bytes([e, f, g, h]) as usize)) =>
        {
            Some(u32::from_le_bytes([a, b, c, d]).into())
        }
        _ => None,
    }
}
