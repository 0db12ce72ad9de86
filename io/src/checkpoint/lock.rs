use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::files::durable;
use crate::{Error, Result};

/// Name of the file that is locked.
const NAME: &str = ".lock";
/// Maximum wait for an earlier job to release the folder.
const HANDOVER: Duration = Duration::from_secs(5);

/// Locks a folder for this job, creating it if it does not exist.
pub(super) fn lock_folder(folder: &Path) -> Result<File> {
    fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
    // The path to the folder must be on disk too. Syncing a parent folder may not be permitted.
    for parent in durable::enclosing_folders(folder) {
        let _ = durable::sync_folder(parent);
    }
    let path = folder.join(NAME);
    let lock = File::create(&path).map_err(|error| Error::io(&path, error))?;
    if let Some(warning) = acquire(folder, || lock.try_lock())? {
        eprintln!("halocline: {warning}");
    }
    Ok(lock)
}

/// Whether a job has locked a folder; never on a file system without locks.
pub(super) fn is_locked(folder: &Path) -> bool {
    let lock = File::options().write(true).open(folder.join(NAME));
    let tried = lock.map(|lock| lock.try_lock());
    matches!(tried, Ok(Err(TryLockError::WouldBlock)))
}

/// Waits up to [`HANDOVER`] for the lock. Returns a warning if the file system does not support
/// locks.
fn acquire(
    folder: &Path,
    mut try_lock: impl FnMut() -> std::result::Result<(), TryLockError>,
) -> Result<Option<String>> {
    let start = Instant::now();
    loop {
        match try_lock() {
            Ok(()) => return Ok(None),
            Err(TryLockError::WouldBlock) if start.elapsed() < HANDOVER => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(TryLockError::WouldBlock) => {
                let cause = "another job has it open; give each job a folder of its own";
                return Err(Error::checkpoint(folder, cause));
            }
            Err(TryLockError::Error(error)) => {
                return Ok(Some(format!(
                    "{}: cannot be locked ({error}), so a second job in this folder would not be noticed; give each \
                     job a folder of its own",
                    folder.display()
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_locks_is_told() {
        let folder = Path::new("runs/a");
        // ENOSYS, returned by Lustre if mounted without the option `flock`.
        let unsupported = || Err(TryLockError::Error(std::io::Error::from_raw_os_error(38)));
        let warning = acquire(folder, unsupported).unwrap().expect("a warning");
        assert!(
            warning.starts_with("runs/a: cannot be locked") && warning.contains("second job"),
            "{warning}"
        );
        let mut tries = 0;
        let later = || {
            tries += 1;
            match tries {
                3 => Ok(()),
                _ => Err(TryLockError::WouldBlock),
            }
        };
        assert_eq!(acquire(folder, later).unwrap(), None);
    }
}
