//! Static fields of a separate file, which are channels of the files of a dataset.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ndarray::Array4;

use super::config::DatasetConfig;
use crate::fields::aligned::aligned;
use crate::fields::merged::Merged;
use crate::fields::selected::Selected;
use crate::fields::{check_box, delegate, same_grid};
use crate::{
    Calendar, Channel, Error, Fields, Gaps, Grid, LeftOut, Missing, OpenConfig, Result, Traffic,
};

/// Static fields of a separate file, which replace channels of the same names.
#[derive(Debug)]
pub(crate) struct StaticFields(Box<dyn Fields>);

impl StaticFields {
    /// Opens the file of static fields of a configuration, if there is one.
    ///
    /// # Errors
    /// Errors of [`OpenConfig::open`]; fields of several times.
    pub(crate) fn open(config: &DatasetConfig) -> Result<Option<Self>> {
        let Some(path) = &config.static_fields else {
            return Ok(None);
        };
        let open = OpenConfig::new()
            .with_missing(config.open.missing)
            .with_gaps(Gaps::Allow);
        let fields = open.open(path)?;
        let times = fields.times().len();
        if times != 1 {
            let got = format!("{times} times in {}", path.display());
            return Err(Error::argument("static_fields", got, "fields of one time"));
        }
        Ok(Some(Self(fields)))
    }

    /// Removes the static fields from the channels to open, because the files may lack them.
    pub(crate) fn removed_from(&self, mut open: OpenConfig) -> OpenConfig {
        if let Some(names) = &mut open.channels {
            names.retain(|name| !self.0.channels().contains(name));
        }
        open
    }

    /// Adds the static fields to the channels of each file, in the order of the grid of the first
    /// one.
    ///
    /// # Errors
    /// Static fields on another grid; a file without other channels.
    pub(crate) fn added_to(self, files: Vec<Box<dyn Fields>>) -> Result<Vec<Box<dyn Fields>>> {
        let Some(first) = files.first() else {
            return Ok(files);
        };
        let fields = aligned(self.0, first.grid());
        same_grid((fields.grid(), fields.path()), (first.grid(), first.path()))?;
        let fields: Arc<dyn Fields> = Arc::from(fields);
        let added = files.into_iter().map(|file| {
            let names = file.channels().iter();
            let others = names.filter(|name| !fields.channels().contains(*name));
            let others: Vec<String> = others.cloned().collect();
            let file = Selected::of(file, &others)?;
            let repeated = Repeated {
                fields: Arc::clone(&fields),
                times: file.times().to_vec(),
                calendar: file.calendar(),
            };
            let merged = Merged::new(vec![file, Box::new(repeated)])?;
            Ok(Box::new(merged) as Box<dyn Fields>)
        });
        added.collect()
    }
}

/// Fields of one time, repeated at the times of another file.
#[derive(Debug)]
struct Repeated {
    fields: Arc<dyn Fields>,
    times: Vec<f64>,
    calendar: Calendar,
}

impl Fields for Repeated {
    delegate! {
        self => self.fields;
        fn path(&self) -> &Path;
        fn is_undated(&self) -> bool;
        fn channels(&self) -> &[String];
        fn left_out(&self) -> &[LeftOut];
        fn grid(&self) -> &Grid;
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
        fn time_step(&self) -> Result<f64>;
        fn traffic(&self) -> Traffic;
        fn fingerprint(&self) -> Result<(u64, u32)>;
        fn modified(&self) -> Result<u32>;
    }

    fn times(&self) -> &[f64] {
        &self.times
    }

    fn calendar(&self) -> Calendar {
        self.calendar
    }

    fn describe(&self, channel: usize) -> Channel {
        self.fields.describe(channel).with_is_static(true)
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "/", &cells)?;
        let shape = cells.each_ref().map(ExactSizeIterator::len);
        let [_, channels, rows, columns] = cells;
        let field = self.fields.read([0..1, channels, rows, columns])?;
        let repeated = field.broadcast(shape).expect("fields of one time");
        Ok(repeated.to_owned())
    }
}
