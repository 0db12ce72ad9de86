//! Application of plans to modules.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::Device;
use halocline_core::comm::Operation;
use halocline_core::{
    DeviceMesh, Error, InitialValues, LayerPlacements, Layout, ParamShard, Placement, Replicate,
    Result, Traffic, World, ops, param_shards, shard_parameters, shard_parameters_with,
};
use halocline_ops::{Around, set_reshards};

use super::initial::initial_values;
use super::plan::Plan;
use super::resolve::{ResolvedParam, ResolvedPlan, resolve};

const NAME: &str = "parallelize_module";

/// Shards a module by a plan. All ranks must hold the same module, as made by
/// [`World::init`](halocline_core::World::init); each keeps only its shards. The [module](super)
/// has an example.
///
/// # Errors
/// [`resolve`] fails; the module is already sharded; ranks have different plans or different
/// parameter values (make the module with [`World::init`]).
pub fn parallelize_module<M: Module>(module: M, mesh: &DeviceMesh, plan: &Plan) -> Result<M> {
    let resolved = alike(mesh, resolve(&module, mesh.shape(), plan))?;
    if param_shards(&module).is_empty() {
        mesh.check_replicas(&module)?;
    }
    shard(module, mesh, &resolved, &BTreeMap::new())
}

/// Builds a module that is sharded by a plan, with the same values as from [`World::init`]. A rank
/// never holds more than its shards and one whole parameter; with [`init_parallel_with`], not even
/// that.
///
/// # Errors
/// Same as [`parallelize_module`].
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::Launcher;
/// use halocline_models::parallel::{Plan, Style, init_parallel};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let plan = Plan::default().with_layer("**", Style::colwise("tensor"));
///     let linear =
///         init_parallel(&world, &mesh, &plan, |device| LinearConfig::new(4, 6).init(device))?;
///     assert_eq!(linear.weight.dims(), [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn init_parallel<M: Module>(
    world: &World,
    mesh: &DeviceMesh,
    plan: &Plan,
    make: impl Fn(&Device) -> M,
) -> Result<M> {
    world.init_sharded(
        make,
        |module| alike(mesh, resolve(module, mesh.shape(), plan)),
        |module, resolved| shard(module, mesh, &resolved, &BTreeMap::new()),
    )
}

/// Builds a module that is sharded by a plan, with parameters that each rank initializes shard by
/// shard: a rank never holds more than its shards, so that a single parameter may be larger than
/// its memory. `initializer` receives the path and the global shape of a parameter, and returns an
/// initializer, or `None` for the one of the module, which draws the whole parameter as
/// [`init_parallel`] does.
///
/// Values are those of burn's distributions, but of other random numbers. They depend on the job's
/// seed, the number of modules made before, the path of the parameter and the global index of the
/// element, and are the same for all meshes and plans. They are drawn in single precision. Fan in
/// and fan out are those of the whole layer, also for its bias; the fan out of a convolution counts
/// the output channels of all groups, as in PyTorch.
///
/// # Errors
/// Same as [`init_parallel`]; [`Initializer::Orthogonal`], which needs the whole parameter; a
/// Kaiming or Xavier initializer for a layer other than `Linear` and convolutions; a parameter of
/// `LinearLayout::Col`, or one that occurs in two places; initializers that differ between ranks.
///
/// # Example
/// ```
/// use burn::nn::{Initializer, LinearConfig};
/// use halocline_core::Launcher;
/// use halocline_models::parallel::{Plan, Style, init_parallel_with};
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let plan = Plan::default().with_layer("**", Style::colwise("tensor"));
///     let linear = init_parallel_with(
///         &world,
///         &mesh,
///         &plan,
///         |device| LinearConfig::new(4, 6).init(device),
///         |path, _| Some(match path {
///             "bias" => Initializer::Zeros,
///             _ => Initializer::XavierNormal { gain: 1.0 },
///         }),
///     )?;
///     assert_eq!(linear.weight.dims(), [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn init_parallel_with<M: Module>(
    world: &World,
    mesh: &DeviceMesh,
    plan: &Plan,
    make: impl Fn(&Device) -> M,
    initializer: impl Fn(&str, &[usize]) -> Option<Initializer>,
) -> Result<M> {
    let key = world.module_key();
    world.init_sharded(
        make,
        |module| {
            let resolved = resolve(module, mesh.shape(), plan);
            let planned = resolved.and_then(|resolved| {
                let values = initial_values(&resolved, key, initializer)?;
                Ok((resolved, values))
            });
            alike(mesh, planned)
        },
        |module, (resolved, values)| shard(module, mesh, &resolved, &values),
    )
}

/// Shards a module, with initial values of parameters by path.
fn shard<M: Module>(
    module: M,
    mesh: &DeviceMesh,
    resolved: &ResolvedPlan,
    values: &BTreeMap<String, InitialValues>,
) -> Result<M> {
    let parameters = resolved.parameters.iter();
    let by_path: HashMap<&str, &ResolvedParam> = parameters
        .map(|parameter| (&parameter.path[..], parameter))
        .collect();
    let layout = |path: &str, shape: &[usize]| -> Result<Option<ParamShard>> {
        let parameter = by_path.get(path);
        let parameter =
            parameter.ok_or_else(|| Error::Plan(format!("no parameter {path} {shape:?}")))?;
        let (layout, placed) = (&parameter.layout, &parameter.layer_placements);
        let is_placed = *placed != LayerPlacements::default();
        let sharded = layout.axes_where(|placement| placement != Replicate);
        if sharded.is_empty() && !is_placed {
            return Ok(None);
        }
        let names = mesh.shape().names();
        let stored = parameter.stored.iter().map(|axis| &names[*axis][..]);
        let stored: Vec<&str> = stored.collect();
        let shard = ParamShard::new(layout.clone(), mesh).with_stored(&stored, parameter.gather)?;
        Ok(Some(if is_placed {
            shard.with_layer_placements(placed.clone())
        } else {
            shard
        }))
    };
    let module = shard_parameters_with(module, layout, |path, _| Ok(values.get(path).copied()))?;
    set_reshards(module, &resolved.reshards)
}

/// Checks that all ranks planned alike, before anything is placed.
fn alike<P: fmt::Debug>(mesh: &DeviceMesh, planned: Result<P>) -> Result<P> {
    let mut hasher = DefaultHasher::new();
    let text = planned.as_ref().ok().map(|planned| format!("{planned:?}"));
    text.hash(&mut hasher);
    let hash = hasher.finish();
    // Halves of 32 bits are exact as f64.
    let halves = [hash >> 32, hash & u64::from(u32::MAX)].map(|half| half as f64);
    let operation = Operation::new(NAME, Traffic::Control, None);
    let ranks = mesh.shape().ranks();
    let all = ops::all_gather_numbers(mesh.comm(), ranks, &operation, &halves)?;
    match all.iter().position(|other| *other != all[0]) {
        Some(other) if planned.is_ok() => Err(Error::Plan(format!(
            "ranks {} and {} have different plans, models or initializers",
            ranks[0], ranks[other]
        ))),
        _ => planned,
    }
}

/// Shards a module by a function that receives the path and the shape of each parameter and returns
/// its placements, one per mesh axis, or `None` to leave it whole.
///
/// # Errors
/// Placements do not fit; the module is already sharded; ranks have different parameter values.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{Launcher, Shard};
/// use halocline_models::parallel::distribute_module;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("tensor", 2)])?;
///     let linear = world.init(|device| LinearConfig::new(4, 6).init(device))?;
///     let linear = distribute_module(linear, &mesh, |path, _| match path {
///         "weight" => Some(vec![Shard(1)]),
///         _ => Some(vec![Shard(0)]),
///     })?;
///     assert_eq!(linear.weight.dims(), [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn distribute_module<M: Module>(
    module: M,
    mesh: &DeviceMesh,
    mut partition: impl FnMut(&str, &[usize]) -> Option<Vec<Placement>>,
) -> Result<M> {
    mesh.check_replicas(&module)?;
    shard_parameters(module, |path, shape| {
        let Some(placements) = partition(path, shape) else {
            return Ok(None);
        };
        let layout = Layout::new(mesh.shape(), shape, &placements)?;
        Ok(Some(ParamShard::new(layout, mesh)))
    })
}

/// Like [`distribute_module`], with functions of the module's input and result, which redistribute
/// them for example. `partition` returns the shard of a parameter, which may be
/// [stored](ParamShard::with_stored) over some axes and gathered for use.
///
/// # Errors
/// The errors of [`distribute_module`] and of `partition`.
///
/// # Example
/// ```
/// use burn::nn::LinearConfig;
/// use halocline_core::{Gather, Launcher, Layout, ParamShard, Replicate, Shard, ShardTensor};
/// use halocline_models::parallel::distribute_module_with;
/// use halocline_ops::Apply;
///
/// Launcher::local(2).run(|world| {
///     let mesh = world.mesh([("data", 2)])?;
///     let linear = world.init(|device| LinearConfig::new(4, 6).init(device))?;
///     let stored = |_: &str, shape: &[usize]| {
///         let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
///         let shard = ParamShard::new(layout, &mesh);
///         shard.with_stored(&["data"], Gather::EachPass).map(Some)
///     };
///     let input = |x: ShardTensor<2>| x.redistribute(&[Shard(0)]);
///     let output = |y: ShardTensor<2>| y.redistribute(&[Replicate]);
///     let linear = distribute_module_with(linear, &mesh, stored, input, output)?;
///     let x = ShardTensor::<2>::ones([3, 4], &mesh, &[Replicate])?;
///     assert_eq!(x.apply(&linear).placements(), [Replicate]);
///     Ok(())
/// })?;
/// # Ok::<(), halocline_core::Error>(())
/// ```
pub fn distribute_module_with<M: Module, I, O>(
    module: M,
    mesh: &DeviceMesh,
    partition: impl FnMut(&str, &[usize]) -> Result<Option<ParamShard>>,
    input: I,
    output: O,
) -> Result<Around<M, I, O>> {
    mesh.check_replicas(&module)?;
    let module = shard_parameters(module, partition)?;
    Ok(Around {
        module,
        input,
        output,
    })
}
