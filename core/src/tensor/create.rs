//! Sharded tensors from whole ones, from one rank, and from nothing.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::ShardTensor;
use crate::comm::{Operation, Traffic};
use crate::device_mesh::DeviceMesh;
use crate::exchange::{Need, Source};
use crate::layout::{Layout, Partial, Placement};
use crate::ops;
use crate::replicas::require_replicas;
use crate::rng::{self, Distribution};
use crate::{Error, IndexBox, Result};

/// Number types that can be scattered.
const NUMBERS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Sends a tensor that one rank of the world holds to the ranks of a mesh, each of which gets its shard and no more.
///
/// The source passes `Some`, all others `None`. The result is a leaf: call
/// [`require_grad`](ShardTensor::require_grad) on it for its gradient.
///
/// # Errors
/// Placements that do not fit; a source that is not in the mesh or passed `None`; a failure of communication.
pub fn scatter_tensor<const D: usize>(
    tensor: Option<Tensor<D>>,
    source: usize,
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<ShardTensor<D>> {
    const NAME: &str = "scatter_tensor";
    let ranks: Arc<[usize]> = mesh.shape().ranks().into();
    let comm = mesh.comm();
    let owner = ranks
        .iter()
        .position(|&rank| rank == source)
        .ok_or_else(|| {
            Error::operator(NAME, format!("source rank {source} is not in the {mesh}"))
        })?;
    if let Some(placement) = placements.iter().find(|p| matches!(p, Partial(_))) {
        return Err(Error::Placement {
            operator: NAME.into(),
            placement: placement.to_string(),
            help: "scatter to Shard or Replicate".into(),
        });
    }
    // Number type and shape. Without a number type the source has nothing, so that all ranks fail alike.
    let metadata = (comm.rank() == source).then(|| {
        let number = tensor
            .iter()
            .filter_map(|tensor| NUMBERS.iter().position(|number| *number == tensor.dtype()));
        let dims = tensor.iter().flat_map(|tensor| tensor.dims());
        number
            .chain(dims)
            .flat_map(|word| (word as u64).to_le_bytes())
            .collect()
    });
    let metadata = mesh.broadcast_bytes(NAME, source, metadata)?;
    let words = metadata.as_chunks::<8>().0.iter();
    let words: Vec<usize> = words
        .map(|bytes| u64::from_le_bytes(*bytes) as usize)
        .collect();
    let [number, shape @ ..] = words.as_slice() else {
        return Err(Error::operator(
            NAME,
            format!("the source, rank {source}, passed None; it must pass the tensor"),
        ));
    };
    if shape.len() != D || *number >= NUMBERS.len() {
        let message = format!("rank {source} sends {shape:?}; expected {D} dims of {NUMBERS:?}");
        return Err(Error::operator(NAME, message));
    }
    let layout = Layout::new(mesh.shape(), shape, placements)?;
    let held = match tensor {
        Some(tensor) if comm.rank() == source => {
            tensor.inner().to_device(&mesh.device().clone().inner())
        }
        _ => Tensor::empty([0; D], (&mesh.device().clone().inner(), NUMBERS[*number])),
    };
    let plan = mesh
        .cache()
        .get_or_make((NAME, layout.clone(), owner), |_| {
            let need_of = |position| Need::of(layout.local_box(position));
            Ok(mesh.exchange_plan(Source::Single(owner, shape), need_of))
        })?;
    let operation = Operation::new(NAME, Traffic::Scatter, Some(&layout));
    let local = Error::catch(|| ops::exchange(held, mesh, plan, operation))?;
    let local = on_device(local, mesh.device());
    Ok(ShardTensor::from_parts(local, layout, mesh.clone()))
}

/// Gives a tensor without gradients the autodiff setting of a device, with its strategy of gradient checkpointing: burn
/// refuses operands of different strategies.
pub(crate) fn on_device<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

impl<const D: usize> ShardTensor<D> {
    /// Shards a tensor that every rank holds alike: each rank keeps its box. Nothing is communicated, but with checks on
    /// ([`Settings::check`](crate::Settings::check)) a hash of the tensor.
    ///
    /// # Errors
    /// Placements that do not fit the tensor. With checks on, [`Error::Replicas`] if a rank holds another tensor.
    pub fn distribute(
        tensor: Tensor<D>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        require_replicas("distribute", mesh.comm(), mesh.shape().ranks(), &tensor)?;
        let layout = Layout::new(mesh.shape(), &tensor.dims(), placements)?;
        Self::keep_box(tensor, mesh, &layout)
    }

    /// Shards a tensor that every rank holds alike, in a layout with extents of its own.
    ///
    /// # Errors
    /// A layout of another shape, or one with partial values; with checks on, a rank that holds another tensor.
    pub fn distribute_to(tensor: Tensor<D>, mesh: &DeviceMesh, layout: &Layout) -> Result<Self> {
        require_replicas("distribute", mesh.comm(), mesh.shape().ranks(), &tensor)?;
        Self::keep_box(tensor, mesh, layout)
    }

    fn keep_box(tensor: Tensor<D>, mesh: &DeviceMesh, layout: &Layout) -> Result<Self> {
        if tensor.dims().to_vec() != layout.shape() || layout.partial_axis().is_some() {
            return Err(Error::operator(
                "distribute",
                format!("a tensor of {:?} as {layout}", tensor.dims()),
            ));
        }
        let whole = Layout::replicated(layout.mesh(), layout.shape());
        Self::from_local(tensor, &whole, mesh)?.try_redistribute_to(layout)
    }

    /// A tensor of zeros, of which every rank allocates its shard only.
    ///
    /// # Errors
    /// Placements that do not fit the shape.
    pub fn zeros(shape: [usize; D], mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        Self::full(shape, 0.0, mesh, placements)
    }

    /// A tensor of ones.
    ///
    /// # Errors
    /// Placements that do not fit the shape.
    pub fn ones(shape: [usize; D], mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        Self::full(shape, 1.0, mesh, placements)
    }

    /// A tensor whose elements are all `value`.
    ///
    /// # Errors
    /// Placements that do not fit the shape.
    pub fn full(
        shape: [usize; D],
        value: f64,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::create(shape, mesh, placements, |cells| {
            Tensor::full(cells.shape(), value, mesh.device())
        })
    }

    /// Random values that depend on the seed, the stream and an element's global index alone: the same field on any
    /// mesh, bit for bit.
    ///
    /// # Errors
    /// Placements that do not fit the shape.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Distribution, Launcher, LocalGradient, RandomKey, Shard, ShardTensor};
    ///
    /// let fields = Launcher::local(2).collect(|world| {
    ///     let mesh = world.mesh([("lat", world.size())])?;
    ///     let key = RandomKey::new(7, "noise");
    ///     let x = ShardTensor::random([5, 3], Distribution::Normal { mean: 0.0, std: 1.0 }, key, &mesh, &[Shard(0)])?;
    ///     Ok(x.full_tensor(LocalGradient::Replicated).into_data())
    /// })?;
    /// assert_eq!(fields[0], fields[1]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn random(
        shape: [usize; D],
        distribution: Distribution,
        key: rng::RandomKey,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::create(shape, mesh, placements, |cells| {
            let values = key.fill(distribution, &shape, cells);
            let data = burn::tensor::TensorData::new(values, cells.shape());
            Tensor::from_data(data, mesh.device())
        })
    }

    fn create(
        shape: [usize; D],
        mesh: &DeviceMesh,
        placements: &[Placement],
        local: impl FnOnce(&IndexBox) -> Tensor<D>,
    ) -> Result<Self> {
        let layout = Layout::new(mesh.shape(), &shape, placements)?;
        if layout.partial_axis().is_some() {
            return Err(Error::Layout(format!(
                "cannot create partial values {layout}"
            )));
        }
        let local = local(&layout.local_box(mesh.position()));
        Ok(Self::from_parts(local, layout, mesh.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Launcher, Replicate, Shard, World};

    #[test]
    fn tensors_that_differ_between_ranks_are_found() {
        type Program<'a> = &'a (dyn Fn(&World, &DeviceMesh, Tensor<2>) -> Result<()> + Sync);
        let run = |f: Program| {
            let result = Launcher::local(3).check(true).run(|world| {
                let mesh = world.mesh([("rows", 3)])?;
                let rank = if world.rank() == 2 { 1e-7 } else { 0.0 };
                f(&world, &mesh, Tensor::ones([4, 3], world.device()) + rank)
            });
            result.unwrap_err().to_string()
        };
        let x = |mesh: &DeviceMesh| ShardTensor::<2>::ones([4, 3], mesh, &[Shard(0)]);
        let errors = [
            run(&|_, mesh, own| ShardTensor::distribute(own, mesh, &[Replicate]).map(|_| ())),
            run(&|_, mesh, own| ShardTensor::distribute(own, mesh, &[Shard(1)]).map(|_| ())),
            run(&|_, mesh, own| x(mesh).map(|x| drop(x.replicate_beside(own)))),
            run(&|_, mesh, own| x(mesh).map(|x| drop(x * own.narrow(0, 0, 1)))),
            run(&|world, mesh, own| {
                let own = own.narrow(0, 0, 1 + world.rank() / 2);
                ShardTensor::distribute(own, mesh, &[Replicate]).map(|_| ())
            }),
        ];
        let operators = [
            "distribute",
            "distribute",
            "replicate_beside",
            "mul",
            "distribute",
        ];
        for (error, operator) in errors.iter().zip(operators) {
            let what = format!("{operator}: rank 2 holds another tensor");
            assert!(error.contains(&what), "{error}");
        }
        assert!(
            errors[4].contains("([2, 3] of F32) than rank 0 ([1, 3] of F32)"),
            "{}",
            errors[4]
        );
    }
}
