//! Duration of epochs.

/// Longest durations among the epochs of a run, in seconds.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Duration of an epoch's batches, per autoregressive step.
    step: f64,
    /// Duration of saving and validation.
    rest: f64,
}

impl Pace {
    /// Adds an epoch with this number of autoregressive steps: the seconds of its batches, and of
    /// the rest.
    pub(super) fn add(&mut self, steps: usize, batches: f64, rest: f64) {
        self.step = self.step.max(batches / steps as f64);
        self.rest = self.rest.max(rest);
    }

    /// Estimates the seconds of an epoch with this number of autoregressive steps; zero before the
    /// first was added.
    pub(super) fn epoch(&self, steps: usize) -> f64 {
        self.step * steps as f64 + self.rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_of_more_steps_take_longer() {
        let mut pace = Pace::default();
        assert_eq!(pace.epoch(3), 0.0);
        pace.add(2, 10.0, 1.0);
        pace.add(1, 4.0, 3.0);
        assert_eq!(pace.epoch(1), 5.0 + 3.0);
        assert_eq!(pace.epoch(4), 20.0 + 3.0);
    }
}
