//! Training on shards is training on one device: the same losses on every mesh, and no
//! communication other than planned.

use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2dConfig};
use burn::nn::pool::{AvgPool2dConfig, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig1d, PaddingConfig2d};
use halocline::core::Traffic;
use halocline::models::UNetConfig;
use halocline::prelude::*;

mod trainer;

use trainer::{SHAPE, sample, train};

#[test]
fn fifty_steps_have_the_same_losses_on_every_mesh() {
    let run = |axes: &[(&str, usize)], placements: &[Placement]| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let losses = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            Ok(train(&world, &mesh, placements, 50)?.0)
        });
        losses.unwrap()
    };
    let one = run(&[("lat", 1)], &[Shard(2)]).remove(0);
    assert!(
        one[49] < 0.9 * one[0],
        "training must get somewhere: {one:?}"
    );
    type Mesh<'a> = (&'a [(&'a str, usize)], &'a [Placement]);
    let meshes: [Mesh; 4] = [
        (&[("lat", 2)], &[Shard(2)]),
        (&[("lat", 2), ("lon", 2)], &[Shard(2), Shard(3)]),
        (&[("data", 2), ("lon", 2)], &[Shard(0), Shard(3)]),
        (&[("lat", 3)], &[Shard(2)]),
    ];
    for (axes, placements) in meshes {
        for losses in run(axes, placements) {
            for (step, (found, expected)) in losses.iter().zip(&one).enumerate() {
                let off = (found - expected).abs() / expected;
                assert!(off < 1e-4, "{axes:?}: step {step}: {found} and {expected}");
            }
        }
    }
}

/// Peers, 15: one blocking reduction for each parameter.
#[test]
fn buckets_give_the_bits_of_sums_one_by_one_with_fewer_messages() {
    let run = |buckets| {
        let results = Launcher::local(3).buckets(buckets).collect(|world| {
            let mesh = world.mesh([("lat", 3)])?;
            let (losses, sent) = train(&world, &mesh, &[Shard(2)], 5)?;
            Ok((losses, sent.of(Traffic::Reduce).messages))
        });
        results.unwrap().remove(0)
    };
    let ((losses, messages), (one_by_one, more)) = (run(true), run(false));
    assert_eq!(losses, one_by_one);
    assert!(messages < more, "{messages} and {more}");
}

#[test]
fn a_training_step_gathers_nothing() {
    let sent = Launcher::local(4).check(false).collect(|world| {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        Ok(train(&world, &mesh, &[Shard(2), Shard(3)], 2)?.1)
    });
    for sent in sent.unwrap() {
        assert_eq!(sent.of(Traffic::Redistribute).messages, 0);
        assert_eq!(sent.of(Traffic::Scatter).messages, 0);
        assert_eq!(sent.of(Traffic::Control).messages, 0);
        assert!(sent.of(Traffic::Exchange).messages > 0 && sent.of(Traffic::Reduce).messages > 0);
    }
}

#[test]
fn a_convolution_sends_the_halo_of_its_formula() {
    // 3×3 on a 2×2 mesh, zero padding: a rank sends a row, a column and a corner, forward and back.
    let [batch, channels, rows, columns] = SHAPE;
    let sent = Launcher::local(4).check(false).collect(|world| {
        let mesh = world.mesh([("lat", 2), ("lon", 2)])?;
        let config = Conv2dConfig::new([channels, 5], [3, 3]).with_padding(PaddingConfig2d::Same);
        let conv = world.init(|device| config.init(device))?;
        let x = sample("x", SHAPE, &mesh, &[Shard(2), Shard(3)])?.require_grad();
        let [_, _, high, wide] = x.local_dims();
        let before = world.comm_stats();
        let y = x.clone().apply(&conv);
        let forward = world.comm_stats().since(&before).of(Traffic::Exchange);
        let plan = x.plan_of(&conv)?;
        let before = world.comm_stats();
        y.mean().backward();
        let backward = world.comm_stats().since(&before).of(Traffic::Exchange);
        let bytes = |elements: usize| (elements * size_of::<f32>()) as u64;
        assert_eq!(forward.bytes, plan.bytes_sent() as u64);
        assert_eq!(backward.bytes, plan.bytes_received() as u64);
        assert_eq!(forward.bytes, bytes(batch * channels * (high + wide + 1)));
        assert_eq!(forward.messages, 3);
        Ok((high, wide))
    });
    let total: usize = sent.unwrap().iter().map(|(high, wide)| high * wide).sum();
    assert_eq!(total, rows * columns);
}

/// On one rank, a sharded tensor has the bits of a plain one, and of burn's own operator where
/// burn's kernel runs.
#[test]
fn one_rank_gives_the_bits_of_one_device() {
    Launcher::local(1)
        .run(|world| {
            let mesh = world.mesh([("lat", 1)])?;
            let x = sample("x", SHAPE, &mesh, &[Shard(2)])?;
            let plain = x.local().clone();
            let same = |found: ShardTensor<4>, burns: Tensor<4>| {
                found
                    .local()
                    .clone()
                    .into_data()
                    .assert_eq(&burns.into_data(), true);
            };
            let pool = MaxPool2dConfig::new([3, 2])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init();
            same(x.clone().apply(&pool), pool.forward(plain.clone()));
            let linear: Linear = world.init(|device| LinearConfig::new(18, 7).init(device))?;
            same(x.clone().apply(&linear), plain.clone().apply(&linear));
            same(x.clone().tanh(), plain.clone().tanh());
            same(x.max_dims(&[3]), plain.max_dim(3));
            Ok(())
        })
        .unwrap();
}

/// Where our kernels run, on one rank, a sharded tensor has the bits of the same kernel on a plain
/// tensor, and burn's values and gradients up to rounding.
#[test]
fn one_rank_gives_what_burns_kernels_give_but_for_rounding() {
    fn check<const D: usize>(
        x: &ShardTensor<D>,
        on_shards: impl Fn(ShardTensor<D>) -> ShardTensor<D>,
        on_one_device: impl Fn(Tensor<D>) -> Tensor<D>,
        by_burn: impl Fn(Tensor<D>) -> Tensor<D>,
    ) {
        let leaf = |tensor: &Tensor<D>| tensor.clone().detach().require_grad();
        let results = |x: Tensor<D>, y: Tensor<D>| {
            let gradients = (y.clone() * y.clone().detach().cos()).sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            [y.inner(), gradient].map(Tensor::into_data)
        };
        let shards = x.clone().detach().require_grad();
        let sharded = results(
            shards.local().clone(),
            on_shards(shards.clone()).into_local(),
        );
        let plain = leaf(x.local());
        let ours = results(plain.clone(), on_one_device(plain));
        let plain = leaf(x.local());
        let burns = results(plain.clone(), by_burn(plain));
        for ((sharded, ours), burns) in sharded.iter().zip(&ours).zip(&burns) {
            sharded.assert_eq(ours, true);
            let off = halocline::ops::testing::difference(sharded, burns);
            assert!(off < 1e-5, "off by {off:e}");
        }
    }
    Launcher::local(1)
        .run(|world| {
            let mesh = world.mesh([("lat", 1)])?;
            let x = sample("x", SHAPE, &mesh, &[Shard(2)])?;
            check(
                &x,
                |x| x.mean_dims(&[2, 3]).resolve(),
                |x| halocline::ops::prelude::ReduceField::mean_dims(x, &[2, 3]),
                |x| x.mean_dims(&[2, 3]),
            );
            for (stride, padding) in [
                ([1, 1], PaddingConfig2d::Same),
                ([2, 3], PaddingConfig2d::Explicit(1, 0, 2, 1)),
            ] {
                let config = Conv2dConfig::new([3, 4], [3, 5])
                    .with_stride(stride)
                    .with_padding(padding);
                let conv = world.init(|device| config.init(device))?;
                check(
                    &x,
                    |x| x.apply(&conv),
                    |x| x.apply(&conv),
                    |x| conv.forward(x),
                );
            }
            let pool = AvgPool2dConfig::new([2, 3]).with_strides([1, 2]).init();
            check(
                &x,
                |x| x.apply(&pool),
                |x| x.apply(&pool),
                |x| pool.forward(x),
            );
            let lines = sample("lines", [2, 3, 20], &mesh, &[Shard(2)])?;
            let config = Conv1dConfig::new(3, 2, 4).with_padding(PaddingConfig1d::Same);
            let conv: Conv1d = world.init(|device| config.init(device))?;
            check(
                &lines,
                |x| x.apply(&conv),
                |x| x.apply(&conv),
                |x| conv.forward(x),
            );
            let burns = burn::tensor::activation::gelu;
            check(&x, ActivationField::gelu, ActivationField::gelu, burns);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_unet_on_odd_shards_is_the_unet_on_one_device() {
    let run = |ranks: usize, [lat, lon]: [usize; 2]| {
        let results = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("lat", ranks)])?;
            let model = world.init(|device| UNetConfig::new(3, 2).with_width(4).init(device))?;
            let x = sample("x", [1, 3, lat, lon], &mesh, &[Shard(2)])?.require_grad();
            let y = x.clone().apply(&model);
            assert_eq!(y.dims(), [1, 2, lat, lon]);
            let loss = mse_loss(y.clone(), y.clone().detach() * 0.5, Reduction::Mean)?;
            let gradient = x.grad(&loss.backward()).expect("a gradient");
            Ok([y, gradient].map(|t| t.full_tensor().into_data()))
        });
        results.unwrap().remove(0)
    };
    for grid in [[12, 8], [13, 10]] {
        let one = run(1, grid);
        for ranks in [2, 3, 5] {
            for (found, expected) in run(ranks, grid).iter().zip(&one) {
                let off = halocline::ops::testing::difference(found, expected);
                assert!(off < 1e-5, "{ranks} ranks: off by {off:e}");
            }
        }
    }
}

#[test]
fn a_dry_run_finds_the_messages_of_a_whole_model() {
    let messages = Launcher::local(3).check(false).collect(|world| {
        let mesh = world.mesh([("lat", 3)])?;
        let model = world.init(|device| UNetConfig::new(3, 2).with_width(4).init(device))?;
        let x = sample("x", [1, 3, 13, 10], &mesh, &[Shard(2)])?;
        let before = world.comm_stats();
        let planned = x.plan_of(&model)?;
        assert_eq!(world.comm_stats(), before, "nothing is sent");
        x.apply(&model);
        let sent = world.comm_stats().since(&before);
        for traffic in Traffic::ALL {
            let planned = planned.bytes_sent_for(traffic) as u64;
            assert_eq!(planned, sent.of(traffic).bytes, "{traffic:?}");
        }
        assert!(planned.bytes_sent() > 0 && planned.bytes_received() > 0);
        Ok(planned.to_string())
    });
    let listed = &messages.unwrap()[1];
    let halos = "conv2d on [1, 3, 13, 10] lat(3):Shard(2)[5, 4, 4], in F32\nexchange";
    assert!(listed.starts_with(halos), "{listed}");
    assert!(listed.contains("  send to    0 "), "{listed}");
}
