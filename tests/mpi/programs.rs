//! Programs that the ranks of a job run.

mod failures;
mod messages;
mod parallel;
mod tensors;

use burn::tensor::TensorData;
use halocline_core::{
    Distribution, Error, Launcher, RandomKey, Result, Shard, ShardTensor, Traffic, World,
};

use crate::job::{NOT_ENDED, RANKS};

/// Results of a rank, for comparison bit for bit.
type Found = Vec<TensorData>;

/// Runs the program of that name as one rank.
pub(crate) fn run(case: &str) {
    let agree = agrees_with_local;
    match case {
        "placements" => agree(tensors::placements),
        "halos" => agree(tensors::halos),
        "reductions" => agree(tensors::reductions),
        "kinds" => agree(tensors::kinds),
        "scatter_and_gather" => agree(tensors::scatter_and_gather),
        "modules" => agree(tensors::modules),
        "training" => agree(tensors::training),
        "parallel" => agree(parallel::parallel),
        "attention" => agree(parallel::attention),
        "checkpointing" => tensors::checkpointing(),
        "payloads" => agree(messages::payloads),
        "many_in_flight" => agree(messages::many_in_flight),
        "sends_do_not_wait" => succeed(messages::sends_do_not_wait),
        "large_message" => succeed(messages::large_message),
        "dropped_in_flight" => succeed(messages::dropped_in_flight),
        "unexpected_in_flight" => succeed(messages::unexpected_in_flight),
        "after_the_end" => failures::after_the_end(),
        "panic" => fail_on_last(|| panic!("out of ocean")),
        "error" => fail_on_last(|| Err(Error::other("no such file"))),
        "killed" => fail_on_last(failures::kill_this_process),
        "panic_while_others_compute" => failures::panic_while_others_compute(),
        "early_end" => failures::early_end(),
        "diverged" => failures::diverged(),
        "other_operation" => failures::other_operation(),
        "other_shape" => failures::other_shape(),
        "timeout" => failures::timeout(),
        _ => panic!("there is no program {case:?}"),
    }
}

/// Runs a program on this job's processes, and on as many threads in each, which must compute the
/// same bits.
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

/// Fails on the last rank, after a barrier, while the others wait for it.
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
    let uniform = Distribution::Uniform(-1.0, 1.0);
    ShardTensor::random(
        shape,
        uniform,
        RandomKey::new(7, "noise"),
        &mesh,
        &[Shard(0)],
    )
}
