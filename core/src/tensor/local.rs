//! Conversion between local and sharded tensors, and the meaning of local gradients.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use burn::tensor::kind::{Basic, Kind};

use super::ShardTensor;
use crate::device_mesh::DeviceMesh;
use crate::dispatch::blank;
use crate::layout::{Fan, Layout, Partial, ReduceOp, Replicate};
use crate::operator::{BackwardPass, Operator, apply, one};
use crate::ops::fan_out;
use crate::{Error, OrRaise, Result};

/// Meaning of the gradient of a local tensor that is converted to or from a sharded tensor and has
/// the same values on several ranks, that is, [`Replicate`] or [`Fan`].
///
/// The gradient of a replicated sharded tensor is complete and equal on all ranks. For local
/// tensors both cases below occur, so the program states which one applies. The choice affects
/// neither sharded dims, where each rank has the gradient of its own cells, nor partial values,
/// where each rank has the gradient of its own contribution. Integers and booleans have no
/// gradients. See the example of [`from_local_with`](ShardTensor::from_local_with).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalGradient {
    /// All ranks compute the same with the local tensor, so each has the complete gradient.
    Replicated,
    /// Each rank computes its own part with the local tensor, and the gradient is the sum over the
    /// ranks.
    Partial,
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Makes a sharded tensor from this rank's local tensor and a layout.
    ///
    /// # Shapes
    /// Local: the shape of this rank's shard.
    ///
    /// # Adjoint
    /// Every rank receives the complete gradient of a replicated tensor and, on axes with `Fan`,
    /// the sum of the ranks' gradients. [`from_local_with`](Self::from_local_with) offers another
    /// choice.
    ///
    /// # Errors
    /// The local shape is not that of this rank's shard, or the layout belongs to another mesh;
    /// partial sums of booleans; partial values of two different reductions.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Layout, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let layout = Layout::new(mesh.shape(), &[4, 3], &[Shard(0)])?;
    ///     let rows = Tensor::<2>::ones([2, 3], world.device());
    ///     let x = ShardTensor::from_local(rows, &mesh, &layout)?;
    ///     assert_eq!(x.dims(), [4, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn from_local(local: Tensor<D, K>, mesh: &DeviceMesh, layout: &Layout) -> Result<Self> {
        Self::from_local_with(local, mesh, layout, LocalGradient::Replicated)
    }

    /// Like [`from_local`](Self::from_local), with a choice of the gradients that the ranks
    /// receive.
    ///
    /// # Adjoint
    /// With [`LocalGradient::Partial`], the first rank along the axes on which the tensor is
    /// replicated receives the gradient, and the others receive zeros, so that the program may sum
    /// it over the ranks.
    ///
    /// # Errors
    /// The errors of [`from_local`](Self::from_local).
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Layout, LocalGradient, Replicate, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let scale = Tensor::<1>::ones([3], world.device()).require_grad();
    ///     let layout = Layout::new(mesh.shape(), &[3], &[Replicate])?;
    ///     let x = ShardTensor::from_local_with(scale.clone(), &mesh, &layout, LocalGradient::Partial)?;
    ///     let gradients = x.to_local().sum().backward();
    ///     let gradient = scale.grad(&gradients).expect("a gradient").into_data();
    ///     gradient.assert_eq(&[[1.0_f32; 3], [0.0; 3]][world.rank()].into(), true);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn from_local_with(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: &Layout,
        gradient: LocalGradient,
    ) -> Result<Self> {
        let x = Self::try_from_parts(local, layout.clone(), mesh.clone())?;
        if K::KIND == Kind::Bool && layout.placements().contains(&Partial(ReduceOp::Sum)) {
            return Err(Error::Layout(format!(
                "{layout} of booleans, which have no sum; take that of int()"
            )));
        }
        let mut reductions = layout.partial_axes().map(|(_, op)| op);
        let first = reductions.next();
        if let Some(other) = reductions.find(|op| Some(*op) != first) {
            return Err(Error::Layout(format!(
                "{layout}, whose value depends on what is resolved first, {} or {}; resolve one before the other",
                Partial(first.unwrap_or(other)),
                Partial(other)
            )));
        }
        match gradient {
            // On axes with `Fan`, the parts of the gradient are added.
            LocalGradient::Replicated => {
                let axes = layout.axes_where(|placement| placement == Fan);
                Error::catch(|| x.map_linear(|local| fan_out(local, mesh, &axes, "from_local")))
            }
            LocalGradient::Partial => {
                let axes = layout.axes_where(|placement| placement == Replicate);
                let keeps = mesh.ranks_along(&axes)[0] == mesh.comm().rank();
                Ok(x.map_linear(|local| kept_by_one(local, keeps)))
            }
        }
    }

    /// Returns this rank's shard as a local tensor.
    ///
    /// # Adjoint
    /// The first rank along the axes with `Fan` receives the gradient as its part, and the others
    /// receive zeros. [`to_local_with`](Self::to_local_with) offers another choice.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values; [`resolve`](Self::resolve) it first.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let x = ShardTensor::<1>::ones([5], &mesh, &[Shard(0)])?;
    ///     let cells = x.to_local();
    ///     assert_eq!(cells.dims(), [[3], [2]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn to_local(&self) -> Tensor<D, K> {
        self.to_local_with(LocalGradient::Replicated)
    }

    /// Like [`to_local`](Self::to_local), with a choice of the meaning of the ranks' gradients.
    ///
    /// # Adjoint
    /// With [`LocalGradient::Partial`], the ranks' gradients are summed over the axes on which the
    /// tensor is replicated.
    ///
    /// # Panics
    /// Panics if the tensor holds partial values.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, LocalGradient, Replicate, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("data", 2)])?;
    ///     let x = ShardTensor::<1>::ones([3], &mesh, &[Replicate])?.require_grad();
    ///     // A loss of this rank alone; the losses of all ranks add up.
    ///     let loss = x.to_local_with(LocalGradient::Partial).sum();
    ///     let gradients = loss.backward();
    ///     let gradient = x.grad(&gradients).expect("a gradient").to_local();
    ///     gradient.into_data().assert_eq(&[2.0_f32; 3].into(), true);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    #[track_caller]
    pub fn to_local_with(&self, gradient: LocalGradient) -> Tensor<D, K> {
        self.require_resolved("to_local").or_raise();
        match gradient {
            LocalGradient::Replicated => {
                let axes = self.layout.axes_where(|placement| placement == Fan);
                let group = self.mesh.ranks_along(&axes);
                match group.len() {
                    1 => self.local.clone(),
                    // Every rank has the whole gradient; kept on one rank only, it is the sum of
                    // the parts.
                    _ => kept_by_one(self.local.clone(), group[0] == self.mesh.comm().rank()),
                }
            }
            LocalGradient::Partial => {
                let axes = self.layout.axes_where(|placement| placement == Replicate);
                fan_out(self.local.clone(), &self.mesh, &axes, "to_local")
            }
        }
    }
}

fn kept_by_one<const D: usize, K: Basic>(local: Tensor<D, K>, keeps: bool) -> Tensor<D, K> {
    Tensor::from_dispatch(apply(KeptByOne { keeps }, [local.into_dispatch()]))
}

/// Identity whose gradient is kept by one of several ranks; the others get zeros.
#[derive(Debug)]
struct KeptByOne {
    keeps: bool,
}

impl Operator for KeptByOne {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let [tensor] = one(inputs);
        Ok((tensor, ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let gradient = pass.cotangent;
        Ok(vec![Some(if self.keeps {
            gradient
        } else {
            blank(&gradient, &gradient.shape(), Some(0.0))
        })])
    }
}
