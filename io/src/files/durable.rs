//! Durable writes, which wait until files and their names are on disk.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::thread;

use crate::{Error, Result};

/// Number of files or folders that are synced at the same time. A sync waits for the disk rather
/// than for a core, and file systems serve those that wait together with one write.
const AT_ONCE: usize = 16;

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

/// Waits until the bytes of many files are on disk.
pub(crate) fn sync_files<P: AsRef<Path> + Sync>(paths: &[P]) -> Result<()> {
    at_once(paths, sync_file)
}

/// Waits until the names in a folder are on disk, on file systems that support it.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    #[cfg(test)]
    tests::SYNCED.with_borrow_mut(|synced| synced.push(path.into()));
    sync_names(path)
}

/// Waits until the names in many folders are on disk, on file systems that support it.
pub(crate) fn sync_folders<P: AsRef<Path> + Sync>(paths: &[P]) -> Result<()> {
    #[cfg(test)]
    tests::SYNCED.with_borrow_mut(|synced| {
        synced.extend(paths.iter().map(|path| path.as_ref().to_path_buf()));
    });
    at_once(paths, sync_names)
}

/// Calls a function with each path, on several threads.
fn at_once<P: AsRef<Path> + Sync>(paths: &[P], sync: fn(&Path) -> Result<()>) -> Result<()> {
    let share = paths.len().div_ceil(AT_ONCE).max(1);
    thread::scope(|scope| {
        let shares = paths.chunks(share);
        let threads: Vec<_> = shares
            .map(|paths| scope.spawn(move || paths.iter().try_for_each(|path| sync(path.as_ref()))))
            .collect();
        let mut threads = threads.into_iter();
        threads.try_for_each(|thread| thread.join().expect("syncing does not panic"))
    })
}

fn sync_names(path: &Path) -> Result<()> {
    let folder = File::open(path).map_err(|error| Error::io(path, error))?;
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
    use std::collections::HashSet;
    use std::path::PathBuf;
    use std::sync::Mutex;
    use std::thread::ThreadId;

    use super::*;

    thread_local! {
        /// Folders that this thread has synced.
        pub(crate) static SYNCED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
    }

    #[test]
    fn many_files_are_synced_at_the_same_time() {
        static SEEN: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());
        let sync = |_: &Path| {
            SEEN.lock().unwrap().push(thread::current().id());
            Ok::<(), Error>(())
        };
        at_once(&["a"; 5 * AT_ONCE - 1], sync).unwrap();
        let seen = SEEN.lock().unwrap();
        assert_eq!(seen.len(), 5 * AT_ONCE - 1);
        assert_eq!(seen.iter().collect::<HashSet<_>>().len(), AT_ONCE);
    }

    #[test]
    fn one_file_of_many_that_cannot_be_synced_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..40)
            .map(|file| folder.path().join(format!("file {file}")))
            .collect();
        for path in &paths {
            std::fs::write(path, "").unwrap();
        }
        sync_files(&paths).unwrap();
        std::fs::remove_file(&paths[29]).unwrap();
        let error = sync_files(&paths).unwrap_err().to_string();
        assert!(error.contains("file 29"), "{error}");
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
