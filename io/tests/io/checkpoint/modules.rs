//! Modules in checkpoints and in single files.

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Tensor};
use halocline_core::{Error, Launcher, Result, World};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot, load_record};

use super::same;

struct ToF64;

impl ModuleMapper for ToF64 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(DType::F64))
    }
}

/// Saves a model in a folder, and opens its checkpoint.
fn saved<M: Module>(world: &World, folder: &Path, model: &M) -> Result<Checkpoint> {
    let mut checkpoints = Checkpoints::open(world, folder, &CheckpointConfig::new())?;
    let mut snapshot = Snapshot::new(world);
    snapshot.module("model", model)?;
    checkpoints.save(1, snapshot, None)?;
    Ok(checkpoints.latest()?.expect("it was saved"))
}

#[test]
fn a_model_is_one_file_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let [single, record] = ["model.safetensors", "model.bpk"].map(|name| folder.path().join(name));
    let passed = Launcher::local(2).seed(4).run(|world| {
        let fresh = || world.init(|device| LinearConfig::new(7, 5).init(device));
        let model: Linear = fresh()?;
        let saved = saved(&world, folder.path(), &model)?;
        if world.is_root() {
            saved.export("model", &single)?;
            saved
                .module_record("model")?
                .save(&record)
                .map_err(Error::other)?;
        }
        world.barrier()?;
        let of_tensors = Checkpoint::open(&single)?.module(&world, "", fresh()?)?;
        let of_record = fresh()?
            .try_load_record(load_record(&record)?)
            .map_err(Error::other)?;
        for found in [of_tensors, of_record] {
            same(found.weight.val(), model.weight.val());
            same(
                found.bias.expect("a bias").val(),
                model.bias.clone().expect("a bias").val(),
            );
        }
        // Another shape, another type, and a module with more parameters.
        let failed = |module: Linear| {
            let loaded = Checkpoint::open(&single)?.module(&world, "", module);
            Ok::<_, Error>(loaded.unwrap_err().to_string())
        };
        let other = world.init(|device| LinearConfig::new(7, 6).init(device))?;
        let error = failed(other)?;
        assert!(error.contains("weight: shape mismatch, [7, 5]"), "{error}");
        assert!(failed(fresh()?.map(&mut ToF64))?.contains("is of F32, expected F64"));
        let less = world.init(|device| LinearConfig::new(7, 5).with_bias(false).init(device))?;
        assert!(failed(less)?.contains("no parameter of tensor bias"));
        Ok(())
    });
    passed.unwrap();
}

#[test]
fn parameters_keep_the_numbers_by_which_optimizers_group_them() {
    let folder = tempfile::tempdir().unwrap();
    let passed = Launcher::local(2).run(|world| {
        let fresh = || world.init(|device| LinearConfig::new(7, 5).init(device));
        let model: Linear = fresh()?;
        let saved = saved(&world, folder.path(), &model)?;
        let ids = |model: &Linear| [model.weight.id, model.bias.as_ref().expect("a bias").id];
        let other: Linear = fresh()?;
        let expected = ids(&other);
        let loaded = saved.module(&world, "model", other)?;
        assert_eq!(ids(&loaded), expected);
        same(loaded.weight.val(), model.weight.val());
        Ok(())
    });
    passed.unwrap();
}

#[test]
fn running_statistics_are_saved_with_their_last_update() {
    let folder = tempfile::tempdir().unwrap();
    let passed = Launcher::local(1).run(|world| {
        let fresh = || world.init(|device| BatchNormConfig::new(1).init(device));
        let model: BatchNorm = fresh()?;
        let input = Tensor::<2>::from_floats([[1.0], [3.0]], world.device());
        let _ = model.forward(input);
        let saved = saved(&world, folder.path(), &model)?;
        let found = saved.module(&world, "model", fresh()?)?;
        // A tenth of the mean of the batch.
        let mean: f32 = found.running_mean.value().into_scalar();
        assert!((mean - 0.2).abs() < 1e-6, "{mean}");
        same(found.running_var.value(), model.valid().running_var.value());
        Ok(())
    });
    passed.unwrap();
}
