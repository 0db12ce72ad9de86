//! Files of a save: one per rank, and the index that rank 0 writes to complete the checkpoint.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::file::{self, Cells, Contents};
use super::folder::{name_of, publish, remove};
use super::index::{self, Index, file_of};
use super::retention::{CheckpointConfig, Kept, Worth, superseded};
use crate::files::durable;
use crate::{Error, Result};

/// State of the files of other ranks, set by [`Checkpoints::wait`](super::Checkpoints::wait) for
/// the committing thread.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// Set if the files will not be written.
    pub cancelled: AtomicBool,
    /// Time at which all ranks had written, and how long the file system may take to show the
    /// files.
    pub written: OnceLock<(Instant, Duration)>,
}

/// Locks the list of checkpoints, which remains valid after a panic.
pub(super) fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(|error| error.into_inner())
}

/// Writes the file of a rank under a temporary name, and renames it once it is on disk.
pub(super) fn write_share(partial: &Path, rank: usize, cells: &[Cells]) -> Result<()> {
    if cells.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(partial).map_err(|error| Error::io(partial, error))?;
    let path = partial.join(file_of(rank));
    let staged = partial.join(format!(".{}", file_of(rank)));
    file::write(&staged, cells)?;
    fs::rename(&staged, &path).map_err(|error| Error::io(&path, error))
}

/// Task of rank 0 that completes a checkpoint when all ranks have written their files.
pub(super) struct Commit {
    pub index: Index,
    pub partial: PathBuf,
    pub folder: PathBuf,
    pub config: CheckpointConfig,
    pub others: Arc<Others>,
    pub kept: Arc<Mutex<Kept>>,
}

impl Commit {
    pub(super) fn run(mut self) -> Result<()> {
        let committed = self.commit();
        if committed.is_err() {
            // The partial files are useless. If they cannot be removed now, the next job tries
            // again.
            let _ = fs::remove_dir_all(&self.partial);
        }
        committed
    }

    fn commit(&mut self) -> Result<()> {
        let step = self.index.step;
        fs::create_dir_all(&self.partial).map_err(|error| Error::io(&self.partial, error))?;
        self.complete()?;
        let worth = Worth::of(&self.index);
        let earlier = lock(&self.kept).steps.get(&step).copied();
        if !worth.finite && earlier.is_some_and(|earlier| earlier.finite) {
            eprintln!(
                "halocline: {}: a finite checkpoint of step {step} stays in the place of one that is not",
                self.folder.display()
            );
            let removed = fs::remove_dir_all(&self.partial);
            return removed.map_err(|error| Error::io(&self.partial, error));
        }
        let path = self.partial.join(index::NAME);
        durable::write(&path, &self.index.encode())?;
        publish(&self.partial, &self.folder, step)?;
        let old = {
            let mut kept = lock(&self.kept);
            kept.steps.insert(step, worth);
            kept.newest = Some(step);
            let old = superseded(&kept.steps, step, &self.config);
            kept.steps.retain(|step, _| !old.contains(step));
            old
        };
        for step in old {
            remove(&self.folder, &name_of(step));
        }
        Ok(())
    }

    /// Waits for all files, and records in the index the position of every piece and the first
    /// tensor that is not finite.
    fn complete(&mut self) -> Result<()> {
        let names: BTreeSet<String> = self
            .index
            .tensors
            .values()
            .flat_map(|tensor| &tensor.pieces)
            .map(|piece| piece.file.clone())
            .collect();
        let mut files: HashMap<String, Contents> = HashMap::new();
        for name in names {
            self.wait_for(&name)?;
            let contents = file::contents(&self.partial.join(&name))?;
            self.index.files.insert(name.clone(), contents.size);
            files.insert(name, contents);
        }
        for (name, tensor) in &mut self.index.tensors {
            for piece in &mut tensor.pieces {
                let contents = &files[&piece.file];
                match contents.tensors.get(&piece.key) {
                    Some(written)
                        if written.dtype == tensor.dtype && written.shape == piece.shape =>
                    {
                        piece.bytes = written.pieces[0].bytes.clone();
                        piece.crc32 = written.pieces[0].crc32;
                    }
                    _ => {
                        let cause = format!(
                            "has other cells of {name:?} than rank 0 expects; did all ranks save the same?"
                        );
                        return Err(Error::checkpoint(&self.partial.join(&piece.file), cause));
                    }
                }
                if contents.not_finite.as_ref() == Some(&piece.key) {
                    self.index.not_finite.get_or_insert_with(|| name.clone());
                }
            }
        }
        Ok(())
    }

    /// Waits until the file of a rank appears.
    fn wait_for(&self, name: &str) -> Result<()> {
        let failed = |cause: &str| Err(Error::checkpoint(&self.partial.join(name), cause));
        let mut pause = Duration::from_millis(1);
        while !is_listed(&self.partial, name)? {
            let late = |(since, patience): &(Instant, Duration)| since.elapsed() > *patience;
            if self.others.cancelled.load(Ordering::Relaxed) {
                return failed("was not written");
            } else if self.others.written.get().is_some_and(late) {
                return failed("was written, but is not there; do all ranks see this folder?");
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Whether a folder lists a name. Listing is used because NFS caches failed look-ups for up to a
/// minute, but revalidates a folder when it is opened for listing.
fn is_listed(folder: &Path, name: &str) -> Result<bool> {
    let failed = |error| Error::io(folder, error);
    for entry in fs::read_dir(folder).map_err(failed)? {
        if entry.map_err(failed)?.file_name() == name {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dangling link imitates a file that an NFS look-up does not find yet although the folder
    /// lists its name.
    #[test]
    fn files_of_other_ranks_are_found_in_the_list_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let commit = Commit {
            index: Index::new(1, 2),
            partial: folder.path().into(),
            folder: folder.path().into(),
            config: CheckpointConfig::new(),
            others: Arc::default(),
            kept: Arc::default(),
        };
        let waited = (Instant::now(), Duration::from_millis(20));
        commit.others.written.set(waited).unwrap();
        let name = file_of(1);
        let error = commit.wait_for(&name).unwrap_err().to_string();
        assert!(error.contains("do all ranks see this folder"), "{error}");
        std::os::unix::fs::symlink("nowhere", folder.path().join(&name)).unwrap();
        assert!(!folder.path().join(&name).exists());
        commit.wait_for(&name).unwrap();
    }
}
