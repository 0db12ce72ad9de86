//! Layouts of parameters.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;

use super::ahead::Step;
use super::exchange;
use super::gathering::Gathering;
use crate::layer_placements::LayerPlacements;
use crate::layout::{Fan, Layout, Replicate, Shard};
use crate::operator::apply_beside;
use crate::reduce::Leaf;
use crate::{DeviceMesh, Error, IndexBox, Result, ShardTensor, ops};

const NAME: &str = "parameter";

/// When a parameter stored in shards is gathered; see the example of [`ParamShard`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gather {
    /// In the forward pass and again in the backward pass: in between, a rank holds only its shard.
    /// A frozen parameter stays gathered until the backward pass, as with [`Once`](Self::Once),
    /// unless a block that uses it is [recomputed](ShardTensor::recompute).
    #[default]
    EachPass,
    /// In the forward pass, and kept for the backward pass.
    Once,
}

/// Layout of a parameter of which each rank holds a shard. It is attached to burn's [`Param`]:
/// clones, optimizer steps and burn's `Module::valid` keep it, and gradients and optimizer states
/// have the shape of the shard.
///
/// On some mesh axes the parameter may be sharded for storage only: it is gathered for use, and the
/// gradients from the ranks' data are summed and scattered. On the other axes, layers compute with
/// its shard.
///
/// # Example
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use halocline_core::{Gather, Launcher, Layout, ParamShard, Replicate, Shard, shard_parameters};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("data", 2)])?;
///     let model = world.init(|device| LinearConfig::new(4, 6).with_bias(false).init(device))?;
///     let model = shard_parameters(model, |_, shape| {
///         let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
///         Ok(Some(ParamShard::new(layout, &mesh).with_stored(&["data"], Gather::EachPass)?))
///     })?;
///     assert_eq!(model.weight.dims(), [2, 6]); // this rank's rows
///     assert_eq!(model.weight.val().dims(), [4, 6]); // gathered
///     let shard = ParamShard::of(&model.weight).expect("a layout");
///     assert_eq!(shard.layout().shape(), [4, 6]);
///     assert!(shard.is_divided());
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ParamShard {
    path: Arc<str>,
    pub(super) layout: Layout,
    pub(super) mesh: DeviceMesh,
    /// The axes over which the parameter is sharded for storage only.
    stored: Arc<[usize]>,
    gather: Gather,
    layer_placements: Option<Arc<LayerPlacements>>,
}

impl ParamShard {
    /// Makes the layout of a parameter whose shards layers compute with directly.
    pub fn new(layout: Layout, mesh: &DeviceMesh) -> Self {
        Self {
            path: "".into(),
            layout,
            mesh: mesh.clone(),
            stored: Arc::default(),
            gather: Gather::default(),
            layer_placements: None,
        }
    }

    /// Marks some axes, over which the parameter is sharded, as storage only.
    ///
    /// # Errors
    /// An axis is not in the mesh, or the parameter is not sharded on it; or a dim stored over an
    /// axis is also sharded, for computing, over an axis to the right of it.
    pub fn with_stored(self, axes: &[&str], gather: Gather) -> Result<Self> {
        let names = self.layout.mesh().names();
        let find = |name: &&str| {
            let axis = names.iter().position(|held| held == name);
            let axis = axis.ok_or_else(|| {
                Error::operator(NAME, format!("no axis {name:?} among {names:?}"))
            })?;
            match self.layout.placements()[axis] {
                Shard(_) => Ok(axis),
                other => Err(Error::operator(
                    NAME,
                    format!("{other} on the axis {name:?} of storage; expected Shard"),
                )),
            }
        };
        let stored = axes.iter().map(find).collect::<Result<Vec<usize>>>()?;
        for &axis in &stored {
            let placement = self.layout.placements()[axis];
            let alike = self.layout.axes_where(|other| other == placement);
            let computes = |other: &&usize| **other > axis && !stored.contains(other);
            if let Some(&inner) = alike.iter().find(computes) {
                let message = format!(
                    "{placement} on the axis {:?} of storage and on {:?}, right of it, with which layers compute; \
                     order the mesh axes otherwise, or store another dim",
                    names[axis], names[inner]
                );
                return Err(Error::operator(NAME, message));
            }
        }
        Ok(Self {
            stored: stored.into(),
            gather,
            ..self
        })
    }

    /// Returns this layout with placements for the input and result of the parameter's layer. A
    /// layer follows those of its first parameter.
    #[must_use]
    pub fn with_layer_placements(self, layer_placements: LayerPlacements) -> Self {
        Self {
            layer_placements: Some(layer_placements.into()),
            ..self
        }
    }

    pub(super) fn with_path(self, path: &str) -> Self {
        let path = path.into();
        Self { path, ..self }
    }

    /// Returns the layout of a parameter, if it has one.
    pub fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<&Self> {
        param.reparameterization()
    }

    /// The path of the parameter in its module.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The layout of the shards.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether ranks hold parts of the parameter, rather than all of it.
    pub fn is_divided(&self) -> bool {
        let mut extents = self.layout.all_extents().iter();
        extents.any(|extents| extents.len() > 1)
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The axes over which the parameter is sharded for storage only.
    pub fn stored(&self) -> &[usize] {
        &self.stored
    }

    /// The cells held by a rank of the world; `None` if the rank is not in the mesh.
    pub fn cells_of(&self, rank: usize) -> Option<IndexBox> {
        let position = self.mesh.shape().position_of(rank)?;
        Some(self.layout.local_box(position))
    }

    /// The axes over which layers compute with shards of the parameter.
    pub fn computing_axes(&self) -> Vec<usize> {
        let mut axes = self.layout.sharded_axes();
        axes.retain(|axis| !self.stored.contains(axis));
        axes
    }

    /// The placements that the plan requests for the input and result of the parameter's layer.
    pub fn layer_placements(&self) -> Option<&LayerPlacements> {
        self.layer_placements.as_deref()
    }

    /// Returns the parameter as an operand of an operator on `x`: gathered over the axes of
    /// storage, and fanned out over the axes on which it is replicated and `x` is not. `base` is
    /// this rank's shard.
    ///
    /// # Errors
    /// `x` is on another mesh; communication fails.
    pub fn operand<const D: usize, const E: usize, K: Basic>(
        &self,
        base: Tensor<D>,
        x: &ShardTensor<E, K>,
    ) -> Result<ShardTensor<D>> {
        if x.layout().mesh() != self.layout.mesh() {
            let message = format!(
                "{} lies on another mesh than its operand {}:\n{}",
                self.path,
                x.layout(),
                self.mesh
            );
            return Err(Error::operator(NAME, message));
        }
        let varies = |axis: usize| x.placements()[axis].varies();
        let mut fans = self.layout.axes_where(|placement| placement == Replicate);
        fans.retain(|axis| varies(*axis));
        // The fan-out is applied to the leaf, so that its gradient joins a bucket, and to the
        // shard, so that less travels.
        Error::catch(|| {
            let local = ops::fan_out_with(base, x.local(), x.mesh(), &fans, NAME);
            let layout = self.layout.fanned_out(&fans);
            let shard = ShardTensor::from_parts(local, layout, x.mesh().clone());
            self.gathered(shard, varies, Some(x.local().clone().into_dispatch()))
        })
    }

    /// Gathers a shard over the axes of storage. Its gradient is the sum of the ranks' parts on
    /// axes where the other operand varies, and a slice of the gradient on axes where all ranks
    /// compute the whole gradient.
    pub(super) fn gathered<const D: usize>(
        &self,
        shard: ShardTensor<D>,
        varies: impl Fn(usize) -> bool,
        other: Option<DispatchTensor>,
    ) -> ShardTensor<D> {
        // From the innermost axis outwards, so that the remaining parts of a dim are whole.
        let mut axes = self.stored.to_vec();
        axes.sort_unstable_by(|a, b| b.cmp(a));
        let groups = axes.chunk_by(|a, b| varies(*a) == varies(*b));
        groups.fold(shard, |shard, axes| {
            self.gather_over(shard, axes, varies(axes[0]), other.clone())
        })
    }

    fn gather_over<const D: usize>(
        &self,
        shard: ShardTensor<D>,
        axes: &[usize],
        parts: bool,
        other: Option<DispatchTensor>,
    ) -> ShardTensor<D> {
        let (local, from, mesh) = shard.into_parts();
        let target = from.gathered(axes, if parts { Fan } else { Replicate });
        let shard = local.into_dispatch();
        let gather = Gathering {
            exchange: exchange::gathering(&mesh, &from, &target, parts),
            again: self.gather == Gather::EachPass,
            leaf: Leaf::of(&shard, &mesh.shape().ranks().into()),
            step: Step {
                path: self.path.clone(),
                again: false,
                from,
                to: target.clone(),
            },
        };
        let other = other.filter(|_| gather.leaf.is_some());
        let local = Tensor::from_dispatch(apply_beside(gather, shard, other));
        ShardTensor::from_parts(local, target, mesh)
    }

    /// The error for the use of a parameter whose shards on `axis` layers compute with.
    pub(super) fn refuse(&self, axis: usize) -> Error {
        Error::placement(
            &format!("val() of parameter {}", self.path),
            self.layout.placement_on(axis),
            "layers compute with such a shard; whole() makes the module whole",
        )
    }
}

impl fmt::Debug for ParamShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParamShard")
            .field("path", &self.path)
            .field("layout", &self.layout)
            .field("stored", &self.stored)
            .field("gather", &self.gather)
            .finish_non_exhaustive()
    }
}
