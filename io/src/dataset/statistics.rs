//! Normalisation statistics of each channel, over time and (weighted by area) over the grid.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use ndarray::{Array4, ArrayView4};
use ndarray_npy::ViewNpyExt;

use super::moments::{CellWeights, Moments, collect};
use super::samples::{Lead, samples};
use crate::fields::{described, same_units};
use crate::files::staged::{Staged, remove_if_there};
use crate::{Channel, Error, Fields, Metadata, Progress, Result};

/// Mean and standard deviation of each channel, and of its increments over a lead.
///
/// # Example
/// ```
/// # use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("2018.h5");
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
/// # for step in 0..3 {
/// #     let field = halocline_io::ndarray::Array3::from_elem((1, 4, 8), 280.0 + step as f32);
/// #     writer.append(f64::from(step) * 21600.0, field.view())?;
/// # }
/// # writer.finish()?;
/// use halocline_io::{Metadata, Statistics};
///
/// let files = [FieldFile::open(&path)?]; // uniform fields of 280, 281 and 282 K
/// let statistics = Statistics::compute(&files, 1)?;
/// assert_eq!(statistics.means(), [281.0]);
/// assert!((statistics.stds()[0] - (2.0_f64 / 3.0).sqrt()).abs() < 1e-9);
/// assert_eq!(statistics.increment_means(), [1.0]);
/// assert_eq!(statistics.increment_stds(), [0.0]);
/// assert_eq!(statistics.metadata().channels(), ["t2m"]);
/// assert_eq!(statistics.clone().without_means(&["t2m".into()]).means(), [0.0]);
/// assert_eq!(statistics.for_metadata(&Metadata::of(&files[0])?)?, statistics);
/// statistics.save(folder.path())?;
/// assert_eq!(Statistics::load(folder.path())?.means(), [281.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    metadata: Metadata,
    values: [Vec<f64>; 4],
}

/// File names of [`Statistics`] in Makani's layout.
const NAMES: [&str; 4] = [
    "global_means.npy",
    "global_stds.npy",
    "time_diff_means.npy",
    "time_diff_stds.npy",
];

/// Names that Makani gives to these files where increments are over one time step.
const NAMES_OF_ONE_STEP: [&str; 4] = [
    "global_means.npy",
    "global_stds.npy",
    "time_diff_means_dt1.npy",
    "time_diff_stds_dt1.npy",
];

impl Statistics {
    /// Computes the statistics of all files together, with increments over `lead` time steps.
    ///
    /// # Errors
    /// Errors of [`StatisticsBuilder::add`] and [`StatisticsBuilder::finish`].
    pub fn compute(files: &[impl Fields], lead: usize) -> Result<Self> {
        let mut builder = StatisticsBuilder::new(lead)?;
        for file in files {
            builder.add(file, &Progress::hidden())?;
        }
        builder.finish()
    }

    /// Returns channels, grid and time step of the files.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the mean of each channel, in its units.
    pub fn means(&self) -> &[f64] {
        &self.values[0]
    }

    /// Returns the standard deviation of each channel, in its units.
    pub fn stds(&self) -> &[f64] {
        &self.values[1]
    }

    /// Returns the mean increment of each channel.
    pub fn increment_means(&self) -> &[f64] {
        &self.values[2]
    }

    /// Returns the standard deviation of the increment of each channel, used to scale residual
    /// predictions.
    pub fn increment_stds(&self) -> &[f64] {
        &self.values[3]
    }

    /// Sets the means of some channels to zero, so that their normalised values change sign with
    /// the values. Needed for vector components, which change sign across a pole. Ignores names
    /// that are not channels.
    #[must_use]
    pub fn without_means(mut self, channels: &[String]) -> Self {
        let means = self.values[0].iter_mut().zip(self.metadata.channels());
        for (mean, _) in means.filter(|(_, channel)| channels.contains(channel)) {
            *mean = 0.0;
        }
        self
    }

    /// Selects the statistics of the channels of other metadata, in their order, and takes its grid
    /// and time step: statistics of one data set normalise another.
    ///
    /// # Errors
    /// A channel without statistics.
    pub fn for_metadata(&self, metadata: &Metadata) -> Result<Self> {
        let known = self.metadata.channels();
        let place = |channel: &String| {
            known
                .iter()
                .position(|other| other == channel)
                .ok_or_else(|| {
                    let expected = format!("those of channel {channel} too");
                    Error::argument("statistics", format!("those of {known:?}"), expected)
                })
        };
        let places = metadata.channels().iter().map(place);
        let places = places.collect::<Result<Vec<usize>>>()?;
        let select =
            |values: &Vec<f64>| -> Vec<f64> { places.iter().map(|place| values[*place]).collect() };
        Ok(Self {
            metadata: metadata.clone(),
            values: self.values.each_ref().map(select),
        })
    }

    /// Reads statistics written to a folder by [`save`](Self::save) or Makani, whose names
    /// `time_diff_means_dt1.npy` and `time_diff_stds_dt1.npy` are read too.
    ///
    /// # Errors
    /// A file that does not exist, is not `.npy` of f32, or does not have the shape [1, channels,
    /// 1, 1].
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let metadata = Metadata::load(folder)?;
        let expected = [1, metadata.channels().len(), 1, 1];
        let read = |name: &'static str| {
            let path = folder.join(name);
            let values = read_npy(&path).map_err(|e| Error::io(&path, e))?;
            if values.shape() != expected {
                let expected = format!("{expected:?} for the channels of data.json");
                return Err(Error::shape(
                    &path,
                    name,
                    format!("{:?}", values.shape()),
                    expected,
                ));
            }
            Ok(values.iter().copied().map(f64::from).collect::<Vec<f64>>())
        };
        let mut values: [Vec<f64>; 4] = Default::default();
        let exists = |name: &str| folder.join(name).exists();
        let names = NAMES.into_iter().zip(NAMES_OF_ONE_STEP);
        for (values, (name, other)) in values.iter_mut().zip(names) {
            let is_other = !exists(name) && exists(other);
            *values = read(if is_other { other } else { name })?;
        }
        Ok(Self { metadata, values })
    }

    /// Writes `global_means.npy`, `global_stds.npy`, `time_diff_means.npy`, `time_diff_stds.npy`
    /// and `data.json` into a folder, creating the folder if it does not exist.
    ///
    /// # Shapes
    /// Each array is f32 [1, channels, 1, 1].
    ///
    /// # Errors
    /// A folder that cannot be created or written. It then contains no `data.json`, or its earlier
    /// statistics.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        let metadata = self.metadata.stage(folder)?;
        let mut staged = Vec::new();
        for (name, values) in NAMES.into_iter().zip(&self.values) {
            let array = Array4::from_shape_fn((1, values.len(), 1, 1), |at| values[at.1] as f32);
            let file = Staged::new(&folder.join(name))?;
            ndarray_npy::write_npy(file.path(), &array)
                .map_err(|e| Error::io(file.target(), std::io::Error::other(e)))?;
            staged.push(file);
        }
        // A mix of old and new files never has a `data.json`, without which it cannot be loaded.
        remove_if_there(metadata.target()).map_err(|e| Error::io(metadata.target(), e))?;
        staged.push(metadata);
        staged.into_iter().try_for_each(Staged::commit)
    }
}

/// Accumulator of [`Statistics`] over files. Ranks may accumulate different files and merge the
/// results.
///
/// # Example
/// ```
/// # use halocline_io::ndarray::Array3;
/// # use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
/// # let folder = tempfile::tempdir()?;
/// # let grid = Grid::cell_centered(4, 8)?;
/// # let write = |year: &str, first: f32| -> halocline_io::Result<FieldFile> {
/// #     let path = folder.path().join(year);
/// #     let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
/// #     writer.append(0.0, Array3::from_elem((1, 4, 8), first).view())?;
/// #     writer.append(21600.0, Array3::from_elem((1, 4, 8), first + 2.0).view())?;
/// #     writer.finish()?;
/// #     FieldFile::open(&path)
/// # };
/// # let files = [write("2017.h5", 280.0)?, write("2018.h5", 290.0)?];
/// use halocline_io::{Progress, StatisticsBuilder};
///
/// // Uniform fields of 280 and 282 K in one file, of 290 and 292 K in the other.
/// let mut parts = [StatisticsBuilder::new(1)?, StatisticsBuilder::new(1)?];
/// for (part, file) in parts.iter_mut().zip(&files) {
///     part.add(file, &Progress::hidden())?;
/// }
/// let [first, second] = parts;
/// let statistics = first.merge(second)?.finish()?;
/// assert!((statistics.means()[0] - 286.0).abs() < 1e-9);
/// assert!((statistics.increment_means()[0] - 2.0).abs() < 1e-9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct StatisticsBuilder {
    lead: Lead,
    reference: Option<(Metadata, PathBuf)>,
    channels: Vec<Channel>,
    fields: Vec<Moments>,
    increments: Vec<Moments>,
}

impl StatisticsBuilder {
    /// Creates an empty accumulator, with increments over `lead` time steps.
    ///
    /// # Errors
    /// A lead of zero.
    pub fn new(lead: usize) -> Result<Self> {
        if lead == 0 {
            return Err(Error::argument("lead", lead, "at least 1 time step"));
        }
        Ok(Self::of(Lead::Steps(lead)))
    }

    /// Creates an empty accumulator, with increments from each field to the one `hours` later, as
    /// in the samples of a dataset with [`lead_hours`](crate::DatasetConfig::lead_hours). A field
    /// without a later one contributes no increment.
    ///
    /// # Errors
    /// Hours that are not finite and above zero.
    ///
    /// # Example
    /// ```
    /// use halocline_io::StatisticsBuilder;
    ///
    /// assert!(StatisticsBuilder::with_lead_hours(24.0).is_ok());
    /// assert!(StatisticsBuilder::with_lead_hours(0.0).is_err());
    /// ```
    pub fn with_lead_hours(hours: f64) -> Result<Self> {
        if !hours.is_finite() || hours <= 0.0 {
            let expected = "a number of hours above 0";
            return Err(Error::argument("lead_hours", hours, expected));
        }
        Ok(Self::of(Lead::Time(hours * 3600.0)))
    }

    fn of(lead: Lead) -> Self {
        Self {
            lead,
            reference: None,
            channels: Vec::new(),
            fields: Vec::new(),
            increments: Vec::new(),
        }
    }

    /// Adds the fields of a file or store. Increments do not span files. Advances `progress` once
    /// per time.
    ///
    /// # Errors
    /// A file whose channels, units, grid or time step differ from the first, or that cannot be
    /// read; nothing of it is added. Missing values are an error or are left out. Uneven steps are
    /// an error or, with a lead in steps, increments over them are left out or counted. Both are as
    /// configured [when the file was opened](crate::OpenConfig::open).
    pub fn add(&mut self, file: &impl Fields, progress: &Progress) -> Result<()> {
        let channels = described(file);
        if let Some((metadata, path)) = &self.reference {
            metadata.check(file, path)?;
            same_units((&channels, file.path()), (&self.channels, path))?;
        }
        let empty = vec![Moments::default(); file.channels().len()];
        let metadata = Metadata::of(file)?;
        // Index of the time one lead after each time, if there is an increment between them.
        let mut later = vec![None; file.times().len()];
        let (step, gaps) = (metadata.time_step(), file.gaps());
        for pair in samples(file.times(), step, (1, None), (self.lead, 1), gaps) {
            later[pair.present()] = Some(pair.targets[0]);
        }
        let mut added = Self {
            lead: self.lead,
            reference: Some((metadata, file.path().into())),
            channels,
            fields: empty.clone(),
            increments: empty,
        };
        // All files count like the first one; some may lack the areas of cells.
        let first = self.reference.as_ref().map(|(first, _)| first.grid());
        let weights = CellWeights::of(first.unwrap_or(file.grid()));
        let [times, channels, rows, columns] = file.shape();
        let mut earlier: VecDeque<(usize, Array4<f32>)> = VecDeque::new();
        for time in 0..times {
            // [1, channel, lat, lon]
            let field = file.read([time..time + 1, 0..channels, 0..rows, 0..columns])?;
            collect(&mut added.fields, &field, None, &weights);
            while earlier.front().is_some_and(|(later, _)| *later == time) {
                let before = earlier.pop_front().map(|(_, before)| before);
                collect(&mut added.increments, &field, before.as_ref(), &weights);
            }
            if let Some(later) = later[time].filter(|later| *later > time) {
                earlier.push_back((later, field));
            }
            progress.advance();
        }
        self.absorb(added);
        Ok(())
    }

    /// Adds the moments of another accumulator with the same channels.
    fn absorb(&mut self, other: Self) {
        if self.reference.is_none() {
            *self = other;
            return;
        }
        for (sums, added) in [
            (&mut self.fields, other.fields),
            (&mut self.increments, other.increments),
        ] {
            sums.iter_mut()
                .zip(added)
                .for_each(|(sum, added)| *sum = sum.merge(added));
        }
    }

    /// Merges two accumulators.
    ///
    /// # Errors
    /// Accumulators whose leads differ, or whose files differ in channels, units, grid or time
    /// step.
    pub fn merge(mut self, other: Self) -> Result<Self> {
        if self.lead != other.lead {
            let expected = format!("{}, as in the other part", self.lead);
            return Err(Error::argument("lead", other.lead, expected));
        }
        if let (Some((base, path)), Some((added, other_path))) = (&self.reference, &other.reference)
        {
            base.check_same(added, other_path, path)?;
            same_units((&other.channels, other_path), (&self.channels, path))?;
        }
        self.absorb(other);
        Ok(self)
    }

    /// Computes the statistics of all files that were added.
    ///
    /// # Errors
    /// No file; a channel without values or increments, or with infinite ones.
    pub fn finish(self) -> Result<Statistics> {
        let Some((metadata, path)) = self.reference else {
            return Err(Error::argument("files", 0, "at least one field file"));
        };
        let mut values: [Vec<f64>; 4] = Default::default();
        for (index, name) in metadata.channels().iter().enumerate() {
            for (kind, moments) in [&self.fields, &self.increments].into_iter().enumerate() {
                let found = moments[index].mean_and_std();
                let Some((mean, std)) = found.filter(|(_, std)| std.is_finite()) else {
                    let noun = ["values", "increments"][kind];
                    let (found, expected) = match (found, kind) {
                        (Some(_), _) => (
                            format!("infinite {noun}"),
                            "finite ones; Missing::Reject names the first cell".into(),
                        ),
                        (None, 0) => ("no value".into(), "one at least that is not missing".into()),
                        (None, _) => (
                            "no increments".into(),
                            format!("two times a lead of {} apart in one file", self.lead),
                        ),
                    };
                    return Err(Error::shape(&path, name, found, expected));
                };
                values[2 * kind].push(mean);
                values[2 * kind + 1].push(std);
            }
        }
        Ok(Statistics { metadata, values })
    }
}

/// Reads an `.npy` file. Allocates memory according to the size of the file, not to its header.
fn read_npy(path: &Path) -> std::io::Result<Array4<f32>> {
    /// Alignment of the array in the format.
    const ALIGNMENT: usize = 64;
    let file = std::fs::read(path)?;
    // The length of the header takes two bytes, or four from version 2 of the format on.
    let header = match file[..] {
        [_, _, _, _, _, _, 1, _, a, b, ..] => {
            file.get(10..10 + usize::from(u16::from_le_bytes([a, b])))
        }
        [_, _, _, _, _, _, 2 | 3, _, a, b, c, d, ..] => file
            .get(12..)
            .and_then(|rest| rest.get(..u32::from_le_bytes([a, b, c, d]) as usize)),
        _ => None,
    };
    // A valid header has one dict and one tuple. The library's parser takes time exponential in the
    // number of open brackets.
    let brackets = |header: &[u8]| header.iter().filter(|byte| b"[({".contains(byte)).count();
    // If an extent is zero, the library panics on other extents that are too large.
    let extents_fit = |header: &[u8]| {
        let text = String::from_utf8_lossy(header).into_owned();
        let shape = text
            .rsplit_once('(')
            .and_then(|(_, rest)| rest.split_once(')'));
        shape
            .map_or("", |(shape, _)| shape)
            .split(',')
            .map(str::trim)
            .filter(|extent| !extent.is_empty())
            .all(|extent| {
                extent
                    .parse()
                    .is_ok_and(|extent| (1..=file.len()).contains(&extent))
            })
    };
    if !header.is_some_and(|header| brackets(header) <= 4 && extents_fit(header)) {
        let cause = "it has not the header of an .npy file of this size";
        return Err(std::io::Error::other(cause));
    }
    let mut aligned = vec![0; file.len() + ALIGNMENT];
    let start = aligned.as_ptr().align_offset(ALIGNMENT);
    let aligned = &mut aligned[start..][..file.len()];
    aligned.copy_from_slice(&file);
    let values = ArrayView4::view_npy(aligned).map_err(std::io::Error::other)?;
    Ok(values.to_owned())
}
