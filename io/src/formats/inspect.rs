use std::f64::consts::{FRAC_PI_2, TAU};
use std::fmt;
use std::path::{Path, PathBuf};

use halocline_core::Boundary;

use super::open::{FIELD_FILE, format_name};
use crate::fields::amplification::{assumed_ranks, of_chunk};
use crate::grid::degrees::{apart, is_equal};
use crate::time::times::distinct_steps;
use crate::{Calendar, Channel, Fields, Gaps, Grid, Missing, OpenConfig, Result};

/// Selection of the values that [`inspect`] reads.
///
/// See [`inspect`] for an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// Values at the first, the middle and the last time.
    Sample,
    /// All values.
    All,
}

/// Content and problems of a file or store. `Display` formats them as a report.
///
/// See [`inspect`] for an example.
#[derive(Clone, Debug)]
pub struct Inspection {
    path: PathBuf,
    format: &'static str,
    grid: Grid,
    calendar: Calendar,
    times: Vec<f64>,
    scanned: usize,
    variables: Vec<Variable>,
    left_out: Vec<String>,
    problems: Vec<String>,
}

/// Variable with all its levels.
#[derive(Clone, Debug)]
struct Variable {
    channel: Channel,
    levels: Vec<String>,
    values: Values,
}

/// Counts, sum and bounds of values.
#[derive(Clone, Copy, Debug)]
struct Values {
    count: usize,
    missing: usize,
    infinite: usize,
    sum: f64,
    least: f32,
    most: f32,
}

/// Inspects a file or store: grid, times, variables with their chunks and values, and problems.
///
/// Missing values and uneven steps are reported as problems, regardless of their handling in
/// `config`.
///
/// # Errors
/// Errors of [`OpenConfig::open`], except missing values and gaps; values that cannot be read.
///
/// # Example
/// ```
/// # use halocline_io::{FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
/// # for (index, hour) in [0.0, 6.0, 12.0, 24.0].into_iter().enumerate() {
/// #     let field = halocline_io::ndarray::Array3::from_elem((1, 4, 8), 280.0 + index as f32);
/// #     writer.append(hour * 3600.0, field.view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::{OpenConfig, Scan, inspect};
///
/// let found = inspect(&path, &OpenConfig::new(), Scan::All)?; // fields at 0, 6, 12 and 24 h
/// assert!(found.problems()[0].starts_with("time steps differ: 6 h (2 times), 12 h (once)"));
/// println!("{found}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn inspect(path: impl AsRef<Path>, config: &OpenConfig, scan: Scan) -> Result<Inspection> {
    let path = path.as_ref();
    let config = config.clone();
    let config = config.with_missing(Missing::Allow).with_gaps(Gaps::Allow);
    let fields = config.open(path)?;
    let times = fields.times().to_vec();
    let last = times.len().saturating_sub(1);
    let mut chosen: Vec<usize> = match scan {
        Scan::Sample => vec![0, last / 2, last],
        Scan::All => (0..times.len()).collect(),
    };
    chosen.dedup();
    chosen.retain(|time| *time < times.len());
    let mut found = Inspection {
        path: path.into(),
        format: format_name(path)?,
        grid: fields.grid().clone(),
        calendar: fields.calendar(),
        scanned: chosen.len(),
        variables: variables(&fields, &chosen)?,
        left_out: fields.left_out().iter().map(ToString::to_string).collect(),
        problems: Vec::new(),
        times,
    };
    found.problems = found.find_problems();
    Ok(found)
}

/// Reads the variables and summarises their values at some times.
fn variables(fields: &dyn Fields, times: &[usize]) -> Result<Vec<Variable>> {
    let [_, _, rows, columns] = fields.shape();
    let mut all: Vec<Variable> = Vec::new();
    for index in 0..fields.channels().len() {
        let channel = fields.describe(index);
        let mut values = Values::none();
        for &time in times
            .iter()
            .take(if channel.is_static { 1 } else { times.len() })
        {
            let cells = [time..time + 1, index..index + 1, 0..rows, 0..columns];
            fields
                .read(cells)?
                .iter()
                .for_each(|value| values.add(*value));
        }
        let level = channel.level().map(|level| level.to_string());
        match all.last_mut() {
            Some(last) if last.channel.variable() == channel.variable() => {
                last.levels.extend(level);
                last.values.merge(values);
            }
            _ => all.push(Variable {
                levels: level.into_iter().collect(),
                channel,
                values,
            }),
        }
    }
    Ok(all)
}

impl Inspection {
    /// Returns the problems: properties that prevent or slow down reading, or make the values
    /// unusable.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    fn find_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(self.grid.cells().and_then(problem_of_cells));
        if let Some(columns @ 1..) = self.grid.columns_repeated() {
            problems.push(format!(
                "the last {columns} columns repeat the first, so that the grid is not periodic; leave them out"
            ));
        }
        let steps = distinct_steps(&self.times);
        if steps.len() > 1 {
            let text = steps.iter().take(4).map(|(step, count)| match count {
                1 => format!("{} (once)", duration(*step)),
                count => format!("{} ({count} times)", duration(*step)),
            });
            let text = text.collect::<Vec<_>>().join(", ");
            problems.push(format!(
                "time steps differ: {text}; choose Gaps::Skip or Gaps::Allow"
            ));
        }
        for Variable {
            channel, values, ..
        } in &self.variables
        {
            let name = channel.variable();
            if values.missing > 0 {
                let share = 100.0 * values.missing as f64 / values.count as f64;
                problems.push(format!(
                    "{name}: {share:.1} % of the values read are missing; choose Missing::Allow"
                ));
            }
            if values.infinite > 0 {
                problems.push(format!(
                    "{name}: {} of the values read are infinite; statistics refuse them",
                    values.infinite
                ));
            }
            if values.finite() > 0 && values.least == values.most && !channel.is_static {
                let value = values.least;
                problems.push(format!(
                    "{name}: all values read are {value}; without variation it cannot be normalised"
                ));
            }
            let [rows, columns] = self.grid.shape();
            let ranks @ [lat, lon] = assumed_ranks(rows);
            let shape = [self.times.len(), rows, columns];
            let amplification = of_chunk(channel, shape, ranks);
            if amplification > 1.5 {
                let local = if self.format == FIELD_FILE {
                    String::new()
                } else {
                    let shared = of_chunk(channel, shape, [1, 1]);
                    format!(
                        " (each a process; at most {shared:.1} times as local ranks, which share chunks)"
                    )
                };
                problems.push(format!(
                    "{name}: {lat} x {lon} ranks decode {amplification:.1} times what they need{local}, as chunks hold \
                     more than a time of a shard; rechunk for the mesh"
                ));
            }
        }
        problems
    }
}

/// Returns the problem of the latitudes and longitudes of cells, if there is one.
fn problem_of_cells([lat, lon]: [&[f64]; 2]) -> Option<String> {
    let count = lat.len();
    let is_first = |cell: usize| is_equal(lat[cell], lat[0]) && is_equal(lon[cell], lon[0]);
    if count > 1 && (0..count).all(is_first) {
        let (lat, lon) = (lat[0], lon[0]);
        return Some(format!(
            "all {count} cells are at latitude {lat}, longitude {lon}"
        ));
    }
    // Radians may be rounded to single precision.
    let is_small =
        |cell: usize| lat[cell].abs() <= FRAC_PI_2 + 1e-6 && apart(lon[cell], 0.0) <= TAU + 1e-6;
    let text = "all latitudes of the cells are within π/2 and all longitudes within 2π degrees; if these are \
                radians, set units = \"radian\" of both";
    (count > 1 && (0..count).all(is_small)).then(|| text.into())
}

impl Values {
    fn none() -> Self {
        Self {
            count: 0,
            missing: 0,
            infinite: 0,
            sum: 0.0,
            least: f32::INFINITY,
            most: f32::NEG_INFINITY,
        }
    }

    fn add(&mut self, value: f32) {
        self.count += 1;
        if value.is_nan() {
            self.missing += 1;
        } else if value.is_infinite() {
            self.infinite += 1;
        } else {
            self.sum += f64::from(value);
            self.least = self.least.min(value);
            self.most = self.most.max(value);
        }
    }

    fn finite(&self) -> usize {
        self.count - self.missing - self.infinite
    }

    fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.missing += other.missing;
        self.infinite += other.infinite;
        self.sum += other.sum;
        self.least = self.least.min(other.least);
        self.most = self.most.max(other.most);
    }
}

/// Gap between longitudes, in degrees, from which on they are those of a region.
const REGION: f64 = 45.0;

/// Returns the least and the largest of longitudes from 0 to 360 or, of a region across the prime
/// meridian, its ends from west to east, of which the first is negative.
fn west_to_east(lon: &[f64]) -> [f64; 2] {
    let mut sorted = lon.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let [least, most] = [sorted[0], sorted[sorted.len() - 1]];
    let gaps = sorted
        .windows(2)
        .map(|pair| (pair[1] - pair[0], [pair[1] - 360.0, pair[0]]));
    let widest = gaps.max_by(|(one, _), (other, _)| one.total_cmp(other));
    match widest {
        Some((gap, ends)) if gap > REGION.max(least + 360.0 - most) => ends,
        _ => [least, most],
    }
}

/// Formats a duration in the largest unit that it reaches.
fn duration(seconds: f64) -> String {
    let units = [(86400.0, "d"), (3600.0, "h"), (60.0, "min")];
    let unit = units.into_iter().find(|(unit, _)| seconds >= *unit);
    let (unit, name) = unit.unwrap_or((1.0, "s"));
    format!("{} {name}", (seconds / unit * 1e4).round() / 1e4)
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([rows, columns], grid) = (self.grid.shape(), &self.grid);
        writeln!(f, "{}: {}", self.path.display(), self.format)?;
        match grid.cells() {
            Some([lat, lon]) => {
                let text =
                    |[first, last]: [f64; 2]| format!("{} to {}", number(first), number(last));
                let range = |values: &[f64]| {
                    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
                    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    text([least, most])
                };
                let (lat, lon) = (range(lat), text(west_to_east(lon)));
                let around = match grid.boundary()[1] {
                    Boundary::Periodic => ", periodic along the rows",
                    _ => "",
                };
                writeln!(f, "  grid       {grid}{around}")?;
                writeln!(f, "  cells      latitude {lat}, longitude {lon}")?;
                if let Some(weights) = grid.cell_weights() {
                    let zeros = match weights.iter().filter(|weight| **weight == 0.0).count() {
                        0 => String::new(),
                        count => format!(", zero for {count} cells"),
                    };
                    writeln!(f, "  areas      {} times the mean{zeros}", range(&weights))?;
                }
            }
            None if !grid.has_positions() => {
                writeln!(f, "  grid       {columns} cells without positions")?;
            }
            None => writeln!(
                f,
                "  grid       {rows} x {columns}, {}: {grid}",
                grid.kind()
            )?,
        }
        if let [first, .., last] = self.times[..] {
            let dates = [first, last].map(|time| self.calendar.date(time));
            let steps = distinct_steps(&self.times);
            writeln!(
                f,
                "  times      {} from {} to {}, {}, step {}{}",
                self.times.len(),
                dates[0],
                dates[1],
                self.calendar,
                duration(steps[0].0),
                if steps.len() > 1 { " and others" } else { "" }
            )?;
        } else if let [time] = self.times[..] {
            writeln!(
                f,
                "  times      one, {}, {}{}",
                self.calendar.date(time),
                self.calendar,
                if time == 0.0 {
                    "; so is that of files without a time axis"
                } else {
                    ""
                }
            )?;
        }
        writeln!(f, "  values     of {} times", self.scanned)?;
        let width = self
            .variables
            .iter()
            .map(|variable| variable.channel.variable().len())
            .max();
        let width = width.unwrap_or(0).max(8);
        writeln!(
            f,
            "\n  {:width$}  {:>12}  {:>11} {:>11} {:>11}  {:>8}  {:>20}  levels",
            "variable", "units", "least", "mean", "most", "missing", "chunk"
        )?;
        for Variable {
            channel,
            levels,
            values,
        } in &self.variables
        {
            let mean = values.sum / values.finite() as f64;
            let [least, mean, most] =
                [f64::from(values.least), mean, f64::from(values.most)].map(number);
            let chunk = channel
                .chunk
                .map_or("none".into(), |chunk| format!("{chunk:?}"));
            let levels = match (&levels[..], channel.is_static) {
                ([], true) => "static".into(),
                ([], false) => String::new(),
                ([first, .., last], _) => {
                    let units = channel.level_units.as_deref().unwrap_or_default();
                    format!("{} from {first} to {last} {units}", levels.len())
                }
                ([level], _) => level.clone(),
            };
            writeln!(
                f,
                "  {:width$}  {:>12}  {least:>11} {mean:>11} {most:>11}  {:>8}  {chunk:>20}  {levels}",
                channel.variable(),
                channel.units.as_deref().unwrap_or("-"),
                values.missing,
            )?;
        }
        for (title, lines) in [
            ("not channels", &self.left_out),
            ("problems", &self.problems),
        ] {
            if !lines.is_empty() {
                writeln!(f, "\n  {title}:")?;
                lines
                    .iter()
                    .try_for_each(|line| writeln!(f, "    {line}"))?;
            }
        }
        if self.problems.is_empty() {
            writeln!(
                f,
                "\n  no problems found in the values of {} times",
                self.scanned
            )?;
        }
        Ok(())
    }
}

/// Formats a number in at most eleven characters.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    match magnitude {
        _ if !value.is_finite() => "-".into(),
        _ if magnitude != 0.0 && !(1e-3..1e7).contains(&magnitude) => format!("{value:.3e}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_infinite_values_are_counted_apart() {
        let [mut values, mut others] = [Values::none(), Values::none()];
        for value in [1.0, f32::NAN, f32::INFINITY, 3.0] {
            values.add(value);
        }
        for value in [f32::NEG_INFINITY, -4.0] {
            others.add(value);
        }
        values.merge(others);
        assert_eq!(
            (values.missing, values.infinite, values.finite()),
            (1, 2, 3)
        );
        assert_eq!((values.sum, values.least, values.most), (0.0, -4.0, 3.0));
    }

    #[test]
    fn positions_in_radians_and_cells_at_one_place_are_problems() {
        let problem = |lat: [f64; 3], lon: [f64; 3]| {
            let grid = Grid::unstructured(lat.into(), lon.into()).unwrap();
            grid.cells().and_then(problem_of_cells)
        };
        let radians = problem([-1.5, 0.0, 1.5], [-3.1, 0.0, 3.1]).unwrap();
        assert!(radians.contains("if these are radians"), "{radians}");
        let same = problem([10.0; 3], [20.0; 3]).unwrap();
        assert_eq!(same, "all 3 cells are at latitude 10, longitude 20");
        assert_eq!(problem([-1.5, 0.0, 1.5], [0.0, 10.0, 20.0]), None);
        assert_eq!(problem([-80.0, 0.0, 80.0], [0.0, 1.0, 2.0]), None);
    }

    #[test]
    fn longitudes_across_the_prime_meridian_are_one_arc() {
        assert_eq!(west_to_east(&[350.0, 10.0, 0.0, 20.0]), [-10.0, 20.0]);
        assert_eq!(west_to_east(&[30.0, 10.0]), [10.0, 30.0]);
        assert_eq!(west_to_east(&[0.0, 90.0, 180.0, 270.0]), [0.0, 270.0]);
        assert_eq!(west_to_east(&[5.0]), [5.0, 5.0]);
    }

    #[test]
    fn durations_and_numbers_are_short() {
        let names = [21600.0, 86400.0, 90.0, 0.5, 2_629_746.0].map(duration);
        assert_eq!(names, ["6 h", "1 d", "1.5 min", "0.5 s", "30.4369 d"]);
        assert_eq!(
            [273.15, 0.0, 1e-9, f64::NAN].map(number),
            ["273.150", "0.000", "1.000e-9", "-"]
        );
    }
}
