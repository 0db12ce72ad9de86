//! Means of the training period by time of year.

use std::path::Path;

use burn::tensor::Float;
use halocline_core::{DeviceMesh, Placement, Result, ShardTensor, World};
use halocline_io::{
    Calendar, Checkpoint, CheckpointConfig, Checkpoints, FieldLoader, Progress, Snapshot,
};
use halocline_ops::prelude::*;
use serde::{Deserialize, Serialize};

/// The times of a year that have a climatology of their own.
///
/// # Example
/// ```
/// use halocline::experiment::Cycle;
/// use halocline::io::Calendar;
///
/// let day = |day: f64| day * 86400.0;
/// assert_eq!(Cycle::Month.class(day(31.0), Calendar::Gregorian), 1); // February
/// assert_eq!(Cycle::Day.class(day(365.0 + 31.0), Calendar::Gregorian), 31);
/// assert_eq!(Cycle::Mean.classes(), 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cycle {
    /// One mean for all times.
    Mean,
    /// A mean for each month.
    Month,
    /// A mean for each day of the year, over the 61 days around it. Hours of the day are not apart.
    Day,
}

/// Days before and after a day whose fields its mean takes.
const AROUND: usize = 30;
/// The first days of the months of a leap year.
const FIRST: [usize; 12] = [0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335];

impl Cycle {
    /// The number of means.
    pub fn classes(self) -> usize {
        match self {
            Self::Mean => 1,
            Self::Month => 12,
            Self::Day => 366,
        }
    }

    /// The mean of a time in seconds since 1970-01-01, from 0.
    pub fn class(self, seconds: f64, calendar: Calendar) -> usize {
        let (_, month, day) = calendar.day(seconds).unwrap_or((1970, 1, 1));
        let month = usize::try_from(month - 1).unwrap_or(0);
        match self {
            Self::Mean => 0,
            Self::Month => month,
            Self::Day => (FIRST[month] + usize::try_from(day - 1).unwrap_or(0)).min(365),
        }
    }
}

/// Means of the targets in the training period by time of year, in shards, of normalised values.
#[derive(Debug)]
pub(super) struct Climatology {
    cycle: Cycle,
    calendar: Calendar,
    /// `[1, targets, lat, lon]` for each time of the year.
    means: Vec<ShardTensor<4>>,
}

/// The name of the tensor in its checkpoint.
const NAME: &str = "climatology";

impl Climatology {
    /// Loads the climatology from a folder, if it is there.
    pub(super) fn load(
        world: &World,
        (mesh, placements): (&DeviceMesh, &[Placement]),
        folder: &Path,
        calendar: Calendar,
    ) -> Result<Option<Self>> {
        let Some(saved) = Checkpoint::latest(world, folder)? else {
            return Ok(None);
        };
        let all = saved.sharded::<4, Float>(NAME, mesh, placements)?.inner();
        let classes = all.dims()[0];
        let mut cycles = [Cycle::Month, Cycle::Day].into_iter();
        let cycle = cycles.find(|cycle| cycle.classes() == classes);
        let class = |class| all.clone().narrow(0, class, 1);
        Ok(Some(Self {
            cycle: cycle.unwrap_or(Cycle::Mean),
            calendar,
            means: (0..classes).map(class).collect(),
        }))
    }

    /// Computes the climatology from the targets of a loader's samples, and saves it in a folder.
    pub(super) fn compute(
        world: &World,
        folder: &Path,
        (cycle, calendar): (Cycle, Calendar),
        loader: &FieldLoader,
    ) -> Result<Self> {
        let mut checkpoints = Checkpoints::open(world, folder, &CheckpointConfig::new())?;
        let means = compute(world, loader, cycle, calendar)?;
        let mut snapshot = Snapshot::new(world);
        snapshot.sharded(NAME, &ShardTensor::cat(means.clone(), 0))?;
        checkpoints.save(0, snapshot, None)?;
        checkpoints.wait()?;
        Ok(Self {
            cycle,
            calendar,
            means,
        })
    }

    /// The means at some times, `[times, targets, lat, lon]`, whole along the batch.
    pub(super) fn at(&self, times: &[f64]) -> ShardTensor<4> {
        let class = |time: &f64| self.cycle.class(*time, self.calendar);
        let means: Vec<_> = times
            .iter()
            .map(|time| self.means[class(time)].clone())
            .collect();
        match &means[..] {
            [one] => one.clone(),
            _ => ShardTensor::cat(means, 0),
        }
    }
}

/// Computes the means of the targets of a loader's samples.
fn compute(
    world: &World,
    loader: &FieldLoader,
    cycle: Cycle,
    calendar: Calendar,
) -> Result<Vec<ShardTensor<4>>> {
    // Sums of values and of their numbers.
    let mut sums: Vec<Option<[ShardTensor<4>; 2]>> = vec![None; cycle.classes()];
    let progress = Progress::new(world.rank(), NAME, loader.batches());
    for batch in loader.epoch(0) {
        let batch = batch?;
        let values = batch.target.inner();
        let count = batch
            .mask
            .map_or_else(|| values.clone() * 0.0 + 1.0, ShardTensor::inner);
        let sum = &mut sums[cycle.class(batch.times[0], calendar)];
        *sum = added(sum.take(), Some([values, count]));
        progress.advance();
    }
    progress.finish();
    let classes = sums.len();
    let window = if cycle == Cycle::Day { AROUND } else { 0 };
    let all = sums
        .iter()
        .flatten()
        .cloned()
        .fold(None, |all, sum| added(all, Some(sum)));
    let around = |class: usize| {
        let near = (0..=2 * window).map(|day| &sums[(class + classes + day - window) % classes]);
        near.cloned().fold(None, added)
    };
    let [sum, count] = all.expect("a loader has samples");
    let whole = sum / count.clamp_min(1.0);
    // Times of the year without a value have the mean of all.
    let mean = |class: usize| match around(class) {
        None => whole.clone(),
        Some([sum, count]) => {
            let none = count.clone().lower_elem(0.5);
            (sum / count.clamp_min(1.0)).mask_where(none, whole.clone())
        }
    };
    Ok((0..classes).map(mean).collect())
}

fn added(
    one: Option<[ShardTensor<4>; 2]>,
    other: Option<[ShardTensor<4>; 2]>,
) -> Option<[ShardTensor<4>; 2]> {
    match (one, other) {
        (Some([a, b]), Some([c, d])) => Some([a + c, b + d]),
        (one, other) => one.or(other),
    }
}
