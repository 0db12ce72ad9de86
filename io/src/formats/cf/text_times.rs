//! Times that are texts of dates in a file, such as `xtime` of MPAS and `Times` of WRF.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use ndarray::{Array1, ArrayD};

use super::axis::{Axis, axis_of, is_time};
use super::coordinates::MAX_VALUES;
use super::time_axis::{has_reference, refused_time};
use super::unstructured::positions;
use super::variable::{Attribute, Container, Kind, Stamp, Variable};
use crate::Result;
use crate::time::units;

/// Attributes of texts that are kept, beside the units of the numbers.
const KEPT: [&str; 3] = ["standard_name", "axis", "calendar"];
/// Most bytes of the texts of a variable, those of the most numbers of a coordinate.
const MAX_BYTES: usize = 8 * MAX_VALUES;
/// Most bytes of the texts of a variable that is no time by its name or attributes.
const MAX_UNNAMED: usize = 1 << 20;
/// Number of characters of a text in an error.
const SHOWN: usize = 64;

/// Container in which texts of dates are numbers with units.
#[derive(Debug)]
struct Dated {
    container: Box<dyn Container>,
    variables: Vec<Variable>,
    /// Seconds since 1970-01-01 of each variable that has texts in the container.
    times: BTreeMap<usize, Vec<f64>>,
    /// Variables along each dim whose times may be any of them, which stay texts.
    undecided: BTreeMap<String, Vec<String>>,
}

/// Returns a container in which variables along one dim are times if their values are texts of
/// dates. The last dim of a variable of characters is the length of its texts. Of several variables
/// along a dim, those with the name of a time are times.
///
/// # Errors
/// A text that is no date, among dates in a variable with the name of a time, unless numbers along
/// its dim are times.
pub(crate) fn dated(container: Box<dyn Container>) -> Result<Box<dyn Container>> {
    let mut variables = container.variables().to_vec();
    let mut times = BTreeMap::new();
    let mut dims: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, variable) in variables.iter_mut().enumerate() {
        if let Some(found) = seconds(&*container, index)? {
            *variable = described(variable);
            times.insert(index, found);
            if !variable.dims[0].is_empty() && axis_of(variable) == Some(Axis::Time) {
                dims.entry(variable.dims[0].clone())
                    .or_default()
                    .push(index);
            }
        }
    }
    if times.is_empty() {
        return Ok(container);
    }
    let mut undecided = BTreeMap::new();
    for (dim, mut others) in dims {
        if others.len() < 2 {
            continue;
        }
        let count = others.len();
        others.retain(|&index| !is_named(&variables[index]));
        for index in &others {
            variables[*index] = container.variables()[*index].clone();
            times.remove(index);
        }
        if others.len() == count {
            let names = others.iter().map(|&index| variables[index].name.clone());
            undecided.insert(dim, names.collect());
        }
    }
    Ok(Box::new(Dated {
        container,
        variables,
        times,
        undecided,
    }))
}

/// Reads a variable in seconds since 1970-01-01, if it has texts, all of which are dates.
///
/// # Errors
/// A text that is no date, among dates in a variable with the name of a time, unless numbers along
/// its dim are times.
fn seconds(container: &dyn Container, index: usize) -> Result<Option<Vec<f64>>> {
    let variable = &container.variables()[index];
    let Some(texts) = texts(container, index) else {
        return Ok(None);
    };
    let Some(found) = units::of_texts(&texts, variable.text("calendar")) else {
        return Ok(None);
    };
    let has_dates = found.iter().any(Option::is_some);
    let is_required = has_dates && is_named(variable) && !has_numbers(container, &variable.dims[0]);
    let wrong = found.iter().position(Option::is_none);
    match wrong.filter(|_| is_required) {
        Some(wrong) => {
            let text: String = texts[wrong].trim_end().chars().take(SHOWN).collect();
            let found = format!("the text {text:?} at index {wrong}");
            Err(refused_time(container.path(), &variable.name, found))
        }
        None => Ok(found.into_iter().collect()),
    }
}

/// Reads the texts of a variable along one dim that may be the times of fields.
fn texts(container: &dyn Container, index: usize) -> Option<Vec<String>> {
    let variable = &container.variables()[index];
    let (count, dim) = (*variable.shape.first()?, variable.dims.first()?);
    if variable.kind != Kind::Other || variable.dims.len() > 2 || !is_small(variable) {
        return None;
    }
    // A lone date may be that of the file's production.
    if count == 1 && !is_named(variable) && variable.text("standard_name").is_none() {
        return None;
    }
    // Dates of stations, such as that of the first observation, are not times of fields.
    if axis_of(variable) != Some(Axis::Time) && positions(container, dim).is_some() {
        return None;
    }
    let texts = container.texts(index).ok()?;
    (texts.len() == count).then_some(texts)
}

/// Whether texts have neither too many bytes nor too many elements to be read, and at least one.
/// Few bytes of texts that may be anything, such as names of stations, are read to see if they are
/// dates.
fn is_small(variable: &Variable) -> bool {
    let mut extents = variable.shape.iter();
    let bytes = extents.try_fold(variable.width, |bytes, extent| bytes.checked_mul(*extent));
    let is_short = variable.shape[0] <= MAX_VALUES;
    let is_time = is_named(variable) || axis_of(variable) == Some(Axis::Time);
    let most = if is_time { MAX_BYTES } else { MAX_UNNAMED };
    is_short && bytes.is_some_and(|bytes| (1..=most).contains(&bytes))
}

/// Whether a variable is the time of fields by its name or attributes. A `date` may be that of the
/// file's production.
fn is_named(variable: &Variable) -> bool {
    let name = variable.name.to_lowercase();
    let is_common = is_time(&name) && !name.starts_with("date") || name == "xtime";
    let has = |attribute: &str, value: &str| {
        let text = variable.text(attribute);
        text.is_some_and(|text| text.eq_ignore_ascii_case(value))
    };
    is_common || has("standard_name", "time") || has("axis", "T")
}

/// Whether numbers with units along a dim are times, beside texts.
fn has_numbers(container: &dyn Container, dim: &str) -> bool {
    container.variables().iter().any(|variable| {
        variable.kind != Kind::Other
            && variable.lies_on(dim)
            && has_reference(variable)
            && axis_of(variable) == Some(Axis::Time)
    })
}

/// Returns the variable of numbers in place of a variable of texts.
fn described(texts: &Variable) -> Variable {
    let is_kept = |(name, _): &&(String, Attribute)| KEPT.contains(&name.as_str());
    let mut attributes: Vec<_> = texts.attributes.iter().filter(is_kept).cloned().collect();
    let mut add = |name: &str, text: &str| {
        attributes.push((name.into(), Attribute::Text(text.into())));
    };
    add("units", "seconds since 1970-01-01");
    if texts.text("calendar").is_none() {
        add("calendar", "proleptic_gregorian");
    }
    Variable {
        name: texts.name.clone(),
        dims: texts.dims[..1].to_vec(),
        shape: texts.shape[..1].to_vec(),
        kind: Kind::Double,
        dtype: texts.dtype.clone(),
        width: 8,
        attributes,
        chunk: None,
    }
}

impl Container for Dated {
    fn path(&self) -> &Path {
        self.container.path()
    }

    fn variables(&self) -> &[Variable] {
        &self.variables
    }

    fn unreadable(&self) -> &[(String, String)] {
        self.container.unreadable()
    }

    fn channels(&self) -> Option<&[String]> {
        self.container.channels()
    }

    fn single(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f32>, String> {
        self.container.single(variable, cells)
    }

    fn double(&self, variable: usize, cells: &[Range<usize>]) -> Result<ArrayD<f64>, String> {
        match self.times.get(&variable) {
            Some(times) => Ok(Array1::from(times[cells[0].clone()].to_vec()).into_dyn()),
            None => self.container.double(variable, cells),
        }
    }

    fn undecided_times(&self, dim: &str) -> &[String] {
        self.undecided.get(dim).map_or(&[], Vec::as_slice)
    }

    fn stamp(&self, variable: usize, first: &[usize]) -> Option<Stamp> {
        self.container.stamp(variable, first)
    }

    fn fetched(&self) -> u64 {
        self.container.fetched()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        self.container.fingerprint()
    }

    fn modified(&self) -> Result<u32> {
        self.container.modified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_bounded_by_their_number_and_their_bytes() {
        let is_small_of = |name: &str, shape: &[usize], width: usize| {
            is_small(&Variable {
                name: name.into(),
                dims: vec!["time".into(); shape.len()],
                shape: shape.to_vec(),
                kind: Kind::Other,
                dtype: "texts".into(),
                width,
                attributes: Vec::new(),
                chunk: None,
            })
        };
        let is_small = |shape: &[usize], width| is_small_of("xtime", shape, width);
        assert!(is_small(&[MAX_VALUES], 8));
        assert!(is_small(&[1000, 64], 1));
        assert!(!is_small(&[MAX_VALUES], 64));
        assert!(!is_small(&[MAX_VALUES + 1, 1], 1));
        assert!(!is_small(&[usize::MAX, 2], 1));
        // Texts without a character, of any number.
        assert!(!is_small(&[1000], 0));
        // Dates are times; names of stations are none.
        let count = MAX_UNNAMED / 64;
        assert!(is_small_of("date", &[count + 1, 64], 1));
        assert!(
            is_small_of("names", &[count, 64], 1) && !is_small_of("names", &[count + 1, 64], 1)
        );
    }
}
