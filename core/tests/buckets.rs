//! Gradients of parameters in buckets: which ranks sum which gradients together.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Tensor, TensorData};
use halocline_core::ops::{fan_out, fan_out_with};
use halocline_core::{
    DeviceMesh, Gather, Halos, Launcher, Layout, Overlap, ParamShard, Partial, ReduceOp, Result,
    Shard, ShardTensor, Traffic, World, shard_parameters,
};

/// Makes a parameter that is equal on all ranks.
fn parameter(world: &World, shape: [usize; 2]) -> Tensor<2> {
    Tensor::ones(shape, world.device()).require_grad()
}

/// This rank's contribution to a loss over a mesh: the sum of parameters, each times a factor.
fn loss(mesh: &DeviceMesh, terms: &[(&Tensor<2>, f32)]) -> Result<ShardTensor<1>> {
    let axes: Vec<usize> = (0..mesh.shape().sizes().len()).collect();
    let term = |(parameter, factor): &(&Tensor<2>, f32)| {
        (fan_out((*parameter).clone(), mesh, &axes, "term") * *factor).sum()
    };
    let sum = terms.iter().map(term).reduce(|lhs, rhs| lhs + rhs);
    let partial = vec![Partial(ReduceOp::Sum); axes.len()];
    let layout = Layout::new(mesh.shape(), &[1], &partial)?;
    ShardTensor::from_local(sum.expect("a term"), mesh, &layout)
}

/// Returns the gradient of a loss with respect to a parameter, which is the same in all cells.
fn gradient(loss: &ShardTensor<1>, parameter: &Tensor<2>) -> f32 {
    let gradient = parameter.grad(&loss.backward()).expect("a gradient");
    let cells: Vec<f32> = gradient.into_data().iter().collect();
    assert!(cells.iter().all(|cell| *cell == cells[0]), "{cells:?}");
    cells[0]
}

#[test]
fn a_loss_of_one_rank_leaves_the_buckets_of_all() {
    let gradients = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let weight = parameter(&world, [3, 4]);
        let shared = loss(&mesh, &[(&weight, 1.0 + world.rank() as f32)])?;
        if world.is_root() {
            let own = parameter(&world, [3, 4]);
            let local = ShardTensor::solo((own.clone() * 5.0).sum());
            assert_eq!(gradient(&local, &own), 5.0);
        }
        Ok(gradient(&shared, &weight))
    });
    assert_eq!(gradients.unwrap(), [3.0, 3.0]);
}

#[test]
fn a_loss_of_a_submesh_leaves_the_buckets_of_others() {
    let gradients = Launcher::local(4).collect(|world| {
        let mesh = world.mesh([("data", 2), ("lat", 2)])?;
        let rows = mesh.submesh(&["lat"])?;
        let weight = parameter(&world, [3, 4]);
        let shared = loss(&mesh, &[(&weight, 1.0 + world.rank() as f32)])?;
        if mesh.coords()[0] == 0 {
            let own = parameter(&world, [3, 4]);
            let of_row = loss(&rows, &[(&own, 1.0 + world.rank() as f32)])?;
            assert_eq!(gradient(&of_row, &own), 3.0);
        }
        Ok(gradient(&shared, &weight))
    });
    assert_eq!(gradients.unwrap(), [10.0; 4]);
}

/// Detected by the buckets or, with checks enabled, by the operator that uses the parameters.
#[test]
fn parameters_in_another_order_are_an_error() {
    let error = |check| {
        let result = Launcher::local(2).check(check).run(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let (wide, high) = (parameter(&world, [3, 4]), parameter(&world, [4, 3]));
            let mut terms = [(&wide, 1.0), (&high, 10.0)];
            if world.rank() == 1 {
                terms.reverse();
            }
            loss(&mesh, &terms)?.backward();
            Ok(())
        });
        result.unwrap_err().to_string()
    };
    let unchecked = error(false);
    assert!(unchecked.contains("ranks diverged"), "{unchecked}");
    for order in ["24 F32 of [[4, 3], [3, 4]]", "24 F32 of [[3, 4], [4, 3]]"] {
        assert!(unchecked.contains(order), "no {order:?} in {unchecked}");
    }
    let checked = error(true);
    assert!(
        checked.contains("rank 1 holds another tensor ([4, 3] of F32)"),
        "{checked}"
    );
}

/// A use that the loss does not reach only delays the sum.
#[test]
fn a_parameter_with_several_uses_is_summed_once() {
    let bytes = |factors: &[f32], is_abandoned: bool| {
        let sent = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let weight = parameter(&world, [3, 4]);
            let _abandoned = if is_abandoned {
                Some(loss(&mesh, &[(&weight, 5.0)])?)
            } else {
                None
            };
            let terms: Vec<_> = factors.iter().map(|factor| (&weight, *factor)).collect();
            let loss = loss(&mesh, &terms)?;
            let before = world.comm_stats();
            assert_eq!(gradient(&loss, &weight), 14.0);
            let sent = world.comm_stats().since(&before);
            Ok(sent.of(Traffic::Reduce).bytes)
        });
        sent.unwrap()
    };
    let once = bytes(&[7.0], false);
    for is_abandoned in [false, true] {
        assert_eq!(bytes(&[1.0, 2.0, 4.0], is_abandoned), once);
    }
}

/// A sum of ones in bf16 would stop at 256.
#[test]
fn uses_of_a_parameter_in_half_precision_add_up_in_f32() {
    let gradients = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("lat", 2)])?;
        let weight = Tensor::<2>::ones([3, 4], (world.device(), DType::BF16)).require_grad();
        let loss = loss(&mesh, &[(&weight, 1.0); 300])?;
        Ok(gradient(&loss, &weight))
    });
    assert_eq!(gradients.unwrap(), [600.0; 2]);
}

/// A rank that uses parameters alone finds another last use of them than the others.
#[test]
fn uses_by_one_rank_alone_mix_no_gradients() {
    let sums = |alone: &[usize]| {
        Launcher::local(2).check(false).collect(|world| {
            let mesh = world.mesh([("lat", 2)])?;
            let weights = [(); 2].map(|()| parameter(&world, [3, 4]));
            let alone = alone.iter().filter(|_| world.is_root());
            let alone = alone.map(|index| fan_out(weights[*index].clone(), &mesh, &[0], "term"));
            let _abandoned: Vec<_> = alone.collect();
            let [one, other] = &weights;
            let loss = loss(&mesh, &[(one, 1.0), (other, 10.0), (one, 2.0)])?;
            let gradients = loss.backward();
            let gradient = |weight: Tensor<2>| weight.grad(&gradients).expect("a gradient");
            Ok(weights.map(|weight| gradient(weight).sum().into_scalar::<f32>()))
        })
    };
    assert_eq!(sums(&[0, 1]).unwrap(), [[72.0, 240.0]; 2]);
    for index in [0, 1] {
        match sums(&[index]) {
            Ok(sums) => assert_eq!(sums, [[72.0, 240.0]; 2]),
            Err(error) => assert!(error.to_string().contains("ranks diverged"), "{error}"),
        }
    }
}

/// Multiplies the rows of a field by a weight, several times.
fn block(linear: &Linear, x: ShardTensor<2>, uses: usize) -> ShardTensor<2> {
    (0..uses).fold(x, |x, _| {
        let weight = match ParamShard::of(&linear.weight) {
            Some(shard) => {
                let weight = shard.operand(linear.weight.base(), &x);
                weight.expect("a weight").into_local()
            }
            None => fan_out_with(linear.weight.val(), x.local(), x.mesh(), &[0], "weight"),
        };
        let (local, layout, mesh) = x.into_parts();
        ShardTensor::from_parts(local.matmul(weight).tanh(), layout, mesh)
    })
}

/// Runs a block within a number of recomputed ones.
fn recomputed(linear: &Linear, x: ShardTensor<2>, uses: usize, levels: usize) -> ShardTensor<2> {
    match levels {
        0 => block(linear, x, uses),
        _ => x.recompute(linear, Halos::Keep, move |linear, x| {
            recomputed(linear, x, uses, levels - 1)
        }),
    }
}

/// Runs three blocks, and returns the gradient of their weight, and the bytes of sums.
fn three_blocks(
    overlap: Overlap,
    is_stored: bool,
    uses: usize,
    levels: usize,
) -> Vec<(TensorData, u64)> {
    let found = Launcher::local(2).overlap(overlap).collect(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let linear = world.init(|device| LinearConfig::new(3, 3).with_bias(false).init(device))?;
        let linear = shard_parameters(linear, |_, shape| {
            if !is_stored {
                return Ok(None);
            }
            let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
            let shard = ParamShard::new(layout, &mesh);
            Ok(Some(shard.with_stored(&["data"], Gather::EachPass)?))
        })?;
        let values = (0..12).map(|i| ((i * 5) % 7) as f32 / 4.0 - 0.7);
        let values = TensorData::new(values.collect::<Vec<_>>(), [4, 3]);
        let x = Tensor::<2>::from_data(values, mesh.device());
        let mut y = ShardTensor::distribute(x, &mesh, &[Shard(0)])?;
        let before = world.comm_stats();
        for _ in 0..3 {
            y = recomputed(&linear, y, uses, levels);
        }
        let layout = Layout::new(mesh.shape(), &[1], &[Partial(ReduceOp::Sum)])?;
        let loss = ShardTensor::from_parts(y.into_local().square().sum(), layout, mesh);
        let gradients = loss.backward();
        let gradient = linear.weight.grad(&gradients).expect("a gradient");
        let sent = world.comm_stats().since(&before);
        Ok((gradient.into_data(), sent.of(Traffic::Reduce).bytes))
    });
    found.unwrap()
}

#[test]
fn recomputed_blocks_with_several_uses_have_the_same_bits_and_bytes() {
    for (is_stored, uses) in [(false, 2), (true, 1)] {
        for overlap in [Overlap::Off, Overlap::On] {
            let run = |levels| three_blocks(overlap, is_stored, uses, levels);
            let kept = run(0);
            for again in [run(1), run(2)] {
                for ((again, sent), (kept, expected)) in again.iter().zip(&kept) {
                    again.assert_eq(kept, true);
                    assert_eq!(sent, expected);
                }
            }
        }
    }
}
