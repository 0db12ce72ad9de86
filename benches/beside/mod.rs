//! Shared code of benches that compare with PyTorch in one run: its process, turns that measure the
//! peak of the machine, settings and tables.

use std::env;
use std::fs;
use std::io;
use std::num::ParseFloatError;
use std::path::Path;
use std::time::Duration;

use python::Python;
pub(crate) use turns::{cores, in_turn, timed};

#[path = "../python/mod.rs"]
mod python;
mod turns;

/// Process that runs PyTorch's side.
pub(crate) struct PyTorch(Python);

impl PyTorch {
    /// Starts a script in the folder of the benches. Returns `None`, with a note, if PyTorch is not
    /// installed.
    pub(crate) fn start(script: &str) -> Option<Self> {
        Python::start(script, &[cores().to_string()], "PyTorch").map(Self)
    }

    /// Returns the seconds of one run, or, for a pass with `:peak`, the MiB that it needs; `None`
    /// if the case needs a library that is not installed.
    pub(crate) fn run(&mut self, pass: &str, case: &serde_json::Value) -> Option<f64> {
        let seconds = self.0.ask(format_args!("{pass} {case}"));
        Some(seconds).filter(|seconds| !seconds.is_nan())
    }
}

/// Returns the time for a case: `HALOCLINE_BENCH_SECONDS`, or these seconds by default.
pub(crate) fn budget(seconds: f64) -> Result<Duration, ParseFloatError> {
    let set = env::var("HALOCLINE_BENCH_SECONDS");
    let seconds = set.map_or(Ok(seconds), |seconds| seconds.parse())?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Returns the arguments of the bench.
pub(crate) fn arguments() -> Vec<String> {
    let arguments = env::args().skip(1);
    arguments.filter(|part| part != "--bench").collect()
}

/// Returns whether the name of a case contains one of these parts; without parts, all cases are
/// chosen.
pub(crate) fn is_chosen(parts: &[String], name: &str) -> bool {
    parts.is_empty() || parts.iter().any(|part| name.contains(part))
}

/// Writes a table into the folder `bench` of cargo's target directory.
pub(crate) fn write_table(name: &str, table: &str) -> io::Result<()> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    fs::create_dir_all(&folder)?;
    let file = folder.join(name);
    fs::write(&file, table)?;
    println!("{}", file.display());
    Ok(())
}
