//! Access to the bytes of a file for format readers, by several threads at once.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use hdf5_reader::error::{Error, Result};
use hdf5_reader::{Storage, StorageBuffer};

use super::cf::variable::{Stamp, stamp_of};

/// File that counts the bytes read from it. Limits the size of each read, so that damaged metadata
/// cannot cause large allocations.
pub(crate) struct FileBytes {
    file: File,
    len: u64,
    /// Stamp of the open file, which keeps being read even if another file replaces it.
    pub(crate) stamp: Stamp,
    most: usize,
    fetched: AtomicU64,
}

impl FileBytes {
    pub(crate) fn open(path: &Path, most: usize) -> std::io::Result<Self> {
        let file = File::open(path)?;
        let found = file.metadata()?;
        Ok(Self {
            stamp: stamp_of(&found),
            len: found.len(),
            file,
            most,
            fetched: AtomicU64::new(0),
        })
    }

    /// Reads bytes into a buffer of the caller, which grows as needed.
    pub(crate) fn read_into<'a>(
        &self,
        offset: u64,
        len: usize,
        memory: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        // Checked before memory is allocated.
        self.check(offset, len)?;
        memory.resize(memory.len().max(len), 0);
        let bytes = &mut memory[..len];
        self.fill(bytes, offset)?;
        Ok(bytes)
    }

    /// Refuses reads that exceed the limit or the end of the file.
    fn check(&self, offset: u64, len: usize) -> Result<()> {
        if len > self.most {
            return Err(Error::ResourceLimit(format!("{len} bytes at once")));
        }
        let end = offset.checked_add(len as u64);
        if end.is_some_and(|end| end <= self.len) {
            Ok(())
        } else {
            Err(Error::OffsetOutOfBounds(offset))
        }
    }

    fn fill(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        #[cfg(unix)]
        std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, offset)?;
        #[cfg(not(any(unix, windows)))]
        compile_error!("no way to read a file at a place, by several threads");
        #[cfg(windows)]
        {
            let mut read = 0;
            while read < bytes.len() {
                let (rest, at) = (&mut bytes[read..], offset + read as u64);
                match std::os::windows::fs::FileExt::seek_read(&self.file, rest, at)? {
                    0 => return Err(Error::OffsetOutOfBounds(at)),
                    more => read += more,
                }
            }
        }
        self.fetched
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Number of bytes read so far.
    pub(crate) fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }
}

impl Storage for FileBytes {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_range(&self, offset: u64, len: usize) -> Result<StorageBuffer> {
        self.check(offset, len)?;
        let mut bytes = vec![0; len];
        self.fill(&mut bytes, offset)?;
        Ok(StorageBuffer::from_vec(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_those_of_the_open_file_when_another_takes_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fields.nc");
        let other = folder.path().join("other.nc");
        std::fs::write(&path, "old").unwrap();
        let old = FileBytes::open(&path, 3).unwrap();
        // Same size, and same modification time on a clock that counts seconds.
        std::fs::write(&other, "new").unwrap();
        std::fs::rename(&other, &path).unwrap();
        let new = FileBytes::open(&path, 3).unwrap();
        let found = |file: &FileBytes| file.read_range(0, 3).unwrap().as_ref().to_vec();
        assert_eq!(
            (found(&old), found(&new)),
            (b"old".to_vec(), b"new".to_vec())
        );
        assert_ne!(old.stamp, new.stamp);
        assert_eq!(old.fetched(), 3);
    }

    #[test]
    fn ranges_are_limited_by_the_file_and_by_the_reader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fields.nc");
        std::fs::write(&path, "12345").unwrap();
        let file = FileBytes::open(&path, 4).unwrap();
        assert!(matches!(
            file.read_range(0, 5),
            Err(Error::ResourceLimit(_))
        ));
        assert!(file.read_range(3, 4).is_err());
        assert!(file.read_range(u64::MAX, 1).is_err());
        let mut memory = Vec::new();
        assert!(file.read_into(0, 5, &mut memory).is_err());
        assert!(file.read_into(u64::MAX, 1, &mut memory).is_err());
        assert!(file.read_into(3, 4, &mut memory).is_err());
        assert_eq!((file.fetched(), memory.capacity()), (0, 0));
        assert_eq!(file.read_into(1, 4, &mut memory).unwrap(), b"2345");
        // Now a part of the buffer suffices.
        assert_eq!(file.read_into(0, 2, &mut memory).unwrap(), b"12");
    }
}
