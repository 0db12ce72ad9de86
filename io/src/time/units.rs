//! Times by the CF conventions (CF 1.11, section 4.4): numbers of units since a date, in a
//! calendar.

use jiff::civil::DateTime;
use jiff::tz::Offset;

use super::calendar::{MONTHS, days_before};
use crate::attributes::Attributes;
use crate::{Calendar, Error, Result};

/// Units of written times, and of files that state none.
pub(crate) const UNITS: &[u8; 33] = b"seconds since 1970-01-01 00:00:00";
/// Units of numbers whose digits are the date, such as 20200101.25 for 06:00, which ICON writes.
const DATE_NUMBERS: &str = "day as %Y%m%d.%f";
/// Length of the shortest text that is taken for a date: 2020-1-1.
const SHORTEST_DATE: usize = 8;
/// Calendar of written times.
pub(crate) const CALENDAR: &[u8; 19] = b"proleptic_gregorian";

/// Start of the Gregorian calendar, 1582-10-15, in seconds since 1970-01-01. Before it, the
/// `standard` calendar is the Julian one.
const GREGORIAN: f64 = -12_219_292_800.0;

/// Days between the same date in the Julian and the Gregorian calendar, from 1900-03-01 to
/// 2100-02-28.
const JULIAN_SHIFT: i64 = 13;

/// Span in which the Julian and the Gregorian calendar have the same leap days: from 1900-03-01 to
/// before 2100-03-01, in seconds since 1970-01-01.
const JULIAN_SPAN: std::ops::Range<f64> = -2_203_891_200.0..4_107_542_400.0;

/// Interpretation of dates: the resulting calendar, and whether dates are Julian.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dates {
    /// Julian before 1582-10-15, then Gregorian.
    Mixed,
    /// Julian within [`JULIAN_SPAN`]; the result is Gregorian with the same dates.
    Julian,
    Of(Calendar),
}

impl Dates {
    /// Returns the dates of a calendar by its name in the CF conventions.
    fn named(calendar: &str) -> Option<Self> {
        Some(match calendar.to_lowercase().as_str() {
            "standard" | "gregorian" => Self::Mixed,
            "proleptic_gregorian" => Self::Of(Calendar::Gregorian),
            "julian" => Self::Julian,
            "noleap" | "365_day" => Self::Of(Calendar::NoLeap),
            "all_leap" | "366_day" => Self::Of(Calendar::AllLeap),
            "360_day" => Self::Of(Calendar::Day360),
            _ => return None,
        })
    }

    fn calendar(self) -> Calendar {
        match self {
            Self::Mixed | Self::Julian => Calendar::Gregorian,
            Self::Of(calendar) => calendar,
        }
    }

    /// Returns the days to a date from 1970-01-01 of the resulting calendar.
    fn days(self, year: i16, month: i8, day: i8) -> Option<i64> {
        let numbers = (year.into(), month.into(), day.into());
        match self {
            Self::Julian => julian_days(numbers).map(|days| days - JULIAN_SHIFT),
            Self::Mixed if (year, month, day) < (1582, 10, 15) => julian_days(numbers),
            _ => self.calendar().days(numbers.0, numbers.1, numbers.2),
        }
    }
}

/// Unit and reference date of a time axis.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Units {
    /// Length of the unit in seconds, as numerator and denominator, one of which is 1.
    unit: [f64; 2],
    /// Reference date, in seconds since 1970-01-01.
    reference: f64,
}

/// Converts the numbers of a time axis to seconds since 1970-01-01 of their calendar. `units`
/// replaces the units in the file.
///
/// # Errors
/// Units or a calendar that are not supported; no units; numbers that are no dates; times outside
/// the supported span of their calendar.
pub(crate) fn seconds(
    attributes: &impl Attributes,
    units: Option<&str>,
    numbers: Vec<f64>,
) -> Result<(Calendar, Vec<f64>)> {
    let calendar = attributes
        .text("calendar")?
        .unwrap_or_else(|| "standard".into());
    let quoted = format!("{calendar:?}");
    let Some(dates) = Dates::named(&calendar) else {
        let expected = "standard, gregorian, proleptic_gregorian, julian, noleap, 365_day, all_leap, \
                        366_day or 360_day; write the times in one of these";
        return Err(attributes.refused("calendar", &quoted, expected));
    };
    let seconds = match units_of(attributes, units)? {
        Some(text) if text.trim().eq_ignore_ascii_case(DATE_NUMBERS) => {
            date_numbers(attributes, dates, numbers)?
        }
        text => since(attributes, text.as_deref(), dates, numbers)?,
    };
    if dates == Dates::Mixed && seconds.iter().any(|&seconds| seconds < GREGORIAN) {
        let found = format!("{quoted} with times before 1582-10-15");
        let expected = "later times, as the calendar is another before; \
                        name the calendar proleptic_gregorian if it is that";
        return Err(attributes.refused("calendar", &found, expected));
    }
    // NaN is refused later, because it does not increase.
    let is_outside = |time: &f64| !time.is_nan() && !JULIAN_SPAN.contains(time);
    if dates == Dates::Julian && seconds.iter().any(is_outside) {
        let found = format!("{quoted} with times before 1900-03-01 or after 2100-02-28");
        let expected = "times between, whose dates the Gregorian calendar has too; convert others, \
                        in xarray by convert_calendar(\"proleptic_gregorian\")";
        return Err(attributes.refused("calendar", &found, expected));
    }
    Ok((dates.calendar(), seconds))
}

fn units_of(attributes: &impl Attributes, units: Option<&str>) -> Result<Option<String>> {
    match units {
        Some(units) => Ok(Some(units.to_owned())),
        None => attributes.text("units"),
    }
}

/// Refuses numbers in single precision whose digits are dates: it does not hold eight digits.
pub(crate) fn check_single(attributes: &impl Attributes, units: Option<&str>) -> Result<()> {
    match units_of(attributes, units)? {
        Some(text) if text.trim().eq_ignore_ascii_case(DATE_NUMBERS) => {
            let found = format!("{DATE_NUMBERS:?} in single precision");
            Err(attributes.refused("units", &found, "numbers in double precision"))
        }
        _ => Ok(()),
    }
}

/// Converts numbers whose digits are dates, with a fraction of the day, to seconds since
/// 1970-01-01.
///
/// # Errors
/// A number that is not a date of the calendar.
fn date_numbers(attributes: &impl Attributes, dates: Dates, numbers: Vec<f64>) -> Result<Vec<f64>> {
    let seconds = |number: f64| {
        let digits = number.floor();
        let date = digits as i64;
        let year = i16::try_from(date / 10_000).ok()?;
        let [month, day] = [date / 100 % 100, date % 100].map(|part| i8::try_from(part).ok());
        let days = dates.days(year, month?, day?)?;
        // A number of eight digits has a resolution of less than a millisecond.
        let clock = ((number - digits) * 86_400_000.0).round() / 1000.0;
        Some(days as f64 * 86400.0 + clock)
    };
    let converted = numbers.into_iter().map(|number| {
        seconds(number).ok_or_else(|| {
            let found = format!("{DATE_NUMBERS:?}, with the number {number}");
            let expected = "numbers whose digits are dates of the calendar, such as 20200101.25";
            attributes.refused("units", &found, expected)
        })
    });
    converted.collect()
}

/// Converts numbers of units since a date to seconds since 1970-01-01.
///
/// # Errors
/// Units that are not supported, or none.
fn since(
    attributes: &impl Attributes,
    text: Option<&str>,
    dates: Dates,
    numbers: Vec<f64>,
) -> Result<Vec<f64>> {
    let Some(units) = text.and_then(|text| parse(text, dates)) else {
        let units = "days, hours, minutes, seconds, milliseconds, microseconds or nanoseconds \
                     since a date, of the year 1 or later, such as \"hours since 1970-01-01 00:00:00\"";
        let Some(text) = text else {
            let expected = format!("{units}; name them by OpenConfig::with_time_units");
            return Err(attributes.refused("units", "none", &expected));
        };
        let found = format!("{text:?}");
        let expected = format!(
            "{units}; write the times in one of these, \
             in xarray by to_netcdf(encoding={{\"{}\": {{\"units\": …}}}})",
            attributes.name()
        );
        return Err(attributes.refused("units", &found, &expected));
    };
    let seconds = |number| units.seconds(number);
    Ok(numbers.into_iter().map(seconds).collect())
}

impl Units {
    fn seconds(self, number: f64) -> f64 {
        let [numerator, denominator] = self.unit;
        if self.unit == [1.0, 1.0] {
            return self.reference + number;
        }
        // Most fractions of a day are not exact in f64, and seconds since 1970 have a resolution of
        // a quarter microsecond.
        let since = number * numerator / denominator;
        self.reference + (since * 1e6).round() / 1e6
    }
}

/// Parses `<unit> since <date> [<time>] [<zone>]`.
fn parse(text: &str, dates: Dates) -> Option<Units> {
    let text = text.trim().to_lowercase();
    let (unit, reference) = text.split_once(" since ")?;
    let unit = match unit.trim() {
        "days" | "day" | "d" => [86400.0, 1.0],
        "hours" | "hour" | "hrs" | "hr" | "h" => [3600.0, 1.0],
        "minutes" | "minute" | "mins" | "min" => [60.0, 1.0],
        "seconds" | "second" | "secs" | "sec" | "s" => [1.0, 1.0],
        "milliseconds" | "millisecond" | "msecs" | "msec" | "ms" => [1.0, 1e3],
        "microseconds" | "microsecond" | "us" => [1.0, 1e6],
        "nanoseconds" | "nanosecond" | "ns" => [1.0, 1e9],
        _ => return None,
    };
    let reference = parse_reference(reference.trim(), dates)?;
    Some(Units { unit, reference })
}

/// Parses a date of a calendar with an optional time and zone, such as `2018-01-01` or
/// `2018-01-01T06:00`, as seconds since 1970-01-01 UTC.
///
/// # Errors
/// A text that is not a date of the calendar.
///
/// # Example
/// ```
/// use halocline_io::{Calendar, parse_time};
///
/// assert_eq!(parse_time("1970-01-02T06:00", Calendar::Gregorian)?, 30.0 * 3600.0);
/// assert!(parse_time("1970-02-30", Calendar::Gregorian).is_err());
/// # Ok::<(), halocline_io::Error>(())
/// ```
pub fn parse_time(text: &str, calendar: Calendar) -> Result<f64> {
    let parsed = parse_reference(text.trim().to_lowercase().as_str(), Dates::Of(calendar));
    parsed.ok_or_else(|| {
        let expected = format!("a date of the calendar {calendar}, such as 2018-01-01T06:00");
        Error::argument("time", text, expected)
    })
}

/// Converts texts of dates, such as `2020-01-01T06:00` or `2020-01-01_06:00:00`, to seconds since
/// 1970-01-01 of a calendar, without a name the Gregorian one. Returns `None` for each text that is
/// no date of it, and for all if the calendar is not known.
pub(crate) fn of_texts(texts: &[String], calendar: Option<&str>) -> Option<Vec<Option<f64>>> {
    let dates = calendar.map_or(Some(Dates::Of(Calendar::Gregorian)), Dates::named)?;
    let seconds = |text: &String| {
        let text = text.trim().to_lowercase().replacen('_', " ", 1);
        // Shorter texts, such as 1-2-3, may be other names.
        let text = Some(text).filter(|text| text.len() >= SHORTEST_DATE)?;
        parse_reference(&text, dates)
    };
    Some(texts.iter().map(seconds).collect())
}

/// Parses a date with an optional time and zone, as seconds since 1970-01-01. Numbers need no
/// leading zeros, as in `1992-10-8 15:15:42.5 -6:00`, an example in the conventions.
fn parse_reference(text: &str, dates: Dates) -> Option<f64> {
    let (date, rest) = text.split_once(['t', ' ']).unwrap_or((text, ""));
    let zone = rest.find(['+', '-', 'z', 'u', 'g']).unwrap_or(rest.len());
    let (time, zone) = rest.split_at(zone);
    // wgrib2 writes a zone without a sign: `00:00:00.0 0:00`.
    let (time, zone) = match time.trim().split_once(' ') {
        Some((clock, offset)) if zone.is_empty() => (clock, format!("+{}", offset.trim())),
        _ => (time, zone.to_string()),
    };
    let [year, month, day] = numbers(date, '-')?;
    let (clock, decimals) = time.trim().split_once('.').unwrap_or((time.trim(), ""));
    let colons = clock.matches(':').count();
    if !decimals.bytes().all(|byte| byte.is_ascii_digit()) || (!decimals.is_empty() && colons != 2)
    {
        return None;
    }
    let fraction: f64 = format!("0.{decimals}").parse().ok()?;
    let [hour, minute, second] = match clock {
        "" => [0; 3],
        _ => numbers(&format!("{clock}{}", [":0:0", ":0", ""].get(colons)?), ':')?,
    };
    let [month, day, hour, minute, second] =
        [month, day, hour, minute, second].map(|number| i8::try_from(number).ok());
    let days = dates.days(year, month?, day?)?;
    let clock = DateTime::new(1970, 1, 1, hour?, minute?, second?, 0).ok()?;
    let offset = Offset::from_seconds(parse_zone(zone.trim())?).ok()?;
    let seconds = offset.to_timestamp(clock).ok()?.as_second();
    Some((days * 86400 + seconds) as f64 + fraction)
}

/// Returns the days from Gregorian 1970-01-01 to a date in the Julian calendar, from year 1 on.
fn julian_days((year, month, day): (i64, i64, i64)) -> Option<i64> {
    let mut lengths = MONTHS;
    lengths[1] += i64::from(year % 4 == 0);
    let days = days_before(&lengths, month, day)?;
    let years = year - 1;
    // Julian 0001-01-01 is two days before proleptic Gregorian 0001-01-01.
    (years >= 0).then(|| years * 365 + years / 4 + days - 719_164)
}

/// Parses a zone, as its offset from UTC in seconds: nothing, `Z`, `UTC`, `GMT`, `+1`, `+01:30` or
/// `+0130`.
fn parse_zone(text: &str) -> Option<i32> {
    let (sign, digits) = match (text, text.chars().next()) {
        ("" | "z" | "utc" | "gmt", _) => return Some(0),
        (_, Some('+')) => (1, &text[1..]),
        (_, Some('-')) => (-1, &text[1..]),
        _ => return None,
    };
    let [hours, minutes] = match digits.len() {
        _ if digits.contains(':') => numbers(digits, ':')?,
        4 => numbers(&format!("{}:{}", digits.get(..2)?, digits.get(2..)?), ':')?,
        _ => numbers(&format!("{digits}:0"), ':')?,
    };
    let valid = (0..=23).contains(&hours) && (0..=59).contains(&minutes);
    valid.then(|| sign * (i32::from(hours) * 3600 + i32::from(minutes) * 60))
}

/// Parses exactly `N` numbers between separators.
fn numbers<const N: usize>(text: &str, separator: char) -> Option<[i16; N]> {
    let digits = |part: &str| {
        let whole = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        whole.then(|| part.parse().ok()).flatten()
    };
    let numbers: Option<Vec<i16>> = text.split(separator).map(digits).collect();
    numbers?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_dates_with_a_time_and_a_zone_that_may_be_left_out() {
        for (text, seconds) in [
            ("1970-01-01", 0.0),
            ("1970-1-1", 0.0),
            ("1970-01-01 00:00:00", 0.0),
            ("1970-01-01T00:00:00Z", 0.0),
            ("1970-01-01 00:00:0.0", 0.0),
            ("1970-01-01 6", 21600.0),
            ("1970-01-01 06:30", 23400.0),
            ("1970-01-01 00:00:00 UTC", 0.0),
            ("1970-01-01 00:00:00 GMT", 0.0),
            // As written by wgrib2.
            ("1970-01-01 00:00:00.0 0:00", 0.0),
            ("1970-01-01 00:00:00 1:30", -5400.0),
            ("1970-01-01T00:00:00+01:00", -3600.0),
            ("1970-01-01 00:00:00 +0130", -5400.0),
            ("1970-01-01 00:00:00 -6", 21600.0),
            // Value computed by Python's datetime.
            ("1992-10-8 15:15:42.5 -6:00", 718_578_942.5),
            ("2000-02-29 12:00:00", 951_825_600.0),
            ("1900-01-01 00:00:0.0", -2_208_988_800.0),
            // Values computed by cftime for the calendar "standard", which is Julian before
            // 1582-10-15.
            ("1582-10-15", -12_219_292_800.0),
            ("1582-10-04", -12_219_379_200.0),
            ("0001-01-01", -62_135_769_600.0),
            ("1-1-1 00:00:0.0", -62_135_769_600.0),
            ("1500-02-29 06:00", -14_825_872_800.0),
        ] {
            assert_eq!(
                parse(&format!("days since {text}"), Dates::Mixed).map(|units| units.reference),
                Some(seconds),
                "{text}"
            );
        }
    }

    #[test]
    fn references_have_the_dates_of_their_calendar() {
        let reference = |calendar: &str, text: &str| {
            let dates = Dates::named(calendar).unwrap();
            parse(&format!("hours since {text}"), dates).map(|units| units.reference / 86400.0)
        };
        // Values computed by cftime; for the Julian calendar, in days since Julian 1970-01-01.
        for (calendar, text, days) in [
            ("noleap", "0001-01-01", -718_685.0),
            ("365_day", "2000-03-01 12:00", 11_009.5),
            ("366_day", "2001-02-29", 11_405.0),
            ("all_leap", "2001-02-29", 11_405.0),
            ("360_day", "2001-02-30", 11_219.0),
            ("julian", "2000-01-01", 10_957.0),
            ("julian", "1900-01-01", -25_568.0),
            ("Proleptic_Gregorian", "1582-10-14", -141_428.0),
        ] {
            assert_eq!(reference(calendar, text), Some(days), "{calendar} {text}");
        }
        assert_eq!(reference("noleap", "2000-02-29"), None);
        assert_eq!(reference("360_day", "2000-01-31"), None);
        assert_eq!(reference("julian", "1900-02-29"), Some(-25_509.0));
        assert_eq!(Dates::named("none"), None);
    }

    #[test]
    fn what_is_not_understood_is_no_unit() {
        for text in [
            "seconds",
            "months since 2000-01-01",
            "years since 2000-01-01",
            "days since epoch",
            "days since 2001-02-29",
            "days since 2000-13-01",
            "days since 2000-01-01 25:00",
            "days since 2000-01-01 12:00 CET",
            "days since 0000-01-01",
            "days since 1401-02-29",
            "days since 2000-01-01 +1:2:3",
            "days since 2000-01-01 00:00:00 +123",
            "days since 2000-01",
            "days since -1-01-01",
            "days since 2000-01-01 1:2:3:4",
            "days since 2000-01-01 1:2:3.e4",
            "days since 2000-01-01 1.5",
            "days since 2000-01-01 +-5",
            "dayssince 2000-01-01",
            "days since é000-01-01 é",
        ] {
            assert_eq!(parse(text, Dates::Mixed), None, "{text}");
        }
    }

    #[test]
    fn texts_of_dates_are_times_of_their_calendar() {
        let times = |texts: &[&str], calendar| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).into()).collect();
            of_texts(&texts, calendar)
        };
        let dates = ["1970-01-01_06:00:00   ", "1970-01-02T00:00", "1970-03-01"];
        let expected = [21600.0, 86400.0, 59.0 * 86400.0].map(Some);
        assert_eq!(times(&dates, None), Some(expected.to_vec()));
        assert_eq!(
            times(&dates[2..], Some("360_day")),
            Some(vec![Some(60.0 * 86400.0)])
        );
        assert_eq!(
            times(&["1970-01-01", "", "1-2-3"], None),
            Some(vec![Some(0.0), None, None])
        );
        assert_eq!(times(&dates, Some("tai")), None);
    }

    #[test]
    fn a_unit_has_its_length() {
        let second = |unit: &str, number: f64| {
            let units = parse(&format!("{unit} since 1970-01-01"), Dates::Mixed).unwrap();
            units.seconds(number)
        };
        for (unit, number) in [
            ("days", 20_537.25),
            ("Hours", 492_894.0),
            ("min", 29_573_640.0),
            ("s", 1_774_418_400.0),
            ("milliseconds", 1_774_418_400e3),
            ("microseconds", 1_774_418_400e6),
            ("ns", 1_774_418_400e9),
        ] {
            assert_eq!(second(unit, number), 1_774_418_400.0, "{unit}");
        }
        // An hour is not an exact fraction of a day.
        assert_eq!(second("days", 20_537.0 + 7.0 / 24.0), 1_774_422_000.0);
    }
}
