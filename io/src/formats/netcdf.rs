//! NetCDF files: the classic formats (NetCDF-3, CDF-5) and NetCDF-4.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hdf5_reader::error::Error as ChunkError;
use hdf5_reader::filters::{
    FILTER_DEFLATE, FILTER_FLETCHER32, FILTER_LZ4, FILTER_NBIT, FILTER_SCALEOFFSET, FILTER_SHUFFLE,
    FILTER_SZIP,
};
use hdf5_reader::messages::HdfMessage;
use hdf5_reader::messages::filter_pipeline::FilterDescription;
use hdf5_reader::{DEFAULT_MAX_CHUNK_BYTES, Dataset, FilterRegistry, Hdf5File};
use ndarray::ArrayD;
use netcdf_reader::{
    NcAttrValue, NcFile, NcFormat, NcMetadataMode, NcOpenOptions, NcReadable, NcSliceInfo,
    NcSliceInfoElem, NcType, NcVariable, Storage,
};

use super::cf::variable::{Attribute, Container, Kind, Stamp, Variable};
use super::compressed::{limit, zstandard_bound};
use super::file_bytes::FileBytes;
use crate::attributes::Numbers;
use crate::ranks::alike::{fingerprint, modified};
use crate::{Error, Result};

/// Largest number of values in an attribute; longer ones are not kept.
const MAX_VALUES: usize = 64;

/// Registered HDF5 filter ID of Zstandard.
const ZSTANDARD: u16 = 32015;
/// HDF5 IDs of the filters that are supported.
const DECODED: [u16; 8] = [
    FILTER_DEFLATE,
    FILTER_SHUFFLE,
    FILTER_FLETCHER32,
    FILTER_SZIP,
    FILTER_NBIT,
    FILTER_SCALEOFFSET,
    FILTER_LZ4,
    ZSTANDARD,
];
/// Names of registered filters that are not supported, by HDF5 ID.
const OTHERS: [(u16, &str); 6] = [
    (307, "bzip2"),
    (32000, "LZF"),
    (32001, "Blosc"),
    (32008, "Bitshuffle"),
    (32013, "ZFP"),
    (32026, "Blosc2"),
];

/// Variables of the root group of a NetCDF file.
pub(crate) struct NetCdf {
    path: PathBuf,
    file: NcFile,
    bytes: Arc<FileBytes>,
    variables: Vec<Variable>,
    /// Number type of each variable.
    types: Vec<NcType>,
    unreadable: Vec<(String, String)>,
}

impl std::fmt::Debug for NetCdf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetCdf")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl NetCdf {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// A file that is not NetCDF or is truncated; an extent that a file of its size cannot hold;
    /// fields only in groups other than the root.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let unreadable = |cause: String| Error::Unreadable {
            path: path.into(),
            format: "NetCDF file",
            cause,
        };
        let bytes = FileBytes::open(path, usize::MAX).map_err(|e| Error::io(path, e))?;
        let bytes = Arc::new(bytes);
        // Decoded bytes of the largest chunk of all variables; set when these are known.
        let largest = Arc::new(AtomicU64::new(0));
        let open = |metadata_mode| {
            let options = NcOpenOptions {
                metadata_mode,
                filter_registry: Some(filters(largest.clone())),
                ..NcOpenOptions::default()
            };
            NcFile::from_storage_with_options(bytes.clone(), options)
        };
        let mut file = open(NcMetadataMode::Strict).map_err(|e| unreadable(e.to_string()))?;
        let is_hdf5 = matches!(file.format(), NcFormat::Nc4 | NcFormat::Nc4Classic);
        let hdf5 = is_hdf5
            .then(|| Hdf5File::from_storage(bytes.clone()))
            .transpose();
        let hdf5 = hdf5.map_err(|e| unreadable(e.to_string()))?;
        if let (Err(error), Some(hdf5)) = (file.variables(), &hdf5) {
            // Text that is not UTF-8, such as the name of an institution, does not affect the
            // fields.
            let is_text = error.to_string().contains("utf-8");
            let lenient = is_text.then(|| open(NcMetadataMode::Lossy).ok()).flatten();
            let lenient = lenient.filter(|file| keeps_fields(file, hdf5));
            file = lenient.ok_or_else(|| unreadable(error.to_string()))?;
        }
        let (mut variables, mut types, mut filtered) = (Vec::new(), Vec::new(), Vec::new());
        for found in file.variables().map_err(|e| unreadable(e.to_string()))? {
            let shape = found.shape();
            // Each index takes up some bytes, so a larger extent means damage.
            if let Some(extent) = shape.iter().find(|extent| **extent > bytes.len()) {
                let found_text = format!("{shape:?}, with an extent of {extent}");
                let expected = format!("extents that a file of {} bytes can hold", bytes.len());
                return Err(Error::shape(path, found.name(), found_text, expected));
            }
            let dataset = |file: &Hdf5File| file.dataset(found.name()).ok();
            let dataset = hdf5.as_ref().and_then(dataset);
            let variable = variable(found, dataset.as_ref().and_then(Dataset::chunks));
            let cause = hdf5.as_ref().zip(dataset.as_ref());
            let cause = cause.and_then(|(file, dataset)| undecoded(file, dataset));
            if let Some(cause) = cause.filter(|_| variable.kind != Kind::Other) {
                filtered.push((variable.name, cause));
                continue;
            }
            let extents = variable.chunk.iter().flatten();
            let chunk = extents.fold(variable.width as u64, |bytes, extent| {
                bytes.saturating_mul(*extent as u64)
            });
            largest.fetch_max(chunk.min(DEFAULT_MAX_CHUNK_BYTES as u64), Ordering::Relaxed);
            variables.push(variable);
            types.push(found.dtype().clone());
        }
        // A field has at least two dims.
        let mut held = variables.iter().map(|variable| variable.dims.len());
        if filtered.is_empty()
            && held.all(|dims| dims < 2)
            && let Ok(root) = file.root_group()
            && let [first, ..] = &root.groups[..]
        {
            let names = root.groups.iter().map(|group| group.name.as_str());
            let names = names.collect::<Vec<_>>().join(", ");
            let found = format!("no field in the root group, beside the groups {names}");
            let expected = format!(
                "fields in the root group; in xarray, open_dataset(path, group={:?}).to_netcdf(\"fields.nc\") writes \
                 a file of those of a group",
                first.name
            );
            return Err(Error::shape(path, "/", found, expected));
        }
        Ok(Self {
            path: path.into(),
            file,
            bytes,
            variables,
            types,
            unreadable: filtered,
        })
    }

    /// Reads a box of a variable with numbers of type `T`, decoding chunks on all threads.
    fn numbers<T: NcReadable>(
        &self,
        variable: usize,
        cells: &[Range<usize>],
    ) -> netcdf_reader::Result<ArrayD<T>> {
        let Variable { name, chunk, .. } = &self.variables[variable];
        match chunk {
            Some(_) => self
                .file
                .read_variable_slice_parallel(name, &self.slice(cells)),
            None => self.file.read_variable_slice(name, &self.slice(cells)),
        }
    }

    /// Reads a box of a variable with numbers of type `T` as f64.
    fn widened<T: NcReadable + Into<f64>>(
        &self,
        variable: usize,
        cells: &[Range<usize>],
    ) -> netcdf_reader::Result<ArrayD<f64>> {
        let numbers = self.numbers::<T>(variable, cells)?;
        Ok(numbers.mapv(Into::into))
    }

    fn slice(&self, cells: &[Range<usize>]) -> NcSliceInfo {
        let range = |range: &Range<usize>| NcSliceInfoElem::Slice {
            start: range.start as u64,
            end: range.end as u64,
            step: 1,
        };
        NcSliceInfo {
            selections: cells.iter().map(range).collect(),
        }
    }
}

impl Container for NetCdf {
    fn path(&self) -> &Path {
        &self.path
    }

    fn variables(&self) -> &[Variable] {
        &self.variables
    }

    fn unreadable(&self) -> &[(String, String)] {
        &self.unreadable
    }

    fn single(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f32>, String> {
        let read = self.numbers::<f32>(variable, cells);
        shaped(read.map_err(|e| e.to_string())?, cells)
    }

    fn double(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f64>, String> {
        let name = &self.variables[variable].name;
        let read = match &self.types[variable] {
            _ if cells.is_empty() => self.file.read_variable_as_f64(name),
            NcType::Float => self.widened::<f32>(variable, cells),
            NcType::Double => self.widened::<f64>(variable, cells),
            NcType::Byte => self.widened::<i8>(variable, cells),
            NcType::UByte => self.widened::<u8>(variable, cells),
            NcType::Short => self.widened::<i16>(variable, cells),
            NcType::UShort => self.widened::<u16>(variable, cells),
            NcType::Int => self.widened::<i32>(variable, cells),
            NcType::UInt => self.widened::<u32>(variable, cells),
            // 64-bit integers, not all of which are exact in f64.
            _ => self
                .file
                .read_variable_slice_as_f64(name, &self.slice(cells)),
        };
        shaped(read.map_err(|e| e.to_string())?, cells)
    }

    fn texts(&self, variable: usize) -> Result<Vec<String>, String> {
        let read = self
            .file
            .read_variable_as_strings(&self.variables[variable].name);
        read.map_err(|e| e.to_string())
    }

    fn stamp(&self, _: usize, _: &[usize]) -> Option<Stamp> {
        Some(self.bytes.stamp)
    }

    fn fetched(&self) -> u64 {
        self.bytes.fetched()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        fingerprint(&self.path)
    }

    fn modified(&self) -> Result<u32> {
        modified([&self.path])
    }
}

/// Registers the decoder of Zstandard, for a file whose largest decoded chunk has `largest` bytes.
fn filters(largest: Arc<AtomicU64>) -> FilterRegistry {
    let mut filters = FilterRegistry::new();
    let decode = move |_: &FilterDescription, data: &[u8], _: usize| {
        zstandard(data, largest.load(Ordering::Relaxed))
    };
    filters.register(ZSTANDARD, Box::new(decode));
    filters
}

/// Decodes a chunk with Zstandard, unless it claims more memory than a chunk can take.
fn zstandard(data: &[u8], largest: u64) -> hdf5_reader::error::Result<Vec<u8>> {
    let bound = zstandard_bound(data).filter(|bound| *bound <= limit(largest));
    let Some(bound) = bound else {
        let cause = "compressed data that claims more bytes than a chunk has";
        return Err(ChunkError::DecompressionError(cause.into()));
    };
    let decoded = zstd::bulk::decompress(data, bound as usize);
    decoded.map_err(|error| ChunkError::DecompressionError(error.to_string()))
}

/// Describes the first filter of a dataset that is not supported, if there is one.
fn undecoded(file: &Hdf5File, dataset: &Dataset) -> Option<String> {
    let header = file.get_or_parse_header(dataset.address()).ok()?;
    let pipelines = header.messages.iter().filter_map(|message| match message {
        HdfMessage::FilterPipeline(pipeline) => Some(&pipeline.filters),
        _ => None,
    });
    let id = pipelines
        .flatten()
        .map(|filter| filter.id)
        .find(|id| !DECODED.contains(id))?;
    let name = OTHERS.iter().find(|(other, _)| *other == id);
    let name = name.map_or("of no known name", |(_, name)| name);
    Some(format!(
        "chunks by HDF5's filter {id} ({name}), expected zlib, szip, LZ4, Zstandard, n-bit or scale-offset, \
         shuffled or not; rewrite it with zlib"
    ))
}

/// Attributes that affect the meaning of values.
const MEANINGS: [&str; 8] = [
    "_FillValue",
    "missing_value",
    "scale_factor",
    "add_offset",
    "_Unsigned",
    "units",
    "calendar",
    "standard_name",
];

/// Whether a file whose metadata were only partly read still has all attributes and dims that
/// affect its variables.
fn keeps_fields(file: &NcFile, hdf5: &Hdf5File) -> bool {
    let keeps = |found: &NcVariable| {
        let Ok(dataset) = hdf5.dataset(found.name()) else {
            return false;
        };
        let attributes = dataset.attributes();
        let has = |name: &str| attributes.iter().any(|attribute| attribute.name == name);
        let held = |name: &str| found.attributes().iter().any(|held| held.name == name);
        let has_dims = found.shape().is_empty() || has("DIMENSION_LIST") || has("CLASS");
        has_dims && MEANINGS.iter().all(|name| !has(name) || held(name))
    };
    file.variables()
        .is_ok_and(|variables| variables.iter().all(keeps))
}

/// Checks the shape of a box that was read.
fn shaped<T>(values: ArrayD<T>, cells: &[Range<usize>]) -> Result<ArrayD<T>, String> {
    let extents: Vec<usize> = cells.iter().map(ExactSizeIterator::len).collect();
    if values.shape() == extents {
        return Ok(values);
    }
    Err(format!("{:?} values of {extents:?}", values.shape()))
}

fn variable(found: &NcVariable, chunk: Option<Vec<u32>>) -> Variable {
    let (kind, width) = match found.dtype() {
        NcType::Float => (Kind::Single, 4),
        NcType::Double => (Kind::Double, 8),
        NcType::UInt64 => (Kind::Unsigned, 8),
        NcType::UInt => (Kind::Unsigned, 4),
        NcType::UShort => (Kind::Unsigned, 2),
        NcType::UByte => (Kind::Unsigned, 1),
        NcType::Int64 => (Kind::Signed, 8),
        NcType::Int => (Kind::Signed, 4),
        NcType::Short => (Kind::Signed, 2),
        NcType::Byte => (Kind::Signed, 1),
        // Length, address and index of a text in the file.
        NcType::String => (Kind::Other, 16),
        _ => (Kind::Other, 1),
    };
    let shape: Vec<usize> = found
        .shape()
        .iter()
        .map(|&extent| extent as usize)
        .collect();
    let chunk = chunk.filter(|chunk| chunk.len() == shape.len());
    Variable {
        name: found.name().into(),
        dims: found
            .dimensions()
            .iter()
            .map(|dim| dim.name.clone())
            .collect(),
        kind,
        dtype: format!("{:?}", found.dtype()),
        width,
        attributes: found
            .attributes()
            .iter()
            .map(|attribute| (attribute.name.clone(), value(&attribute.value)))
            .collect(),
        chunk: chunk.map(|chunk| chunk.iter().map(|&extent| extent as usize).collect()),
        shape,
    }
}

fn value(value: &NcAttrValue) -> Attribute {
    if let Some(text) = value.as_string() {
        return Attribute::Text(text.trim_end_matches('\0').into());
    }
    let values = value.as_f64_vec();
    match values.filter(|values| (1..=MAX_VALUES).contains(&values.len())) {
        Some(values) => Attribute::Numbers(Numbers {
            values,
            single: matches!(value, NcAttrValue::Floats(_)),
        }),
        None => Attribute::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_claim_more_than_chunks_take_are_refused() {
        let data = zstd::bulk::compress(&[0; 1 << 20], 3).unwrap();
        assert_eq!(zstandard(&data, 1 << 20).unwrap().len(), 1 << 20);
        let error = zstandard(&data, 1 << 10).unwrap_err().to_string();
        assert!(error.contains("more bytes than a chunk has"), "{error}");
        assert!(zstandard(&data[1..], 1 << 20).is_err());
    }
}
