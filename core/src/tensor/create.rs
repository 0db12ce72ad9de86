//! Constructors of sharded tensors: from whole tensors, from one rank's tensor, and from values.

use burn::tensor::kind::{self, Basic};
use burn::tensor::{
    BoolStore, DType, Device, Distribution, ElementConversion, Tensor, TensorCreationOptions,
};

use super::ShardTensor;
use crate::comm::{Operation, Traffic};
use crate::device_mesh::DeviceMesh;
use crate::dispatch::kind_of;
use crate::exchange::{Need, Source};
use crate::into_layout::IntoLayout;
use crate::layout::{Layout, Partial};
use crate::ops;
use crate::replicas::require_replicas;
use crate::rng;
use crate::{Error, IndexBox, Result};

/// The element types that can be scattered.
const TYPES: [DType; 15] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
    DType::Bool(BoolStore::U32),
];

/// Mesh of a new tensor, and its element type: `&mesh` or `(&mesh, dtype)`, as burn's factories take
/// a device. The default is the type of the device.
///
/// # Example
/// ```
/// use burn::tensor::DType;
/// use halocline_core::{Launcher, Shard, ShardTensor};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let field = ShardTensor::<2>::zeros([5, 3], (&mesh, DType::F64), &[Shard(0)])?;
///     assert_eq!(field.local().dtype(), DType::F64);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MeshOptions<'a> {
    mesh: &'a DeviceMesh,
    dtype: Option<DType>,
}

impl<'a> From<&'a DeviceMesh> for MeshOptions<'a> {
    fn from(mesh: &'a DeviceMesh) -> Self {
        Self { mesh, dtype: None }
    }
}

impl<'a> From<(&'a DeviceMesh, DType)> for MeshOptions<'a> {
    fn from((mesh, dtype): (&'a DeviceMesh, DType)) -> Self {
        Self {
            mesh,
            dtype: Some(dtype),
        }
    }
}

/// Scatters a tensor held by one rank of the world to the ranks of a mesh, each of which receives
/// only its shard.
///
/// The source passes `Some`, all other ranks `None`. The result is a leaf; call
/// [`require_grad`](ShardTensor::require_grad) on it to get its gradient. The element type is kept.
///
/// # Errors
/// The layout does not fit; the source is not in the mesh, passed `None`, or passed a tensor of
/// another kind; communication fails.
///
/// # Example
/// ```
/// use burn::tensor::{Int, Tensor};
/// use halocline_core::{Launcher, Layout, Shard, scatter_tensor};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("lat", 2)])?;
///     let classes = world.is_root().then(|| Tensor::<1, Int>::from_ints([3, 1, 4, 1, 5], world.device()));
///     let uneven = Layout::new(mesh.shape(), &[5], &[Shard(0)])?.with_extents(0, &[4, 1])?;
///     let classes = scatter_tensor(classes, 0, &mesh, &uneven)?;
///     assert_eq!(classes.local_dims(), [[4], [1]][world.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn scatter_tensor<const D: usize, K: kind::Autodiff>(
    tensor: Option<Tensor<D, K>>,
    source: usize,
    mesh: &DeviceMesh,
    to: impl IntoLayout,
) -> Result<ShardTensor<D, K>> {
    const NAME: &str = "scatter_tensor";
    let comm = mesh.comm();
    let owner = mesh.shape().position_of(source).ok_or_else(|| {
        Error::operator(NAME, format!("source rank {source} is not in the {mesh}"))
    })?;
    // Type and shape; empty if the source passed `None`, so that all ranks return the same error.
    let metadata = (comm.rank() == source).then(|| {
        let place = |other: DType| TYPES.iter().position(|dtype| *dtype == other);
        let dtype = tensor
            .iter()
            .map(|tensor| place(tensor.dtype()).unwrap_or(TYPES.len()));
        let dims = tensor.iter().flat_map(|tensor| tensor.dims());
        dtype
            .chain(dims)
            .flat_map(|word| (word as u64).to_le_bytes())
            .collect()
    });
    let metadata = mesh.broadcast_bytes(NAME, source, metadata)?;
    let words = metadata.as_chunks::<8>().0.iter();
    let words: Vec<usize> = words
        .map(|bytes| u64::from_le_bytes(*bytes) as usize)
        .collect();
    let [dtype, shape @ ..] = words.as_slice() else {
        return Err(Error::operator(
            NAME,
            format!("the source, rank {source}, passed None; it must pass the tensor"),
        ));
    };
    let Some(dtype) = TYPES.get(*dtype).copied() else {
        let message = format!("rank {source} sends numbers of a type that is not scattered");
        return Err(Error::operator(NAME, message));
    };
    let kind = K::KIND;
    if kind_of(dtype) != kind || shape.len() != D {
        let message = format!(
            "rank {source} sends {dtype:?} of {shape:?}; expected {D} dims of kind {kind:?}"
        );
        return Err(Error::operator(NAME, message));
    }
    let layout = to.layout_like(&Layout::replicated(mesh.shape(), shape))?;
    if let Some((_, op)) = layout.partial_axis() {
        return Err(Error::placement(
            NAME,
            Partial(op).to_string(),
            "scatter to Shard or Replicate",
        ));
    }
    let device = mesh.device().clone().inner();
    let held = match tensor {
        Some(tensor) if comm.rank() == source => tensor.inner().to_device(&device),
        _ => Tensor::empty([0; D], (&device, dtype)),
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

/// Moves a tensor without gradients to the autodiff setting of a device, including its gradient
/// checkpointing strategy, because burn refuses operands with different strategies.
pub(crate) fn on_device<const D: usize, K: kind::Autodiff>(
    tensor: Tensor<D, K>,
    device: &Device,
) -> Tensor<D, K> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

impl<const D: usize, K: Basic> ShardTensor<D, K> {
    /// Shards a tensor that is equal on all ranks: each rank keeps its box. Nothing is communicated
    /// except, with checks enabled ([`Settings::check`](crate::comm::Settings::check)), a hash of
    /// the tensor.
    ///
    /// # Errors
    /// The layout does not fit the tensor, or has partial values. With checks enabled,
    /// [`Error::Replicas`] if a rank holds another tensor.
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Tensor;
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let whole = Tensor::<1>::from_floats([1.0, 2.0, 3.0], world.device());
    ///     let x = ShardTensor::distribute(whole, &mesh, &[Shard(0)])?;
    ///     assert_eq!(x.local_dims(), [[2], [1]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn distribute(
        tensor: Tensor<D, K>,
        mesh: &DeviceMesh,
        to: impl IntoLayout,
    ) -> Result<Self> {
        require_replicas("distribute", mesh.comm(), mesh.shape().ranks(), &tensor)?;
        let whole = Layout::replicated(mesh.shape(), &tensor.dims());
        Self::from_parts(tensor, whole, mesh.clone()).try_redistribute(to)
    }

    /// Makes a tensor of zeros; each rank allocates only its shard. See [`MeshOptions`] for other
    /// element types.
    ///
    /// # Errors
    /// The layout does not fit the shape, or has partial values; an element type of another kind.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Launcher, Replicate, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let field = ShardTensor::<2>::zeros([5, 3], &mesh, &[Shard(0)])?;
    ///     let scale = ShardTensor::<2>::ones([1, 3], &mesh, &[Replicate])?;
    ///     let y = field * scale + 1.0;
    ///     assert_eq!(y.local_dims(), [[3, 3], [2, 3]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn zeros<'m>(
        shape: [usize; D],
        mesh: impl Into<MeshOptions<'m>>,
        to: impl IntoLayout,
    ) -> Result<Self> {
        Self::create("zeros", shape, mesh, to, |cells, options| {
            Tensor::zeros(cells.shape(), options)
        })
    }

    /// Makes a tensor of ones; see [`zeros`](Self::zeros).
    ///
    /// # Errors
    /// Errors of [`zeros`](Self::zeros).
    pub fn ones<'m>(
        shape: [usize; D],
        mesh: impl Into<MeshOptions<'m>>,
        to: impl IntoLayout,
    ) -> Result<Self> {
        Self::create("ones", shape, mesh, to, |cells, options| {
            Tensor::ones(cells.shape(), options)
        })
    }

    /// Makes a tensor whose elements are all `value`.
    ///
    /// # Errors
    /// Errors of [`zeros`](Self::zeros).
    ///
    /// # Example
    /// ```
    /// use burn::tensor::Int;
    /// use halocline_core::{Launcher, Shard, ShardTensor};
    ///
    /// Launcher::local(2).run(|world| {
    ///     let mesh = world.mesh([("lat", 2)])?;
    ///     let months = ShardTensor::<1, Int>::full([12], 30, &mesh, &[Shard(0)])?;
    ///     let days = months.local().clone().sum().into_data();
    ///     assert_eq!(days.iter::<i64>().next(), Some(180));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn full<'m>(
        shape: [usize; D],
        value: impl ElementConversion,
        mesh: impl Into<MeshOptions<'m>>,
        to: impl IntoLayout,
    ) -> Result<Self> {
        Self::create("full", shape, mesh, to, |cells, options| {
            Tensor::full(cells.shape(), value, options)
        })
    }

    fn create<'m>(
        operator: &str,
        shape: [usize; D],
        mesh: impl Into<MeshOptions<'m>>,
        to: impl IntoLayout,
        local: impl FnOnce(&IndexBox, TensorCreationOptions) -> Tensor<D, K>,
    ) -> Result<Self> {
        let MeshOptions { mesh, dtype } = mesh.into();
        let mut options = TensorCreationOptions::new(mesh.device().clone());
        if let Some(dtype) = dtype {
            if kind_of(dtype) != K::KIND {
                let message = format!("elements of {dtype:?}; expected the kind {:?}", K::KIND);
                return Err(Error::operator(operator, message));
            }
            options = options.with_dtype(dtype);
        }
        let layout = to.layout_like(&Layout::replicated(mesh.shape(), &shape))?;
        if layout.partial_axis().is_some() {
            return Err(Error::Layout(format!(
                "cannot create partial values {layout}"
            )));
        }
        let local = local(&layout.local_box(mesh.position()), options);
        Ok(Self::from_parts(local, layout, mesh.clone()))
    }
}

impl<const D: usize> ShardTensor<D> {
    /// Makes a tensor of random values that depend only on seed, stream and global index: the same
    /// field on any mesh, bit for bit. They are drawn in single precision.
    ///
    /// # Errors
    /// Errors of [`zeros`](Self::zeros); the distribution has invalid parameters.
    ///
    /// # Example
    /// ```
    /// use halocline_core::{Distribution, Launcher, RandomKey, Shard, ShardTensor};
    ///
    /// let fields = Launcher::local(2).collect(|world| {
    ///     let mesh = world.mesh([("lat", world.size())])?;
    ///     let key = RandomKey::new(7, "noise");
    ///     let x = ShardTensor::random([5, 3], Distribution::Normal(0.0, 1.0), key, &mesh, &[Shard(0)])?;
    ///     Ok(x.full_tensor().into_data())
    /// })?;
    /// assert_eq!(fields[0], fields[1]);
    /// # Ok::<(), halocline_core::Error>(())
    /// ```
    pub fn random<'m>(
        shape: [usize; D],
        distribution: Distribution,
        key: rng::RandomKey,
        mesh: impl Into<MeshOptions<'m>>,
        to: impl IntoLayout,
    ) -> Result<Self> {
        rng::check(distribution)?;
        Self::create("random", shape, mesh, to, |cells, options| {
            let values = key.fill(distribution, &shape, cells);
            let data = burn::tensor::TensorData::new(values, cells.shape());
            Tensor::from_data(data, options)
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Int;

    use super::*;
    use crate::{Launcher, Replicate, Shard, World};

    #[test]
    fn distributions_are_checked() {
        use Distribution::{Bernoulli, Normal, Uniform};
        let random = |distribution| {
            Launcher::local(1).run(|world| {
                let mesh = world.mesh([("x", 1)])?;
                let key = rng::RandomKey::new(0, "x");
                ShardTensor::<1>::random([3], distribution, key, &mesh, &[Shard(0)]).map(|_| ())
            })
        };
        for (distribution, expected) in [
            (Uniform(1.0, 0.0), "low not above high"),
            (
                Normal(0.0, -1.0),
                "a finite standard deviation from zero on",
            ),
            (Bernoulli(f64::NAN), "a probability from zero to one"),
        ] {
            let error = random(distribution).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        random(Uniform(1.0, 1.0)).unwrap();
    }

    #[test]
    fn elements_are_of_the_kind_of_the_tensor() {
        let run = Launcher::local(1).run(|world| {
            let mesh = world.mesh([("x", 1)])?;
            let small = ShardTensor::<1, Int>::ones([3], (&mesh, DType::I16), &[Shard(0)])?;
            assert_eq!(small.local().dtype(), DType::I16);
            let floats = ShardTensor::<1, Int>::zeros([3], (&mesh, DType::F32), &[Shard(0)]);
            let error = floats.unwrap_err().to_string();
            assert!(
                error.contains("elements of F32; expected the kind Int"),
                "{error}"
            );
            Ok(())
        });
        run.unwrap();
    }

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
            run(&|_, mesh, values| ShardTensor::distribute(values, mesh, &[Replicate]).map(|_| ())),
            run(&|_, mesh, values| ShardTensor::distribute(values, mesh, &[Shard(1)]).map(|_| ())),
            run(&|_, mesh, values| x(mesh).map(|x| drop(x.replicate_operand(values)))),
            run(&|_, mesh, values| x(mesh).map(|x| drop(x * values.narrow(0, 0, 1)))),
            run(&|world, mesh, values| {
                let values = values.narrow(0, 0, 1 + world.rank() / 2);
                ShardTensor::distribute(values, mesh, &[Replicate]).map(|_| ())
            }),
        ];
        let operators = [
            "distribute",
            "distribute",
            "replicate_operand",
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
