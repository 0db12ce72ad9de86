//! Comparison of the settings of a job's processes, each of which reads its own environment.

use std::sync::Arc;

use crate::comm::{Communicator, Operation, Traffic, collectives};
use crate::{Error, Result};

/// Checks that all processes of a job have the same settings, given by name, because settings
/// determine which messages are sent, and in which order.
///
/// # Errors
/// Returns the first setting that differs, with two ranks and their values; communication fails.
pub(super) fn require_same_settings(
    comm: &Arc<dyn Communicator>,
    settings: &[(&str, String)],
) -> Result<()> {
    let lines = settings
        .iter()
        .map(|(name, value)| format!("{name} {value}"));
    let text = lines.collect::<Vec<_>>().join("\n");
    let everyone: Vec<usize> = (0..comm.size()).collect();
    let operation = Operation::new("settings", Traffic::Control, None);
    let texts = collectives::all_gather_bytes(comm, &everyone, &operation, text.as_bytes())?;
    let texts = texts.iter().map(|text| String::from_utf8_lossy(text));
    let texts: Vec<_> = texts.collect();
    for (rank, text) in texts.iter().enumerate() {
        let mut pairs = texts[0].lines().zip(text.lines());
        if let Some((first, other)) = pairs.find(|(first, other)| first != other) {
            return Err(Error::Engine(format!(
                "rank 0 has {first}, rank {rank} has {other}; expected the same settings on all ranks of a job: give \
                 every process the same program, seed and HALOCLINE_ variables"
            )));
        }
    }
    Ok(())
}
