//! Folders that have a temporary name until they are complete.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use burn::config::Config;

use crate::files::durable;
use crate::files::staged::{LOCK, PREFIX, SUFFIX, remove, remove_leftovers};
use crate::formats::zarr;
use crate::{Error, Result};

/// Handling of an existing file or store with the name of an output.
///
/// See [`OutputConfig`](crate::OutputConfig) for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Reports an error. The default.
    Reject,
    /// Replaces it when the output is complete. Only files and Zarr stores are replaced.
    Replace,
}

/// Folder that is filled under a temporary name next to its target. The target appears when it is
/// complete.
///
/// The temporary name is derived from the target, so that a writer finds the work of an interrupted
/// one. Abandoned folders are removed like the files of killed writers.
#[derive(Debug)]
pub(crate) struct StagedFolder {
    path: PathBuf,
    target: PathBuf,
    existing: Existing,
    lock: File,
}

impl StagedFolder {
    /// Creates the folder, or opens the one that an interrupted writer left.
    ///
    /// # Errors
    /// A target that exists and may not be replaced, or whose name is too long to be; a folder that
    /// cannot be written; another active writer of the same target.
    pub(crate) fn open(target: &Path, existing: Existing) -> Result<Self> {
        let path = Self::path_of(target)?;
        let aside = aside_of(target);
        // An earlier writer was killed while it replaced the target.
        if !target.exists() && aside.exists() {
            fs::rename(&aside, target).map_err(|error| Error::io(target, error))?;
        }
        check_target(target, existing)?;
        if existing == Existing::Replace {
            check_name(target)?;
        }
        fs::create_dir_all(&path).map_err(|error| Error::io(target, error))?;
        let lock = path.join(LOCK);
        let lock = File::create(&lock).map_err(|error| Error::io(&lock, error))?;
        // On file systems without locks, other writers go unnoticed.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let cause = "another program is writing it; wait for its end, or choose another name";
            let error = std::io::Error::new(ErrorKind::ResourceBusy, cause);
            return Err(Error::io(target, error));
        }
        let folder = Self {
            path,
            target: target.into(),
            existing,
            lock,
        };
        // After that the folder, in which an interrupted writer may have left work, is no leftover.
        folder.touch();
        remove_leftovers(durable::parent(target));
        Ok(folder)
    }

    /// Returns the temporary path of a target.
    pub(crate) fn path_of(target: &Path) -> Result<PathBuf> {
        let Some(name) = target.file_name() else {
            let expected = "a path that ends in a name";
            return Err(Error::argument("path", format!("{target:?}"), expected));
        };
        let name = format!("{PREFIX}{}{SUFFIX}", name.to_string_lossy());
        Ok(durable::parent(target).join(name))
    }

    /// Returns the temporary path, to write to.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes everything that an interrupted writer left.
    pub(crate) fn clear(&self) -> Result<()> {
        let failed = |error| Error::io(&self.path, error);
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name() == LOCK {
                continue;
            }
            remove(&entry.path()).map_err(failed)?;
        }
        Ok(())
    }

    /// Waits until the bytes of all files in the folder are on disk.
    pub(crate) fn sync_files(&self) -> Result<()> {
        let [files, _] = contents(&self.path)?;
        durable::sync_files(&files)
    }

    /// Marks the folder as in use, so that it is not removed as a leftover.
    pub(crate) fn touch(&self) {
        // Needed only on file systems without locks, so failures are ignored.
        let _ = self.lock.set_modified(SystemTime::now());
    }

    /// Renames the folder, or a file in it, to the target. Its files must be on disk.
    ///
    /// # Errors
    /// A target that exists and may not be replaced; a failure to rename.
    pub(crate) fn commit(self, file: Option<&str>) -> Result<()> {
        let failed = |error| Error::io(&self.target, error);
        let [_, folders] = contents(&self.path)?;
        durable::sync_folders(&folders)?;
        check_target(&self.target, self.existing)?;
        let source = file.map_or_else(|| self.path.clone(), |file| self.path.join(file));
        let aside = aside_of(&self.target);
        // Renaming cannot replace a folder with files, so the old target is moved aside.
        let replaced = self.target.is_dir() || (file.is_none() && self.target.exists());
        if replaced {
            if aside.exists() {
                remove_aside(&aside).map_err(failed)?;
            }
            fs::rename(&self.target, &aside).map_err(failed)?;
        }
        if let Err(error) = fs::rename(source, &self.target) {
            if replaced {
                let _ = fs::rename(&aside, &self.target);
            }
            return Err(failed(error));
        }
        if file.is_none() {
            // Up to here, the lock keeps other writers out of the folder.
            fs::remove_file(self.target.join(LOCK)).map_err(failed)?;
        }
        durable::sync_folder(durable::parent(&self.target))?;
        if file.is_some() {
            fs::remove_dir_all(&self.path).map_err(failed)?;
        }
        if replaced {
            remove_aside(&aside).map_err(failed)?;
        }
        Ok(())
    }

    /// Removes the folder. If this fails, it is removed later as a leftover.
    pub(crate) fn discard(&self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Returns the path to which a target is moved aside. It is not recognised as a leftover, which
/// others would remove.
fn aside_of(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    durable::parent(target).join(format!("{PREFIX}{name}.replaced"))
}

/// Returns the path of a leftover from that of a target that was moved aside.
fn leftover_of(aside: &Path) -> PathBuf {
    let name = aside.file_name().unwrap_or_default().to_string_lossy();
    durable::parent(aside).join(format!("{name}{SUFFIX}"))
}

/// Checks that the file system permits the longest of the names that a replaced target takes.
fn check_name(target: &Path) -> Result<()> {
    match leftover_of(&aside_of(target)).try_exists() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::InvalidFilename => {
            let expected = "a name shorter by up to 28 bytes, which are added to that of the replaced output until it \
                            is removed";
            Err(Error::argument("path", target.display(), expected))
        }
        Err(error) => Err(Error::io(target, error)),
    }
}

/// Removes a target that was moved aside. Renames it to a leftover first, so that a partly removed
/// one is never restored.
fn remove_aside(aside: &Path) -> std::io::Result<()> {
    let leftover = leftover_of(aside);
    if leftover.exists() {
        remove(&leftover)?;
    }
    fs::rename(aside, &leftover)?;
    remove(&leftover)
}

/// Checks that a target does not exist, or may be replaced.
fn check_target(target: &Path, existing: Existing) -> Result<()> {
    let Ok(found) = fs::symlink_metadata(target) else {
        return Ok(());
    };
    let is_output = found.is_file() || (found.is_dir() && zarr::is_group(target));
    let cause = match existing {
        Existing::Replace if is_output => return Ok(()),
        Existing::Replace => "it is neither a Zarr store nor a file, and is not replaced",
        Existing::Reject => "it is there already; choose another name, or Existing::Replace",
    };
    let error = std::io::Error::new(ErrorKind::AlreadyExists, cause);
    Err(Error::io(target, error))
}

/// Returns the files in a folder and its subfolders, and these folders.
fn contents(folder: &Path) -> Result<[Vec<PathBuf>; 2]> {
    let (mut files, mut folders) = (Vec::new(), Vec::new());
    let mut unread = vec![folder.to_path_buf()];
    while let Some(folder) = unread.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| Error::io(&folder, error))? {
            let path = entry.map_err(|error| Error::io(&folder, error))?.path();
            let paths = if path.is_dir() {
                &mut unread
            } else {
                &mut files
            };
            paths.push(path);
        }
        folders.push(folder);
    }
    Ok([files, folders])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn work_of_any_age_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.zarr");
        let staged = StagedFolder::open(&target, Existing::Reject).unwrap();
        let block = staged.path().join("block");
        fs::write(&block, "done").unwrap();
        let month = Duration::from_secs(30 * 24 * 3600);
        staged.lock.set_modified(SystemTime::now() - month).unwrap();
        drop(staged);
        let _staged = StagedFolder::open(&target, Existing::Reject).unwrap();
        assert!(block.exists());
    }

    #[test]
    fn a_name_too_long_to_be_replaced_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let replace = |length: usize| {
            let target = folder.path().join("a".repeat(length));
            fs::write(&target, "old").unwrap();
            let staged = StagedFolder::open(&target, Existing::Replace);
            staged.and_then(|staged| staged.commit(None))
        };
        replace(227).unwrap();
        let error = replace(228).unwrap_err().to_string();
        assert!(error.contains("expected a name shorter by"), "{error}");
        // The output that was replaced, and the one that was not.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
