//! Processes of a run, and how they are killed.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use halocline::prelude::*;

/// Ranks of a job.
const RANKS: usize = 2;
/// How soon all processes of a job must have ended after one of them was killed.
const PROMPT: Duration = Duration::from_secs(10);

/// How ranks run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Local,
    Mpi,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Local => "local, 2 ranks",
            Self::Mpi => "MPI, 2 processes",
        })
    }
}

/// What a run was doing when it was killed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    StartUp,
    Training,
    Saving,
    End,
}

/// A run on its way.
pub(crate) struct Job {
    process: Child,
    folder: PathBuf,
    /// Reads what the run says, line by line.
    lines: Option<JoinHandle<Vec<String>>>,
    said: Vec<String>,
}

impl Job {
    /// Starts a run, or has it go on.
    pub(crate) fn start(engine: Engine, folder: &Path) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut command = match engine {
            Engine::Local => Command::new(program),
            Engine::Mpi => {
                let mut command = Command::new("mpirun");
                let ranks = RANKS.to_string();
                command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks]);
                command.arg(program);
                command
            }
        };
        command.arg("train").arg(folder);
        command.env("RAYON_NUM_THREADS", "1");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = command.spawn()?;
        let output = process.stdout.take().expect("it is piped");
        let lines = std::thread::spawn(move || {
            let lines = BufReader::new(output).lines();
            lines.map_while(std::io::Result::ok).collect()
        });
        Ok(Self {
            process,
            folder: folder.into(),
            lines: Some(lines),
            said: Vec::new(),
        })
    }

    /// Waits for a run that nobody kills.
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

    /// Kills a run after a while: one of its processes, drawn by `which` in `[0, 1)`. Returns what it was doing, or
    /// nothing if it ended in order before.
    pub(crate) fn kill_after(&mut self, delay: Duration, which: f64) -> Result<Option<Moment>> {
        let start = Instant::now();
        while start.elapsed() < delay {
            if let Some(status) = self.process.try_wait()? {
                self.collect();
                return match status.success() {
                    true => Ok(None),
                    false => Err(Error::other(format!("a run ended with {status} by itself"))),
                };
            }
            std::thread::sleep(Duration::from_millis(1).min(delay));
        }
        // Ranks, if it has children, and their launcher.
        let mut processes = children(self.process.id())?;
        processes.push(self.process.id());
        let victim = processes[(which * processes.len() as f64) as usize];
        kill(victim)?;
        let killed = Instant::now();
        self.process.wait()?;
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
        let has = |line: &str| self.said.iter().any(|said| said == line);
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

    /// The steps that the run said are on the disk.
    pub(crate) fn reported(&self) -> Vec<u64> {
        let steps = self
            .said
            .iter()
            .filter_map(|line| line.strip_prefix("written ")?.parse().ok());
        steps.collect()
    }

    fn collect(&mut self) {
        if let Some(lines) = self.lines.take() {
            self.said = lines.join().unwrap_or_default();
        }
    }
}

/// Whether a checkpoint was begun and not finished.
fn is_saving(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .into_iter()
        .any(|entry| entry.file_name().to_string_lossy().starts_with(".step_"))
}

/// A line of `/proc/PID/stat` after the name: the state, the parent.
fn stat(process: u32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.into(), fields.next()?.parse().ok()?))
}

fn children(parent: u32) -> Result<Vec<u32>> {
    let entries = std::fs::read_dir("/proc")?.flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(processes
        .filter(|&process| stat(process).is_some_and(|(_, of)| of == parent))
        .collect())
}

/// A zombie is dead, if nobody has looked yet.
fn is_alive(process: u32) -> bool {
    stat(process).is_some_and(|(state, _)| state != "Z")
}

fn kill(process: u32) -> Result<()> {
    Command::new("sh")
        .args(["-c", &format!("kill -KILL {process}")])
        .status()?;
    Ok(())
}
