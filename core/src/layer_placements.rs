//! Placements that a plan requests where tensors enter and leave layers.

use std::fmt;
use std::str::FromStr;

use burn::tensor::kind::Basic;
use serde::{Deserialize, Serialize};

use crate::layout::{Fan, Placement, Replicate, Shard};
use crate::{Error, Result, ShardTensor};

/// Placement of a tensor along one mesh axis, independent of its number of dims. Its text form is
/// `replicate`, `fan`, `shard(1)` or `shard(-1)`.
///
/// # Example
/// ```
/// use halocline_core::{PlanPlacement, Shard};
///
/// let asked: PlanPlacement = "shard(-1)".parse()?;
/// assert_eq!(asked.placement(3)?, Shard(2));
/// assert_eq!(asked.to_string(), "shard(-1)");
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PlanPlacement {
    /// [`Shard`] along this dim; a negative one counts from the end.
    Shard(isize),
    /// [`Replicate`].
    Replicate,
    /// [`Fan`].
    Fan,
}

impl PlanPlacement {
    /// Resolves the placement for a tensor of this many dims.
    ///
    /// # Errors
    /// The tensor does not have the dim.
    pub fn placement(self, dims: usize) -> Result<Placement> {
        match self {
            Self::Replicate => Ok(Replicate),
            Self::Fan => Ok(Fan),
            Self::Shard(dim) => {
                let counted = if dim < 0 { dims as isize + dim } else { dim };
                match usize::try_from(counted) {
                    Ok(counted) if counted < dims => Ok(Shard(counted)),
                    _ => Err(Error::Layout(format!("{self} for a tensor of {dims} dims"))),
                }
            }
        }
    }
}

impl fmt::Display for PlanPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(dim) => write!(f, "shard({dim})"),
            Self::Replicate => f.write_str("replicate"),
            Self::Fan => f.write_str("fan"),
        }
    }
}

impl FromStr for PlanPlacement {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let dim = |text: &str| text.strip_prefix("shard(")?.strip_suffix(')')?.parse().ok();
        match text {
            "replicate" => Ok(Self::Replicate),
            "fan" => Ok(Self::Fan),
            text => dim(text).map(Self::Shard).ok_or_else(|| {
                Error::other(format!(
                    "placement {text:?}; expected \"shard(1)\", \"shard(-1)\", \"replicate\" or \"fan\""
                ))
            }),
        }
    }
}

impl TryFrom<String> for PlanPlacement {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<PlanPlacement> for String {
    fn from(along: PlanPlacement) -> Self {
        along.to_string()
    }
}

/// Placements of a layer's input and of its result on some mesh axes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LayerPlacements {
    /// Placements in which the layer receives its input, by axis.
    pub input: Vec<(usize, PlanPlacement)>,
    /// Placements of the result, by axis.
    pub output: Vec<(usize, PlanPlacement)>,
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Returns the same values with other placements on some axes.
    ///
    /// # Errors
    /// The errors of [`try_redistribute`](Self::try_redistribute); an axis that the mesh does not
    /// have.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{PlanPlacement, Launcher, Replicate, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("data", 1), ("tensor", 2)])?;
    ///     let x = ShardTensor::<2>::ones([4, 6], &mesh, &[Shard(0), Replicate])?;
    ///     let y = x.redistribute_axes(&[(1, PlanPlacement::Shard(-1))])?;
    ///     assert_eq!(y.placements(), [Shard(0), Shard(1)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn redistribute_axes(self, along: &[(usize, PlanPlacement)]) -> Result<Self> {
        let mut placements = self.placements().to_vec();
        for (axis, along) in along {
            let axes = placements.len();
            let placement = placements.get_mut(*axis).ok_or_else(|| {
                Error::Layout(format!("{along} on axis {axis} of a mesh of {axes} axes"))
            })?;
            *placement = along.placement(D)?;
        }
        if placements == self.placements() {
            return Ok(self);
        }
        self.try_redistribute(&placements)
    }
}
