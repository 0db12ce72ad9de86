//! Shared code of benches that compare with Python in one run: its process.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Process that answers every line with a number.
pub(crate) struct Python {
    process: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Python {
    /// Starts a script in the folder of the benches, and prints its first line. Returns `None`, with
    /// a note, if Python or the libraries are not installed.
    pub(crate) fn start(script: &str, arguments: &[String], libraries: &str) -> Option<Self> {
        let python = std::env::var("HALOCLINE_PYTHON").unwrap_or_else(|_| "python3".into());
        let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
        let start = || {
            let mut process = Command::new(python)
                .arg(benches.join(script))
                .args(arguments)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .ok()?;
            let mut answers = BufReader::new(process.stdout.take()?).lines();
            println!("{}", answers.next()?.ok()?);
            Some(Self { process, answers })
        };
        let started = start();
        if started.is_none() {
            println!("Without Python: HALOCLINE_PYTHON names one that has {libraries}.");
        }
        started
    }

    /// Returns the answer to a request.
    pub(crate) fn ask(&mut self, request: impl Display) -> f64 {
        let requests = self.process.stdin.as_mut().expect("a pipe");
        writeln!(requests, "{request}").expect("the process is alive");
        let answer = self.answers.next().expect("the process answers");
        answer.expect("a line").parse().expect("a number")
    }
}
