//! Shared code of benches that compare with PyTorch in one run: its process, and turns that measure
//! the peak of the machine.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

pub(crate) use turns::{cores, in_turn, timed};

mod turns;

/// Process that runs PyTorch's side.
pub(crate) struct PyTorch {
    process: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

impl PyTorch {
    /// Starts a script in the folder of the benches. Returns `None`, with a note, if PyTorch is not
    /// installed.
    pub(crate) fn start(script: &str) -> Option<Self> {
        let python = std::env::var("HALOCLINE_PYTHON").unwrap_or_else(|_| "python3".into());
        let start = || {
            let mut process = Command::new(&python)
                .arg(
                    Path::new(env!("CARGO_MANIFEST_DIR"))
                        .join("benches")
                        .join(script),
                )
                .arg(cores().to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .ok()?;
            let mut answers = BufReader::new(process.stdout.take()?).lines();
            println!("{}, {} threads", answers.next()?.ok()?, cores());
            Some(Self { process, answers })
        };
        let started = start();
        if started.is_none() {
            println!("Without PyTorch: HALOCLINE_PYTHON names a python that has it.");
        }
        started
    }

    /// Returns the seconds of one run, or, for a pass with `:peak`, the MiB that it needs; `None`
    /// if the case needs a library that is not installed.
    pub(crate) fn run(&mut self, pass: &str, case: &serde_json::Value) -> Option<f64> {
        let requests = self.process.stdin.as_mut().expect("a pipe");
        writeln!(requests, "{pass} {case}").expect("PyTorch's process is alive");
        let answer = self.answers.next().expect("PyTorch's process answers");
        let seconds: f64 = answer.expect("a line").parse().expect("seconds");
        Some(seconds).filter(|seconds| !seconds.is_nan())
    }
}
