//! The data of an experiment: what is read of the files, and how.

use halocline_core::{Error, Result};
use halocline_io::{
    Calendar, Channel, Channels, DatasetConfig, FieldDataset, Fields, Grid, OpenConfig, Period,
    Progress, Series, Statistics, StatisticsBuilder,
};

use super::config::DataConfig;
use super::timeline::Timeline;

/// Channels, grid and times of an experiment's files.
#[derive(Debug)]
pub(super) struct Data {
    config: DataConfig,
    /// The channels of the files that samples are made of.
    names: Vec<String>,
    pub(super) channels: Channels,
    /// Units and names of the targets.
    pub(super) described: Vec<Channel>,
    pub(super) grid: Grid,
    pub(super) calendar: Calendar,
    /// The usual time between two fields, in seconds.
    pub(super) time_step: f64,
    /// The samples of one step in the training period.
    pub(super) samples: usize,
}

/// What samples hold.
#[derive(Clone, Copy, Debug)]
pub(super) enum Samples {
    /// An input, and the targets of a number of steps after it.
    Steps(usize),
    /// An input, and the targets at its time.
    States,
}

impl Data {
    /// Looks into the files.
    pub(super) fn open(config: &DataConfig) -> Result<Self> {
        let (period, samples) = (&config.train, Samples::Steps(1));
        let dataset = FieldDataset::open(&config.files, &dataset(config, period, samples))?;
        let metadata = dataset.metadata();
        Ok(Self {
            config: config.clone(),
            names: metadata.channels().to_vec(),
            channels: dataset.channels().clone(),
            described: dataset.describe(),
            grid: metadata.grid().clone(),
            calendar: dataset.calendar(),
            time_step: metadata.time_step(),
            samples: dataset.len(),
        })
    }

    /// The length of a step in seconds, if it has one; else it leads to the next field.
    pub(super) fn lead(&self) -> Option<f64> {
        self.config.lead_hours.map(|hours| hours * 3600.0)
    }

    /// The samples of a period, normalised.
    pub(super) fn dataset(
        &self,
        period: &Period,
        samples: Samples,
        statistics: &Statistics,
    ) -> halocline_io::Result<FieldDataset> {
        let config = dataset(&self.config, period, samples);
        FieldDataset::open(&self.config.files, &config)?.with_statistics(statistics)
    }

    /// The times of a dataset of [states](Samples::States).
    pub(super) fn timeline(&self, dataset: &FieldDataset) -> Timeline {
        let state = |sample| (dataset.series(sample), dataset.time(sample));
        Timeline {
            states: (0..dataset.len()).map(state).collect(),
            lead: self.lead(),
            step: self.time_step,
        }
    }

    /// The files of the training period, with the channels of the samples.
    pub(super) fn training_files(&self) -> Result<Vec<Box<dyn Fields>>> {
        let open = open(&self.config, &self.config.train);
        let open = open.with_channels(Some(self.names.clone()));
        Ok(match self.config.joined {
            true => vec![open.open_joined(&self.config.files)?],
            false => open.open_each(&self.config.files)?,
        })
    }

    /// Computes statistics of the training period, with increments over a step.
    pub(super) fn statistics(&self) -> Result<Statistics> {
        let steps = self
            .lead()
            .map_or(1.0, |lead| (lead / self.time_step).round().max(1.0));
        let mut builder = StatisticsBuilder::new(steps as usize)?;
        for fields in self.training_files()? {
            let progress = Progress::new(0, "statistics", fields.times().len());
            builder.add(&fields, &progress)?;
            progress.finish();
        }
        Ok(builder.finish()?)
    }

    /// Means and standard deviations of the targets, and the latter by those of increments.
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
        let of = |values: &[f64]| {
            places
                .iter()
                .map(|place| values[*place])
                .collect::<Vec<f64>>()
        };
        let (means, stds) = (of(statistics.means()), of(statistics.stds()));
        let ratio = |(std, increment): (&f64, f64)| match increment > 0.0 {
            true => std / increment,
            false => 1.0,
        };
        let increments = of(statistics.increment_stds());
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

fn dataset(config: &DataConfig, period: &Period, samples: Samples) -> DatasetConfig {
    let series = match config.joined {
        true => Series::Joined,
        false => Series::Separate,
    };
    let dataset = DatasetConfig::new()
        .with_open(open(config, period))
        .with_series(series)
        .with_inputs(config.inputs.clone())
        .with_targets(config.targets.clone())
        .with_forcings(config.forcings.clone())
        .with_constants(config.constants.clone())
        .with_history(config.history);
    match samples {
        Samples::Steps(steps) => dataset.with_lead_hours(config.lead_hours).with_steps(steps),
        Samples::States => dataset.with_lead(0),
    }
}
