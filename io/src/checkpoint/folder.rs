//! Folder of checkpoints: naming, selection of complete checkpoints, recovery from an interrupted
//! job.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use halocline_core::{DeviceMesh, World};

use super::fetch::OPERATION;
use super::retention::{Kept, Worth, by_metric};
use super::{Checkpoint, file, index};
use crate::files::durable;
use crate::ranks::agreement::{all_ranks, broadcast, on_first};
use crate::{Error, Result};

/// Returns the folder name of a step. Names sort like steps.
pub(super) fn name_of(step: u64) -> String {
    format!("step_{step:09}")
}

/// Inverse of [`name_of`].
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step_")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

/// Renames a complete folder, whose files are on disk, to its final name, and waits until the name
/// is on disk too.
pub(super) fn publish(partial: &Path, folder: &Path, step: u64) -> Result<()> {
    durable::sync_folder(partial)?;
    let target = folder.join(name_of(step));
    let failed = |error| Error::io(&target, error);
    // An earlier checkpoint of the same step is kept until the new one has its name.
    let aside = set_aside(folder, &name_of(step))?;
    if let Err(error) = fs::rename(partial, &target) {
        let _ = aside.map(|aside| fs::rename(aside, &target));
        return Err(failed(error));
    }
    durable::sync_folder(folder)?;
    if let Some(aside) = aside {
        discard(&aside);
    }
    Ok(())
}

/// Renames a checkpoint, if it exists, to a name that is not recognised as a checkpoint.
fn set_aside(folder: &Path, name: &str) -> Result<Option<PathBuf>> {
    let (path, aside) = (folder.join(name), folder.join(format!(".{name}.removed")));
    if !path.exists() {
        return Ok(None);
    }
    let failed = |error| Error::io(&path, error);
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(failed)?;
    }
    fs::rename(&path, &aside).map_err(failed)?;
    Ok(Some(aside))
}

/// Removes a checkpoint. A failure is reported on stderr and otherwise ignored: what is left takes
/// up space but does no harm.
pub(super) fn remove(folder: &Path, name: &str) {
    match set_aside(folder, name) {
        Ok(Some(aside)) => discard(&aside),
        Ok(None) => {}
        Err(error) => eprintln!("halocline: an old checkpoint could not be removed: {error}"),
    }
}

fn discard(aside: &Path) {
    if let Err(error) = fs::remove_dir_all(aside) {
        eprintln!(
            "halocline: {}: could not be removed: {error}",
            aside.display()
        );
    }
}

/// Lists the steps of the checkpoints in a folder in order, by their names. A folder that does not
/// exist has none.
fn steps_in(folder: &Path) -> Result<Vec<u64>> {
    let failed = |error| Error::io(folder, error);
    let mut steps = Vec::new();
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(steps),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        steps.extend(step_of(
            &entry.map_err(failed)?.file_name().to_string_lossy(),
        ));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Opens a checkpoint, if it is complete, with the text of its index. Otherwise prints the cause on
/// stderr.
pub(super) fn whole(folder: &Path, step: u64) -> Result<(Checkpoint, Vec<u8>)> {
    let path = folder.join(name_of(step));
    let opened = file::read_whole(&path.join(index::NAME)).and_then(|text| {
        let found = Checkpoint::parse(&path, &text)?;
        found.check_files()?;
        if found.step() == step {
            Ok((found, text))
        } else {
            Err(Error::checkpoint(
                &path,
                format!("is of step {}", found.step()),
            ))
        }
    });
    opened.inspect_err(|error| eprintln!("halocline: a checkpoint is passed over: {error}"))
}

/// Broadcasts a checkpoint of rank 0 to all ranks, as the text of its index.
fn broadcast_checkpoint(
    mesh: &DeviceMesh,
    folder: &Path,
    found: Option<(Checkpoint, Vec<u8>)>,
) -> halocline_core::Result<Option<Checkpoint>> {
    let bytes = found
        .map(|(found, text)| [&found.step().to_le_bytes(), &text[..]].concat())
        .unwrap_or_default();
    let bytes = broadcast(mesh, OPERATION, bytes)?;
    let Some((step, text)) = bytes.split_first_chunk() else {
        return Ok(None);
    };
    let path = folder.join(name_of(u64::from_le_bytes(*step)));
    Ok(Some(Checkpoint::parse(&path, text)?))
}

impl Checkpoint {
    /// Opens the newest complete and finite checkpoint of a folder, the same on all ranks, or the
    /// newest complete one if none is [finite](Self::not_finite). Another job may write to the
    /// folder meanwhile.
    ///
    /// # Errors
    /// On all ranks: a folder that cannot be read; a checkpoint that exists but cannot be read and
    /// is newer than every complete one; a folder with checkpoints but no complete one; a failure
    /// of communication.
    pub fn latest(world: &World, folder: impl AsRef<Path>) -> halocline_core::Result<Option<Self>> {
        let folder = folder.as_ref();
        first_of(&all_ranks(world)?, folder, || {
            Ok(steps_in(folder)?.into_iter().rev().collect())
        })
    }

    /// Opens the checkpoint of a folder with the best metric, the same on all ranks. Finite
    /// checkpoints take precedence over others. Returns `None` if no complete checkpoint has a
    /// metric. Another job may write to the folder meanwhile.
    ///
    /// # Errors
    /// On all ranks: a folder or a checkpoint that exists but cannot be read; a failure of
    /// communication.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Launcher;
    /// use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    /// Launcher::local(2).run(|world| {
    ///     let config = CheckpointConfig::new().with_keep_best(1);
    ///     let mut checkpoints = Checkpoints::open(&world, folder, &config)?;
    ///     for (step, loss) in [(1, 0.5), (2, 0.3), (3, 0.4)] {
    ///         checkpoints.save(step, Snapshot::new(&world), Some(loss))?;
    ///     }
    ///     checkpoints.wait()?;
    ///     let best = Checkpoint::best(&world, folder)?.expect("three were saved");
    ///     assert_eq!(best.step(), 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn best(world: &World, folder: impl AsRef<Path>) -> halocline_core::Result<Option<Self>> {
        let folder = folder.as_ref();
        first_of(&all_ranks(world)?, folder, || {
            let mut steps = BTreeMap::new();
            for step in steps_in(folder)? {
                match whole(folder, step) {
                    Ok((found, _)) => _ = steps.insert(step, Worth::of(&found.index)),
                    // Already reported on stderr.
                    Err(error) if is_damage(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(by_metric(&steps))
        })
    }
}

/// Opens, on all ranks, the first complete and finite checkpoint of rank 0's `steps`, else the
/// first complete one. Fails if there are checkpoints but none is complete.
pub(super) fn first_of(
    mesh: &DeviceMesh,
    folder: &Path,
    steps: impl FnOnce() -> Result<Vec<u64>>,
) -> halocline_core::Result<Option<Checkpoint>> {
    let found = on_first(mesh, OPERATION, || first_whole(folder, &steps()?))?;
    broadcast_checkpoint(mesh, folder, found)
}

fn first_whole(folder: &Path, steps: &[u64]) -> Result<Option<(Checkpoint, Vec<u8>)>> {
    let (mut failure, mut not_finite) = (None, Vec::new());
    for &step in steps {
        match whole(folder, step) {
            Ok(found) if found.0.not_finite().is_some() => not_finite.push(found),
            Ok(found) => {
                for (passed_over, _) in not_finite {
                    let cause = passed_over.not_finite_message();
                    eprintln!(
                        "halocline: a checkpoint is passed over: {cause}; Checkpoint::open opens it"
                    );
                }
                return Ok(Some(found));
            }
            Err(error) if is_damage(&error) => _ = failure.get_or_insert(error),
            Err(error) => return Err(error),
        }
    }
    match not_finite.into_iter().next() {
        Some(found) => {
            let cause = found.0.not_finite_message();
            eprintln!("halocline: {cause}; no finite checkpoint is there to be read instead");
            Ok(Some(found))
        }
        None => failure.map_or(Ok(None), Err),
    }
}

/// Completes or removes the folders of an interrupted job, then lists the checkpoints.
pub(super) fn tidy(folder: &Path) -> Result<Kept> {
    let failed = |error| Error::io(folder, error);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with(".step_") || !entry.file_type().map_err(failed)?.is_dir() {
            continue;
        }
        // The index is written last: a folder that has one only lacks its final name.
        let step = Checkpoint::open(entry.path()).map(|checkpoint| checkpoint.step());
        match step {
            Ok(step) if !folder.join(name_of(step)).exists() => {
                durable::sync_file(&entry.path().join(index::NAME))?;
                publish(&entry.path(), folder, step)?
            }
            // A folder that is unreadable now may be the only checkpoint of its step.
            Err(error) if !is_damage(&error) => return Err(error),
            _ => fs::remove_dir_all(entry.path()).map_err(failed)?,
        }
    }
    let mut kept = Kept::default();
    let mut failures = Vec::new();
    for step in steps_in(folder)? {
        match whole(folder, step) {
            Ok((found, _)) => {
                kept.steps.insert(step, Worth::of(&found.index));
                kept.newest = Some(step);
            }
            Err(error) => failures.push((step, error)),
        }
    }
    match failures.pop() {
        Some((_, error)) if kept.steps.is_empty() => return Err(error),
        newest => failures.extend(newest),
    }
    for (step, error) in failures {
        if is_damage(&error) {
            mark_damaged(folder, step)?;
        } else if Some(step) > kept.newest {
            return Err(error);
        }
    }
    Ok(kept)
}

/// Whether the error means that the checkpoint is damaged, rather than that access to it failed.
pub(super) fn is_damage(error: &Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound, UnexpectedEof};
    match error {
        Error::Io { source, .. } => {
            matches!(source.kind(), NotFound | NotADirectory | UnexpectedEof)
        }
        error => matches!(error, Error::Checkpoint { .. }),
    }
}

/// Renames a damaged checkpoint to `damaged_step_…`, which is not recognised as a checkpoint.
pub(super) fn mark_damaged(folder: &Path, step: u64) -> Result<()> {
    let path = folder.join(name_of(step));
    let name = |number: usize| match number {
        1 => format!("damaged_{}", name_of(step)),
        _ => format!("damaged_{}.{number}", name_of(step)),
    };
    let target = (1..)
        .map(|number| folder.join(name(number)))
        .find(|target| !target.exists())
        .expect("there are many numbers");
    fs::rename(&path, &target).map_err(|error| Error::io(&path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_steps_sort_as_steps_do() {
        assert_eq!(name_of(40), "step_000000040");
        assert_eq!(
            [step_of(&name_of(7)), step_of(&name_of(u64::MAX))],
            [Some(7), Some(u64::MAX)]
        );
        assert_eq!(
            ["step_7", "step_000000007x", "../step_000000007"].map(step_of),
            [None; 3]
        );
    }
}
