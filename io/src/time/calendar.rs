use std::fmt;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::Offset;

/// Seconds in a day.
const DAY: i64 = 86400;
/// Lengths of the months of a year of 365 days.
pub(crate) const MONTHS: [i64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

/// Calendar of a time axis (CF 1.11, section 4.4.1).
///
/// Times are seconds since 1970-01-01 00:00 in their own calendar, so that the time axis of a model
/// has even steps. `julian` times are read as [`Gregorian`](Self::Gregorian) with the same dates,
/// and only from 1900-03-01 to 2100-02-28, where both calendars have the same leap days.
///
/// # Example
/// ```
/// use halocline_io::Calendar;
///
/// let days = |days: f64| days * 86400.0;
/// assert_eq!(Calendar::Gregorian.date(days(58.0)), "1970-02-28 00:00:00");
/// assert_eq!(Calendar::NoLeap.date(days(365.0 * 30.0 + 59.0)), "2000-03-01 00:00:00");
/// assert_eq!(Calendar::Day360.date(days(59.5)), "1970-02-30 12:00:00");
/// assert_eq!(Calendar::AllLeap.to_string(), "all_leap");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Calendar {
    /// The Gregorian calendar, extended to dates before 1582 (`proleptic_gregorian`).
    #[default]
    Gregorian,
    /// Years of 365 days (`noleap`, `365_day`).
    NoLeap,
    /// Years of 366 days (`all_leap`, `366_day`).
    AllLeap,
    /// Twelve months of 30 days (`360_day`).
    Day360,
}

impl Calendar {
    /// Formats a time, in seconds since 1970-01-01, as date and time to the nearest second.
    pub fn date(self, seconds: f64) -> String {
        let total = seconds.round() as i64;
        let (days, second) = (total.div_euclid(DAY), total.rem_euclid(DAY));
        let Some((year, month, day)) = self.civil(days) else {
            return format!("{seconds} s");
        };
        let [hour, minute, second] = [second / 3600, second / 60 % 60, second % 60];
        format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
    }

    /// Returns year, month and day of a time in seconds since 1970-01-01, or `None` beyond the
    /// range of the calendar.
    ///
    /// # Example
    /// ```
    /// use halocline_io::Calendar;
    ///
    /// assert_eq!(Calendar::Gregorian.day(58.5 * 86400.0), Some((1970, 2, 28)));
    /// ```
    pub fn day(self, seconds: f64) -> Option<(i64, i64, i64)> {
        self.civil(seconds.div_euclid(DAY as f64) as i64)
    }

    /// Returns the day of the year of a time in seconds since 1970-01-01, from 1 on, or `None` beyond
    /// the range of the calendar.
    ///
    /// # Example
    /// ```
    /// use halocline_io::{Calendar, parse_time};
    ///
    /// let utc = Calendar::Gregorian;
    /// let day = |date| utc.day_of_year(parse_time(date, utc).unwrap());
    /// assert_eq!(day("2019-03-01"), Some(60));
    /// assert_eq!(day("2020-03-01T18:00"), Some(61));
    /// ```
    pub fn day_of_year(self, seconds: f64) -> Option<i64> {
        let days = seconds.div_euclid(DAY as f64) as i64;
        let (year, _, _) = self.civil(days)?;
        Some(days - self.days(year, 1, 1)? + 1)
    }

    /// Adds a number of months to a time. Keeps the day of the month, or takes the last day if the
    /// month is shorter. Returns `None` beyond the range of the calendar.
    ///
    /// # Example
    /// ```
    /// use halocline_io::{Calendar, parse_time};
    ///
    /// let after = |date: &str, months| {
    ///     let time = parse_time(date, Calendar::Gregorian).unwrap();
    ///     Calendar::Gregorian.date(Calendar::Gregorian.months_after(time, months).unwrap())
    /// };
    /// assert_eq!(after("2023-01-30", 1), "2023-02-28 00:00:00");
    /// assert_eq!(after("2023-11-30T12:00", 3), "2024-02-29 12:00:00");
    /// assert_eq!(after("2023-11-15", 1), "2023-12-15 00:00:00");
    /// ```
    pub fn months_after(self, seconds: f64, months: usize) -> Option<f64> {
        let day_length = DAY as f64;
        let (year, month, day) = self.day(seconds)?;
        let number = 12 * year + month - 1 + i64::try_from(months).ok()?;
        let (year, month) = (number.div_euclid(12), number.rem_euclid(12) + 1);
        let days = (1..=day)
            .rev()
            .find_map(|day| self.days(year, month, day))?;
        Some(days as f64 * day_length + seconds.rem_euclid(day_length))
    }

    /// Returns the days from 1970-01-01 to a date, or `None` if the calendar has no such date.
    pub(crate) fn days(self, year: i64, month: i64, day: i64) -> Option<i64> {
        if self == Self::Gregorian {
            let [month, day] = [month, day].map(|number| i8::try_from(number).ok());
            let year = i16::try_from(year).ok()?;
            let date = DateTime::new(year, month?, day?, 0, 0, 0, 0).ok()?;
            return Some(Offset::UTC.to_timestamp(date).ok()?.as_second() / DAY);
        }
        let lengths = self.months();
        let year_length: i64 = lengths.iter().sum();
        Some((year - 1970) * year_length + days_before(&lengths, month, day)?)
    }

    /// Returns year, month and day of a number of days since 1970-01-01.
    fn civil(self, days: i64) -> Option<(i64, i64, i64)> {
        if self == Self::Gregorian {
            let date = Timestamp::from_second(days.checked_mul(DAY)?).ok()?;
            let date = Offset::UTC.to_datetime(date);
            return Some((date.year().into(), date.month().into(), date.day().into()));
        }
        let lengths = self.months();
        let year_length: i64 = lengths.iter().sum();
        let (year, mut left) = (days.div_euclid(year_length), days.rem_euclid(year_length));
        let mut month = 0;
        while left >= lengths[month] {
            left -= lengths[month];
            month += 1;
        }
        Some((year + 1970, month as i64 + 1, left + 1))
    }

    /// Lengths of the months, the same in every year.
    fn months(self) -> [i64; 12] {
        let mut lengths = MONTHS;
        match self {
            Self::Day360 => lengths = [30; 12],
            Self::AllLeap => lengths[1] = 29,
            Self::NoLeap | Self::Gregorian => {}
        }
        lengths
    }

    /// Name in the CF conventions.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gregorian => "proleptic_gregorian",
            Self::NoLeap => "noleap",
            Self::AllLeap => "all_leap",
            Self::Day360 => "360_day",
        }
    }
}

/// Returns the days from the start of a year to a date in it, or `None` if the year has no such
/// date.
pub(crate) fn days_before(lengths: &[i64; 12], month: i64, day: i64) -> Option<i64> {
    let before = usize::try_from(month).ok()?.checked_sub(1)?;
    let length = *lengths.get(before)?;
    let months: i64 = lengths[..before].iter().sum();
    (1..=length).contains(&day).then(|| months + day - 1)
}

impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Calendar; 4] = [
        Calendar::Gregorian,
        Calendar::NoLeap,
        Calendar::AllLeap,
        Calendar::Day360,
    ];

    #[test]
    fn every_day_has_a_date_and_every_date_its_day() {
        for calendar in ALL {
            for days in (-800_000..800_000).step_by(17) {
                let (year, month, day) = calendar.civil(days).unwrap();
                assert_eq!(calendar.days(year, month, day), Some(days), "{calendar}");
            }
        }
    }

    #[test]
    fn days_are_those_of_cftime() {
        // cftime.date2num(cftime.datetime(…, calendar=…), "days since 1970-01-01", calendar=…).
        for (calendar, date, days) in [
            (Calendar::NoLeap, (2000, 3, 1), 11_009),
            (Calendar::NoLeap, (1, 1, 1), -718_685),
            (Calendar::AllLeap, (2001, 2, 29), 11_405),
            (Calendar::Day360, (2001, 2, 30), 11_219),
            (Calendar::Gregorian, (2000, 2, 29), 11_016),
        ] {
            let (year, month, day) = date;
            assert_eq!(calendar.days(year, month, day), Some(days), "{calendar}");
        }
        let missing = [
            Calendar::Gregorian.days(2001, 2, 29),
            Calendar::NoLeap.days(2000, 2, 29),
            Calendar::AllLeap.days(2000, 2, 30),
            Calendar::Day360.days(2000, 1, 31),
            Calendar::NoLeap.days(2000, 13, 1),
            Calendar::NoLeap.days(2000, 0, 1),
            Calendar::Day360.days(2000, 1, 0),
        ];
        assert_eq!(missing, [None; 7]);
    }
}
