//! Fields described by the CF conventions, in containers of any format.

pub(crate) mod axis;
mod coordinates;
mod curvilinear;
mod description;
mod plan;
mod planes;
mod projected;
mod shared;
pub(crate) mod text_times;
mod time_axis;
mod unstructured;
pub(crate) mod variable;

use std::ops::Range;
use std::path::Path;

use ndarray::{Array4, Axis, Ix4, IxDyn, s};
use rayon::prelude::*;

use super::packing::Stored;
use crate::fields::check_box;
use crate::fields::traffic::Counter;
use crate::time::times;
use crate::{Calendar, Channel, Fields, Gaps, Grid, LeftOut, Missing, Result, Traffic};

use coordinates::Role;
pub(crate) use plan::Choice;
use plan::{Field, Plan};
use shared::Request;
use variable::{Container, error_at};

/// Number of variables whose chunks a rank decodes before it waits for chunks that other ranks
/// decode.
const AHEAD: usize = 8;

/// Fields of a Zarr store or NetCDF file.
#[derive(Debug)]
pub(crate) struct CfFields {
    container: Box<dyn Container>,
    plan: Plan,
    missing: Missing,
    gaps: Gaps,
    traffic: Counter,
    /// Bytes read for metadata and coordinates.
    fetched: u64,
}

impl CfFields {
    pub(crate) fn new(
        container: Box<dyn Container>,
        choice: Choice<'_>,
        units: Option<&str>,
        missing: Missing,
        gaps: Gaps,
    ) -> Result<Self> {
        let plan = Plan::of(&*container, choice, units)?;
        shared::limit()?;
        Ok(Self {
            fetched: container.fetched(),
            container,
            plan,
            missing,
            gaps,
            traffic: Counter::default(),
        })
    }

    /// Returns the box of a field, with its dims in the order of the file.
    fn cells(field: &Field, ranges: [Range<usize>; 4]) -> Vec<Range<usize>> {
        let [times, levels, rows, columns] = ranges;
        let range = |role: &Role| match role {
            Role::Single => 0..1,
            Role::Time => times.clone(),
            Role::Level => levels.clone(),
            Role::Row => rows.clone(),
            Role::Column => columns.clone(),
        };
        field.roles.iter().map(range).collect()
    }

    /// Unpacks stored numbers, whose dims are in the order of the file, to [times or 1, levels,
    /// rows, columns].
    fn values(
        &self,
        field: &Field,
        cells: &[Range<usize>],
        numbers: Stored<IxDyn>,
    ) -> Result<Array4<f32>> {
        let variable = &self.container.variables()[field.variable];
        let place = (self.container.path(), variable.name.as_str());
        let values = field.packing.values(numbers, self.missing, place, cells)?;
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
        if count(Role::Row) == 0 {
            values = values.insert_axis(Axis(2));
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

    fn calendar(&self) -> Calendar {
        self.plan.calendar
    }

    fn is_undated(&self) -> bool {
        self.plan.is_undated
    }

    fn channels(&self) -> &[String] {
        &self.plan.names
    }

    fn describe(&self, channel: usize) -> Channel {
        let field = &self.plan.fields[self.plan.channels[channel].field];
        let variable = &self.container.variables()[field.variable];
        let text = |attribute| variable.text(attribute).map(String::from);
        let dim = |role| field.roles.iter().position(|this| *this == role);
        let extents = variable.chunk.as_ref().map(|chunk| {
            let roles = [Role::Time, Role::Level, Role::Row, Role::Column];
            roles.map(|role| dim(role).map_or(1, |dim| chunk[dim]))
        });
        Channel::new(self.plan.names[channel].clone())
            .with_units(text("units"))
            .with_lacks_units(text("units").is_none())
            .with_long_name(text("long_name"))
            .with_standard_name(text("standard_name"))
            .with_cell_methods(text("cell_methods"))
            .with_level_units(field.level_units.clone())
            .with_level_positive(field.level_positive.clone())
            .with_level_standard_name(field.level_standard_name.clone())
            .with_is_static(dim(Role::Time).is_none() && self.plan.are_static)
            .with_chunk(extents)
    }

    fn left_out(&self) -> &[LeftOut] {
        &self.plan.left_out
    }

    fn grid(&self) -> &Grid {
        &self.plan.grid
    }

    fn gaps(&self) -> Gaps {
        self.gaps
    }

    fn missing(&self) -> Missing {
        self.missing
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
        // Adjacent levels of a variable are read together.
        let first = channels.start;
        let mut start = first;
        let runs = self.plan.channels[channels].chunk_by(|one, next| one.field == next.field);
        let runs: Vec<_> = runs
            .map(|run| {
                let levels = run[0].level..run[0].level + run.len();
                let ranges = [times.clone(), levels, rows.clone(), columns.clone()];
                let field = &self.plan.fields[run[0].field];
                start += run.len();
                let place = start - run.len() - first..start - first;
                (field, Self::cells(field, ranges), place)
            })
            .collect();
        for runs in runs.chunks(AHEAD) {
            let name = |field: &Field| &self.container.variables()[field.variable];
            let failed = |field: &Field, cells: &[Range<usize>], cause: &str| {
                error_at(&*self.container, &name(field).name, cells, cause)
            };
            // On all threads, because a chunk often holds one channel at one time.
            let requests = runs.par_iter().map(|(field, cells, _)| {
                let request = Request::start(&*self.container, field.variable, cells);
                request.map_err(|cause| failed(field, cells, &cause))
            });
            let requests = requests.collect::<Result<Vec<_>>>()?;
            // Runs after this rank has decoded its own chunks, so that it waits only for those of
            // others.
            let numbers = runs
                .iter()
                .zip(requests)
                .map(|((field, cells, _), request)| {
                    let (numbers, decoded) = request
                        .finish()
                        .map_err(|cause| failed(field, cells, &cause))?;
                    let needed: u64 = cells.iter().map(|range| range.len() as u64).product();
                    let width = name(field).width as u64;
                    self.traffic.add(0, decoded * width, needed * width);
                    Ok(numbers)
                });
            let numbers = numbers.collect::<Result<Vec<_>>>()?;
            let blocks = runs.par_iter().zip(numbers);
            let blocks =
                blocks.map(|((field, cells, _), numbers)| self.values(field, cells, numbers));
            let blocks = blocks.collect::<Result<Vec<_>>>()?;
            for ((_, _, place), block) in runs.iter().zip(blocks) {
                // The only run.
                if block.dim() == values.dim() && block.is_standard_layout() {
                    return Ok(block);
                }
                // A field without a time dim is broadcast over the times.
                values
                    .slice_mut(s![.., place.clone(), .., ..])
                    .assign(&block);
            }
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

    fn modified(&self) -> Result<u32> {
        self.container.modified()
    }
}
