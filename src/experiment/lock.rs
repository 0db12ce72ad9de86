//! Lock of an experiment's folder.

use std::fs::{File, TryLockError};
use std::path::Path;

use halocline_core::Result;

use super::errors::failed;

/// Name of the file that is locked.
const LOCK: &str = ".statistics.lock";

/// Locks a folder for the job that computes its statistics or its climatology, changes its record,
/// or begins to train, until the returned file is dropped.
///
/// # Errors
/// A lock that another job holds; a folder that cannot be written.
pub(super) fn lock(folder: &Path) -> Result<File> {
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let path = folder.join(LOCK);
    let file = File::create(&path).map_err(failed(&path))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(failed(folder)(
            "another job computes the statistics or the climatology of this folder, or begins to train in it; start this \
             one later, or choose another folder",
        )),
        // File systems without locks are accepted.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}
