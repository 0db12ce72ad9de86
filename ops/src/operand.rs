//! Parameters of operators, replicated or with a layout.

use burn::module::Param;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Tensor};
use halocline_core::ops::fan_out;
use halocline_core::{Error, Layout, Pairing, Result, ShardTensor};

/// A parameter of an operator: a replicated tensor, or one with a layout.
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
    /// A tensor of which ranks hold shards. Its gradient has its layout.
    Laid(ShardTensor<D>),
}

impl<const D: usize> From<Tensor<D>> for Operand<D> {
    fn from(tensor: Tensor<D>) -> Self {
        Self::Replicated(tensor)
    }
}

impl<const D: usize> From<ShardTensor<D>> for Operand<D> {
    fn from(tensor: ShardTensor<D>) -> Self {
        Self::Laid(tensor)
    }
}

impl<const D: usize> From<&Param<Tensor<D>>> for Operand<D> {
    fn from(parameter: &Param<Tensor<D>>) -> Self {
        Self::Replicated(parameter.val())
    }
}

impl<const D: usize> Operand<D> {
    /// The operand of a module's optional parameter.
    pub(crate) fn of_optional(parameter: &Option<Param<Tensor<D>>>) -> Option<Self> {
        parameter.as_ref().map(Self::from)
    }

    /// The global shape.
    pub fn dims(&self) -> [usize; D] {
        match self {
            Self::Replicated(tensor) => tensor.dims(),
            Self::Laid(tensor) => tensor.dims(),
        }
    }

    /// The number type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Replicated(tensor) => tensor.dtype(),
            Self::Laid(tensor) => tensor.local().dtype(),
        }
    }

    /// Puts the operand on the mesh of a field.
    pub(crate) fn beside<const E: usize, K: Basic>(self, x: &ShardTensor<E, K>) -> ShardTensor<D> {
        match self {
            Self::Laid(tensor) => tensor,
            Self::Replicated(tensor) => {
                let layout = Layout::replicated(x.layout().mesh(), &tensor.dims());
                ShardTensor::from_parts(tensor, layout, x.mesh().clone())
            }
        }
    }

    /// Gives the whole parameter to a kernel on the shards of `x`. Its gradient is summed over the
    /// ranks between which `x` is sharded.
    ///
    /// # Errors
    /// Partial values of `x`; a parameter that is sharded or of another number type.
    pub(crate) fn whole_beside<const E: usize>(
        self,
        x: &ShardTensor<E>,
        operator: &'static str,
    ) -> Result<Tensor<D>> {
        let local = match self {
            Self::Replicated(tensor) => tensor,
            Self::Laid(tensor) => {
                tensor.require_resolved(operator)?;
                (0..D).try_for_each(|dim| tensor.require_whole(operator, dim))?;
                if tensor.layout().mesh() != x.layout().mesh() {
                    let message =
                        format!("{} and {} are on two meshes", x.layout(), tensor.layout());
                    return Err(Error::operator(operator, message));
                }
                tensor.into_parts().0
            }
        };
        let (dtype, expected) = (local.dtype(), x.local().dtype());
        if dtype != expected {
            let message = format!("a parameter of {dtype:?} for a tensor of {expected:?}");
            return Err(Error::operator(operator, message));
        }
        let axes = Pairing::of_whole(operator, x.layout())?;
        Ok(fan_out(local, x.mesh(), &axes, operator))
    }
}
