//! Plans: what is written about a model, in code or a file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use halocline_core::{Error, Gather, Result};
use serde::{Deserialize, Serialize};

use super::style::Style;

/// How the parameters of a model are sharded over the axes of a mesh, and how tensors enter and leave
/// its layers. A plan knows neither sizes nor ranks.
///
/// Patterns match paths of modules: `*` is any one part, `**` any parts, `{a,b}` one of several.
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
    /// Axes that a mesh may lack: what the plan says of them then has no effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub optional_axes: Vec<String>,
    /// Types of layers of your own whose parameters are those of a type that the styles know: `MyLinear`
    /// as `Linear`. Such a layer calls [`with_layer_placements`](halocline_ops::with_layer_placements).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kind: BTreeMap<String, String>,
    /// Layers by path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer: Vec<Entry>,
    /// Parameters that are stored in shards, and gathered for use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub store: Vec<Store>,
}

/// Style of the layers whose paths match a pattern; [`Plan`] has an example.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The pattern.
    pub path: String,
    /// What the layers do.
    pub style: Style,
}

/// Parameters that each rank along an axis stores a part of, as in FSDP: gathered for use, with
/// gradients that are added and scattered.
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
    /// The axis.
    pub over: String,
    /// The least number of elements of a parameter; smaller ones stay whole.
    #[serde(default)]
    pub at_least: usize,
    /// Whether parameters are gathered again in the backward pass.
    #[serde(default, with = "gather")]
    pub gather: Gather,
}

impl Store {
    /// Storage of the parameters that match, of any size, over an axis.
    pub fn new(path: &str, over: &str) -> Self {
        Self {
            path: path.into(),
            over: over.into(),
            at_least: 0,
            gather: Gather::default(),
        }
    }

    /// This storage for parameters of at least so many elements.
    #[must_use]
    pub fn with_at_least(self, elements: usize) -> Self {
        Self {
            at_least: elements,
            ..self
        }
    }

    /// This storage with another choice of when parameters are gathered.
    #[must_use]
    pub fn with_gather(self, gather: Gather) -> Self {
        Self { gather, ..self }
    }
}

impl Plan {
    /// This plan, with a style for the layers whose paths match a pattern.
    #[must_use]
    pub fn with_layer(mut self, path: &str, style: Style) -> Self {
        let path = path.into();
        self.layer.push(Entry { path, style });
        self
    }

    /// This plan, with storage in shards.
    #[must_use]
    pub fn with_store(mut self, store: Store) -> Self {
        self.store.push(store);
        self
    }

    /// This plan, for a type of layer of your own that has the parameters of a known one.
    #[must_use]
    pub fn with_kind(mut self, own: &str, known: &str) -> Self {
        self.kind.insert(own.into(), known.into());
        self
    }

    /// The axes that it names.
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
        let stores = self.store.iter().map(|store| &store.over[..]);
        let layers = self.layer.iter().flat_map(|entry| entry.style.axes());
        optional.chain(stores).chain(layers).collect()
    }

    /// This plan, for meshes that may lack an axis.
    #[must_use]
    pub fn with_optional_axis(mut self, axis: &str) -> Self {
        self.optional_axes.push(axis.into());
        self
    }

    /// Reads a plan from a file, TOML or JSON by its extension.
    ///
    /// # Errors
    /// A file that cannot be read, or is no plan.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let named = |error: String| Error::Plan(format!("{}: {error}", path.display()));
        let text = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
        let json = path
            .extension()
            .is_some_and(|extension| extension == "json");
        let plan = if json {
            serde_json::from_str(&text).map_err(|error| error.to_string())
        } else {
            toml::from_str(&text).map_err(|error| error.to_string())
        };
        plan.map_err(named)
    }

    /// The plan as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a plan is tables, lists and texts")
    }

    /// A plan from TOML.
    ///
    /// # Errors
    /// A text that is no plan, with the place.
    pub fn from_toml(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| Error::Plan(error.to_string()))
    }

    /// The plan as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a plan is tables, lists and texts")
    }

    /// A plan from JSON.
    ///
    /// # Errors
    /// A text that is no plan, with the place.
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
        Again,
        Once,
    }

    #[allow(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde passes a reference"
    )]
    pub(super) fn serialize<S: Serializer>(gather: &Gather, to: S) -> Result<S::Ok, S::Error> {
        match gather {
            Gather::Again => Text::Again,
            Gather::Once => Text::Once,
        }
        .serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Gather, D::Error> {
        Ok(match Text::deserialize(from)? {
            Text::Again => Gather::Again,
            Text::Once => Gather::Once,
        })
    }
}
