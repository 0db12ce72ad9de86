//! Programs that once hung, panicked or had no defined value, among them operands without
//! gradients, shared modules, and two reductions.

use burn::module::Param;
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use halocline_core::plan::Need;
use halocline_core::{
    Boundary, Error, Halo, Halos, IndexBox, Launcher, Layout, LocalGradient, Partial, ReduceOp,
    Replicate, Shard, ShardTensor,
};

#[test]
fn a_module_is_not_made_while_another_is() {
    let result = Launcher::local(2).run(|world| {
        world.init(|device| {
            let inner = world.init(|device| LinearConfig::new(2, 2).init(device));
            let error = inner.unwrap_err().to_string();
            assert!(
                error.contains("init: called while another module is made"),
                "{error}"
            );
            LinearConfig::new(2, 2).init(device)
        })?;
        // The next module is made as usual.
        world
            .init(|device| LinearConfig::new(2, 2).init(device))
            .map(drop)
    });
    result.unwrap();
}

#[test]
fn ranks_may_share_a_batch_norm_that_is_sent() {
    let shared = BatchNormConfig::new(3).init(&Device::default().autodiff());
    for _ in 0..5 {
        let result = Launcher::local(4).run(|world| {
            let norm = world.sync_module(shared.clone(), 0)?;
            world.check_replicas(&norm)
        });
        result.unwrap();
    }
}

/// burn's layer keeps the update of its last batch beside its statistics.
#[test]
fn the_last_update_of_running_statistics_is_compared() {
    let result = Launcher::local(2).run(|world| {
        let norm = world.init(|device| BatchNormConfig::new(1).init(device))?;
        let value = world.rank() as f32; // a mistake
        drop(norm.forward(Tensor::<3>::full([2, 1, 4], value, world.device())));
        world.check_replicas(&norm)
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("running_mean differs"), "{error}");
}

/// Each rank receives a box of the expected size, but with other cells than it needs.
#[test]
fn ranks_that_assemble_by_other_arguments_are_told() {
    for check in [false, true] {
        let result = Launcher::local(2).check(check).run(|world| {
            let mesh = world.mesh([("x", 2)])?;
            let x = ShardTensor::<1>::ones([4], &mesh, &[Shard(0)])?;
            let offset = world.rank(); // a mistake
            let need = |position: usize| {
                let cell = [2 + offset, offset][position];
                let cells = std::iter::once(cell..cell + 1);
                Need::of(IndexBox::new(cells.collect()))
            };
            x.assemble("pick", offset, need).map(drop)
        });
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("ranks diverged") && error.contains("arguments"),
            "{error}"
        );
    }
}

#[test]
fn the_value_of_two_reductions_is_refused() {
    let result = Launcher::local(4).run(|world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let of = |ops: [ReduceOp; 2]| {
            let layout = Layout::new(mesh.shape(), &[1], &ops.map(Partial))?;
            let ones = Tensor::<1>::ones([1], world.device());
            ShardTensor::from_local(ones, &mesh, &layout)
        };
        let error = of([ReduceOp::Max, ReduceOp::Sum]).unwrap_err().to_string();
        assert!(error.contains("Partial(Max) or Partial(Sum)"), "{error}");
        of([ReduceOp::Max; 2]).map(drop)
    });
    result.unwrap();
}

#[test]
fn the_gradient_of_a_partial_maximum_is_no_replica() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Max)])?;
        let value = Tensor::<1>::full([1], world.rank() as f32, world.device());
        let x = ShardTensor::from_local(value, &mesh, &layout)?;
        let x = x.require_grad();
        let gradients = x.clone().resolve().backward();
        let error = Error::catch(|| x.grad(&gradients)).unwrap_err().to_string();
        assert!(
            error.contains("grad: ") && error.contains("Partial(Max)"),
            "{error}"
        );
        let own = x.local().grad(&gradients).expect("a gradient").into_data();
        own.assert_eq(&[world.rank() as f32].into(), true);
        Ok(())
    });
    result.unwrap();
}

/// The gate has no gradient, on one rank as on several.
#[test]
fn a_closure_may_give_an_operand_no_gradient() {
    for ranks in 1..3 {
        let result = Launcher::local(ranks).run(|world| {
            let mesh = world.mesh([("x", ranks)])?;
            let weight = Param::from_tensor(Tensor::<1>::ones([1], world.device()));
            let replicated = Layout::new(mesh.shape(), &[1], &[Replicate])?;
            let of = LocalGradient::Replicated;
            let weights = ShardTensor::from_local_with(weight.val(), &mesh, &replicated, of)?;
            let x = Tensor::<1>::from_floats([-1.0, 2.0, -3.0, 4.0], world.device());
            let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?.require_grad();
            let gated = (x * 2.0).zip_local(weights, |x, weights| {
                let shape = x.dims();
                weights.expand(shape).mask_fill(x.lower_elem(0.0), 0.0)
            });
            let partial = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
            let loss = ShardTensor::from_parts(gated.into_local().sum(), partial, mesh);
            let gradients = loss.backward();
            let gradient = weight
                .val()
                .grad(&gradients)
                .expect("a gradient")
                .into_data();
            gradient.assert_eq(&[2.0_f32].into(), true);
            Ok(())
        });
        result.unwrap();
    }
}

#[test]
fn a_recomputed_block_may_give_an_operand_no_gradient() {
    let device = Device::default().autodiff();
    let linear: Linear = LinearConfig::new(2, 2).init(&device);
    let ones = || ShardTensor::solo(Tensor::<2>::ones([3, 2], &device).require_grad());
    let (x, other) = (ones(), ones());
    let y = (x.clone() * 2.0).recompute_with(
        other.clone() * 3.0,
        &linear,
        Halos::Keep,
        |linear, x, other| {
            let (local, layout, mesh) = x.into_parts();
            let is_low = other.into_local().lower_elem(0.0);
            let y = linear.forward(local).mask_fill(is_low, 0.0);
            ShardTensor::from_parts(y, layout, mesh)
        },
    );
    let gradients = y.into_local().sum().backward();
    let zero = other.grad(&gradients).expect("a gradient").into_local();
    assert_eq!(zero.abs().sum().into_scalar::<f32>(), 0.0);
    assert!(x.grad(&gradients).is_some());
}

/// The running statistics stay in f32.
#[test]
fn a_recomputed_block_may_hold_a_batch_norm_in_half_precision() {
    let device = Device::default().autodiff();
    let half = || Param::from_tensor(Tensor::<1>::ones([3], (&device, DType::BF16)));
    let mut norm = BatchNormConfig::new(3).init(&device);
    (norm.gamma, norm.beta) = (half(), half());
    let x = Tensor::<2>::ones([2, 3], (&device, DType::BF16)).require_grad();
    let y = ShardTensor::solo(x).recompute(&norm, Halos::Keep, |norm, x| {
        let (local, layout, mesh) = x.into_parts();
        let y = local * norm.gamma.val().unsqueeze::<2>();
        ShardTensor::from_parts(y, layout, mesh)
    });
    let sum = y.into_local().cast(FloatDType::F32).sum();
    let gradients = sum.backward();
    let gradient = norm.gamma.val().grad(&gradients).expect("a gradient");
    let gradient = gradient.cast(FloatDType::F32).into_data();
    gradient.assert_eq(&[2.0_f32; 3].into(), true);
}

/// A single rank may dry-run a step between the passes of a real one, with elementwise operands on
/// the real mesh in any position.
#[test]
fn a_dry_run_sends_nothing_and_leaves_a_real_pass_as_it_was() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let weight = world.init(|device| Param::from_tensor(Tensor::<2>::ones([1, 3], device)))?;
        let x = Tensor::<2>::ones([4, 3], world.device());
        let x = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
        let mask = x.clone();
        let loss = |x: ShardTensor<2>| -> halocline_core::Result<ShardTensor<1>> {
            let y = mask.clone() * x.clone() * x.replicate_operand(weight.val());
            let (mesh, around) = (y.mesh().clone(), [Halo::new(0, 1, Boundary::Periodic)]);
            let sum = y.with_halo(&around)?.sum();
            let partial = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
            Ok(ShardTensor::from_parts(sum, partial, mesh))
        };
        let real = loss(x.clone())?;
        if world.is_root() {
            let before = world.comm_stats();
            let planned = x.dry_run(|x| loss(x).map(|loss| loss.backward()))?;
            assert!(planned.bytes_sent() > 0);
            assert_eq!(world.comm_stats(), before);
        }
        let gradients = real.backward();
        let gradient = weight
            .val()
            .grad(&gradients)
            .expect("a gradient")
            .into_data();
        // The rows at the ends of both shards are also halos.
        gradient.assert_eq(&[[8.0_f32; 3]].into(), true);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn parts_that_do_not_match_are_refused() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let other = world.mesh([("lon", 2)])?;
        let layout = Layout::new(mesh.shape(), &[4], &[Shard(0)])?;
        for (size, mesh, message) in [
            (3, &mesh, "local tensor [3] for a shard of"),
            (3, &mesh, "; expected [2]"),
            (2, &other, "belongs to another mesh than"),
        ] {
            let local = Tensor::<1>::ones([size], world.device());
            let made = || ShardTensor::from_parts(local, layout.clone(), mesh.clone());
            let error = Error::catch(made).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        Ok(())
    });
    result.unwrap();
}
