//! Channels and grid for which a model is built.

use halocline_io::{Channels, Grid};

/// Channels that a model maps, and their grid.
///
/// [`Experiment::with_network`](crate::experiment::Experiment::with_network) has an example.
#[derive(Clone, Copy, Debug)]
pub struct Signature<'a> {
    /// Names of the channels by role.
    pub channels: &'a Channels,
    /// Number of times of each input.
    pub history: usize,
    /// Rows and columns, or cells, with their positions.
    pub grid: &'a Grid,
    /// Inputs and forcings that change sign across a pole.
    pub odd: &'a [String],
    /// Number of channels of noise after the forcings.
    pub noise_channels: usize,
}

impl Signature<'_> {
    /// Returns the number of channels that a model receives: the inputs at all times of the
    /// history, oldest first, and then the forcings and the noise.
    pub fn channels_in(&self) -> usize {
        self.history * self.channels.inputs.len() + self.constants()
    }

    /// Returns the number of channels that a model returns.
    pub fn channels_out(&self) -> usize {
        self.channels.targets.len()
    }

    /// Returns the places of the received channels that change sign across a pole.
    pub(super) fn odd_places(&self) -> Vec<usize> {
        let times = std::iter::repeat_n(&self.channels.inputs, self.history).flatten();
        let names = times.chain(&self.channels.forcings).enumerate();
        let odd = names.filter(|(_, name)| self.odd.contains(name));
        odd.map(|(place, _)| place).collect()
    }

    /// Returns the number of channels after the inputs: forcings and noise.
    pub(super) fn constants(&self) -> usize {
        self.channels.forcings.len() + self.noise_channels
    }

    /// Returns the number of targets that are not inputs.
    pub(super) fn diagnostics(&self) -> usize {
        let (inputs, targets) = (&self.channels.inputs, &self.channels.targets);
        let others = targets.iter().filter(|target| !inputs.contains(target));
        others.count()
    }

    /// Returns the place of each target among the channels of a network that predicts the inputs,
    /// and then the other targets.
    pub(super) fn predicted_places(&self) -> Vec<usize> {
        let (inputs, targets) = (&self.channels.inputs, &self.channels.targets);
        let mut next = inputs.len();
        let place = |target: &String| {
            let input = inputs.iter().position(|input| input == target);
            input.unwrap_or_else(|| {
                next += 1;
                next - 1
            })
        };
        targets.iter().map(place).collect()
    }
}
