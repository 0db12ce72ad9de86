//! Zarr stores, written chunk by chunk.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ndarray::{Array3, ArrayView3, s};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use zarrs::array::{Array, Element};
use zarrs::metadata::ArrayMetadata;
use zarrs::storage::{
    Bytes, OffsetBytesIterator, StorageError, StoreKey, StorePrefix, WritableStorageTraits,
};

use super::config::{Compression, OutputConfig, OutputFormat};
use super::schema::{Coordinate, Schema, TIME, Times};
use crate::files::durable;
use crate::files::staged::remove_if_there;
use crate::formats::zarr;
use crate::grid::description::{AttributeValue, Attributes};
use crate::{Error, Result};

/// More times than any output has. Used while chunks are written, when the number of times is not
/// known.
const ENDLESS: usize = 1 << 40;

/// Zarr store whose chunks are written by any number of ranks, before its metadata.
#[derive(Debug)]
pub(crate) struct ZarrOutput {
    files: Arc<Files>,
    version: OutputFormat,
    compression: Compression,
    /// Extents along [time, lat, lon].
    chunk: [usize; 3],
    arrays: Vec<Array<Files>>,
}

impl ZarrOutput {
    /// Creates an output in an existing folder.
    pub(crate) fn new(
        root: &Path,
        schema: &Schema,
        chunk: [usize; 3],
        config: &OutputConfig,
    ) -> Result<Self> {
        let files = Arc::new(Files {
            root: root.into(),
            written: Mutex::default(),
        });
        let mut output = Self {
            files,
            version: config.format,
            compression: config.compression,
            chunk,
            arrays: Vec::new(),
        };
        for variable in 0..schema.variables.len() {
            let metadata = output.metadata(schema, variable, ENDLESS, false);
            let array = output.array(&schema.variables[variable].name, &metadata)?;
            output.arrays.push(array);
        }
        Ok(output)
    }

    /// Writes whole chunks of one level and one ensemble member of a variable. The last chunk of a
    /// dim may exceed it.
    ///
    /// # Shapes
    /// `values` is [times, lat, lon], with the lengths of the ranges, which start at chunk
    /// boundaries.
    pub(crate) fn write(
        &self,
        schema: &Schema,
        (variable, level): (usize, usize),
        member: usize,
        ranges: [Range<usize>; 3],
        values: ArrayView3<'_, f32>,
    ) -> Result<()> {
        let output = &schema.variables[variable];
        let [times, rows, columns] = [0, 1, 2].map(|dim| {
            let first = ranges[dim].start / self.chunk[dim];
            first..ranges[dim].end.div_ceil(self.chunk[dim])
        });
        let chunks = times.flat_map(|time| {
            let columns = columns.clone();
            let cells = rows.clone();
            cells.flat_map(move |row| columns.clone().map(move |column| [time, row, column]))
        });
        let chunks: Vec<[usize; 3]> = chunks.collect();
        chunks.into_par_iter().try_for_each(|chunk| {
            // A static field lacks the first dim, time.
            let extents = if output.is_static {
                [1, self.chunk[1], self.chunk[2]]
            } else {
                self.chunk
            };
            let mut padded = Array3::from_elem(extents, f32::NAN);
            let [times, rows, columns] = [0, 1, 2].map(|dim| {
                let first = chunk[dim] * self.chunk[dim] - ranges[dim].start;
                first..(first + extents[dim]).min(ranges[dim].len())
            });
            let part = values.slice(s![times, rows, columns]);
            let (times, rows, columns) = part.dim();
            padded
                .slice_mut(s![..times, ..rows, ..columns])
                .assign(&part);
            let index = [
                (!output.is_static).then_some(chunk[0]),
                (schema.members > 1).then_some(member),
                output.levels.map(|_| level),
                Some(chunk[1]),
                Some(chunk[2]),
            ];
            let index: Vec<u64> = index
                .into_iter()
                .flatten()
                .map(|index| index as u64)
                .collect();
            let (elements, _) = padded.into_raw_vec_and_offset();
            self.store(&self.arrays[variable], &output.name, &index, elements)
        })
    }

    /// Writes the coordinates and then the metadata, and waits until their bytes are on disk. Their
    /// names are synced with the folder that is renamed.
    pub(crate) fn finish(&self, schema: &Schema, times: &Times<'_>) -> Result<()> {
        let count = times.seconds.len();
        let mut members: Vec<(String, Value)> = Vec::new();
        for (variable, output) in schema.variables.iter().enumerate() {
            let metadata = self.metadata(schema, variable, count, times.start.is_some());
            members.push((output.name.clone(), metadata));
        }
        for coordinate in schema.fixed().into_iter().chain(times.coordinates(schema)) {
            let metadata = self.coordinate(&coordinate);
            let array = self.array(&coordinate.name, &metadata)?;
            let index = vec![0; coordinate.dims.len()];
            self.store(&array, &coordinate.name, &index, coordinate.values)?;
            members.push((coordinate.name, metadata));
        }
        let order: Vec<&str> = schema
            .variables
            .iter()
            .map(|output| &*output.name)
            .collect();
        let attributes = json!({ "Conventions": "CF-1.11", zarr::ORDER: order });
        match self.version {
            OutputFormat::Zarr2 => self.describe_2(&members, &attributes)?,
            _ => self.describe_3(&members, &attributes)?,
        }
        self.sync_files()?;
        Ok(())
    }

    /// Waits until the files that this rank has written, and their names, are on disk.
    pub(crate) fn sync(&self) -> Result<()> {
        let written = self.sync_files()?;
        // Their folders may be new too.
        let folders = written.iter().flat_map(|path| path.ancestors().skip(1));
        let folders = folders.filter(|folder| folder.starts_with(&self.files.root));
        let folders: BTreeSet<&Path> = folders.collect();
        durable::sync_folders(&folders.into_iter().collect::<Vec<_>>())
    }

    /// Waits until the bytes of the files that this rank has written are on disk, and returns these
    /// files.
    fn sync_files(&self) -> Result<Vec<PathBuf>> {
        let written = std::mem::take(&mut *self.files.written());
        durable::sync_files(&written)?;
        Ok(written)
    }

    fn describe_3(&self, members: &[(String, Value)], attributes: &Value) -> Result<()> {
        for (name, metadata) in members {
            self.write_json(&format!("{name}/zarr.json"), metadata)?;
        }
        let members: Map<String, Value> = members.iter().cloned().collect();
        let group = json!({
            "zarr_format": 3,
            "node_type": "group",
            "attributes": attributes,
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": false,
                "metadata": members,
            },
        });
        self.write_json("zarr.json", &group)
    }

    fn describe_2(&self, members: &[(String, Value)], attributes: &Value) -> Result<()> {
        let mut files = Map::new();
        for (name, metadata) in members {
            let mut metadata = metadata.clone();
            let attributes = metadata["attributes"].take();
            metadata
                .as_object_mut()
                .expect("an object")
                .remove("attributes");
            files.insert(format!("{name}/.zarray"), metadata);
            files.insert(format!("{name}/.zattrs"), attributes);
        }
        files.insert(".zattrs".into(), attributes.clone());
        files.insert(".zgroup".into(), json!({ "zarr_format": 2 }));
        for (name, value) in &files {
            self.write_json(name, value)?;
        }
        let consolidated = json!({ "zarr_consolidated_format": 1, "metadata": files });
        self.write_json(".zmetadata", &consolidated)
    }

    fn write_json(&self, name: &str, value: &Value) -> Result<()> {
        let path = self.files.root.join(name);
        let bytes = serde_json::to_vec_pretty(value).expect("JSON");
        self.files
            .write(path.clone(), &bytes)
            .map_err(|error| Error::io(&path, error))
    }

    /// Returns the metadata of a variable, which include its attributes; in version 2 these are
    /// split off later.
    fn metadata(&self, schema: &Schema, variable: usize, times: usize, leads: bool) -> Value {
        let output = &schema.variables[variable];
        let dims = schema.dims(variable);
        let shape = schema.shape(variable, times);
        let chunk: Vec<usize> = dims
            .iter()
            .enumerate()
            .map(|(dim, name)| match *name {
                TIME => self.chunk[0],
                _ if dim + 2 == dims.len() => self.chunk[1],
                _ if dim + 1 == dims.len() => self.chunk[2],
                _ => 1,
            })
            .collect();
        let mut attributes = object(&output.attributes);
        attributes.extend(object(&schema.auxiliary(variable, leads)));
        self.described(&shape, &chunk, &dims, 4, attributes)
    }

    fn coordinate(&self, coordinate: &Coordinate) -> Value {
        let dims: Vec<&str> = coordinate.dims.iter().map(|(dim, _)| &**dim).collect();
        let shape: Vec<usize> = coordinate.dims.iter().map(|(_, extent)| *extent).collect();
        let chunk: Vec<usize> = shape.iter().map(|extent| (*extent).max(1)).collect();
        self.described(&shape, &chunk, &dims, 8, object(&coordinate.attributes))
    }

    /// Returns the metadata of an array of floats of `width` bytes.
    fn described(
        &self,
        shape: &[usize],
        chunk: &[usize],
        dims: &[&str],
        width: usize,
        mut attributes: Map<String, Value>,
    ) -> Value {
        if self.version == OutputFormat::Zarr2 {
            attributes.insert("_ARRAY_DIMENSIONS".into(), json!(dims));
            let compressor = match self.compression {
                Compression::None => Value::Null,
                Compression::Zstd { level } => json!({
                    "id": "blosc", "cname": "zstd", "clevel": level, "shuffle": 1, "blocksize": 0,
                }),
            };
            return json!({
                "zarr_format": 2,
                "shape": shape,
                "chunks": chunk,
                "dtype": format!("<f{width}"),
                "fill_value": "NaN",
                "order": "C",
                "filters": null,
                "dimension_separator": ".",
                "compressor": compressor,
                "attributes": attributes,
            });
        }
        let mut codecs = vec![json!({ "name": "bytes", "configuration": { "endian": "little" } })];
        if let Compression::Zstd { level } = self.compression {
            codecs.push(json!({ "name": "blosc", "configuration": {
                "cname": "zstd", "clevel": level, "shuffle": "shuffle", "typesize": width, "blocksize": 0,
            }}));
        }
        // The checksum turns a damaged chunk into a read error.
        codecs.push(json!({ "name": "crc32c" }));
        json!({
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": format!("float{}", 8 * width),
            "chunk_grid": { "name": "regular", "configuration": { "chunk_shape": chunk } },
            "chunk_key_encoding": { "name": "default", "configuration": { "separator": "/" } },
            "fill_value": "NaN",
            "codecs": codecs,
            "attributes": attributes,
            "dimension_names": dims,
        })
    }

    fn array(&self, name: &str, metadata: &Value) -> Result<Array<Files>> {
        let failed = |cause: String| Error::data(&self.files.root, name, cause);
        let metadata: ArrayMetadata =
            serde_json::from_value(metadata.clone()).map_err(|error| failed(error.to_string()))?;
        Array::new_with_metadata(self.files.clone(), &format!("/{name}"), metadata)
            .map_err(|error| failed(error.to_string()))
    }

    fn store<T: Element>(
        &self,
        array: &Array<Files>,
        name: &str,
        chunk: &[u64],
        elements: Vec<T>,
    ) -> Result<()> {
        let stored = array.store_chunk(chunk, elements);
        stored.map_err(|error| Error::data(&self.files.root, name, error))
    }
}

fn object(attributes: &Attributes) -> Map<String, Value> {
    let value = |value: &AttributeValue| match value {
        AttributeValue::Text(text) => Value::from(text.as_str()),
        AttributeValue::Numbers(numbers) => match &numbers[..] {
            [number] => Value::from(*number),
            numbers => Value::from(numbers),
        },
    };
    let pairs = attributes.iter();
    pairs
        .map(|(name, described)| (name.clone(), value(described)))
        .collect()
}

/// Folder that files are written to.
#[derive(Debug)]
struct Files {
    root: PathBuf,
    /// Files that may not be on disk yet.
    written: Mutex<Vec<PathBuf>>,
}

impl Files {
    fn written(&self) -> std::sync::MutexGuard<'_, Vec<PathBuf>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, path: PathBuf, bytes: &[u8]) -> std::io::Result<()> {
        fs::create_dir_all(durable::parent(&path))?;
        fs::write(&path, bytes)?;
        self.written().push(path);
        Ok(())
    }
}

impl WritableStorageTraits for Files {
    fn set(&self, key: &StoreKey, value: Bytes) -> Result<(), StorageError> {
        let written = self.write(self.root.join(key.as_str()), &value);
        written.map_err(|error| Arc::new(error).into())
    }

    fn set_partial_many(
        &self,
        key: &StoreKey,
        _: OffsetBytesIterator<'_>,
    ) -> Result<(), StorageError> {
        let cause = format!("{key}: chunks are written whole");
        Err(Arc::new(std::io::Error::other(cause)).into())
    }

    fn erase(&self, key: &StoreKey) -> Result<(), StorageError> {
        let removed = remove_if_there(&self.root.join(key.as_str()));
        removed.map_err(|error| Arc::new(error).into())
    }

    fn erase_prefix(&self, prefix: &StorePrefix) -> Result<(), StorageError> {
        let cause = format!("{prefix}: nothing is removed");
        Err(Arc::new(std::io::Error::other(cause)).into())
    }

    fn supports_set_partial(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::staged_folder::StagedFolder;
    use crate::{Calendar, Channel, Existing, Grid};

    #[test]
    fn chunks_have_their_names_on_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let grid = Grid::with_poles(3, 4).unwrap();
        let channels = [Channel::new("t2m".into())];
        let schema = Schema::new(&grid, Calendar::Gregorian, &channels).unwrap();
        let config = OutputConfig::new();
        let output = ZarrOutput::new(folder.path(), &schema, [1, 3, 2], &config).unwrap();
        let values = Array3::zeros([1, 3, 2]);
        let ranges = [4..5, 0..3, 2..4];
        output
            .write(&schema, (0, 0), 0, ranges, values.view())
            .unwrap();
        durable::tests::SYNCED.take();
        output.sync().unwrap();
        let names = ["", "t2m", "t2m/c", "t2m/c/4", "t2m/c/4/0"];
        let synced: Vec<PathBuf> = durable::tests::SYNCED.take();
        assert_eq!(synced, names.map(|name| folder.path().join(name)));
        // Each file is synced once.
        output.sync().unwrap();
        assert_eq!(durable::tests::SYNCED.take(), Vec::<PathBuf>::new());
    }

    #[test]
    fn each_folder_of_the_metadata_is_synced_once() {
        let folder = tempfile::tempdir().unwrap();
        let grid = Grid::with_poles(3, 4).unwrap();
        let channels = [Channel::new("t2m".into())];
        let schema = Schema::new(&grid, Calendar::Gregorian, &channels).unwrap();
        let staged = StagedFolder::open(&folder.path().join("a.zarr"), Existing::Reject).unwrap();
        let output =
            ZarrOutput::new(staged.path(), &schema, [1, 3, 4], &OutputConfig::new()).unwrap();
        let times = Times {
            seconds: &[0.0],
            start: None,
        };
        let root = staged.path().to_path_buf();
        durable::tests::SYNCED.take();
        output.finish(&schema, &times).unwrap();
        staged.commit(None).unwrap();
        let synced: Vec<PathBuf> = durable::tests::SYNCED.take();
        let folders: BTreeSet<&PathBuf> = synced.iter().collect();
        assert!(folders.contains(&root.join("latitude/c")), "{synced:?}");
        assert_eq!(folders.len(), synced.len(), "{synced:?}");
    }
}
