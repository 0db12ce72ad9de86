//! Properties of a dataset that all ranks of a loader need.

use serde::{Deserialize, Serialize};

use crate::Channels;

/// Summary of the dataset, which the first rank sends to all ranks.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Summary {
    /// Time in seconds and leads in hours of each sample.
    pub(super) samples: Vec<(f64, Vec<f64>)>,
    pub(super) channels: Channels,
    pub(super) history: usize,
    pub(super) steps: usize,
    /// Rows and columns.
    pub(super) grid: [usize; 2],
    /// Whether missing values are filled.
    pub(super) fills: bool,
}

impl Summary {
    /// Returns whether input and target of every sample are the same fields.
    pub(super) fn are_states(&self) -> bool {
        let is_same = self.history == 1 && self.channels.inputs == self.channels.targets;
        is_same && self.samples.iter().all(|(_, leads)| leads[..] == [0.0])
    }
}
