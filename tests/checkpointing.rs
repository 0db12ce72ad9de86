//! Training on a device with gradient checkpointing has the gradients of training without it, by
//! burn's operators and ours.

#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod trainer;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, GradientCheckpointingStrategy, TensorData};
use halocline::Trainer;
use halocline::models::UNetConfig;
use halocline::prelude::*;
use trainer::{SHAPE, sample, train};

/// Runs a program with and without gradient checkpointing.
fn both<T: Send>(ranks: usize, program: impl Fn(&World) -> Result<T> + Send + Sync) -> [Vec<T>; 2] {
    let device = Device::flex().autodiff();
    [device.clone().gradient_checkpointing(), device].map(|device| {
        let launcher = Launcher::local(ranks).device(device).seed(5);
        launcher.collect(|world| program(&world)).unwrap()
    })
}

#[test]
fn training_has_the_losses_of_training_without() {
    for (axes, placements) in [
        (&[("lat", 1)][..], &[Shard(2)][..]),
        (&[("lat", 2)], &[Shard(2)]),
        (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)]),
        (&[("data", 2), ("lat", 2)], &[Shard(0), Shard(2)]),
    ] {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let [with, without] = both(ranks, |world| {
            Ok(train(world, &world.mesh_of(axes)?, placements, 8)?.0)
        });
        assert_eq!(with, without, "{axes:?}");
        assert!(without[0][7] < without[0][0]);
    }
}

#[test]
fn gradients_of_a_unet_have_the_bits_of_those_without() {
    let [with, without] = both(2, |world| {
        let mesh = world.mesh([("lat", 2)])?;
        let model = world.init(|device| UNetConfig::new(3, 2).with_width(4).init(device))?;
        let x = sample("x", [1, 3, 12, 8], &mesh, &[Shard(2)])?.require_grad();
        let target = sample("target", [1, 2, 12, 8], &mesh, &[Shard(2)])?;
        let loss = mse_loss(x.clone().apply(&model), target, Reduction::Mean)?;
        let gradients = loss.backward();
        let of_x = x.grad(&gradients).expect("a gradient").into_local();
        let mut found = vec![of_x.into_data()];
        found.extend(gradients_of(&model, &gradients));
        Ok(found)
    });
    assert!(without[0].len() > 20);
    assert_eq!(with, without);
}

/// Returns the gradients of all parameters.
fn gradients_of<M: Module>(model: &M, gradients: &burn::tensor::Gradients) -> Vec<TensorData> {
    struct Collect<'a>(&'a burn::tensor::Gradients, Vec<TensorData>);

    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param
                .val()
                .grad(self.0)
                .expect("every parameter has a part");
            self.1.push(gradient.into_data());
        }
    }

    let mut collect = Collect(gradients, Vec::new());
    model.visit(&mut collect);
    collect.1
}

#[test]
fn a_run_that_is_resumed_goes_on_with_checkpointing() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [with, without] = both(2, |world| {
        let strategy = world.device().gradient_checkpointing_strategy();
        let with = strategy == Some(GradientCheckpointingStrategy::Balanced);
        let folder = folders[usize::from(with)].path();
        let mesh = world.mesh([("lat", 2)])?;
        let x = sample("x", SHAPE, &mesh, &[Shard(2)])?;
        for epochs in 1..3 {
            let model = world.init(|device| LinearConfig::new(18, 18).init(device))?;
            let optimizer = AdamWConfig::new().init();
            let mut trainer = Trainer::new(world, model, optimizer, ModuleLrScheduler::new(1e-2));
            trainer = trainer.resume_or_start(folder)?;
            while trainer.epoch() < epochs {
                let _ = trainer.train_epoch(
                    |_, first| first..3,
                    |model, _| Ok((x.clone().apply(model).gelu() - x.clone()).abs().mean()),
                )?;
            }
            trainer.finish()?;
            if epochs == 2 {
                return Ok(trainer.losses().to_vec());
            }
        }
        unreachable!("the second run returns")
    });
    assert_eq!(with, without);
}

/// Tensors from other sources have the strategy of the device, so that they can be combined with
/// parameters.
#[test]
fn every_new_tensor_has_the_strategy_of_the_device() {
    let found = Launcher::local(2)
        .device(Device::flex().autodiff().gradient_checkpointing())
        .collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let field = Tensor::<2>::ones([4, 4], world.device());
            let scattered = scatter_tensor(
                world.is_root().then_some(field.clone()),
                0,
                &mesh,
                &[Shard(0)],
            )?;
            let plain = ShardTensor::distribute(field.clone(), &mesh, &[Shard(0)])?.inner();
            let linear = world.init(|device| LinearConfig::new(4, 4).init(device))?;
            let linear = world.sync_module(linear, 0)?;
            let tensors = [
                scattered.into_local(),
                plain.require_grad().into_local(),
                linear.weight.val(),
            ];
            Ok(tensors.map(|tensor| tensor.gradient_checkpointing_strategy()))
        });
    let expected = [Some(GradientCheckpointingStrategy::Balanced); 3];
    assert_eq!(found.unwrap(), [expected; 2]);
}

/// A plain tensor is placed on a mesh of one rank, which a thread keeps for each device.
#[test]
fn plain_tensors_with_and_without_go_together_with_new_ones() {
    let device = Device::flex().autodiff();
    let gradient = |device: &Device| {
        let x = Tensor::<2>::ones([3, 5], device).require_grad();
        let field = x.clone().into_shard();
        let weights = ShardTensor::full([3, 5], 0.5, field.mesh(), &[Replicate]).unwrap();
        let loss = (field * weights).gelu().mean();
        x.grad(&loss.backward()).expect("a gradient").into_data()
    };
    let [without, with] = [device.clone(), device.gradient_checkpointing()].map(|d| gradient(&d));
    assert_eq!(with, without);
}
