//! Times that the steps of a forecast lead to.

use halocline_core::Result;
use halocline_io::Calendar;

use super::errors::invalid;
use super::forecast_config::ForecastConfig;

/// Time and time axis of every state of a loader, and the length of a step.
#[derive(Debug)]
pub(super) struct Timeline {
    /// Index of the time axis, and time in seconds, of each state. Both rise.
    pub(super) states: Vec<(usize, f64)>,
    /// Length of a step in seconds, if it is the same everywhere; otherwise a step leads to the
    /// next state.
    pub(super) lead: Option<f64>,
    /// Usual time between two states, in seconds.
    step: f64,
    calendar: Calendar,
    /// Whether steps beyond the last state are calendar months.
    is_monthly: bool,
}

/// Largest difference between equal times, in steps.
const TOLERANCE: f64 = 1e-3;
/// Seconds per day.
const DAY: f64 = 86400.0;

impl Timeline {
    pub(super) fn new(
        states: Vec<(usize, f64)>,
        lead: Option<f64>,
        step: f64,
        calendar: Calendar,
    ) -> Self {
        let is_month = |seconds: f64| (28.0..=31.0).contains(&(seconds / DAY));
        let pairs = || states.windows(2).filter(|pair| pair[0].0 == pair[1].0);
        let lengths = || pairs().map(|pair| pair[1].1 - pair[0].1);
        let is_even = lengths().all(|length| (length - step).abs() < TOLERANCE * step);
        let by_calendar = pairs().all(|pair| {
            let next = calendar.months_after(pair[0].1, 1);
            next.is_some_and(|next| (next - pair[1].1).abs() < DAY)
        });
        let is_monthly = is_month(step) && lengths().all(is_month) && (!is_even || by_calendar);
        Self {
            states,
            lead,
            step,
            calendar,
            is_monthly,
        }
    }

    /// Returns the time `steps` steps after a state, and the state at that time if there is one.
    /// Beyond the last state, steps have the usual length, or are months if the steps between the
    /// states are.
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
                let (beyond, last) = (steps + 1 - axis.len(), axis[axis.len() - 1].1);
                let all = &self.states[..start + axis.len()];
                let time = self.is_monthly.then(|| self.months_beyond(all, beyond));
                let time = time.flatten();
                (time.unwrap_or(last + self.step * beyond as f64), None)
            }
        }
    }

    /// Returns the time `months` months after the last state. Its day of the month is the latest
    /// among the states of the preceding year.
    fn months_beyond(&self, states: &[(usize, f64)], months: usize) -> Option<f64> {
        let date = |time: f64| {
            let (year, month, day) = self.calendar.day(time)?;
            Some((day, 12 * year + month))
        };
        let (series, last) = *states.last()?;
        let year = states
            .iter()
            .rev()
            .take(12)
            .filter(|(other, _)| *other == series);
        let latest = year.map(|(_, time)| *time).max_by_key(|time| date(*time))?;
        let before = usize::try_from(date(last)?.1 - date(latest)?.1).ok()?;
        self.calendar.months_after(latest, before + months)
    }

    /// Returns the state at a time, the first if there are several.
    pub(super) fn find(&self, time: f64) -> Option<usize> {
        self.states
            .iter()
            .position(|(_, other)| (other - time).abs() < TOLERANCE * self.step)
    }

    /// Describes the states nearest to a time without one, each of which has a `history` of states.
    pub(super) fn near(&self, time: f64, history: usize) -> String {
        let date = |time: f64| self.calendar.date(time);
        let times = || self.states.iter().map(|(_, time)| *time);
        let before = times().filter(|other| *other < time).reduce(f64::max);
        let after = times().filter(|other| *other > time).reduce(f64::min);
        if let (Some(before), Some(after)) = (before, after) {
            let (before, after) = (date(before), date(after));
            return format!("the nearest are those of {before} and {after}");
        }
        let (first, last) = (times().reduce(f64::min), times().reduce(f64::max));
        let [first, last] = [first, last].map(|time| time.map_or(String::new(), date));
        let range = format!("the data are from {first} to {last}");
        if before.is_some() || history < 2 {
            return range;
        }
        let apart = self.lead.unwrap_or(self.step) / 3600.0;
        format!("{range}, as a forecast needs {history} states {apart} h apart up to its start")
    }

    /// Returns the states from which forecasts start: all, or those whose time the configuration
    /// chooses.
    ///
    /// # Errors
    /// No such state.
    pub(super) fn starts(&self, config: &ForecastConfig) -> Result<Vec<usize>> {
        let is_start = |state: &usize| config.starts_at(self.states[*state].1);
        let starts: Vec<usize> = (0..self.states.len()).filter(is_start).collect();
        match config.chosen_starts() {
            Some((setting, hours)) if starts.is_empty() => {
                let expected = "hours in UTC that choose a state of the period";
                Err(invalid(setting, hours, expected))
            }
            _ => Ok(starts),
        }
    }

    /// Returns the hours of this number of steps: the mean over the states of `starts` from which
    /// they lead to another state, or `None` if there are none.
    pub(super) fn hours(&self, starts: &[usize], steps: usize) -> Option<f64> {
        let reached = starts.iter().filter_map(|&start| {
            let (time, state) = self.ahead(start, steps);
            state.map(|_| (time - self.states[start].1) / 3600.0)
        });
        let (count, sum) = reached.fold((0, 0.0), |(count, sum), hours| (count + 1, sum + hours));
        (count > 0).then(|| sum / f64::from(count))
    }
}

#[cfg(test)]
mod tests {
    use halocline_io::parse_time;

    use super::*;

    const HOUR: f64 = 3600.0;

    fn timeline(lead: Option<f64>) -> Timeline {
        let hours = [(0, 0.0), (0, 7.0), (0, 15.0), (1, 0.0), (1, 7.0)];
        let states = hours.map(|(series, hours)| (series, hours * HOUR)).into();
        let lead = lead.map(|hours| hours * HOUR);
        Timeline::new(states, lead, 7.0 * HOUR, Calendar::Gregorian)
    }

    #[test]
    fn steps_lead_to_the_next_states_and_beyond_them() {
        let ahead = |start, steps| {
            let (time, state) = timeline(None).ahead(start, steps);
            (time / HOUR, state)
        };
        assert_eq!(ahead(0, 0), (0.0, Some(0)));
        assert_eq!(ahead(0, 2), (15.0, Some(2)));
        // The next state belongs to another time axis.
        assert_eq!(ahead(2, 1), (22.0, None));
        assert_eq!(ahead(3, 3), (21.0, None));
        let starts = timeline(None).starts(&ForecastConfig::default()).unwrap();
        assert_eq!(timeline(None).hours(&starts, 1), Some(22.0 / 3.0));
        assert_eq!(timeline(None).hours(&starts[1..], 1), Some(7.5));
        assert_eq!(timeline(None).hours(&starts, 3), None);
        assert_eq!(timeline(None).find(7.0 * HOUR), Some(1));
    }

    #[test]
    fn forecasts_start_at_chosen_hours() {
        let starts = |every_hours: Option<usize>, at_hours: &[usize]| {
            let config = ForecastConfig {
                every_hours,
                at_hours: at_hours.to_vec(),
                ..ForecastConfig::default()
            };
            let found = timeline(None).starts(&config);
            found.map_err(|error| error.to_string())
        };
        assert_eq!(starts(Some(5), &[]).unwrap(), [0, 2, 3]);
        assert_eq!(starts(Some(1), &[]).unwrap(), [0, 1, 2, 3, 4]);
        assert_eq!(starts(None, &[7, 3]).unwrap(), [1, 4]);
        assert_eq!(starts(Some(5), &[7, 15]).unwrap(), [2]);
        for (every, at, told) in [
            (
                None,
                &[3, 16][..],
                "forecast.at_hours: got [3, 16], expected",
            ),
            (
                Some(24),
                &[7][..],
                "forecast.every_hours and at_hours: got 24 and [7], expected",
            ),
        ] {
            let error = starts(every, at).unwrap_err();
            assert!(error.starts_with(told), "{error}");
        }
        let states = vec![(0, 7.0 * HOUR)];
        let timeline = Timeline::new(states, None, 7.0 * HOUR, Calendar::Gregorian);
        let config = ForecastConfig {
            every_hours: Some(12),
            ..ForecastConfig::default()
        };
        let error = timeline.starts(&config).unwrap_err().to_string();
        let told = "forecast.every_hours: got 12, expected hours in UTC that choose";
        assert!(error.starts_with(told), "{error}");
    }

    #[test]
    fn times_without_a_state_are_told_the_nearest() {
        let near = |hours: f64, history| timeline(None).near(hours * HOUR, history);
        let between = "the nearest are those of 1970-01-01 07:00:00 and 1970-01-01 15:00:00";
        assert_eq!(near(8.0, 2), between);
        let range = "the data are from 1970-01-01 00:00:00 to 1970-01-01 15:00:00";
        assert_eq!((near(16.0, 2), near(-7.0, 1)), (range.into(), range.into()));
        let start = format!("{range}, as a forecast needs 2 states 7 h apart up to its start");
        assert_eq!(near(-7.0, 2), start);
    }

    #[test]
    fn steps_of_months_go_on_as_months() {
        let months = |dates: &[&str]| {
            let time = |date: &&str| (0, parse_time(date, Calendar::Gregorian).unwrap());
            let states = dates.iter().map(time).collect();
            Timeline::new(states, None, 31.0 * DAY, Calendar::Gregorian)
        };
        let ahead = |dates: &[&str], steps| {
            let (time, state) = months(dates).ahead(dates.len() - 1, steps);
            assert_eq!(state, None);
            Calendar::Gregorian.date(time)[..10].to_string()
        };
        let first = ["2023-07-01", "2023-08-01", "2023-09-01"];
        assert_eq!(ahead(&first, 1), "2023-10-01");
        assert_eq!(ahead(&first, 5), "2024-02-01");
        assert_eq!(ahead(&first[..1], 3), "2023-10-01");
        // The last day of each month, or the 28th.
        assert_eq!(ahead(&["2023-01-31", "2023-02-28"], 1), "2023-03-31");
        assert_eq!(ahead(&["2023-01-28", "2023-02-28"], 1), "2023-03-28");
        // The middle of each month, which falls on different days.
        assert_eq!(
            ahead(&["2023-01-16", "2023-02-15", "2023-03-16"], 2),
            "2023-05-16"
        );
        // Steps of 31 days stay 31 days.
        assert_eq!(
            ahead(&["2023-01-01", "2023-02-01", "2023-03-04"], 1),
            "2023-04-04"
        );
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
