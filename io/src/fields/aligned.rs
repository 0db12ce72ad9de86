//! Fields in the order of another grid.

use std::ops::Range;
use std::path::Path;

use ndarray::{Array4, Axis, s};

use super::{check_box, delegate};
use crate::grid::order::GridOrder;
use crate::{Calendar, Channel, Fields, Gaps, Grid, LeftOut, Missing, Result, Traffic};

/// Fields whose rows and columns are read in the order of a grid that differs from that of the file
/// in the direction of latitudes or in the first meridian.
#[derive(Debug)]
struct Aligned {
    fields: Box<dyn Fields>,
    grid: Grid,
    order: GridOrder,
}

/// Returns fields in the order of a grid. Fields on a grid that differs in more than the order are
/// returned as they are.
pub(crate) fn aligned(fields: Box<dyn Fields>, grid: &Grid) -> Box<dyn Fields> {
    match GridOrder::of(fields.grid(), grid) {
        Ok(order) if !order.is_same() => Box::new(Aligned {
            fields,
            grid: grid.clone(),
            order,
        }),
        _ => fields,
    }
}

impl Fields for Aligned {
    delegate! {
        self => self.fields;
        fn path(&self) -> &Path;
        fn times(&self) -> &[f64];
        fn file_time(&self, time: usize) -> (&Path, usize);
        fn calendar(&self) -> Calendar;
        fn is_undated(&self) -> bool;
        fn channels(&self) -> &[String];
        fn describe(&self, channel: usize) -> Channel;
        fn left_out(&self) -> &[LeftOut];
        fn gaps(&self) -> Gaps;
        fn missing(&self) -> Missing;
        fn time_step(&self) -> Result<f64>;
        fn traffic(&self) -> Traffic;
        fn fingerprint(&self) -> Result<(u64, u32)>;
        fn modified(&self) -> Result<u32>;
    }

    fn grid(&self) -> &Grid {
        &self.grid
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "/", &cells)?;
        let mut values = Array4::zeros(cells.each_ref().map(ExactSizeIterator::len));
        let [times, channels, rows, columns] = cells;
        let rows = self.order.rows(rows);
        let mut place = 0;
        for columns in self.order.columns(columns) {
            let places = place..place + columns.len();
            place = places.end;
            let ranges = [times.clone(), channels.clone(), rows.clone(), columns];
            let mut part = self.fields.read(ranges)?;
            if self.order.flips {
                part.invert_axis(Axis(2));
            }
            values.slice_mut(s![.., .., .., places]).assign(&part);
        }
        Ok(values)
    }
}
