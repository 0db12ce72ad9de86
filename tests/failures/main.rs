//! Jobs in which a rank fails: on threads, under MPI, and over TCP.
//!
//! Each job starts this binary again, whose `rank_program` fails on the last rank while the others
//! are in an operation.
#![cfg(feature = "mpi")]

#[allow(
    dead_code,
    reason = "shared with the tests of MPI, which use more of it"
)]
#[path = "../mpi/job.rs"]
mod job;
mod programs;

use std::os::unix::process::ExitStatusExt;

use job::{CASE, Job, connected, job, threads};

/// Operations that the other ranks are in.
const MOMENTS: [(&str, &str); 5] = [
    ("exchange", "with_halo"),
    ("reduction", "resolve"),
    ("gather", "gather"),
    ("scatter", "scatter_tensor"),
    ("checkpoint", "checkpoint"),
];

/// Runs a case with a short timeout and a folder for its checkpoints.
fn briefly(run: impl Fn(&[(&str, &str)]) -> Job, seconds: &str) -> Job {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("a path of plain letters");
    run(&[("HALOCLINE_TIMEOUT", seconds), ("FOLDER", path)])
}

/// Runs as one rank of a job; does nothing as a test.
#[test]
fn rank_program() {
    if let Ok(case) = std::env::var(CASE) {
        programs::run(&case);
    }
}

/// Runs a failure in every operation. All ranks must end soon, and report the causes and the
/// operation they were in.
fn ends(
    run: impl Fn(&str) -> Job,
    failure: &str,
    causes: &[&str],
    names_operator: bool,
) -> Vec<Job> {
    let end = |(moment, operator): (&str, &'static str)| {
        let mut causes = causes.to_vec();
        if names_operator {
            causes.push(operator);
        }
        let job = run(&format!("{moment} {failure}"));
        job.expect_failure(&causes);
        job
    };
    MOMENTS.map(end).into()
}

/// Runs a job in which ranks report an error of rank 0 before it does; rank 0 must be the one
/// named.
fn names_the_origin(run: impl Fn(&str) -> Job) {
    let job = run("told");
    job.expect_failure(&["rank 0 failed: no such file"]);
    for messenger in [1, 2] {
        job.expect_without(&format!("rank {messenger} failed"));
    }
}

mod local {
    use super::*;

    fn run(case: &str) -> Job {
        briefly(|set| threads(case, set), "1")
    }

    #[test]
    fn panics_and_errors_are_the_result() {
        ends(
            run,
            "panic",
            &["rank 2 failed: panicked: out of ocean"],
            false,
        );
        ends(run, "error", &["rank 2 failed: no such file"], false);
    }

    #[test]
    fn a_rank_that_hangs_is_named() {
        ends(
            run,
            "hang",
            &["nothing from rank 2 within 1 s", "did not stop within"],
            true,
        );
    }

    #[test]
    fn exit_and_a_buffer_that_is_too_large_end_the_process() {
        for job in ends(run, "exit", &["rank 2 exits"], false) {
            job.expect_end(|end| end.code() == Some(3));
            job.expect_without("halocline:");
        }
        const ABORTED: i32 = 6;
        for job in ends(run, "memory", &["memory allocation of"], false) {
            job.expect_end(|end| end.signal() == Some(ABORTED));
            job.expect_without("halocline:");
        }
    }

    #[test]
    fn the_rank_that_failed_is_named_by_others() {
        names_the_origin(run);
    }

    #[test]
    fn operations_in_another_order_are_named() {
        run("order").expect_failure(&["ranks diverged", "with_halo", "resolve"]);
    }
}

mod mpi {
    use super::*;

    fn run(case: &str) -> Job {
        briefly(|set| job(3, case, set), "1")
    }

    #[test]
    fn the_rank_that_failed_is_named_by_others() {
        names_the_origin(run);
    }

    #[test]
    fn panics_and_errors_end_the_job() {
        ends(
            run,
            "panic",
            &["halocline: rank 2 failed: panicked: out of ocean"],
            false,
        );
        ends(
            run,
            "error",
            &["halocline: rank 2 failed: no such file"],
            false,
        );
    }

    #[test]
    fn a_process_that_ends_or_is_killed_ends_the_job() {
        ends(run, "exit", &["exit"], false);
        ends(run, "kill", &["signal 9"], false);
        ends(run, "memory", &["memory allocation of", "signal 6"], false);
    }

    #[test]
    fn a_process_that_is_stopped_is_named() {
        ends(run, "stop", &["nothing from rank 2 within 1 s"], true);
    }

    #[test]
    fn a_process_that_does_not_come_ends_the_job() {
        run("start-up exit").expect_failure(&["exit"]);
        run("start-up kill").expect_failure(&["signal 9"]);
        run("start-up stop").expect_failure(&[
            "start-up: the other processes of the MPI job did not join within 1 s",
        ]);
    }

    #[test]
    fn operations_in_another_order_end_the_job() {
        run("order").expect_failure(&["ranks diverged"]);
    }
}

mod tcp {
    use super::*;

    fn run(case: &str) -> Job {
        briefly(|set| connected(3, case, set), "1")
    }

    #[test]
    fn the_rank_that_failed_is_named_by_others() {
        names_the_origin(run);
    }

    /// Descriptors: three standard streams, eleven peers, and one listener.
    #[test]
    fn a_peer_takes_one_descriptor() {
        let many = |case| briefly(|set| connected(12, case, set), "20");
        many("descriptors 20:20").expect_success();
        // The soft limit is raised as far as the system permits.
        many("descriptors 8:20").expect_success();
        let few = |case| briefly(|set| connected(12, case, set), "1");
        few("descriptors 8:8").expect_failure(&["Too many open files", "ulimit -n"]);
    }

    #[test]
    fn panics_and_errors_end_all_ranks() {
        ends(
            run,
            "panic",
            &["rank 2 failed: panicked: out of ocean"],
            true,
        );
        ends(run, "error", &["rank 2 failed: no such file"], true);
    }

    #[test]
    fn a_process_that_ends_or_is_killed_is_named() {
        ends(run, "exit", &["rank 2", "its connection broke"], true);
        ends(run, "kill", &["rank 2", "its connection broke"], true);
        ends(
            run,
            "memory",
            &["memory allocation of", "rank 2", "its connection broke"],
            true,
        );
    }

    #[test]
    fn a_process_that_is_stopped_is_named() {
        ends(run, "stop", &["nothing from rank 2 within 1 s"], true);
    }

    #[test]
    fn a_rank_that_leaves_hears_of_a_failure_though_its_peer_does_not_read() {
        run("leaving").expect_failure(&["nothing from rank 2 within 1 s"]);
    }

    #[test]
    fn a_process_that_does_not_come_is_named() {
        for failure in ["exit", "kill", "stop"] {
            run(&format!("start-up {failure}")).expect_failure(&["rank 2"]);
        }
    }

    #[test]
    fn operations_in_another_order_are_named() {
        run("order").expect_failure(&["ranks diverged", "with_halo", "resolve"]);
    }
}

/// A full disk, simulated by a limit on the size of files.
#[test]
fn a_full_disk_is_an_error_on_all_ranks() {
    let causes = ["File too large", "rank_0000"];
    briefly(|set| threads("disk", set), "5").expect_failure(&causes);
    briefly(|set| job(3, "disk", set), "5").expect_failure(&causes);
    briefly(|set| connected(3, "disk", set), "5").expect_failure(&causes);
}

/// Ctrl-C saves a checkpoint of the step that was reached, and ends in order.
#[test]
fn an_interruption_saves_and_ends_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    for (engine, run) in [
        (
            "local",
            &(|set: &[(&str, &str)]| threads("interrupt", set)) as &dyn Fn(&[(&str, &str)]) -> Job,
        ),
        ("tcp", &|set| connected(3, "interrupt", set)),
        ("mpi", &|set| job(3, "interrupt", set)),
    ] {
        let path = folder.path().join(engine);
        let path = path.to_str().expect("a path of plain letters");
        let interrupted = run(&[("FOLDER", path)]);
        interrupted.expect_success();
        // The program interrupts itself in the seventh step.
        let step = std::path::Path::new(path).join("step_000000007");
        assert!(halocline::io::Checkpoint::open(step).is_ok(), "{engine}");
    }
}

/// `examples/supervise.sh` runs a job on two "hosts", one of which is gone after a rank was killed.
#[test]
fn a_supervised_job_goes_on_with_fewer_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| {
        folder
            .path()
            .join(name)
            .to_str()
            .expect("plain letters")
            .to_string()
    };
    std::fs::write(path("hosts"), "localhost 2\n127.0.0.1 1\n").expect("a file");
    let probe = format!(
        "#!/bin/sh\ntest \"$1\" = localhost || test ! -e {}\n",
        path("gone")
    );
    std::fs::write(path("probe"), probe).expect("a file");
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/supervise.sh");
    let output = std::process::Command::new(script)
        .args([path("hosts"), path("run")])
        .arg(std::env::current_exe().expect("this binary has a path"))
        .args(["rank_program", "--exact", "--nocapture"])
        .env(CASE, "supervised")
        .env("FOLDER", path("run"))
        .env("GONE", path("gone"))
        .env("PROBE", format!("sh {}", path("probe")))
        .env("MPIRUN", "mpirun --allow-run-as-root --oversubscribe")
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .expect("a shell");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for said in [
        "3 ranks on localhost:2,127.0.0.1:1, from the start",
        "127.0.0.1 does not answer",
        "2 ranks on localhost:2, from step_",
        "all 12 losses on 2 ranks",
    ] {
        assert!(text.contains(said), "no {said:?} in\n{text}");
    }
}
