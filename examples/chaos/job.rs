//! Processes of a run, and killing them.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use halocline::prelude::*;

/// Number of ranks of a job, unless it changes.
const RANKS: usize = 2;
/// Numbers of ranks of jobs that resume with another one.
const CHANGING: [usize; 3] = [2, 3, 1];
/// Longest time until all processes of a job have ended after one of them was killed.
const PROMPT: Duration = Duration::from_secs(10);

/// Engine of a job, and the state that its ranks hold.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Engine {
    pub(crate) mpi: bool,
    pub(crate) state: State,
}

/// Parameters and optimizer states that a rank holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Whole,
    Shards,
    /// Shards, over another number of ranks after every start.
    Resharded,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match (self.mpi, self.state) {
            (false, State::Whole) => "local, 2 ranks",
            (false, State::Shards) => "local, 2 shards",
            (false, State::Resharded) => "local, 1 to 3 shards",
            (true, State::Whole) => "MPI, 2 processes",
            (true, State::Shards) => "MPI, 2 shards",
            (true, State::Resharded) => "MPI, 1 to 3 shards",
        })
    }
}

/// Phase in which a run was killed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    StartUp,
    Training,
    Saving,
    End,
}

/// Running job.
pub(crate) struct Job {
    process: Child,
    folder: PathBuf,
    /// Thread that reads the output of the run, line by line.
    lines: Option<JoinHandle<Vec<String>>>,
    output: Vec<String>,
}

impl Job {
    /// Starts or resumes a run; `start` counts the starts.
    pub(crate) fn start(engine: Engine, folder: &Path, start: usize) -> Result<Self> {
        let program = std::env::current_exe()?;
        let ranks = match engine.state {
            State::Resharded => CHANGING[start % CHANGING.len()],
            _ => RANKS,
        };
        let ranks = ranks.to_string();
        let mut command = if engine.mpi {
            let mut command = Command::new("mpirun");
            command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks]);
            command.arg(program);
            command
        } else {
            Command::new(program)
        };
        command.arg("train").arg(folder);
        command.args(["--ranks", &ranks]);
        command.args((engine.state != State::Whole).then_some("--sharded"));
        command.env("RAYON_NUM_THREADS", "1");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = command.spawn()?;
        let stdout = process.stdout.take().expect("it is piped");
        let lines = std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines();
            lines.map_while(std::io::Result::ok).collect()
        });
        Ok(Self {
            process,
            folder: folder.into(),
            lines: Some(lines),
            output: Vec::new(),
        })
    }

    /// Waits for the end of a run that is not killed.
    pub(crate) fn wait(mut self) -> Result<()> {
        let status = self.process.wait()?;
        self.collect();
        if status.success() {
            return Ok(());
        }
        Err(Error::other(format!(
            "a run ended with {status} by itself: {:?}",
            self.folder
        )))
    }

    /// Kills one of the processes of a run after a delay. The process is selected by `which`, in
    /// `[0, 1)`. Returns the phase of the run, or `None` if it ended normally before.
    pub(crate) fn kill_after(&mut self, delay: Duration, which: f64) -> Result<Option<Moment>> {
        let start = Instant::now();
        while start.elapsed() < delay {
            if let Some(status) = self.process.try_wait()? {
                self.collect();
                return if status.success() {
                    Ok(None)
                } else {
                    Err(Error::other(format!("a run ended with {status} by itself")))
                };
            }
            std::thread::sleep(Duration::from_millis(1).min(delay));
        }
        // The ranks of an MPI job are children of the process that launched them.
        let mut processes = children(self.process.id())?;
        processes.push(self.process.id());
        let victim = processes[(which * processes.len() as f64) as usize];
        kill(victim)?;
        let killed = Instant::now();
        while self.process.try_wait()?.is_none() {
            // Open MPI 4.1's launcher may wait forever for its own lock when a rank dies during
            // start-up.
            if killed.elapsed() > PROMPT {
                self.process.kill()?;
                self.process.wait()?;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        while processes.iter().any(|&process| is_alive(process)) {
            if killed.elapsed() > PROMPT {
                processes.iter().for_each(|&process| _ = kill(process));
                return Err(Error::other(format!(
                    "processes of {processes:?} outlived {victim} by {PROMPT:?}"
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.collect();
        let has = |line: &str| self.output.iter().any(|output| output == line);
        Ok(Some(if !has("step") {
            Moment::StartUp
        } else if is_saving(&self.folder) {
            Moment::Saving
        } else if has("end") {
            Moment::End
        } else {
            Moment::Training
        }))
    }

    /// Returns the steps that the run reported to be on disk.
    pub(crate) fn reported(&self) -> Vec<u64> {
        self.output
            .iter()
            .filter_map(|line| line.strip_prefix("written ")?.parse().ok())
            .collect()
    }

    fn collect(&mut self) {
        if let Some(lines) = self.lines.take() {
            self.output = lines.join().unwrap_or_default();
        }
    }
}

/// Whether the folder has an unfinished checkpoint.
fn is_saving(folder: &Path) -> bool {
    std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with(".step_"))
}

/// Reads the state and the parent of a process from `/proc/PID/stat`.
fn stat(process: u32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.into(), fields.next()?.parse().ok()?))
}

fn children(parent: u32) -> Result<Vec<u32>> {
    Ok(std::fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&process| stat(process).is_some_and(|(_, found)| found == parent))
        .collect())
}

/// Whether a process runs. A zombie has ended, and only waits to be reaped.
fn is_alive(process: u32) -> bool {
    stat(process).is_some_and(|(state, _)| state != "Z")
}

fn kill(process: u32) -> Result<()> {
    Command::new("sh")
        .args(["-c", &format!("kill -KILL {process}")])
        .status()?;
    Ok(())
}
