//! The end of a job whose ranks no longer communicate, observed from outside the process.

use std::process::Command;
use std::time::{Duration, Instant};

use halocline_core::{Launcher, Result, Shard, ShardTensor};

const CHILD: &str = "HALOCLINE_TEST_CHILD";

/// The command that runs a test of this file as a child process.
fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1");
    command
}

/// Rank 0 computes and never receives a message; rank 1 fails. Does nothing when run as a test.
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

/// All ranks make the same mistake. Does nothing when run as a test.
#[test]
fn ranks_that_panic_alike() {
    if std::env::var_os(CHILD).is_some() {
        let result: Result<()> = Launcher::local(4).run(|_| panic!("out of ocean"));
        eprintln!("ended: {result:?}");
    }
}

#[test]
fn the_panic_of_all_ranks_is_printed_once_with_its_backtrace() {
    let output = child("ranks_that_panic_alike")
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("this binary can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    let count = |text: &str| errors.matches(text).count();
    assert_eq!(count("stack backtrace:"), 1, "{errors}");
    assert_eq!(count("panicked at"), 1, "{errors}");
    let others =
        (0..4).filter(|rank| errors.contains(&format!("rank {rank} panicked there, too\n")));
    assert_eq!(others.count(), 3, "{errors}");
    assert!(
        errors.contains("failed: panicked: out of ocean"),
        "{errors}"
    );
}

/// All ranks add fields whose shapes do not match, then change a shape in a closure. Does nothing
/// when run as a test.
#[test]
fn ranks_that_make_mistakes() {
    if std::env::var_os(CHILD).is_some() {
        let mistakes: [fn(ShardTensor<2>, ShardTensor<2>) -> ShardTensor<2>; 2] =
            [|x, y| x + y, |x, _| x.map_local(|x| x.sum_dim(1))];
        for mistake in mistakes {
            let result: Result<()> = Launcher::local(2).run(|world| {
                let mesh = world.mesh([("x", 2)])?;
                let ones = |shape| ShardTensor::<2>::ones(shape, &mesh, &[Shard(0)]);
                let _ = mistake(ones([4, 6])?, ones([4, 5])?);
                Ok(())
            });
            eprintln!("ended: {result:?}");
        }
    }
}

#[test]
fn a_mistake_is_printed_with_its_place_in_the_program() {
    let output = child("ranks_that_make_mistakes").output();
    let output = output.expect("this binary can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    for mistake in ["|x, y| x + y", "x.map_local(|x| x.sum"] {
        let line = include_str!("launch.rs")
            .lines()
            .position(|line| line.contains(mistake))
            .expect("that line");
        let place = format!("launch.rs:{}:", line + 1);
        assert!(errors.contains(&place), "{errors}");
    }
    assert_eq!(errors.matches("do not broadcast").count(), 2, "{errors}");
}

#[test]
fn a_failure_ends_the_process_though_another_rank_is_busy() {
    let start = Instant::now();
    let output = child("a_rank_that_never_communicates").output();
    let output = output.expect("this binary can be started");
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
