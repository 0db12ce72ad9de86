//! Programs that fail on a rank and end the job.

use std::process::Command;
use std::time::Duration;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor};
use halocline_core::comm::{Batch, Expected, Operation, Payload};
use halocline_core::{Boundary, Halo, Launcher, Result, Shard, Traffic};

use super::messages::exchange;
use super::noise;
use crate::job::NOT_ENDED;

pub(super) fn after_the_end() {
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

pub(super) fn panic_while_others_compute() {
    let result = Launcher::from_env().run(|world| {
        if world.is_root() {
            panic!("out of ocean");
        }
        std::thread::sleep(Duration::from_secs(60));
        Ok(())
    });
    panic!("{NOT_ENDED}: {result:?}");
}

pub(super) fn early_end() {
    let result = Launcher::from_env().run(|world| match world.rank() {
        0 => world.barrier(),
        _ => Ok(()),
    });
    panic!("{NOT_ENDED}: {result:?}");
}

pub(super) fn diverged() {
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

/// Ranks that differ in nothing but the operation.
pub(super) fn other_operation() {
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

pub(super) fn other_shape() {
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

pub(super) fn timeout() {
    let launcher = Launcher::from_env().timeout(Duration::from_millis(500));
    let result = launcher.run(|world| {
        if !world.is_root() {
            std::thread::sleep(Duration::from_secs(30));
        }
        world.barrier()
    });
    panic!("{NOT_ENDED}: {result:?}");
}

pub(super) fn kill_this_process() -> Result<()> {
    let id = std::process::id().to_string();
    Command::new("kill").args(["-9", &id]).status()?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}
