//! Settings of a job, and the environment variables that set them.

use std::sync::LazyLock;
use std::time::Duration;

/// How long ranks may go on after another one has failed, before the process is ended.
pub(crate) const GRACE: Duration = Duration::from_secs(3);

/// How a rank communicates.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a rank waits for a message. Default 60 s.
    pub timeout: Duration,
    /// Whether ranks compare operation and layout before they communicate, and tensors that all must hold alike; and
    /// whether closures of `map_local` are run on other cells too. Default in debug builds only.
    pub check: bool,
    /// Whether operators compute what they can while boxes travel. Default where it is likely to pay.
    pub overlap: Overlap,
    /// Whether gradients of parameters are summed many at a time. Default yes.
    pub buckets: bool,
    /// Whether every communication is told on stderr. Default not.
    pub log: bool,
}

/// When operators compute what needs no other rank's cells while these travel. Results have the same bits either way; on
/// GPUs as far as the backend computes a cell alike in tensors of another size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// On engines whose messages take time, for messages of a size that makes up for the work in two parts.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            check: cfg!(debug_assertions),
            overlap: Overlap::default(),
            buckets: true,
            log: false,
        }
    }
}

/// A switch in the environment; `None` if it is not set.
///
/// # Panics
/// Panics if it is neither 0 nor 1.
pub(crate) fn switch(name: &str) -> Option<bool> {
    match std::env::var(name).ok()?.as_str() {
        "0" => Some(false),
        "1" => Some(true),
        value => panic!("{name}={value}: expected 0 or 1"),
    }
}

/// The number of processes that a launcher of MPI says it started: `mpirun` inside a job of Slurm, or Slurm.
pub(crate) fn started_tasks(get: impl Fn(&str) -> Option<String>) -> usize {
    let names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];
    let tasks = names.into_iter().find_map(get);
    tasks.and_then(|tasks| tasks.parse().ok()).unwrap_or(1)
}

/// Whether a rank sends itself, through its engine, all that it would copy from its own shard but the largest box
/// (`HALOCLINE_LOOPBACK=1`): a test of engines on one rank.
pub(crate) fn loopback() -> bool {
    static LOOPBACK: LazyLock<bool> = LazyLock::new(|| switch("HALOCLINE_LOOPBACK") == Some(true));
    *LOOPBACK
}
