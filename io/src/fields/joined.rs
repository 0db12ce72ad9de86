//! Several files or stores, joined along time.

use std::ops::Range;
use std::path::Path;

use ndarray::Array4;

use super::{
    check_box, check_units, delegate, fingerprint_of, modified_of, part_of, read_parts,
    same_calendar, same_grid, traffic_of,
};
use crate::time::times;
use crate::{Calendar, Channel, Error, Fields, Gaps, Grid, LeftOut, Missing, Result, Traffic};

/// Dim along which parts are joined.
const TIME: usize = 0;

/// Consecutive parts of a time axis.
#[derive(Debug)]
pub(crate) struct Joined {
    parts: Vec<Box<dyn Fields>>,
    times: Vec<f64>,
    /// Whether each channel is static: without a time dim, and with equal values in all parts.
    are_static: Vec<bool>,
}

impl Joined {
    /// Joins parts in the order of their times.
    ///
    /// # Errors
    /// No part; a part whose channels, grid, calendar or units differ from the first; times that
    /// overlap.
    pub(crate) fn new(mut parts: Vec<Box<dyn Fields>>) -> Result<Self> {
        let start = |part: &dyn Fields| part.times().first().copied().unwrap_or(f64::INFINITY);
        parts.sort_by(|one, other| start(one).total_cmp(&start(other)));
        let Some(first) = parts.first() else {
            return Err(Error::argument(
                "files",
                0,
                "at least one field file or store",
            ));
        };
        for part in &parts[1..] {
            if part.channels() != first.channels() {
                let [found, expected] = [part, first].map(|part| format!("{:?}", part.channels()));
                let (path, reference) = (part.path(), first.path());
                return Err(Error::differs(path, "channels", found, expected, reference));
            }
            same_calendar(&**part, &**first)?;
            same_grid((part.grid(), part.path()), (first.grid(), first.path()))?;
            check_units(part, first)?;
        }
        for pair in parts.windows(2) {
            if let (Some(last), Some(next)) = (pair[0].times().last(), pair[1].times().first())
                && next <= last
            {
                let [last, next] = [last, next].map(|time| first.calendar().date(*time));
                let expected = format!("a time after the last one, {last},");
                let (path, reference) = (pair[1].path(), pair[0].path());
                return Err(Error::differs(
                    path,
                    "first time",
                    next,
                    expected,
                    reference,
                ));
            }
        }
        let times = parts
            .iter()
            .flat_map(|part| part.times())
            .copied()
            .collect();
        let channels = 0..parts[0].channels().len();
        let are_static = channels.map(|channel| is_static(&parts, channel));
        Ok(Self {
            are_static: are_static.collect(),
            parts,
            times,
        })
    }

    fn first(&self) -> &dyn Fields {
        &self.parts[0]
    }

    /// Names in an error about a time the file that holds it, and its index there.
    fn in_part(&self, error: Error) -> Error {
        match error {
            Error::Value {
                dataset,
                index,
                found,
                expected,
                ..
            } => {
                let (path, time) = self.file_time(index[0]);
                Error::Value {
                    path: path.into(),
                    dataset,
                    index: vec![time],
                    found,
                    expected,
                }
            }
            other => other,
        }
    }
}

/// Whether a channel has no time dim and equal values in all parts, which are read for the
/// comparison. A channel that cannot be read does not count as static.
fn is_static(parts: &[Box<dyn Fields>], channel: usize) -> bool {
    if !parts.iter().all(|part| part.describe(channel).is_static) {
        return false;
    }
    let mut parts = parts.iter().filter(|part| !part.times().is_empty());
    let (Some(first), Some(_)) = (parts.next(), parts.clone().next()) else {
        return true;
    };
    let [rows, columns] = first.grid().shape();
    let cells = |part: &dyn Fields| {
        let field = part.read([0..1, channel..channel + 1, 0..rows, 0..columns]);
        // Compared as bits, because NaN is not equal to itself.
        field.ok().map(|field| field.mapv(f32::to_bits))
    };
    let first = cells(&**first);
    first.is_some() && parts.all(|part| cells(&**part) == first)
}

impl Fields for Joined {
    delegate! {
        self => self.first();
        fn path(&self) -> &Path;
        fn calendar(&self) -> Calendar;
        fn channels(&self) -> &[String];
        fn left_out(&self) -> &[LeftOut];
        fn grid(&self) -> &Grid;
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
    }

    fn times(&self) -> &[f64] {
        &self.times
    }

    fn file_time(&self, time: usize) -> (&Path, usize) {
        match part_of(&self.parts, TIME, time) {
            Some((part, time)) => part.file_time(time),
            None => panic!("time {time} of {}", self.times.len()),
        }
    }

    fn is_undated(&self) -> bool {
        self.parts.iter().all(|part| part.is_undated())
    }

    fn describe(&self, channel: usize) -> Channel {
        let is_static = self.are_static[channel];
        self.first().describe(channel).with_is_static(is_static)
    }

    fn time_step(&self) -> Result<f64> {
        match self.times.len() {
            // A part that is restricted to a period may still know its full time axis.
            1 => self.first().time_step(),
            _ => times::step(self.path(), "time", &self.times, self.gaps())
                .map_err(|error| self.in_part(error)),
        }
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "/", &cells)?;
        read_parts(&self.parts, TIME, cells)
    }

    fn traffic(&self) -> Traffic {
        traffic_of(&self.parts)
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        fingerprint_of(&self.parts)
    }

    fn modified(&self) -> Result<u32> {
        modified_of(&self.parts)
    }
}
