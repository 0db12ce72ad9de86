//! Description of a grid in files, which outputs keep.

use serde::{Deserialize, Serialize};

/// Map projection of a grid and units of its areas, as a file describes them. They do not affect
/// how fields are read or weighted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Description {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mapping: Option<Mapping>,
    /// Coordinates of rows and of columns in the projection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lines: Option<[Line; 2]>,
    /// Units of the areas of cells, such as `m2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) area_units: Option<String>,
}

/// Grid mapping by the CF conventions (CF 1.11, section 5.6): a variable without values of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Mapping {
    pub(crate) name: String,
    pub(crate) attributes: Attributes,
}

/// Coordinate of rows or columns in a projection, such as metres along `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) values: Vec<f64>,
    pub(crate) attributes: Attributes,
}

/// Attributes of a variable, by name.
pub(crate) type Attributes = Vec<(String, AttributeValue)>;

/// Value of an attribute. Numbers are finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum AttributeValue {
    Text(String),
    Numbers(Vec<f64>),
}

impl Description {
    /// Whether a file describes nothing.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns a checksum, by which ranks compare the description.
    pub(crate) fn checksum(&self) -> u32 {
        crc32fast::hash(format!("{self:?}").as_bytes())
    }
}

/// Returns an attribute with a text.
pub(crate) fn attribute(name: &str, text: impl Into<String>) -> (String, AttributeValue) {
    (name.into(), AttributeValue::Text(text.into()))
}
