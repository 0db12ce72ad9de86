use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use halocline_core::{DeviceMesh, Error as CoreError, RandomKey, World};

use super::commit::{Commit, Others, lock, write_share};
use super::fetch::OPERATION;
use super::folder::{first_of, is_damage, name_of, put_out_of_the_way, tidy};
use super::index::Index;
use super::lock::lock_folder;
use super::retention::{CheckpointConfig, Kept, by_metric};
use super::{Checkpoint, Snapshot};
use crate::agreement::{Fallible, agree, all, broadcast};
use crate::{Error, Result};

/// How long a program that ends without [`Checkpoints::wait`] waits for the files of other ranks.
const PATIENCE: Duration = Duration::from_secs(1);

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

/// A checkpoint on its way to the disk.
#[derive(Debug)]
struct Writing {
    writer: JoinHandle<Result<()>>,
    /// On rank 0.
    committer: Option<JoinHandle<Result<()>>>,
    others: Arc<Others>,
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
    /// lower the better; it takes part only in which checkpoints are kept. [`wait`](Self::wait) for the last one: when this
    /// is dropped, it is given up if it takes more than a quarter of the timeout.
    ///
    /// # Errors
    /// On all ranks: ranks that save different tensors; of the save *before* this one, a rank that could not write, the disk
    /// being full. [`wait`](Self::wait) gives those of this one. A failure of communication.
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
        // Before anything is written: what rank 0 knows of could be whole.
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

    /// The newest checkpoint that is whole and finite, or, if [none](Checkpoint::not_finite) is finite, the newest that is
    /// whole; the same on all ranks. Others are named on stderr.
    ///
    /// # Errors
    /// On all ranks: checkpoints of which none is whole; a failure to save what was saved last, or of communication.
    pub fn latest(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.latest_before(u64::MAX)
    }

    /// [`latest`](Self::latest), of an earlier step than this.
    fn latest_before(&mut self, step: u64) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        first_of(&self.mesh, &self.folder, || {
            let kept = self.kept();
            let steps = kept.steps.range(..step).rev();
            Ok(steps.map(|(step, _)| *step).collect())
        })
    }

    /// What `load` makes of the [newest](Self::latest) checkpoint: where it fails, of the one before, and so on. Later ones
    /// get out of the way as `damaged_step_…`. All ranks load, or fail, together.
    ///
    /// One that is not finite is loaded only where no other is there. [`Checkpoint::open`] opens any.
    ///
    /// # Errors
    /// On all ranks: the first error of `load`, where it fails for all checkpoints; an error that is no fault of the checkpoint,
    /// such as a file that may not be read or a failure of communication; those of [`latest`](Self::latest), also for the
    /// earlier ones.
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
                // Of a file, and an error on all ranks.
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

    /// The checkpoint with the lowest metric, a finite one if there is one with a metric; the same on all ranks.
    ///
    /// # Errors
    /// Those of [`latest`](Self::latest).
    pub fn best(&mut self) -> halocline_core::Result<Option<Checkpoint>> {
        self.wait()?;
        first_of(&self.mesh, &self.folder, || {
            Ok(by_metric(&self.kept().steps))
        })
    }

    /// On rank 0, the step of the checkpoint that came onto the disk last. Others need not know, and have `None`.
    pub fn committed(&self) -> Option<u64> {
        self.kept().newest
    }

    /// Puts later checkpoints than that which training goes on from out of the way, as `damaged_step_…`.
    fn set_aside_after(&mut self, step: u64) -> halocline_core::Result<()> {
        self.wait()?;
        let set_aside = || {
            let mut kept = self.kept();
            let later = kept.steps.split_off(&(step + 1));
            for step in later.into_keys() {
                put_out_of_the_way(&self.folder, step)?;
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

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Drop for Checkpoints {
    /// A program that ends in order without waiting may still get its last checkpoint: other ranks have a second to write.
    /// One that failed must say so before the others take it for silent: what takes longer to write is given up.
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

/// Whether another checkpoint may be loaded where loading one ended with this error.
fn is_of_no_use(error: &CoreError) -> bool {
    match error {
        CoreError::Other(error) => error.downcast_ref().is_none_or(is_damage),
        // Another rank's.
        _ => true,
    }
}

fn background<T: Send + 'static>(
    folder: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<JoinHandle<Result<T>>> {
    let thread = Builder::new().name("checkpoint".into()).spawn(work);
    thread.map_err(|error| Error::io(folder, error))
}

/// Waits until the threads of all ranks have finished. As long as it takes: ranks tell each other that they are there, so
/// that a slow disk is no silence.
fn all_finish<T>(mesh: &DeviceMesh, own: Option<&JoinHandle<T>>) -> halocline_core::Result<()> {
    let patience = mesh.comm().settings().timeout / 4;
    loop {
        let finished = own.is_none_or(|thread| finishes_within(thread, patience));
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

/// What all ranks must have alike in a save.
fn fingerprint(index: &Index) -> u32 {
    let names: Vec<&String> = index.values.keys().collect();
    let alike = serde_json::to_vec(&(index.step, &index.tensors, names));
    crc32fast::hash(&alike.expect("numbers and texts are JSON"))
}
