//! Time axes: steps, and look-up of times.

use std::path::Path;

use burn::config::Config;

use crate::{Calendar, Error, Result};

/// Tolerance for steps of an even time axis, as a fraction of the step.
const TOLERANCE: f64 = 1e-4;

/// Tolerance for looking up a time on an axis, as a fraction of the surrounding steps. It is larger
/// because times computed by adding steps accumulate errors.
const DISTANCE: f64 = 1e-3;

/// Largest distance of a time from 1970, in seconds. The default fill value of NetCDF, 9.97e36,
/// exceeds it in all units.
const FARTHEST: f64 = 1e15;

/// Handling of a time axis with uneven steps.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{
///     DatasetConfig, FieldDataset, FieldWriter, Gaps, Grid, WriterConfig,
/// };
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// let grid = Grid::cell_centered(2, 4)?;
/// let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
/// for hour in [0.0, 6.0, 12.0, 24.0, 30.0] {
///     writer.append(hour * 3600.0, Array3::zeros((1, 2, 4)).view())?; // no field at 18 h
/// }
/// writer.finish()?;
///
/// let open = |gaps| {
///     FieldDataset::open(&[&path], &DatasetConfig::new().with_gaps(gaps))
/// };
/// assert!(open(Gaps::Reject).is_err());
/// // 0 to 6, 6 to 12 and 24 to 30 h.
/// assert_eq!(open(Gaps::Skip)?.len(), 3);
/// // Also 12 to 24 h.
/// let dataset = open(Gaps::Allow)?;
/// let sample = dataset.sample(2)?;
/// assert_eq!((dataset.len(), sample.time, sample.lead), (4, 12.0 * 3600.0, 12.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Gaps {
    /// An uneven step is an error that names the index of the time after it. The default
    /// everywhere.
    Reject,
    /// Uses the most frequent step as the time step. Leaves out samples and increments that would
    /// span a different step.
    Skip,
    /// Counts times in samples and increments, regardless of the steps between them. The time step
    /// is the most frequent one, or zero for a single time.
    Allow,
}

/// Returns whether a time, in seconds since 1970-01-01 00:00 and to the nearest second, is a
/// multiple of this many hours.
///
/// # Panics
/// Zero hours.
///
/// # Example
/// ```
/// use halocline_io::{Calendar, falls_on, parse_time};
///
/// let time = |date| parse_time(date, Calendar::Gregorian);
/// assert!(falls_on(time("2018-01-01T12:00")?, 12));
/// assert!(!falls_on(time("2018-01-01T18:00")?, 12));
/// # Ok::<(), halocline_io::Error>(())
/// ```
pub fn falls_on(time: f64, hours: usize) -> bool {
    assert!(hours > 0, "0 hours; expected at least 1");
    time.round() % (3600.0 * hours as f64) == 0.0
}

/// Returns whether a time, in seconds since 1970-01-01 00:00 and to the nearest second, is at one of
/// these hours of the day. No hours stand for all times.
///
/// # Example
/// ```
/// use halocline_io::{Calendar, falls_at, parse_time};
///
/// let time = parse_time("2018-01-01T15:00", Calendar::Gregorian)?;
/// assert!(falls_at(time, &[3, 15]) && falls_at(time, &[]));
/// assert!(!falls_at(time, &[3]));
/// # Ok::<(), halocline_io::Error>(())
/// ```
pub fn falls_at(time: f64, hours: &[usize]) -> bool {
    let is_at = |hour: &usize| falls_on(time - 3600.0 * *hour as f64, 24);
    hours.is_empty() || hours.iter().any(is_at)
}

/// Checks that times are finite, strictly increasing and not fill values. `dataset` is their name
/// in the file.
pub(crate) fn check_rising(
    path: &Path,
    dataset: &str,
    times: &[f64],
    calendar: Calendar,
) -> Result<()> {
    let mut before = f64::NEG_INFINITY;
    for (index, &time) in times.iter().enumerate() {
        let mut found = time.to_string();
        let expected = if !time.is_finite() {
            "a time; write the times, or drop those without one".into()
        } else if time <= before {
            found = calendar.date(time);
            format!(
                "a time after {}; sort the times, and drop those that repeat",
                calendar.date(before)
            )
        } else if time.abs() > FARTHEST {
            format!(
                "at most {FARTHEST:e} seconds from 1970; write the times, or drop those without one"
            )
        } else {
            before = time;
            continue;
        };
        return Err(Error::Value {
            path: path.into(),
            dataset: dataset.into(),
            index: vec![index],
            found,
            expected,
        });
    }
    Ok(())
}

/// Returns the step of a time axis, in seconds.
///
/// # Errors
/// Fewer than two times, unless gaps are [allowed](Gaps::Allow); uneven steps, if they are
/// [rejected](Gaps::Reject).
pub(crate) fn step(path: &Path, dataset: &str, times: &[f64], gaps: Gaps) -> Result<f64> {
    let steps = || times.windows(2).map(|pair| pair[1] - pair[0]);
    let Some(first) = steps().next() else {
        if gaps == Gaps::Allow {
            return Ok(0.0);
        }
        let found = format!("{:?}", [times.len()]);
        let expected = "at least two times, or Series::Joined for files with one time each";
        return Err(Error::shape(path, dataset, found, expected));
    };
    if gaps != Gaps::Reject {
        return Ok(distinct_steps(times)[0].0);
    }
    let uneven = steps().position(|step| !close(step, first, first));
    let Some(index) = uneven else {
        return Ok(first);
    };
    Err(Error::Value {
        path: path.into(),
        dataset: dataset.into(),
        index: vec![index + 1],
        found: format!(
            "a time step of {} h",
            (times[index + 1] - times[index]) / 3600.0
        ),
        expected: format!(
            "{} h, as between the first two times; write each stretch of equal steps into a file \
             of its own, of which a FieldDataset takes several, or choose Gaps::Skip or Gaps::Allow",
            first / 3600.0
        ),
    })
}

/// Returns the index of a time on an axis, with a tolerance of a fraction of the surrounding steps.
pub(crate) fn find(times: &[f64], seconds: f64) -> Option<usize> {
    let next = times.partition_point(|time| *time < seconds);
    let near = |index: usize| (times[index] - seconds).abs();
    let found = (next.saturating_sub(1)..times.len().min(next + 1))
        .min_by(|one, other| near(*one).total_cmp(&near(*other)))?;
    let around = times[found.saturating_sub(1)..times.len().min(found + 2)].windows(2);
    let steps = around.map(|pair| pair[1] - pair[0]);
    let step = steps.fold(f64::INFINITY, f64::min);
    let tolerance = if step.is_finite() {
        DISTANCE * step
    } else {
        0.0
    };
    // At least a millisecond, because times stored as f64 days have errors of up to that order.
    (near(found) <= tolerance.max(1e-3)).then_some(found)
}

/// Whether two time differences are equal, up to the tolerance of a step.
pub(crate) fn close(one: f64, other: f64, step: f64) -> bool {
    (one - other).abs() <= TOLERANCE * step
}

/// Returns the distinct steps of a time axis with their counts, most frequent first; of equally
/// frequent ones, the shortest first.
pub(crate) fn distinct_steps(times: &[f64]) -> Vec<(f64, usize)> {
    let mut steps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    steps.sort_by(f64::total_cmp);
    let runs = steps.chunk_by(|one, next| close(*one, *next, *one));
    let mut runs: Vec<(f64, usize)> = runs.map(|run| (run[0], run.len())).collect();
    runs.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_by_a_fraction_of_a_step() {
        let times = [0.0, 300.0, 600.0, 4200.0];
        assert_eq!(find(&times, 599.9), Some(2));
        assert_eq!(find(&times, 600.2), Some(2));
        assert_eq!(find(&times, 601.0), None);
        assert_eq!(find(&times, 4198.0), Some(3));
        assert_eq!(find(&times, 4300.0), None);
        assert_eq!(
            (find(&[7.0], 7.0005), find(&[7.0], 8.0), find(&[], 8.0)),
            (Some(0), None, None)
        );
    }

    #[test]
    fn times_that_were_not_written_are_refused() {
        let check =
            |times: &[f64]| check_rising(Path::new("2018.nc"), "time", times, Calendar::Gregorian);
        assert!(check(&[-1e11, 0.0, 1e11]).is_ok());
        // Default fill values of NetCDF, in nanoseconds and in hours.
        for fill in [9.969_209_968_386_869e27, 9.969_209_968_386_869e36 * 3600.0] {
            let error = check(&[0.0, fill]).unwrap_err().to_string();
            assert!(
                error.contains("\"time\"[1]") && error.contains("1e15"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_most_frequent_step_is_first() {
        let steps = distinct_steps(&[0.0, 8.0, 15.0, 22.0, 30.0, 37.0]);
        assert_eq!(steps, [(7.0, 3), (8.0, 2)]);
        let steps = distinct_steps(&[0.0, 12.0, 18.0, 24.0, 36.0]);
        assert_eq!(steps, [(6.0, 2), (12.0, 2)]);
        assert_eq!(distinct_steps(&[1.0]), []);
    }
}
