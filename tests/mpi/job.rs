//! Jobs of ranks, and what a test expects of them.

use std::process::{Command, Output, Stdio};
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
    /// Whether a failure ends the processes; else it is the result of their launcher.
    aborts: bool,
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
    Job {
        succeeded: output.status.success(),
        output: text(&output),
        took: start.elapsed(),
        aborts: true,
    }
}

/// Runs a case on so many processes that find each other by an address.
pub(crate) fn connected(ranks: usize, case: &str, variables: &[(&str, &str)]) -> Job {
    let start = Instant::now();
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr());
    let port = free.expect("a free port").port().to_string();
    let process = |rank: usize| {
        Command::new(std::env::current_exe().expect("this binary has a path"))
            .args(["rank_program", "--exact", "--nocapture"])
            .env(CASE, case)
            .env(RANKS, ranks.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("RAYON_NUM_THREADS", "1")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this binary can be run")
    };
    let processes: Vec<_> = (0..ranks).map(process).collect();
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let wait = |process: std::process::Child| scope.spawn(move || process.wait_with_output());
        let waits: Vec<_> = processes.into_iter().map(wait).collect();
        let ends = waits.into_iter().map(|wait| wait.join().expect("no panic"));
        ends.map(|end| end.expect("a process can be waited for"))
            .collect()
    });
    Job {
        succeeded: outputs.iter().all(|output| output.status.success()),
        output: outputs.iter().map(text).collect(),
        took: start.elapsed(),
        aborts: false,
    }
}

fn text(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes);
    format!("{}{}", text(&output.stdout), text(&output.stderr))
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
        assert!(
            !self.aborts || !self.output.contains(NOT_ENDED),
            "{}",
            self.output
        );
        for cause in causes {
            assert!(
                self.output.contains(cause),
                "no {cause:?} in\n{}",
                self.output
            );
        }
    }
}
