//! Parts of the year that have a mean of their own.

use halocline_io::Calendar;
use serde::{Deserialize, Serialize};

/// Resolution of a climatology over the year.
///
/// # Example
/// ```
/// use halocline::experiment::Cycle;
/// use halocline::io::Calendar;
///
/// let day = |day: f64| day * 86400.0;
/// assert_eq!(Cycle::Month.class(day(31.0), Calendar::Gregorian), 1); // February
/// assert_eq!(Cycle::Day.class(day(365.0 + 31.0), Calendar::Gregorian), 31);
/// assert_eq!(Cycle::Mean.classes(), 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cycle {
    /// One mean for all times.
    Mean,
    /// A mean for each month.
    Month,
    /// A mean for each day of the year, counted from 1 to 366, over the days around it. Their
    /// weights fall linearly to zero at 30 days before and after. In years without a day 366, the
    /// values of day 365 count for it, too. All of this is as in WeatherBench 2.
    Day,
}

impl Cycle {
    /// Returns the number of means.
    pub fn classes(self) -> usize {
        match self {
            Self::Mean => 1,
            Self::Month => 12,
            Self::Day => 366,
        }
    }

    /// Returns the index of the mean of a time, which is in seconds since 1970-01-01.
    pub fn class(self, seconds: f64, calendar: Calendar) -> usize {
        let first = match self {
            Self::Mean => None,
            Self::Month => calendar.day(seconds).map(|(_, month, _)| month),
            Self::Day => calendar.day_of_year(seconds),
        };
        let number = first.and_then(|number| usize::try_from(number).ok());
        // Times beyond the range of the calendar count to the first mean.
        number.unwrap_or(1).clamp(1, self.classes()) - 1
    }
}

#[cfg(test)]
mod tests {
    use halocline_io::parse_time;

    use super::*;

    #[test]
    fn days_are_counted_from_the_first_of_january() {
        for (date, calendar, class) in [
            ("2019-01-01", Calendar::Gregorian, 0),
            ("2019-02-28", Calendar::Gregorian, 58),
            ("2019-03-01", Calendar::Gregorian, 59),
            ("2019-12-31", Calendar::Gregorian, 364),
            ("2020-02-29", Calendar::Gregorian, 59),
            ("2020-03-01", Calendar::Gregorian, 60),
            ("2020-12-31", Calendar::Gregorian, 365),
            ("2020-03-01", Calendar::NoLeap, 59),
            ("2019-02-29", Calendar::AllLeap, 59),
            ("2019-02-30", Calendar::Day360, 59),
            ("2019-12-30", Calendar::Day360, 359),
        ] {
            let time = parse_time(date, calendar).unwrap() + 86399.0;
            assert_eq!(Cycle::Day.class(time, calendar), class, "{date} {calendar}");
        }
    }
}
