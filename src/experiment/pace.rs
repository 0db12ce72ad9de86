//! The time that epochs take.

/// The longest times of the epochs of a run, in seconds.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Of the batches of an epoch, for each autoregressive step.
    step: f64,
    /// Of saving and validation.
    rest: f64,
}

impl Pace {
    /// Adds an epoch of a number of autoregressive steps, by the seconds of its batches and those after them.
    pub(super) fn add(&mut self, steps: usize, batches: f64, rest: f64) {
        self.step = self.step.max(batches / steps as f64);
        self.rest = self.rest.max(rest);
    }

    /// The seconds that an epoch of a number of autoregressive steps will take: none before the first was added.
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
