//! NetCDF files: the classic formats (NetCDF-3, CDF-5), and NetCDF-4.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdf5_reader::Hdf5File;
use ndarray::ArrayD;
use netcdf_reader::{
    NcAttrValue, NcFile, NcFormat, NcMetadataMode, NcOpenOptions, NcSliceInfo, NcSliceInfoElem,
    NcType, NcVariable, Storage,
};

use crate::alike::fingerprint;
use crate::attributes::Numbers;
use crate::cf::variable::{Attribute, Container, Kind, Stamp, Variable};
use crate::file_bytes::FileBytes;
use crate::{Error, Result};

/// Largest number of values of an attribute that is kept.
const MAX_VALUES: usize = 64;

/// The variables of the root group of a NetCDF file.
pub(crate) struct NetCdf {
    path: PathBuf,
    file: NcFile,
    bytes: Arc<FileBytes>,
    variables: Vec<Variable>,
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
    /// A file that is not NetCDF or is truncated; an extent that a file of its size cannot hold.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let unreadable = |cause: String| Error::Unreadable {
            path: path.into(),
            format: "NetCDF file",
            cause,
        };
        let bytes = FileBytes::open(path, usize::MAX).map_err(|e| Error::io(path, e))?;
        let bytes = Arc::new(bytes);
        let open = |metadata_mode| {
            let options = NcOpenOptions {
                metadata_mode,
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
            // A text that is not UTF-8, such as the name of an institution, leaves the fields as they are.
            let is_text = error.to_string().contains("utf-8");
            let lenient = is_text.then(|| open(NcMetadataMode::Lossy).ok()).flatten();
            let lenient = lenient.filter(|file| keeps_fields(file, hdf5));
            file = lenient.ok_or_else(|| unreadable(error.to_string()))?;
        }
        let mut variables = Vec::new();
        for found in file.variables().map_err(|e| unreadable(e.to_string()))? {
            let shape = found.shape();
            // Each index has some bytes.
            if let Some(extent) = shape.iter().find(|extent| **extent > bytes.len()) {
                let found_text = format!("{shape:?}, with an extent of {extent}");
                let expected = format!("extents that a file of {} bytes can hold", bytes.len());
                return Err(Error::shape(path, found.name(), found_text, expected));
            }
            let chunk = hdf5
                .as_ref()
                .and_then(|file| file.dataset(found.name()).ok()?.chunks());
            variables.push(variable(found, chunk));
        }
        Ok(Self {
            path: path.into(),
            file,
            bytes,
            variables,
        })
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
        &[]
    }

    fn single(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f32>, String> {
        let name = &self.variables[variable].name;
        let read = self
            .file
            .read_variable_slice::<f32>(name, &self.slice(cells));
        shaped(read.map_err(|e| e.to_string())?, cells)
    }

    fn double(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f64>, String> {
        let name = &self.variables[variable].name;
        let read = match cells.is_empty() {
            true => self.file.read_variable_as_f64(name),
            false => self
                .file
                .read_variable_slice_as_f64(name, &self.slice(cells)),
        };
        shaped(read.map_err(|e| e.to_string())?, cells)
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
}

/// Attributes on which values depend.
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

/// Whether a file whose metadata were read in part has all on which values and dims of its variables depend.
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
        NcType::Double | NcType::Int64 | NcType::UInt64 => (Kind::Double, 8),
        NcType::Int | NcType::UInt => (Kind::Double, 4),
        NcType::Short | NcType::UShort => (Kind::Double, 2),
        NcType::Byte | NcType::UByte => (Kind::Double, 1),
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
