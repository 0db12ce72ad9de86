//! Times that are texts of dates in a file, such as `xtime` of MPAS and `Times` of WRF.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use ndarray::{Array1, ArrayD};

use super::axis::{Axis, axis_of, is_time};
use super::coordinates::MAX_VALUES;
use super::unstructured::positions;
use super::variable::{Attribute, Container, Kind, Stamp, Variable};
use crate::{Result, time_units};

/// Attributes of texts that are kept, beside the units of the numbers.
const KEPT: [&str; 3] = ["standard_name", "axis", "calendar"];

/// Container in which texts of dates are numbers with units.
#[derive(Debug)]
struct Dated {
    container: Box<dyn Container>,
    variables: Vec<Variable>,
    /// Seconds since 1970-01-01 of each variable that has texts in the container.
    times: BTreeMap<usize, Vec<f64>>,
}

/// Returns a container in which variables along one dim are times if their values are texts of
/// dates. The last dim of a variable of characters is the length of its texts.
pub(crate) fn dated(container: Box<dyn Container>) -> Box<dyn Container> {
    let mut variables = container.variables().to_vec();
    let mut times = BTreeMap::new();
    for (index, variable) in variables.iter_mut().enumerate() {
        if let Some(found) = seconds(&*container, index) {
            *variable = described(variable);
            times.insert(index, found);
        }
    }
    if times.is_empty() {
        return container;
    }
    Box::new(Dated {
        container,
        variables,
        times,
    })
}

/// Reads a variable in seconds since 1970-01-01, if it has texts, all of which are dates.
fn seconds(container: &dyn Container, index: usize) -> Option<Vec<f64>> {
    let variable = &container.variables()[index];
    let (count, dim) = (*variable.shape.first()?, variable.dims.first()?);
    let mut extents = variable.shape.iter();
    let size = extents.try_fold(1_usize, |size, extent| size.checked_mul(*extent));
    let is_small = size.is_some_and(|size| (1..=MAX_VALUES).contains(&size));
    if variable.kind != Kind::Other || variable.dims.len() > 2 || !is_small {
        return None;
    }
    // A lone date may be that of the file's production.
    let name = variable.name.to_lowercase();
    let is_named = is_time(&name) && !name.starts_with("date") || name == "xtime";
    if count == 1 && !is_named && variable.text("standard_name").is_none() {
        return None;
    }
    // Dates of stations, such as that of the first observation, are not times of fields.
    if axis_of(variable) != Some(Axis::Time) && positions(container, dim).is_some() {
        return None;
    }
    let texts = container.texts(index).ok()?;
    let texts = (texts.len() == count).then_some(texts)?;
    time_units::of_texts(&texts, variable.text("calendar"))
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

    fn stamp(&self, variable: usize, first: &[usize]) -> Option<Stamp> {
        self.container.stamp(variable, first)
    }

    fn fetched(&self) -> u64 {
        self.container.fetched()
    }

    fn fingerprint(&self) -> Result<(u64, u32)> {
        self.container.fingerprint()
    }
}
