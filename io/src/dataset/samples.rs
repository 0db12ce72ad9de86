//! Selection of the times of samples on a time axis.

use std::fmt;

use crate::Gaps;
use crate::time::times::close;

/// Times of a sample, as indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SampleTimes {
    /// Times of the input; the last one is the present.
    pub(crate) inputs: Vec<usize>,
    /// Times of the targets, each one lead after the previous one.
    pub(crate) targets: Vec<usize>,
}

impl SampleTimes {
    pub(crate) fn present(&self) -> usize {
        self.inputs[self.inputs.len() - 1]
    }
}

/// Time from the present to the first target, and from each target to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lead {
    /// Number of steps along the axis.
    Steps(usize),
    /// Seconds.
    Time(f64),
}

impl fmt::Display for Lead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(1) => write!(f, "1 step"),
            Self::Steps(steps) => write!(f, "{steps} steps"),
            Self::Time(seconds) => write!(f, "{} h", seconds / 3600.0),
        }
    }
}

/// Lists the samples of a time axis of increasing `times` with the usual `step`, in order. Each has
/// `history` inputs, `apart` seconds or one step of the axis apart, and `targets` targets.
pub(crate) fn samples(
    times: &[f64],
    step: f64,
    (history, apart): (usize, Option<f64>),
    (lead, targets): (Lead, usize),
    gaps: Gaps,
) -> Vec<SampleTimes> {
    let after = |present: usize, seconds: f64| {
        let reached = |time: f64| close(time - times[present], seconds, step);
        let index =
            times.partition_point(|&time| time - times[present] < seconds && !reached(time));
        times
            .get(index)
            .filter(|time| reached(**time))
            .map(|_| index)
    };
    let target = |present: usize, number: usize| match lead {
        Lead::Steps(steps) => present.checked_add(steps.checked_mul(number)?),
        Lead::Time(seconds) => after(present, seconds * number as f64),
    };
    let input = |present: usize, number: usize| match apart {
        None => present.checked_sub(number),
        Some(seconds) => after(present, -seconds * number as f64),
    };
    let sample = |present: usize| {
        let targets = (1..=targets).map(|number| target(present, number));
        let targets: Vec<usize> = targets.collect::<Option<_>>()?;
        let inputs = (0..history).rev().map(|number| input(present, number));
        let inputs: Vec<usize> = inputs.collect::<Option<_>>()?;
        // Inputs and targets by time may lie beyond a gap.
        let first = apart.map_or(inputs[0], |_| present);
        let last = match lead {
            Lead::Steps(_) => targets.last().copied().unwrap_or(present),
            Lead::Time(_) => present,
        };
        let mut steps = times.get(first..=last)?.windows(2);
        let even = gaps != Gaps::Skip || steps.all(|pair| close(pair[1] - pair[0], step, step));
        even.then_some(SampleTimes { inputs, targets })
    };
    (0..times.len()).filter_map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(times: &[f64], history: usize, lead: Lead, gaps: Gaps) -> Vec<(usize, usize)> {
        let samples = samples(times, 6.0, (history, None), (lead, 1), gaps);
        let pair = |sample: SampleTimes| (sample.present(), sample.targets[0]);
        samples.into_iter().map(pair).collect()
    }

    #[test]
    fn even_axes_count_steps() {
        let times = [0.0, 6.0, 12.0, 18.0];
        let steps = |history, lead| pairs(&times, history, Lead::Steps(lead), Gaps::Reject);
        assert_eq!(steps(1, 1), [(0, 1), (1, 2), (2, 3)]);
        assert_eq!(steps(2, 2), [(1, 3)]);
        assert_eq!(steps(2, 0), [(1, 1), (2, 2), (3, 3)]);
        assert_eq!(steps(3, 2), []);
        assert_eq!(steps(5, 0), []);
        assert_eq!(steps(1, usize::MAX), []);
        let time = |hours| pairs(&times, 1, Lead::Time(hours), Gaps::Reject);
        assert_eq!(time(12.0), [(0, 2), (1, 3)]);
        assert_eq!(time(0.0), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        assert_eq!(time(7.0), []);
    }

    #[test]
    fn gaps_are_left_out_or_counted() {
        let times = [0.0, 6.0, 12.0, 24.0, 30.0];
        let steps = |history, gaps| pairs(&times, history, Lead::Steps(1), gaps);
        assert_eq!(steps(1, Gaps::Skip), [(0, 1), (1, 2), (3, 4)]);
        assert_eq!(steps(2, Gaps::Skip), [(1, 2)]);
        assert_eq!(steps(2, Gaps::Allow), [(1, 2), (2, 3), (3, 4)]);
        // If the lead is a time, a target may lie beyond the gap.
        let time = |history, gaps| pairs(&times, history, Lead::Time(12.0), gaps);
        assert_eq!(time(1, Gaps::Skip), [(0, 2), (2, 3)]);
        assert_eq!(time(2, Gaps::Allow), [(2, 3)]);
        assert_eq!(
            pairs(&times, 1, Lead::Time(18.0), Gaps::Allow),
            [(1, 3), (2, 4)]
        );
    }

    #[test]
    fn inputs_may_be_hours_apart() {
        let times = [0.0, 6.0, 12.0, 24.0, 30.0, 36.0];
        let all = |history, lead, gaps| {
            let samples = samples(&times, 6.0, history, (lead, 1), gaps);
            let list = |sample: SampleTimes| [sample.inputs, sample.targets].concat();
            samples.into_iter().map(list).collect::<Vec<_>>()
        };
        let twelve = (2, Some(12.0));
        let found = all(twelve, Lead::Time(12.0), Gaps::Skip);
        assert_eq!(found, [[0, 2, 3], [2, 3, 5]]);
        assert_eq!(all(twelve, Lead::Steps(1), Gaps::Skip), [[2, 3, 4]]);
        assert_eq!(all((2, Some(7.0)), Lead::Time(6.0), Gaps::Allow).len(), 0);
    }

    #[test]
    fn targets_follow_each_other_by_the_lead() {
        let times = [0.0, 6.0, 12.0, 24.0, 30.0, 36.0];
        let all = |lead, targets, gaps| {
            let samples = samples(&times, 6.0, (1, None), (lead, targets), gaps);
            let list = |sample: SampleTimes| [sample.inputs, sample.targets].concat();
            samples.into_iter().map(list).collect::<Vec<_>>()
        };
        assert_eq!(all(Lead::Steps(1), 2, Gaps::Skip), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(all(Lead::Steps(2), 2, Gaps::Allow), [[0, 2, 4], [1, 3, 5]]);
        assert_eq!(all(Lead::Time(12.0), 3, Gaps::Skip), [[0, 2, 3, 5]]);
        let none: [[usize; 1]; 0] = [];
        assert_eq!(all(Lead::Steps(usize::MAX), 2, Gaps::Allow), none);
    }
}
