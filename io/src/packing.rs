//! Packed and missing values by the CF conventions (CF 1.11, sections 2.5.1 and 8.1).

use std::fmt;
use std::path::Path;

use hdf5_metno::Dataset;
use hdf5_metno::types::{FloatSize, IntSize, TypeDescriptor};

use crate::attributes::Attributes;
use crate::{Error, Result};

/// The attributes that list missing values.
const SENTINELS: [&str; 2] = ["_FillValue", "missing_value"];
const SCALE: &str = "scale_factor";
const OFFSET: &str = "add_offset";

/// Conversion of the stored numbers of a dataset to values: `scale_factor · number + add_offset`,
/// except for numbers that stand for a missing value.
#[derive(Debug)]
pub(crate) struct Packing {
    sentinels: Vec<Sentinel>,
    /// Factor and offset, if the dataset has one of them.
    scale: Option<(f64, f64)>,
}

/// A number that stands for a missing value.
#[derive(Debug)]
pub(crate) struct Sentinel {
    attribute: &'static str,
    value: f64,
    /// Whether the dataset or the attribute has single precision, in which 1e20 has other bits.
    single: bool,
}

impl Packing {
    /// Reads the packing of the dataset called `name`.
    ///
    /// # Errors
    /// Attributes that are not numbers, or describe a packing that is not supported.
    pub(crate) fn of(path: &Path, name: &'static str, dataset: &Dataset) -> Result<Self> {
        let attributes = Attributes::of(path, name, dataset)?;
        if let Some(unsigned) = attributes.text("_Unsigned")? {
            let expected =
                "an integer type that has the sign of its values; write them unpacked, as f32";
            return Err(attributes.refused("_Unsigned", &unsigned, expected));
        }
        let number = |attribute, usable: fn(f64) -> bool| {
            let value = attributes.number(attribute)?;
            match value.filter(|&value| !usable(value)) {
                Some(value) => {
                    let expected = "a finite number, and no factor of zero";
                    Err(attributes.refused(attribute, &value.to_string(), expected))
                }
                None => Ok(value),
            }
        };
        let factor = number(SCALE, |value| value.is_finite() && value != 0.0)?;
        let offset = number(OFFSET, f64::is_finite)?;
        let kind = dataset
            .dtype()
            .and_then(|dtype| dtype.to_descriptor())
            .map_err(|e| Error::hdf5(path, name, e))?;
        let mut sentinels = Vec::new();
        for attribute in SENTINELS {
            let Some(numbers) = attributes.numbers(attribute)? else {
                continue;
            };
            let single = numbers.single || kind == TypeDescriptor::Float(FloatSize::U4);
            // NaN stands for a missing value in any case.
            let named = numbers.values.into_iter().filter(|value| !value.is_nan());
            sentinels.extend(named.map(|value| Sentinel {
                attribute,
                value,
                single,
            }));
        }
        let packed = factor.is_some() || offset.is_some();
        Ok(Self {
            sentinels,
            scale: packed.then(|| (factor.unwrap_or(1.0), offset.unwrap_or(0.0))),
        })
    }

    /// Whether stored numbers of this type can be fields: floats, or packed integers that are exact
    /// in f64.
    pub(crate) fn permits(&self, kind: &TypeDescriptor) -> bool {
        match kind {
            TypeDescriptor::Float(_) => true,
            TypeDescriptor::Integer(size) | TypeDescriptor::Unsigned(size) => {
                self.scale.is_some() && *size != IntSize::U8
            }
            _ => false,
        }
    }

    /// Whether the stored numbers are the values themselves.
    pub(crate) fn is_plain(&self) -> bool {
        self.sentinels.is_empty() && self.scale.is_none()
    }

    /// The sentinel that a stored number equals, if any.
    pub(crate) fn missing(&self, stored: f64) -> Option<&Sentinel> {
        self.sentinels.iter().find(|sentinel| {
            stored == sentinel.value || (sentinel.single && stored as f32 == sentinel.value as f32)
        })
    }

    /// The value of a stored number, NaN if it is missing.
    pub(crate) fn value(&self, stored: f64) -> f64 {
        if self.missing(stored).is_some() {
            return f64::NAN;
        }
        self.scale
            .map_or(stored, |(factor, offset)| stored * factor + offset)
    }
}

impl fmt::Display for Sentinel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.single {
            write!(f, "{:?}", self.value as f32)?;
        } else {
            write!(f, "{:?}", self.value)?;
        }
        write!(f, ", which is the {}", self.attribute)
    }
}
