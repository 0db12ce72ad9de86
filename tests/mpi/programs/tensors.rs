//! Sharded tensors, modules and training, for comparison with local ranks.

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use halocline_core::{
    Boundary, Distribution, Halo, Launcher, Layout, LocalGradient, Partial, RandomKey, ReduceOp,
    Replicate, Result, Shard, ShardTensor, World, scatter_tensor,
};

use super::{Found, noise};
use crate::trainer::train;

pub(super) fn placements(world: World) -> Result<Found> {
    let x = noise([7, 5, 3], &world)?.require_grad();
    let columns = x.clone().redistribute(&[Shard(1)]);
    let whole = columns.clone().redistribute(&[Replicate]);
    let weights = noise([7, 5, 3], &world)?.full_tensor().inner();
    let gradients = (whole.local().clone() * weights).sum().backward();
    let gradient = x.grad(&gradients).expect("x is a leaf");
    let mut found = vec![
        columns.local().clone().into_data(),
        whole.local().clone().into_data(),
        gradient.local().clone().into_data(),
    ];
    if world.size() == 4 {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        let uniform = Distribution::Uniform(-1.0, 1.0);
        let key = RandomKey::new(7, "noise");
        let x = ShardTensor::random([5, 7], uniform, key, &mesh, &[Shard(0), Shard(1)])?;
        let turned = x.redistribute(&[Shard(1), Shard(0)]);
        found.push(turned.into_local().into_data());
    }
    Ok(found)
}

pub(super) fn halos(world: World) -> Result<Found> {
    let mut found = Vec::new();
    for (width, boundary) in [
        (1, Boundary::Periodic),
        (1, Boundary::Zeros),
        (4, Boundary::Periodic),
    ] {
        let x = noise([7, 5], &world)?.require_grad();
        let padded = x.with_halo(&[Halo::new(0, width, boundary), Halo::new(1, 1, boundary)])?;
        let gradients = padded.clone().powi_scalar(2).sum().backward();
        let gradient = x.grad(&gradients).expect("x is a leaf");
        found.extend([padded.into_data(), gradient.local().clone().into_data()]);
    }
    Ok(found)
}

/// Reductions below, at and above the size at which they are split over the ranks, with their
/// gradients.
pub(super) fn reductions(world: World) -> Result<Found> {
    let mut found = Vec::new();
    let mesh = world.mesh([("data", world.size())])?;
    for elements in [0, 1, 1 << 14, (1 << 14) + 1, 300_001] {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Max,
            ReduceOp::Min,
            ReduceOp::Product,
        ] {
            let layout = Layout::new(mesh.shape(), &[elements], &[Partial(op)])?;
            let values = (0..elements).map(|i| ((i * (world.rank() + 3)) % 97) as f32 / 7.0);
            let data = TensorData::new(values.collect(), [elements]);
            let local = Tensor::<1>::from_data(data, world.device()).require_grad();
            let gradient = LocalGradient::Replicated;
            let x = ShardTensor::from_local_with(local.clone(), &mesh, &layout, gradient)?;
            let resolved = x.clone().resolve().into_local();
            let shard = x.redistribute(&[Shard(0)]).into_local();
            let gradients = (resolved.clone().sum() + shard.clone().sum()).backward();
            let gradient = local.grad(&gradients).expect("local is a leaf");
            found.extend([resolved, shard, gradient].map(Tensor::into_data));
        }
    }
    Ok(found)
}

/// Integers of several widths and booleans: scattered, moved, with halos, gathered and reduced.
pub(super) fn kinds(world: World) -> Result<Found> {
    let mesh = world.mesh([("lat", world.size())])?;
    let mut found = Vec::new();
    for dtype in [DType::I64, DType::I32, DType::I8, DType::U16] {
        let whole = Tensor::<1, Int>::arange(0..35, (world.device(), dtype)).reshape([7, 5]);
        let x = scatter_tensor(world.is_root().then_some(whole), 0, &mesh, &[Shard(0)])?;
        let mask = x.clone().greater_elem(7).redistribute(&[Shard(1)]);
        let padded = mask.with_halo(&[Halo::new(1, 2, Boundary::Periodic)])?;
        found.extend([mask.into_local().into_data(), padded.into_data()]);
        let columns = x.clone().redistribute(&[Shard(1)]);
        let gathered = columns.gather_tensor(0)?;
        found.extend(gathered.map(Tensor::into_data));
        found.push(columns.into_local().into_data());
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Product] {
            let layout = Layout::new(mesh.shape(), &[7, 5], &[Partial(op)])?;
            let own = x.full_tensor() + world.rank() as i64;
            let partial = ShardTensor::from_local(own, &mesh, &layout)?;
            found.push(partial.clone().resolve().into_local().into_data());
            let shard = partial.redistribute(&[Shard(0)]);
            found.push(shard.into_local().into_data());
        }
    }
    Ok(found)
}

/// All cells on the last rank, which is not the source.
pub(super) fn scatter_and_gather(world: World) -> Result<Found> {
    let mesh = world.mesh([("lat", world.size())])?;
    let field = Tensor::<1, Int>::arange(0..35, world.device())
        .float()
        .reshape([7, 5]);
    let x = scatter_tensor(world.is_root().then_some(field), 0, &mesh, &[Shard(0)])?;
    let mut extents = vec![0; world.size()];
    extents[world.size() - 1] = 7;
    let layout = x.layout().with_extents(0, &extents)?;
    let moved = x.clone().try_redistribute(&layout)?;
    let padded = moved.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])?;
    let gathered = moved.gather_tensor(0)?;
    assert_eq!(gathered.is_some(), world.is_root());
    let tensors = [
        Some(x.into_local()),
        Some(moved.into_local()),
        Some(padded),
        gathered,
    ];
    Ok(tensors
        .into_iter()
        .flatten()
        .map(Tensor::into_data)
        .collect())
}

pub(super) fn modules(world: World) -> Result<Found> {
    let mut linear: Linear = world.init(|device| LinearConfig::new(5, 70).init(device))?;
    world.check_replicas(&linear)?;
    let weight = linear.weight.val().into_data();
    if world.size() > 1 {
        if world.rank() == 1 {
            linear.weight = Param::from_tensor(linear.weight.val().inner() + 1.0);
        }
        let error = world
            .check_replicas(&linear)
            .expect_err("replicas differ")
            .to_string();
        assert!(
            error.contains("weight differs between rank 0 and rank 1"),
            "{error}"
        );
    }
    Ok(vec![weight])
}

/// Training with gradient checkpointing has the losses of local ranks without it.
pub(super) fn checkpointing() {
    let trained = |launcher: Launcher, device| {
        let losses = launcher.seed(3).device(device).collect(|world| {
            let mesh = world.mesh([("lat", world.size())])?;
            Ok((train(&world, &mesh, &[Shard(2)], 5)?.0, world.size()))
        });
        losses.expect("the job succeeds").remove(0)
    };
    let device = Device::default().autodiff();
    let checkpointing = device.clone().gradient_checkpointing();
    let (found, ranks) = trained(Launcher::from_env(), checkpointing);
    assert_eq!(found, trained(Launcher::local(ranks), device).0);
}

/// The demo model, trained on a mesh of two axes.
pub(super) fn training(world: World) -> Result<Found> {
    let mesh = world.mesh([("lat", 2), ("lon", world.size() / 2)])?;
    let (losses, _) = train(&world, &mesh, &[Shard(2), Shard(3)], 50)?;
    let steps = losses.len();
    Ok(vec![TensorData::new(losses, [steps])])
}
