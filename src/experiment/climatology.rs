//! Means of the training period by time of year.

use std::path::Path;

use burn::tensor::Float;
use halocline_core::{DeviceMesh, Layout, Placement, Result, ShardTensor, World};
use halocline_io::{
    Calendar, Checkpoint, CheckpointConfig, Checkpoints, FieldLoader, Progress, Snapshot,
};
use halocline_ops::prelude::*;

use super::cycle::Cycle;

/// Days from a day to those before and after that have no weight in its mean.
const REACH: usize = 30;
/// Seconds per day.
const DAY: f64 = 86400.0;

/// Classes of times that share a mean: by a [`Cycle`], and by the part of the day.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) cycle: Cycle,
    /// Whether the cycle is the default one, not one of the configuration.
    pub(super) is_default: bool,
    /// Number of equal parts of a day, from 0 UTC on.
    pub(super) parts: usize,
    pub(super) calendar: Calendar,
}

impl Times {
    fn classes(self) -> usize {
        self.cycle.classes() * self.parts
    }

    /// Returns the index of the mean of a time, which is in seconds since 1970-01-01. Parts of a
    /// day are adjacent.
    fn class(self, seconds: f64) -> usize {
        let of_day = seconds.round().rem_euclid(DAY) / DAY;
        let part = (of_day * self.parts as f64) as usize;
        self.cycle.class(seconds.round(), self.calendar) * self.parts + part
    }

    /// Whether a time lies on day 365 of a year without a day 366.
    fn is_last_of_365(self, seconds: f64) -> bool {
        let day = |seconds: f64| self.calendar.day_of_year(seconds);
        let seconds = seconds.round();
        day(seconds) == Some(365) && day(seconds + DAY) == Some(1)
    }
}

/// Sharded means of the normalised targets over the training period, by time of year and of day.
#[derive(Debug)]
pub(super) struct Climatology {
    times: Times,
    /// `[1, targets, lat, lon]` for each class.
    means: Vec<ShardTensor<4>>,
}

/// Name of the tensor in its checkpoint.
const NAME: &str = "climatology";
/// Name of its checkpoint in its folder.
const SAVED: &str = "step_000000000";
/// Name of the cycle and of the parts of a day in its checkpoint.
const TIMES: &str = "times";

impl Climatology {
    /// Returns the cycle and the number of parts of a day of the climatology in a folder, if it
    /// holds one.
    pub(super) fn resolution(folder: &Path) -> Result<Option<(Cycle, usize)>> {
        let saved = folder.join(SAVED);
        if !saved.exists() {
            return Ok(None);
        }
        let (cycle, parts, _): (Cycle, usize, bool) = Checkpoint::open(saved)?.value(TIMES)?;
        Ok(Some((cycle, parts)))
    }

    /// Loads the climatology from a folder, if it holds one that is wanted, by its cycle, its number
    /// of parts of a day, and whether the cycle is the default one.
    pub(super) fn load(
        world: &World,
        (mesh, placements): (&DeviceMesh, &[Placement]),
        folder: &Path,
        is_wanted: impl FnOnce(Cycle, usize, bool) -> bool,
        calendar: Calendar,
    ) -> Result<Option<Self>> {
        let Some(saved) = Checkpoint::latest(world, folder)? else {
            return Ok(None);
        };
        let (cycle, parts, is_default): (Cycle, usize, bool) = saved.value(TIMES)?;
        if !is_wanted(cycle, parts, is_default) {
            return Ok(None);
        }
        let all = saved.sharded::<4, Float>(mesh, NAME, placements)?.inner();
        let class = |class| all.clone().narrow(0, class, 1);
        Ok(Some(Self {
            times: Times {
                cycle,
                is_default,
                parts,
                calendar,
            },
            means: (0..all.dims()[0]).map(class).collect(),
        }))
    }

    /// Returns the same means for times of another calendar.
    pub(super) fn with_calendar(mut self, calendar: Calendar) -> Self {
        self.times.calendar = calendar;
        self
    }

    /// Returns the same means, in the same memory, on another mesh with the same axes, on which
    /// this rank holds the same part of a field.
    ///
    /// # Panics
    /// Panics for a mesh on which a dim has another number of parts.
    pub(super) fn on_mesh(&self, mesh: &DeviceMesh) -> Self {
        let moved = |mean: &ShardTensor<4>| {
            let (local, layout, _) = mean.clone().into_parts();
            let extents = layout.all_extents().to_vec();
            let moved = Layout::replicated(mesh.shape(), layout.shape())
                .derive(layout.placements().to_vec(), extents);
            ShardTensor::from_parts(local, moved, mesh.clone())
        };
        Self {
            times: self.times,
            means: self.means.iter().map(moved).collect(),
        }
    }

    /// Computes the climatology from the targets of a loader's samples, and saves it in a folder,
    /// unless another job has it open or it cannot be written.
    pub(super) fn compute(
        world: &World,
        folder: &Path,
        times: Times,
        loader: &FieldLoader,
    ) -> Result<Self> {
        let means = compute(world, loader, times)?;
        let climatology = Self { times, means };
        // Opened only now, because another job, such as training, may need the folder in the
        // meantime.
        match Checkpoints::open(world, folder, &CheckpointConfig::new()) {
            Ok(checkpoints) => climatology.save(world, checkpoints)?,
            Err(error) if world.is_root() => {
                eprintln!("halocline: the climatology is not saved: {error}");
            }
            Err(_) => {}
        }
        Ok(climatology)
    }

    /// Saves the climatology in a folder.
    pub(super) fn save(&self, world: &World, mut checkpoints: Checkpoints) -> Result<()> {
        let Times {
            cycle,
            is_default,
            parts,
            ..
        } = self.times;
        let mut snapshot = Snapshot::new(world);
        snapshot.sharded(NAME, &ShardTensor::cat(self.means.clone(), 0))?;
        snapshot.value(TIMES, &(cycle, parts, is_default))?;
        checkpoints.save(0, snapshot, None)?;
        checkpoints.wait()
    }

    /// Returns the means at these times, `[times, targets, lat, lon]`, whole along the batch.
    pub(super) fn at(&self, times: &[f64]) -> ShardTensor<4> {
        let mean = |time: &f64| self.means[self.times.class(*time)].clone();
        let means: Vec<_> = times.iter().map(mean).collect();
        match &means[..] {
            [one] => one.clone(),
            _ => ShardTensor::cat(means, 0),
        }
    }
}

/// Computes the means of the targets of a loader's samples.
fn compute(world: &World, loader: &FieldLoader, times: Times) -> Result<Vec<ShardTensor<4>>> {
    let mut sums = Sums::new(times);
    let progress = Progress::new(world.rank(), NAME, loader.batches());
    for batch in loader.epoch(0) {
        let batch = batch?;
        let values = batch.target.inner();
        let count = batch
            .mask
            .map_or_else(|| values.clone() * 0.0 + 1.0, ShardTensor::inner);
        sums.add(batch.times[0], [values, count]);
        progress.advance();
    }
    progress.finish();
    let all = sums.classes.iter().cloned().fold(None, added);
    let [sum, count] = all.expect("a loader has samples");
    let whole = sum / count.clamp_min(1.0);
    // Times of the year without a value take the mean of their part of the day, and parts of the
    // day without a value the mean of all times.
    let part = |part: usize| {
        let sums = sums.classes.iter().skip(part).step_by(times.parts);
        mean(sums.cloned().fold(None, added), &whole)
    };
    let parts: Vec<ShardTensor<4>> = (0..times.parts).map(part).collect();
    let classes = sums.over_days_around().into_iter().enumerate();
    let means = classes.map(|(class, sum)| mean(sum, &parts[class % times.parts]));
    Ok(means.collect())
}

/// Returns the mean of a sum, and `other` in cells without a value.
fn mean(sum: Option<Sum>, other: &ShardTensor<4>) -> ShardTensor<4> {
    match sum {
        None => other.clone(),
        Some([sum, count]) => {
            let none = count.clone().lower_elem(0.5);
            (sum / count.clamp_min(1.0)).mask_where(none, other.clone())
        }
    }
}

/// Sum of values, and their number.
type Sum = [ShardTensor<4>; 2];

fn added(one: Option<Sum>, other: Option<Sum>) -> Option<Sum> {
    match (one, other) {
        (Some([a, b]), Some([c, d])) => Some([a + c, b + d]),
        (one, other) => one.or(other),
    }
}

/// Sums of the values at the times of each class.
struct Sums {
    times: Times,
    classes: Vec<Option<Sum>>,
    /// Sums over the last days of years without a day 366, for each part of a day.
    last_days: Vec<Option<Sum>>,
}

impl Sums {
    fn new(times: Times) -> Self {
        Self {
            times,
            classes: vec![None; times.classes()],
            last_days: vec![None; times.parts],
        }
    }

    fn add(&mut self, seconds: f64, values: Sum) {
        let class = self.times.class(seconds);
        if self.times.cycle == Cycle::Day && self.times.is_last_of_365(seconds) {
            let sum = &mut self.last_days[class % self.times.parts];
            *sum = added(sum.take(), Some(values.clone()));
        }
        let sum = &mut self.classes[class];
        *sum = added(sum.take(), Some(values));
    }

    /// Returns the [`smoothed`] sums. Years without a day 366 repeat their last day there.
    fn over_days_around(self) -> Vec<Option<Sum>> {
        let Self {
            times,
            mut classes,
            last_days,
        } = self;
        let day_366 = classes.len() - times.parts;
        for (sum, last) in classes[day_366..].iter_mut().zip(last_days) {
            *sum = added(sum.take(), last);
        }
        smoothed(classes, times)
    }
}

/// Returns the sums over the days around each day, at the same part of the day, with weights that
/// fall linearly to zero. Sums of other cycles stay as they are.
fn smoothed(sums: Vec<Option<Sum>>, times: Times) -> Vec<Option<Sum>> {
    if times.cycle != Cycle::Day {
        return sums;
    }
    // A box over a box is a triangle; both begin at their first day.
    let boxes = windows(sums, REACH, times.parts);
    let mut triangles = windows(boxes, REACH, times.parts);
    triangles.rotate_right((REACH - 1) * times.parts);
    triangles
}

/// Returns for each entry of a cycle the sum of `width` entries from it on, spaced by `distance`.
/// It is made of sums over powers of two, so that nothing is subtracted.
fn windows(sums: Vec<Option<Sum>>, width: usize, distance: usize) -> Vec<Option<Sum>> {
    let count = sums.len();
    let (mut powers, mut whole, mut reached) = (sums, vec![None; count], 0);
    let mut length = 1;
    loop {
        if width & length != 0 {
            for (class, sum) in whole.iter_mut().enumerate() {
                let after: &Option<Sum> = &powers[(class + reached * distance) % count];
                *sum = added(sum.take(), after.clone());
            }
            reached += length;
        }
        if reached == width {
            return whole;
        }
        // In place, with a copy of the first entries, which are read again after they have changed.
        let step = length * distance % count;
        let first = powers[..step].to_vec();
        for class in 0..count {
            let after = if class + step < count {
                powers[class + step].clone()
            } else {
                first[class + step - count].clone()
            };
            powers[class] = added(powers[class].take(), after);
        }
        length *= 2;
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use halocline_core::Launcher;
    use halocline_io::parse_time;

    use super::*;
    use crate::experiment::fixture::{config_in, wave, write_fields, write_waves};
    use crate::experiment::{Experiment, ExperimentConfig};

    #[test]
    fn a_climatology_that_cannot_be_saved_is_used() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "", "");
        // A folder in place of the file that a job locks.
        let lock = config.folder.join("climatology/.lock");
        std::fs::create_dir_all(&lock).unwrap();
        let classes = |config: &ExperimentConfig| {
            let found = Launcher::local(1).collect(|world| {
                let experiment = Experiment::new(&world, config)?;
                Ok(experiment.climatology()?.means.len())
            });
            found.unwrap()[0]
        };
        let saved = config.folder.join("climatology/step_000000000");
        assert_eq!((classes(&config), saved.exists()), (1, false));
        std::fs::remove_dir(&lock).unwrap();
        assert_eq!((classes(&config), saved.exists()), (1, true));
        // The model does not see the climatology, so its keys may change.
        let other = config_in(
            folder.path(),
            "climatology = \"day\"\nclimatology_hours = 6",
            "",
        );
        assert_eq!(classes(&other), 4 * 366);
        assert_eq!(classes(&config), 1);
    }

    #[test]
    fn parts_of_a_day_have_means_of_their_own() {
        let times = |cycle, parts| Times {
            cycle,
            is_default: false,
            parts,
            calendar: Calendar::Gregorian,
        };
        let hours = |hours: f64| hours * 3600.0;
        let months = times(Cycle::Month, 4);
        assert_eq!(months.classes(), 48);
        for (time, class) in [
            (0.0, 0),
            (hours(5.9), 0),
            // Rounded in its file.
            (hours(6.0) - 1e-3, 1),
            (hours(23.0), 3),
            (hours(24.0) - 1e-3, 0),
            (hours(24.0 * 31.0 + 12.0), 6),
            (-hours(1.0), 47),
        ] {
            assert_eq!(months.class(time), class, "{time}");
        }
        assert_eq!(times(Cycle::Day, 1).class(hours(-1.0)), 364);
        assert_eq!(times(Cycle::Mean, 24).class(hours(49.0)), 1);
    }

    #[test]
    fn a_month_without_values_has_the_mean_of_each_part_of_the_day() {
        let folder = tempfile::tempdir().unwrap();
        // Three days of January; one cell has values at midnight only.
        write_fields(folder.path(), |time, cell| match (time % 4, cell) {
            (1.., (0, 2, 3)) => f32::NAN,
            (part, _) => wave(time, cell) + 10.0 * part as f32,
        });
        let keys = "missing = \"fill\"\nclimatology = \"month\"\nclimatology_hours = 6";
        let config = config_in(folder.path(), keys, "");
        let run = Launcher::local(1).run(|world| {
            let experiment = Experiment::new(&world, &config)?;
            let climatology = experiment.climatology()?;
            let means = |day: f64, hour: f64| {
                let means = climatology.at(&[DAY * day + 3600.0 * hour]);
                let data = means.local().clone().into_data();
                data.iter::<f32>().collect::<Vec<f32>>()
            };
            for hour in [0.0, 6.0, 12.0, 18.0] {
                assert_eq!(means(40.0, hour), means(0.0, hour), "{hour}");
            }
            let [night, morning] = [0.0, 6.0].map(|hour| means(40.0, hour));
            let alike = night
                .iter()
                .zip(&morning)
                .filter(|(one, other)| one == other);
            assert_eq!(alike.count(), 1, "the cell without a value in the morning");
            Ok(())
        });
        run.unwrap();
    }

    /// Sum of a single cell.
    fn sum(value: usize) -> Option<Sum> {
        let field = Tensor::<4>::full([1, 1, 1, 1], value as f64, &Default::default());
        Some([ShardTensor::solo(field.clone()), ShardTensor::solo(field)])
    }

    fn number(sum: &Option<Sum>) -> usize {
        let [sum, _] = sum.clone().unwrap();
        sum.local().clone().into_scalar::<f32>() as usize
    }

    /// The weights of `create_window_weights(61)` of WeatherBench 2, times 30.
    #[test]
    fn days_around_a_day_have_weights_that_fall_linearly() {
        let times = Times {
            cycle: Cycle::Day,
            is_default: false,
            parts: 2,
            calendar: Calendar::Gregorian,
        };
        let mut sums = vec![None; times.classes()];
        let day = 10;
        sums[2 * day + 1] = sum(1);
        let found = smoothed(sums.clone(), times);
        for (class, found) in found.iter().enumerate() {
            let days = (class / 2).abs_diff(day);
            let weight = 30_usize.saturating_sub(days.min(366 - days));
            if class % 2 == 1 && weight > 0 {
                assert_eq!(number(found), weight, "{class}");
            } else {
                assert!(found.is_none(), "{class}");
            }
        }
        let cycle = Cycle::Mean;
        assert!(smoothed(sums, Times { cycle, ..times })[2 * day + 3].is_none());
    }

    #[test]
    fn years_of_365_days_repeat_their_last_day() {
        let times = Times {
            cycle: Cycle::Day,
            is_default: false,
            parts: 2,
            calendar: Calendar::Gregorian,
        };
        // Days 365 of 2019, and 365 and 366 of 2020, in the afternoon.
        let found = ["2019-12-31T18", "2020-12-30T18", "2020-12-31T18"].map(|date| {
            let mut sums = Sums::new(times);
            let time = parse_time(date, Calendar::Gregorian).unwrap();
            sums.add(time, sum(1).unwrap());
            assert_eq!(sums.classes.iter().flatten().count(), 1);
            let smoothed = sums.over_days_around();
            assert!(smoothed[2 * 365].is_none());
            [364, 365].map(|day| number(&smoothed[2 * day + 1]))
        });
        assert_eq!(found, [[30 + 29, 29 + 30], [30, 29], [29, 30]]);
    }

    #[test]
    fn windows_are_sums_of_entries_at_a_distance() {
        let values: Vec<usize> = (0..14).map(|value| value * value).collect();
        for width in [1, 2, 5, 7] {
            let found = windows(values.iter().copied().map(sum).collect(), width, 2);
            for (class, found) in found.iter().enumerate() {
                let entries = (0..width).map(|entry| values[(class + 2 * entry) % 14]);
                assert_eq!(
                    number(found),
                    entries.sum::<usize>(),
                    "{width} from {class}"
                );
            }
        }
        assert!(windows(vec![None, sum(3), None], 2, 1)[2].is_none());
    }
}
