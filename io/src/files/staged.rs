use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::{Builder, TempPath};

use super::durable;
use crate::{Error, Result};

pub(crate) const PREFIX: &str = ".halocline-";
pub(crate) const SUFFIX: &str = ".partial";
/// File in an unfinished folder that its writer keeps locked.
pub(crate) const LOCK: &str = ".lock";
/// Age from which on an unfinished file is a leftover; longer than a job may be suspended.
const LEFTOVER: Duration = Duration::from_secs(7 * 24 * 3600);

/// File that is written under a temporary name next to its target, and renamed when it is complete.
///
/// If dropped before [`commit`](Staged::commit), it leaves nothing behind. A file left by a killed
/// process is removed when the next file is created in the folder, at least a week after its last
/// write: on file systems without locks, nothing else distinguishes a killed writer from a slow
/// one. Elsewhere, HDF5's lock protects an open file at any age.
#[derive(Debug)]
pub(crate) struct Staged {
    temporary: TempPath,
    target: PathBuf,
}

impl Staged {
    /// Creates an empty file in the folder of `target`.
    pub(crate) fn new(target: &Path) -> Result<Self> {
        Self::with_suffix(target, SUFFIX)
    }

    fn with_suffix(target: &Path, suffix: &str) -> Result<Self> {
        let folder = durable::parent(target);
        remove_leftovers(folder);
        let mut builder = Builder::new();
        builder.prefix(PREFIX).suffix(suffix);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // Temporary files are private by default; this one gets ordinary permissions.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let file = builder
            .tempfile_in(folder)
            .map_err(|e| Error::io(target, e))?;
        Ok(Self {
            temporary: file.into_temp_path(),
            target: target.into(),
        })
    }

    /// Returns the temporary path, to write to.
    pub(crate) fn path(&self) -> &Path {
        &self.temporary
    }

    /// Returns the path of the complete file.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Syncs the file, renames it to its target, and waits until the name is on disk.
    pub(crate) fn commit(self) -> Result<()> {
        let Self { temporary, target } = self;
        File::open(&temporary)
            .and_then(|file| file.sync_all())
            .map_err(|e| Error::io(&target, e))?;
        temporary
            .persist(&target)
            .map_err(|e| Error::io(&target, e))?;
        durable::sync_folder(durable::parent(&target))
    }
}

/// Writes a file atomically. Calls `write` with a temporary path that has the same extension, and
/// renames the file when it is complete and on disk. After a failure or a kill, an earlier file is
/// unchanged.
///
/// # Errors
/// Errors of `write`; a folder that cannot be written.
///
/// # Example
/// ```
/// use halocline_io::save_whole;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("notes.txt");
/// let write = |path: &std::path::Path| -> Result<(), Box<dyn std::error::Error>> {
///     Ok(std::fs::write(path, "whole")?)
/// };
/// save_whole(&path, write)?;
/// assert_eq!(std::fs::read_to_string(&path)?, "whole");
/// # Ok(())
/// # }
/// ```
pub fn save_whole<E: From<Error>>(
    path: impl AsRef<Path>,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let path = path.as_ref();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let staged = Staged::with_suffix(path, &format!("{SUFFIX}.{extension}"))?;
    write(staged.path())?;
    Ok(staged.commit()?)
}

/// Removes files and folders that killed writers left in a folder. Failures are ignored: a leftover
/// takes up space but does no harm.
pub(crate) fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_ours = name.starts_with(PREFIX)
            && (name.ends_with(SUFFIX) || name.contains(&format!("{SUFFIX}.")));
        if is_ours && is_leftover(&entry.path()) {
            let _ = remove(&entry.path());
        }
    }
}

/// Removes a file, or a folder with all that is in it.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// Removes a file, unless there is none.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether a file, or the lock file of a folder, is older than [`LEFTOVER`] and not locked by any
/// process.
fn is_leftover(path: &Path) -> bool {
    let lock = path.join(LOCK);
    let path = if lock.is_file() { &lock } else { path };
    let old = fs::symlink_metadata(path)
        .and_then(|found| found.modified())
        .is_ok_and(|written| {
            let age = SystemTime::now().duration_since(written);
            age.is_ok_and(|age| age > LEFTOVER)
        });
    let locked = || match File::open(path) {
        Ok(file) => matches!(file.try_lock(), Err(TryLockError::WouldBlock)),
        Err(_) => true,
    };
    old && !locked()
}

#[cfg(test)]
mod tests {
    use ndarray::Array3;

    use super::*;
    use crate::{FieldWriter, Grid, WriterConfig};

    /// Sets the modification time to `age` ago.
    fn age(path: &Path, age: Duration) {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    fn partial(folder: &Path) -> Vec<PathBuf> {
        fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.to_string_lossy().ends_with(SUFFIX))
            .collect()
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_no_file_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let leave = |name: &str, since: Duration| {
            let path = folder.join(name);
            fs::write(&path, "half of it").unwrap();
            age(&path, since);
            path
        };
        let killed = leave(
            ".halocline-killed.partial",
            LEFTOVER + Duration::from_secs(60),
        );
        let picture = leave(".halocline-killed.partial.png", 2 * LEFTOVER);
        let young = leave(
            ".halocline-young.partial",
            LEFTOVER - Duration::from_secs(60),
        );
        let other = leave("other.partial", 2 * LEFTOVER);
        // A slow writer.
        let grid = Grid::with_poles(3, 4).unwrap();
        let path = folder.join("field.h5");
        let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new()).unwrap();
        assert!(!killed.exists() && !picture.exists());
        let waiting: Vec<PathBuf> = partial(folder)
            .into_iter()
            .filter(|path| *path != young && *path != other)
            .collect();
        assert_eq!(waiting.len(), 1);
        age(&waiting[0], 2 * LEFTOVER);

        Staged::new(&folder.join("data.json")).unwrap();
        assert!(young.exists() && other.exists() && waiting[0].exists());
        writer.append(0.0, Array3::zeros([1, 3, 4]).view()).unwrap();
        writer.finish().unwrap();
        assert!(path.exists());
    }

    #[test]
    fn a_file_that_is_not_whole_replaces_none() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("map.png");
        fs::write(&target, "old").unwrap();
        let failed = save_whole(&target, |path| {
            assert!(path.extension().is_some_and(|extension| extension == "png"));
            fs::write(path, "half").unwrap();
            Err(Error::argument("map", "half", "a whole one"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_to_string(&target).unwrap(), "old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        durable::tests::SYNCED.take();
        save_whole(&target, |path| {
            fs::write(path, "new").unwrap();
            Ok::<_, Error>(())
        })
        .unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert_eq!(durable::tests::SYNCED.take(), [folder.path()]);
    }

    #[test]
    fn a_file_has_its_name_on_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("data.json");
        let staged = Staged::new(&target).unwrap();
        fs::write(staged.path(), "{}").unwrap();
        staged.commit().unwrap();
        assert!(target.exists());
        let synced = durable::tests::SYNCED.take();
        assert_eq!(synced, [folder.path()]);
    }
}
