//! Tests of parameters stored in shards.

use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Tensor, TensorData};
use halocline_core::{
    CommStats, DeviceMesh, Error, Gather, Halos, Launcher, Layout, Overlap, ParamShard, Partial,
    ReduceOp, Replicate, Result, Shard, ShardTensor, Traffic, World, gather_ahead, param_shards,
    shard_parameters, unshard,
};

const INPUTS: usize = 5;
const OUTPUTS: usize = 3;

#[derive(Module, Debug)]
struct Model {
    first: Linear,
    second: Linear,
}

fn model(world: &World) -> Result<Model> {
    world.init(|device| Model {
        first: LinearConfig::new(INPUTS, 7).with_bias(false).init(device),
        second: LinearConfig::new(7, OUTPUTS).with_bias(false).init(device),
    })
}

/// Stores all parameters in shards of their first dim, over axis "data".
fn stored(model: Model, mesh: &DeviceMesh, gather: Gather) -> Result<Model> {
    stored_over(&["data"], model, mesh, gather)
}

/// Stores all parameters in shards of their first dims, over the first axes, which have these
/// names.
fn stored_over(axes: &[&str], model: Model, mesh: &DeviceMesh, gather: Gather) -> Result<Model> {
    shard_parameters(model, |_, shape| {
        let mut placements = vec![Replicate; mesh.shape().sizes().len()];
        (0..axes.len()).for_each(|axis| placements[axis] = Shard(axis));
        let layout = Layout::new(mesh.shape(), shape, &placements)?;
        Ok(Some(
            ParamShard::new(layout, mesh).with_stored(axes, gather)?,
        ))
    })
}

fn samples(mesh: &DeviceMesh, data: bool) -> Result<ShardTensor<2>> {
    let values = (0..8 * INPUTS).map(|i| ((i * 29) % 17) as f32 / 8.0 - 1.0);
    let data_of = TensorData::new(values.collect::<Vec<_>>(), [8, INPUTS]);
    let x = Tensor::<2>::from_data(data_of, mesh.device());
    let mut placements = vec![Replicate; mesh.shape().sizes().len()];
    if data {
        placements[0] = Shard(0);
    }
    ShardTensor::distribute(x, mesh, &placements)
}

/// The loss of a model whose parameters are combined with samples as operands.
fn loss(model: &Model, x: ShardTensor<2>) -> Result<ShardTensor<1>> {
    let operand = |linear: &Linear| -> Result<Tensor<2>> {
        let shard = ParamShard::of(&linear.weight).expect("a layout");
        Ok(shard.operand(linear.weight.base(), &x)?.into_local())
    };
    let (first, second) = (operand(&model.first)?, operand(&model.second)?);
    let y = x.local().clone().matmul(first).tanh().matmul(second);
    let placements = x.placements().iter().map(|placement| match placement {
        Shard(_) => Partial(ReduceOp::Sum),
        other => *other,
    });
    let layout = Layout::new(x.layout().mesh(), &[1], &placements.collect::<Vec<_>>())?;
    Ok(ShardTensor::from_parts(
        (y.clone() * y).sum(),
        layout,
        x.mesh().clone(),
    ))
}

/// Runs two optimizer steps and returns the whole parameters.
fn steps(
    world: &World,
    axes: &[(&str, usize)],
    data: bool,
    gather: Gather,
) -> Result<Vec<TensorData>> {
    let mesh = world.mesh_of(axes)?;
    let mut model = stored(model(world)?, &mesh, gather)?;
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..2 {
        let gradients = loss(&model, samples(&mesh, data)?)?.backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    assert_eq!(
        param_shards(&model.clone().valid()).len(),
        2,
        "layouts stay"
    );
    // As seen by a module that is unaware of shards.
    let whole = |linear: &Linear| linear.weight.val().into_data();
    Ok(vec![whole(&model.first), whole(&model.second)])
}

#[test]
fn steps_are_those_of_whole_parameters() {
    let run = |axes: &[(&str, usize)], data, gather| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).collect(|world| steps(&world, axes, data, gather));
        found.unwrap()
    };
    let expected = run(&[("data", 1)], true, Gather::Once).remove(0);
    for gather in [Gather::Once, Gather::EachPass] {
        for data in [true, false] {
            for axes in [
                &[("data", 2)][..],
                &[("data", 3)],
                &[("data", 2), ("lat", 2)],
            ] {
                for found in run(axes, data, gather) {
                    assert_eq!(found.len(), expected.len());
                    for (found, expected) in found.iter().zip(&expected) {
                        assert_eq!(found.shape(), expected.shape());
                        let mut pairs = found.iter::<f32>().zip(expected.iter::<f32>());
                        assert!(
                            pairs.all(|(a, b)| (a - b).abs() < 1e-5),
                            "{axes:?} {data} {gather:?}: {found}, expected {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn modules_made_in_shards_have_the_values_of_whole_ones() {
    let make = |sharded: bool| {
        let found = Launcher::local(2).seed(5).collect(|world| {
            let mesh = world.mesh([("tensor", 2)])?;
            let config = LinearConfig::new(INPUTS, 7);
            let linear = if sharded {
                let last = |_: &str, shape: &[usize]| -> Result<Option<ParamShard>> {
                    let layout = Layout::new(mesh.shape(), shape, &[Shard(shape.len() - 1)])?;
                    Ok(Some(ParamShard::new(layout, &mesh)))
                };
                world.init_sharded(
                    |device| config.init(device),
                    |_| Ok(()),
                    |linear, ()| shard_parameters(linear, last),
                )?
            } else {
                world.init(|device| config.init(device))?
            };
            assert_eq!(param_shards(&linear).is_empty(), !sharded);
            let linear = unshard(linear)?;
            let bias = linear.bias.expect("a bias").val();
            Ok([linear.weight.val().into_data(), bias.into_data()])
        });
        found.unwrap()
    };
    assert_eq!(make(true), make(false));
}

/// A plan may assign a layout to a whole parameter because its layer changes the layout of an
/// input.
#[test]
fn parameters_with_a_layout_that_ranks_hold_whole_are_sent() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let model = shard_parameters(model(&world)?, |_, shape| {
            let whole = Layout::replicated(mesh.shape(), shape);
            Ok(Some(ParamShard::new(whole, &mesh)))
        })?;
        let model = world.sync_module(model, 0)?;
        let shards = param_shards(&model);
        assert!(shards.len() == 2 && !shards.values().any(ParamShard::is_divided));
        Ok(())
    });
    result.unwrap();
}

/// After an error, a gather that was started ahead is not waited for.
#[test]
fn a_silent_rank_costs_the_timeout_once_while_gathers_are_ahead() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let launcher = Launcher::local(2).overlap(Overlap::On).check(false);
    let waited = launcher.timeout(TIMEOUT).collect(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let model = stored(model(&world)?, &mesh, Gather::Once)?;
        let step = || {
            let _ahead = gather_ahead(&model);
            Error::catch(|| [&model.first, &model.second].map(|linear| linear.weight.val()))
        };
        step()?;
        world.barrier()?;
        if !world.is_root() {
            std::thread::sleep(TIMEOUT * 5 / 2);
            return Ok(Duration::ZERO);
        }
        let start = Instant::now();
        assert!(step().is_err());
        Ok(start.elapsed())
    });
    let waited = waited.unwrap()[0];
    assert!(waited >= TIMEOUT && waited < TIMEOUT * 9 / 5, "{waited:?}");
}

/// Gathers that start ahead, and gradients that are scattered while a pass continues, return the
/// same bits with the same number of messages.
#[test]
fn gathers_ahead_have_the_same_bits() {
    type Found = (Vec<TensorData>, Vec<u64>);
    let run = |overlap: Overlap, gather: Gather, axes: &[(&str, usize)]| -> Vec<Found> {
        let launcher =
            Launcher::local(axes.iter().map(|(_, size)| size).product()).overlap(overlap);
        let found = launcher.collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let names: Vec<&str> = axes.iter().map(|(name, _)| *name).collect();
            let mut model = stored_over(&names, model(&world)?, &mesh, gather)?;
            let mut optimizer = AdamWConfig::new().init();
            let mut messages = Vec::new();
            for step in 0..4 {
                let before = world.comm_stats();
                let ahead = gather_ahead(&model);
                let x = samples(&mesh, true)?;
                let mut value = loss(&model, x.clone())?;
                if step == 2 {
                    // Another order of gathers, and a model with other values under the same paths.
                    let other = model.valid().map(&mut Scaled(2.0));
                    let doubled = loss(&other, x.inner())?;
                    value = value + doubled;
                }
                let gradients = value.backward();
                drop(ahead);
                let sent = world.comm_stats().since(&before);
                messages.push(sent.of(Traffic::Gather).messages);
                let gradients = GradientsParams::from_grads(gradients, &model);
                model = optimizer.step(1e-2, model, gradients);
            }
            let whole = |linear: &Linear| linear.weight.val().into_data();
            Ok((vec![whole(&model.first), whole(&model.second)], messages))
        });
        found.unwrap()
    };
    for (gather, axes) in [
        (Gather::Once, &[("data", 3)][..]),
        (Gather::EachPass, &[("data", 3)]),
        // Gathered in two stages: samples are sharded over one of the axes.
        (Gather::EachPass, &[("data", 2), ("lat", 2)]),
    ] {
        let [off, on] = [Overlap::Off, Overlap::On].map(|overlap| run(overlap, gather, axes));
        for ((off, messages), (on, ahead)) in off.iter().zip(&on) {
            assert_eq!(off, on, "{gather:?}");
            assert_eq!(messages[..2], ahead[..2], "{gather:?}");
        }
    }
}

/// Multiplies all parameters by a factor.
struct Scaled(f64);

impl ModuleMapper for Scaled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor * self.0, mapper)
    }
}

/// Messages of both passes: a gather forward; backward, a second gather, if any, and a scatter of
/// gradients.
#[test]
fn parameters_travel_once_a_pass() {
    let counts = |gather, data| {
        let all = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("data", 2)])?;
            let model = stored(model(&world)?, &mesh, gather)?;
            let x = samples(&mesh, data)?;
            let start = world.comm_stats();
            let loss = loss(&model, x)?;
            let forward = world.comm_stats();
            loss.backward();
            let count = |stats: CommStats| stats.of(Traffic::Gather).messages;
            Ok([
                count(forward.since(&start)),
                count(world.comm_stats().since(&forward)),
            ])
        });
        all.unwrap()[0]
    };
    assert_eq!(counts(Gather::Once, true), [2, 2]);
    assert_eq!(
        counts(Gather::EachPass, true),
        [2, 4 - 1],
        "the first layer's weight is not read again"
    );
    // All ranks compute the whole gradient, and each takes its rows.
    assert_eq!(counts(Gather::Once, false), [2, 0]);
}

/// A frozen parameter stays gathered until the backward pass, except in a recomputed block, which
/// gathers it again.
#[test]
fn recomputed_blocks_release_frozen_parameters() {
    fn block(model: &Model, x: ShardTensor<2>) -> ShardTensor<2> {
        let weight = &model.first.weight;
        let shard = ParamShard::of(weight).expect("a layout");
        let weight = shard.operand(weight.base(), &x).expect("a weight");
        let (local, layout, mesh) = x.into_parts();
        let y = local.matmul(weight.into_local());
        let layout = Layout::new(mesh.shape(), &[8, 7], layout.placements());
        ShardTensor::from_parts(y, layout.expect("a layout"), mesh)
    }

    let counts = |again: bool| {
        let all = Launcher::local(2).collect(|world| {
            let mesh = world.mesh([("data", 2)])?;
            let model = stored(model(&world)?, &mesh, Gather::EachPass)?.no_grad();
            let x = samples(&mesh, true)?.require_grad();
            let start = world.comm_stats();
            let y = if again {
                x.recompute(&model, Halos::Keep, block)
            } else {
                block(&model, x)
            };
            let forward = world.comm_stats();
            y.into_local().sum().backward();
            let count = |stats: CommStats| stats.of(Traffic::Gather).messages;
            Ok([
                count(forward.since(&start)),
                count(world.comm_stats().since(&forward)),
            ])
        });
        all.unwrap()[0]
    };
    assert_eq!(counts(false), [1, 0]);
    assert_eq!(counts(true), [1, 1]);
}

/// burn's operations on modules preserve layouts.
#[test]
fn layouts_travel_with_parameters() {
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let model = stored(model(&world)?, &mesh, Gather::EachPass)?;
        let expected = model.first.weight.base().into_data();
        let device = world.device();
        let record = model.clone().into_record();
        for (name, kept) in [
            ("clone", model.clone()),
            ("fork", model.clone().fork(device)),
            ("to_device", model.clone().to_device(device)),
            ("valid", model.valid()),
            ("train", model.valid().train()),
            ("no_grad", model.clone().no_grad()),
            ("map", model.clone().map(&mut Scaled(1.0))),
            ("load_record", model.clone().load_record(record)),
        ] {
            assert_eq!(param_shards(&kept).len(), 2, "{name}");
            assert_eq!(kept.first.weight.base().into_data(), expected, "{name}");
            let whole = kept.first.weight.val().dims();
            assert_eq!(whole, [INPUTS, 7], "{name}");
        }
        Ok(())
    });
    run.unwrap();
}

/// A record of whole parameters does not fit shards.
#[test]
fn records_of_other_shapes_are_refused() {
    let run = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let whole = model(&world)?;
        let record = whole.clone().into_record();
        let loaded = stored(whole, &mesh, Gather::Once)?.try_load_record(record);
        let error = loaded.map(drop).unwrap_err().to_string();
        assert!(error.contains("first.weight"), "{error}");
        Ok(())
    });
    run.unwrap();
}

/// A model whose two layers share their parameter.
fn tied(world: &World) -> Result<Model> {
    let one = model(world)?;
    Ok(Model {
        second: one.first.clone(),
        ..one
    })
}

/// A parameter that occurs in two places stays whole.
#[test]
fn tied_parameters_may_stay_whole() {
    let run =
        Launcher::local(2).run(|world| shard_parameters(tied(&world)?, |_, _| Ok(None)).map(drop));
    run.unwrap();
}

#[test]
fn bad_layouts_are_refused() {
    let message = |build: &(dyn Fn(&World) -> Result<()> + Sync)| {
        Launcher::local(2)
            .run(|world| build(&world))
            .unwrap_err()
            .to_string()
    };
    let twice = message(&|world| {
        let mesh = world.mesh([("data", 2)])?;
        let once = stored(model(world)?, &mesh, Gather::Once)?;
        stored(once, &mesh, Gather::Once).map(drop)
    });
    assert!(
        twice.contains("parameter first.weight is sharded"),
        "{twice}"
    );
    let shared = message(&|world| {
        let mesh = world.mesh([("data", 2)])?;
        stored(tied(world)?, &mesh, Gather::Once).map(drop)
    });
    assert!(
        shared.contains("first.weight and second.weight are one"),
        "{shared}"
    );
    let columns = message(&|world| {
        let mesh = world.mesh([("data", 2)])?;
        let config = LinearConfig::new(INPUTS, INPUTS).with_layout(LinearLayout::Col);
        let linear = world.init(|device| config.init(device))?;
        let model = Model {
            first: linear,
            ..model(world)?
        };
        stored(model, &mesh, Gather::Once).map(drop)
    });
    assert!(columns.contains("LinearLayout::Col"), "{columns}");
    let axis = message(&|world| {
        let mesh = world.mesh([("data", 2)])?;
        let layout = Layout::new(mesh.shape(), &[4, 4], &[Replicate])?;
        ParamShard::new(layout, &mesh)
            .with_stored(&["data"], Gather::Once)
            .map(drop)
    });
    assert!(axis.contains("Replicate on the axis \"data\""), "{axis}");
    let computed = message(&|world| {
        let mesh = world.mesh([("tensor", 2)])?;
        let model = shard_parameters(model(world)?, |_, shape| {
            let layout = Layout::new(mesh.shape(), shape, &[Shard(1)])?;
            Ok(Some(ParamShard::new(layout, &mesh)))
        })?;
        Error::catch(|| model.first.weight.val()).map(drop)
    });
    assert!(
        computed.contains("first.weight") && computed.contains("Shard(1)"),
        "{computed}"
    );
    let other = message(&|world| {
        let mesh = world.mesh([("data", 2)])?;
        let model = stored(model(world)?, &mesh, Gather::Once)?;
        let x = ShardTensor::<2>::ones([8, INPUTS], &world.mesh([("rows", 2)])?, &[Shard(0)])?;
        loss(&model, x).map(drop)
    });
    assert!(other.contains("another mesh"), "{other}");
}

#[test]
fn whole_parameters_are_seen_through_val() {
    let found = Launcher::local(3).collect(|world| {
        let mesh = world.mesh([("data", 3)])?;
        let model = model(&world)?;
        let whole = model.first.weight.val().into_data();
        let model = stored(model, &mesh, Gather::EachPass)?;
        assert_eq!(
            model.first.weight.dims(),
            [[2, 7], [2, 7], [1, 7]][world.rank()]
        );
        assert_eq!(model.first.weight.val().into_data(), whole);
        // burn's own layer, on tensors that are equal on all ranks.
        let x = samples(&mesh, false)?.to_local();
        let gradients = model.first.forward(x).sum().backward();
        let gradient = model.first.weight.grad(&gradients).expect("a gradient");
        assert_eq!(gradient.dims(), model.first.weight.dims());
        Ok(())
    });
    found.unwrap();
}
