//! Description of the grid of a variable, which outputs keep: its map projection.

use super::coordinates::Coordinates;
use super::variable::{Attribute, Kind, Variable};
use crate::grid::description::{AttributeValue, Attributes, Description, Line, Mapping};

/// Attributes that coordinates in a projection keep.
const KEPT: [&str; 4] = ["standard_name", "long_name", "units", "axis"];
/// Standard names of coordinates in a projection.
const STANDARD_NAMES: [&str; 4] = [
    "projection_y_coordinate",
    "projection_x_coordinate",
    "grid_latitude",
    "grid_longitude",
];
/// Units of coordinates in a projection without a standard name.
const LENGTHS: [&str; 6] = ["m", "km", "metre", "metres", "meter", "meters"];

impl<'a> Coordinates<'a> {
    /// Finds the grid mapping that a variable names.
    pub(super) fn grid_mapping(&self, variable: &Variable) -> Option<&'a Variable> {
        let named = variable.text("grid_mapping")?;
        let name = named.split([' ', ':']).find(|word| !word.is_empty())?;
        let mut variables = self.container.variables().iter();
        variables.find(|other| other.name == name)
    }

    /// Describes the grid of a variable on these dims of rows and columns, if it has rows. A part
    /// that cannot be read is left out.
    pub(super) fn description(&self, variable: &Variable, dims: Option<[&str; 2]>) -> Description {
        let lines = dims.and_then(|[row, column]| Some([self.line(row)?, self.line(column)?]));
        Description {
            mapping: self.mapping(variable),
            lines,
            area_units: None,
        }
    }

    /// Returns the grid mapping that a variable names. That of HEALPix cells belongs to one dim,
    /// which outputs do not have.
    fn mapping(&self, variable: &Variable) -> Option<Mapping> {
        let found = self.grid_mapping(variable)?;
        let is_kept = found.text("grid_mapping_name")? != "healpix";
        // Names that all formats permit, without those of the format or of other variables.
        let is_named = |name: &str| {
            let mut letters = name.chars();
            name.starts_with(char::is_alphabetic)
                && letters.all(|letter| letter.is_alphanumeric() || letter == '_')
                && name != "coordinates"
        };
        is_kept.then(|| Mapping {
            name: found.name.clone(),
            attributes: attributes(found, is_named),
        })
    }

    /// Returns the coordinate of a dim, if it is in a projection.
    fn line(&self, dim: &str) -> Option<Line> {
        let is_line = |other: &&Variable| {
            let is_known = match other.text("standard_name") {
                Some(name) => STANDARD_NAMES.contains(&name),
                None => LENGTHS.contains(&other.text("units").unwrap_or_default()),
            };
            other.name == dim && other.dims == [dim] && other.kind != Kind::Other && is_known
        };
        let found = self.container.variables().iter().find(is_line)?;
        let values = self.values(found).ok()?;
        let are_finite = values.iter().all(|value| value.is_finite());
        are_finite.then(|| Line {
            values,
            attributes: attributes(found, |name| KEPT.contains(&name)),
        })
    }
}

/// Returns the texts and the finite numbers among some attributes of a variable.
fn attributes(variable: &Variable, is_kept: impl Fn(&str) -> bool) -> Attributes {
    let kept = variable.attributes.iter().filter(|(name, _)| is_kept(name));
    let known = kept.filter_map(|(name, value)| {
        let value = match value {
            Attribute::Text(text) => AttributeValue::Text(text.clone()),
            Attribute::Numbers(numbers) => AttributeValue::Numbers(numbers.values.clone()),
            Attribute::Other => return None,
        };
        let is_usable = match &value {
            AttributeValue::Text(_) => true,
            AttributeValue::Numbers(numbers) => {
                !numbers.is_empty() && numbers.iter().all(|number| number.is_finite())
            }
        };
        is_usable.then(|| (name.clone(), value))
    });
    known.collect()
}
