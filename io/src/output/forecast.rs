use std::path::{Path, PathBuf};

use halocline_core::{DeviceMesh, Layout, Shard, ShardTensor};
use ndarray::{ArrayView4, s};
use rayon::prelude::*;

use super::chunking::{aligned, extent};
use super::config::{OutputConfig, OutputFormat};
use super::schema::{Schema, Times};
use super::staged_folder::StagedFolder;
use super::target::Target;
use crate::ranks::agreement::{Fallible, agree, agree_at, on_first};
use crate::ranks::alike::checksum;
use crate::{Calendar, Channel, Error, Grid, Result};

/// Name of output communication in errors.
const OPERATION: &str = "forecast_writer";

/// Writer of a forecast as a Zarr store or a NetCDF file, into which every rank writes its own
/// cells.
///
/// All ranks of a mesh create and use it collectively. The forecast has coordinates by the CF
/// conventions: times with leads and the start of the forecast, latitude, longitude, levels of
/// channels such as `z@500`, and members of an ensemble. Chunks fit the shards, and no two ranks
/// write the same chunk: where shards do not consist of whole chunks, cells are first moved between
/// ranks. Metadata are consolidated and written last.
///
/// The forecast has a temporary name until it is [finished](Self::finish). A writer that fails, is
/// killed or is dropped before that leaves nothing under the final name.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_io::{Channel, ForecastWriter, Grid, OpenConfig, OutputConfig, open};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("forecast.zarr");
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let grid = Grid::cell_centered(5, 8)?;
///     let channels = ["t2m", "z@850", "z@500"].map(|name| Channel::new(name.into()));
///     let start = 1_514_764_800.0; // 2018-01-01, in seconds since 1970-01-01 UTC
///     let config = OutputConfig::new();
///     let mut writer = ForecastWriter::create(&mesh, &path, &grid, &channels, start, &config)?;
///     for lead in [6.0, 12.0] {
///         let field = ShardTensor::ones([1, 3, 5, 8], &mesh, &[Shard(2)])?;
///         writer.append(lead, &field)?; // hours; [member, channel, lat, lon]
///     }
///     writer.finish()
/// })?;
/// let forecast = open(&path)?;
/// assert_eq!(forecast.channels(), ["t2m", "z@850", "z@500"]);
/// assert_eq!(forecast.times()[1], 1_514_764_800.0 + 12.0 * 3600.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a writer that is dropped before finish() leaves no forecast"]
pub struct ForecastWriter {
    mesh: DeviceMesh,
    schema: Schema,
    config: OutputConfig,
    start: f64,
    /// Staged folder that the forecast is written to.
    folder: PathBuf,
    /// Owner of that folder, on the first rank.
    staged: Option<StagedFolder>,
    /// Output with the extents of its chunks, opened when the first time is appended.
    target: Option<(Target, [usize; 3])>,
    seconds: Vec<f64>,
}

impl ForecastWriter {
    /// Creates a forecast that starts at `start`, in seconds since 1970-01-01 of its
    /// [calendar](Self::with_calendar), on all ranks of the mesh.
    ///
    /// # Errors
    /// On all ranks: no channels, or a name that is repeated or that files cannot represent; a
    /// chunk of several times, or out of range; ranks that create different forecasts; a path that
    /// is taken, ends in `.h5` or `.hdf5`, or that some rank cannot write; a failure of
    /// communication.
    pub fn create(
        mesh: &DeviceMesh,
        path: impl AsRef<Path>,
        grid: &Grid,
        channels: &[Channel],
        start: f64,
        config: &OutputConfig,
    ) -> halocline_core::Result<Self> {
        let path = path.as_ref();
        let checked = config
            .check(path)
            .and_then(|()| check(grid, channels, start, config));
        let sums = [checksum(grid.coordinates()), grid.description.checksum()];
        let text = format!(
            "{path:?}, {channels:?} on {grid} with checksums {sums:08x?} from {start} s, {config:?}"
        );
        let of_forecast = ("forecast", text.as_str());
        let schema = agree_at(mesh, OPERATION, Fallible::All, of_forecast, checked)?;
        let staged = on_first(mesh, OPERATION, || {
            let staged = StagedFolder::open(path, config.existing)?;
            staged.clear().map(|()| Some(staged))
        })?;
        let mut writer = Self {
            mesh: mesh.clone(),
            schema,
            config: config.clone(),
            start,
            folder: PathBuf::new(),
            staged,
            target: None,
            seconds: Vec::new(),
        };
        let folder = StagedFolder::path_of(path).and_then(|folder| {
            if folder.is_dir() {
                Ok(folder)
            } else {
                let cause = "the first rank has created it; do all ranks see this folder?";
                let error = std::io::Error::new(std::io::ErrorKind::NotFound, cause);
                Err(Error::io(&folder, error))
            }
        });
        writer.folder = agree(mesh, OPERATION, Fallible::All, folder)?;
        Ok(writer)
    }

    /// Sets the calendar of the times, which should be that of the initial states. Default
    /// [`Calendar::Gregorian`].
    ///
    /// # Panics
    /// Panics after [`append`](Self::append).
    pub fn with_calendar(mut self, calendar: Calendar) -> Self {
        assert!(
            self.seconds.is_empty(),
            "with_calendar after append: expected before it"
        );
        self.schema.calendar = calendar;
        self
    }

    /// Appends the fields at a lead time in hours.
    ///
    /// # Shapes
    /// [member, channel, lat, lon], as given to [`create`](Self::create). If there is more than one
    /// member, the output has a dim `realization`. Static channels are written once.
    ///
    /// # Placement
    /// Any except `Partial`. One rank writes each set of replicas.
    ///
    /// # Errors
    /// On all ranks: a field of another shape or mesh; `Partial` values; a lead that is not after
    /// the previous one; a full disk; a failure of communication.
    pub fn append(&mut self, lead: f64, field: &ShardTensor<4>) -> halocline_core::Result<()> {
        let layout = field.layout();
        layout.require_resolved("ForecastWriter::append")?;
        let checked = self.check(lead, layout);
        agree_at(
            &self.mesh,
            OPERATION,
            Fallible::All,
            ("lead", &format!("{lead} h, {}", self.schema.calendar)),
            checked,
        )?;
        let time = self.seconds.len();
        self.seconds.push(self.start + lead * 3600.0);
        let appended = self.write(time, field);
        if appended.is_err() {
            self.seconds.pop();
        }
        appended
    }

    fn write(&mut self, time: usize, field: &ShardTensor<4>) -> halocline_core::Result<()> {
        if self.target.is_none() {
            self.open(field.layout())?;
        }
        let Some((target, chunk)) = &self.target else {
            unreachable!("it was opened");
        };
        let mut layout = field.layout().clone();
        if self.config.format != OutputFormat::NetCdf3 {
            for (dim, chunk) in [(2, chunk[1]), (3, chunk[2])] {
                layout = layout.with_extents(dim, &aligned(layout.extents(dim), chunk))?;
            }
        }
        let moved = field.clone().inner().try_redistribute(&layout)?;
        let written = if is_writer(&layout, self.mesh.position()) {
            self.write_box(target, time, moved)
        } else {
            Ok(())
        };
        if let Some(staged) = &self.staged {
            staged.touch();
        }
        agree(&self.mesh, OPERATION, Fallible::All, written)
    }

    /// Opens the output on all ranks, once the extents are known from the first field.
    fn open(&mut self, layout: &Layout) -> halocline_core::Result<()> {
        self.schema.members = layout.shape()[0];
        let chosen = || [1, extent(layout.extents(2)), extent(layout.extents(3))];
        let chunk = self.config.chunk.unwrap_or_else(chosen);
        let open = |creates: bool| {
            let times = Times {
                seconds: &[],
                start: Some(self.start),
            };
            Target::open(
                &self.folder,
                creates,
                &self.schema,
                &times,
                chunk,
                &self.config,
            )
        };
        let created = on_first(&self.mesh, OPERATION, || open(true).map(Some))?;
        let opened = created.map_or_else(|| open(false), Ok);
        let target = agree(&self.mesh, OPERATION, Fallible::All, opened)?;
        self.target = Some((target, chunk));
        Ok(())
    }

    /// Writes this rank's box of a field.
    fn write_box(&self, target: &Target, time: usize, field: ShardTensor<4>) -> Result<()> {
        let (local, layout, mesh) = field.into_parts();
        let cells = layout.local_box(mesh.position());
        let [members, channels, rows, columns] = cells.ranges() else {
            unreachable!("a field has 4 dims");
        };
        if cells.volume() == 0 {
            return Ok(());
        }
        let failed = |cause: String| Error::data(&self.folder, "/", cause);
        let values = local.into_data().convert::<f32>();
        let values = values.as_slice::<f32>();
        let values = values.map_err(|error| failed(format!("{error:?}")))?;
        let shape = [members, channels, rows, columns].map(ExactSizeIterator::len);
        let values = ArrayView4::from_shape(shape, values);
        let values = values.map_err(|error| failed(error.to_string()))?;
        let fields: Vec<_> = members
            .clone()
            .flat_map(|member| channels.clone().map(move |channel| (member, channel)))
            .collect();
        fields.into_par_iter().try_for_each(|(member, channel)| {
            let place = self.schema.places[channel];
            if self.schema.variables[place.0].is_static && time > 0 {
                return Ok(());
            }
            let index = channel - channels.start;
            let values = values.slice(s![member - members.start, index..=index, .., ..]);
            let ranges = [time..time + 1, rows.clone(), columns.clone()];
            target.write(&self.schema, place, member, ranges, values)
        })
    }

    /// Completes the forecast and renames it to its final name.
    ///
    /// # Errors
    /// On all ranks: a forecast without times; a full disk; a failure to rename the output; a
    /// failure of communication.
    pub fn finish(mut self) -> halocline_core::Result<()> {
        let Some((target, _)) = self.target.take() else {
            let expected = "at least one append() before finish()";
            return Err(Error::argument("forecast", "no time", expected).into());
        };
        // All cells must be on disk before the first rank completes the output.
        agree(&self.mesh, OPERATION, Fallible::All, target.sync())?;
        let finished = match self.staged.take() {
            None => Ok(()),
            Some(staged) => {
                let times = Times {
                    seconds: &self.seconds,
                    start: Some(self.start),
                };
                let finished = target.finish(&self.schema, &times);
                if finished.is_err() {
                    staged.discard();
                }
                finished.and_then(|()| target.commit(staged))
            }
        };
        agree(&self.mesh, OPERATION, Fallible::First, finished)
    }

    fn check(&self, lead: f64, layout: &Layout) -> Result<()> {
        let [rows, columns] = self.schema.grid.shape();
        let members = match self.target {
            Some(_) => self.schema.members,
            None => layout.shape()[0],
        };
        let shape = [members, self.schema.places.len(), rows, columns];
        if layout.shape() != shape || members == 0 || layout.mesh() != self.mesh.shape() {
            let expected = format!(
                "{shape:?} [member, channel, lat, lon], of at least one member, on the mesh of create()"
            );
            return Err(Error::argument("field", layout.to_string(), expected));
        }
        let last = self.seconds.last().copied();
        let time = self.start + lead * 3600.0;
        if !time.is_finite() || last.is_some_and(|last| time <= last) {
            let last = last.map(|last| (last - self.start) / 3600.0);
            let expected = last.map_or("a number".into(), |last| format!("more than {last} h"));
            return Err(Error::argument("lead", lead, expected));
        }
        Ok(())
    }
}

impl Drop for ForecastWriter {
    fn drop(&mut self) {
        if let Some(staged) = &self.staged {
            staged.discard();
        }
    }
}

fn check(grid: &Grid, channels: &[Channel], start: f64, config: &OutputConfig) -> Result<Schema> {
    if let Some(chunk) = config.chunk.filter(|chunk| chunk[0] != 1) {
        let expected = "one time in a chunk of a forecast, which is written time by time";
        return Err(Error::argument("chunk", format!("{chunk:?}"), expected));
    }
    if !start.is_finite() {
        return Err(Error::argument("start", start, "seconds since 1970-01-01"));
    }
    Schema::new(grid, Calendar::Gregorian, channels)
}

/// Whether a position writes its box, as the first of the positions that hold the same box.
fn is_writer(layout: &Layout, position: usize) -> bool {
    let coords = layout.mesh().coords(position);
    let whole = layout.axes_where(|placement| !matches!(placement, Shard(_)));
    whole.into_iter().all(|axis| coords[axis] == 0)
}
