//! Data of an experiment: selection and reading of the files.

use std::path::PathBuf;

use halocline_core::{Error, Result};
use halocline_io::{
    Calendar, Channel, Channels, DatasetConfig, FieldDataset, Fields, Gaps, Grid, Missing,
    OpenConfig, Period, Progress, Series, Statistics, StatisticsBuilder,
};

use super::channels::{odd, with_all_levels};
use super::data_config::DataConfig;
use super::patterns::{check_distinct, expanded};
use super::timeline::Timeline;

/// Channels, grid and times of an experiment's files.
#[derive(Clone, Debug)]
pub(super) struct Data {
    config: DataConfig,
    /// File of static fields in place of those of the files.
    pub(super) static_fields: Option<PathBuf>,
    /// Channels of the files that samples consist of.
    pub(super) files: Vec<Channel>,
    pub(super) channels: Channels,
    /// Units and names of the targets.
    pub(super) described: Vec<Channel>,
    pub(super) grid: Grid,
    pub(super) calendar: Calendar,
    /// Inputs and forcings that change sign across a pole.
    pub(super) odd: Vec<String>,
    /// Usual time between two fields, in seconds.
    pub(super) time_step: f64,
    /// Whether any forcing is read from the files at the time from which a step starts.
    pub(super) forcings_change: bool,
}

/// Content of samples.
#[derive(Clone, Copy, Debug)]
pub(super) enum Samples {
    /// An input, and the targets of this number of steps after it.
    Steps(usize),
    /// An input, and the targets at its time.
    States,
    /// The targets at each time, as inputs too, including times whose history would begin before the
    /// files do.
    Targets,
}

impl Data {
    /// Opens the files of training, which may be patterns.
    pub(super) fn open(config: &DataConfig) -> Result<Self> {
        let config = DataConfig {
            files: expanded(&config.files)?,
            ..config.clone()
        };
        let samples = dataset(&config, &config.train, Samples::Steps(1));
        let dataset = open_dataset(&config.files, &samples)?;
        config.check_periods(dataset.calendar())?;
        Self::of(config, &dataset, dataset.metadata().time_step())
    }

    /// Opens other files than those of training, which may have a single time, for a model trained
    /// on the data of these statistics. Rows and columns are read in the order of training. Static
    /// fields, if a file of them is given, replace those of the files.
    ///
    /// # Errors
    /// A file that is named twice; another grid than in training; a missing channel.
    pub(super) fn open_others(
        config: &DataConfig,
        (files, static_fields): (&[PathBuf], Option<PathBuf>),
        trained: &Statistics,
    ) -> Result<Self> {
        check_distinct("files", files)?;
        let trained = trained.metadata();
        let constants = match &config.constants {
            None => Vec::new(),
            Some(path) => {
                let open = OpenConfig::new().with_gaps(Gaps::Allow);
                let open = open.with_missing(Missing::Allow).open(path)?;
                open.channels().to_vec()
            }
        };
        let mut config = with_all_levels(config, trained.channels(), &constants);
        config.files = files.to_vec();
        if config.gaps != Gaps::Allow {
            // Steps have the length that was learnt, whatever the gaps.
            let learnt = trained.time_step() / 3600.0;
            config.lead_hours = config.lead_hours.or(Some(learnt));
            config.gaps = Gaps::Allow;
        }
        let states = dataset(&config, &Period::default(), Samples::States)
            .with_static_fields(static_fields.clone());
        let dataset = open_on(trained.grid(), files, states)?;
        let data = Self::of(config, &dataset, trained.time_step())?;
        Ok(Self {
            static_fields,
            ..data
        })
    }

    fn of(config: DataConfig, dataset: &FieldDataset, time_step: f64) -> Result<Self> {
        let metadata = dataset.metadata();
        if config.anomalies {
            // Inputs take their climatology from the targets, so every input must be a target.
            dataset.channels().feedback()?;
        }
        let changes = |name: &String| {
            let channel = dataset.describe_channel(name);
            channel.is_some_and(|channel| !channel.is_static)
        };
        Ok(Self {
            forcings_change: dataset.channels().forcings.iter().any(changes),
            odd: odd(&config, dataset)?,
            config,
            static_fields: None,
            files: metadata
                .channels()
                .iter()
                .filter_map(|name| dataset.describe_channel(name))
                .collect(),
            channels: dataset.channels().clone(),
            described: dataset.describe(),
            grid: metadata.grid().clone(),
            calendar: dataset.calendar(),
            time_step,
        })
    }

    /// Reads rows and columns in the order of the statistics, which is that of training: joined
    /// files that are listed in another order may begin with one in another order of rows. Areas of
    /// cells count if they did in training.
    pub(super) fn in_order_of(mut self, statistics: &Statistics) -> Self {
        self.grid = as_in_training(self.grid, statistics.metadata().grid());
        self
    }

    /// Returns the length of a step in seconds; `None` if a step leads to the next field.
    pub(super) fn lead(&self) -> Option<f64> {
        self.config.lead_hours.map(|hours| hours * 3600.0)
    }

    /// Returns the index of each input among the targets, by which forecasts of several steps feed
    /// predictions back; none for one step, whose inputs may have other channels than targets.
    pub(super) fn feedback(&self, steps: usize) -> Result<Vec<usize>> {
        match steps {
            1 => Ok(Vec::new()),
            _ => Ok(self.channels.feedback()?),
        }
    }

    /// Returns the number of samples of the training period with targets of this number of steps.
    pub(super) fn samples(&self, steps: usize) -> Result<usize> {
        let dataset = self.open_samples(&self.config.train, Samples::Steps(steps))?;
        Ok(dataset.len())
    }

    /// Opens the samples of a period, normalised.
    pub(super) fn dataset(
        &self,
        period: &Period,
        samples: Samples,
        statistics: &Statistics,
    ) -> halocline_io::Result<FieldDataset> {
        self.open_samples(period, samples)?
            .with_statistics(statistics)
    }

    /// Opens the samples of a period.
    ///
    /// # Errors
    /// Several steps, where only fewer lead from one time of the period to another: those of the
    /// curriculum.
    fn open_samples(
        &self,
        period: &Period,
        samples: Samples,
    ) -> halocline_io::Result<FieldDataset> {
        use halocline_io::Error::{Argument, TooShort};
        let mut config = self.dataset_config(period, samples);
        if let Samples::Targets = samples {
            // Other inputs are not read; the files are those of all channels.
            config.open.channels = Some(self.names());
            config.inputs = Some(self.channels.targets.clone());
            config.targets = None;
        }
        open_on(&self.grid, &self.config.files, config).map_err(|error| match (error, samples) {
            (TooShort { most_steps, .. }, Samples::Steps(steps)) if most_steps > 0 => Argument {
                argument: "training.curriculum",
                got: format!("{steps} steps"),
                expected: format!(
                    "at most {most_steps}, the most between two times of data.train ({period})"
                ),
            },
            (error, _) => error,
        })
    }

    /// Opens the states of a period in the units of the files, with NaN for missing values.
    pub(super) fn states_in_units(&self, period: &Period) -> halocline_io::Result<FieldDataset> {
        let config = self.dataset_config(period, Samples::States);
        open_on(
            &self.grid,
            &self.config.files,
            config.with_missing(Missing::Allow),
        )
    }

    /// Opens the times of a period with these channels of the files alone, in units, with NaN for
    /// missing values.
    pub(super) fn channels_in_units(
        &self,
        period: &Period,
        channels: Vec<String>,
    ) -> halocline_io::Result<FieldDataset> {
        let mut config = self
            .dataset_config(period, Samples::Targets)
            .with_missing(Missing::Allow)
            .with_gaps(Gaps::Allow)
            .with_inputs(Some(channels))
            .with_targets(None)
            .with_forcings(Vec::new())
            .with_constants(None)
            .with_constants_missing(Vec::new());
        // Files of other channels are opened, too.
        config.open.channels = Some(self.names());
        open_on(&self.grid, &self.config.files, config)
    }

    fn dataset_config(&self, period: &Period, samples: Samples) -> DatasetConfig {
        dataset(&self.config, period, samples).with_static_fields(self.static_fields.clone())
    }

    /// Returns the names of the channels of the files that samples consist of.
    fn names(&self) -> Vec<String> {
        let names = self.files.iter().map(|channel| channel.name.clone());
        names.collect()
    }

    /// Returns the times of a dataset of [states](Samples::States). Where gaps are skipped, no step
    /// leads across one.
    pub(super) fn timeline(&self, dataset: &FieldDataset) -> Timeline {
        let even = (self.config.gaps == Gaps::Skip).then_some(self.time_step);
        let state = |sample| (dataset.series(sample), dataset.time(sample));
        let states = (0..dataset.len()).map(state).collect();
        Timeline::new(states, self.lead().or(even), self.time_step, self.calendar)
    }

    /// Opens the files of the training period, with the channels of the samples.
    pub(super) fn training_files(&self) -> Result<Vec<Box<dyn Fields>>> {
        self.files_of(&self.config.train)
    }

    /// Opens the files of a period, with the channels of the samples.
    pub(super) fn files_of(&self, period: &Period) -> Result<Vec<Box<dyn Fields>>> {
        let open = open(&self.config, period)
            .with_channels(Some(self.names()))
            .with_grid(Some(self.grid.clone()));
        Ok(if self.config.joined {
            vec![open.open_joined(&self.config.files)?]
        } else {
            open.open_each(&self.config.files)?
        })
    }

    /// Returns the paths of the files.
    pub(super) fn paths(&self) -> &[PathBuf] {
        &self.config.files
    }

    /// Computes statistics of the training period, with increments over a step.
    pub(super) fn statistics(&self) -> Result<Statistics> {
        let mut builder = match self.config.lead_hours {
            Some(hours) => StatisticsBuilder::with_lead_hours(hours)?,
            None => StatisticsBuilder::new(1)?,
        };
        for fields in self.training_files()? {
            let progress = Progress::new(0, "statistics", fields.times().len());
            builder.add(&fields, &progress)?;
            progress.finish();
        }
        Ok(builder.finish()?)
    }

    /// Returns the mean of each target, its standard deviation, and the ratio of the latter to the
    /// standard deviation of its increments.
    pub(super) fn scales(&self, statistics: &Statistics) -> Result<[Vec<f64>; 3]> {
        let names = statistics.metadata().channels();
        let place = |target: &String| {
            let found = names.iter().position(|name| name == target);
            found.ok_or_else(|| {
                Error::other(format!(
                    "statistics of {names:?}; expected those of {target} too"
                ))
            })
        };
        let places: Vec<usize> = self
            .channels
            .targets
            .iter()
            .map(place)
            .collect::<Result<_>>()?;
        let select = |values: &[f64]| {
            places
                .iter()
                .map(|place| values[*place])
                .collect::<Vec<f64>>()
        };
        let (means, stds) = (select(statistics.means()), select(statistics.stds()));
        let ratio = |(std, increment): (&f64, f64)| {
            if increment > 0.0 {
                std / increment
            } else {
                1.0
            }
        };
        let increments = select(statistics.increment_stds());
        let ratios = stds.iter().zip(increments).map(ratio).collect();
        Ok([means, stds, ratios])
    }
}

fn open(config: &DataConfig, period: &Period) -> OpenConfig {
    OpenConfig::new()
        .with_time_units(config.time_units.clone())
        .with_gaps(config.gaps)
        .with_missing(config.missing)
        .with_period(Some(period.clone()))
}

/// Opens the samples of files. The error for hours without a sample names the setting.
fn open_dataset(files: &[PathBuf], config: &DatasetConfig) -> halocline_io::Result<FieldDataset> {
    use halocline_io::Error::Argument;
    FieldDataset::open(files, config).map_err(|mut error| {
        if let Argument { argument, .. } = &mut error {
            *argument = match *argument {
                "every_hours" => "data.every_hours",
                "at_hours" => "data.at_hours",
                other => other,
            };
        }
        error
    })
}

/// Returns the grid of files in the order of that of training, with areas of cells if that has
/// them. Positions that are not known of the grid of training are those of the files.
fn as_in_training(grid: Grid, trained: &Grid) -> Grid {
    if !grid.agrees_with(trained) || trained.cell_weights().is_some() {
        trained.clone()
    } else {
        grid.without_cell_areas()
    }
}

/// Opens files with rows and columns in the order of the grid of training.
///
/// # Errors
/// Another grid than in training; the errors of [`FieldDataset::open`].
fn open_on(
    grid: &Grid,
    files: &[PathBuf],
    mut config: DatasetConfig,
) -> halocline_io::Result<FieldDataset> {
    use halocline_io::Error::{Argument, OtherGrid};
    config.open.grid = Some(grid.clone());
    open_dataset(files, &config).map_err(|error| match error {
        OtherGrid { got, expected } => Argument {
            argument: "files",
            got,
            expected: format!("{expected}, as in training"),
        },
        other => other,
    })
}

fn dataset(config: &DataConfig, period: &Period, samples: Samples) -> DatasetConfig {
    let series = if config.joined {
        Series::Joined
    } else {
        Series::Separate
    };
    let dataset = DatasetConfig::new()
        .with_open(open(config, period))
        .with_series(series)
        .with_inputs(config.inputs.clone())
        .with_targets(config.targets.clone())
        .with_forcings(config.forcings.clone())
        .with_constants(config.constants.clone())
        .with_constants_missing(config.constants_missing.clone())
        .with_history(config.history)
        // Forecasts feed back the states of each step.
        .with_history_hours(config.lead_hours);
    match samples {
        Samples::Steps(steps) => dataset
            .with_lead_hours(config.lead_hours)
            .with_steps(steps)
            .with_every_hours(config.every_hours)
            .with_at_hours(config.at_hours.clone()),
        Samples::States => dataset.with_lead(0),
        Samples::Targets => dataset
            .with_history(1)
            .with_history_hours(None)
            .with_lead(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::fixture::{TIMES, config_in, write_waves};

    #[test]
    fn more_steps_than_a_period_has_are_those_of_the_curriculum() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        for (hours, most) in [(None, TIMES - 1), (Some(12.0), (TIMES - 1) / 2)] {
            let mut config = config_in(folder.path(), "", "").data;
            config.lead_hours = hours;
            let data = Data::open(&config).unwrap();
            assert!(data.samples(most).unwrap() > 0);
            let error = data.samples(40).unwrap_err().to_string();
            let told = format!("training.curriculum: got 40 steps, expected at most {most}, ");
            assert!(error.contains(&told), "{error}");
        }
    }

    #[test]
    fn a_grid_has_areas_as_in_training_and_keeps_its_positions() {
        let cells = Grid::unstructured(vec![60.0, 0.0], vec![0.0, 10.0]).unwrap();
        let with_areas = cells.clone().with_cell_areas(vec![1.0, 3.0]).unwrap();
        // As in folders of statistics that hold neither areas nor positions.
        let columns = Grid::new(cells.lat().to_vec(), cells.lon().to_vec()).unwrap();
        for (grid, trained, expected) in [
            (&with_areas, &columns, &cells),
            (&with_areas, &cells, &cells),
            (&cells, &with_areas, &with_areas),
            (&with_areas, &with_areas, &with_areas),
            (&cells, &columns, &cells),
        ] {
            assert_eq!(as_in_training(grid.clone(), trained), *expected);
        }
    }

    #[test]
    fn a_climatology_reads_targets_only() {
        let folder = tempfile::tempdir().unwrap();
        write_waves(folder.path());
        let config = config_in(folder.path(), "targets = [\"t2m\"]", "").data;
        let data = Data::open(&config).unwrap();
        assert_eq!(data.channels.inputs, ["sst", "t2m"]);
        let dataset = data.open_samples(&config.train, Samples::Targets).unwrap();
        assert_eq!(dataset.metadata().channels(), ["sst", "t2m"]);
        let channels = dataset.channels();
        assert_eq!(
            (&channels.inputs[..], &channels.targets[..]),
            (&["t2m".to_string()][..], &["t2m".to_string()][..])
        );
        assert_eq!(dataset.len(), TIMES);
    }
}
