use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use halocline_core::{DeviceMesh, Error as CoreError, RandomKey, World};

use super::commit::{Commit, Others, lock, write_share};
use super::fetch::OPERATION;
use super::folder::{first_of, is_damage, mark_damaged, name_of, tidy};
use super::index::Index;
use super::lock::{is_locked, lock_folder};
use super::retention::{CheckpointConfig, Kept, by_metric};
use super::{Checkpoint, Snapshot};
use crate::ranks::agreement::{Fallible, agree, all, all_ranks, broadcast, on_first};
use crate::{Error, Result};

/// Maximum wait for the files of other ranks when a program ends without [`Checkpoints::wait`].
const PATIENCE: Duration = Duration::from_secs(1);

/// Folder of checkpoints, named `step_000000040` and so on, which all ranks use collectively.
///
/// A checkpoint is written in the background: every rank writes its share into a folder with a
/// temporary name; when all files are on disk, rank 0 adds the index and renames the folder. A
/// folder `step_…` is therefore a complete checkpoint at any moment, and a job that is killed loses
/// only the one that was being written. The folder must be on a file system that all ranks share,
/// and belongs to one job at a time; other jobs may read it with [`Checkpoint::latest`].
///
/// # Example
/// ```
/// use halocline_core::Launcher;
/// use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
///
/// Launcher::local(2).run(|world| {
///     let config = CheckpointConfig::new().with_keep_last(2).with_keep_best(1);
///     let mut checkpoints = Checkpoints::open(&world, folder, &config)?;
///     for (step, loss) in [(10, 0.5), (20, 0.2), (30, 0.4), (40, 0.3)] {
///         let mut snapshot = Snapshot::new(&world);
///         snapshot.value("rate", &1e-3)?;
///         checkpoints.save(step, snapshot, Some(loss))?;
///     }
///     checkpoints.wait()?;
///     assert_eq!(checkpoints.committed(), world.is_root().then_some(40));
///     let step = |checkpoint: Option<Checkpoint>| checkpoint.map(|checkpoint| checkpoint.step());
///     assert_eq!(step(checkpoints.latest()?), Some(40));
///     assert_eq!(step(checkpoints.best()?), Some(20));
///     let rate = checkpoints.resume(|checkpoint| Ok(checkpoint.value::<f64>("rate")?))?;
///     assert_eq!(rate, Some(1e-3));
///     Ok(())
/// })?;
/// assert!(!folder.join("step_000000010").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoints {
    mesh: DeviceMesh,
    folder: PathBuf,
    config: CheckpointConfig,
    /// Part of the names of this job's temporary folders, so that no rank of an earlier job writes
    /// to them.
    job: String,
    /// Number of saves that this job has started.
    attempts: u64,
    writing: Option<Writing>,
    /// Checkpoints of the folder; filled on rank 0 only.
    kept: Arc<Mutex<Kept>>,
    /// Lock of the folder, held by rank 0.
    _lock: Option<File>,
}

/// Checkpoint that is being written.
#[derive(Debug)]
struct Writing {
    writer: JoinHandle<Result<()>>,
    /// Thread that completes the checkpoint, on rank 0.
    committer: Option<JoinHandle<Result<()>>>,
    others: Arc<Others>,
}

impl Checkpoints {
    /// Opens or creates a folder exclusively for this job. Removes incomplete checkpoints of an
    /// interrupted job.
    ///
    /// # Errors
    /// On all ranks: a folder that cannot be created or read, or that another job has open; a
    /// folder with checkpoints but no complete one; `keep_last` of zero; a failure of
    /// communication.
    pub fn open(
        world: &World,
        folder: impl AsRef<Path>,
        config: &CheckpointConfig,
    ) -> halocline_core::Result<Self> {
        if config.keep_last == 0 {
            return Err(Error::argument("keep_last", 0, "at least 1").into());
        }
        let folder = folder.as_ref();
        let mesh = all_ranks(world)?;
        let path = folder.to_path_buf();
        let tidying = world.is_root().then(|| {
            background(folder, move || {
                let lock = lock_folder(&path)?;
                Ok((tidy(&path)?, Some(lock)))
            })
        });
        let tidying = tidying.transpose();
        all_finish(&mesh, tidying.as_ref().ok().and_then(Option::as_ref))?;
        let tidied = tidying.and_then(|thread| thread.map_or(Ok((Kept::default(), None)), joined));
        let (kept, lock) = agree(&mesh, OPERATION, Fallible::First, tidied)?;
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
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

    /// Whether a job has a folder [open](Self::open). Always `false` on file systems without locks.
    ///
    /// # Example
    /// ```
    /// use halocline_core::Launcher;
    /// use halocline_io::{CheckpointConfig, Checkpoints};
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    ///
    /// Launcher::local(1).run(|world| {
    ///     let _checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
    ///     assert!(Checkpoints::is_open(folder));
    ///     Ok(())
    /// })?;
    /// assert!(!Checkpoints::is_open(folder));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn is_open(folder: impl AsRef<Path>) -> bool {
        is_locked(folder.as_ref())
    }

    /// Saves a state in the background. Returns when the previous save is on disk. The `metric`
    /// decides which checkpoints are kept and which is [`best`](Self::best): by default, lower is
    /// better ([`CheckpointConfig::direction`]). NaN and infinities count as no metric. Call
    /// [`wait`](Self::wait) after the last save: on drop, a save that takes more than a quarter of
    /// the timeout is abandoned.
    ///
    /// # Errors
    /// On all ranks: ranks that save different tensors or steps; a rank that could not write the
    /// *previous* save, for example because the disk is full; a failure of communication. Errors of
    /// this save are returned by the next `save` or by [`wait`](Self::wait).
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
        index.direction = self.config.direction;
        self.attempts += 1;
        let name = format!(".{}.{}.{}", name_of(step), self.job, self.attempts);
        let partial = self.folder.join(name);
        let sum = fingerprint(&index).to_le_bytes().to_vec();
        let same = broadcast(&self.mesh, OPERATION, sum.clone())? == sum;
        // Compared before anything is written, because a mismatch may go unnoticed later: all
        // tensors that rank 0 lists could exist.
        let fits = if same {
            Ok(())
        } else {
            let got = format!("other tensors, or another step than {step}");
            Err(Error::argument(
                "snapshot",
                got,
                "those of rank 0 on all ranks",
            ))
        };
        agree(&self.mesh, OPERATION, Fallible::All, fits)?;
        let others = Arc::new(Others::default());
        let commit = Commit {
            index,
            partial: partial.clone(),
            folder: self.folder.clone(),
            config: self.config.clone(),
            others: others.clone(),
            kept: self.kept.clone(),
        };
        let write = move || write_share(&partial, rank, &cells);
        let writer = background(&self.folder, write)?;
        let committer = (self.mesh.position() == 0)
            .then(|| background(&self.folder, move || commit.run()))
            .transpose()?;
        self.writing = Some(Writing {
            writer,
            committer,
            others,
        });
        Ok(())
    }

    /// Waits until the last save is on disk.
    ///
    /// # Errors
    /// On all ranks: a rank that could not write; a failure of communication.
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
        let written = all_finish(&self.mesh, Some(&writer))
            .and_then(|()| agree(&self.mesh, OPERATION, Fallible::All, joined(writer)));
        match &written {
            Ok(()) => _ = others.written.set((Instant::now(), timeout)),
            Err(_) => others.cancelled.store(true, Ordering::Relaxed),
        }
        if let Err(error) = written {
            committer.map(joined);
            return Err(error);
        }
        all_finish(&self.mesh, committer.as_ref())?;
        let committed = committer.map_or(Ok(()), joined);
        agree(&self.mesh, OPERATION, Fallible::First, committed)
    }

    /// Opens the newest complete and finite checkpoint, the same on all ranks, or the newest
    /// complete one if none is [finite](Checkpoint::not_finite). Reports skipped checkpoints on
    /// stderr.
    ///
    /// # Errors
    /// On all ranks: checkpoints of which none is complete; a failure of the last save or of
    /// communication.
    pub fn latest(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.latest_before(u64::MAX)
    }

    /// Opens the [`latest`](Self::latest) checkpoint before `step`.
    fn latest_before(&mut self, step: u64) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        first_of(&self.mesh, &self.folder, || {
            let kept = self.kept();
            let steps = kept.steps.range(..step).rev();
            Ok(steps.map(|(step, _)| *step).collect())
        })
    }

    /// Calls `load` with the [newest](Self::latest) checkpoint and, while it fails, with earlier
    /// ones in turn. Returns the first value loaded, and renames the later checkpoints to
    /// `damaged_step_…`. All ranks load, or fail, together.
    ///
    /// A checkpoint that is not finite is loaded only if there is no finite one.
    /// [`Checkpoint::open`] opens any.
    ///
    /// # Errors
    /// On all ranks: the first error of `load`, if it fails for all checkpoints; an error not
    /// caused by the checkpoint, such as denied permission or a failure of communication; those of
    /// [`latest`](Self::latest), also for earlier checkpoints.
    pub fn resume<T>(
        &mut self,
        mut load: impl FnMut(&Checkpoint) -> halocline_core::Result<T>,
    ) -> halocline_core::Result<Option<T>> {
        let mut first_failure = None;
        let mut candidate = self.latest()?;
        while let Some(checkpoint) = candidate {
            let error = match load(&checkpoint) {
                Ok(loaded) => {
                    if first_failure.is_some() {
                        self.set_aside_after(checkpoint.step())?;
                    }
                    return Ok(Some(loaded));
                }
                // Read errors, which all ranks share.
                Err(error @ (CoreError::Rank { .. } | CoreError::Other(_))) => error,
                Err(error) => return Err(error),
            };
            if !all(&self.mesh, OPERATION, is_of_no_use(&error))? {
                return Err(error);
            }
            if self.mesh.position() == 0 {
                eprintln!("halocline: a checkpoint is passed over: {error}");
            }
            first_failure.get_or_insert(error);
            let finite = checkpoint.not_finite().is_none();
            candidate = self.latest_before(checkpoint.step())?;
            candidate = candidate.filter(|next| !finite || next.not_finite().is_none());
        }
        first_failure.map_or(Ok(None), Err)
    }

    /// Opens the checkpoint with the best metric, the same on all ranks. Finite checkpoints take
    /// precedence over others.
    ///
    /// # Errors
    /// Errors of [`latest`](Self::latest).
    pub fn best(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        first_of(&self.mesh, &self.folder, || {
            Ok(by_metric(&self.kept().steps))
        })
    }

    /// Returns the step of the last checkpoint completed on disk, on rank 0. `None` on other ranks,
    /// which do not record it.
    pub fn committed(&self) -> Option<u64> {
        self.kept().newest
    }

    /// Renames the checkpoints after `step`, from which training continues, to `damaged_step_…`.
    fn set_aside_after(&mut self, step: u64) -> halocline_core::Result<()> {
        self.wait()?;
        on_first(&self.mesh, OPERATION, || {
            let mut kept = self.kept();
            let later = kept.steps.split_off(&(step + 1));
            for step in later.into_keys() {
                mark_damaged(&self.folder, step)?;
            }
            kept.newest = Some(step);
            Ok(())
        })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Drop for Checkpoints {
    /// Tries to complete the last checkpoint if the program ends without [`Checkpoints::wait`]:
    /// gives other ranks a second to write. A program that failed must report that before other
    /// ranks time out, so a longer write is abandoned.
    fn drop(&mut self) {
        let Some(writing) = self.writing.take() else {
            return;
        };
        let patience = self.mesh.comm().settings().timeout / 4;
        if finishes_within(&writing.writer, patience) {
            let _ = joined(writing.writer);
        } else {
            let rank = self.mesh.comm().rank();
            eprintln!(
                "halocline: rank {rank}: the last checkpoint is given up: it takes long, and nobody waits for it"
            );
        }
        if let Some(committer) = writing.committer {
            finishes_within(&committer, PATIENCE);
            writing.others.cancelled.store(true, Ordering::Relaxed);
            if let Err(error) = joined(committer) {
                eprintln!("halocline: the last checkpoint was not written: {error}");
            }
        }
    }
}

/// Whether an earlier checkpoint may be tried after this load error.
fn is_of_no_use(error: &CoreError) -> bool {
    match error {
        CoreError::Other(error) => error.downcast_ref().is_none_or(is_damage),
        // The error occurred on another rank.
        _ => true,
    }
}

fn background<T: Send + 'static>(
    folder: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<JoinHandle<Result<T>>> {
    Builder::new()
        .name("checkpoint".into())
        .spawn(work)
        .map_err(|error| Error::io(folder, error))
}

/// Waits without limit until the threads of all ranks have finished. Ranks keep exchanging
/// messages, so that a slow disk does not cause a timeout.
fn all_finish<T>(mesh: &DeviceMesh, thread: Option<&JoinHandle<T>>) -> halocline_core::Result<()> {
    let patience = mesh.comm().settings().timeout / 4;
    loop {
        let finished = thread.is_none_or(|thread| finishes_within(thread, patience));
        if all(mesh, OPERATION, finished)? {
            return Ok(());
        }
    }
}

fn finishes_within<T>(thread: &JoinHandle<T>, patience: Duration) -> bool {
    let start = Instant::now();
    let mut pause = Duration::from_micros(50);
    while !thread.is_finished() && start.elapsed() < patience {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    thread.is_finished()
}

fn joined<T>(thread: JoinHandle<Result<T>>) -> Result<T> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Computes a checksum of the parts of a save that must be equal on all ranks.
fn fingerprint(index: &Index) -> u32 {
    let names: Vec<&String> = index.values.keys().collect();
    let bytes = serde_json::to_vec(&(index.step, &index.tensors, names))
        .expect("numbers and strings are JSON");
    crc32fast::hash(&bytes)
}
