//! Fields by the CF conventions, in containers of any format.

mod axis;
mod plan;
pub(crate) mod variable;

use std::ops::Range;
use std::path::Path;

use ndarray::{Array4, Axis, Ix4, s};

use crate::fields::check_box;
use crate::packing::Stored;
use crate::traffic::{Counter, covered};
use crate::{Fields, Gaps, Grid, Missing, Result, Traffic, times};

pub(crate) use plan::base;
use plan::{Field, Plan, Role};
use variable::{Container, Kind, error_at};

/// The fields of a Zarr store or NetCDF file.
#[derive(Debug)]
pub(crate) struct CfFields {
    container: Box<dyn Container>,
    plan: Plan,
    missing: Missing,
    gaps: Gaps,
    traffic: Counter,
    /// Bytes taken for metadata and coordinates.
    fetched: u64,
}

impl CfFields {
    pub(crate) fn new(
        container: Box<dyn Container>,
        chosen: Option<&[String]>,
        units: Option<&str>,
        missing: Missing,
        gaps: Gaps,
    ) -> Result<Self> {
        let plan = Plan::of(&*container, chosen, units)?;
        Ok(Self {
            fetched: container.fetched(),
            container,
            plan,
            missing,
            gaps,
            traffic: Counter::default(),
        })
    }

    /// Reads levels of a field, as [times or 1, levels, rows, columns].
    fn block(&self, field: &Field, ranges: [Range<usize>; 4]) -> Result<Array4<f32>> {
        let [times, levels, rows, columns] = ranges;
        let variable = &self.container.variables()[field.variable];
        let range = |role: &Role| match role {
            Role::Single => 0..1,
            Role::Time => times.clone(),
            Role::Level => levels.clone(),
            Role::Row => rows.clone(),
            Role::Column => columns.clone(),
        };
        let cells: Vec<Range<usize>> = field.roles.iter().map(range).collect();
        let numbers = match variable.kind {
            Kind::Single => self
                .container
                .single(field.variable, &cells)
                .map(Stored::Single),
            _ => self
                .container
                .double(field.variable, &cells)
                .map(Stored::Double),
        };
        let numbers =
            numbers.map_err(|cause| error_at(&*self.container, &variable.name, &cells, &cause))?;
        let bytes = |chunk| covered(&cells, &variable.shape, chunk) * variable.width as u64;
        self.traffic
            .add(0, bytes(variable.chunk.as_deref()), bytes(None));
        let place = (self.container.path(), variable.name.as_str());
        let values = field.packing.values(numbers, self.missing, place, &cells)?;
        // From the order of the file to [single dims, time, level, row, column].
        let mut order: Vec<usize> = (0..cells.len()).collect();
        order.sort_by_key(|&dim| field.roles[dim]);
        let mut values = values.permuted_axes(order);
        let count = |role| field.roles.iter().filter(|this| **this == role).count();
        for _ in 0..count(Role::Single) {
            values = values.index_axis_move(Axis(0), 0);
        }
        if count(Role::Time) == 0 {
            values = values.insert_axis(Axis(0));
        }
        if count(Role::Level) == 0 {
            values = values.insert_axis(Axis(1));
        }
        Ok(values.into_dimensionality::<Ix4>().expect("four roles"))
    }
}

impl Fields for CfFields {
    fn path(&self) -> &Path {
        self.container.path()
    }

    fn times(&self) -> &[f64] {
        &self.plan.times
    }

    fn channels(&self) -> &[String] {
        &self.plan.names
    }

    fn grid(&self) -> &Grid {
        &self.plan.grid
    }

    fn gaps(&self) -> Gaps {
        self.gaps
    }

    fn time_step(&self) -> Result<f64> {
        times::step(self.path(), &self.plan.time, self.times(), self.gaps)
    }

    fn read(&self, cells: [Range<usize>; 4]) -> Result<Array4<f32>> {
        check_box(self, "/", &cells)?;
        let mut values = Array4::zeros(cells.each_ref().map(ExactSizeIterator::len));
        if values.is_empty() {
            return Ok(values);
        }
        let [times, channels, rows, columns] = cells;
        // Levels of one variable are read together.
        let mut start = channels.start;
        let runs = self.plan.channels[channels].chunk_by(|one, next| one.field == next.field);
        let first = start;
        for run in runs {
            let levels = run[0].level..run[0].level + run.len();
            let ranges = [times.clone(), levels, rows.clone(), columns.clone()];
            let block = self.block(&self.plan.fields[run[0].field], ranges)?;
            let place = start - first..start - first + run.len();
            // A field without a time is the same at all times.
            values.slice_mut(s![.., place, .., ..]).assign(&block);
            start += run.len();
        }
        Ok(values)
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            fetched: self.container.fetched() - self.fetched,
            ..self.traffic.total()
        }
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        self.container.fingerprint()
    }
}
