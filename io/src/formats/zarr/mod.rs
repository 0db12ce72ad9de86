//! Zarr stores in folders, versions 2 and 3.

mod dates;
mod folder;
mod json;
mod texts;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::f16;
use ndarray::ArrayD;
use serde_json::Value;
use zarrs::array::{
    Array, ArrayBytes, ArrayShardedExt, ArraySubset, ChunkShape, Element, ElementOwned,
};
use zarrs::metadata::ArrayMetadata;

use crate::formats::cf::axis::is_time;
use crate::formats::cf::variable::{Attribute, Container, Kind, Stamp, Variable, stamp};
use crate::ranks::alike::{fingerprint, modified};
use crate::{Error, Result};
use dates::as_integers;
use folder::Folder;
use json::{attribute, json, text};
use texts::{as_bytes, of_bytes};

/// Maximum size of a decoded chunk, in bytes.
const MAX_CHUNK: u64 = 1 << 31;
/// Maximum size of a decoded shard, in bytes.
const MAX_SHARD: u64 = 1 << 40;
/// Maximum number of chunks in a shard. Chosen so that bytes times chunks, which zarrs multiplies,
/// fit in u64.
const MAX_CHUNKS: u64 = 1 << 22;
/// Assumed size of a text of any length, in bytes; texts of dates are shorter.
const TEXT: usize = 64;
/// Files that identify a folder as a Zarr group.
const GROUPS: [&str; 4] = ["zarr.json", ".zgroup", ".zmetadata", ".zattrs"];

/// Attribute of a group that lists its variables in order.
pub(crate) const ORDER: &str = "halocline_variables";

/// Zarr group in a folder.
///
/// Members are found by listing the folder. Consolidated metadata are not used, because they may be
/// out of date.
#[derive(Debug)]
pub(crate) struct ZarrStore {
    folder: Arc<Folder>,
    arrays: Vec<Array<Folder>>,
    variables: Vec<Variable>,
    unreadable: Vec<(String, String)>,
}

/// Whether a folder is a Zarr group.
pub(crate) fn is_group(folder: &Path) -> bool {
    GROUPS.iter().any(|name| folder.join(name).is_file())
}

impl ZarrStore {
    /// Reads the metadata of the arrays of a group.
    ///
    /// # Errors
    /// A folder that cannot be listed.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let entries = std::fs::read_dir(path).map_err(|e| Error::io(path, e))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io(path, e))?;
            names.extend(entry.file_name().into_string());
        }
        // The order in which a folder is listed is arbitrary.
        let order = order(path);
        let place = |name: &String| order.iter().position(|listed| listed == name);
        names.sort_by_cached_key(|name| (place(name).unwrap_or(usize::MAX), name.clone()));
        let mut store = Self {
            folder: Arc::new(Folder {
                root: path.into(),
                largest: AtomicU64::new(0),
                fetched: AtomicU64::new(0),
            }),
            arrays: Vec::new(),
            variables: Vec::new(),
            unreadable: Vec::new(),
        };
        for name in names {
            match store.member(&name) {
                Ok(Some((array, variable))) => {
                    store.arrays.push(array);
                    store.variables.push(variable);
                }
                Ok(None) => {}
                // Text arrays are never fields. Only as times could they be coordinates, in which
                // case they are reported.
                Err(_) if store.is_text(&name) && !is_time(&name) => {}
                Err(cause) => store.unreadable.push((name, cause)),
            }
        }
        Ok(store)
    }

    /// Opens a member of the group, if it is an array.
    fn member(&self, name: &str) -> Result<Option<(Array<Folder>, Variable)>, String> {
        let Some(mut metadata) = self.metadata(name)? else {
            return Ok(None);
        };
        let elements = dtype(&metadata);
        as_bytes(&mut metadata);
        let (array, mut variable) = self.opened(name, &metadata)?;
        variable.dtype = elements;
        Ok(Some((array, variable)))
    }

    /// Opens an array by its metadata, after checking them.
    fn opened(&self, name: &str, metadata: &Value) -> Result<(Array<Folder>, Variable), String> {
        let array = self.array(name, metadata)?;
        let (kind, width) = kind(&array, metadata);
        let shape: Vec<usize> = extents(array.shape())?;
        let attributes = array.attributes();
        let dims = match array.dimension_names() {
            Some(dims) => dims
                .iter()
                .map(|dim| dim.clone().unwrap_or_default())
                .collect(),
            None => match attributes.get("_ARRAY_DIMENSIONS") {
                Some(Value::Array(dims)) if dims.len() == shape.len() => {
                    let name = |dim: &Value| dim.as_str().unwrap_or_default().to_owned();
                    dims.iter().map(name).collect()
                }
                _ => vec![String::new(); shape.len()],
            },
        };
        let mut attributes: Vec<(String, Attribute)> = attributes
            .iter()
            .map(|(name, value)| (name.clone(), attribute(name, value)))
            .collect();
        // In version 2, the fill value of absent chunks marks missing values, as in xarray. For 1-D
        // coordinates it does not: libraries write zero, which is a valid value.
        let has_fill = attributes.iter().any(|(name, _)| name == "_FillValue");
        if let Some(fill) = metadata.get("fill_value")
            && metadata.get("zarr_format") == Some(&Value::from(2))
            && shape.len() > 1
            && !has_fill
            && !fill.is_null()
            && !fill.is_boolean()
        {
            attributes.push(("_FillValue".into(), attribute("_FillValue", fill)));
        }
        let grid = &metadata["chunk_grid"]["name"];
        if !grid.is_null() && grid != "regular" {
            return Err(format!("a chunk grid that is {grid}, expected \"regular\""));
        }
        // zarrs multiplies the numbers of chunks on all levels by the bytes of a shard.
        let codecs = metadata["codecs"].to_string();
        if codecs.matches("sharding_indexed").count() > 1 {
            return Err("shards in shards, expected one level".into());
        }
        let extents_of =
            |shape: &ChunkShape| -> Vec<u64> { shape.iter().map(|e| e.get()).collect() };
        let whole = array.chunk_shape(&vec![0; shape.len()]).map_err(text)?;
        let part = array.subchunk_shape().unwrap_or_else(|| whole.clone());
        let (whole, part) = (extents_of(&whole), extents_of(&part));
        let parts = bytes_of(&part, width, MAX_CHUNK).map_err(|e| format!("chunks of {e}"))?;
        let all = bytes_of(&whole, width, MAX_SHARD).map_err(|e| format!("shards of {e}"))?;
        if all / parts > MAX_CHUNKS {
            return Err(format!(
                "shards of {whole:?} with chunks of {part:?}, expected at most {MAX_CHUNKS} chunks in a shard"
            ));
        }
        // The smallest unit that is decoded as a whole.
        let chunk = match array.effective_subchunk_shape() {
            Some(part) if array.is_exclusively_sharded() => extents_of(&part),
            _ => whole,
        };
        let bytes = bytes_of(&chunk, width, MAX_CHUNK).map_err(|e| format!("chunks of {e}"))?;
        self.folder.largest.fetch_max(bytes, Ordering::Relaxed);
        let variable = Variable {
            name: name.into(),
            dims,
            shape,
            kind,
            dtype: dtype(metadata),
            width,
            attributes,
            chunk: Some(extents(&chunk)?),
        };
        Ok((array, variable))
    }

    /// Returns an attribute of the group, or null.
    pub(crate) fn attribute(&self, name: &str) -> Value {
        group_attribute(&self.folder.root, name)
    }

    /// Reads an array of `datetime64`, in seconds since 1970-01-01.
    pub(crate) fn dates(&self, name: &str) -> Result<Vec<f64>, String> {
        let metadata = self.metadata(name)?;
        let mut metadata = metadata.ok_or("no such array")?;
        let unit = as_integers(&mut metadata)?;
        let (array, variable) = self.opened(name, &metadata)?;
        let &[count] = &variable.shape[..] else {
            return Err(format!("{:?}, expected one dim", variable.shape));
        };
        bytes_of(&[count as u64], variable.width, MAX_CHUNK)?;
        let subset = ArraySubset::from(std::iter::once(0..count as u64));
        let ticks: Vec<i64> = array.retrieve_array_subset(&subset).map_err(text)?;
        Ok(ticks.into_iter().map(|tick| tick as f64 * unit).collect())
    }

    /// Whether a member is an array of strings.
    fn is_text(&self, name: &str) -> bool {
        let Ok(Some(metadata)) = self.metadata(name) else {
            return false;
        };
        let elements = dtype(&metadata);
        let is_text = ["<U", ">U", "|S", "|O", "string", "utf", "bytes"];
        is_text.iter().any(|text| elements.contains(text))
    }

    /// Opens an array by its metadata, in which numbers that JSON lacks, as Python writes them, are
    /// already quoted.
    fn array(&self, name: &str, metadata: &Value) -> Result<Array<Folder>, String> {
        let mut metadata = metadata.clone();
        if metadata.get("zarr_format") == Some(&Value::from(2))
            && let Some(attributes) = json(&self.folder.root.join(name).join(".zattrs"))?
        {
            metadata["attributes"] = attributes;
        }
        let metadata: ArrayMetadata = serde_json::from_value(metadata).map_err(text)?;
        Array::new_with_metadata(self.folder.clone(), &format!("/{name}"), metadata).map_err(text)
    }

    /// Reads the metadata of a member, if it is an array.
    fn metadata(&self, name: &str) -> Result<Option<Value>, String> {
        for file in ["zarr.json", ".zarray"] {
            let path = self.folder.root.join(name).join(file);
            let Some(value) = json(&path)? else {
                continue;
            };
            let is_group = value.get("node_type") == Some(&Value::from("group"));
            return Ok((!is_group).then_some(value));
        }
        Ok(None)
    }

    /// Returns the paths, in the folder, of the files with the metadata and up to 16 evenly spaced
    /// chunks of each array.
    fn samples(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for (array, variable) in self.arrays.iter().zip(&self.variables) {
            let folder = Path::new(&variable.name);
            let chunks = some_chunks(array.chunk_grid_shape());
            let chunks = chunks.map(|chunk| PathBuf::from(array.chunk_key(&chunk).as_str()));
            let metadata = ["zarr.json", ".zarray", ".zattrs"].map(|name| folder.join(name));
            files.extend(metadata.into_iter().chain(chunks));
        }
        files.retain(|file| self.folder.root.join(file).is_file());
        files
    }

    /// Reads a box of an array with elements of type `T`.
    fn elements<T: ElementOwned>(
        &self,
        variable: usize,
        cells: &[Range<usize>],
    ) -> Result<Vec<T>, String> {
        let ranges = cells
            .iter()
            .map(|cells| cells.start as u64..cells.end as u64);
        let subset = ArraySubset::from(ranges);
        self.arrays[variable]
            .retrieve_array_subset(&subset)
            .map_err(text)
    }
}

/// Reads a box as f64, by the first listed type that matches the array.
macro_rules! read_as_double {
    ($store:ident, $variable:ident, $cells:ident, $($element:ty),*) => {{
        let data_type = $store.arrays[$variable].data_type();
        $(if <$element>::validate_data_type(data_type).is_ok() {
            let values: Vec<$element> = $store.elements($variable, $cells)?;
            return shaped(values.into_iter().map(|value| value as f64).collect(), $cells);
        })*
    }};
}

impl Container for ZarrStore {
    fn path(&self) -> &Path {
        &self.folder.root
    }

    fn variables(&self) -> &[Variable] {
        &self.variables
    }

    fn unreadable(&self) -> &[(String, String)] {
        &self.unreadable
    }

    fn single(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f32>, String> {
        shaped(self.elements(variable, cells)?, cells)
    }

    fn double(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f64>, String> {
        read_as_double!(
            self, variable, cells, f64, f32, i64, u64, i32, u32, i16, u16, i8, u8
        );
        if f16::validate_data_type(self.arrays[variable].data_type()).is_ok() {
            let values: Vec<f16> = self.elements(variable, cells)?;
            return shaped(values.into_iter().map(f64::from).collect(), cells);
        }
        let values: Vec<bool> = self.elements(variable, cells)?;
        let values = values.into_iter().map(|value| f64::from(u8::from(value)));
        shaped(values.collect(), cells)
    }

    fn texts(&self, variable: usize) -> Result<Vec<String>, String> {
        let array = &self.arrays[variable];
        let shape = &self.variables[variable].shape;
        if String::validate_data_type(array.data_type()).is_ok() {
            let cells: Vec<Range<usize>> = shape.iter().map(|extent| 0..*extent).collect();
            return self.elements(variable, &cells);
        }
        let bytes: ArrayBytes<'static> = array
            .retrieve_array_subset(&array.subset_all())
            .map_err(text)?;
        let bytes = bytes.into_fixed().map_err(text)?;
        Ok(of_bytes(&bytes, shape.first().copied().unwrap_or(1)))
    }

    fn stamp(&self, variable: usize, first: &[usize]) -> Option<Stamp> {
        let array = &self.arrays[variable];
        let shape = array.chunk_shape(&vec![0; first.len()]).ok()?;
        let dims = first.iter().zip(shape.iter());
        let chunk: Vec<u64> = dims
            .map(|(first, extent)| *first as u64 / extent.get())
            .collect();
        stamp(&self.folder.root.join(array.chunk_key(&chunk).as_str()))
    }

    fn fetched(&self) -> u64 {
        self.folder.fetched.load(Ordering::Relaxed)
    }

    /// Computes a checksum of the metadata and of up to 16 evenly spaced chunks of each array.
    fn fingerprint(&self) -> Result<(u64, u32)> {
        let mut size = 0;
        let mut hasher = crc32fast::Hasher::new();
        for file in self.samples() {
            let (length, sum) = fingerprint(&self.folder.root.join(&file))?;
            size += length;
            hasher.update(file.to_string_lossy().as_bytes());
            hasher.update(&sum.to_le_bytes());
        }
        Ok((size, hasher.finalize()))
    }

    fn modified(&self) -> Result<u32> {
        let root = &self.folder.root;
        modified(self.samples().iter().map(|file| root.join(file)))
    }
}

/// Iterates over up to 16 evenly spaced chunks of a grid, from the first to the last.
fn some_chunks(grid: &[u64]) -> impl Iterator<Item = Vec<u64>> {
    const COUNT: u64 = 16;
    let all = grid
        .iter()
        .fold(1_u64, |all, extent| all.saturating_mul(*extent));
    let count = all.min(COUNT);
    (0..count).map(move |number| {
        let mut rest = u128::from(all - 1) * u128::from(number) / u128::from(count.max(2) - 1);
        let place = |extent: &u64| {
            let place = rest % u128::from(*extent);
            rest /= u128::from(*extent);
            place as u64
        };
        let mut chunk: Vec<u64> = grid.iter().rev().map(place).collect();
        chunk.reverse();
        chunk
    })
}

/// Returns the variables that a group lists in [`ORDER`], if any.
fn order(group: &Path) -> Vec<String> {
    serde_json::from_value(group_attribute(group, ORDER)).unwrap_or_default()
}

/// Returns an attribute of a group, or null.
fn group_attribute(group: &Path, name: &str) -> Value {
    let attributes = |file: &str| json(&group.join(file)).ok().flatten();
    let found = attributes("zarr.json").map(|metadata| metadata["attributes"][name].clone());
    let found = found.or_else(|| attributes(".zattrs").map(|metadata| metadata[name].clone()));
    found.unwrap_or_default()
}

/// Returns the name of an array's element type.
fn dtype(metadata: &Value) -> String {
    let name = ["data_type", "dtype"].map(|key| metadata.get(key).map(Value::to_string));
    name.into_iter().flatten().collect()
}

/// Returns the kind and the size in bytes of the elements of an array.
fn kind(array: &Array<Folder>, metadata: &Value) -> (Kind, usize) {
    let data_type = array.data_type();
    // Dates are stored as integers.
    let name = dtype(metadata);
    let dates = ["datetime64", "timedelta64", "M8", "m8"];
    if dates.iter().any(|date| name.contains(date)) {
        return (Kind::Other, 8);
    }
    macro_rules! widths {
        ($($element:ty),*) => {
            [$((<$element>::validate_data_type(data_type).is_ok(), size_of::<$element>())),*]
        };
    }
    if f32::validate_data_type(data_type).is_ok() {
        return (Kind::Single, 4);
    }
    let width = |widths: &[(bool, usize)]| {
        let (_, width) = widths.iter().find(|(valid, _)| *valid)?;
        Some(*width)
    };
    if let Some(width) = width(&widths!(i64, i32, i16, i8)) {
        return (Kind::Signed, width);
    }
    if let Some(width) = width(&widths!(u64, u32, u16, u8)) {
        return (Kind::Unsigned, width);
    }
    match width(&widths!(f64, f16, bool)) {
        Some(width) => (Kind::Double, width),
        None => (Kind::Other, data_type.fixed_size().unwrap_or(TEXT)),
    }
}

fn shaped<T>(values: Vec<T>, cells: &[Range<usize>]) -> Result<ArrayD<T>, String> {
    let extents: Vec<usize> = cells.iter().map(ExactSizeIterator::len).collect();
    ArrayD::from_shape_vec(extents, values).map_err(text)
}

/// Returns the size of a chunk whose elements have `width` bytes, if it is at most `most` bytes.
fn bytes_of(shape: &[u64], width: usize, most: u64) -> Result<u64, String> {
    let bytes = shape
        .iter()
        .try_fold(width as u64, |bytes, extent| bytes.checked_mul(*extent));
    bytes
        .filter(|bytes| *bytes <= most)
        .ok_or_else(|| format!("{shape:?}, expected at most {most} bytes"))
}

fn extents(extents: &[u64]) -> Result<Vec<usize>, String> {
    let extents = extents
        .iter()
        .map(|&extent| usize::try_from(extent).map_err(text));
    extents.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_chunks_reach_from_the_first_to_the_last() {
        let all = |grid: &[u64]| some_chunks(grid).collect::<Vec<_>>();
        assert_eq!(all(&[2, 2]), [[0, 0], [0, 1], [1, 0], [1, 1]]);
        assert_eq!(
            (all(&[]), all(&[3, 0])),
            (vec![vec![]], Vec::<Vec<u64>>::new())
        );
        let some = all(&[1000, 7]);
        assert_eq!(
            (some.len(), &some[0][..], &some[15][..]),
            (16, &[0, 0][..], &[999, 6][..])
        );
        assert!(some.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
