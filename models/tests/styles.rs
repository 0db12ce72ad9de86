//! Styles that a plan may give a layer: values, gradients and placements are those that it asks for.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use halocline_core::{
    Error, Gather, Launcher, LayerKeys, Layout, OrRaise, ParamShard, Placement, PlanPlacement,
    RandomKey, Replicate, Result, Shard, ShardTensor, World, param_shards,
};
use halocline_models::parallel::{
    Axes, Plan, Style, distribute_module, distribute_module_with, parallelize_module,
};
use halocline_ops::prelude::*;
use halocline_ops::testing::difference;
use halocline_ops::{matmul, with_layer_placements};

/// A linear layer of a user.
#[derive(Module, Debug)]
struct Mix {
    weight: Param<Tensor<2>>,
}

impl<X: Field<3>> Layer<X> for Mix {
    type Output = X;

    fn forward(&self, x: X) -> X {
        with_layer_placements(&self.weight, x, |x| {
            let y = x.try_op(|x| matmul::linear(x, &self.weight, None));
            y.or_raise()
        })
    }
}

#[derive(Module, Debug)]
struct Model {
    first: Linear,
    mix: Mix,
    last: Linear,
    dropout: Dropout,
}

impl<X: Field<3>> Layer<X> for Model {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let x = x.apply(&self.first).apply(&self.dropout);
        x.apply(&self.mix).tanh().apply(&self.last)
    }
}

fn model(world: &World) -> Result<Model> {
    world.init(|device| Model {
        first: LinearConfig::new(6, 8).init(device),
        mix: Mix {
            weight: Param::from_tensor(Tensor::random(
                [8, 10],
                Distribution::Normal(0.0, 0.3),
                device,
            )),
        },
        last: LinearConfig::new(10, 6).init(device),
        dropout: DropoutConfig::new(0.3).init(),
    })
}

/// Result and gradient of the input by a plan, on ranks along one axis; and the placement of the result.
fn run(ranks: usize, placement: Placement, plan: &Plan) -> Result<([TensorData; 2], Placement)> {
    let found = Launcher::local(ranks).seed(3).collect(|world| {
        let mesh = world.mesh([("tensor", ranks)])?;
        let model = parallelize_module(model(&world)?, &mesh, plan)?;
        let normal = halocline_core::Distribution::Normal(0.0, 1.0);
        let x = ShardTensor::<3>::random(
            [2, 7, 6],
            normal,
            RandomKey::new(1, "x"),
            &mesh,
            &[placement],
        )?;
        let x = x.require_grad();
        LayerKeys::new(RandomKey::new(2, "layers")).install();
        let y = x.clone().apply(&model);
        let held = y.placements()[0];
        let gradients = y.clone().square().sum().backward();
        let gradient = x.grad(&gradients).expect("a gradient");
        let whole = |tensor: ShardTensor<3>| tensor.full_tensor().into_data();
        Ok(([whole(y), whole(gradient)], held))
    });
    Ok(found?.remove(0))
}

fn check(ranks: usize, placement: Placement, plan: &Plan, result: Placement) {
    let (expected, _) = run(1, Replicate, &Plan::default()).unwrap();
    let (found, held) =
        run(ranks, placement, plan).unwrap_or_else(|error| panic!("{plan:?}: {error}"));
    assert_eq!(held, result, "{plan:?}");
    for (found, expected) in found.iter().zip(&expected) {
        let off = difference(found, expected);
        assert!(off < 2e-5, "{plan:?}: {off:e}");
    }
}

/// Columns, with dropout on features that are sharded, a user's layer in rows, and what follows it.
#[test]
fn own_layers_and_dropout_follow_plans() {
    let plan = Plan::default()
        .with_kind_as("Mix", "Linear")
        .with_layer("first", Style::colwise("tensor"))
        .with_layer("mix", Style::rowwise("tensor"));
    for ranks in [2, 3] {
        check(ranks, Replicate, &plan, Replicate);
    }
    let error = run(
        2,
        Replicate,
        &Plan {
            kinds: Default::default(),
            ..plan
        },
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("a Mix") && error.contains("with_kind_as"),
        "{error}"
    );
}

#[test]
fn inputs_and_results_are_as_asked() {
    let layer = |style| Plan::default().with_layer("last", style);
    let axes = |along| Axes::from([("tensor".to_string(), along)]);
    let tokens = PlanPlacement::Shard(1);
    check(
        2,
        Replicate,
        &layer(Style::prepare_output("tensor", tokens)),
        Shard(1),
    );
    check(
        3,
        Shard(1),
        &layer(Style::prepare_input("tensor", PlanPlacement::Shard(0))),
        Shard(0),
    );
    let both = Style::PrepareInputOutput {
        input: axes(PlanPlacement::Fan),
        output: axes(tokens),
    };
    check(2, Shard(1), &layer(both), Shard(1));
    let sequence = Style::SequenceParallel {
        axis: "tensor".into(),
        dim: 0,
        output: Some(tokens),
    };
    check(2, Replicate, &layer(sequence), Shard(1));
}

/// Output channels of a convolution in groups, which stay whole.
#[test]
fn groups_of_convolutions_are_sharded() {
    #[derive(Module, Debug)]
    struct Grouped {
        conv: Conv2d,
    }

    let run = |ranks: usize, unit: usize| {
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh([("tensor", ranks)])?;
            let config = Conv2dConfig::new([6, 9], [3, 3]).with_groups(3);
            let make = |device: &Device| Grouped {
                conv: config.init(device),
            };
            let plan = Plan::default().with_layer(
                "conv",
                Style::colwise("tensor")
                    .with_unit(unit)
                    .with_output(PlanPlacement::Replicate),
            );
            let model = parallelize_module(world.init(make)?, &mesh, &plan)?;
            let key = RandomKey::new(1, "x");
            let uniform = halocline_core::Distribution::Uniform(-1.0, 1.0);
            let x = ShardTensor::<4>::random([1, 6, 5, 7], uniform, key, &mesh, &[Replicate])?;
            let x = x.require_grad();
            let y = Error::catch(|| x.clone().apply(&model.conv))?;
            let gradients = y.clone().square().sum().backward();
            let gradient = x.grad(&gradients).expect("a gradient");
            let whole = |x: ShardTensor<4>| x.full_tensor().into_data();
            Ok([whole(y), whole(gradient)])
        });
        found.map(|mut found| found.remove(0))
    };
    let expected = run(1, 3).unwrap();
    for ranks in [2, 3] {
        for (found, expected) in run(ranks, 3).unwrap().iter().zip(&expected) {
            let off = difference(found, expected);
            assert!(off < 1e-4, "{ranks}: {off:e}");
        }
    }
    let cut = run(2, 1).unwrap_err().to_string();
    assert!(cut.contains("unit = 3"), "{cut}");
}

/// A function gives the bits that a plan gives.
#[test]
fn modules_may_be_divided_by_a_function() {
    let found = Launcher::local(2).seed(5).run(|world| {
        let mesh = world.mesh([("tensor", 2)])?;
        let config = LinearConfig::new(4, 6);
        let make = || world.sync_module(config.init(world.device()), 0);
        let linear = make()?;
        let plan = Plan::default().with_layer("**", Style::colwise("tensor"));
        let planned = parallelize_module(linear.clone(), &mesh, &plan)?;
        let divided = distribute_module(linear, &mesh, |path, _| match path {
            "weight" => Some(vec![Shard(1)]),
            _ => Some(vec![Shard(0)]),
        })?;
        let layouts = |linear: &Linear| {
            let shards = param_shards(linear).into_values();
            shards
                .map(|shard| shard.layout().clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(layouts(&planned), layouts(&divided));
        assert_eq!(
            planned.weight.base().into_data(),
            divided.weight.base().into_data()
        );
        assert!(ParamShard::of(&planned.weight).is_some());
        Ok(())
    });
    found.unwrap();
}

#[test]
fn functions_stand_around_a_distributed_module() {
    let found = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("data", 2)])?;
        let linear = world.init(|device| LinearConfig::new(4, 6).init(device))?;
        let x = ShardTensor::<2>::ones([3, 4], &mesh, &[Replicate])?;
        let expected = x.clone().apply(&linear).full_tensor().into_data();
        let stored = |_: &str, shape: &[usize]| {
            let layout = Layout::new(mesh.shape(), shape, &[Shard(0)])?;
            let shard = ParamShard::new(layout, &mesh);
            shard.with_stored(&["data"], Gather::EachPass).map(Some)
        };
        let input = |x: ShardTensor<2>| x.redistribute(&[Shard(0)]);
        let output = |y: ShardTensor<2>| y.redistribute(&[Replicate]);
        let linear = distribute_module_with(linear, &mesh, stored, input, output)?;
        let shards = param_shards(&linear);
        assert_eq!(shards.keys().collect::<Vec<_>>(), ["bias", "weight"]);
        assert!(shards.values().all(|shard| shard.stored() == [0]));
        let y = x.apply(&linear);
        assert_eq!(y.placements(), [Replicate]);
        let y = y.full_tensor().into_data();
        y.assert_approx_eq::<f32>(&expected, Default::default());
        Ok(())
    });
    found.unwrap();
}

/// Ranks that have made a module by themselves have other values.
#[test]
fn ranks_with_other_values_are_told() {
    let result = Launcher::local(2).run(|world| {
        let mesh = world.mesh([("tensor", 2)])?;
        let values = Tensor::full([4, 4], world.rank() as f32, world.device());
        let model = Mix {
            weight: Param::from_tensor(values),
        };
        distribute_module(model, &mesh, |_, _| Some(vec![Shard(0)])).map(drop)
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("weight differs between rank 0"), "{error}");
}
