//! Parameters of operators, replicated or with a layout.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Tensor};
use halocline_core::ops::fan_out_with;
use halocline_core::plan::Pairing;
use halocline_core::{
    Error, Fan, Layout, MeshShape, ParamShard, Replicate, Result, Shard, ShardTensor,
};

/// A parameter of an operator: a replicated tensor, or a tensor with a layout.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::prelude::*;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let x = ShardTensor::<2>::ones([4, 6], &mesh, &[halocline_core::Replicate])?;
///     let columns = ShardTensor::<2>::ones([6, 8], &mesh, &[Shard(1)])?;
///     assert_eq!(x.linear(columns, None).placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub enum Operand<const D: usize> {
    /// A tensor that every rank holds whole. Its gradient is complete on every rank.
    Replicated(Tensor<D>),
    /// A tensor with a layout, of which each rank holds its shard. Its gradient has the same
    /// layout.
    Sharded(ShardTensor<D>),
    /// This rank's shard of a parameter. Its gradient is the gradient of the shard.
    Parameter(Tensor<D>, ParamShard),
}

impl<const D: usize> From<Tensor<D>> for Operand<D> {
    fn from(tensor: Tensor<D>) -> Self {
        Self::Replicated(tensor)
    }
}

impl<const D: usize> From<ShardTensor<D>> for Operand<D> {
    fn from(tensor: ShardTensor<D>) -> Self {
        Self::Sharded(tensor)
    }
}

impl<const D: usize> From<&Param<Tensor<D>>> for Operand<D> {
    fn from(parameter: &Param<Tensor<D>>) -> Self {
        match ParamShard::of(parameter) {
            Some(shard) => Self::Parameter(parameter.base(), shard.clone()),
            None => Self::Replicated(parameter.val()),
        }
    }
}

impl<const D: usize> Operand<D> {
    /// Operand of a module's optional parameter.
    pub(crate) fn of_optional(parameter: &Option<Param<Tensor<D>>>) -> Option<Self> {
        parameter.as_ref().map(Self::from)
    }

    /// Global shape.
    pub fn dims(&self) -> [usize; D] {
        match self {
            Self::Replicated(tensor) => tensor.dims(),
            Self::Sharded(tensor) => tensor.dims(),
            Self::Parameter(_, shard) => {
                let shape = shard.layout().shape();
                shape.try_into().expect("the dims of the parameter")
            }
        }
    }

    /// Whether operators compute with shards of the operand.
    pub(crate) fn is_sharded(&self) -> bool {
        match self {
            Self::Replicated(_) => false,
            Self::Sharded(tensor) => tensor.placements().iter().any(|p| matches!(p, Shard(_))),
            Self::Parameter(_, shard) => !shard.computing_axes().is_empty(),
        }
    }

    /// Layout in which an operator on a field of this mesh uses the operand.
    pub(crate) fn layout_on(&self, mesh: &Arc<MeshShape>) -> Layout {
        match self {
            Self::Replicated(tensor) => Layout::replicated(mesh, &tensor.dims()),
            Self::Sharded(tensor) => tensor.layout().clone(),
            Self::Parameter(_, shard) => shard.layout().gathered(shard.stored(), Replicate),
        }
    }

    /// Number type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Replicated(tensor) | Self::Parameter(tensor, _) => tensor.dtype(),
            Self::Sharded(tensor) => tensor.local().dtype(),
        }
    }

    /// Requires that the operand has the number type of a field.
    pub(crate) fn require_dtype(&self, operator: &str, expected: DType) -> Result<()> {
        let dtype = self.dtype();
        if dtype == expected {
            return Ok(());
        }
        let message = format!("a parameter of {dtype:?} for a tensor of {expected:?}");
        Err(Error::operator(operator, message))
    }

    /// Puts the operand on the mesh of a field, gathering a parameter that is stored in shards.
    ///
    /// # Errors
    /// A parameter on another mesh; a failure of communication.
    pub(crate) fn place_on<const E: usize, K: Basic>(
        self,
        x: &ShardTensor<E, K>,
    ) -> Result<ShardTensor<D>> {
        Ok(match self {
            Self::Sharded(tensor) => tensor,
            Self::Parameter(base, shard) => shard.operand(base, x)?,
            Self::Replicated(tensor) => {
                let layout = Layout::replicated(x.layout().mesh(), &tensor.dims());
                ShardTensor::from_parts(tensor, layout, x.mesh().clone())
            }
        })
    }

    /// Returns the whole parameter, for a kernel on the shards of `x`. Its gradient is summed over
    /// the ranks between which `x` is sharded or fans out.
    ///
    /// # Errors
    /// Partial values of `x`; a parameter that is sharded, has another dtype, or fans out
    /// where `x` is replicated.
    pub(crate) fn replicated_for<const E: usize>(
        self,
        x: &ShardTensor<E>,
        operator: &'static str,
    ) -> Result<Tensor<D>> {
        let mut axes = Pairing::of_whole(operator, x.layout())?;
        self.require_dtype(operator, x.local().dtype())?;
        let local = match self {
            Self::Replicated(tensor) => tensor,
            laid => {
                let tensor = laid.place_on(x)?;
                tensor.require_resolved(operator)?;
                (0..D).try_for_each(|dim| tensor.require_whole(operator, dim))?;
                if tensor.layout().mesh() != x.layout().mesh() {
                    let message =
                        format!("{} and {} are on two meshes", x.layout(), tensor.layout());
                    return Err(Error::operator(operator, message));
                }
                let fans = tensor.layout().axes_where(|placement| placement == Fan);
                if let Some(&axis) = fans.iter().find(|axis| !axes.contains(axis)) {
                    let axis = &x.layout().mesh().names()[axis];
                    return Err(Error::placement(
                        operator,
                        format!("Replicate with Fan of a parameter on axis \"{axis}\""),
                        "redistribute it to Fan, too",
                    ));
                }
                axes.retain(|axis| !fans.contains(axis));
                tensor.into_local()
            }
        };
        Error::catch(|| fan_out_with(local, x.local(), x.mesh(), &axes, operator))
    }
}

/// Returns this rank's part of an operand, for a kernel on the shards of a field. Its gradient is
/// summed over the mesh axes on which the operand is replicated and the field is sharded or fans
/// out.
pub(crate) fn part_beside<const D: usize, const E: usize>(
    part: ShardTensor<D>,
    x: &ShardTensor<E>,
    operator: &'static str,
) -> Tensor<D> {
    let mut axes = part.layout().axes_where(|placement| placement == Replicate);
    axes.retain(|axis| x.placements()[*axis].varies());
    fan_out_with(part.into_local(), x.local(), x.mesh(), &axes, operator)
}

/// Fans out replicated tensors on every axis on which at least one of the tensors fans out.
pub(crate) fn fan_out_alike<const D: usize, const N: usize>(
    tensors: [ShardTensor<D>; N],
) -> Result<[ShardTensor<D>; N]> {
    let fans = |x: &ShardTensor<D>| x.layout().axes_where(|placement| placement == Fan);
    let fans: Vec<usize> = tensors.iter().flat_map(fans).collect();
    let all = tensors.into_iter();
    let all = all.map(|x| x.try_fan_out(|axis| fans.contains(&axis)));
    let all: Vec<_> = all.collect::<Result<_>>()?;
    Ok(all.try_into().expect("as many as were given"))
}
