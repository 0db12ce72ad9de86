//! Selection of channels by name.

use std::ops::Range;
use std::path::Path;

use ndarray::{Array4, s};

use super::channel::base;
use super::{check_box, delegate};
use crate::{Calendar, Channel, Error, Fields, Gaps, Grid, LeftOut, Missing, Result, Traffic};

/// Subset of the channels of fields, in any order.
#[derive(Debug)]
pub(crate) struct Selected {
    fields: Box<dyn Fields>,
    names: Vec<String>,
    /// Index of each channel in `fields`.
    indices: Vec<usize>,
}

impl Selected {
    /// Selects channels by name. A variable name without a level selects all its levels.
    ///
    /// # Errors
    /// No channels; a channel that is chosen twice or does not exist.
    pub(crate) fn of(fields: Box<dyn Fields>, chosen: &[String]) -> Result<Box<dyn Fields>> {
        let names = fields.channels();
        let error = |got: String| {
            let path = fields.path().display();
            let expected = format!("channels of {path}, each once: {}", names.join(", "));
            Err(Error::argument("channels", got, expected))
        };
        let mut indices = Vec::new();
        for chosen in chosen {
            let found = find(names, chosen);
            if found.is_empty() || found.iter().any(|index| indices.contains(index)) {
                return error(chosen.clone());
            }
            indices.extend(found);
        }
        if indices.is_empty() {
            return error("none".into());
        }
        // All channels in their original order: no wrapper is needed.
        if indices.iter().copied().eq(0..names.len()) {
            return Ok(fields);
        }
        Ok(Box::new(Self {
            names: indices.iter().map(|&index| names[index].clone()).collect(),
            indices,
            fields,
        }))
    }
}

/// Returns the indices of the channels that a name selects.
pub(crate) fn find(names: &[String], chosen: &str) -> Vec<usize> {
    if let Some(index) = names.iter().position(|name| name == chosen) {
        return vec![index];
    }
    let is_level = |&index: &usize| names[index].contains('@') && base(&names[index]) == chosen;
    (0..names.len()).filter(is_level).collect()
}

impl Fields for Selected {
    delegate! {
        self => self.fields;
        fn path(&self) -> &Path;
        fn times(&self) -> &[f64];
        fn file_time(&self, time: usize) -> (&Path, usize);
        fn calendar(&self) -> Calendar;
        fn is_undated(&self) -> bool;
        fn left_out(&self) -> &[LeftOut];
        fn grid(&self) -> &Grid;
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
        fn time_step(&self) -> Result<f64>;
        fn traffic(&self) -> Traffic;
        fn fingerprint(&self) -> Result<(u64, u32)>;
        fn modified(&self) -> Result<u32>;
    }

    fn channels(&self) -> &[String] {
        &self.names
    }

    fn describe(&self, channel: usize) -> Channel {
        let index = self.indices[channel];
        let mut channel = self.fields.describe(index);
        // A chunk holds at most as many channels as were selected.
        if let Some(chunk) = &mut channel.chunk {
            chunk[1] = chunk[1].min(self.indices.len());
        }
        channel
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "/", &cells)?;
        let mut values = Array4::zeros(cells.each_ref().map(ExactSizeIterator::len));
        let [times, channels, rows, columns] = cells;
        // Channels that are adjacent in the file are read together.
        let (mut place, count) = (0, channels.len());
        for run in self.indices[channels].chunk_by(|one, next| one + 1 == *next) {
            let range = run[0]..run[0] + run.len();
            let ranges = [times.clone(), range, rows.clone(), columns.clone()];
            if run.len() == count {
                return self.fields.read(ranges);
            }
            let places = place..place + run.len();
            values
                .slice_mut(s![.., places, .., ..])
                .assign(&self.fields.read(ranges)?);
            place += run.len();
        }
        Ok(values)
    }
}
