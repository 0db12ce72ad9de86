//! Shared code of benches that compare programs, which run in turn and print lines
//! `what,of,figure`.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use halocline::prelude::*;
pub(crate) use median::median;

#[path = "../median/mod.rs"]
mod median;

/// Figures of every round, by (what, of).
pub(crate) type Samples = BTreeMap<(String, usize), Vec<f64>>;

/// Runs a program and adds the lines that it prints.
///
/// # Errors
/// The program cannot be started, or fails.
pub(crate) fn collect(command: &mut Command, samples: &mut Samples) -> Result<()> {
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(Error::other(format!("{command:?}: {}", output.status)));
    }
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let fields: Vec<&str> = line.split(',').collect();
        if let [what, of, figure] = fields[..]
            && let (Ok(of), Ok(figure)) = (of.parse(), figure.parse())
        {
            samples.entry((what.into(), of)).or_default().push(figure);
        }
    }
    Ok(())
}
