//! Styles of layers, and what they say of parameters.

use std::collections::BTreeMap;

use halocline_core::{Error, PlanPlacement, Result};
use serde::{Deserialize, Serialize};

/// Placements by mesh axis.
pub type Axes = BTreeMap<String, PlanPlacement>;

/// What a layer does on the axes of a mesh. The names are those of PyTorch's tensor parallelism.
///
/// # Example
/// ```
/// use halocline_core::PlanPlacement;
/// use halocline_models::parallel::{Plan, Style};
///
/// // The rows of whole heads of 64 features; the result sharded in its tokens.
/// let rows = Style::rowwise("tensor").with_unit(64).with_output(PlanPlacement::Shard(1));
/// let plan = Plan::default().with_layer("blocks.*.attention.output", rows);
/// assert!(plan.to_toml().contains("rowwise"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Style {
    /// Each rank computes some outputs from all inputs: columns of a linear layer or an embedding,
    /// output channels of a convolution. The input fans out, and the result is sharded in its features.
    Colwise(Split),
    /// Each rank computes a part of all outputs from some inputs: rows of a linear layer, rows of an
    /// embedding, input channels of a convolution. The parts are added, and then a bias.
    Rowwise(Split),
    /// The layer computes on shards of a sequence, with whole parameters: norms. Dropout has no
    /// parameters and needs no style.
    SequenceParallel {
        /// The axis.
        axis: String,
        /// The dim of the sequence.
        #[serde(default = "one_dim")]
        dim: isize,
        /// The placement of the result; by default it is left as it is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output: Option<PlanPlacement>,
    },
    /// Placements of the input.
    PrepareInput(Axes),
    /// Placements of the result.
    PrepareOutput(Axes),
    /// Placements of input and result.
    PrepareInputOutput {
        /// Of the input.
        input: Axes,
        /// Of the result.
        output: Axes,
    },
    /// Placements of parameters by name, of the input and of the result: what the other styles are
    /// made of.
    Placed(Placed),
}

/// Division of a layer's features over an axis.
///
/// # Example
/// ```
/// use halocline_models::parallel::Style;
///
/// let Style::Colwise(split) = Style::colwise("tensor").with_unit(64) else {
///     unreachable!("colwise makes a Colwise");
/// };
/// assert_eq!((split.axis, split.unit), ("tensor".to_string(), 64));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// The axis.
    pub axis: String,
    /// Features that stay on one rank, such as those of a head of attention.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub unit: usize,
    /// The placement of the input; by default it fans out column-wise, and is sharded in its features
    /// row-wise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<PlanPlacement>,
    /// The placement of the result; by default it stays as it is column-wise, and is replicated
    /// row-wise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<PlanPlacement>,
}

impl Style {
    /// The axes that it names.
    pub(super) fn axes(&self) -> Vec<&str> {
        let tables = match self {
            Self::Colwise(Split { axis, .. })
            | Self::Rowwise(Split { axis, .. })
            | Self::SequenceParallel { axis, .. } => return vec![axis],
            Self::PrepareInput(axes) | Self::PrepareOutput(axes) => vec![axes],
            Self::PrepareInputOutput { input, output } => vec![input, output],
            Self::Placed(placed) => {
                let tables = placed.parameters.values();
                tables.chain([&placed.input, &placed.output]).collect()
            }
        };
        let names = tables.into_iter().flat_map(BTreeMap::keys);
        names.map(String::as_str).collect()
    }
}

impl Split {
    fn over(axis: &str) -> Self {
        Self {
            axis: axis.into(),
            unit: 1,
            input: None,
            output: None,
        }
    }
}

/// Placements of a layer's parameters, input and result.
///
/// # Example
/// The columns of a table, by a style for any kind of layer:
/// ```
/// use halocline_core::PlanPlacement;
/// use halocline_models::parallel::{Axes, Placed, Plan, Style};
///
/// let columns = Axes::from([("tensor".into(), PlanPlacement::Shard(1))]);
/// let placed = Placed {
///     parameters: [("table".into(), columns)].into(),
///     ..Placed::default()
/// };
/// let plan = Plan::default().with_layer("positions", Style::Placed(placed));
/// assert_eq!(Plan::from_toml(&plan.to_toml())?, plan);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placed {
    /// Of parameters, by their names in the layer. Those not named stay whole.
    #[serde(default)]
    pub parameters: BTreeMap<String, Axes>,
    /// Cells of a sharded dim that stay on one rank.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub unit: usize,
    /// Of the input.
    #[serde(default)]
    pub input: Axes,
    /// Of the result.
    #[serde(default)]
    pub output: Axes,
}

fn one() -> usize {
    1
}

fn one_dim() -> isize {
    1
}

fn is_one(unit: &usize) -> bool {
    *unit == 1
}

impl Style {
    /// [`Colwise`](Self::Colwise) over an axis.
    pub fn colwise(axis: &str) -> Self {
        Self::Colwise(Split::over(axis))
    }

    /// [`Rowwise`](Self::Rowwise) over an axis.
    pub fn rowwise(axis: &str) -> Self {
        Self::Rowwise(Split::over(axis))
    }

    /// [`SequenceParallel`](Self::SequenceParallel) over an axis, for tensors `[batch, tokens, features]`.
    pub fn sequence_parallel(axis: &str) -> Self {
        Self::SequenceParallel {
            axis: axis.into(),
            dim: 1,
            output: None,
        }
    }

    /// [`PrepareInput`](Self::PrepareInput) along one axis.
    pub fn prepare_input(axis: &str, along: PlanPlacement) -> Self {
        Self::PrepareInput([(axis.into(), along)].into())
    }

    /// [`PrepareOutput`](Self::PrepareOutput) along one axis.
    pub fn prepare_output(axis: &str, along: PlanPlacement) -> Self {
        Self::PrepareOutput([(axis.into(), along)].into())
    }

    /// This style with so many features that stay on one rank.
    ///
    /// # Panics
    /// Panics for a style that does not shard features.
    #[must_use]
    pub fn with_unit(mut self, size: usize) -> Self {
        match &mut self {
            Self::Colwise(split) | Self::Rowwise(split) => split.unit = size,
            Self::Placed(placed) => placed.unit = size,
            other => panic!("with_unit: {other:?} shards no features"),
        }
        self
    }

    /// This style with another placement of the result along its axis.
    ///
    /// # Panics
    /// Panics for a style that has no axis of its own.
    #[must_use]
    pub fn with_output(mut self, along: PlanPlacement) -> Self {
        match &mut self {
            Self::Colwise(split) | Self::Rowwise(split) => split.output = Some(along),
            Self::SequenceParallel { output, .. } => *output = Some(along),
            other => panic!("with_output: {other:?} says it already, by axis"),
        }
        self
    }

    /// This style with another placement of the input along its axis.
    ///
    /// # Panics
    /// Panics for a style other than column-wise and row-wise.
    #[must_use]
    pub fn with_input(mut self, along: PlanPlacement) -> Self {
        match &mut self {
            Self::Colwise(split) | Self::Rowwise(split) => split.input = Some(along),
            other => panic!("with_input: {other:?} says it already"),
        }
        self
    }

    /// The placements that the style means for a kind of layer.
    ///
    /// # Errors
    /// A kind that the style does not know.
    pub(super) fn placed(&self, kind: &str, path: &str) -> Result<Placed> {
        let along = |axis: &str, along| Axes::from([(axis.to_string(), along)]);
        Ok(match self {
            Self::Colwise(Split {
                axis,
                unit,
                input,
                output,
            }) => {
                let features = Features::of(kind, path, "colwise")?;
                let fan = (features.takes_gradient).then_some(PlanPlacement::Fan);
                Placed {
                    parameters: features.sharded(axis, features.columns),
                    unit: *unit,
                    input: input
                        .or(fan)
                        .map(|input| along(axis, input))
                        .unwrap_or_default(),
                    output: output.map(|output| along(axis, output)).unwrap_or_default(),
                }
            }
            Self::Rowwise(Split {
                axis,
                unit,
                input,
                output,
            }) => {
                let features = Features::of(kind, path, "rowwise")?;
                let sharded = features.takes_gradient.then_some(features.dim);
                Placed {
                    parameters: features.sharded(axis, features.rows),
                    unit: *unit,
                    input: input
                        .or(sharded)
                        .map(|input| along(axis, input))
                        .unwrap_or_default(),
                    output: along(axis, output.unwrap_or(PlanPlacement::Replicate)),
                }
            }
            Self::SequenceParallel { axis, dim, output } => Placed {
                input: along(axis, PlanPlacement::Shard(*dim)),
                output: output.map(|output| along(axis, output)).unwrap_or_default(),
                ..Placed::default()
            },
            Self::PrepareInput(input) => Placed {
                input: input.clone(),
                ..Placed::default()
            },
            Self::PrepareOutput(output) => Placed {
                output: output.clone(),
                ..Placed::default()
            },
            Self::PrepareInputOutput { input, output } => Placed {
                input: input.clone(),
                output: output.clone(),
                ..Placed::default()
            },
            Self::Placed(placed) => placed.clone(),
        })
    }
}

/// Whole parameters, input and result as they are.
impl Default for Placed {
    fn default() -> Self {
        Self {
            parameters: BTreeMap::new(),
            unit: 1,
            input: Axes::new(),
            output: Axes::new(),
        }
    }
}

/// Where the features of a kind of layer are.
struct Features {
    /// Dims of parameters that number outputs.
    columns: &'static [(&'static str, isize)],
    /// Dims of parameters that number inputs.
    rows: &'static [(&'static str, isize)],
    /// The dim of input and result.
    dim: PlanPlacement,
    /// Whether the input has gradients; indices have none.
    takes_gradient: bool,
}

impl Features {
    fn of(kind: &str, path: &str, style: &str) -> Result<Self> {
        Ok(match kind {
            "Linear" => Self {
                columns: &[("weight", 1), ("bias", 0)],
                rows: &[("weight", 0)],
                dim: PlanPlacement::Shard(-1),
                takes_gradient: true,
            },
            "Embedding" => Self {
                columns: &[("weight", 1)],
                rows: &[("weight", 0)],
                dim: PlanPlacement::Shard(-1),
                takes_gradient: false,
            },
            "Conv1d" | "Conv2d" | "Conv3d" => Self {
                columns: &[("weight", 0), ("bias", 0)],
                rows: &[("weight", 1)],
                dim: PlanPlacement::Shard(1),
                takes_gradient: true,
            },
            kind if is_spectral(kind) => Self {
                columns: &[("weight", 1)],
                rows: &[("weight", 0)],
                dim: PlanPlacement::Shard(1),
                takes_gradient: true,
            },
            _ => {
                return Err(Error::Plan(format!(
                    "{style} for {path}, which is a {kind}; it is known for Linear, Embedding, Conv1d to \
                     Conv3d and spectral convolutions; Plan::with_kind makes a type known, and \"placed\" says for any layer how each parameter is sharded"
                )));
            }
        })
    }

    fn sharded(&self, axis: &str, dims: &[(&'static str, isize)]) -> BTreeMap<String, Axes> {
        let shard = |(name, dim): &(&str, isize)| {
            let axes = Axes::from([(axis.to_string(), PlanPlacement::Shard(*dim))]);
            (name.to_string(), axes)
        };
        dims.iter().map(shard).collect()
    }
}

/// Whether a layer multiplies the channels of modes.
pub(super) fn is_spectral(kind: &str) -> bool {
    matches!(
        kind,
        "SpectralConv1d" | "SpectralConv2d" | "SpectralConv3d" | "SpectralConvS2"
    )
}
