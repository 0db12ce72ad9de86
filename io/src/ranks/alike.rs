//! Comparison, by name, of properties that must be equal on all ranks of a mesh.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::{Error, Result};

/// Property: its name and its value as text, or a checksum of the value if the text would be long.
pub(crate) type Property = (&'static str, String);

/// Number of blocks of a file that are compared, each of [`BLOCK`] bytes; a file no larger than all
/// of them is compared whole.
const BLOCKS: u64 = 16;
const BLOCK: u64 = 4096;

/// Checks this rank's properties against those of the first rank.
pub(crate) fn check(properties: &[Property], first: &[(String, String)]) -> Result<()> {
    let mut pairs = properties.iter().zip(first);
    match pairs.find(|((_, value), (_, first))| value != first) {
        Some(((name, value), (_, first))) => {
            let expected = format!("{first}, as on the first rank");
            Err(Error::argument(name, value, expected))
        }
        None => Ok(()),
    }
}

/// Returns the CRC-32 of the little-endian bytes of the numbers.
pub(crate) fn checksum(numbers: impl IntoIterator<Item = f64>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for number in numbers {
        hasher.update(&number.to_le_bytes());
    }
    hasher.finalize()
}

/// Returns the size of a file and a CRC-32: of the whole file or, if it is large, of evenly spaced
/// blocks, from its first byte to its last.
pub(crate) fn fingerprint(path: &Path) -> Result<(u64, u32)> {
    let read = || {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut hasher = crc32fast::Hasher::new();
        let mut bytes = Vec::new();
        let blocks = if size <= BLOCKS * BLOCK { 1 } else { BLOCKS };
        for block in 0..blocks {
            let length = if blocks == 1 { size } else { BLOCK };
            // Divided last, so that the last block ends with the file.
            let start =
                u128::from(size - length) * u128::from(block) / u128::from((blocks - 1).max(1));
            file.seek(SeekFrom::Start(start as u64))?;
            bytes.clear();
            file.by_ref().take(length).read_to_end(&mut bytes)?;
            hasher.update(&bytes);
        }
        Ok((size, hasher.finalize()))
    };
    read().map_err(|e: std::io::Error| Error::io(path, e))
}

/// Returns the CRC-32 of the modification times of files.
pub(crate) fn modified(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    for path in paths {
        let path = path.as_ref();
        let found = path.metadata().and_then(|found| found.modified());
        let time = found.map_err(|error| Error::io(path, error))?;
        hasher.update(format!("{time:?}").as_bytes());
    }
    Ok(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_of_a_large_file_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("2018.h5");
        let mut bytes = vec![0_u8; (BLOCKS * BLOCK) as usize + 14];
        let mut found = || {
            std::fs::write(&path, &bytes).unwrap();
            let found = fingerprint(&path).unwrap();
            let last = bytes.len() - 1;
            bytes[last] = 1;
            found
        };
        assert_ne!(found(), found());
    }
}
