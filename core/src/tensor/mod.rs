//! Tensors whose cells lie on several ranks.

mod arithmetic;
mod closure;
mod create;
mod display;
mod dry_run;
mod elementwise;
mod halo;
mod local;
mod logic;
mod redistribute;

use std::sync::Arc;

use burn::tensor::kind::{self, Basic};
use burn::tensor::{Device, Float, Gradients, Tensor};

use crate::device_mesh::DeviceMesh;
use crate::layout::{Layout, Partial, Placement, ReduceOp, Replicate};
use crate::{Error, Result};

pub(crate) use create::on_device;
pub use create::scatter_tensor;
pub use halo::Halo;
pub use local::LocalGradient;

/// A tensor of `D` dims whose cells lie on the ranks of a mesh.
///
/// It is this rank's local tensor, and the [`Layout`] that says which cells those are. Operators give the result that
/// one device would give on the whole tensor; they communicate as their plan says and never gather.
///
/// # Gradients
/// A gradient has the layout of its tensor. On axes with [`Replicate`] all ranks hold the same full gradient, on axes
/// with [`Partial`] as well: the gradient of a sum is the gradient of each of its terms.
#[derive(Clone)]
pub struct ShardTensor<const D: usize, K: Basic = Float> {
    local: Tensor<D, K>,
    layout: Layout,
    mesh: DeviceMesh,
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Joins parts that an operator made to fit.
    pub fn from_parts(local: Tensor<D, K>, layout: Layout, mesh: DeviceMesh) -> Self {
        debug_assert_eq!(
            local.dims().to_vec(),
            layout.local_shape(mesh.position()),
            "{layout}"
        );
        Self {
            local,
            layout,
            mesh,
        }
    }

    /// A tensor of one rank only, on which every operator is the single-device one.
    pub fn solo(local: Tensor<D, K>) -> Self {
        let mesh = DeviceMesh::solo(&local.device());
        let layout = Layout::replicated(mesh.shape(), &local.dims());
        Self {
            local,
            layout,
            mesh,
        }
    }

    /// Takes the tensor apart: local tensor, layout and mesh.
    pub fn into_parts(self) -> (Tensor<D, K>, Layout, DeviceMesh) {
        (self.local, self.layout, self.mesh)
    }

    /// This rank's shard, as it is.
    pub fn local(&self) -> &Tensor<D, K> {
        &self.local
    }

    /// Who holds what.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The placement on every mesh axis.
    pub fn placements(&self) -> &[Placement] {
        self.layout.placements()
    }

    /// The global shape.
    pub fn dims(&self) -> [usize; D] {
        let shape = self.layout.shape();
        shape.try_into().expect("a layout has the tensor's dims")
    }

    /// The shape of this rank's shard.
    pub fn local_dims(&self) -> [usize; D] {
        self.local.dims()
    }

    /// The device of this rank's shard.
    pub fn device(&self) -> Device {
        self.local.device()
    }

    /// An elementwise operator of ours, which needs no check; errors name it.
    pub(crate) fn map_elements<L: Basic>(
        self,
        operator: &str,
        f: impl FnOnce(Tensor<D, K>) -> Tensor<D, L>,
    ) -> ShardTensor<D, L> {
        self.require_resolved(operator)
            .unwrap_or_else(|error| error.raise());
        self.map_linear(f)
    }

    /// [`map_elements`](Self::map_elements) for a linear function, which partial values permit.
    pub(crate) fn map_linear<L: Basic>(
        self,
        f: impl FnOnce(Tensor<D, K>) -> Tensor<D, L>,
    ) -> ShardTensor<D, L> {
        let before = self.local.dims();
        let local = f(self.local);
        assert_eq!(
            local.dims(),
            before,
            "an elementwise function keeps the shape"
        );
        ShardTensor {
            local,
            layout: self.layout,
            mesh: self.mesh,
        }
    }

    /// [`Layout::require_resolved`].
    ///
    /// # Errors
    /// Partial values, with the axis that holds them.
    pub fn require_resolved(&self, operator: &str) -> Result<()> {
        self.layout.require_resolved(operator)
    }

    /// [`Layout::require_whole`].
    ///
    /// # Errors
    /// A sharded dim, with the redistribution that helps.
    pub fn require_whole(&self, operator: &str, dim: usize) -> Result<()> {
        self.layout.require_whole(operator, dim)
    }

    fn axis_name(&self, axis: usize) -> &str {
        &self.layout.mesh().names()[axis]
    }
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// The ranks of the world, by mesh position.
    pub fn ranks(&self) -> Arc<[usize]> {
        self.mesh.shape().ranks().into()
    }
}

impl<const D: usize, K: kind::Autodiff> ShardTensor<D, K> {
    /// The same values without autodiff, for inference.
    #[must_use]
    pub fn inner(self) -> Self {
        self.map_linear(Tensor::inner)
    }
}

impl<const D: usize> ShardTensor<D> {
    /// Marks the tensor as one whose gradient is kept.
    #[must_use]
    pub fn require_grad(self) -> Self {
        let device = self.mesh.device().clone().autodiff();
        self.map_linear(|local| match local.is_autodiff() {
            true => local.require_grad(),
            false => on_device(local, &device).require_grad(),
        })
    }

    /// The gradient of this tensor, in its layout; `None` if it has none.
    pub fn grad(&self, gradients: &Gradients) -> Option<Self> {
        let local = self.local.grad(gradients)?;
        let layout = self.layout.clone();
        let resolved = layout
            .axes_where(|placement| matches!(placement, Partial(_)))
            .into_iter()
            .fold(layout, |layout, axis| {
                layout.with_placement(axis, Replicate)
            });
        Some(Self::from_parts(local, resolved, self.mesh.clone()))
    }

    /// Computes gradients by backpropagating from this tensor. All ranks call it together.
    ///
    /// Gradients of replicated parameters are complete and equal on all ranks afterwards.
    ///
    /// # Panics
    /// Panics if the tensor is sharded, or partial by another reduction than a sum.
    pub fn backward(&self) -> Gradients {
        let allowed =
            |placement: &Placement| matches!(placement, Replicate | Partial(ReduceOp::Sum));
        if let Some(axis) = self.placements().iter().position(|p| !allowed(p)) {
            let error = Error::Placement {
                operator: "backward".into(),
                placement: format!(
                    "{} on axis \"{}\"",
                    self.placements()[axis],
                    self.axis_name(axis)
                ),
                help: match self.placements()[axis] {
                    Partial(_) => "call resolve() first",
                    _ => "reduce it to a loss with mean() or sum() first",
                }
                .into(),
            };
            panic!("{error}");
        }
        let _span = crate::trace::span("backward");
        crate::reduce::collect(self.mesh.shape().ranks(), || self.local.backward())
    }

    /// The same values, cut off from the autodiff graph.
    #[must_use]
    pub fn detach(self) -> Self {
        self.map_linear(Tensor::detach)
    }
}
