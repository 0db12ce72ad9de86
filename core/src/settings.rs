//! Settings of a job, and the environment variables that set them.

use std::sync::LazyLock;
use std::time::Duration;

/// Time that the other ranks have to finish after one has failed, before the process ends.
pub(crate) const GRACE: Duration = Duration::from_secs(3);

/// Communication settings of a rank, made by [`Launcher`](crate::Launcher).
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Overlap};
///
/// let launcher = Launcher::local(1).check(true).overlap(Overlap::Off);
/// let settings = launcher.collect(|world| Ok(*world.comm().settings()))?;
/// assert!(settings[0].check && settings[0].overlap == Overlap::Off);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Time to wait for a message. Default 60 s.
    pub timeout: Duration,
    /// Whether ranks compare operation and layout before they communicate, and compare tensors that
    /// must be equal on all ranks; and whether closures of `map_local` also run on other cells.
    /// Default: in debug builds only.
    pub check: bool,
    /// Whether operators compute while boxes travel. Default: where this is likely to save time.
    pub overlap: Overlap,
    /// Whether gradients of parameters are summed in buckets of several. Default: yes.
    pub buckets: bool,
    /// Whether every communication prints a line to stderr. Default: no.
    pub log: bool,
}

/// Policy for computing cells that need no other rank while boxes travel. Results are bit-identical
/// either way; on GPUs, only if the backend computes a cell identically in tensors of different
/// sizes. See the example of [`Settings`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// On engines whose messages take time, for messages large enough to outweigh the cost of
    /// computing in two parts.
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

/// Reads an on/off environment variable; returns `None` if it is not set.
///
/// # Panics
/// Panics if the value is neither 0 nor 1.
pub(crate) fn switch(name: &str) -> Option<bool> {
    match std::env::var(name).ok()?.as_str() {
        "0" => Some(false),
        "1" => Some(true),
        value => panic!("{name}={value}: expected 0 or 1"),
    }
}

/// The number of processes that an MPI launcher started, from its environment variables: `mpirun`
/// (also inside a Slurm job) or Slurm.
pub(crate) fn started_tasks(get: impl Fn(&str) -> Option<String>) -> usize {
    let names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];
    let tasks = names.into_iter().find_map(get);
    tasks.and_then(|tasks| tasks.parse().ok()).unwrap_or(1)
}

/// Whether a rank sends all boxes of its own shard except the largest to itself through its engine,
/// instead of copying them (`HALOCLINE_LOOPBACK=1`): tests an engine on one rank.
pub(crate) fn loopback() -> bool {
    static LOOPBACK: LazyLock<bool> = LazyLock::new(|| switch("HALOCLINE_LOOPBACK") == Some(true));
    *LOOPBACK
}
