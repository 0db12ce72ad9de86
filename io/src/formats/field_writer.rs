use std::path::{Path, PathBuf};

use burn::config::Config;
use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{Dataset, File, FileBuilder};
use ndarray::{ArrayView2, ArrayView3};

use super::cf::axis::{AREA, CELLS};
use super::hdf5::scales;
use super::layout::{CHANNEL, FIELDS, LAT, LON, SCALES, TIMESTAMP};
use crate::files::staged::Staged;
use crate::time::units;
use crate::{Error, Grid, Result};

/// Largest extent of a chunk along latitude and longitude. A chunk of this size has 256 KiB of f32,
/// a quarter of HDF5's chunk cache.
const MAX_CHUNK_EXTENT: usize = 256;

/// Configuration of a [`FieldWriter`]: compression and chunks.
///
/// # Example
/// ```
/// use halocline_io::WriterConfig;
///
/// let config = WriterConfig::new().with_deflate(0).with_chunk(Some([1, 4, 90, 180]));
/// assert_eq!(config.deflate, 0);
/// ```
#[derive(Config, Debug)]
pub struct WriterConfig {
    /// Compression level, from 0 (none) to 9.
    #[config(default = "4")]
    pub deflate: u8,
    /// Extents of a chunk along [time, channel, lat, lon]. Default one time, one channel and parts
    /// of about equal size with at most 256 × 256 cells, so that a rank reads few cells outside its
    /// own box.
    pub chunk: Option<[usize; 4]>,
}

/// Writer of a field file, which appends one time after another. See
/// [`FieldFile`](crate::FieldFile) for the layout, which includes the positions of the cells of an
/// [unstructured](Grid::unstructured) or [curvilinear](Grid::curvilinear) grid.
///
/// The file has a temporary name until it is [finished](Self::finish). A writer that fails or is
/// dropped before that leaves no file behind, and an earlier file of the same name unchanged.
///
/// # Example
/// ```
/// use halocline_io::ndarray::Array3;
/// use halocline_io::{FieldFile, FieldWriter, Grid, WriterConfig};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("2018.h5");
/// let grid = Grid::cell_centered(4, 8)?;
/// let config = WriterConfig::new();
/// let mut writer = FieldWriter::create(&path, &grid, &["u10m", "v10m"], &config)?;
/// let field = Array3::zeros((2, 4, 8)); // [channel, lat, lon]
/// writer.append(0.0, field.view())?;
/// writer.append(3600.0, field.view())?;
/// assert!(writer.append(3600.0, field.view()).is_err()); // times must rise
/// assert!(!path.exists());
/// writer.finish()?;
/// assert_eq!(FieldFile::open(&path)?.shape(), [2, 2, 4, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a writer that is dropped before finish() leaves no file"]
pub struct FieldWriter {
    fields: Dataset,
    timestamp: Dataset,
    shape: [usize; 3],
    last: Option<f64>,
    count: usize,
    // Declared before `staged`, so that it is closed before the file is removed: fields are dropped
    // in order.
    file: File,
    staged: Staged,
}

impl FieldWriter {
    /// Creates a file under a temporary name.
    ///
    /// # Errors
    /// A folder that cannot be written; no channels, or an empty or repeated name; a chunk or
    /// compression level out of range.
    pub fn create(
        path: impl AsRef<Path>,
        grid: &Grid,
        channels: &[impl AsRef<str>],
        config: &WriterConfig,
    ) -> Result<Self> {
        let path = path.as_ref();
        let channels: Vec<&str> = channels.iter().map(AsRef::as_ref).collect();
        check_channels(&channels)?;
        let [rows, columns] = grid.shape();
        // As even as possible, because HDF5 stores partial chunks at the end of a dim in full.
        let even = |size: usize| size.div_ceil(size.div_ceil(MAX_CHUNK_EXTENT).max(1));
        let chunk = config.chunk.unwrap_or([1, 1, even(rows), even(columns)]);
        let cells = chunk
            .iter()
            .try_fold(1_usize, |cells, extent| cells.checked_mul(*extent));
        if !cells.is_some_and(|cells| (1..1 << 30).contains(&cells)) {
            let expected = "extents from 1, of less than 4 GiB together";
            return Err(Error::argument("chunk", format!("{chunk:?}"), expected));
        }
        if config.deflate > 9 {
            return Err(Error::argument(
                "deflate",
                config.deflate,
                "a level from 0 to 9",
            ));
        }
        let staged = Staged::new(path)?;
        let shape = [channels.len(), rows, columns];
        let create = || {
            // From this version of the format on, HDF5's own structures have checksums.
            let file = FileBuilder::new()
                .with_fapl(|access| access.libver_v110())
                .create(staged.path())?;
            let [fields, timestamp] =
                create_datasets(&file, grid, &channels, chunk, config.deflate)?;
            Ok((file, fields, timestamp))
        };
        let (file, fields, timestamp) =
            create().map_err(|e: hdf5_metno::Error| Error::data(path, FIELDS, e))?;
        Ok(Self {
            fields,
            timestamp,
            shape,
            last: None,
            count: 0,
            file,
            staged,
        })
    }

    /// Appends the field of the next time, given in seconds since 1970-01-01 UTC.
    ///
    /// # Shapes
    /// [channel, lat, lon], as given to [`create`](Self::create).
    ///
    /// # Errors
    /// A field of another shape; a time that is not after the previous one; a full disk.
    pub fn append(&mut self, time: f64, field: ArrayView3<'_, f32>) -> Result<()> {
        let path = self.path();
        if field.shape() != self.shape {
            return Err(Error::Shape {
                path,
                dataset: FIELDS.into(),
                found: format!(
                    "a field of {:?} at time index {}",
                    field.shape(),
                    self.count
                ),
                expected: format!("{:?} [channel, lat, lon]", self.shape),
            });
        }
        if !time.is_finite() || self.last.is_some_and(|last| time <= last) {
            let after = self.last.map_or("a finite time".into(), |last| {
                format!("a time after {last}")
            });
            return Err(Error::Value {
                path,
                dataset: TIMESTAMP.into(),
                index: vec![self.count],
                found: time.to_string(),
                expected: format!("{after}, in seconds"),
            });
        }
        let [channels, rows, columns] = self.shape;
        let (index, count) = (self.count, self.count + 1);
        let write = || {
            self.fields.resize((count, channels, rows, columns))?;
            self.fields
                .write_slice(&field.as_standard_layout(), (index, .., .., ..))?;
            self.timestamp.resize(count)?;
            self.timestamp.write_slice(&[time], index..count)
        };
        write().map_err(|e| Error::data(&path, FIELDS, e))?;
        (self.last, self.count) = (Some(time), count);
        Ok(())
    }

    /// Completes the file and renames it to its final name.
    ///
    /// # Errors
    /// A file without times; a full disk; a failure to rename the file.
    pub fn finish(self) -> Result<()> {
        let path = self.path();
        if self.count == 0 {
            return Err(Error::Shape {
                path,
                dataset: FIELDS.into(),
                found: "no time".into(),
                expected: "at least one append() before finish()".into(),
            });
        }
        let ([channels, rows, columns], count) = (self.shape, self.count);
        let Self {
            fields,
            timestamp,
            file,
            staged,
            ..
        } = self;
        let all: &[&str] = &SCALES;
        let plane = if rows == 1 { &all[3..] } else { &all[2..] };
        let mut scaled = vec![(FIELDS, all)];
        if file.link_exists(CELLS[0]) {
            scaled.extend(CELLS.map(|name| (name, plane)));
        }
        if file.link_exists(AREA) {
            scaled.push((AREA, plane));
        }
        // A failed append may have extended the datasets.
        let trimmed = fields.resize((count, channels, rows, columns));
        trimmed
            .and_then(|()| timestamp.resize(count))
            .and_then(|()| scales::attach(&file, &scaled))
            .and_then(|()| file.flush())
            .map_err(|e| Error::data(&path, FIELDS, e))?;
        drop((fields, timestamp));
        file.close().map_err(|e| Error::data(&path, FIELDS, e))?;
        staged.commit()
    }

    fn path(&self) -> PathBuf {
        self.staged.target().into()
    }
}

fn check_channels(channels: &[&str]) -> Result<()> {
    let twice = (0..channels.len()).any(|index| channels[..index].contains(&channels[index]));
    let odd = channels
        .iter()
        .any(|name| name.is_empty() || name.contains('\0'));
    if channels.is_empty() || twice || odd {
        let expected = "at least one name, and no name twice or empty";
        return Err(Error::argument(
            "channels",
            format!("{channels:?}"),
            expected,
        ));
    }
    Ok(())
}

/// Creates the datasets of the layout, without times.
fn create_datasets(
    file: &File,
    grid: &Grid,
    channels: &[&str],
    chunk: [usize; 4],
    deflate: u8,
) -> hdf5_metno::Result<[Dataset; 2]> {
    let [rows, columns] = grid.shape();
    let mut builder = file
        .new_dataset::<f32>()
        .shape((0.., channels.len(), rows, columns))
        .chunk(chunk);
    if deflate > 0 {
        // Shuffling groups bytes of equal significance, which compress much better.
        builder = builder.shuffle().deflate(deflate);
    }
    // The checksum turns a damaged chunk into a read error.
    let fields = builder.fletcher32().create(FIELDS)?;
    // 8 KiB of times per chunk.
    let timestamp = file
        .new_dataset::<f64>()
        .shape(0..)
        .chunk(1024)
        .fletcher32()
        .create(TIMESTAMP)?;
    scales::describe(&timestamp, "units", units::UNITS)?;
    scales::describe(&timestamp, "calendar", units::CALENDAR)?;
    let names = channels
        .iter()
        .map(|name| name.parse())
        .collect::<Result<Vec<VarLenUnicode>, _>>()
        .map_err(|e| hdf5_metno::Error::from(e.to_string()))?;
    file.new_dataset_builder()
        .with_data(&names)
        .create(CHANNEL)?;
    let coordinate = |name, values: &[f64]| {
        let scale = file.new_dataset_builder().with_data(values);
        scale.chunk(values.len()).fletcher32().create(name)
    };
    scales::describe(&coordinate(LAT, grid.lat())?, "units", b"degrees_north")?;
    scales::describe(&coordinate(LON, grid.lon())?, "units", b"degrees_east")?;
    let cells = |name, values: &[f64]| {
        if rows == 1 {
            return coordinate(name, values);
        }
        let plane = ArrayView2::from_shape((rows, columns), values).expect("a value per cell");
        let scale = file.new_dataset_builder().with_data(plane);
        scale.chunk([rows, columns]).fletcher32().create(name)
    };
    if let Some([lat, lon]) = grid.cells() {
        scales::describe(&cells(CELLS[0], lat)?, "units", b"degrees_north")?;
        scales::describe(&cells(CELLS[1], lon)?, "units", b"degrees_east")?;
    }
    if let Some(areas) = &grid.areas {
        scales::describe(&cells(AREA, areas)?, "standard_name", b"cell_area")?;
    }
    Ok([fields, timestamp])
}
