use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use burn::config::Config;
use halocline_core::{DeviceMesh, RandomKey, World};

use super::file::{self, Cells};
use super::index::{self, Index, TensorEntry, file_of};
use super::{Checkpoint, Snapshot};
use crate::agreement::{Fallible, agree, all, broadcast};
use crate::{Error, Result};

/// How long a program that ends without [`Checkpoints::wait`] waits for the files of other ranks.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long opening waits for an earlier job to let go of the folder.
const HANDOVER: Duration = Duration::from_secs(5);

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
/// on a disk that all ranks see, and belongs to one job at a time: [`Checkpoint::latest`] reads beside it.
#[derive(Debug)]
pub struct Checkpoints {
    mesh: DeviceMesh,
    folder: PathBuf,
    config: CheckpointConfig,
    /// Part of the names of folders that this job has not finished, which files of an earlier job's ranks never enter.
    job: String,
    /// How many saves this job has begun.
    attempts: u64,
    writing: Option<Writing>,
    /// On rank 0: what is there.
    kept: Arc<Mutex<Kept>>,
    /// On rank 0: locked as long as this job has the folder.
    _lock: Option<File>,
}

/// The checkpoints of a folder.
#[derive(Debug, Default)]
struct Kept {
    /// Their metrics, by step.
    metrics: BTreeMap<u64, Option<f64>>,
    /// The one that was written last.
    newest: Option<u64>,
}

/// A checkpoint on its way to the disk.
#[derive(Debug)]
struct Writing {
    writer: JoinHandle<Result<()>>,
    /// On rank 0.
    committer: Option<JoinHandle<Result<()>>>,
    others: Arc<Others>,
}

/// What the committer is told of the other ranks' files.
#[derive(Debug, Default)]
struct Others {
    /// They will not come.
    cancelled: AtomicBool,
    /// Since when all are said to be there, and how long the file system may take to show them.
    written: OnceLock<(Instant, Duration)>,
}

impl Checkpoints {
    /// Opens a folder, or makes it, for this job alone. What an interrupted job left behind unfinished is removed.
    ///
    /// # Errors
    /// On all ranks: a folder that cannot be made or read, or that another job has open; checkpoints of which none is
    /// whole; `keep_last` of zero; a failure of communication.
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
            lock_folder(folder).and_then(|lock| Ok((tidy(folder)?, Some(lock))))
        } else {
            Ok((Kept::default(), None))
        };
        let (kept, lock) = agree(&mesh, OPERATION, Fallible::First, tidied)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.unwrap_or_default().as_nanos();
        let job = RandomKey::new(world.seed(), (now, std::process::id())).number();
        let job = broadcast(&mesh, OPERATION, format!("{job:016x}").into_bytes())?;
        Ok(Self {
            mesh,
            folder: folder.into(),
            config: config.clone(),
            job: String::from_utf8_lossy(&job).into_owned(),
            attempts: 0,
            writing: None,
            kept: Arc::new(Mutex::new(kept)),
            _lock: lock,
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
        index.metric = metric.filter(|metric| metric.is_finite());
        self.attempts += 1;
        let name = format!(".{}.{}.{}", name_of(step), self.job, self.attempts);
        let partial = self.folder.join(name);
        let own = fingerprint(&index).to_le_bytes().to_vec();
        let same = broadcast(&self.mesh, OPERATION, own.clone())? == own;
        let others = Arc::new(Others::default());
        let commit = Commit {
            index,
            partial: partial.clone(),
            folder: self.folder.clone(),
            config: self.config.clone(),
            others: others.clone(),
            kept: self.kept.clone(),
        };
        let writer = background(&self.folder, move || match same {
            true => write_share(&partial, rank, &cells),
            false => Err(Error::argument(
                "snapshot",
                format!("other tensors, or another step than {step}"),
                "those of rank 0 on all ranks",
            )),
        })?;
        let committer = if rank == self.mesh.shape().ranks()[0] {
            Some(background(&self.folder, move || commit.run())?)
        } else {
            None
        };
        self.writing = Some(Writing {
            writer,
            committer,
            others,
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
            others,
        }) = self.writing.take()
        else {
            return Ok(());
        };
        let timeout = self.mesh.comm().settings().timeout;
        let written = self
            .all_finish(Some(&writer))
            .and_then(|()| agree(&self.mesh, OPERATION, Fallible::All, joined(writer)));
        match &written {
            Ok(()) => _ = others.written.set((Instant::now(), timeout / 2)),
            Err(_) => others.cancelled.store(true, Ordering::Relaxed),
        }
        if let Err(error) = written {
            committer.map(joined);
            return Err(error);
        }
        self.all_finish(committer.as_ref())?;
        let committed = committer.map_or(Ok(()), joined);
        agree(&self.mesh, OPERATION, Fallible::First, committed)
    }

    /// Waits until the threads of all ranks have finished. As long as it takes: ranks tell each other that they are there,
    /// so that a slow disk is no silence.
    fn all_finish(&self, own: Option<&JoinHandle<Result<()>>>) -> halocline_core::Result<()> {
        let patience = self.mesh.comm().settings().timeout / 4;
        loop {
            let finished = own.is_none_or(|thread| finishes_within(thread, patience));
            if all(&self.mesh, OPERATION, finished)? {
                return Ok(());
            }
        }
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
        let kept = self.kept();
        let mut steps: Vec<u64> = kept.metrics.range(..step).map(|(step, _)| *step).collect();
        drop(kept);
        steps.reverse();
        self.first_of(&steps)
    }

    /// The checkpoint with the lowest metric; the same on all ranks.
    ///
    /// # Errors
    /// Those of [`latest`](Self::latest).
    pub fn best(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        let steps = by_metric(&self.kept().metrics);
        self.first_of(&steps)
    }

    /// On rank 0, the step of the checkpoint that came onto the disk last. Others need not know, and have `None`.
    pub fn committed(&self) -> Option<u64> {
        self.kept().newest
    }

    /// Puts checkpoints of no use out of the way, as `damaged_step_…`: later ones than that which training goes on from.
    ///
    /// # Errors
    /// On all ranks: a folder that cannot be written; a failure of communication.
    pub fn set_aside_after(&mut self, step: u64) -> halocline_core::Result<()> {
        self.wait()?;
        let set_aside = || {
            let mut kept = self.kept();
            let later = kept.metrics.split_off(&(step + 1));
            for name in later.into_keys().map(name_of) {
                let (from, to) = (
                    self.folder.join(&name),
                    self.folder.join(format!("damaged_{name}")),
                );
                if to.exists() {
                    fs::remove_dir_all(&to).map_err(|error| Error::io(&to, error))?;
                }
                fs::rename(&from, &to).map_err(|error| Error::io(&from, error))?;
            }
            kept.newest = Some(step);
            Ok(())
        };
        let own = match self.mesh.position() {
            0 => set_aside(),
            _ => Ok(()),
        };
        agree(&self.mesh, OPERATION, Fallible::First, own)
    }

    /// The first checkpoint that can be opened, as rank 0 finds it.
    fn first_of(&self, steps: &[u64]) -> halocline_core::Result<Option<Checkpoint>> {
        let found = steps
            .iter()
            .find_map(|&step| whole(&self.folder, step).ok());
        told_to_all(&self.mesh, &self.folder, found)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Drop for Checkpoints {
    /// A program that ends in order without waiting may still get its last checkpoint: other ranks have a second to write.
    fn drop(&mut self) {
        let Some(writing) = self.writing.take() else {
            return;
        };
        let _ = joined(writing.writer);
        if let Some(committer) = writing.committer {
            finishes_within(&committer, PATIENCE);
            writing.others.cancelled.store(true, Ordering::Relaxed);
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

fn finishes_within(thread: &JoinHandle<Result<()>>, patience: Duration) -> bool {
    let start = Instant::now();
    let mut pause = Duration::from_micros(50);
    while !thread.is_finished() && start.elapsed() < patience {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    thread.is_finished()
}

fn joined(thread: JoinHandle<Result<()>>) -> Result<()> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(|error| error.into_inner())
}

/// What all ranks must have alike in a save.
fn fingerprint(index: &Index) -> u32 {
    let names: Vec<&String> = index.values.keys().collect();
    let alike = serde_json::to_vec(&(index.step, &index.tensors, names));
    crc32fast::hash(&alike.expect("numbers and texts are JSON"))
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
    others: Arc<Others>,
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
        publish(&self.partial, &self.folder, step)?;
        let old = {
            let mut kept = lock(&self.kept);
            kept.metrics.insert(step, metric);
            kept.newest = Some(step);
            let old = superseded(&kept.metrics, step, &self.config);
            kept.metrics.retain(|step, _| !old.contains(step));
            old
        };
        for step in old {
            remove(&self.folder, &name_of(step));
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
            let late = |(since, patience): &(Instant, Duration)| since.elapsed() > *patience;
            if self.others.cancelled.load(Ordering::Relaxed) {
                return Err(Error::checkpoint(path, "was not written"));
            } else if self.others.written.get().is_some_and(late) {
                let cause = "was written, but is not there; do all ranks see this folder?";
                return Err(Error::checkpoint(path, cause));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Gives a finished folder its name, for good.
fn publish(partial: &Path, folder: &Path, step: u64) -> Result<()> {
    file::sync(&partial.join(index::NAME))?;
    file::sync(partial)?;
    let target = folder.join(name_of(step));
    let failed = |error| Error::io(&target, error);
    // Of the same step: put aside until the new one has the name.
    let aside = set_aside(folder, &name_of(step))?;
    if let Err(error) = fs::rename(partial, &target) {
        let _ = aside.map(|aside| fs::rename(aside, &target));
        return Err(failed(error));
    }
    file::sync(folder)?;
    if let Some(aside) = aside {
        discard(&aside);
    }
    Ok(())
}

/// Takes the name from a checkpoint, if there is one; what is left has a name that does not count.
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

/// Removes a checkpoint. Where that fails it takes room and does no harm.
fn remove(folder: &Path, name: &str) {
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

/// Takes a folder for this job, and makes it if need be.
fn lock_folder(folder: &Path) -> Result<File> {
    fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
    let path = folder.join(".lock");
    let lock = File::create(&path).map_err(|error| Error::io(&path, error))?;
    let start = Instant::now();
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) if start.elapsed() < HANDOVER => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(TryLockError::WouldBlock) => {
                let cause = "another job has it open; give each job a folder of its own";
                return Err(Error::checkpoint(folder, cause));
            }
            // A file system without locks.
            Err(TryLockError::Error(_)) => return Ok(lock),
        }
    }
}

/// The steps of a folder that has names of checkpoints, in order.
fn steps_in(folder: &Path) -> Result<Vec<u64>> {
    let failed = |error| Error::io(folder, error);
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        steps.extend(step_of(
            &entry.map_err(failed)?.file_name().to_string_lossy(),
        ));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The text of the index of a checkpoint, if it is whole. If it is not, that is told.
fn whole(folder: &Path, step: u64) -> Result<(u64, Vec<u8>)> {
    let path = folder.join(name_of(step));
    let opened = file::read_whole(&path.join(index::NAME)).and_then(|text| {
        let found = Checkpoint::parse(&path, &text)?;
        found.check_files()?;
        match found.step() == step {
            true => Ok((step, text)),
            false => Err(Error::checkpoint(
                &path,
                format!("is of step {}", found.step()),
            )),
        }
    });
    opened.inspect_err(|error| eprintln!("halocline: a checkpoint is passed over: {error}"))
}

/// A checkpoint of which rank 0 has the index, on all ranks.
fn told_to_all(
    mesh: &DeviceMesh,
    folder: &Path,
    found: Option<(u64, Vec<u8>)>,
) -> halocline_core::Result<Option<Checkpoint>> {
    let (step, text) = found.unwrap_or_default();
    let bytes = [&step.to_le_bytes(), &text[..]].concat();
    let bytes = broadcast(mesh, OPERATION, bytes)?;
    let told = bytes
        .split_first_chunk()
        .filter(|(_, text)| !text.is_empty());
    let Some((step, text)) = told else {
        return Ok(None);
    };
    let path = folder.join(name_of(u64::from_le_bytes(*step)));
    Ok(Some(Checkpoint::parse(&path, text)?))
}

impl Checkpoint {
    /// The newest checkpoint in a folder that is whole, the same on all ranks; also while another job writes there.
    ///
    /// # Errors
    /// On all ranks: a folder that cannot be read; checkpoints of which none is whole; a failure of communication.
    pub fn latest(world: &World, folder: impl AsRef<Path>) -> halocline_core::Result<Option<Self>> {
        let (folder, mesh) = (folder.as_ref(), world.mesh([("rank", world.size())])?);
        let found = match world.is_root() {
            true => newest(folder),
            false => Ok(None),
        };
        let found = agree(&mesh, OPERATION, Fallible::First, found)?;
        told_to_all(&mesh, folder, found)
    }
}

/// The newest checkpoint that is whole; an error if there are some and none is.
fn newest(folder: &Path) -> Result<Option<(u64, Vec<u8>)>> {
    let mut failure = None;
    for step in steps_in(folder)?.into_iter().rev() {
        match whole(folder, step) {
            Ok(found) => return Ok(Some(found)),
            Err(error) => _ = failure.get_or_insert(error),
        }
    }
    failure.map_or(Ok(None), Err)
}

/// Finishes or removes what an interrupted job left, and says what is there.
fn tidy(folder: &Path) -> Result<Kept> {
    let failed = |error| Error::io(folder, error);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with(".step_") || !entry.file_type().map_err(failed)?.is_dir() {
            continue;
        }
        // The index is written last: with it, all is there but the name.
        let step = Checkpoint::open(entry.path()).map(|checkpoint| checkpoint.step());
        match step {
            Ok(step) if !folder.join(name_of(step)).exists() => {
                publish(&entry.path(), folder, step)?
            }
            _ => fs::remove_dir_all(entry.path()).map_err(failed)?,
        }
    }
    let mut kept = Kept::default();
    let mut failure = None;
    for step in steps_in(folder)? {
        match whole(folder, step) {
            Ok((step, text)) => {
                let metric = Checkpoint::parse(folder, &text)?.metric();
                kept.metrics.insert(step, metric);
                kept.newest = Some(step);
            }
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if kept.metrics.is_empty() => Err(error),
        _ => Ok(kept),
    }
}

/// Steps by metric, the best first; of equals, and of those without one, the newest.
fn by_metric(metrics: &BTreeMap<u64, Option<f64>>) -> Vec<u64> {
    let mut steps: Vec<(u64, f64)> = metrics
        .iter()
        .filter_map(|(step, metric)| Some((*step, (*metric)?)))
        .collect();
    steps.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    steps.into_iter().map(|(step, _)| step).collect()
}

/// The checkpoints that are not to be kept, when that of `step` has been written. Later ones are of another run's future,
/// and neither count nor go.
fn superseded(
    metrics: &BTreeMap<u64, Option<f64>>,
    step: u64,
    config: &CheckpointConfig,
) -> Vec<u64> {
    let last = metrics.range(..=step).rev().map(|(step, _)| *step);
    let best = by_metric(metrics).into_iter().take(config.keep_best);
    let keep: Vec<u64> = last.take(config.keep_last).chain(best).collect();
    let earlier = metrics.range(..=step).map(|(step, _)| *step);
    earlier.filter(|step| !keep.contains(step)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_and_the_best_are_kept() {
        let metrics = [
            (10, Some(0.3)),
            (20, Some(0.1)),
            (30, None),
            (40, Some(0.2)),
            (50, Some(0.1)),
        ];
        let metrics = metrics.into();
        let old = |last, best| {
            let config = CheckpointConfig::new()
                .with_keep_last(last)
                .with_keep_best(best);
            superseded(&metrics, 50, &config)
        };
        assert_eq!(old(1, 0), [10, 20, 30, 40]);
        assert_eq!(old(2, 0), [10, 20, 30]);
        assert_eq!(old(1, 2), [10, 30, 40]);
        assert_eq!(old(1, 3), [10, 30]);
        assert!(old(5, 0).is_empty());
        // Written after going back: it stays, and so do later ones, which do not count.
        let config = CheckpointConfig::new().with_keep_last(1);
        assert_eq!(superseded(&metrics, 20, &config), [10]);
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
