//! Ranks that load different tensors.

use std::path::Path;

use burn::tensor::{Float, Tensor};
use halocline_core::{Launcher, Result, Shard, World};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};

/// Saves two tensors of equal shape, with different values at each step.
fn save(folder: &Path, steps: u64) {
    let saved = Launcher::local(2).run(|world| {
        let config = CheckpointConfig::new().with_keep_last(steps as usize);
        let mut checkpoints = Checkpoints::open(&world, folder, &config)?;
        for step in 0..steps {
            let mut snapshot = Snapshot::new(&world);
            for (name, value) in [("pressure", 1), ("salinity", 2)] {
                let tensor = Tensor::<2>::full([6, 10], value + step, world.device());
                snapshot.tensor(name, &tensor)?;
            }
            checkpoints.save(step, snapshot, None)?;
        }
        checkpoints.wait()
    });
    saved.unwrap();
}

/// Returns the errors of two ranks whose loads must fail.
fn errors(load: impl Fn(&World) -> Result<()> + Send + Sync) -> Vec<String> {
    let errors = Launcher::local(2).collect(|world| match load(&world) {
        Ok(()) => panic!("rank {}: loaded without an error", world.rank()),
        Err(error) => Ok(error.to_string()),
    });
    errors.unwrap()
}

#[test]
fn ranks_that_load_other_tensors_are_told_which() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 1);
    let checkpoint = Checkpoint::open(folder.path().join("step_000000000")).unwrap();
    let names = ["pressure", "salinity"];
    let told = errors(|world| {
        let found = checkpoint.tensor::<2, Float>(world, names[world.rank()]);
        found.map(|_| ())
    });
    for error in told {
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
        assert!(error.contains("rank 1"), "{error}");
    }
}

#[test]
fn ranks_that_load_to_another_mesh_or_layout_are_told_which() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 1);
    let checkpoint = Checkpoint::open(folder.path().join("step_000000000")).unwrap();
    let told = errors(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let found = checkpoint.sharded::<2, Float>(&mesh, "pressure", &[Shard(world.rank())]);
        found.map(|_| ())
    });
    for error in told {
        assert!(
            error.contains("Shard(0)") && error.contains("Shard(1)"),
            "{error}"
        );
    }
    let told = errors(|world| {
        let axis = ["lat", "lon"][world.rank()];
        let mesh = world.mesh([(axis, 2)])?;
        let found = checkpoint.sharded::<2, Float>(&mesh, "pressure", &[Shard(0)]);
        found.map(|_| ())
    });
    for error in told {
        assert!(
            error.contains("lat(2)") && error.contains("lon(2)"),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_load_from_another_checkpoint_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2);
    let told = errors(|world| {
        let name = format!("step_00000000{}", world.rank());
        let checkpoint = Checkpoint::open(folder.path().join(name))?;
        checkpoint.tensor::<2, Float>(world, "pressure").map(|_| ())
    });
    for error in told {
        assert!(error.contains("another checkpoint"), "{error}");
    }
}
