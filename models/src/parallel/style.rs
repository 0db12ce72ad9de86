//! Layer styles, and the placements they imply.

use std::collections::BTreeMap;

use halocline_core::{Error, PlanPlacement, Result};
use serde::{Deserialize, Serialize};

/// Placements by mesh axis.
pub type Axes = BTreeMap<String, PlanPlacement>;

/// Parallel style of a layer over mesh axes. The names follow PyTorch's tensor parallelism.
///
/// # Example
/// ```
/// use halocline_core::PlanPlacement;
/// use halocline_models::parallel::{Plan, Style};
///
/// // Rows of whole heads of 64 features; the result is sharded along its tokens.
/// let rows = Style::rowwise("tensor").with_unit(64).with_output(PlanPlacement::Shard(1));
/// let plan = Plan::default().with_layer("blocks.*.attention.output", rows);
/// assert!(plan.to_toml().contains("rowwise"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Style {
    /// Each rank computes some of the outputs from all inputs: columns of a linear layer or an
    /// embedding, output channels of a convolution. The input fans out, and the result is sharded
    /// along its features.
    Colwise(Split),
    /// Each rank computes partial sums of all outputs from some of the inputs: rows of a linear
    /// layer or an embedding, input channels of a convolution. The partial sums are added, then the
    /// bias.
    Rowwise(Split),
    /// The layer, such as a norm, computes on shards of a sequence with whole parameters. Dropout
    /// has no parameters and needs no style.
    SequenceParallel {
        /// Mesh axis.
        axis: String,
        /// Dim of the sequence.
        #[serde(default = "one_dim")]
        dim: isize,
        /// Placement of the result; unchanged by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output: Option<PlanPlacement>,
    },
    /// Placements of the input.
    PrepareInput(Axes),
    /// Placements of the result.
    PrepareOutput(Axes),
    /// Placements of input and result.
    PrepareInputOutput {
        /// Placements of the input.
        input: Axes,
        /// Placements of the result.
        output: Axes,
    },
    /// Placements of named parameters, of the input and of the result, which the other styles
    /// reduce to.
    Placed(LayerSharding),
}

/// Split of a layer's features over an axis.
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
    /// Mesh axis.
    pub axis: String,
    /// Number of features that must stay together on one rank, such as those of an attention head.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub unit: usize,
    /// Placement of the input. By default, it fans out column-wise, and is sharded along its
    /// features row-wise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<PlanPlacement>,
    /// Placement of the result. By default, it is unchanged column-wise, and replicated row-wise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<PlanPlacement>,
}

impl Style {
    /// Returns the axes named in the style.
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
/// Columns of a table, in a style for any kind of layer:
/// ```
/// use halocline_core::PlanPlacement;
/// use halocline_models::parallel::{Axes, LayerSharding, Plan, Style};
///
/// let columns = Axes::from([("tensor".into(), PlanPlacement::Shard(1))]);
/// let placed = LayerSharding {
///     parameters: [("table".into(), columns)].into(),
///     ..LayerSharding::default()
/// };
/// let plan = Plan::default().with_layer("positions", Style::Placed(placed));
/// assert_eq!(Plan::from_toml(&plan.to_toml())?, plan);
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSharding {
    /// Placements of parameters, by their names in the layer. Others stay whole.
    #[serde(default)]
    pub parameters: BTreeMap<String, Axes>,
    /// Number of cells of a sharded dim that must stay together on one rank.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub unit: usize,
    /// Placements of the input.
    #[serde(default)]
    pub input: Axes,
    /// Placements of the result.
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
    /// Makes a [`Colwise`](Self::Colwise) style over an axis.
    pub fn colwise(axis: &str) -> Self {
        Self::Colwise(Split::over(axis))
    }

    /// Makes a [`Rowwise`](Self::Rowwise) style over an axis.
    pub fn rowwise(axis: &str) -> Self {
        Self::Rowwise(Split::over(axis))
    }

    /// Makes a [`SequenceParallel`](Self::SequenceParallel) style over an axis, for tensors
    /// `[batch, tokens, features]`.
    pub fn sequence_parallel(axis: &str) -> Self {
        Self::SequenceParallel {
            axis: axis.into(),
            dim: 1,
            output: None,
        }
    }

    /// Makes a [`PrepareInput`](Self::PrepareInput) style along one axis.
    pub fn prepare_input(axis: &str, along: PlanPlacement) -> Self {
        Self::PrepareInput([(axis.into(), along)].into())
    }

    /// Makes a [`PrepareOutput`](Self::PrepareOutput) style along one axis.
    pub fn prepare_output(axis: &str, along: PlanPlacement) -> Self {
        Self::PrepareOutput([(axis.into(), along)].into())
    }

    /// Sets the number of features that must stay together on one rank.
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

    /// Sets the placement of the result along the style's axis.
    ///
    /// # Panics
    /// Panics for a style without a single axis of its own.
    #[must_use]
    pub fn with_output(mut self, along: PlanPlacement) -> Self {
        match &mut self {
            Self::Colwise(split) | Self::Rowwise(split) => split.output = Some(along),
            Self::SequenceParallel { output, .. } => *output = Some(along),
            other => panic!("with_output: {other:?} says it already, by axis"),
        }
        self
    }

    /// Sets the placement of the input along the style's axis.
    ///
    /// # Panics
    /// Panics unless the style is column-wise or row-wise.
    #[must_use]
    pub fn with_input(mut self, along: PlanPlacement) -> Self {
        match &mut self {
            Self::Colwise(split) | Self::Rowwise(split) => split.input = Some(along),
            other => panic!("with_input: {other:?} says it already"),
        }
        self
    }

    /// Returns the placements that the style implies for a kind of layer.
    ///
    /// # Errors
    /// The style does not support the kind.
    pub(super) fn placed(&self, kind: &str, path: &str) -> Result<LayerSharding> {
        let axes = |axis: &str, along: Option<PlanPlacement>| -> Axes {
            let along = along.map(|along| (axis.to_string(), along));
            along.into_iter().collect()
        };
        Ok(match self {
            Self::Colwise(Split {
                axis,
                unit,
                input,
                output,
            }) => {
                let features = Features::of(kind, path, "colwise")?;
                let fan = features.takes_gradient.then_some(PlanPlacement::Fan);
                LayerSharding {
                    parameters: sharded(axis, features.columns),
                    unit: *unit,
                    input: axes(axis, input.or(fan)),
                    output: axes(axis, *output),
                }
            }
            Self::Rowwise(Split {
                axis,
                unit,
                input,
                output,
            }) => {
                let features = Features::of(kind, path, "rowwise")?;
                let channels = features.takes_gradient.then_some(features.dim);
                LayerSharding {
                    parameters: sharded(axis, features.rows),
                    unit: *unit,
                    input: axes(axis, input.or(channels)),
                    output: axes(axis, output.or(Some(PlanPlacement::Replicate))),
                }
            }
            Self::SequenceParallel { axis, dim, output } => LayerSharding {
                input: axes(axis, Some(PlanPlacement::Shard(*dim))),
                output: axes(axis, *output),
                ..LayerSharding::default()
            },
            Self::PrepareInput(input) => LayerSharding {
                input: input.clone(),
                ..LayerSharding::default()
            },
            Self::PrepareOutput(output) => LayerSharding {
                output: output.clone(),
                ..LayerSharding::default()
            },
            Self::PrepareInputOutput { input, output } => LayerSharding {
                input: input.clone(),
                output: output.clone(),
                ..LayerSharding::default()
            },
            Self::Placed(placed) => placed.clone(),
        })
    }
}

/// Whole parameters; input and result unchanged.
impl Default for LayerSharding {
    fn default() -> Self {
        Self {
            parameters: BTreeMap::new(),
            unit: 1,
            input: Axes::new(),
            output: Axes::new(),
        }
    }
}

/// Feature dims of a kind of layer.
struct Features {
    /// Output dims of parameters.
    columns: &'static [(&'static str, isize)],
    /// Input dims of parameters.
    rows: &'static [(&'static str, isize)],
    /// Feature dim of input and result, as a placement.
    dim: PlanPlacement,
    /// Whether the input has a gradient; indices have none.
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
                     Conv3d and spectral convolutions; Plan::with_kind_as makes a type known, and \"placed\" says for any layer how each parameter is sharded"
                )));
            }
        })
    }
}

/// Returns the placements of parameters that are sharded along these dims over an axis.
fn sharded(axis: &str, dims: &[(&str, isize)]) -> BTreeMap<String, Axes> {
    let shard = |(name, dim): &(&str, isize)| {
        let axes = Axes::from([(axis.to_string(), PlanPlacement::Shard(*dim))]);
        (name.to_string(), axes)
    };
    dims.iter().map(shard).collect()
}

/// Whether a layer multiplies the channels of spectral modes.
pub(super) fn is_spectral(kind: &str) -> bool {
    matches!(
        kind,
        "SpectralConv1d" | "SpectralConv2d" | "SpectralConv3d" | "SpectralConvS2"
    )
}
