//! Plans, as written in code or in a file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use halocline_core::{Error, Gather, Result};
use serde::{Deserialize, Serialize};

use super::style::Style;

/// Specification of how the parameters of a model are sharded over mesh axes, and how tensors enter
/// and leave its layers. A plan is independent of sizes and ranks.
///
/// Patterns match module paths: `*` matches any one part, `**` any number of parts, `{a,b}` one of
/// several.
///
/// # Example
/// ```
/// use halocline_models::parallel::{Plan, Store, Style};
///
/// let plan = Plan::default()
///     .with_layer("mlp.up", Style::colwise("tensor"))
///     .with_layer("mlp.down", Style::rowwise("tensor"))
///     .with_store(Store::new("**", "data"));
/// assert_eq!(Plan::from_toml(&plan.to_toml())?, plan);
/// assert_eq!(Plan::from_json(&plan.to_json())?, plan);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Axes that a mesh may lack; the plan then ignores them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub optional_axes: Vec<String>,
    /// User-defined layer types whose parameters match those of a known type: `MyLinear` as
    /// `Linear`. Such a layer must call
    /// [`with_layer_placements`](halocline_ops::with_layer_placements).
    #[serde(rename = "kind", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kinds: BTreeMap<String, String>,
    /// Layers by path.
    #[serde(rename = "layer", default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Entry>,
    /// Parameters stored in shards and gathered for use.
    #[serde(rename = "store", default, skip_serializing_if = "Vec::is_empty")]
    pub stores: Vec<Store>,
}

/// Style of the layers whose paths match a pattern; [`Plan`] has an example. Several entries may
/// match one layer if each names other axes: their placements are joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Pattern of the layers' paths.
    pub path: String,
    /// Style of the layers.
    pub style: Style,
}

/// Parameters stored in shards along an axis, as in FSDP: gathered for use, with gradients
/// reduce-scattered.
///
/// # Example
/// ```
/// use halocline_core::Gather;
/// use halocline_models::parallel::{Plan, Store};
///
/// let store = Store::new("blocks.**", "data").with_at_least(1 << 14).with_gather(Gather::Once);
/// let plan = Plan::default().with_store(store);
/// assert!(plan.to_toml().contains("at_least = 16384"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// Pattern of the paths of parameters.
    pub path: String,
    /// Mesh axis. Files may also call it `over`.
    #[serde(alias = "over")]
    pub axis: String,
    /// Minimum number of elements of a parameter; smaller ones stay whole.
    #[serde(default)]
    pub at_least: usize,
    /// Whether parameters are gathered again in the backward pass.
    #[serde(default, with = "gather")]
    pub gather: Gather,
}

impl Store {
    /// Stores parameters that match, of any size, along an axis.
    pub fn new(path: &str, axis: &str) -> Self {
        Self {
            path: path.into(),
            axis: axis.into(),
            at_least: 0,
            gather: Gather::default(),
        }
    }

    /// Sets the minimum number of elements of a parameter.
    #[must_use]
    pub fn with_at_least(self, elements: usize) -> Self {
        Self {
            at_least: elements,
            ..self
        }
    }

    /// Sets when parameters are gathered.
    #[must_use]
    pub fn with_gather(self, gather: Gather) -> Self {
        Self { gather, ..self }
    }
}

impl Plan {
    /// Adds a style for the layers whose paths match a pattern.
    #[must_use]
    pub fn with_layer(mut self, path: &str, style: Style) -> Self {
        let path = path.into();
        self.layers.push(Entry { path, style });
        self
    }

    /// Adds storage in shards.
    #[must_use]
    pub fn with_store(mut self, store: Store) -> Self {
        self.stores.push(store);
        self
    }

    /// Declares that a user-defined layer type `kind` has the parameters of a known one, such as
    /// `MyLinear` as `Linear`.
    #[must_use]
    pub fn with_kind_as(mut self, kind: &str, known: &str) -> Self {
        self.kinds.insert(kind.into(), known.into());
        self
    }

    /// Returns the axes named in the plan.
    ///
    /// # Example
    /// ```
    /// use halocline_models::parallel::{Plan, Store, Style};
    ///
    /// let plan = Plan::default()
    ///     .with_layer("up", Style::colwise("tensor"))
    ///     .with_store(Store::new("**", "data"));
    /// assert_eq!(plan.axes().into_iter().collect::<Vec<_>>(), ["data", "tensor"]);
    /// ```
    pub fn axes(&self) -> BTreeSet<&str> {
        let optional = self.optional_axes.iter().map(String::as_str);
        let stores = self.stores.iter().map(|store| &store.axis[..]);
        let layers = self.layers.iter().flat_map(|entry| entry.style.axes());
        optional.chain(stores).chain(layers).collect()
    }

    /// Allows meshes that lack an axis.
    #[must_use]
    pub fn with_optional_axis(mut self, axis: &str) -> Self {
        self.optional_axes.push(axis.into());
        self
    }

    /// Reads a plan from a file, as JSON if the extension is `json`, else as TOML.
    ///
    /// # Errors
    /// The file cannot be read, or is not a plan.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let named = |error: String| Error::Plan(format!("{}: {error}", path.display()));
        let text = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
        let extension = path.extension();
        let plan = if extension.is_some_and(|extension| extension == "json") {
            serde_json::from_str(&text).map_err(|error| error.to_string())
        } else {
            toml::from_str(&text).map_err(|error| error.to_string())
        };
        plan.map_err(named)
    }

    /// Returns the plan as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a plan is tables, lists and texts")
    }

    /// Parses a plan from TOML.
    ///
    /// # Errors
    /// The text is not a plan; the error states where.
    pub fn from_toml(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| Error::Plan(error.to_string()))
    }

    /// Returns the plan as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a plan is tables, lists and texts")
    }

    /// Parses a plan from JSON.
    ///
    /// # Errors
    /// The text is not a plan; the error states where.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| Error::Plan(error.to_string()))
    }
}

/// [`Gather`] as text.
mod gather {
    use halocline_core::Gather;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Text {
        #[serde(alias = "again")]
        EachPass,
        Once,
    }

    #[allow(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde passes a reference"
    )]
    pub(super) fn serialize<S: Serializer>(gather: &Gather, to: S) -> Result<S::Ok, S::Error> {
        match gather {
            Gather::EachPass => Text::EachPass,
            Gather::Once => Text::Once,
        }
        .serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Gather, D::Error> {
        Ok(match Text::deserialize(from)? {
            Text::EachPass => Gather::EachPass,
            Text::Once => Gather::Once,
        })
    }
}
