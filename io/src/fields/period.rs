//! Periods: parts of time axes.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use ndarray::Array4;
use serde::{Deserialize, Serialize};

use super::{check_box, delegate};
use crate::time::units::parse_time;
use crate::{Calendar, Channel, Fields, Gaps, Grid, LeftOut, Missing, Result, Traffic};

/// Half-open part of a time axis between two UTC dates such as `2018-01-01` or `2018-01-01T06:00`.
/// The end date is excluded.
///
/// # Example
/// ```
/// # use halocline_io::ndarray::Array3;
/// # use halocline_io::{FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
/// # for day in 0..5 {
/// #     writer.append(f64::from(day) * 86400.0, Array3::zeros((1, 4, 8)).view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::{Fields, OpenConfig, Period};
///
/// // A file with five days from 1970-01-01 on.
/// let open = OpenConfig::new().with_period(Some(Period::until("1970-01-04")));
/// assert_eq!(open.open(&path)?.times().len(), 3);
/// let open = open.with_period(Some(Period::since("1970-01-04")));
/// assert_eq!(open.open(&path)?.times(), [3.0 * 86400.0, 4.0 * 86400.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Period {
    /// First date, inclusive. Default the beginning of the files.
    pub from: Option<String>,
    /// End date, exclusive. Default the end of the files.
    pub until: Option<String>,
}

impl Period {
    /// Creates the period from a date on.
    pub fn since(date: &str) -> Self {
        let from = Some(date.into());
        Self { from, until: None }
    }

    /// Creates the period before a date.
    pub fn until(date: &str) -> Self {
        let until = Some(date.into());
        Self { from: None, until }
    }

    /// Whether a time may belong to both periods.
    ///
    /// # Errors
    /// A text that is not a date of the calendar.
    ///
    /// # Example
    /// ```
    /// use halocline_io::{Calendar, Period};
    ///
    /// let (train, test) = (Period::until("2020-01-01"), Period::since("2020-01-01"));
    /// assert!(!train.overlaps(&test, Calendar::Gregorian)?);
    /// assert!(Period::default().overlaps(&test, Calendar::Gregorian)?);
    /// assert_eq!(test.to_string(), "from 2020-01-01");
    /// # Ok::<(), halocline_io::Error>(())
    /// ```
    pub fn overlaps(&self, other: &Self, calendar: Calendar) -> Result<bool> {
        let seconds = |date: &Option<String>, default: f64| match date {
            None => Ok(default),
            Some(date) => parse_time(date, calendar),
        };
        let from = |period: &Self| seconds(&period.from, f64::NEG_INFINITY);
        let until = |period: &Self| seconds(&period.until, f64::INFINITY);
        Ok(from(self)?.max(from(other)?) < until(self)?.min(until(other)?))
    }

    /// Returns the range of an increasing time axis that lies in the period.
    ///
    /// # Errors
    /// A text that is not a date of the calendar.
    fn range(&self, times: &[f64], calendar: Calendar) -> Result<Range<usize>> {
        let place = |date: &Option<String>, default: usize| match date {
            None => Ok(default),
            Some(date) => {
                let date = parse_time(date, calendar)?;
                Ok(times.partition_point(|time| *time < date))
            }
        };
        let (start, end) = (place(&self.from, 0)?, place(&self.until, times.len())?);
        Ok(start..end.max(start))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.from, &self.until) {
            (None, None) => write!(f, "all times"),
            (Some(from), None) => write!(f, "from {from}"),
            (None, Some(until)) => write!(f, "until {until}"),
            (Some(from), Some(until)) => write!(f, "from {from} until {until}"),
        }
    }
}

/// Fields restricted to a period.
#[derive(Debug)]
pub(crate) struct Within {
    fields: Box<dyn Fields>,
    range: Range<usize>,
}

impl Within {
    pub(crate) fn new(fields: Box<dyn Fields>, period: &Period) -> Result<Self> {
        let range = period.range(fields.times(), fields.calendar())?;
        Ok(Self { fields, range })
    }
}

impl Fields for Within {
    delegate! {
        self => self.fields;
        fn path(&self) -> &Path;
        fn calendar(&self) -> Calendar;
        fn is_undated(&self) -> bool;
        fn channels(&self) -> &[String];
        fn describe(&self, channel: usize) -> Channel;
        fn left_out(&self) -> &[LeftOut];
        fn grid(&self) -> &Grid;
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
        // The step of the full time axis, since the period may contain a single time.
        fn time_step(&self) -> Result<f64>;
        fn traffic(&self) -> Traffic;
        fn fingerprint(&self) -> Result<(u64, u32)>;
        fn modified(&self) -> Result<u32>;
    }

    fn times(&self) -> &[f64] {
        &self.fields.times()[self.range.clone()]
    }

    fn file_time(&self, time: usize) -> (&Path, usize) {
        self.fields.file_time(self.range.start + time)
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "times", &cells)?;
        let [times, channels, rows, columns] = cells;
        let times = times.start + self.range.start..times.end + self.range.start;
        self.fields.read([times, channels, rows, columns])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_bound_the_times_of_any_calendar() {
        let days = |days: [f64; 3]| days.map(|day| day * 86400.0);
        let period = Period {
            from: Some("1970-01-02T12:00".into()),
            until: Some("1970-02-30".into()),
        };
        let range = |times: [f64; 3], calendar| period.range(&times, calendar);
        assert_eq!(
            range(days([1.0, 1.5, 59.0]), Calendar::Day360).unwrap(),
            1..2
        );
        let error = range(days([1.0, 2.0, 3.0]), Calendar::Gregorian).unwrap_err();
        assert!(error.to_string().contains("1970-02-30"), "{error}");
        let empty = Period {
            from: Some("1971-01-01".into()),
            until: Some("1970-01-01".into()),
        };
        assert_eq!(
            empty
                .range(&days([0.0, 1.0, 2.0]), Calendar::Gregorian)
                .unwrap(),
            3..3
        );
    }
}
