//! Evaluation in chunks: a block of a model is applied to one part of its input at a time.
//!
//! A pass needs the memory of one chunk, in addition to input and result; in training this requires
//! a block that is [recomputed](crate::Field::recompute) in each chunk.
//!
//! # Placement
//! Any. Each rank divides its own cells of the dim, so nothing is sent for the division; a block
//! that needs cells of other ranks in other dims exchanges them once per chunk.
//!
//! # Adjoint
//! The adjoints of the chunks, one after the other. Gradients of parameters add up over chunks, as
//! over any repeated use of a parameter.

use halocline_core::{Error, Layout, Result, ShardTensor};

use super::cat::{join_shards, joined};
use super::split::parts;
use crate::driver::place::require_dim;

const NAME: &str = "map_chunks";

/// Applies a block to `count` chunks of a dim and concatenates the results.
///
/// The result equals that of the block on the whole tensor if the block treats the indices of the
/// dim independently: samples of a batch, members of an ensemble, or rows, for a block that works
/// cell by cell. Ranks with fewer cells than chunks have empty chunks; the number of chunks is at
/// most that of cells of the largest shard.
///
/// # Errors
/// A dim that does not exist; no chunks; a block that changes the size or the placement of the dim;
/// the errors of the block.
///
/// # Example
/// ```
/// use halocline_core::{Launcher, Shard, ShardTensor};
/// use halocline_ops::rearrange::map_chunks;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let x = ShardTensor::<2>::ones([5, 3], &mesh, &[Shard(0)])?;
///     let y = map_chunks(x, 2, 0, |rows| Ok(rows.exp()))?; // rows 0 and 3, then 1, 2 and 4
///     assert_eq!((y.dims(), y.layout().extents(0)), ([5, 3], &[3, 2][..]));
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn map_chunks<const D: usize, const E: usize>(
    x: ShardTensor<D>,
    count: usize,
    dim: usize,
    mut block: impl FnMut(ShardTensor<D>) -> Result<ShardTensor<E>>,
) -> Result<ShardTensor<E>> {
    require_dim(NAME, &x, dim)?;
    if count == 0 {
        let message = format!(
            "0 chunks of dim {dim} of {:?}; expected at least 1",
            x.dims()
        );
        return Err(Error::operator(NAME, message));
    }
    let largest = x.layout().extents(dim).iter().copied().max().unwrap_or(0);
    let count = count.min(largest).max(1);
    if count == 1 {
        return block(x);
    }
    let extents = (0..count).map(|chunk| chunk_of(x.layout(), dim, chunk, count));
    let extents = extents.collect();
    let chunks = parts(x, dim, extents);
    let mut results = Vec::with_capacity(count);
    for chunk in chunks {
        let layout = chunk.layout().clone();
        let result = block(chunk)?;
        let keeps = dim < E
            && result.layout().extents(dim) == layout.extents(dim)
            && result.layout().axes_of(dim) == layout.axes_of(dim);
        if !keeps {
            let message = format!("dim {dim} of {layout} became that of {}", result.layout());
            return Err(Error::operator(NAME, message));
        }
        results.push(result);
    }
    let layout = joined(NAME, &results, dim)?;
    let mesh = results[0].mesh().clone();
    let shards = results.into_iter().map(ShardTensor::into_local).collect();
    let local = join_shards(shards, dim);
    Ok(ShardTensor::from_parts(local, layout, mesh))
}

/// Extents of a dim in one of `count` chunks of every shard.
fn chunk_of(layout: &Layout, dim: usize, chunk: usize, count: usize) -> Vec<usize> {
    let cells = |extent: &usize| (chunk + 1) * extent / count - chunk * extent / count;
    layout.extents(dim).iter().map(cells).collect()
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::Tensor;
    use halocline_core::{Halos, Launcher, Shard};

    use super::*;
    use crate::prelude::*;
    use crate::testing::{Operator, check_op};

    /// Pools a few samples at a time.
    struct Samples(usize);

    impl Operator<4, 4> for Samples {
        fn apply<X: Field<4>>(&self, mut inputs: Vec<X>, _: Vec<Tensor<4>>) -> X {
            inputs.remove(0).map_chunks::<4>(self.0, 0, |x| {
                let window = PoolOptions::new([3, 3])
                    .with_stride([1, 1])
                    .with_padding([Padding::zeros(1, 1); 2]);
                let y = x.clone().avg_pool(&window);
                x * y
            })
        }
    }

    #[test]
    fn chunks_give_the_result_of_the_whole() {
        for count in [1, 2, 3, 9] {
            check_op(&Samples(count), &[[5, 2, 4, 3]], &[], &[0, 2, 3], 1e-6);
        }
    }

    #[test]
    fn gradients_of_parameters_add_up_over_recomputed_chunks() {
        let run = |count: usize, ranks: usize| {
            let found = Launcher::local(ranks).collect(|world| {
                let mesh = world.mesh([("lat", ranks)])?;
                let linear = world.init(|device| LinearConfig::new(3, 3).init(device))?;
                let x = ShardTensor::<2>::ones([7, 3], &mesh, &[Shard(0)])?;
                let y = x.map_chunks(count, 0, |x| {
                    x.recompute(&linear, Halos::Keep, |linear, x| x.apply(linear).tanh())
                });
                let gradients = y.sum().resolve().backward();
                Ok(linear
                    .weight
                    .grad(&gradients)
                    .expect("a gradient")
                    .into_data())
            });
            found.unwrap().remove(0)
        };
        let expected = run(1, 1);
        for (count, ranks) in [(3, 1), (2, 2), (4, 3)] {
            let tolerance = burn::tensor::Tolerance::absolute(1e-5);
            run(count, ranks).assert_approx_eq::<f32>(&expected, tolerance);
        }
    }

    #[test]
    fn a_block_that_changes_the_dim_is_refused() {
        let x = ShardTensor::solo(Tensor::<2>::ones([4, 3], &Default::default()));
        let shorter = map_chunks(x.clone(), 2, 0, |x| crate::rearrange::narrow(x, 0, 0, 1));
        let error = shorter.unwrap_err().to_string();
        assert!(error.contains("map_chunks: dim 0 of [2, 3]"), "{error}");
        let none = map_chunks(x, 0, 0, Ok::<ShardTensor<2>, _>).unwrap_err();
        assert!(none.to_string().contains("expected at least 1"), "{none}");
    }
}
