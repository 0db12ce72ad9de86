use std::ops::Range;
use std::path::Path;

use burn::config::Config;
use ndarray::{Array3, ArrayViewMut3, Axis, concatenate};

use crate::alike::{Property, checksum};
use crate::samples::{Lead, SampleTimes, samples};
use crate::{
    Channel, Error, Fields, Gaps, Metadata, Missing, OpenConfig, Result, Statistics, Traffic,
};

/// The time axes that samples are taken from.
///
/// See [`DatasetConfig`] for an example.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Series {
    /// Each file or store is a trajectory, such as a year or a model run: no sample spans two.
    Separate,
    /// All files or stores together are one time axis.
    Joined,
}

/// Configuration of a [`FieldDataset`]: the times of a sample, and how files are opened.
///
/// # Example
/// ```
/// use halocline_io::{DatasetConfig, Gaps, OpenConfig, Series};
///
/// // From two times, predict the fourth after the later one.
/// let config = DatasetConfig::new().with_history(2).with_lead(4);
/// assert_eq!(config.series, Series::Separate);
/// // From files of one day each, predict the field a day later.
/// let config = DatasetConfig::new()
///     .with_series(Series::Joined)
///     .with_lead_hours(Some(24.0))
///     .with_open(OpenConfig::of_channels(&["t2m", "z@500"]).with_gaps(Gaps::Skip));
/// assert_eq!(config.open.gaps, Gaps::Skip);
/// ```
#[derive(Config, Debug)]
pub struct DatasetConfig {
    /// Number of times in an input; the last one is the present.
    #[config(default = "1")]
    pub history: usize,
    /// Number of time steps from the present to the target.
    #[config(default = "1")]
    pub lead: usize,
    /// Hours from the present to the target, in place of a number of steps. A time without a field
    /// so many hours later gives no sample.
    pub lead_hours: Option<f64>,
    /// The time axes that samples are taken from.
    #[config(default = "Series::Separate")]
    pub series: Series,
    /// Channels, missing values, gaps and units of time.
    #[config(default = "OpenConfig::new()")]
    pub open: OpenConfig,
}

impl DatasetConfig {
    /// Sets the handling of missing values, of [`open`](Self::open).
    #[must_use]
    pub fn with_missing(mut self, missing: Missing) -> Self {
        self.open.missing = missing;
        self
    }

    /// Sets the handling of uneven time steps, of [`open`](Self::open).
    #[must_use]
    pub fn with_gaps(mut self, gaps: Gaps) -> Self {
        self.open.gaps = gaps;
        self
    }
}

/// A pair of fields: an input, and the target to be predicted from it.
///
/// See [`FieldDataset`] for an example.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Input, [history · channels, lat, lon], the earliest time first.
    pub input: Array3<f32>,
    /// Target, [channels, lat, lon].
    pub target: Array3<f32>,
    /// Time of the present, the last time of the input, in seconds since 1970-01-01 UTC.
    pub time: f64,
    /// Time from the present to the target, in hours.
    pub lead: f64,
}

/// Samples from files or stores of any format. Each is a trajectory, such as a year or a model run:
/// no sample spans two, unless they are [joined](Series::Joined).
///
/// # Example
/// ```
/// # use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centred(4, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["u10m", "v10m"], &WriterConfig::new())?;
/// # for step in 0..5 {
/// #     let field = halocline_io::ndarray::Array3::from_elem((2, 4, 8), step as f32);
/// #     writer.append(f64::from(step) * 21600.0, field.view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::{DatasetConfig, FieldDataset, Statistics};
///
/// let config = DatasetConfig::new().with_history(2).with_lead(1);
/// let dataset = FieldDataset::open(&[&path], &config)?; // 5 times, of values 0 to 4
/// assert_eq!(dataset.len(), 3);
/// assert_eq!(dataset.input_shape(), [4, 4, 8]); // u10m, v10m, u10m, v10m
/// assert_eq!(dataset.target_shape(), [2, 4, 8]);
/// let sample = dataset.sample(2)?;
/// assert_eq!([sample.input[[0, 0, 0]], sample.input[[2, 0, 0]]], [2.0, 3.0]);
/// assert_eq!(sample.target[[0, 0, 0]], 4.0);
/// assert_eq!((sample.time, sample.lead), (3.0 * 21600.0, 6.0)); // s, h
/// assert_eq!(dataset.find(3.0 * 21600.0), Some(2));
///
/// let statistics = Statistics::compute(&[FieldFile::open(&path)?], 1)?; // mean 2, variance 2
/// let target = dataset.with_statistics(&statistics)?.sample(2)?.target;
/// assert!((target[[0, 0, 0]] - 2_f32.sqrt()).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FieldDataset {
    files: Vec<Box<dyn Fields>>,
    metadata: Metadata,
    config: DatasetConfig,
    /// The file of every sample, and its times in that file.
    samples: Vec<(usize, SampleTimes)>,
    /// Mean and standard deviation of every channel, if values are normalised.
    scale: Option<Vec<(f64, f64)>>,
}

impl FieldDataset {
    /// Opens files or stores that have the same channels, grid and time step.
    ///
    /// # Errors
    /// Those of [`OpenConfig::open`], and of [`OpenConfig::open_joined`] if they are joined; files
    /// that differ in these, or whose times are not evenly spaced, unless [gaps](Gaps) are
    /// permitted; a history of zero; a negative lead; files too short for any sample.
    pub fn open(paths: &[impl AsRef<Path>], config: &DatasetConfig) -> Result<Self> {
        if config.history == 0 {
            return Err(Error::argument("history", 0, "at least 1 time"));
        }
        let lead = match config.lead_hours {
            Some(hours) if !hours.is_finite() || hours < 0.0 => {
                return Err(Error::argument(
                    "lead_hours",
                    hours,
                    "a number of hours from 0 on",
                ));
            }
            Some(hours) => Lead::Time(hours * 3600.0),
            None => Lead::Steps(config.lead),
        };
        let files = match config.series {
            Series::Joined if !paths.is_empty() => vec![config.open.open_joined(paths)?],
            _ => paths
                .iter()
                .map(|path| config.open.open(path))
                .collect::<Result<Vec<_>>>()?,
        };
        let first = files
            .first()
            .ok_or_else(|| Error::argument("files", 0, "at least one field file"))?;
        let metadata = Metadata::of(first)?;
        let mut all = Vec::new();
        for (index, file) in files.iter().enumerate() {
            metadata.check(file, first.path())?;
            let (times, step) = (file.times(), metadata.time_step());
            let found = samples(times, step, config.history, lead, config.open.gaps);
            all.extend(found.into_iter().map(|times| (index, times)));
        }
        let dataset = Self {
            metadata,
            config: config.clone(),
            samples: all,
            scale: None,
            files,
        };
        if dataset.is_empty() {
            return Err(dataset.no_samples());
        }
        Ok(dataset)
    }

    fn no_samples(&self) -> Error {
        let DatasetConfig { history, lead, .. } = self.config;
        if let Some(hours) = self.config.lead_hours {
            let step = self.metadata.time_step() / 3600.0;
            let expected = format!(
                "the hours between two times of a file, after a history of {history}; \
                 the time step is {step} h"
            );
            return Error::argument("lead_hours", hours, expected);
        }
        let longest = self.files.iter().map(|file| file.times().len()).max();
        Error::argument(
            "history and lead",
            format!("{history} and {lead}"),
            format!(
                "a sum of at most the {} times of the longest file",
                longest.unwrap_or(0)
            ),
        )
    }

    /// Normalises values: subtracts the mean of their channel and divides by its standard
    /// deviation.
    ///
    /// # Errors
    /// Statistics of other channels, and a channel that does not vary.
    pub fn with_statistics(mut self, statistics: &Statistics) -> Result<Self> {
        let (channels, others) = (self.metadata.channels(), statistics.metadata().channels());
        if channels != others {
            let expected = format!("those of channels {channels:?}");
            return Err(Error::argument(
                "statistics",
                format!("{others:?}"),
                expected,
            ));
        }
        let scales = statistics.means().iter().zip(statistics.stds());
        let usable = |(mean, std): (&f64, &f64)| mean.is_finite() && std.is_finite() && *std > 0.0;
        if let Some(channel) = scales.into_iter().position(|scale| !usable(scale)) {
            let expected = "finite statistics of a channel that varies; leave constant ones out";
            return Err(Error::argument(
                "statistics",
                format!(
                    "a standard deviation of {} for {}",
                    statistics.stds()[channel],
                    channels[channel]
                ),
                expected,
            ));
        }
        let pairs = statistics.means().iter().zip(statistics.stds());
        self.scale = Some(pairs.map(|(mean, std)| (*mean, *std)).collect());
        Ok(self)
    }

    /// The number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Channels, grid and time step.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// What the first file says of the channels, such as their units: for the output of forecasts.
    pub fn describe(&self) -> Vec<Channel> {
        let channels = 0..self.metadata.channels().len();
        channels
            .map(|channel| self.files[0].describe(channel))
            .collect()
    }

    /// The shape of an input, [history · channels, lat, lon].
    pub fn input_shape(&self) -> [usize; 3] {
        let [channels, rows, columns] = self.target_shape();
        [self.config.history * channels, rows, columns]
    }

    /// The shape of a target, [channels, lat, lon].
    pub fn target_shape(&self) -> [usize; 3] {
        let [rows, columns] = self.metadata.grid().shape();
        [self.metadata.channels().len(), rows, columns]
    }

    /// Time of a sample's present, the last time of its input, in seconds since 1970-01-01 UTC.
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn time(&self, sample: usize) -> f64 {
        let (file, times) = self.times_of(sample);
        file.times()[times.present]
    }

    /// Time from a sample's present to its target, in hours.
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn lead(&self, sample: usize) -> f64 {
        let (file, times) = self.times_of(sample);
        (file.times()[times.target] - file.times()[times.present]) / 3600.0
    }

    /// Finds the first sample with this present, in seconds since 1970-01-01 UTC, to the nearest
    /// millisecond.
    pub fn find(&self, time: f64) -> Option<usize> {
        (0..self.len()).find(|&sample| (self.time(sample) - time).abs() <= 5e-4)
    }

    /// Bytes that reading samples has taken so far on this rank, and its read amplification.
    pub fn traffic(&self) -> Traffic {
        let traffic = self.files.iter().map(|file| file.traffic());
        traffic.fold(Traffic::default(), |sum, file| sum + file)
    }

    /// Reads a sample.
    ///
    /// # Errors
    /// A file that cannot be read, and missing values if they are [rejected](Missing::Reject).
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn sample(&self, sample: usize) -> Result<Sample> {
        Ok(Sample {
            input: self.input(sample, self.input_shape().map(|size| 0..size))?,
            target: self.target(sample, self.target_shape().map(|size| 0..size))?,
            time: self.time(sample),
            lead: self.lead(sample),
        })
    }

    /// Properties that must be equal on all ranks that open the dataset. Files are compared by
    /// content, because their paths may differ between hosts.
    pub(crate) fn properties(&self) -> Result<Vec<Property>> {
        let metadata = &self.metadata;
        let grid = metadata.grid();
        let coordinates = grid.lat().iter().chain(grid.lon()).copied();
        let scales = self.scale.as_ref().map(|scales| {
            let numbers = scales.iter().flat_map(|(mean, std)| [*mean, *std]);
            format!("statistics with checksum {:08x}", checksum(numbers))
        });
        let mut properties = vec![
            ("history", self.config.history.to_string()),
            ("lead", self.config.lead.to_string()),
            ("lead_hours", format!("{:?}", self.config.lead_hours)),
            ("series", format!("{:?}", self.config.series)),
            ("gaps", format!("{:?}", self.config.open.gaps)),
            ("channels", format!("{:?}", metadata.channels())),
            (
                "grid",
                format!("{grid} with checksum {:08x}", checksum(coordinates)),
            ),
            ("time step", format!("{} s", metadata.time_step())),
            ("statistics", scales.unwrap_or_else(|| "none".into())),
            ("number of files", self.files.len().to_string()),
        ];
        for (index, file) in self.files.iter().enumerate() {
            let (size, sum) = file.fingerprint()?;
            let times = file.times();
            let text = format!(
                "{size} bytes with checksum {sum:08x} and {} times with checksum {:08x} as file {index}",
                times.len(),
                checksum(times.iter().copied())
            );
            properties.push(("files", text));
        }
        Ok(properties)
    }

    /// Reads a box of the input of a sample.
    pub(crate) fn input(&self, sample: usize, cells: [Range<usize>; 3]) -> Result<Array3<f32>> {
        let (file, times) = self.times_of(sample);
        let history = self.config.history;
        let first = times.present - (history - 1);
        let channels = self.metadata.channels().len();
        let [wanted, rows, columns] = cells;
        let parts = (0..history)
            .map(|index| {
                // Channels base..base + channels of the input are those of this time.
                let base = index * channels;
                let low = wanted.start.clamp(base, base + channels) - base;
                let high = wanted.end.clamp(base, base + channels) - base;
                let cells = [low..high, rows.clone(), columns.clone()];
                self.field(file, first + index, cells)
            })
            .collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
        Ok(concatenate(Axis(0), &views).expect("the parts have the same rows and columns"))
    }

    /// Reads a box of the target of a sample.
    pub(crate) fn target(&self, sample: usize, cells: [Range<usize>; 3]) -> Result<Array3<f32>> {
        let (file, times) = self.times_of(sample);
        self.field(file, times.target, cells)
    }

    fn field(
        &self,
        file: &dyn Fields,
        time: usize,
        cells: [Range<usize>; 3],
    ) -> Result<Array3<f32>> {
        let [channels, rows, columns] = cells;
        let values = file.read([time..time + 1, channels.clone(), rows, columns])?;
        let mut values = values.index_axis_move(Axis(0), 0); // [channel, lat, lon]
        if let Some(scale) = &self.scale {
            normalize(values.view_mut(), &scale[channels]);
        }
        Ok(values)
    }

    /// The file of a sample, and its times in that file.
    fn times_of(&self, sample: usize) -> (&dyn Fields, SampleTimes) {
        assert!(sample < self.len(), "sample {sample} of {}", self.len());
        let (file, times) = self.samples[sample];
        (&self.files[file], times)
    }
}

fn normalize(mut values: ArrayViewMut3<'_, f32>, scale: &[(f64, f64)]) {
    for (mut field, (mean, std)) in values.outer_iter_mut().zip(scale) {
        // In f64, because a geopotential differs from its mean only in the last digits of f32.
        field.mapv_inplace(|value| ((f64::from(value) - mean) / std) as f32);
    }
}
