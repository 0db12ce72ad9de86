//! Batches of chosen samples, and forcings at any time, for forecasts.

use burn::tensor::TensorData;
use halocline_core::{IndexBox, ShardTensor};

use super::read_ahead::read_batch;
use super::{Batch, Epoch, FieldLoader, OPERATION};
use crate::ranks::agreement::agree_at;
use crate::{Error, Source};

impl FieldLoader {
    /// Reads a batch of chosen samples, collectively on all ranks.
    ///
    /// # Errors
    /// On all ranks: no samples, or a sample that does not exist; a file that cannot be read; ranks
    /// that request different samples; a failure of communication.
    ///
    /// # Example
    /// ```
    /// # use halocline_io::{FieldWriter, Grid, WriterConfig};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("2018.h5");
    /// # let grid = Grid::cell_centered(5, 8)?;
    /// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
    /// # for step in 0..4 {
    /// #     let field = halocline_io::ndarray::Array3::from_elem((1, 5, 8), step as f32);
    /// #     writer.append(f64::from(step) * 21600.0, field.view())?;
    /// # }
    /// # writer.finish()?;
    /// use halocline_core::{Launcher, Shard};
    /// use halocline_io::{DatasetConfig, FieldDataset, FieldLoader, LoaderConfig};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let config = DatasetConfig::new().with_forcings(vec!["cos_solar_zenith_angle".into()]);
    ///     let loader = FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(1), || {
    ///         FieldDataset::open(&[&path], &config)
    ///     })?;
    ///     let batch = loader.load(&[2])?;
    ///     assert_eq!(batch.times, [2.0 * 21600.0]);
    ///     // Position of the sun a year later.
    ///     let sun = loader.forcing(2, batch.times[0] + 365.0 * 86400.0)?;
    ///     assert_eq!(sun.map(|sun| sun.dims()), Some([1, 1, 5, 8]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load(&self, samples: &[usize]) -> halocline_core::Result<Batch> {
        let count = self.samples();
        if samples.is_empty() || samples.iter().any(|sample| *sample >= count) {
            let expected = format!("some of the {count} samples, from 0");
            return Err(Error::argument("samples", format!("{samples:?}"), expected).into());
        }
        let dataset = self.dataset.as_ref();
        let read = dataset.map(|dataset| read_batch(dataset, samples, &self.boxes(samples.len())));
        let read = agree_at(
            &self.mesh,
            OPERATION,
            self.fallible(),
            ("samples", &format!("{samples:?}")),
            read.transpose(),
        )?;
        self.batch(samples.to_vec(), read)
    }

    /// Iterates over chosen samples in batches of one, in the given order, collectively on all
    /// ranks. They are read in the background, as those of an [`epoch`](Self::epoch).
    ///
    /// # Errors
    /// On all ranks: a sample that does not exist.
    ///
    /// # Example
    /// ```
    /// # use halocline_io::{FieldWriter, Grid, WriterConfig};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("2018.h5");
    /// # let grid = Grid::cell_centered(5, 8)?;
    /// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
    /// # for step in 0..4 {
    /// #     let field = halocline_io::ndarray::Array3::from_elem((1, 5, 8), step as f32);
    /// #     writer.append(f64::from(step) * 21600.0, field.view())?;
    /// # }
    /// # writer.finish()?;
    /// use halocline_core::{Launcher, Shard};
    /// use halocline_io::{DatasetConfig, FieldDataset, FieldLoader, LoaderConfig};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let loader = FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(2), || {
    ///         FieldDataset::open(&[&path], &DatasetConfig::new())
    ///     })?;
    ///     for (batch, sample) in loader.one_by_one(&[2, 0])?.zip([2, 0]) {
    ///         assert_eq!(batch?.samples, [sample]);
    ///     }
    ///     assert!(loader.one_by_one(&[3]).is_err()); // 4 times have 3 samples
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn one_by_one(&self, samples: &[usize]) -> halocline_core::Result<Epoch<'_>> {
        let count = self.samples();
        if let Some(sample) = samples.iter().find(|sample| **sample >= count) {
            let expected = format!("some of the {count} samples, from 0");
            return Err(Error::argument("samples", sample, expected).into());
        }
        let batches = samples.iter().map(|sample| vec![*sample]).collect();
        Ok(self.read_ahead(0, batches))
    }

    /// Leaves the forcings out of all batches, for programs that need none or read them by
    /// [`forcing`](Self::forcing). All ranks must do so.
    ///
    /// # Example
    /// ```
    /// # use halocline_io::{FieldWriter, Grid, WriterConfig};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("2018.h5");
    /// # let grid = Grid::cell_centered(5, 8)?;
    /// # let mut writer = FieldWriter::create(&path, &grid, &["t2m"], &WriterConfig::new())?;
    /// # for step in 0..4 {
    /// #     let field = halocline_io::ndarray::Array3::from_elem((1, 5, 8), step as f32);
    /// #     writer.append(f64::from(step) * 21600.0, field.view())?;
    /// # }
    /// # writer.finish()?;
    /// use halocline_core::{Launcher, Shard};
    /// use halocline_io::{DatasetConfig, FieldDataset, FieldLoader, LoaderConfig};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let config = DatasetConfig::new().with_forcings(vec!["cos_latitude".into()]);
    ///     let loader = FieldLoader::new(&mesh, &[Shard(2)], &LoaderConfig::new(1), || {
    ///         FieldDataset::open(&[&path], &config)
    ///     })?;
    ///     let loader = loader.without_forcings();
    ///     assert!(loader.load(&[2])?.forcing.is_none());
    ///     assert!(loader.forcing(2, 43200.0)?.is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn without_forcings(mut self) -> Self {
        self.leaves_forcings_out = true;
        self
    }

    /// Reads the forcings of the step that starts at `time`, in seconds since 1970-01-01 UTC, on
    /// the time axis of a sample. Returns `[1, forcings, lat, lon]`, or `None` if the dataset has
    /// no forcings. Beyond the end of the files only computed channels, constants, masks and
    /// channels without a time are available.
    ///
    /// # Errors
    /// On all ranks: a time without fields, if a forcing is a channel of the files that changes
    /// with time; a file that cannot be read; ranks that request different times; a failure of
    /// communication.
    ///
    /// # Panics
    /// Panics on the ranks that read if there is no such sample.
    pub fn forcing(
        &self,
        sample: usize,
        time: f64,
    ) -> halocline_core::Result<Option<ShardTensor<4>>> {
        let [rows, columns] = self.summary.grid;
        let shape = [1, self.channels().forcings.len(), rows, columns];
        if shape[1] == 0 {
            return Ok(None);
        }
        let layout = self.layout(shape)?;
        let cells = match self.config.source {
            Source::Scatter => IndexBox::whole(&shape),
            Source::PerRank => layout.local_box(self.mesh.position()),
        };
        let read = self.dataset.as_ref().map(|dataset| {
            let [_, channels, rows, columns] = cells.ranges() else {
                unreachable!("forcings have 4 dims");
            };
            let cells = [channels.clone(), rows.clone(), columns.clone()];
            let values = dataset.forcing_at(sample, time, cells)?;
            let [channels, rows, columns]: [usize; 3] = values.dim().into();
            let shape = [1, channels, rows, columns];
            Ok(TensorData::new(
                values.into_iter().collect::<Vec<f32>>(),
                shape,
            ))
        });
        let read = agree_at(
            &self.mesh,
            OPERATION,
            self.fallible(),
            ("time", &time.to_string()),
            read.transpose(),
        )?;
        self.place(read, &layout).map(Some)
    }
}
