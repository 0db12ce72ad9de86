//! Programs that the ranks of a job run.

use std::process::Command;
use std::time::Duration;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::nn::LinearConfig;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::optim::SgdConfig;
use halocline::core::Traffic;
use halocline::core::comm::{Batch, Expected, Operation, Payload};
use halocline::io::{CheckpointConfig, Checkpoints, Snapshot};
use halocline::models::parallel::{Plan, Store, init_parallel};
use halocline::prelude::*;
use halocline::{Ended, Trainer};

const RANKS: usize = 3;

/// Runs the program of that name as one rank, or as all of them.
pub(crate) fn run(case: &str) {
    let (moment, failure) = case.split_once(' ').unwrap_or((case, ""));
    if moment == "start-up" && is_last_process() {
        fail(failure).expect("it does not come so far");
    }
    if moment == "descriptors" {
        limit(&format!("--nofile={failure}")).expect("the system permits it");
    }
    let launcher = Launcher::from_env().ranks(RANKS);
    let result = match case {
        "order" => launcher.run(order),
        "leaving" => launcher.run(leaving),
        "told" => launcher.run(told),
        _ if moment == "descriptors" => launcher.run(|world| world.barrier()),
        "disk" => launcher.run(disk),
        "interrupt" => launcher.run(interrupt),
        "supervised" => launcher.run(supervised),
        _ => launcher.run(|world| fail_in(&world, moment, failure)),
    };
    result.expect("the job succeeds");
}

/// Returns whether this process will be the last rank, which MPI or the test has already set.
fn is_last_process() -> bool {
    let rank = ["OMPI_COMM_WORLD_RANK", "RANK"].map(|name| std::env::var(name).ok());
    rank.into_iter().flatten().next() == Some((RANKS - 1).to_string())
}

/// Fails on the last rank, after a barrier, while the others are in an operation.
fn fail_in(world: &World, moment: &str, failure: &str) -> Result<()> {
    let mesh = world.mesh([("lat", RANKS)])?;
    let x = ShardTensor::<2>::ones([9, 4], &mesh, &[Shard(0)])?;
    let mut checkpoints = Checkpoints::open(world, folder()?, &CheckpointConfig::new())?;
    let plan = Plan::default().with_store(Store::new("**", "lat"));
    let stored = init_parallel(world, &mesh, &plan, |device| {
        LinearConfig::new(4, 6).init(device)
    })?;
    world.barrier()?;
    // The last rank continues once the others have passed the barrier, so that its messages there
    // are not lost with it.
    for source in 0..RANKS - 1 {
        world.broadcast_bytes(source, (world.rank() == source).then(Vec::new))?;
    }
    if world.rank() + 1 == world.size() {
        fail(failure)?;
    }
    match moment {
        "exchange" => drop(x.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])?),
        "reduction" => drop(x.sum().resolve()),
        "gather" => drop(x.apply(&stored)),
        "scatter" => {
            // Scattered from the rank that fails.
            let whole = (world.rank() + 1 == world.size())
                .then(|| Tensor::<2>::ones([9, 4], world.device()));
            drop(scatter_tensor(whole, RANKS - 1, &mesh, &[Shard(0)])?);
        }
        "checkpoint" => {
            let mut snapshot = Snapshot::new(world);
            snapshot.sharded("x", &x)?;
            checkpoints.save(1, snapshot, None)?;
            checkpoints.wait()?;
        }
        "start-up" => {}
        _ => panic!("there is no moment {moment:?}"),
    }
    world.barrier()
}

/// Returns the folder of checkpoints, which the test removes.
fn folder() -> Result<String> {
    std::env::var("FOLDER").map_err(Error::other)
}

fn fail(failure: &str) -> Result<()> {
    match failure {
        "panic" => panic!("out of ocean"),
        "error" => Err(Error::other("no such file")),
        "exit" => {
            eprintln!("rank {} exits", RANKS - 1);
            std::process::exit(3)
        }
        "kill" => signal("KILL"),
        "stop" => signal("STOP"),
        "hang" => loop {
            std::thread::sleep(Duration::from_secs(1000));
        },
        "memory" => {
            let buffer: Vec<u8> = Vec::with_capacity(1 << 46);
            std::hint::black_box(buffer);
            panic!("there is that much memory");
        }
        _ => panic!("there is no failure {failure:?}"),
    }
}

/// Sends this process a signal.
fn signal(name: &str) -> Result<()> {
    Command::new("sh")
        .args(["-c", &format!("kill -{name} {}", std::process::id())])
        .status()?;
    // A signal takes some time to arrive.
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}

/// Stops the last rank. The first rank ends after sending it more than a connection buffers; the
/// second waits for it.
fn leaving(world: World) -> Result<()> {
    world.barrier()?;
    if world.rank() + 1 == world.size() {
        fail("stop")?;
    }
    let much = || (RANKS - 1, Payload::Bytes(vec![0; 64 << 20]));
    let batch = Batch {
        operation: Operation::new("leaving", Traffic::Control, None),
        sends: world.is_root().then(much).into_iter().collect(),
        receives: (world.rank() == 1)
            .then_some((RANKS - 1, Expected::Bytes))
            .into_iter()
            .collect(),
    };
    let in_flight = world.comm().clone().start(batch)?;
    in_flight.finish().map(drop)
}

/// Sums before exchanging on the last rank, and after it on the others.
fn order(world: World) -> Result<()> {
    let mesh = world.mesh([("lat", RANKS)])?;
    let x = ShardTensor::<2>::ones([9, 4], &mesh, &[Shard(0)])?;
    let exchange = || {
        x.with_halo(&[Halo::new(0, 1, Boundary::Periodic)])
            .map(drop)
    };
    let reduce = || drop(x.clone().sum().resolve());
    if world.rank() + 1 == world.size() {
        reduce();
        exchange()
    } else {
        exchange()?;
        reduce();
        Ok(())
    }
}

/// Sets a resource limit of this process.
fn limit(limit: &str) -> Result<()> {
    let pid = std::process::id();
    let limited = Command::new("prlimit")
        .args([&format!("--pid={pid}"), limit])
        .status()?;
    assert!(limited.success());
    Ok(())
}

/// Fails on rank 0, which reports its error later than the others, which have received it.
fn told(world: World) -> Result<()> {
    world.barrier()?;
    let cause = "no such file".to_string();
    if world.is_root() {
        std::thread::sleep(Duration::from_millis(300));
        return Err(Error::other(cause));
    }
    Err(Error::Rank { rank: 0, cause })
}

/// Saves with a limit of one kilobyte on the size of files.
fn disk(world: World) -> Result<()> {
    // Catches the signal of the limit, so that it is an error as on a full disk.
    let signals =
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    signals?;
    limit("--fsize=1024")?;
    let mut checkpoints = Checkpoints::open(&world, folder()?, &CheckpointConfig::new())?;
    let mesh = world.mesh([("lat", RANKS)])?;
    let mut snapshot = Snapshot::new(&world);
    snapshot.sharded("x", &ShardTensor::<2>::ones([900, 40], &mesh, &[Shard(0)])?)?;
    checkpoints.save(1, snapshot, None)?;
    checkpoints.wait()
}

/// Trains until this process receives SIGINT, in the seventh step.
fn interrupt(world: World) -> Result<()> {
    let (mesh, mut trainer) = training(&world)?;
    let ended = trainer.train_epoch(
        |_, first| first + 1..,
        |model, step| {
            if step == 7 && world.is_root() {
                signal("INT")?;
            }
            let x = ShardTensor::<4>::ones([1, 1, 9, 8], &mesh, &[Shard(2)])?;
            Ok(x.apply(model).mean())
        },
    )?;
    assert_eq!(ended, Ended::Interrupted);
    assert_eq!(trainer.step(), 7);
    Ok(())
}

/// Starts or resumes a run that saves every fifth step.
fn training(world: &World) -> Result<(DeviceMesh, Trainer<Conv2d>)> {
    let mesh = world.mesh([("lat", world.size())])?;
    let model = world.init(|device| Conv2dConfig::new([1, 1], [3, 3]).init(device))?;
    let rate = ModuleLrScheduler::new(1e-3);
    let trainer = Trainer::new(world, model, SgdConfig::new().init(), rate).with_save_every(5);
    Ok((mesh, trainer.resume_or_start(folder()?)?))
}

/// Trains. On three ranks, the last one is killed once there is a checkpoint, and its host is gone.
fn supervised(world: World) -> Result<()> {
    let (mesh, mut trainer) = training(&world)?;
    let ended = trainer.train_epoch(
        |_, first| first..12,
        |model, batch| {
            if world.size() == RANKS && batch == 11 && world.rank() + 1 == RANKS {
                std::fs::write(std::env::var("GONE").map_err(Error::other)?, "")?;
                signal("KILL")?;
            }
            let x = ShardTensor::<4>::ones([1, 1, 9, 8], &mesh, &[Shard(2)])?;
            Ok(x.apply(model).mean())
        },
    )?;
    assert_eq!(ended, Ended::Completed);
    trainer.finish()?;
    let losses = trainer.losses().len();
    if world.is_root() {
        println!("all {losses} losses on {} ranks", world.size());
    }
    Ok(())
}
