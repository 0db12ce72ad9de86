//! Files or stores with the same times and grid but different channels, merged into one.

use std::ops::Range;
use std::path::Path;

use ndarray::Array4;

use super::selected::Selected;
use super::{
    check_box, delegate, fingerprint_of, modified_of, part_of, read_parts, same_calendar,
    same_grid, traffic_of,
};
use crate::{Calendar, Channel, Error, Fields, Gaps, Grid, LeftOut, Missing, Result, Traffic};

/// Dim along which parts are merged.
const CHANNEL: usize = 1;

/// Parts with different channels, such as surface and pressure levels, in sequence.
#[derive(Debug)]
pub(crate) struct Merged {
    parts: Vec<Box<dyn Fields>>,
    names: Vec<String>,
    left_out: Vec<LeftOut>,
}

impl Merged {
    /// Merges parts in the given order.
    ///
    /// # Errors
    /// No part; a part whose times, grid or calendar differ from the first; a channel in several
    /// parts.
    pub(crate) fn new(parts: Vec<Box<dyn Fields>>) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::argument(
                "files",
                0,
                "at least one field file or store",
            ));
        };
        let mut names = first.channels().to_vec();
        for part in &parts[1..] {
            let (path, reference) = (part.path(), first.path());
            let differs =
                |what, found, expected| Err(Error::differs(path, what, found, expected, reference));
            same_calendar(&**part, &**first)?;
            if part.times() != first.times() {
                let [found, expected] = [part, first].map(|part| told(&**part));
                return differs("times of other channels", found, expected);
            }
            same_grid((part.grid(), path), (first.grid(), reference))?;
            if let Some(name) = part.channels().iter().find(|name| names.contains(name)) {
                let expected =
                    "a channel of one file only, or the same channels in all files".into();
                return differs("channels", name.clone(), expected);
            }
            names.extend_from_slice(part.channels());
        }
        let left_out = parts.iter().flat_map(|part| part.left_out()).cloned();
        Ok(Self {
            left_out: left_out.collect(),
            names,
            parts,
        })
    }

    fn first(&self) -> &dyn Fields {
        &self.parts[0]
    }
}

/// Describes a time axis by the number of times, the first and the last.
fn told(part: &dyn Fields) -> String {
    let date = |time: Option<&f64>| time.map_or("none".into(), |time| part.calendar().date(*time));
    let (first, last) = (date(part.times().first()), date(part.times().last()));
    format!("{} times from {first} to {last}", part.times().len())
}

/// Groups parts by their set of channels. Groups are in the order of their first parts.
pub(crate) fn by_channels(parts: Vec<Box<dyn Fields>>) -> Result<Vec<Vec<Box<dyn Fields>>>> {
    let sorted = |fields: &dyn Fields| {
        let mut names = fields.channels().to_vec();
        names.sort();
        names
    };
    let mut groups: Vec<Vec<Box<dyn Fields>>> = Vec::new();
    for part in parts {
        match groups
            .iter_mut()
            .find(|group| sorted(&*group[0]) == sorted(&*part))
        {
            // Channels in the order of the group's first part.
            Some(group) => {
                let names = group[0].channels().to_vec();
                group.push(Selected::of(part, &names)?);
            }
            None => groups.push(vec![part]),
        }
    }
    Ok(groups)
}

/// Merges each part of the first group with the parts of the other groups that start at the same
/// time.
///
/// # Errors
/// Groups that differ in size; a part without a counterpart that starts at the same time; those of
/// [`Merged::new`].
pub(crate) fn merge_each(groups: Vec<Vec<Box<dyn Fields>>>) -> Result<Vec<Box<dyn Fields>>> {
    let mut groups = groups.into_iter();
    let mut all: Vec<Vec<Box<dyn Fields>>> = groups
        .next()
        .into_iter()
        .flatten()
        .map(|part| vec![part])
        .collect();
    for group in groups {
        if group.len() != all.len() {
            let got = format!("{} with {:?}", group.len(), group[0].channels());
            let expected = format!("{} files, as with {:?}", all.len(), all[0][0].channels());
            return Err(Error::argument("files", got, expected));
        }
        for part in group {
            let fits = |other: &&mut Vec<Box<dyn Fields>>| {
                other[0].times().first() == part.times().first()
            };
            let Some(found) = all.iter_mut().find(fits) else {
                let got = format!("{} with {}", part.path().display(), told(&*part));
                let expected = format!(
                    "a file with {:?} from the same time on",
                    all[0][0].channels()
                );
                return Err(Error::argument("files", got, expected));
            };
            found.push(part);
        }
    }
    let merged = all
        .into_iter()
        .map(|parts| Ok(Box::new(Merged::new(parts)?) as Box<dyn Fields>));
    merged.collect()
}

impl Fields for Merged {
    delegate! {
        self => self.first();
        fn path(&self) -> &Path;
        fn times(&self) -> &[f64];
        fn file_time(&self, time: usize) -> (&Path, usize);
        fn calendar(&self) -> Calendar;
        fn grid(&self) -> &Grid;
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
        fn time_step(&self) -> Result<f64>;
    }

    fn is_undated(&self) -> bool {
        self.parts.iter().all(|part| part.is_undated())
    }

    fn channels(&self) -> &[String] {
        &self.names
    }

    fn describe(&self, channel: usize) -> Channel {
        match part_of(&self.parts, CHANNEL, channel) {
            Some((part, channel)) => part.describe(channel),
            None => panic!("channel {channel} of {}", self.names.len()),
        }
    }

    fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "/", &cells)?;
        read_parts(&self.parts, CHANNEL, cells)
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
