use std::ops::Range;
use std::path::Path;

use burn::config::Config;
use ndarray::{Array3, ArrayViewMut3, Axis, concatenate};

use crate::alike::{Property, checksum, fingerprint};
use crate::{Error, FieldFile, Metadata, Missing, Result, Statistics};

/// Configuration of a [`FieldDataset`]: the times of a sample, and the handling of missing values.
///
/// # Example
/// ```
/// use halocline_io::{DatasetConfig, Missing};
///
/// // From two times, predict the fourth after the later one.
/// let config = DatasetConfig::new().with_history(2).with_lead(4);
/// assert_eq!(config.missing, Missing::Reject);
/// ```
#[derive(Config, Debug)]
pub struct DatasetConfig {
    /// Number of times in an input; the last one is the present.
    #[config(default = "1")]
    pub history: usize,
    /// Number of time steps from the present to the target.
    #[config(default = "1")]
    pub lead: usize,
    /// Handling of missing values.
    #[config(default = "Missing::Reject")]
    pub missing: Missing,
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
}

/// Samples from field files. Each file is a trajectory, such as a year or a model run: no sample
/// spans two files.
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
/// assert_eq!(dataset.time(2), 3.0 * 21600.0);
///
/// let statistics = Statistics::compute(&[FieldFile::open(&path)?], 1)?; // mean 2, variance 2
/// let target = dataset.with_statistics(&statistics)?.sample(2)?.target;
/// assert!((target[[0, 0, 0]] - 2_f32.sqrt()).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FieldDataset {
    files: Vec<FieldFile>,
    metadata: Metadata,
    history: usize,
    lead: usize,
    /// Number of samples before each file, then the number of all samples.
    starts: Vec<usize>,
    /// Mean and standard deviation of every channel, if values are normalised.
    scale: Option<Vec<(f64, f64)>>,
}

impl FieldDataset {
    /// Opens files that have the same channels, grid and time step.
    ///
    /// # Errors
    /// Those of [`FieldFile::open`]; files that differ in these, or whose times are not evenly
    /// spaced; a history of zero; files too short for any sample.
    pub fn open(paths: &[impl AsRef<Path>], config: &DatasetConfig) -> Result<Self> {
        if config.history == 0 {
            return Err(Error::argument("history", 0, "at least 1 time"));
        }
        let files = paths
            .iter()
            .map(|path| Ok(FieldFile::open(path)?.with_missing(config.missing)))
            .collect::<Result<Vec<_>>>()?;
        let first = files
            .first()
            .ok_or_else(|| Error::argument("files", 0, "at least one field file"))?;
        let metadata = Metadata::of(first)?;
        let mut starts = vec![0];
        for file in &files {
            metadata.check(file, first.path())?;
            let samples = file
                .times()
                .len()
                .saturating_sub((config.history - 1).saturating_add(config.lead));
            starts.push(starts[starts.len() - 1] + samples);
        }
        let dataset = Self {
            metadata,
            history: config.history,
            lead: config.lead,
            starts,
            scale: None,
            files,
        };
        if dataset.is_empty() {
            let longest = dataset.files.iter().map(|file| file.times().len()).max();
            return Err(Error::argument(
                "history and lead",
                format!("{} and {}", config.history, config.lead),
                format!(
                    "a sum of at most the {} times of the longest file",
                    longest.unwrap_or(0)
                ),
            ));
        }
        Ok(dataset)
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
        self.starts[self.files.len()]
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Channels, grid and time step.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The shape of an input, [history · channels, lat, lon].
    pub fn input_shape(&self) -> [usize; 3] {
        let [channels, rows, columns] = self.target_shape();
        [self.history * channels, rows, columns]
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
        let (file, first) = self.find(sample);
        file.times()[first + self.history - 1]
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
            ("history", self.history.to_string()),
            ("lead", self.lead.to_string()),
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
            let (size, sum) = fingerprint(file.path())?;
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
        let (file, first) = self.find(sample);
        let channels = self.metadata.channels().len();
        let [wanted, rows, columns] = cells;
        let parts = (0..self.history)
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
        let (file, first) = self.find(sample);
        self.field(file, first + self.history - 1 + self.lead, cells)
    }

    fn field(
        &self,
        file: &FieldFile,
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

    /// Finds the file of a sample, and the index of its first time in that file.
    fn find(&self, sample: usize) -> (&FieldFile, usize) {
        assert!(sample < self.len(), "sample {sample} of {}", self.len());
        let file = self.starts.partition_point(|&start| start <= sample) - 1;
        (&self.files[file], sample - self.starts[file])
    }
}

fn normalize(mut values: ArrayViewMut3<'_, f32>, scale: &[(f64, f64)]) {
    for (mut field, (mean, std)) in values.outer_iter_mut().zip(scale) {
        // In f64, because a geopotential differs from its mean only in the last digits of f32.
        field.mapv_inplace(|value| ((f64::from(value) - mean) / std) as f32);
    }
}
