//! Folders of checkpoints: retention, and recovery from crashes.

mod errors;
mod finite;
mod meshes;
mod modules;
mod state_dict;
mod wanted;

use std::fs;
use std::path::Path;

use burn::tensor::{Bool, Int, Tensor, TensorData};
use halocline_core::{
    DeviceMesh, Distribution, Launcher, Placement, RandomKey, Replicate, Result, Shard,
    ShardTensor, World,
};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Direction, Snapshot};

use crate::listing;

const SHAPE: [usize; 4] = [2, 3, 13, 18];

/// Sizes of the two axes of a mesh, and the placements on them.
type Case = ([usize; 2], [Placement; 2]);

const CASES: [Case; 6] = [
    ([1, 1], [Replicate, Replicate]),
    ([2, 1], [Shard(2), Shard(3)]),
    ([1, 3], [Replicate, Shard(3)]),
    ([2, 2], [Shard(2), Shard(3)]),
    ([4, 1], [Replicate, Replicate]),
    ([2, 3], [Shard(3), Shard(3)]),
];

fn mesh(world: &World, sizes: [usize; 2]) -> Result<DeviceMesh> {
    world.mesh([("first", sizes[0]), ("second", sizes[1])])
}

fn field(world: &World, case: &Case) -> Result<ShardTensor<4>> {
    let normal = Distribution::Normal(0.0, 1.0);
    let key = RandomKey::new(5, "field");
    ShardTensor::random(SHAPE, normal, key, &mesh(world, case.0)?, &case.1)
}

/// Creates a replicated tensor of 5 MB, large enough to be divided among ranks.
fn large(world: &World) -> Tensor<2> {
    let values: Vec<f32> = (0..1300 * 1000).map(|i| (i % 7919) as f32).collect();
    let data = TensorData::new(values, [1300, 1000]);
    Tensor::from_data(data, world.device())
}

fn flags(world: &World) -> Tensor<1, Bool> {
    Tensor::<1, Int>::from_ints([3, 0, 1], world.device()).bool()
}

fn save(folder: &Path, case: &Case, step: u64) {
    let ranks = case.0[0] * case.0[1];
    let saved = Launcher::local(ranks).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.sharded("field", &field(&world, case)?)?;
        snapshot.tensor("large", &large(&world))?;
        snapshot.tensor("flags", &flags(&world))?;
        snapshot.data("nothing", &TensorData::new(Vec::<f64>::new(), [0]))?;
        snapshot.value("rate", &0.1_f64)?;
        checkpoints.save(step, snapshot, None)?;
        checkpoints.wait()
    });
    saved.unwrap();
}

fn same<const D: usize, K: burn::tensor::kind::Basic>(found: Tensor<D, K>, expected: Tensor<D, K>) {
    found.into_data().assert_eq(&expected.into_data(), true);
}

/// Saves a number at each step, and lists the steps in the folder afterwards.
fn steps(folder: &Path, config: &CheckpointConfig, metrics: &[Option<f64>]) -> Vec<String> {
    let saved = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, config)?;
        for (step, metric) in (1..).zip(metrics) {
            let mut snapshot = Snapshot::new(&world);
            snapshot.value("step", &step)?;
            snapshot.data("x", &TensorData::from([step as f32]))?;
            checkpoints.save(step, snapshot, *metric)?;
        }
        checkpoints.wait()
    });
    saved.unwrap();
    names_in(folder)
}

/// Lists a folder of checkpoints, in order.
fn names_in(folder: &Path) -> Vec<String> {
    let mut names = listing(folder);
    names.retain(|name| name != ".lock");
    names.sort();
    names
}

fn latest(folder: &Path) -> Option<u64> {
    let found = Launcher::local(2).collect(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
        let latest = checkpoints.latest()?;
        if let Some(checkpoint) = &latest {
            assert_eq!(checkpoint.value::<u64>("step")?, checkpoint.step());
            let x: Tensor<1> = checkpoint.tensor(&world, "x")?;
            assert_eq!(x.into_scalar::<f32>(), checkpoint.step() as f32);
        }
        Ok(latest.map(|checkpoint| checkpoint.step()))
    });
    let found = found.unwrap();
    assert_eq!(found[0], found[1]);
    found[0]
}

#[test]
fn the_newest_and_the_best_stay_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new().with_keep_last(2).with_keep_best(1);
    let metrics = [Some(3.0), Some(1.0), None, Some(2.0), None];
    let names = steps(folder.path(), &config, &metrics);
    assert_eq!(
        names,
        ["step_000000002", "step_000000004", "step_000000005"]
    );
    assert_eq!(latest(folder.path()), Some(5));
    let two = CheckpointConfig::new().with_keep_last(1).with_keep_best(2);
    let metrics = [Some(3.0), Some(1.0), Some(2.0), None, None];
    let other = tempfile::tempdir().unwrap();
    let names = steps(other.path(), &two, &metrics);
    assert_eq!(
        names,
        ["step_000000002", "step_000000003", "step_000000005"]
    );
    let best = Launcher::local(2).collect(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &config)?;
        Ok(checkpoints.best()?.map(|checkpoint| checkpoint.step()))
    });
    assert_eq!(best.unwrap(), [Some(2), Some(2)]);
    let highest = CheckpointConfig::new()
        .with_keep_last(1)
        .with_keep_best(1)
        .with_direction(Direction::Highest);
    let highs = tempfile::tempdir().unwrap();
    let names = steps(highs.path(), &highest, &[Some(0.5), Some(0.9), Some(0.7)]);
    assert_eq!(names, ["step_000000002", "step_000000003"]);
    // The direction is part of the checkpoint.
    let best = Launcher::local(2).collect(|world| {
        let best = Checkpoint::best(&world, highs.path())?;
        Ok(best.map(|checkpoint| checkpoint.step()))
    });
    assert_eq!(best.unwrap(), [Some(2), Some(2)]);
}

#[test]
fn a_crash_between_any_two_steps_of_a_save_leaves_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert_eq!(latest(path), None);
    steps(path, &CheckpointConfig::new(), &[None, None]);
    let second = path.join("step_000000002");
    // Files without an index: the save was never finished.
    let partial = path.join(".step_000000003.0123456789abcdef");
    fs::create_dir(&partial).unwrap();
    fs::copy(
        second.join("rank_00000.safetensors"),
        partial.join("rank_00000.safetensors"),
    )
    .unwrap();
    // A removal that was interrupted.
    let removed = path.join(".step_000000000.removed");
    fs::create_dir(&removed).unwrap();
    fs::copy(second.join("index.json"), removed.join("index.json")).unwrap();
    assert_eq!(latest(path), Some(2));
    assert!(!partial.exists() && !removed.exists());
    // A folder that lacks only its final name.
    fs::rename(&second, path.join(".step_000000002.0123456789abcdef")).unwrap();
    assert_eq!(latest(path), Some(2));
    assert!(second.exists());
    // A missing file, and one that is too short: a damaged checkpoint is renamed and kept.
    let put_back = || {
        let damaged = |entry: &String| entry.starts_with("damaged_step_000000002");
        let damaged = listing(path)
            .into_iter()
            .find(damaged)
            .expect("it was damaged");
        fs::rename(path.join(damaged), &second).unwrap();
    };
    let file = second.join("rank_00000.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(latest(path), Some(1));
    put_back();
    fs::remove_file(&file).unwrap();
    assert_eq!(latest(path), Some(1));
    put_back();
    fs::write(&file, &bytes).unwrap();
    assert_eq!(latest(path), Some(2));
    // A name that does not match the step.
    fs::rename(&second, path.join("step_000000007")).unwrap();
    assert_eq!(latest(path), Some(1));
    fs::rename(path.join("damaged_step_000000007"), &second).unwrap();
    // The same step again, stopped after the old checkpoint was moved aside and before the new one
    // was renamed.
    let again = path.join(".step_000000002.0123456789abcdef.1");
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .args([&second, &again])
        .status();
    assert!(copied.unwrap().success());
    fs::rename(&second, path.join(".step_000000002.removed")).unwrap();
    assert_eq!(latest(path), Some(2));
    let index = second.join("index.json");
    fs::write(&index, &fs::read(&index).unwrap()[..100]).unwrap();
    assert_eq!(latest(path), Some(1));
    // None is left: training must not start over as if there had been no checkpoint.
    fs::write(path.join("step_000000001/index.json"), "{}").unwrap();
    let none = Launcher::local(2).run(|world| {
        let open = Checkpoints::open(&world, path, &CheckpointConfig::new());
        let beside = Checkpoint::latest(&world, path);
        assert!(beside.unwrap_err().to_string().contains("not an index"));
        open.map(|_| ())
    });
    assert!(none.unwrap_err().to_string().contains("not an index"));
}

#[test]
fn a_folder_belongs_to_one_job_and_others_may_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let shared = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, path, &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.tensor("large", &large(&world))?;
        checkpoints.save(1, snapshot, None)?;
        let second = Checkpoints::open(&world, path, &CheckpointConfig::new());
        let error = second.unwrap_err().to_string();
        assert!(error.contains("another job has it open"), "{error}");
        checkpoints.wait()?;
        let found = Checkpoint::latest(&world, path)?.expect("it is there");
        assert_eq!(found.step(), 1);
        Ok(())
    });
    shared.unwrap();
    let mode = |name: &str| {
        let file = path.join("step_000000001").join(name);
        fs::metadata(file).unwrap().permissions().mode()
    };
    assert_eq!(mode("rank_00000.safetensors"), mode("index.json"));
}

#[test]
fn what_was_saved_after_going_back_stays() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new().with_keep_last(1).with_keep_best(1);
    let names = steps(
        folder.path(),
        &config,
        &[Some(0.5), Some(f64::NAN), Some(0.7)],
    );
    assert_eq!(names, ["step_000000001", "step_000000003"]);
    let gone_back = Launcher::local(1).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &config)?;
        assert_eq!(checkpoints.committed(), Some(3));
        checkpoints.save(2, Snapshot::new(&world), None)?;
        checkpoints.wait()?;
        assert_eq!(checkpoints.committed(), Some(2));
        let loaded = checkpoints.resume(|checkpoint| match checkpoint.step() {
            2 => Ok("loaded"),
            _ => Err(halocline_core::Error::other("of no use")),
        })?;
        assert_eq!(loaded, Some("loaded"));
        assert_eq!(checkpoints.latest()?.expect("saved").step(), 2);
        // A checkpoint that may be valid is kept.
        let denied = checkpoints.resume(|checkpoint| -> halocline_core::Result<()> {
            let path = folder.path().join(format!("{}", checkpoint.step()));
            let source = std::io::ErrorKind::PermissionDenied.into();
            Err(halocline_io::Error::Io { path, source }.into())
        });
        assert!(
            denied
                .unwrap_err()
                .to_string()
                .contains("permission denied")
        );
        assert_eq!(checkpoints.latest()?.expect("saved").step(), 2);
        Ok(())
    });
    gone_back.unwrap();
    assert!(folder.path().join("damaged_step_000000003").exists());
}
