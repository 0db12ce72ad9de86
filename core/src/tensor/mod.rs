//! Sharded tensors and their operators.

mod arithmetic;
mod binary;
mod closure;
mod create;
mod display;
mod dry_run;
mod elementwise;
mod halo;
mod local;
mod logic;
mod recompute;
mod redistribute;
mod unary;

use std::sync::Arc;

use burn::tensor::kind::{self, Basic};
use burn::tensor::{Device, Float, Gradients, Tensor};

use crate::device_mesh::DeviceMesh;
use crate::layout::{Fan, Layout, Partial, Placement, ReduceOp, Replicate};
use crate::{Error, OrRaise, Result};

pub(crate) use create::on_device;
pub use create::{MeshOptions, scatter_tensor};
pub use halo::Halo;
pub use local::LocalGradient;
pub use recompute::{Halos, is_recomputing};

/// Tensor of `D` dims whose cells are distributed over the ranks of a mesh.
///
/// It consists of this rank's local tensor and the [`Layout`], which determines the cells of every
/// rank. Operators compute the single-device result; they communicate as planned and never gather.
///
/// # Gradients
/// A gradient has the layout of its tensor, except on axes with [`Partial`] or [`Fan`]. On axes
/// with [`Replicate`], all ranks hold the same complete gradient. On axes with `Partial`, they do
/// too, because the gradient of a sum is the gradient of each of its terms. On axes with `Fan`, the
/// gradient is a partial sum.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     assert_eq!((x.dims(), x.placements()), ([5, 3], &[Shard(0)][..]));
///     assert_eq!(x.local_dims(), [[3, 3], [2, 3]][world.rank()]);
///     let y = (x.clone() * 3.0 - x) / 4.0;
///     assert_eq!(y.layout().extents(0), [3, 2]);
///     let whole = y.inner().full_tensor();
///     assert_eq!(whole.into_data().iter::<f32>().sum::<f32>(), 7.5);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ShardTensor<const D: usize, K: Basic = Float> {
    local: Tensor<D, K>,
    layout: Layout,
    mesh: DeviceMesh,
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Makes a sharded tensor of a local tensor, its layout and its mesh, as operators do.
    /// [`from_local`](Self::from_local) also has a rule for gradients, and refuses layouts without
    /// a value.
    ///
    /// # Panics
    /// Panics if the layout is of another mesh, or the local shape is not that of this rank's
    /// shard; on GPUs, if some rank holds no cells, unless `BURN_FUSION_MAX_EXPLORATIONS` is 0,
    /// because burn's fusion loses operators in that case.
    #[track_caller]
    pub fn from_parts(local: Tensor<D, K>, layout: Layout, mesh: DeviceMesh) -> Self {
        Self::try_from_parts(local, layout, mesh).or_raise()
    }

    /// [`from_parts`](Self::from_parts) that returns its errors.
    fn try_from_parts(local: Tensor<D, K>, layout: Layout, mesh: DeviceMesh) -> Result<Self> {
        if layout.mesh() != mesh.shape() {
            let message = format!(
                "{layout} belongs to another mesh than\n{mesh}; expected a layout of Layout::new(mesh.shape(), ..)"
            );
            return Err(Error::Layout(message));
        }
        let (position, shape) = (mesh.position(), local.dims());
        let extent = |dim| layout.extents(dim)[layout.part(dim, position)];
        let fits = layout.shape().len() == D && (0..D).all(|dim| shape[dim] == extent(dim));
        if !fits {
            let (rank, expected) = (mesh.comm().rank(), layout.local_shape(position));
            let message = format!(
                "rank {rank}: local tensor {shape:?} for a shard of {layout}; expected {expected:?}"
            );
            return Err(Error::Layout(message));
        }
        #[cfg(feature = "cube")]
        crate::cube::refuse_lost_operators(&layout, &local.device());
        Ok(Self {
            local,
            layout,
            mesh,
        })
    }

    /// Makes a tensor on a mesh of one rank, where every operator is the single-device operator.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use halocline_core::ShardTensor;
    ///
    /// let x = ShardTensor::solo(Tensor::<1>::from_floats([1.0, 4.0], &Device::default()));
    /// let (roots, layout, mesh) = x.sqrt().into_parts();
    /// roots.into_data().assert_eq(&[1.0_f32, 2.0].into(), false);
    /// assert_eq!((layout.shape(), mesh.size()), (&[2][..], 1));
    /// ```
    pub fn solo(local: Tensor<D, K>) -> Self {
        let mesh = DeviceMesh::solo(&local.device());
        let layout = Layout::replicated(mesh.shape(), &local.dims());
        Self {
            local,
            layout,
            mesh,
        }
    }

    /// Splits the tensor into local tensor, layout and mesh.
    pub fn into_parts(self) -> (Tensor<D, K>, Layout, DeviceMesh) {
        (self.local, self.layout, self.mesh)
    }

    /// Returns this rank's local tensor, like [`local`](Self::local), without a rule for its
    /// gradient; to continue with ordinary tensors, use [`to_local`](Self::to_local).
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::ShardTensor;
    ///
    /// let x = ShardTensor::solo(Tensor::<1>::from([1.0, 2.0]));
    /// x.into_local().into_data().assert_eq(&[1.0_f32, 2.0].into(), true);
    /// ```
    pub fn into_local(self) -> Tensor<D, K> {
        self.local
    }

    /// This rank's shard; for partial values this rank's contribution, which is not a value yet:
    /// [`resolve`](Self::resolve) it first, or use [`to_local`](Self::to_local), which refuses
    /// partial values.
    pub fn local(&self) -> &Tensor<D, K> {
        &self.local
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The world ranks of the mesh, by position.
    pub(crate) fn ranks(&self) -> Arc<[usize]> {
        self.mesh.shape().ranks().into()
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

    /// Applies an elementwise function of this library, which needs no check. Errors name the
    /// operator.
    #[track_caller]
    pub(crate) fn map_elements<L: Basic>(
        self,
        operator: &str,
        f: impl FnOnce(Tensor<D, K>) -> Tensor<D, L>,
    ) -> ShardTensor<D, L> {
        self.require_resolved(operator).or_raise();
        self.map_linear(f)
    }

    /// Like [`map_elements`](Self::map_elements), for a linear function, which permits partial
    /// values.
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

    /// Requires that the tensor holds no partial values.
    ///
    /// # Errors
    /// [`Error::Placement`] with the axis that holds them.
    pub fn require_resolved(&self, operator: &str) -> Result<()> {
        self.layout.require_resolved(operator)
    }

    /// Requires that a dim is not sharded.
    ///
    /// # Errors
    /// [`Error::Placement`] with the axis, and a redistribution as the remedy.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<2>::ones([4, 3], &mesh, &[Shard(0)])?;
    ///     assert!(x.require_resolved("fft").is_ok() && x.require_whole("fft", 1).is_ok());
    ///     let error = x.require_whole("fft", 0).unwrap_err().to_string();
    ///     assert!(error.ends_with("redistribute(&[Replicate]) first"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn require_whole(&self, operator: &str, dim: usize) -> Result<()> {
        self.layout.require_whole(operator, dim)
    }
}

impl<const D: usize, K: kind::Autodiff> ShardTensor<D, K> {
    /// Returns the same values without autodiff, for inference.
    #[must_use]
    pub fn inner(self) -> Self {
        self.map_linear(Tensor::inner)
    }
}

impl<const D: usize> ShardTensor<D> {
    /// Marks the tensor as one whose gradient is kept; see the example of
    /// [`backward`](Self::backward).
    #[must_use]
    pub fn require_grad(self) -> Self {
        let device = self.mesh.device().clone().autodiff();
        self.map_linear(|local| {
            if local.is_autodiff() {
                local.require_grad()
            } else {
                on_device(local, &device).require_grad()
            }
        })
    }

    /// Returns the gradient of this tensor, in its layout; `None` if it has none. The gradient of a
    /// partial sum is replicated, and that of a tensor with `Fan` is a partial sum. See the example
    /// of [`backward`](Self::backward).
    ///
    /// # Panics
    /// Panics for other partial values: each rank has the gradient of its own contribution,
    /// available by `local().grad(..)`.
    #[track_caller]
    pub fn grad(&self, gradients: &Gradients) -> Option<Self> {
        if let Some((axis, op)) = self.layout.partial_axis()
            && op != ReduceOp::Sum
        {
            let placement = self.layout.placement_on(axis);
            let help = "each rank has the gradient of its own values: local().grad(..)";
            Error::placement("grad", placement, help).raise()
        }
        let local = self.local.grad(gradients)?;
        let placements = self.layout.map_placements(|placement| match placement {
            Partial(_) => Replicate,
            Fan => Partial(ReduceOp::Sum),
            other => other,
        });
        let extents = self.layout.all_extents().to_vec();
        let layout = self.layout.derive(placements, extents);
        Some(Self::from_parts(local, layout, self.mesh.clone()))
    }

    /// Computes gradients by backpropagation from this tensor. Collective: all ranks call it
    /// together.
    ///
    /// Afterwards, the gradients of replicated parameters are complete and equal on all ranks.
    ///
    /// # Panics
    /// Panics if the tensor is sharded, has the placement `Fan`, or is partial by a reduction other
    /// than a sum; [raises](Error::raise) a failure of communication.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::TensorData;
    /// use halocline_core::{Launcher, Layout, Partial};
    /// use halocline_core::{ReduceOp, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?.require_grad();
    ///     // The sum of this rank's squares is its part of the loss.
    ///     let part = x.clone().square().into_local().sum();
    ///     let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
    ///     let loss = ShardTensor::from_parts(part, layout, mesh);
    ///     let gradient = x.grad(&loss.backward()).expect("a gradient");
    ///     let whole = gradient.full_tensor().into_data();
    ///     whole.assert_eq(&TensorData::new(vec![2.0_f32; 15], [5, 3]), false);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn backward(&self) -> Gradients {
        let allowed =
            |placement: &Placement| matches!(placement, Replicate | Partial(ReduceOp::Sum));
        if let Some(axis) = self.placements().iter().position(|p| !allowed(p)) {
            let help = match self.placements()[axis] {
                Partial(_) => "call resolve() first",
                Fan => {
                    "every rank has the same loss; shard its input with redistribute(), so that ranks have parts of it"
                }
                _ => "reduce it to a loss with mean() or sum() first",
            };
            Error::placement("backward", self.layout.placement_on(axis), help).raise();
        }
        let _span = crate::trace::span("backward");
        crate::reduce::collect(self.mesh.shape().ranks(), || self.local.backward())
    }

    /// Returns the same values, detached from the autodiff graph.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?.require_grad();
    ///     let y = x.clone().exp();
    ///     assert!(y.local().is_tracked() && !y.detach().local().is_tracked());
    ///     assert!(!x.inner().local().is_autodiff());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[must_use]
    pub fn detach(self) -> Self {
        self.map_linear(Tensor::detach)
    }
}
