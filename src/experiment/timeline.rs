//! The times to which the steps of a forecast lead.

/// The present of every state of a loader, by its time axis, and the length of a step.
#[derive(Debug)]
pub(super) struct Timeline {
    /// The number of the time axis, and the time in seconds, of each state. Both rise.
    pub(super) states: Vec<(usize, f64)>,
    /// The length of a step, if it is the same everywhere, in seconds. Else a step leads to the next state.
    pub(super) lead: Option<f64>,
    /// The usual time between two states, in seconds.
    pub(super) step: f64,
}

/// The largest difference of times that are the same, in steps.
const TOLERANCE: f64 = 1e-3;

impl Timeline {
    /// The time so many steps after a state, and the state of that time if there is one. Beyond the last
    /// state, steps have the usual length.
    pub(super) fn ahead(&self, start: usize, steps: usize) -> (f64, Option<usize>) {
        let (series, time) = self.states[start];
        let axis = &self.states[start..];
        let end = axis.partition_point(|(other, _)| *other == series);
        let axis = &axis[..end];
        if let Some(lead) = self.lead {
            let time = time + lead * steps as f64;
            let tolerance = TOLERANCE * self.step;
            let index = axis.partition_point(|(_, other)| *other < time - tolerance);
            let is_there = axis
                .get(index)
                .is_some_and(|(_, other)| *other < time + tolerance);
            return (time, is_there.then_some(start + index));
        }
        match axis.get(steps) {
            Some((_, time)) => (*time, Some(start + steps)),
            None => {
                let beyond = steps + 1 - axis.len();
                (axis[axis.len() - 1].1 + self.step * beyond as f64, None)
            }
        }
    }

    /// The state of a time, the first of several.
    pub(super) fn find(&self, time: f64) -> Option<usize> {
        self.states
            .iter()
            .position(|(_, other)| (other - time).abs() < TOLERANCE * self.step)
    }

    /// The hours of a number of steps: the mean over the states that have a state so far ahead.
    pub(super) fn hours(&self, steps: usize) -> Option<f64> {
        let reached = (0..self.states.len()).filter_map(|start| {
            let (time, state) = self.ahead(start, steps);
            state.map(|_| (time - self.states[start].1) / 3600.0)
        });
        let (count, sum) = reached.fold((0, 0.0), |(count, sum), hours| (count + 1, sum + hours));
        (count > 0).then(|| sum / f64::from(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: f64 = 3600.0;

    fn timeline(lead: Option<f64>) -> Timeline {
        let hours = [(0, 0.0), (0, 7.0), (0, 15.0), (1, 0.0), (1, 7.0)];
        Timeline {
            states: hours.map(|(series, hours)| (series, hours * HOUR)).into(),
            lead: lead.map(|hours| hours * HOUR),
            step: 7.0 * HOUR,
        }
    }

    #[test]
    fn steps_lead_to_the_next_states_and_beyond_them() {
        let ahead = |start, steps| {
            let (time, state) = timeline(None).ahead(start, steps);
            (time / HOUR, state)
        };
        assert_eq!(ahead(0, 0), (0.0, Some(0)));
        assert_eq!(ahead(0, 2), (15.0, Some(2)));
        // The next state is of another time axis.
        assert_eq!(ahead(2, 1), (22.0, None));
        assert_eq!(ahead(3, 3), (21.0, None));
        assert_eq!(timeline(None).hours(1), Some(22.0 / 3.0));
        assert_eq!(timeline(None).hours(3), None);
        assert_eq!(timeline(None).find(7.0 * HOUR), Some(1));
    }

    #[test]
    fn steps_of_one_length_lead_to_states_of_that_time() {
        let ahead = |start, steps| {
            let (time, state) = timeline(Some(7.0)).ahead(start, steps);
            (time / HOUR, state)
        };
        assert_eq!(ahead(0, 1), (7.0, Some(1)));
        assert_eq!(ahead(0, 2), (14.0, None));
        assert_eq!(ahead(3, 1), (7.0, Some(4)));
    }
}
