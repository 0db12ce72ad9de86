//! Permutation of dims.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::Tensor;
use burn::tensor::kind::{Basic, Kind};
use halocline_core::ops::{BackwardPass, Operator, Recompute, apply};
use halocline_core::{Error, Result, Shard, ShardTensor};

use crate::driver::strides::row_major;
use crate::golden::{Golden, array, output, with_dims};

/// Permutes dims: dim `i` of the result is dim `axes[i]` of `x`. Nothing is sent; shards keep their
/// cells.
///
/// # Adjoint
/// The inverse permutation.
///
/// # Errors
/// Axes that are not a permutation of the dims.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::permute;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<4>::ones([1, 3, 6, 8], &mesh, &[Shard(2)])?;
///     let y = permute(x, [0, 2, 3, 1])?; // channels last
///     assert_eq!((y.dims(), y.placements()), ([1, 6, 8, 3], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn permute<const D: usize, K: Basic>(
    x: ShardTensor<D, K>,
    axes: [usize; D],
) -> Result<ShardTensor<D, K>> {
    let place = |dim: usize| axes.iter().position(|axis| *axis == dim);
    if (0..D).any(|dim| place(dim).is_none()) {
        let message = format!("axes {axes:?}; expected each of 0..{D} once");
        return Err(Error::operator("permute", message));
    }
    let (local, layout, mesh) = x.into_parts();
    let placements = layout.map_placements(|placement| match placement {
        Shard(dim) => Shard(place(dim).expect("checked above")),
        other => other,
    });
    let extents = axes.map(|dim| layout.extents(dim).to_vec()).to_vec();
    let layout = layout.derive(placements, extents);
    let local = match K::KIND {
        Kind::Float => {
            let order = Order(axes.to_vec());
            Tensor::from_dispatch(apply(order, [local.into_dispatch()]))
        }
        Kind::Int | Kind::Bool => local.permute(axes),
    };
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Permutation of the dims of a shard, stored in row-major order.
///
/// On the CPU the cells are copied by all threads, because burn's operators are many times slower
/// on views.
#[derive(Debug)]
struct Order(Vec<usize>);

impl Operator for Order {
    type Saved = ();

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, ())> {
        let view = Dispatch::float_permute(inputs.remove(0), &self.0);
        Ok((row_major(view), ()))
    }

    fn backward(&self, pass: BackwardPass<'_, ()>) -> Result<Vec<Option<DispatchTensor>>> {
        let mut back = vec![0; self.0.len()];
        for (place, axis) in self.0.iter().enumerate() {
            back[*axis] = place;
        }
        let view = Dispatch::float_permute(pass.cotangent, &back);
        Ok(vec![Some(row_major(view))])
    }
}

/// Registry entry of permute.
pub(super) const GOLDEN: Golden = Golden::new("permute", |case| {
    with_dims!(case.dims(), D => {
        let dims = case.attributes.dims("dims", D);
        output(permute(case.input::<D>(0)?, array(&dims)?))
    })
});

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct ChannelsLast;

    impl Operator<3, 3> for ChannelsLast {
        fn apply<X: Field<3>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            inputs.remove(0).permute([0, 2, 1])
        }
    }

    #[test]
    fn shards_keep_their_cells() {
        check_op(&ChannelsLast, &[[2, 5, 7]], &[], &[0, 1, 2], 1e-6);
    }

    #[test]
    fn axes_are_checked() {
        let x = halocline_core::ShardTensor::solo(Tensor::<2>::ones([3, 4], &Default::default()));
        let error = super::permute(x, [1, 1]).unwrap_err().to_string();
        assert!(error.contains("each of 0..2 once"), "{error}");
    }
}
