//! Concatenation along a dim, and stacking along a new one.
//!
//! # Placement
//! All dims may be sharded, in the same way in all parts. Along a sharded dim, a rank's extent of
//! the result is the sum of its extents of the parts.
//!
//! # Communication
//! None along a whole dim; along a sharded dim the cells that move to another rank.
//!
//! # Adjoint
//! Each part receives its range of the cotangent.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use burn::tensor::kind::Basic;
use halocline_core::ops::{self, BackwardPass, Operator, Recompute, of_boxes};
use halocline_core::{Error, IndexBox, Layout, Result, ShardTensor};

use super::narrow::{cells, part_layout};
use super::shape::unsqueeze_dim;
use crate::driver::place::{in_place, part_ranges, placed, require_dim};
use crate::golden::{Golden, output, with_dims};

const NAME: &str = "cat";

/// Concatenates tensors along a dim. Their placements must be equal, and so must their extents in
/// all other dims. See the [module](self).
///
/// # Errors
/// No tensors; a dim that does not exist; layouts that differ in another dim or in a placement;
/// different dtypes; partial values along a sharded dim; a failure of communication.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::cat;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     assert_eq!(cat(vec![x.clone(), x.clone()], 1)?.dims(), [5, 6]);
///     let tall = cat(vec![x.clone(), x], 0)?;
///     assert_eq!(tall.layout().extents(0), [6, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn cat<const D: usize, K: Basic>(
    parts: Vec<ShardTensor<D, K>>,
    dim: usize,
) -> Result<ShardTensor<D, K>> {
    let Some(first) = parts.first() else {
        return Err(Error::operator(NAME, "no tensors"));
    };
    require_dim(NAME, first, dim)?;
    let layout = joined(NAME, &parts, dim)?;
    if let [_] = &parts[..] {
        return Ok(parts.into_iter().next().expect("one"));
    }
    let mesh = first.mesh().clone();
    let mut locals = Vec::with_capacity(parts.len());
    let mut start = 0;
    for part in parts {
        let cells = start..start + part.dims()[dim];
        start = cells.end;
        let part = if layout.is_sharded(dim) {
            beside(part, dim, cells, &layout)?
        } else {
            part
        };
        locals.push(part.into_local());
    }
    let local = join_shards(locals, dim);
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Concatenates one or more shards of this rank, empty ones too.
pub(super) fn join_shards<const D: usize, K: Basic>(
    shards: Vec<Tensor<D, K>>,
    dim: usize,
) -> Tensor<D, K> {
    let mut shards: Vec<_> = shards.into_iter().map(Tensor::into_dispatch).collect();
    // An operator has at most four inputs.
    while shards.len() > 1 {
        let groups = shards.chunks(4).map(|group| join(group, dim));
        shards = groups.collect();
    }
    Tensor::from_dispatch(shards.remove(0))
}

/// Stacks tensors of one layout along a new, whole dim, dim `dim` of the result. The result has `E`
/// dims, one more than the parts. Nothing is sent.
///
/// # Errors
/// The errors of [`cat`]; another number of dims.
///
/// # Example
/// ```
/// use burn::tensor::Tensor;
/// use halocline_core::ShardTensor;
/// use halocline_ops::rearrange::stack;
///
/// let part = |value| ShardTensor::solo(Tensor::<1>::from([value, 0.0]));
/// let y: ShardTensor<2> = stack(vec![part(1.0), part(2.0)], 0)?;
/// y.local().to_data().assert_eq(&[[1.0_f32, 0.0], [2.0, 0.0]].into(), true);
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn stack<const D: usize, const E: usize, K: Basic>(
    parts: Vec<ShardTensor<D, K>>,
    dim: usize,
) -> Result<ShardTensor<E, K>> {
    let parts = parts.into_iter().map(|part| unsqueeze_dim(part, dim));
    cat(parts.collect::<Result<_>>()?, dim)
}

/// Checks that a part can be concatenated with the first one.
fn require_alike<const D: usize, K: Basic>(
    operator: &str,
    first: &ShardTensor<D, K>,
    part: &ShardTensor<D, K>,
    dim: usize,
) -> Result<()> {
    let others = |layout: &Layout| {
        let mut extents = layout.all_extents().to_vec();
        extents[dim].clear();
        extents
    };
    let (one, other) = (first.layout(), part.layout());
    let [number, others_number] = [first, part].map(|part| part.local().dtype());
    let how = if number != others_number {
        format!("have numbers of {number:?} and {others_number:?}")
    } else if one.mesh() != other.mesh() {
        "are on two meshes".into()
    } else if one.placements() != other.placements() {
        return Err(Error::placement(
            operator,
            format!("{one} with {other}"),
            "bring one to the shards of the other by align_to",
        ));
    } else if others(one) != others(other) {
        format!("differ in another dim than {dim}")
    } else {
        return Ok(());
    };
    Err(Error::operator(
        operator,
        format!("{one} and {other} {how}"),
    ))
}

/// Layout of the result: extents add up.
///
/// # Errors
/// Layouts that differ in anything else.
pub(crate) fn joined<const D: usize, K: Basic>(
    operator: &str,
    parts: &[ShardTensor<D, K>],
    dim: usize,
) -> Result<Layout> {
    let first = parts[0].layout();
    let mut extents = first.extents(dim).to_vec();
    for part in &parts[1..] {
        require_alike(operator, &parts[0], part, dim)?;
        for (sum, more) in extents.iter_mut().zip(part.layout().extents(dim)) {
            *sum += more;
        }
    }
    Ok(first.resized(dim, extents))
}

/// Moves the cells of a part, cells `cells` of the result, to the ranks that hold them in the
/// result.
fn beside<const D: usize, K: Basic>(
    part: ShardTensor<D, K>,
    dim: usize,
    cells: Range<usize>,
    result: &Layout,
) -> Result<ShardTensor<D, K>> {
    let output = part_layout(result, dim, &cells);
    let sizes = part.dims();
    placed(part, NAME, (), output, 0.0, |dim, cells| {
        in_place(cells, sizes[dim])
    })
}

fn join(parts: &[DispatchTensor], dim: usize) -> DispatchTensor {
    match parts {
        [one] => one.clone(),
        [a, b] => ops::apply(Join(dim), [a, b].map(Clone::clone)),
        [a, b, c] => ops::apply(Join(dim), [a, b, c].map(Clone::clone)),
        [a, b, c, d] => ops::apply(Join(dim), [a, b, c, d].map(Clone::clone)),
        other => unreachable!("{} parts in groups of four", other.len()),
    }
}

/// Concatenation of shards. burn's `cat` would drop empty parts from the graph of this rank.
#[derive(Debug)]
struct Join(usize);

impl Join {
    /// Boxes of parts with these sizes in a result of this shape.
    fn boxes(&self, sizes: &[usize], shape: &[usize]) -> Vec<IndexBox> {
        let whole = IndexBox::whole(shape);
        let part = |cells| whole.with_range(self.0, cells);
        part_ranges(sizes).map(part).collect()
    }
}

impl Operator for Join {
    /// Sizes of the parts.
    type Saved = Vec<usize>;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn recompute(&self) -> Recompute {
        Recompute::WithCheckpointing
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Vec<usize>)> {
        let sizes: Vec<usize> = inputs.iter().map(|part| part.shape()[self.0]).collect();
        let mut shape = inputs[0].shape().to_vec();
        shape[self.0] = sizes.iter().sum();
        let like = inputs[0].clone();
        let parts = self.boxes(&sizes, &shape).into_iter().zip(inputs);
        let parts: Vec<_> = parts.filter(|(cells, _)| cells.volume() > 0).collect();
        let y = match &parts[..] {
            // The only part with cells on this rank is the whole result.
            [(_, part)] => part.clone(),
            parts => of_boxes(&like, &shape, None, parts),
        };
        Ok((y, sizes))
    }

    fn backward(&self, pass: BackwardPass<'_, Vec<usize>>) -> Result<Vec<Option<DispatchTensor>>> {
        let boxes = self.boxes(pass.saved, &pass.cotangent.shape());
        let parts = boxes.iter().map(|place| cells(&pass.cotangent, place));
        Ok(parts.map(Some).collect())
    }
}

/// Registry entries of concatenation and stacking.
pub(super) const GOLDEN: [Golden; 2] = [
    Golden::new("cat", |case| {
        let dim = case.attributes.place_or("dim", case.dims(), 0);
        with_dims!(case.dims(), D => {
            let parts = (0..case.inputs()).map(|part| case.input::<D>(part));
            output(cat(parts.collect::<Result<_>>()?, dim))
        })
    })
    .with_travels([
        "cells that change their rank, if the dim is sharded",
        "the same back",
    ]),
    Golden::new("stack", |case| {
        let dim = case.attributes.place_or("dim", case.dims() + 1, 0);
        with_dims!(case.dims(), D => {
            let parts = (0..case.inputs()).map(|part| case.input::<D>(part));
            output(stack::<D, { D + 1 }, _>(parts.collect::<Result<_>>()?, dim))
        })
    }),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    struct Many;

    impl Operator<3, 3> for Many {
        fn apply<X: Field<3>>(&self, inputs: Vec<X>, _: Vec<Tensor<3>>) -> X {
            let [x, y] = [inputs[0].clone(), inputs[1].clone()];
            let parts = vec![
                x.clone().narrow(2, 3, 2),
                y.clone(),
                x.clone() * 2.0,
                y * 3.0,
                x,
            ];
            X::cat(parts, 2)
        }
    }

    #[test]
    fn parts_of_sharded_dims_are_joined() {
        check_op(&Many, &[[2, 5, 7], [2, 5, 7]], &[], &[0, 1, 2], 1e-6);
    }

    struct Stack(usize);

    impl Operator<2, 3> for Stack {
        fn apply<X: Field<2>>(&self, inputs: Vec<X>, _: Vec<Tensor<2>>) -> WithDims<X, 3> {
            X::stack::<3>(inputs, self.0)
        }
    }

    #[test]
    fn a_new_dim_is_whole() {
        for dim in 0..3 {
            check_op(&Stack(dim), &[[5, 7], [5, 7]], &[], &[0, 1], 1e-6);
        }
    }
}
