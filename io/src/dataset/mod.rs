//! Samples with history and lead times from several files or stores, and their statistics.

mod channels;
mod config;
mod constants;
mod forcing;
mod moments;
mod read;
pub(crate) mod sample;
mod samples;
mod static_fields;
mod statistics;

use std::path::Path;

use crate::fields::{check_units, same_calendar, traffic_of};
use crate::ranks::alike::{Property, checksum};
use crate::{
    Calendar, Channel, Error, Fields, Metadata, Missing, Result, Traffic, falls_at, falls_on,
};

pub use channels::Channels;
use channels::{Origins, check_repeats, open_config, resolve, with_left_out, with_role};
pub use config::{DatasetConfig, Series};
use constants::Constants;
use sample::Part;
pub use sample::Sample;
use samples::{Lead, SampleTimes, samples};
use static_fields::StaticFields;
pub use statistics::{Statistics, StatisticsBuilder};

/// Dataset of samples from files or stores of any format. Each file or store is a trajectory, such
/// as a year or a model run; no sample spans two of them unless they are [joined](Series::Joined).
///
/// # Example
/// ```
/// # use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["u10m", "v10m"], &WriterConfig::new())?;
/// # for step in 0..5 {
/// #     let field = halocline_io::ndarray::Array3::from_elem((2, 4, 8), step as f32);
/// #     writer.append(f64::from(step) * 21600.0, field.view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::{DatasetConfig, FieldDataset, Statistics};
///
/// let config = DatasetConfig::new().with_history(2).with_lead(1);
/// let dataset = FieldDataset::open(&[&path], &config)?; // 5 times, with values 0 to 4
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
    channels: Channels,
    origins: Origins,
    constants: Option<Constants>,
    /// The file of each sample, and its times in that file.
    samples: Vec<(usize, SampleTimes)>,
    /// Mean and standard deviation of each channel, if values are normalised.
    scale: Option<Vec<(f64, f64)>>,
}

impl FieldDataset {
    /// Opens files or stores that have the same channels, grid and time step. Rows and columns are
    /// read in the order of [`OpenConfig::grid`](crate::OpenConfig::grid) or else of the first file.
    ///
    /// # Errors
    /// Errors of [`OpenConfig::open`](crate::OpenConfig::open), or of
    /// [`OpenConfig::open_joined`](crate::OpenConfig::open_joined) if files are joined; files that
    /// differ in channels, grid, time step, units or calendar; times that are not evenly spaced,
    /// unless [gaps](crate::Gaps) are permitted; channels that do not exist or are chosen twice;
    /// constants or static fields on another grid, static fields of several times, or constants with
    /// missing values that are not permitted; a history or number of steps of zero; a negative lead;
    /// files too short for any sample ([`Error::TooShort`]); [hours](DatasetConfig::every_hours) of
    /// which no sample's time is a multiple; [hours of the day](DatasetConfig::at_hours) without a
    /// sample.
    pub fn open(paths: &[impl AsRef<Path>], config: &DatasetConfig) -> Result<Self> {
        if config.history == 0 {
            return Err(Error::argument("history", 0, "at least 1 time"));
        }
        check_repeats(config)?;
        if config.steps == 0 {
            return Err(Error::argument("steps", 0, "at least 1 target"));
        }
        if let Some(hours) = config.history_hours
            && !(hours.is_finite() && hours > 0.0)
        {
            let expected = "a number of hours above 0";
            return Err(Error::argument("history_hours", hours, expected));
        }
        if config.every_hours == Some(0) {
            return Err(Error::argument("every_hours", 0, "at least 1 hour"));
        }
        if config.at_hours.iter().any(|hour| *hour >= 24) {
            let got = format!("{:?}", config.at_hours);
            let expected = "hours of the day, from 0 to 23";
            return Err(Error::argument("at_hours", got, expected));
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
        let constants = config.constants.as_deref().map(|path| {
            let (used, missing) = (&config.forcings, &config.constants_missing);
            Constants::open(path, used, missing)
        });
        let constants = constants.transpose()?;
        let names = constants.as_ref().map_or(&[][..], Constants::names);
        let static_fields = StaticFields::open(config)?;
        let mut open = open_config(config, names);
        if let Some(static_fields) = &static_fields {
            open = static_fields.removed_from(open);
        }
        let files = match config.series {
            Series::Joined if !paths.is_empty() => {
                open.open_joined(paths).map(|joined| vec![joined])
            }
            _ => open.open_each(paths),
        };
        let mut files = files.map_err(|error| with_role(error, config, names))?;
        if let Some(static_fields) = static_fields {
            files = static_fields.added_to(files)?;
        }
        let first = files
            .first()
            .ok_or_else(|| Error::argument("files", 0, "at least one field file"))?;
        let metadata = Metadata::of(first)?;
        let step = metadata.time_step();
        let apart = config.history_hours.map(|hours| hours * 3600.0);
        let samples_of = |times: &[f64], steps: usize| {
            let history = (config.history, apart);
            samples(times, step, history, (lead, steps), config.open.gaps)
        };
        let (mut all, mut candidates) = (Vec::new(), 0);
        for (index, file) in files.iter().enumerate() {
            metadata.check(file, first.path())?;
            check_units(file, first)?;
            same_calendar(file, first)?;
            let mut found = samples_of(file.times(), config.steps);
            candidates += found.len();
            found.retain(|times| {
                let present = file.times()[times.present()];
                config
                    .every_hours
                    .is_none_or(|hours| falls_on(present, hours))
                    && falls_at(present, &config.at_hours)
            });
            all.extend(found.into_iter().map(|times| (index, times)));
        }
        let is_without = all.is_empty() && candidates > 0;
        if is_without && !config.at_hours.is_empty() {
            let mut got = format!("{:?}", config.at_hours);
            if let Some(every) = config.every_hours {
                got += &format!(" with every_hours {every}");
            }
            let expected = "hours of the day at which a sample is";
            return Err(Error::argument("at_hours", got, expected));
        }
        if let Some(hours) = config.every_hours.filter(|_| is_without) {
            let expected = "hours of which the time of a sample is a multiple";
            return Err(Error::argument("every_hours", hours, expected));
        }
        let constants = constants.map(|constants| constants.in_order(&metadata, first.path()));
        let constants = constants.transpose()?;
        let names = constants.as_ref().map_or(&[][..], Constants::names);
        let resolved = resolve(metadata.channels(), names, config);
        let (origins, channels) =
            resolved.map_err(|error| with_left_out(error, first.left_out()))?;
        origins.check_calendar(first, &channels)?;
        origins.check_places(first.grid(), &channels)?;
        let dataset = Self {
            constants,
            metadata,
            config: config.clone(),
            channels,
            origins,
            samples: all,
            scale: None,
            files,
        };
        if dataset.is_empty() {
            let axes = || dataset.files.iter().map(|file| file.times());
            let longest = axes().map(<[f64]>::len).max().unwrap_or(0);
            let fewer: Vec<usize> = (1..config.steps.min(longest)).collect();
            let most = fewer.partition_point(|steps| {
                let mut axes = axes();
                axes.any(|times| !samples_of(times, *steps).is_empty())
            });
            return Err(config.too_short(step, longest, most));
        }
        Ok(dataset)
    }

    /// Normalises values: subtracts the mean of the channel and divides by its standard deviation.
    ///
    /// # Errors
    /// Statistics that lack a channel; a channel that does not vary.
    pub fn with_statistics(mut self, statistics: &Statistics) -> Result<Self> {
        let statistics = statistics.for_metadata(&self.metadata)?;
        let pairs = statistics.means().iter().zip(statistics.stds());
        let scales: Vec<(f64, f64)> = pairs.map(|(mean, std)| (*mean, *std)).collect();
        let usable = |(mean, std): &(f64, f64)| mean.is_finite() && std.is_finite() && *std > 0.0;
        if let Some(channel) = scales.iter().position(|scale| !usable(scale)) {
            let expected = "finite statistics of a channel that varies; leave constant ones out";
            return Err(Error::argument(
                "statistics",
                format!(
                    "a standard deviation of {} for {}",
                    scales[channel].1,
                    self.metadata.channels()[channel]
                ),
                expected,
            ));
        }
        self.scale = Some(scales);
        Ok(self)
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Returns `true` if there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns channels, grid and time step.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns units, names and levels of the targets, as in the first file, for example for the
    /// output of forecasts.
    pub fn describe(&self) -> Vec<Channel> {
        let targets = self.channels.targets.iter();
        let described = targets.map(|name| self.describe_channel(name));
        let described: Option<Vec<Channel>> = described.collect();
        described.expect("targets are channels of the files")
    }

    /// Returns units, names and level of a channel of the files, as in the first file, or `None` if
    /// there is no channel of that name.
    pub fn describe_channel(&self, name: &str) -> Option<Channel> {
        let mut channels = self.metadata.channels().iter();
        let place = channels.position(|channel| channel == name)?;
        Some(self.files[0].describe(place))
    }

    /// Returns the names of inputs, forcings and targets.
    ///
    /// # Example
    /// ```
    /// # use halocline_io::{FieldWriter, Grid, WriterConfig};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("2018.h5");
    /// # let grid = Grid::cell_centered(4, 8)?;
    /// # let names = ["t2m", "sst", "lsm"];
    /// # let mut writer = FieldWriter::create(&path, &grid, &names, &WriterConfig::new())?;
    /// # for step in 0..5 {
    /// #     let field = halocline_io::ndarray::Array3::from_elem((3, 4, 8), step as f32);
    /// #     writer.append(f64::from(step) * 21600.0, field.view())?;
    /// # }
    /// # writer.finish()?;
    /// use halocline_io::{DatasetConfig, FieldDataset};
    ///
    /// // A file with t2m, sst and lsm: two steps of t2m and sst, forced by land and sun.
    /// let config = DatasetConfig::new()
    ///     .with_steps(2)
    ///     .with_forcings(vec!["lsm".into(), "cos_solar_zenith_angle".into()]);
    /// let dataset = FieldDataset::open(&[&path], &config)?;
    /// let channels = dataset.channels();
    /// assert_eq!(channels.inputs, ["t2m", "sst"]);
    /// assert_eq!(channels.targets, ["t2m", "sst"]);
    /// assert_eq!(channels.feedback()?, [0, 1]); // positions of the next inputs in a prediction
    /// let sample = dataset.sample(0)?;
    /// assert_eq!(sample.forcing.dim(), (4, 4, 8)); // of two steps
    /// assert_eq!(sample.target[[2, 0, 0]], 2.0); // t2m after two steps
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn channels(&self) -> &Channels {
        &self.channels
    }

    /// Returns the number of times in an input.
    pub(crate) fn history(&self) -> usize {
        self.config.history
    }

    /// Returns the number of targets in a sample.
    pub fn steps(&self) -> usize {
        self.config.steps
    }

    /// Returns the shape of an input, [history · inputs, lat, lon].
    pub fn input_shape(&self) -> [usize; 3] {
        self.shape(self.config.history * self.channels.inputs.len())
    }

    /// Returns the shape of the forcings, [steps · forcings, lat, lon].
    pub fn forcing_shape(&self) -> [usize; 3] {
        self.shape(self.config.steps * self.channels.forcings.len())
    }

    /// Returns the shape of the targets, [steps · targets, lat, lon].
    pub fn target_shape(&self) -> [usize; 3] {
        self.shape(self.config.steps * self.channels.targets.len())
    }

    fn shape(&self, channels: usize) -> [usize; 3] {
        let [rows, columns] = self.metadata.grid().shape();
        [channels, rows, columns]
    }

    /// Returns the time of a sample's present, the last time of its input, in seconds since
    /// 1970-01-01 UTC.
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn time(&self, sample: usize) -> f64 {
        let (file, times) = self.times_of(sample);
        file.times()[times.present()]
    }

    /// Returns the time from a sample's present to its first target, in hours.
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn lead(&self, sample: usize) -> f64 {
        self.leads(sample)[0]
    }

    /// Returns the time from a sample's present to each of its targets, in hours.
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn leads(&self, sample: usize) -> Vec<f64> {
        let (file, times) = self.times_of(sample);
        let lead = |&target: &usize| file.times()[target] - file.times()[times.present()];
        let leads = times.targets.iter().map(lead);
        leads.map(|seconds| seconds / 3600.0).collect()
    }

    /// Returns the index of a sample's time axis: that of its file, or zero if files are
    /// [joined](Series::Joined).
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn series(&self, sample: usize) -> usize {
        self.samples[sample].0
    }

    /// Returns the calendar of the times.
    pub fn calendar(&self) -> Calendar {
        self.files[0].calendar()
    }

    /// Finds the first sample whose present is `time`, in seconds since 1970-01-01 UTC, to the
    /// nearest millisecond.
    pub fn find(&self, time: f64) -> Option<usize> {
        (0..self.len()).find(|&sample| (self.time(sample) - time).abs() <= 5e-4)
    }

    /// Returns the bytes that reading samples has taken so far on this rank, from which the read
    /// amplification follows.
    pub fn traffic(&self) -> Traffic {
        traffic_of(&self.files)
    }

    /// Reads a sample.
    ///
    /// # Errors
    /// A file that cannot be read; missing values, if they are [rejected](Missing::Reject), or
    /// [filled](Missing::Fill) without statistics.
    ///
    /// # Panics
    /// Panics if there is no such sample.
    pub fn sample(&self, sample: usize) -> Result<Sample> {
        let whole = |part, shape: [usize; 3]| self.read(sample, part, shape.map(|size| 0..size));
        let mut input = whole(Part::Input, self.input_shape())?;
        if self.fills()? {
            input.mapv_inplace(read::filled);
        }
        Ok(Sample {
            input,
            forcing: whole(Part::Forcing, self.forcing_shape())?,
            target: whole(Part::Target, self.target_shape())?,
            time: self.time(sample),
            lead: self.lead(sample),
        })
    }

    /// Properties that must be equal on all ranks that open the dataset. Files are compared by
    /// content, because their paths may differ between hosts.
    pub(crate) fn properties(&self) -> Result<Vec<Property>> {
        let metadata = &self.metadata;
        let grid = metadata.grid();
        let scales = self.scale.as_ref().map(|scales| {
            let numbers = scales.iter().flat_map(|(mean, std)| [*mean, *std]);
            format!("statistics with checksum {:08x}", checksum(numbers))
        });
        let mut properties = vec![
            ("history", self.config.history.to_string()),
            ("history_hours", format!("{:?}", self.config.history_hours)),
            ("lead", self.config.lead.to_string()),
            ("lead_hours", format!("{:?}", self.config.lead_hours)),
            ("every_hours", format!("{:?}", self.config.every_hours)),
            ("at_hours", format!("{:?}", self.config.at_hours)),
            ("series", format!("{:?}", self.config.series)),
            ("gaps", format!("{:?}", self.config.open.gaps)),
            ("steps", self.config.steps.to_string()),
            ("missing", format!("{:?}", self.config.open.missing)),
            ("period", format!("{:?}", self.config.open.period)),
            ("channels", format!("{:?}", metadata.channels())),
            ("inputs", format!("{:?}", self.channels.inputs)),
            ("forcings", format!("{:?}", self.channels.forcings)),
            ("targets", format!("{:?}", self.channels.targets)),
            (
                "grid",
                format!("{grid} with checksum {:08x}", checksum(grid.coordinates())),
            ),
            ("time step", format!("{} s", metadata.time_step())),
            ("statistics", scales.unwrap_or_else(|| "none".into())),
            ("number of files", self.files.len().to_string()),
        ];
        if let Some(constants) = &self.constants {
            let (size, sum) = constants.fingerprint()?;
            let text = format!(
                "{size} bytes with checksum {sum:08x} of {:?}",
                constants.names()
            );
            properties.push(("constants", text));
        }
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

    /// Whether missing values are filled.
    ///
    /// # Errors
    /// They are configured to be, but there are no statistics to fill them with.
    pub(crate) fn fills(&self) -> Result<bool> {
        let fills = self.config.open.missing == Missing::Fill;
        if fills && self.scale.is_none() {
            let expected = "FieldDataset::with_statistics, of which the means are filled in";
            return Err(Error::argument("missing", "Missing::Fill", expected));
        }
        Ok(fills)
    }

    /// Returns the file of a sample, and its times in that file.
    fn times_of(&self, sample: usize) -> (&dyn Fields, &SampleTimes) {
        assert!(sample < self.len(), "sample {sample} of {}", self.len());
        let (file, times) = &self.samples[sample];
        (&self.files[*file], times)
    }
}
