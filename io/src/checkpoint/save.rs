use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use burn::config::Config;
use halocline_core::{DeviceMesh, RandomKey, World};

use super::file::{self, Cells};
use super::index::{self, Index, TensorEntry, file_of};
use super::{Checkpoint, Snapshot};
use crate::agreement::{Fallible, agree, broadcast};
use crate::{Error, Result};

/// How long a program that ends without [`Checkpoints::wait`] waits for the files of other ranks.
const PATIENCE: Duration = Duration::from_secs(1);

/// Which checkpoints of a folder are kept.
#[derive(Config, Debug)]
pub struct CheckpointConfig {
    /// How many of the newest; at least one.
    #[config(default = "3")]
    pub keep_last: usize,
    /// How many of those with the lowest metric, besides.
    #[config(default = "0")]
    pub keep_best: usize,
}

/// A folder of checkpoints, `step_000000040` and so on. All ranks use it together.
///
/// A checkpoint is written in the background: every rank writes its share into a file of a folder with another name; when
/// all files are on the disk, rank 0 adds the index and gives the folder its name. So whatever the moment at which a job
/// is killed, a folder `step_…` is a whole checkpoint, and only the one that was being written is lost. The folder must be
/// on a disk that all ranks see.
#[derive(Debug)]
pub struct Checkpoints {
    mesh: DeviceMesh,
    folder: PathBuf,
    config: CheckpointConfig,
    /// Part of the names of folders that this job has not finished, which files of an earlier job's ranks never enter.
    job: String,
    writing: Option<Writing>,
    /// On rank 0: steps and metrics of the checkpoints that are there, in order.
    kept: Arc<Mutex<Kept>>,
}

type Kept = BTreeMap<u64, Option<f64>>;

/// A checkpoint on its way to the disk.
#[derive(Debug)]
struct Writing {
    writer: JoinHandle<Result<()>>,
    /// On rank 0.
    committer: Option<JoinHandle<Result<()>>>,
    /// Tells the committer that files will not come.
    cancelled: Arc<AtomicBool>,
}

impl Checkpoints {
    /// Opens a folder, or makes it. What an interrupted job left behind unfinished is removed.
    ///
    /// # Errors
    /// On all ranks: a folder that cannot be made or read; `keep_last` of zero; a failure of communication.
    pub fn open(
        world: &World,
        folder: impl AsRef<Path>,
        config: &CheckpointConfig,
    ) -> halocline_core::Result<Self> {
        if config.keep_last == 0 {
            return Err(Error::argument("keep_last", 0, "at least 1").into());
        }
        let folder = folder.as_ref();
        let mesh = world.mesh([("rank", world.size())])?;
        let tidied = if world.is_root() {
            tidy(folder)
        } else {
            Ok(Kept::new())
        };
        let kept = agree(&mesh, OPERATION, Fallible::First, tidied)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.unwrap_or_default().as_nanos();
        let job = RandomKey::new(world.seed(), (now, std::process::id())).number();
        let job = broadcast(&mesh, OPERATION, format!("{job:016x}").into_bytes())?;
        Ok(Self {
            mesh,
            folder: folder.into(),
            config: config.clone(),
            job: String::from_utf8_lossy(&job).into_owned(),
            writing: None,
            kept: Arc::new(Mutex::new(kept)),
        })
    }

    /// Saves a state in the background; returns when the one before is on the disk. A `metric` says how good it is, the
    /// lower the better; it takes part only in which checkpoints are kept.
    ///
    /// # Errors
    /// On all ranks, and of the save *before* this one: a rank that could not write, the disk being full; ranks that saved
    /// different tensors. [`wait`](Self::wait) gives those of this one. A failure of communication.
    pub fn save(
        &mut self,
        step: u64,
        snapshot: Snapshot,
        metric: Option<f64>,
    ) -> halocline_core::Result<()> {
        self.wait()?;
        let rank = self.mesh.comm().rank();
        let Snapshot {
            mut index, cells, ..
        } = snapshot;
        index.step = step;
        index.metric = metric;
        let partial = self.folder.join(format!(".{}.{}", name_of(step), self.job));
        let cancelled = Arc::new(AtomicBool::new(false));
        let commit = Commit {
            index,
            partial: partial.clone(),
            folder: self.folder.clone(),
            config: self.config.clone(),
            cancelled: cancelled.clone(),
            kept: self.kept.clone(),
        };
        let writer = background(&self.folder, move || write_share(&partial, rank, &cells))?;
        let committer = if rank == self.mesh.shape().ranks()[0] {
            Some(background(&self.folder, move || commit.run())?)
        } else {
            None
        };
        self.writing = Some(Writing {
            writer,
            committer,
            cancelled,
        });
        Ok(())
    }

    /// Waits until what was saved last is on the disk.
    ///
    /// # Errors
    /// On all ranks: a rank that could not write; ranks that saved different tensors; a failure of communication.
    pub fn wait(&mut self) -> halocline_core::Result<()> {
        let Some(Writing {
            writer,
            committer,
            cancelled,
        }) = self.writing.take()
        else {
            return Ok(());
        };
        let written = agree(&self.mesh, OPERATION, Fallible::All, joined(writer));
        if written.is_err() {
            cancelled.store(true, Ordering::Relaxed);
        }
        let committed = committer.map_or(Ok(()), joined);
        written?;
        agree(&self.mesh, OPERATION, Fallible::First, committed)
    }

    /// The newest checkpoint that is whole; the same on all ranks. Others are named on stderr.
    ///
    /// # Errors
    /// A failure to save what was saved last, or of communication.
    pub fn latest(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.latest_before(u64::MAX)
    }

    /// [`latest`](Self::latest), of an earlier step than this.
    ///
    /// # Errors
    /// Those of [`latest`](Self::latest).
    pub fn latest_before(&mut self, step: u64) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        let mut steps: Vec<u64> = self.kept().range(..step).map(|(step, _)| *step).collect();
        steps.reverse();
        self.first_of(&steps)
    }

    /// The checkpoint with the lowest metric; the same on all ranks.
    ///
    /// # Errors
    /// Those of [`latest`](Self::latest).
    pub fn best(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        let steps = by_metric(&self.kept());
        self.first_of(&steps)
    }

    /// On rank 0, the newest step whose checkpoint is on the disk by now. Others need not know, and have `None`.
    pub fn committed(&self) -> Option<u64> {
        self.kept().last_key_value().map(|(step, _)| *step)
    }

    /// The first checkpoint that can be opened, as rank 0 finds it.
    fn first_of(&self, steps: &[u64]) -> halocline_core::Result<Option<Checkpoint>> {
        let mut found = None;
        for step in steps {
            let path = self.folder.join(name_of(*step));
            let text = file::read_whole(&path.join(index::NAME));
            let opened = text.and_then(|text| {
                Checkpoint::parse(&path, &text)?.check_files()?;
                Ok(text)
            });
            match opened {
                Ok(text) => {
                    found = Some((*step, text));
                    break;
                }
                Err(error) => eprintln!("halocline: a checkpoint is passed over: {error}"),
            }
        }
        let (step, text) = found.unwrap_or_default();
        let bytes = [&step.to_le_bytes(), &text[..]].concat();
        let bytes = broadcast(&self.mesh, OPERATION, bytes)?;
        let Some((step, text)) = bytes
            .split_first_chunk()
            .filter(|(_, text)| !text.is_empty())
        else {
            return Ok(None);
        };
        let path = self.folder.join(name_of(u64::from_le_bytes(*step)));
        Ok(Some(Checkpoint::parse(&path, text)?))
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Drop for Checkpoints {
    /// A program that ends in order without waiting does not lose its last checkpoint.
    fn drop(&mut self) {
        let Some(writing) = self.writing.take() else {
            return;
        };
        let _ = joined(writing.writer);
        if let Some(committer) = writing.committer {
            let start = Instant::now();
            while !committer.is_finished() && start.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(5));
            }
            writing.cancelled.store(true, Ordering::Relaxed);
            if let Err(error) = joined(committer) {
                eprintln!("halocline: the last checkpoint was not written: {error}");
            }
        }
    }
}

/// What errors call communication for checkpoints.
const OPERATION: &str = "checkpoint";

/// The folder of a step. Names sort as steps do.
fn name_of(step: u64) -> String {
    format!("step_{step:09}")
}

/// The inverse of [`name_of`].
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step_")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

fn background<T: Send + 'static>(
    folder: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<JoinHandle<Result<T>>> {
    let thread = Builder::new().name("checkpoint".into()).spawn(work);
    thread.map_err(|error| Error::io(folder, error))
}

fn joined(thread: JoinHandle<Result<()>>) -> Result<()> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(|error| error.into_inner())
}

/// Writes a rank's file. It has its name when it is on the disk.
fn write_share(partial: &Path, rank: usize, cells: &[Cells]) -> Result<()> {
    if cells.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(partial).map_err(|error| Error::io(partial, error))?;
    let path = partial.join(file_of(rank));
    let staged = partial.join(format!(".{}", file_of(rank)));
    file::write(&staged, cells)?;
    fs::rename(&staged, &path).map_err(|error| Error::io(&path, error))
}

/// What rank 0 does to make a checkpoint of the ranks' files.
struct Commit {
    index: Index,
    partial: PathBuf,
    folder: PathBuf,
    config: CheckpointConfig,
    cancelled: Arc<AtomicBool>,
    kept: Arc<Mutex<Kept>>,
}

impl Commit {
    fn run(mut self) -> Result<()> {
        let committed = self.commit();
        if committed.is_err() {
            // What is left of it is of no use; if it cannot be removed, the next job tries.
            let _ = fs::remove_dir_all(&self.partial);
        }
        committed
    }

    fn commit(&mut self) -> Result<()> {
        let (step, metric) = (self.index.step, self.index.metric);
        fs::create_dir_all(&self.partial).map_err(|error| Error::io(&self.partial, error))?;
        self.complete()?;
        let path = self.partial.join(index::NAME);
        fs::write(&path, self.index.encode()).map_err(|error| Error::io(&path, error))?;
        file::sync(&path)?;
        publish(&self.partial, &self.folder, step)?;
        let old = {
            let mut kept = lock(&self.kept);
            kept.insert(step, metric);
            let old = superseded(&kept, &self.config);
            kept.retain(|step, _| !old.contains(step));
            old
        };
        for step in old {
            if let Err(error) = remove(&self.folder, &name_of(step)) {
                eprintln!("halocline: an old checkpoint could not be removed: {error}");
            }
        }
        Ok(())
    }

    /// Says in the index where every piece is, when all files are there.
    fn complete(&mut self) -> Result<()> {
        let mut files: HashMap<String, HashMap<String, TensorEntry>> = HashMap::new();
        for tensor in self.index.tensors.values() {
            for piece in &tensor.pieces {
                files.entry(piece.file.clone()).or_default();
            }
        }
        for (name, found) in &mut files {
            let path = self.partial.join(name);
            self.wait_for(&path)?;
            let (size, contents) = file::contents(&path)?;
            self.index.files.insert(name.clone(), size);
            *found = contents;
        }
        for (name, tensor) in &mut self.index.tensors {
            for piece in &mut tensor.pieces {
                let written = files
                    .get(&piece.file)
                    .and_then(|found| found.get(&piece.key));
                match written {
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
            }
        }
        Ok(())
    }

    fn wait_for(&self, path: &Path) -> Result<()> {
        let mut pause = Duration::from_millis(1);
        while !path.exists() {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(Error::checkpoint(path, "was not written"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Gives a finished folder its name, for good.
fn publish(partial: &Path, folder: &Path, step: u64) -> Result<()> {
    file::sync(partial)?;
    let target = folder.join(name_of(step));
    if target.exists() {
        remove(folder, &name_of(step))?;
    }
    fs::rename(partial, &target).map_err(|error| Error::io(&target, error))?;
    file::sync(folder)
}

/// Removes a checkpoint; while that takes its time it has no name that counts.
fn remove(folder: &Path, name: &str) -> Result<()> {
    let (path, removed) = (folder.join(name), folder.join(format!(".{name}.removed")));
    let failed = |error| Error::io(&path, error);
    fs::rename(&path, &removed).map_err(failed)?;
    fs::remove_dir_all(&removed).map_err(failed)
}

/// Makes the folder if need be, finishes or removes what an interrupted job left, and says what is there.
fn tidy(folder: &Path) -> Result<Kept> {
    let failed = |error| Error::io(folder, error);
    fs::create_dir_all(folder).map_err(failed)?;
    let mut kept = Kept::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !entry.file_type().map_err(failed)?.is_dir() {
            continue;
        }
        let whole = || {
            let opened = Checkpoint::open(entry.path())?;
            opened.check_files()?;
            Ok::<_, Error>((opened.step(), opened.metric()))
        };
        if let Some(step) = step_of(&name) {
            match whole() {
                Ok((_, metric)) => _ = kept.insert(step, metric),
                Err(error) => eprintln!("halocline: a checkpoint is passed over: {error}"),
            }
        } else if name.starts_with(".step_") {
            // The index is written last: with it, all is there but the name.
            match whole() {
                Ok((step, metric))
                    if !name.ends_with(".removed") && !folder.join(name_of(step)).exists() =>
                {
                    publish(&entry.path(), folder, step)?;
                    kept.insert(step, metric);
                }
                _ => fs::remove_dir_all(entry.path()).map_err(failed)?,
            }
        }
    }
    Ok(kept)
}

/// Steps by metric, the best first; of equals, and of those without one, the newest.
fn by_metric(kept: &Kept) -> Vec<u64> {
    let mut steps: Vec<(u64, f64)> = kept
        .iter()
        .filter_map(|(step, metric)| Some((*step, (*metric)?)))
        .collect();
    steps.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    steps.into_iter().map(|(step, _)| step).collect()
}

/// The checkpoints that are not to be kept.
fn superseded(kept: &Kept, config: &CheckpointConfig) -> Vec<u64> {
    let last = kept.keys().rev().take(config.keep_last);
    let best = by_metric(kept).into_iter().take(config.keep_best);
    let keep: Vec<u64> = last.copied().chain(best).collect();
    kept.keys()
        .copied()
        .filter(|step| !keep.contains(step))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_and_the_best_are_kept() {
        let kept: Kept = [
            (10, Some(0.3)),
            (20, Some(0.1)),
            (30, None),
            (40, Some(0.2)),
            (50, Some(0.1)),
        ]
        .into();
        let old = |last, best| {
            superseded(
                &kept,
                &CheckpointConfig {
                    keep_last: last,
                    keep_best: best,
                },
            )
        };
        assert_eq!(old(1, 0), [10, 20, 30, 40]);
        assert_eq!(old(2, 0), [10, 20, 30]);
        assert_eq!(old(1, 2), [10, 30, 40]);
        assert_eq!(old(1, 3), [10, 30]);
        assert!(old(5, 0).is_empty());
    }

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
