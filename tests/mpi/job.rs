//! Jobs of ranks, and the expectations of tests.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Environment variable with the case that a rank runs.
pub(crate) const CASE: &str = "HALOCLINE_MPI_CASE";
/// Environment variable with the number of ranks.
pub(crate) const RANKS: &str = "HALOCLINE_MPI_RANKS";

/// Output of a rank that continues after the job should have ended.
pub(crate) const NOT_ENDED: &str = "the job was not ended";

/// Outcome of a job.
pub(crate) struct Job {
    /// Exit statuses of the processes that this one started.
    ends: Vec<ExitStatus>,
    output: String,
    took: Duration,
    /// Whether a failure aborts the processes; otherwise their launcher returns it.
    aborts: bool,
}

/// Runs a case under `mpirun` on this number of ranks, with environment variables.
pub(crate) fn job(ranks: usize, case: &str, variables: &[(&str, &str)]) -> Job {
    /// Serializes jobs, because each uses all cores.
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
        ends: vec![output.status],
        output: text(&output),
        took: start.elapsed(),
        aborts: true,
    }
}

/// Runs a case on this number of processes, which find each other by an address.
pub(crate) fn connected(ranks: usize, case: &str, variables: &[(&str, &str)]) -> Job {
    let start = Instant::now();
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr());
    let port = free.expect("a free port").port().to_string();
    let process = |rank: usize| {
        program(case, variables)
            .env(RANKS, ranks.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .spawn()
            .expect("this binary can be run")
    };
    let mut processes: Vec<_> = (0..ranks).map(process).collect();
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let read = |process: &mut Child| {
            let (mut out, mut err) = (process.stdout.take(), process.stderr.take());
            scope.spawn(move || {
                let mut text = String::new();
                let _ = out.as_mut().expect("piped").read_to_string(&mut text);
                let _ = err.as_mut().expect("piped").read_to_string(&mut text);
                text
            })
        };
        let outputs: Vec<_> = processes.iter_mut().map(read).collect();
        // A stopped process ends only when it is killed.
        while processes
            .iter_mut()
            .any(|process| process.try_wait().expect("a child").is_none() && !is_stopped(process))
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        processes.iter_mut().for_each(|process| _ = process.kill());
        let texts = outputs.into_iter().map(|output| output.join());
        texts.map(|text| text.expect("no panic")).collect()
    });
    let ends = processes
        .iter_mut()
        .map(|child| child.wait().expect("a child"));
    let ends: Vec<_> = ends.collect();
    Job {
        ends,
        output: outputs.concat(),
        took: start.elapsed(),
        aborts: false,
    }
}

/// Runs a case in one process, with threads as ranks.
pub(crate) fn threads(case: &str, variables: &[(&str, &str)]) -> Job {
    let start = Instant::now();
    let output = program(case, variables)
        .output()
        .expect("this binary can be run");
    Job {
        ends: vec![output.status],
        output: text(&output),
        took: start.elapsed(),
        aborts: false,
    }
}

/// Returns a command that runs this binary as a rank.
fn program(case: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command
        .args(["rank_program", "--exact", "--nocapture"])
        .env(CASE, case)
        .env("RAYON_NUM_THREADS", "1")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn is_stopped(process: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, fields)| fields.trim_start().starts_with('T'))
}

fn text(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes);
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

impl Job {
    fn succeeded(&self) -> bool {
        self.ends.iter().all(ExitStatus::success)
    }

    /// Asserts that all processes ended in this way.
    pub(crate) fn expect_end(&self, end: impl Fn(&ExitStatus) -> bool) {
        assert!(
            self.ends.iter().all(end),
            "{:?}\n{}",
            self.ends,
            self.output
        );
    }

    /// Asserts that no rank printed this text.
    pub(crate) fn expect_without(&self, text: &str) {
        assert!(!self.output.contains(text), "{text:?} in\n{}", self.output);
    }

    /// Asserts that all ranks ended without an error.
    pub(crate) fn expect_success(&self) {
        assert!(self.succeeded(), "{}", self.output);
    }

    /// Asserts that the engine ended the job within seconds and printed the causes.
    pub(crate) fn expect_failure(&self, causes: &[&str]) {
        assert!(!self.succeeded(), "{}", self.output);
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
