//! Durable writes, which wait until files and their names are on disk.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use crate::{Error, Result};

/// Writes a file, and waits until its bytes are on disk.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| Error::io(path, error))
}

/// Waits until the bytes of a file are on disk.
pub(crate) fn sync_file(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|error| Error::io(path, error))
}

/// Waits until the names in a folder are on disk, on file systems that support it.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder = File::open(path).map_err(|error| Error::io(path, error))?;
    #[cfg(test)]
    tests::SYNCED.with_borrow_mut(|synced| synced.push(path.into()));
    match folder.sync_all() {
        Err(error) if !is_refusal(&error) => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

/// Whether an error means that the file system does not support syncing folders, because it makes
/// names durable by other means.
fn is_refusal(error: &io::Error) -> bool {
    /// These numbers are the same on every Unix.
    const EBADF: i32 = 9;
    const EINVAL: i32 = 22;
    matches!(error.raw_os_error(), Some(EBADF | EINVAL))
}

/// Returns the folder that contains a file or folder.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Iterates over the folders that contain `path` and its ancestors, nearest first; the last is the
/// working directory or the root.
pub(crate) fn enclosing_folders(path: &Path) -> impl Iterator<Item = &Path> {
    path.ancestors()
        .take_while(|path| path.file_name().is_some())
        .map(parent)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::path::PathBuf;

    use super::*;

    thread_local! {
        /// Folders that this thread has synced.
        pub(crate) static SYNCED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
    }

    #[test]
    fn the_working_directory_is_on_the_way_to_a_relative_path() {
        let folders = |path| {
            enclosing_folders(Path::new(path))
                .map(Path::to_path_buf)
                .collect()
        };
        let expected = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        let found: Vec<PathBuf> = folders("runs/a");
        assert_eq!(found, expected(&["runs", "."]));
        let found: Vec<PathBuf> = folders("a");
        assert_eq!(found, expected(&["."]));
        let found: Vec<PathBuf> = folders("/scratch/runs/a");
        assert_eq!(found, expected(&["/scratch/runs", "/scratch", "/"]));
        let found: Vec<PathBuf> = folders("../runs");
        assert_eq!(found, expected(&[".."]));
    }

    #[test]
    fn only_what_says_that_folders_are_not_synced_is_ignored() {
        let refused = |number| is_refusal(&io::Error::from_raw_os_error(number));
        assert_eq!([9, 22].map(refused), [true; 2]);
        // EIO, ENOSPC, EROFS, EDQUOT
        assert_eq!([5, 28, 30, 122].map(refused), [false; 4]);
        assert!(!is_refusal(&io::ErrorKind::InvalidInput.into()));
    }
}
