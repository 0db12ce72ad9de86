//! Jobs of ranks, and what a test expects of them.

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The variable that says what a rank runs.
pub(crate) const CASE: &str = "HALOCLINE_MPI_CASE";
/// The variable that says how many ranks there are.
pub(crate) const RANKS: &str = "HALOCLINE_MPI_RANKS";

/// What a rank says that went on after the job should have ended.
pub(crate) const NOT_ENDED: &str = "the job was not ended";

/// What became of a job.
pub(crate) struct Job {
    succeeded: bool,
    output: String,
    took: Duration,
}

/// Runs a case on so many ranks, with variables of the environment.
pub(crate) fn job(ranks: usize, case: &str, variables: &[(&str, &str)]) -> Job {
    /// A job uses all cores.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());

    let start = Instant::now();
    let output = Command::new("mpirun")
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--timeout",
            "120",
            "-n",
            &ranks.to_string(),
        ])
        .arg(std::env::current_exe().expect("this binary has a path"))
        .args(["rank_program", "--exact", "--nocapture"])
        .env(CASE, case)
        .env(RANKS, ranks.to_string())
        .env("RAYON_NUM_THREADS", "1")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output();
    let output = output.unwrap_or_else(|error| {
        panic!("cannot run mpirun ({error}); these tests need Open MPI and its mpirun in PATH")
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Job {
        succeeded: output.status.success(),
        output: text(&output.stdout) + &text(&output.stderr),
        took: start.elapsed(),
    }
}

impl Job {
    /// All ranks ended without an error.
    pub(crate) fn expect_success(&self) {
        assert!(self.succeeded, "{}", self.output);
    }

    /// The engine ended the job, soon, and said why.
    pub(crate) fn expect_failure(&self, causes: &[&str]) {
        assert!(!self.succeeded, "{}", self.output);
        assert!(
            self.took < Duration::from_secs(5),
            "{:?}\n{}",
            self.took,
            self.output
        );
        assert!(!self.output.contains(NOT_ENDED), "{}", self.output);
        for cause in causes {
            assert!(
                self.output.contains(cause),
                "no {cause:?} in\n{}",
                self.output
            );
        }
    }
}
