//! JSON files, such as scores.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use halocline_core::World;
use serde::Serialize;

use super::staged::Staged;
use crate::ranks::agreement::{all_ranks, on_first};
use crate::{Error, Result};

/// Writes a value as JSON on rank 0. All ranks must call this together. The file appears under its
/// name only when it is complete. NaN and infinities, which JSON lacks, become `null`.
///
/// # Errors
/// On all ranks: a path that cannot be written; a value that JSON cannot represent, such as a map
/// whose keys are not strings; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::Launcher;
/// use halocline_io::save_json;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("scores.json");
/// Launcher::local(2).run(|world| save_json(&world, &path, &[("t2m", 1.5), ("msl", f64::NAN)]))?;
/// assert!(std::fs::read_to_string(&path)?.contains("null"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save_json(
    world: &World,
    path: impl AsRef<Path>,
    value: &impl Serialize,
) -> halocline_core::Result<()> {
    on_first(&all_ranks(world)?, "save_json", || {
        stage(path.as_ref(), value)?.commit()
    })
}

/// Writes a value as JSON under a temporary name.
pub(crate) fn stage(path: &Path, value: &impl Serialize) -> Result<Staged> {
    let staged = Staged::new(path)?;
    let write = || {
        let mut file = BufWriter::new(File::create(staged.path())?);
        serde_json::to_writer_pretty(&mut file, value)?;
        file.flush()
    };
    write().map_err(|e: std::io::Error| Error::io(path, e))?;
    Ok(staged)
}
