//! Channels and grid for which a model is built.

use halocline_core::{Error, Result};
use halocline_io::{Channels, Grid};

/// Channels that a model maps, and their grid.
pub(super) struct Signature<'a> {
    pub(super) channels: &'a Channels,
    /// Number of times of each input.
    pub(super) history: usize,
    pub(super) grid: &'a Grid,
    /// Inputs and forcings that change sign across a pole.
    pub(super) odd: &'a [String],
}

impl Signature<'_> {
    /// Returns the number of channels that a model receives: the inputs at all times of the
    /// history, and the forcings.
    pub(super) fn channels_in(&self) -> usize {
        self.history * self.channels.inputs.len() + self.channels.forcings.len()
    }

    /// Returns the number of channels that a model returns.
    pub(super) fn channels_out(&self) -> usize {
        self.channels.targets.len()
    }

    /// Returns the places of the received channels that change sign across a pole.
    pub(super) fn odd_places(&self) -> Vec<usize> {
        let times = std::iter::repeat_n(&self.channels.inputs, self.history).flatten();
        let names = times.chain(&self.channels.forcings).enumerate();
        let odd = names.filter(|(_, name)| self.odd.contains(name));
        odd.map(|(place, _)| place).collect()
    }

    /// Returns the number of inputs of a model that predicts its inputs.
    ///
    /// # Errors
    /// Targets that are not the inputs.
    pub(super) fn predicted_inputs(&self) -> Result<usize> {
        let (inputs, targets) = (&self.channels.inputs, &self.channels.targets);
        if inputs == targets {
            Ok(inputs.len())
        } else {
            Err(Error::other(format!(
                "data.targets: {targets:?} of a model that predicts its inputs, {inputs:?}; expected the same, or \
                 model.kind unet, fno, sfno or graph"
            )))
        }
    }
}
