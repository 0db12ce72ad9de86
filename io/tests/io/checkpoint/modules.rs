//! Modules in checkpoints and in single files.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Tensor};
use halocline_core::{Error, Launcher};
use halocline_io::{Checkpoint, CheckpointConfig, Checkpoints, Snapshot, load_record};

use super::same;

struct ToF64;

impl ModuleMapper for ToF64 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(DType::F64))
    }
}

#[test]
fn a_model_is_one_file_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let [single, record] = ["model.safetensors", "model.bpk"].map(|name| folder.path().join(name));
    let passed = Launcher::local(2).seed(4).run(|world| {
        let fresh = || world.init(|device| LinearConfig::new(7, 5).init(device));
        let model: Linear = fresh()?;
        let mut checkpoints = Checkpoints::open(&world, folder.path(), &CheckpointConfig::new())?;
        let mut snapshot = Snapshot::new(&world);
        snapshot.module("model", &model)?;
        checkpoints.save(1, snapshot, None)?;
        let saved = checkpoints.latest()?.expect("it was saved");
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
        // Another shape, another type, and a module with more in it.
        let failed = |module: Linear| {
            let loaded = Checkpoint::open(&single)?.module(&world, "", module);
            Ok::<_, Error>(loaded.unwrap_err().to_string())
        };
        let other = world.init(|device| LinearConfig::new(7, 6).init(device))?;
        assert!(failed(other)?.contains("shape mismatch"));
        assert!(failed(fresh()?.map(&mut ToF64))?.contains("is of F32, expected F64"));
        let less = world.init(|device| LinearConfig::new(7, 5).with_bias(false).init(device))?;
        assert!(failed(less)?.contains("Unused"));
        Ok(())
    });
    passed.unwrap();
}
