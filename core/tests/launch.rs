//! The end of a job whose ranks do not communicate any more, seen from outside the process.

use std::process::Command;
use std::time::{Duration, Instant};

use halocline_core::{Launcher, Result};

const CHILD: &str = "HALOCLINE_TEST_CHILD";

/// Rank 0 computes and never looks at a message; rank 1 fails. Does nothing when it is run as a test.
#[test]
fn a_rank_that_never_communicates() {
    if std::env::var_os(CHILD).is_some() {
        let result: Result<()> = Launcher::local(2).run(|world| {
            if world.is_root() {
                loop {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            panic!("out of ocean");
        });
        unreachable!("the process has ended, not {result:?}");
    }
}

#[test]
fn a_failure_ends_the_process_though_another_rank_is_busy() {
    let start = Instant::now();
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "a_rank_that_never_communicates", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("this binary can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("rank 1 failed: panicked: out of ocean"),
        "{errors}"
    );
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}
