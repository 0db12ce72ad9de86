//! What the ranks of a job run.

use std::process::Command;
use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use halocline_core::{
    Batch, Boundary, Distribution, Error, Expected, Halo, Launcher, Layout, LocalGradient,
    Operation, Partial, Payload, RandomKey, ReduceOp, Replicate, Result, Shard, ShardTensor,
    Traffic, World, scatter_tensor,
};

use crate::job::{NOT_ENDED, RANKS};
use crate::trainer::train;

/// What a rank has computed, to be compared bit for bit.
type Found = Vec<TensorData>;

/// Runs the program of that name as one rank.
pub(crate) fn run(case: &str) {
    let agree = agrees_with_local;
    match case {
        "placements" => agree(placements),
        "halos" => agree(halos),
        "reductions" => agree(reductions),
        "scatter_and_gather" => agree(scatter_and_gather),
        "kinds" => agree(kinds),
        "modules" => agree(modules),
        "training" => agree(training),
        "checkpointing" => checkpointing(),
        "payloads" => agree(payloads),
        "many_in_flight" => agree(many_in_flight),
        "sends_do_not_wait" => succeed(sends_do_not_wait),
        "large_message" => succeed(large_message),
        "dropped_in_flight" => succeed(dropped_in_flight),
        "unexpected_in_flight" => succeed(unexpected_in_flight),
        "after_the_end" => after_the_end(),
        "panic" => fail_on_last(|| panic!("out of ocean")),
        "error" => fail_on_last(|| Err(Error::other("no such file"))),
        "killed" => fail_on_last(kill_this_process),
        "panic_while_others_compute" => panic_while_others_compute(),
        "early_end" => early_end(),
        "diverged" => diverged(),
        "other_operation" => other_operation(),
        "other_shape" => other_shape(),
        "timeout" => timeout(),
        _ => panic!("there is no program {case:?}"),
    }
}

/// Runs a program on this job's processes, and on as many threads of each, which must find the same bits.
fn agrees_with_local(program: fn(World) -> Result<Found>) {
    succeed(move |world| {
        let sent = world.comm_stats();
        let found = program(world.clone())?;
        let sent = world.comm_stats().since(&sent);
        let local = Launcher::local(world.size()).seed(3).collect(|world| {
            let found = program(world.clone())?;
            Ok((found, world.comm_stats()))
        })?;
        let (expected, expected_sent) = &local[world.rank()];
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert_eq!(found.shape(), expected.shape(), "result {i}");
            assert_eq!(found.dtype(), expected.dtype(), "result {i}");
            assert_eq!(found.as_bytes(), expected.as_bytes(), "result {i}");
        }
        for traffic in Traffic::ALL {
            assert_eq!(sent.of(traffic), expected_sent.of(traffic), "{traffic:?}");
        }
        Ok(())
    });
}

fn succeed(program: impl Fn(World) -> Result<()> + Send + Sync) {
    let ranks = std::env::var(RANKS).expect("the test says how many ranks there are");
    let result = Launcher::from_env().seed(3).run(|world| {
        let name = if std::env::var_os("RANK").is_some() {
            "Tcp"
        } else {
            "Mpi"
        };
        let mut engine = format!("{name}(rank {} of {ranks})", world.rank());
        if std::env::var("HALOCLINE_NCCL").is_ok_and(|on| on == "1") {
            engine = format!("Nccl(over {engine})");
        }
        assert_eq!(format!("{:?}", world.comm()), engine);
        program(world)
    });
    result.expect("the job succeeds");
}

/// All ranks meet, then the last one does what fails while the others wait for it.
fn fail_on_last(failure: fn() -> Result<()>) {
    let result = Launcher::from_env().run(|world| {
        world.barrier()?;
        if world.rank() + 1 == world.size() {
            failure()?;
        }
        world.barrier()
    });
    panic!("{NOT_ENDED}: {result:?}");
}

fn noise<const D: usize>(shape: [usize; D], world: &World) -> Result<ShardTensor<D>> {
    let mesh = world.mesh([("lat", world.size())])?;
    let uniform = Distribution::Uniform {
        low: -1.0,
        high: 1.0,
    };
    ShardTensor::random(
        shape,
        uniform,
        RandomKey::new(7, "noise"),
        &mesh,
        &[Shard(0)],
    )
}

fn placements(world: World) -> Result<Found> {
    let x = noise([7, 5, 3], &world)?.require_grad();
    let columns = x.clone().redistribute(&[Shard(1)]);
    let whole = columns.clone().redistribute(&[Replicate]);
    let weights = noise([7, 5, 3], &world)?
        .full_tensor(LocalGradient::Replicated)
        .inner();
    let gradients = (whole.local().clone() * weights).sum().backward();
    let gradient = x.grad(&gradients).expect("x is a leaf");
    let mut found = vec![
        columns.local().clone().into_data(),
        whole.local().clone().into_data(),
        gradient.local().clone().into_data(),
    ];
    if world.size() == 4 {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        let uniform = Distribution::Uniform {
            low: -1.0,
            high: 1.0,
        };
        let key = RandomKey::new(7, "noise");
        let x = ShardTensor::random([5, 7], uniform, key, &mesh, &[Shard(0), Shard(1)])?;
        let turned = x.redistribute(&[Shard(1), Shard(0)]);
        found.push(turned.into_parts().0.into_data());
    }
    Ok(found)
}

fn halos(world: World) -> Result<Found> {
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

/// Reductions below, at and above the size from which they are split over the ranks, with their gradients.
fn reductions(world: World) -> Result<Found> {
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
            let x = ShardTensor::from_local(local.clone(), &layout, &mesh, gradient)?;
            let resolved = x.clone().resolve().into_parts().0;
            let shard = x.redistribute(&[Shard(0)]).into_parts().0;
            let gradients = (resolved.clone().sum() + shard.clone().sum()).backward();
            let gradient = local.grad(&gradients).expect("local is a leaf");
            found.extend([resolved, shard, gradient].map(Tensor::into_data));
        }
    }
    Ok(found)
}

/// Integers of several widths and booleans: scattered, moved, with halos, gathered and reduced.
fn kinds(world: World) -> Result<Found> {
    let mesh = world.mesh([("lat", world.size())])?;
    let mut found = Vec::new();
    for dtype in [DType::I64, DType::I32, DType::I8, DType::U16] {
        let whole = Tensor::<1, Int>::arange(0..35, (world.device(), dtype)).reshape([7, 5]);
        let x = scatter_tensor(world.is_root().then_some(whole), 0, &mesh, &[Shard(0)])?;
        let mask = x.clone().greater_elem(7).redistribute(&[Shard(1)]);
        let padded = mask.with_halo(&[Halo::new(1, 2, Boundary::Periodic)])?;
        found.extend([mask.into_parts().0.into_data(), padded.into_data()]);
        let columns = x.clone().redistribute(&[Shard(1)]);
        let gathered = columns.gather_tensor(0)?;
        found.extend(gathered.map(Tensor::into_data));
        found.push(columns.into_parts().0.into_data());
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Product] {
            let layout = Layout::new(mesh.shape(), &[7, 5], &[Partial(op)])?;
            let own = x.full_tensor(LocalGradient::Replicated) + world.rank() as i64;
            let partial = ShardTensor::from_local(own, &layout, &mesh, LocalGradient::Replicated)?;
            found.push(partial.clone().resolve().into_parts().0.into_data());
            let shard = partial.redistribute(&[Shard(0)]);
            found.push(shard.into_parts().0.into_data());
        }
    }
    Ok(found)
}

/// All cells on the last rank, which is not the source.
fn scatter_and_gather(world: World) -> Result<Found> {
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
        Some(x.into_parts().0),
        Some(moved.into_parts().0),
        Some(padded),
        gathered,
    ];
    Ok(tensors
        .into_iter()
        .flatten()
        .map(Tensor::into_data)
        .collect())
}

fn modules(world: World) -> Result<Found> {
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

/// Training with gradient checkpointing has the losses of local ranks without.
fn checkpointing() {
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

/// The demo's model, trained on a mesh of two axes.
fn training(world: World) -> Result<Found> {
    let mesh = world.mesh([("lat", 2), ("lon", world.size() / 2)])?;
    let (losses, _) = train(&world, &mesh, &[Shard(2), Shard(3)], 50)?;
    let steps = losses.len();
    Ok(vec![TensorData::new(losses, [steps])])
}

/// Sends each rank a payload, this one too, and returns what they sent.
fn exchange(
    world: &World,
    payload: impl Fn(usize) -> Payload,
    expected: impl Fn(usize) -> Expected,
) -> Result<Vec<Payload>> {
    let ranks = 0..world.size();
    let batch = Batch {
        operation: Operation::new("test", Traffic::Control, None),
        sends: ranks.clone().map(|rank| (rank, payload(rank))).collect(),
        receives: ranks.map(|rank| (rank, expected(rank))).collect(),
    };
    world.comm().clone().start(batch)?.finish()
}

fn data(tensor: DispatchTensor) -> TensorData {
    match tensor.dtype() {
        DType::Bool(_) => Tensor::<2, Bool>::from_dispatch(tensor).into_data(),
        dtype if dtype.is_float() => Tensor::<2>::from_dispatch(tensor).into_data(),
        _ => Tensor::<2, Int>::from_dispatch(tensor).into_data(),
    }
}

/// Every form of payload: several tensors, views, other elements than floats, nothing at all.
fn payloads(world: World) -> Result<Found> {
    let device = world.device().clone().inner();
    let integers = Tensor::<1, Int>::arange(0..30, &device).reshape([5, 6]) + world.rank() as i64;
    let floats = integers.clone().float();
    let views = [
        floats.clone().transpose(),
        floats.clone().slice([1..4, 2..5]),
        floats.clone().flip([0]),
        floats.clone().slice([2..2, 0..6]),
    ];
    let half = floats.clone().slice([0..1, 0..3]).cast(DType::F16);
    let groups = [
        views.map(Tensor::into_dispatch).to_vec(),
        vec![integers.clone().slice([0..5, 1..4]).into_dispatch()],
        vec![integers.greater_elem(7).into_dispatch()],
        vec![
            floats.clone().slice([1..2, 1..2]).into_dispatch(),
            floats.into_dispatch(),
        ],
        vec![half.into_dispatch()],
        vec![],
    ];
    let mut found = Vec::new();
    for tensors in groups {
        let expected = Expected::Tensors {
            shapes: tensors.iter().map(TensorMetadata::shape).collect(),
            dtype: tensors.first().map_or(DType::F32, TensorMetadata::dtype),
            device: device.as_dispatch().clone(),
        };
        let sent = Payload::Tensors(tensors);
        for payload in exchange(&world, |_| sent.clone(), |_| expected.clone())? {
            let Payload::Tensors(tensors) = payload else {
                panic!("{payload:?}")
            };
            found.extend(tensors.into_iter().map(data));
        }
    }
    for length in [0, 1, 47, 48, 49, 5000] {
        let send = |peer| Payload::Bytes(vec![peer as u8; length]);
        for payload in exchange(&world, send, |_| Expected::Bytes)? {
            let Payload::Bytes(bytes) = payload else {
                panic!("{payload:?}")
            };
            found.push(TensorData::new(bytes, [length]));
        }
    }
    Ok(found)
}

/// Batches that are all started before the first is finished, several messages for a peer in each.
fn many_in_flight(world: World) -> Result<Found> {
    let peers = || (0..world.size()).filter(|&peer| peer != world.rank());
    let comm = world.comm().clone();
    let in_flight = (0..200_usize).map(|i| {
        let bytes = |part| Payload::Bytes(vec![part; (i * 997) % 100_000]);
        comm.clone().start(Batch {
            operation: Operation::new("test", Traffic::Control, None),
            sends: peers()
                .flat_map(|peer| [(peer, bytes(1)), (peer, bytes(2))])
                .collect(),
            receives: peers()
                .flat_map(|peer| [peer; 2])
                .map(|peer| (peer, Expected::Bytes))
                .collect(),
        })
    });
    let mut found = Vec::new();
    // In another order than they were started in.
    let in_flight = in_flight.collect::<Result<Vec<_>>>()?;
    for batch in in_flight.into_iter().rev() {
        for payload in batch.finish()? {
            let Payload::Bytes(bytes) = payload else {
                panic!("{payload:?}")
            };
            let length = bytes.len();
            found.push(TensorData::new(bytes, [length]));
        }
    }
    Ok(found)
}

/// Rank 0 sends a message that MPI cannot send at once, and then has other things to do than to call MPI.
fn sends_do_not_wait(world: World) -> Result<()> {
    let operation = || Operation::new("test", Traffic::Control, None);
    world.barrier()?;
    let start = Instant::now();
    if world.is_root() {
        let in_flight = world.comm().clone().start(Batch {
            operation: operation(),
            sends: vec![(1, Payload::Bytes(vec![5; 8 << 20]))],
            receives: vec![],
        })?;
        in_flight.finish()?;
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
        std::thread::sleep(Duration::from_secs(2));
    } else {
        let in_flight = world.comm().clone().start(Batch {
            operation: operation(),
            sends: vec![],
            receives: vec![(0, Expected::Bytes)],
        })?;
        let received = in_flight.finish()?;
        assert!(matches!(&received[..], [Payload::Bytes(bytes)] if *bytes == vec![5; 8 << 20]));
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
    }
    Ok(())
}

/// More bytes than an `int` can count.
fn large_message(world: World) -> Result<()> {
    let length = (1 << 31) + 4;
    let in_flight = world.comm().clone().start(Batch {
        operation: Operation::new("test", Traffic::Control, None),
        sends: if world.is_root() {
            vec![(1, Payload::Bytes(vec![7; length]))]
        } else {
            vec![]
        },
        receives: if world.is_root() {
            vec![]
        } else {
            vec![(0, Expected::Bytes)]
        },
    })?;
    match &in_flight.finish()?[..] {
        [] if world.is_root() => {}
        [Payload::Bytes(bytes)] => {
            assert!(bytes.len() == length && bytes.iter().all(|&byte| byte == 7));
        }
        other => panic!("{} payloads", other.len()),
    }
    Ok(())
}

/// A batch that is dropped leaves its messages to nobody; the job ends in order all the same.
fn dropped_in_flight(world: World) -> Result<()> {
    let peers = || (0..world.size()).filter(|&peer| peer != world.rank());
    // Many, so that some come between the steps in which a rank ends.
    let sizes = [1 << 20].into_iter().chain([4 << 10; 40]);
    for bytes in sizes {
        let _ = world.comm().clone().start(Batch {
            operation: Operation::new("test", Traffic::Control, None),
            sends: peers()
                .map(|peer| (peer, Payload::Bytes(vec![0; bytes])))
                .collect(),
            receives: peers().map(|peer| (peer, Expected::Bytes)).collect(),
        })?;
    }
    Ok(())
}

/// A long message of another operation is an error, and the next one is not taken for it.
fn unexpected_in_flight(world: World) -> Result<()> {
    // In several pieces, the last of which is none of the shortest.
    const LONG: usize = (4 << 20) + 5000;
    let peer = 1 - world.rank();
    let exchange = |name, byte| {
        let in_flight = world.comm().clone().start(Batch {
            operation: Operation::new(name, Traffic::Control, None),
            sends: vec![(peer, Payload::Bytes(vec![byte; LONG]))],
            receives: vec![(peer, Expected::Bytes)],
        })?;
        in_flight.finish()
    };
    let error = exchange(["sum", "mean"][world.rank()], 1).expect_err("operations differ");
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
    let received = exchange("same", 2)?;
    assert!(matches!(&received[..], [Payload::Bytes(bytes)] if *bytes == vec![2; LONG]));
    Ok(())
}

fn after_the_end() {
    let worlds = Launcher::from_env().collect(Ok).expect("the job succeeds");
    let error = worlds[0]
        .broadcast_bytes(worlds[0].rank(), Some(vec![1]))
        .err();
    if worlds[0].size() > 1 {
        let error = error.expect("MPI is finalised").to_string();
        assert!(
            error.contains("after the Launcher's program has ended"),
            "{error}"
        );
    }
    let again = Launcher::from_env()
        .run(|_| Ok(()))
        .expect_err("MPI was initialised");
    assert!(
        again.to_string().contains("one Launcher per process"),
        "{again}"
    );
}

fn panic_while_others_compute() {
    let result = Launcher::from_env().run(|world| {
        if world.is_root() {
            panic!("out of ocean");
        }
        std::thread::sleep(Duration::from_secs(60));
        Ok(())
    });
    panic!("{NOT_ENDED}: {result:?}");
}

fn early_end() {
    let result = Launcher::from_env().run(|world| match world.rank() {
        0 => world.barrier(),
        _ => Ok(()),
    });
    panic!("{NOT_ENDED}: {result:?}");
}

fn diverged() {
    let result = Launcher::from_env().run(|world| {
        let x = noise([7, 5], &world)?;
        if world.is_root() {
            x.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])?;
        } else {
            x.try_redistribute(&[Shard(1)])?;
        }
        Ok(())
    });
    panic!("{NOT_ENDED}: {result:?}");
}

/// Nothing but the operation differs.
fn other_operation() {
    let result = Launcher::from_env().run(|world| {
        let name = ["sum", "mean"][world.rank()];
        let in_flight = world.comm().clone().start(Batch {
            operation: Operation::new(name, Traffic::Control, None),
            sends: vec![(1 - world.rank(), Payload::Bytes(vec![1]))],
            receives: vec![(1 - world.rank(), Expected::Bytes)],
        })?;
        in_flight.finish().map(|_| ())
    });
    panic!("{NOT_ENDED}: {result:?}");
}

fn other_shape() {
    let result = Launcher::from_env().run(|world| {
        let elements = 3 + world.rank();
        let device = world.device().clone().inner();
        let tensor = Tensor::<1>::zeros([elements], &device).into_dispatch();
        let expected = |_| Expected::Tensors {
            shapes: vec![[elements].into()],
            dtype: DType::F32,
            device: tensor.device(),
        };
        exchange(&world, |_| Payload::Tensors(vec![tensor.clone()]), expected)?;
        Ok(())
    });
    panic!("{NOT_ENDED}: {result:?}");
}

fn timeout() {
    let launcher = Launcher::from_env().timeout(Duration::from_millis(500));
    let result = launcher.run(|world| {
        if !world.is_root() {
            std::thread::sleep(Duration::from_secs(30));
        }
        world.barrier()
    });
    panic!("{NOT_ENDED}: {result:?}");
}

fn kill_this_process() -> Result<()> {
    let id = std::process::id().to_string();
    Command::new("kill").args(["-9", &id]).status()?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}
