//! Fields in the order of another grid.

use std::ops::Range;
use std::path::Path;

use ndarray::{Array4, Axis, s};

use crate::fields::check_box;
use crate::grid_order::GridOrder;
use crate::{Calendar, Channel, Fields, Gaps, Grid, Missing, Result, Traffic};

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
    fn path(&self) -> &Path {
        self.fields.path()
    }

    fn times(&self) -> &[f64] {
        self.fields.times()
    }

    fn file_time(&self, time: usize) -> (&Path, usize) {
        self.fields.file_time(time)
    }

    fn calendar(&self) -> Calendar {
        self.fields.calendar()
    }

    fn is_undated(&self) -> bool {
        self.fields.is_undated()
    }

    fn channels(&self) -> &[String] {
        self.fields.channels()
    }

    fn describe(&self, channel: usize) -> Channel {
        self.fields.describe(channel)
    }

    fn left_out(&self) -> &[String] {
        self.fields.left_out()
    }

    fn grid(&self) -> &Grid {
        &self.grid
    }

    fn gaps(&self) -> Gaps {
        self.fields.gaps()
    }

    fn missing(&self) -> Missing {
        self.fields.missing()
    }

    fn time_step(&self) -> Result<f64> {
        self.fields.time_step()
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

    fn traffic(&self) -> Traffic {
        self.fields.traffic()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        self.fields.fingerprint()
    }
}
