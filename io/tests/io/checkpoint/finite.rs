//! Checkpoints with and without values that are not finite.

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Tensor, TensorData};
use halocline_core::{Launcher, Layout, Result, Shard, ShardTensor, World};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot};

use super::names_in;

/// Saves a tensor at each step; the last cell of rank 1 has the given value.
fn save(folder: &Path, config: &CheckpointConfig, steps: &[(u64, f64, Option<f64>)]) {
    let saved = Launcher::local(2).run(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder, config)?;
        let mesh = world.mesh([("lat", 2)])?;
        for (step, value, metric) in steps {
            let layout = Layout::new(mesh.shape(), &[2, 3], &[Shard(0)])?;
            let last = if world.is_root() { 0.0 } else { *value };
            let local = Tensor::from_data([[1.0, 2.0, last]], world.device());
            let mut snapshot = Snapshot::new(&world);
            snapshot.sharded("x", &ShardTensor::<2>::from_local(local, &mesh, &layout)?)?;
            checkpoints.save(*step, snapshot, *metric)?;
        }
        checkpoints.wait()
    });
    saved.unwrap();
}

/// Returns the step of the newest checkpoint, on which all functions must agree.
fn newest(folder: &Path) -> Option<u64> {
    let found = Launcher::local(2).collect(|world| {
        let beside = Checkpoint::latest(&world, folder)?.map(|found| found.step());
        let mut checkpoints = Checkpoints::open(&world, folder, &CheckpointConfig::new())?;
        let own = checkpoints.latest()?.map(|found| found.step());
        let resumed = checkpoints.resume(|found| Ok(found.step()))?;
        assert_eq!([own, resumed], [beside; 2]);
        Ok(beside)
    });
    found.unwrap()[1]
}

#[test]
fn a_checkpoint_that_is_not_finite_never_displaces_a_finite_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let two = CheckpointConfig::new().with_keep_last(2);
    let finite = [
        (1, 0.0, None),
        (2, -3.0, None),
        (3, f64::MIN_POSITIVE, None),
    ];
    save(path, &two, &finite);
    save(path, &two, &[(4, f64::NAN, None), (5, f64::INFINITY, None)]);
    save(path, &two, &[(6, f64::NEG_INFINITY, None)]);
    save(path, &two, &[(3, f64::NAN, None)]);
    let names = ["step_000000002", "step_000000003", "step_000000006"];
    assert_eq!(names_in(path), names);
    assert_eq!(newest(path), Some(3));
    // Training continues from there, past the step of the checkpoint that is not finite.
    save(path, &two, &[(4, 0.0, None)]);
    let names = ["step_000000003", "step_000000004", "step_000000006"];
    assert_eq!(names_in(path), names);
    assert_eq!(newest(path), Some(4));
    save(path, &two, &[(8, 0.0, None)]);
    assert_eq!(names_in(path), ["step_000000004", "step_000000008"]);
}

#[test]
fn where_none_is_finite_they_are_kept_and_read_as_others() {
    let folder = tempfile::tempdir().unwrap();
    let steps = [1, 2, 3].map(|step| (step, f64::NAN, None));
    let two = CheckpointConfig::new().with_keep_last(2);
    save(folder.path(), &two, &steps);
    let names = ["step_000000002", "step_000000003"];
    assert_eq!(names_in(folder.path()), names);
    assert_eq!(newest(folder.path()), Some(3));
}

#[test]
fn the_best_is_finite_in_metric_and_state() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new().with_keep_last(1).with_keep_best(1);
    let steps = [
        (1, 0.0, Some(5.0)),
        (2, 0.0, Some(f64::NAN)),
        (3, f64::NAN, Some(1.0)),
        (4, 0.0, Some(f64::INFINITY)),
    ];
    save(folder.path(), &config, &steps[..3]);
    let best = || {
        let best = Launcher::local(2).collect(|world| {
            let mut checkpoints = Checkpoints::open(&world, folder.path(), &config)?;
            Ok(checkpoints.best()?.map(|found| found.step()))
        });
        best.unwrap()[1]
    };
    assert_eq!(best(), Some(1));
    save(folder.path(), &config, &steps[3..]);
    assert_eq!(best(), Some(1));
    let names = ["step_000000001", "step_000000004"];
    assert_eq!(names_in(folder.path()), names);
}

/// From a finite checkpoint, `resume` falls back only to finite ones.
#[test]
fn a_failure_to_load_leads_to_no_checkpoint_that_is_not_finite() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig::new();
    save(folder.path(), &config, &[(2, 0.0, None)]);
    save(folder.path(), &config, &[(1, f64::NAN, None)]);
    let failed = Launcher::local(2).collect(|world| {
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &config)?;
        let resumed = checkpoints.resume(|found| -> Result<u64> {
            match found.step() {
                2 => Err(halocline_core::Error::other("it is of another model")),
                step => Ok(step),
            }
        });
        Ok(resumed.unwrap_err().to_string())
    });
    for error in failed.unwrap() {
        assert!(error.contains("it is of another model"), "{error}");
    }
}

struct With {
    value: f64,
    dtype: DType,
}

impl ModuleMapper for With {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let filled = (tensor.inner() * 0.0 + self.value).cast(self.dtype);
            Tensor::from_inner(filled).require_grad()
        })
    }
}

fn linear(world: &World) -> Result<Linear> {
    world.init(|device| LinearConfig::new(7, 5).init(device))
}

/// Returns an optimizer after a step with gradients of this value.
fn stepped(model: Linear, value: f64) -> ModuleOptimizer {
    let mut optimizer: ModuleOptimizer = AdamWConfig::new().init();
    let x = Tensor::<2>::ones([1, 7], &model.weight.device()) * value;
    let gradients = model.forward(x).sum().backward();
    let gradients = GradientsParams::from_grads(gradients, &model);
    let _ = optimizer.step(1e-2, model, gradients);
    optimizer
}

#[test]
fn parameters_and_states_count_and_other_data_do_not() {
    let folder = tempfile::tempdir().unwrap();
    type Add = fn(&mut Snapshot, &World) -> Result<()>;
    let cases: [(Option<&str>, Add); 7] = [
        (None, |snapshot, world| {
            Ok(snapshot.module("model", &linear(world)?)?)
        }),
        (None, |snapshot, _| {
            Ok(snapshot.data("losses", &TensorData::from([f64::NAN]))?)
        }),
        (Some("model.bias"), |snapshot, world| {
            let model = linear(world)?.map(&mut With {
                value: f64::NAN,
                dtype: DType::F32,
            });
            Ok(snapshot.module("model", &model)?)
        }),
        (Some("model.bias"), |snapshot, world| {
            let model = linear(world)?.map(&mut With {
                value: 1e6,
                dtype: DType::F16,
            });
            Ok(snapshot.module("model", &model)?)
        }),
        (None, |snapshot, world| {
            let model = linear(world)?.map(&mut With {
                value: 1e6,
                dtype: DType::BF16,
            });
            Ok(snapshot.module("model", &model)?)
        }),
        (None, |snapshot, world| {
            let model = linear(world)?;
            Ok(snapshot.optimizer("optimizer", &stepped(model.clone(), 1.0), &model)?)
        }),
        (
            Some("optimizer.weight.momentum.moment_1"),
            |snapshot, world| {
                let model = linear(world)?;
                let optimizer = stepped(model.clone(), f64::NAN);
                Ok(snapshot.optimizer("optimizer", &optimizer, &model)?)
            },
        ),
    ];
    for (i, (expected, add)) in cases.into_iter().enumerate() {
        let folder = folder.path().join(i.to_string());
        let saved = Launcher::local(2).run(|world| {
            let mut checkpoints = Checkpoints::open(&world, &folder, &CheckpointConfig::new())?;
            let mut snapshot = Snapshot::new(&world);
            add(&mut snapshot, &world)?;
            checkpoints.save(1, snapshot, None)?;
            checkpoints.wait()
        });
        saved.unwrap();
        let opened = Checkpoint::open(folder.join("step_000000001")).unwrap();
        assert_eq!(opened.not_finite(), expected, "case {i}");
    }
}
