//! Unpacking and missing values by the CF conventions (CF 1.11, sections 2.5.1 and 8.1).

use std::fmt;
use std::ops::Range;
use std::path::Path;

use hdf5_metno::types::{IntSize, TypeDescriptor};
use ndarray::{Array, Dimension};
use rayon::prelude::*;

use crate::attributes::Attributes;
use crate::{Error, Missing, Result};

/// Attributes that list missing values.
const SENTINELS: [&str; 2] = ["_FillValue", "missing_value"];
const SCALE: &str = "scale_factor";
const OFFSET: &str = "add_offset";

/// Type of stored numbers, as far as packing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberType {
    /// Single-precision floats.
    Single,
    /// Signed integers, which may represent unsigned ones.
    Signed {
        /// Size in bytes.
        bytes: usize,
    },
    /// Unsigned integers.
    Unsigned,
    /// Floats of other precisions.
    Double,
}

/// Conversion of the stored numbers of a dataset to values: `scale_factor · number + add_offset`,
/// except for numbers that represent a missing value.
#[derive(Debug)]
pub(crate) struct Packing {
    /// Value to add to negative numbers to obtain the unsigned ones that they represent.
    wrap: Option<f64>,
    sentinels: Vec<Sentinel>,
    /// Factor and offset, if the dataset has at least one of them.
    scale: Option<(f64, f64)>,
}

/// Number that represents a missing value.
#[derive(Debug)]
pub(crate) struct Sentinel {
    attribute: &'static str,
    value: f64,
    /// Whether the dataset or the attribute has single precision, so that values such as 1e20 must
    /// be compared in single precision.
    single: bool,
}

impl Packing {
    /// Reads the packing of a dataset whose numbers have the type `stored`.
    ///
    /// # Errors
    /// Attributes of the wrong type, or that describe an unsupported packing.
    pub(crate) fn of(attributes: &impl Attributes, stored: NumberType) -> Result<Self> {
        let unsigned = attributes.text("_Unsigned")?;
        let wrap = match (unsigned.as_deref(), stored) {
            (Some("true"), NumberType::Signed { bytes }) => Some((8.0 * bytes as f64).exp2()),
            (Some("false"), NumberType::Unsigned) => {
                let expected = "true for unsigned integers, or signed integers";
                return Err(attributes.refused("_Unsigned", "false", expected));
            }
            // The attribute does not affect other numbers.
            (None | Some("true" | "false"), _) => None,
            (Some(other), _) => {
                return Err(attributes.refused("_Unsigned", other, "true or false"));
            }
        };
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
        let mut sentinels = Vec::new();
        for attribute in SENTINELS {
            let Some(numbers) = attributes.numbers(attribute)? else {
                continue;
            };
            let single = numbers.single || stored == NumberType::Single;
            // NaN is a missing value in any case.
            let named = numbers.values.into_iter().filter(|value| !value.is_nan());
            sentinels.extend(named.map(|value| Sentinel {
                attribute,
                value: unwrapped(value, wrap),
                single,
            }));
        }
        let packed = factor.is_some() || offset.is_some();
        Ok(Self {
            wrap,
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
        self.wrap.is_none() && self.sentinels.is_empty() && self.scale.is_none()
    }

    /// Unpacks the numbers of the box `cells` of a dataset, whose path and name for errors are
    /// `attributes`.
    ///
    /// # Errors
    /// Missing values, if they are [rejected](Missing::Reject).
    pub(crate) fn values<D: Dimension>(
        &self,
        numbers: Stored<D>,
        missing: Missing,
        attributes: (&Path, &str),
        cells: &[Range<usize>],
    ) -> Result<Array<f32, D>> {
        let infinite = |value: f32| (!value.is_finite()).then(|| value.to_string());
        match numbers {
            Stored::Single(values) if self.is_plain() => {
                if values.as_slice_memory_order().is_some_and(all_finite) {
                    return Ok(values);
                }
                check(&values, missing, attributes, cells, infinite)?;
                Ok(values)
            }
            Stored::Single(numbers) => {
                let numbers = Stored::Double(numbers.mapv(f64::from));
                self.values(numbers, missing, attributes, cells)
            }
            Stored::Double(numbers) => {
                check(&numbers, missing, attributes, cells, |number| {
                    match self.missing(number) {
                        Some(sentinel) => Some(sentinel.to_string()),
                        None => infinite(self.value(number) as f32),
                    }
                })?;
                Ok(numbers.mapv(|number| self.value(number) as f32))
            }
        }
    }

    /// Returns the sentinel that a stored number equals, if any.
    fn missing(&self, stored: f64) -> Option<&Sentinel> {
        let stored = unwrapped(stored, self.wrap);
        self.sentinels.iter().find(|sentinel| {
            stored == sentinel.value || (sentinel.single && stored as f32 == sentinel.value as f32)
        })
    }

    /// Unpacks a stored number; returns NaN if it is missing.
    pub(crate) fn value(&self, stored: f64) -> f64 {
        if self.missing(stored).is_some() {
            return f64::NAN;
        }
        let stored = unwrapped(stored, self.wrap);
        self.scale
            .map_or(stored, |(factor, offset)| stored * factor + offset)
    }
}

/// Returns the unsigned number that a stored one represents, or the number itself without `wrap`.
fn unwrapped(stored: f64, wrap: Option<f64>) -> f64 {
    match wrap {
        Some(wrap) if stored < 0.0 => stored + wrap,
        _ => stored,
    }
}

/// Numbers of a dataset, in the precision in which they were read.
pub(crate) enum Stored<D: Dimension> {
    Single(Array<f32, D>),
    Double(Array<f64, D>),
}

impl<D: Dimension> Stored<D> {
    /// Size in memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Single(numbers) => numbers.len() * 4,
            Self::Double(numbers) => numbers.len() * 8,
        }
    }
}

/// Whether all values are finite; vectorised, on all threads.
fn all_finite(values: &[f32]) -> bool {
    const LANES: usize = 16;
    // Zero times a finite number is zero; times any other it is NaN, which persists in the sum.
    let finite = |part: &[f32]| {
        let (vectors, rest) = part.as_chunks::<LANES>();
        let mut sums = [0.0; LANES];
        for vector in vectors {
            for (sum, value) in sums.iter_mut().zip(vector) {
                *sum += value * 0.0;
            }
        }
        sums.iter().chain(rest).all(|value| value.is_finite())
    };
    values.par_chunks(1 << 16).all(finite)
}

/// Checks that a box has no missing numbers, unless they are allowed. `describe` returns a
/// description of a number if it is missing.
fn check<T: Copy, D: Dimension>(
    numbers: &Array<T, D>,
    missing: Missing,
    (path, dataset): (&Path, &str),
    cells: &[Range<usize>],
    describe: impl Fn(T) -> Option<String>,
) -> Result<()> {
    if missing != Missing::Reject {
        return Ok(());
    }
    // Position in row-major order, from which the index is computed.
    let mut numbers_in_order = numbers.iter().enumerate();
    let Some((position, found)) =
        numbers_in_order.find_map(|(position, &number)| Some((position, describe(number)?)))
    else {
        return Ok(());
    };
    let mut rest = position;
    let mut index = vec![0; cells.len()];
    for (dim, range) in cells.iter().enumerate().rev() {
        index[dim] = range.start + rest % range.len();
        rest /= range.len();
    }
    let expected = if ["inf", "-inf"].contains(&found.as_str()) {
        "a finite value; an infinite one is not missing, write NaN or a value in its place"
    } else {
        "a finite value (Missing::Allow reads missing ones as NaN)"
    };
    Err(Error::Value {
        path: path.into(),
        dataset: dataset.into(),
        index,
        found,
        expected: expected.into(),
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_seen_everywhere() {
        let mut values = vec![f32::MAX; (1 << 16) + 37];
        values[3] = -0.0;
        assert!(all_finite(&values) && all_finite(&[]));
        let places = (0..18).chain((1 << 16) - 2..values.len());
        for place in places {
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let right = std::mem::replace(&mut values[place], wrong);
                assert!(!all_finite(&values), "{wrong} at {place}");
                values[place] = right;
            }
        }
    }
}
