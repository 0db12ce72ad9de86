//! Recomputed blocks with two results, which are joined to one tensor.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Module;
use burn::tensor::{Shape, Tensor};
use halocline_core::ops::{BackwardPass, Operator, apply, blank, cut, of_boxes};
use halocline_core::{IndexBox, Result, ShardTensor};

use crate::recompute::apply_block_with;

/// Dim of cells and of edges.
const DIM: usize = 1;

/// Like [`apply_block_with`], for a block with two results, which have the cells or edges of its
/// inputs.
pub(super) fn apply_joint<M: Module + 'static>(
    recompute: bool,
    inputs: [ShardTensor<3>; 2],
    module: &M,
    block: impl Fn(&M, ShardTensor<3>, ShardTensor<3>) -> [ShardTensor<3>; 2] + Send + Sync + 'static,
) -> [ShardTensor<3>; 2] {
    if !recompute {
        let [x, y] = inputs;
        return block(module, x, y);
    }
    let extents = inputs.each_ref().map(|x| x.layout().extents(DIM).to_vec());
    let block = move |module: &M, x: ShardTensor<3>, y: ShardTensor<3>| join(block(module, x, y));
    split(apply_block_with(true, inputs, module, block), &extents)
}

/// Joins the cells or edges that each rank holds of two tensors. Nothing is sent.
fn join([x, y]: [ShardTensor<3>; 2]) -> ShardTensor<3> {
    assert_eq!(x.placements(), y.placements(), "join: placements");
    let extents = x.layout().extents(DIM).iter().zip(y.layout().extents(DIM));
    let extents = extents.map(|(x, y)| x + y).collect();
    let (layout, mesh) = (x.layout().resized(DIM, extents), x.mesh().clone());
    let parts = [x, y].map(|part| part.into_local().into_dispatch());
    let local = Tensor::from_dispatch(apply(Join, parts));
    ShardTensor::from_parts(local, layout, mesh)
}

/// Splits the result of [`join`] into tensors with these extents.
fn split(joined: ShardTensor<3>, extents: &[Vec<usize>; 2]) -> [ShardTensor<3>; 2] {
    let (local, layout, mesh) = joined.into_parts();
    let part = layout.part(DIM, mesh.position());
    let sizes = extents.each_ref().map(|extents| extents[part]);
    let places = boxes(&layout.local_shape(mesh.position()), sizes);
    let local = local.into_dispatch();
    [0, 1].map(|which: usize| {
        let part = apply(Part(places[which].clone()), [local.clone()]);
        let layout = layout.resized(DIM, extents[which].clone());
        ShardTensor::from_parts(Tensor::from_dispatch(part), layout, mesh.clone())
    })
}

/// Boxes of two parts with these sizes in a tensor of this shape.
fn boxes(shape: &[usize], [first, second]: [usize; 2]) -> [IndexBox; 2] {
    let whole = IndexBox::whole(shape);
    [0..first, first..first + second].map(|cells| whole.with_range(DIM, cells))
}

/// Returns a box of a tensor, which may be empty.
fn cells(x: &DispatchTensor, place: &IndexBox) -> DispatchTensor {
    match place.volume() {
        0 => blank(x, &place.shape(), None),
        _ => cut(x, place),
    }
}

/// Concatenation of shards. burn's `cat` would drop an empty part from the graph of this rank.
#[derive(Debug)]
struct Join;

impl Operator for Join {
    /// Sizes of the parts.
    type Saved = [usize; 2];

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, [usize; 2])> {
        let sizes = [0, 1].map(|part: usize| inputs[part].shape()[DIM]);
        let mut shape = inputs[0].shape().to_vec();
        shape[DIM] = sizes.iter().sum();
        let like = inputs[0].clone();
        let parts: Vec<_> = boxes(&shape, sizes).into_iter().zip(inputs).collect();
        Ok((of_boxes(&like, &shape, None, &parts), sizes))
    }

    fn backward(&self, pass: BackwardPass<'_, [usize; 2]>) -> Result<Vec<Option<DispatchTensor>>> {
        let places = boxes(&pass.cotangent.shape(), *pass.saved);
        let parts = places.iter().map(|place| cells(&pass.cotangent, place));
        Ok(parts.map(Some).collect())
    }
}

/// Box of a shard. burn's slice would drop out of the graph on a rank without cells.
#[derive(Debug)]
struct Part(IndexBox);

impl Operator for Part {
    /// Shape of the input.
    type Saved = Shape;

    fn keeps(&self, _: usize) -> bool {
        false
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> Result<(DispatchTensor, Shape)> {
        Ok((cells(&inputs[0], &self.0), inputs[0].shape()))
    }

    fn backward(&self, pass: BackwardPass<'_, Shape>) -> Result<Vec<Option<DispatchTensor>>> {
        let part = [(self.0.clone(), pass.cotangent)];
        let gradient = of_boxes(&part[0].1, pass.saved, Some(0.0), &part);
        Ok(vec![Some(gradient)])
    }
}
