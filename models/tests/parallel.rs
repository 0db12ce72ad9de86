//! Training with plans gives what training on one device gives.

mod training;

use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::{
    Gather, Launcher, Placement, PlanPlacement, Replicate, Shard, ShardTensor, unshard,
};
use halocline_models::FieldTransformerConfig;
use halocline_models::parallel::{
    Plan, Store, Style, init_parallel, parallelize_module, sequence_parallel, transformer_encoder,
};
use halocline_ops::prelude::*;
use training::{Trained, compare, train, whole_gradients};

const WIDTH: usize = 12;

#[derive(Module, Debug)]
struct Model {
    embed: Linear,
    encoder: TransformerEncoder,
    head: Linear,
}

impl<X: Field<3>> Layer<X> for Model {
    type Output = X;

    fn forward(&self, x: X) -> X {
        let x = x.apply(&self.embed).apply(&self.encoder);
        x.apply(&self.head)
    }
}

fn encoder() -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(WIDTH, 20, 6, 2).with_dropout(0.0)
}

fn model(device: &Device) -> Model {
    Model {
        embed: LinearConfig::new(3, WIDTH).init(device),
        encoder: encoder().init(device),
        head: LinearConfig::new(WIDTH, 3).init(device),
    }
}

/// Tensor parallel: heads of attention, and the hidden features of the linear layers.
fn tensor_parallel() -> Plan {
    let [attention, feed_forward] = transformer_encoder(&encoder(), "encoder", "tensor");
    attention
        .merge(&feed_forward)
        .with_optional_axis("tensor")
        .with_optional_axis("data")
}

fn data(name: usize) -> TensorData {
    let values = (0..4 * 7 * 3).map(|i| ((i * 31 + name * 13) % 19) as f32 / 9.0 - 1.0);
    TensorData::new(values.collect::<Vec<_>>(), [4, 7, 3])
}

fn check(axes: &[(&str, usize)], placements: &[Placement], plan: &Plan, steps: usize) {
    let run = |axes: &[(&str, usize)], placements: &[Placement], plan: &Plan| -> Vec<Trained> {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let model = parallelize_module(world.init(model)?, &mesh, plan)?;
            let field = |name| {
                let whole = Tensor::<3>::from_data(data(name), world.device());
                ShardTensor::distribute(whole, &mesh, placements)
            };
            Ok(train(model, &field(0)?, &field(1)?, 1e-2, steps))
        });
        found.unwrap_or_else(|error| panic!("{axes:?} {placements:?}: {error}"))
    };
    let expected = run(&[("data", 1)], &[Replicate], &Plan::default()).remove(0);
    let (losses, _) = &expected;
    assert!(losses[steps - 1] < losses[0], "{losses:?}");
    for found in run(axes, placements, plan) {
        compare(&found, &expected, &format!("{axes:?} {placements:?}"));
    }
}

/// The whole parameters of a model.
fn values(model: &Model) -> Vec<TensorData> {
    let data = |linear: &Linear| {
        let bias = linear.bias.as_ref().expect("a bias");
        [linear.weight.val().into_data(), bias.val().into_data()]
    };
    let layer = &model.encoder.layers[1];
    [
        &model.embed,
        &layer.mha.query,
        &layer.pwff.linear_outer,
        &model.head,
    ]
    .map(data)
    .concat()
}

#[test]
fn models_that_are_built_sharded_have_the_values_of_whole_ones() {
    let plan = tensor_parallel().with_store(Store::new("**", "data"));
    let run = |axes: &[(&str, usize)]| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).seed(9).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            // After another module, as in a program.
            world.init(|device| LinearConfig::new(2, 2).init(device))?;
            Ok(values(&unshard(init_parallel(
                &world, &mesh, &plan, model,
            )?)?))
        });
        found.unwrap()
    };
    let expected = Launcher::local(1).seed(9).collect(|world| {
        world.init(|device| LinearConfig::new(2, 2).init(device))?;
        Ok(values(&world.init(model)?))
    });
    let expected = expected.unwrap().remove(0);
    for axes in [
        &[("data", 1)][..],
        &[("data", 2), ("tensor", 2)],
        &[("tensor", 3)],
    ] {
        for found in run(axes) {
            assert_eq!(found, expected, "{axes:?}");
        }
    }
}

/// Number of steps of the longer runs.
const STEPS: usize = 50;

#[test]
fn data_is_stored_in_shards() {
    let store = |gather| Plan::default().with_store(Store::new("**", "data").with_gather(gather));
    check(&[("data", 2)], &[Shard(0)], &store(Gather::EachPass), STEPS);
    check(&[("data", 3)], &[Shard(0)], &store(Gather::Once), 5);
}

#[test]
fn heads_and_features_are_sharded() {
    let plan = tensor_parallel();
    check(&[("tensor", 2)], &[Replicate], &plan, STEPS);
    check(&[("tensor", 3)], &[Replicate], &plan, STEPS);
    check(&[("tensor", 4)], &[Replicate], &plan, 5); // six heads on four ranks
}

#[test]
fn features_are_sharded_over_two_axes() {
    let [inner, outer] =
        ["inner", "outer"].map(|name| format!("encoder.layers.*.pwff.linear_{name}"));
    let columns = Style::colwise("b").with_output(PlanPlacement::Replicate);
    let plan = Plan::default()
        .with_layer(&inner, Style::colwise("a").with_unit(5))
        .with_layer(&inner, Style::rowwise("b"))
        .with_layer(&outer, Style::rowwise("a").with_unit(5))
        .with_layer(&outer, columns);
    check(&[("a", 2), ("b", 2)], &[Replicate, Replicate], &plan, 5);
    check(&[("b", 3), ("a", 2)], &[Replicate, Replicate], &plan, 5);
}

#[test]
fn tokens_are_sharded_between_layers() {
    let plan = sequence_parallel(&encoder(), "encoder", "tensor");
    check(&[("tensor", 2)], &[Shard(1)], &plan, STEPS);
    check(&[("tensor", 3)], &[Shard(1)], &plan, 5); // of seven tokens
}

#[test]
fn data_and_tensor_axes_work_together() {
    let plan = tensor_parallel().with_store(Store::new("**", "data"));
    check(
        &[("data", 2), ("tensor", 2)],
        &[Shard(0), Replicate],
        &plan,
        STEPS,
    );
    check(
        &[("tensor", 2), ("data", 2)],
        &[Replicate, Shard(0)],
        &plan,
        5,
    );
}

#[test]
fn data_domain_and_tensor_axes_work_together() {
    // Tokens over the domain: keys travel around its ring.
    let axes = [("data", 2), ("domain", 2), ("tensor", 2)];
    let plan = tensor_parallel().with_store(Store::new("**", "data").with_at_least(30));
    check(&axes, &[Shard(0), Shard(1), Replicate], &plan, STEPS);
    let both = Plan {
        stores: vec![Store::new("**", "data"), Store::new("**.weight", "domain")],
        ..tensor_parallel()
    };
    check(&axes, &[Shard(0), Shard(1), Replicate], &both, 5);
}

/// Gradients and values of a transformer of fields on a mesh of data, domain and tensor axes.
#[test]
fn a_transformer_of_fields_is_that_of_one_device() {
    let config = FieldTransformerConfig::new(2)
        .with_d_model(16)
        .with_heads(4)
        .with_blocks(3)
        .with_dense_blocks(1)
        .with_kernel([3, 5]);
    let run =
        |axes: &[(&str, usize)], placements: &[Placement], config: &FieldTransformerConfig| {
            let ranks = axes.iter().map(|(_, size)| size).product();
            let found = Launcher::local(ranks).seed(3).collect(|world| {
                let mesh = world.mesh_of(axes)?;
                let plan = (config.tensor_parallel("tensor"))
                    .with_store(Store::new("**", "data").with_at_least(20))
                    .with_optional_axis("tensor");
                let model = world.init(|device| config.init(device))?;
                let model = parallelize_module(model, &mesh, &plan)?;
                let values = (0..4 * 2 * 12 * 10).map(|i| ((i * 37) % 23) as f32 / 11.0 - 1.0);
                let data = TensorData::new(values.collect::<Vec<_>>(), [4, 2, 12, 10]);
                let whole = Tensor::<4>::from_data(data, &world.device().clone().inner());
                let x = ShardTensor::distribute(whole, &mesh, placements)?.require_grad();
                let y = x.clone().apply(&model);
                let gradients = mse_loss(y.clone(), x.clone() * 0.5, Reduction::Mean)?.backward();
                let mut found = vec![y.full_tensor().into_data()];
                let gradient = x.grad(&gradients).expect("a gradient");
                found.push(gradient.full_tensor().into_data());
                let gradients = whole_gradients(&model, &gradients).into_iter();
                found.extend(gradients.map(|(_, data)| data));
                Ok(found)
            });
            found
                .unwrap_or_else(|error| panic!("{axes:?} {placements:?}: {error}"))
                .remove(0)
        };
    for tokens in [0, 2] {
        let config = config.clone().with_tokens(tokens);
        let expected = run(&[("data", 1)], &[Replicate], &config);
        for (recompute, axes, placements) in [
            (
                false,
                &[("data", 2), ("lat", 2), ("tensor", 2)][..],
                &[Shard(0), Shard(2), Replicate][..],
            ),
            (true, &[("data", 2), ("tensor", 2)], &[Shard(0), Replicate]),
            (
                false,
                &[("data", 1), ("lon", 2), ("tensor", 3)],
                &[Shard(0), Shard(3), Replicate],
            ),
        ] {
            let found = run(axes, placements, &config.clone().with_recompute(recompute));
            assert_eq!(found.len(), expected.len());
            for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.shape(), expected.shape());
                let values = |data: &TensorData| data.iter::<f32>().collect::<Vec<_>>();
                let (found, expected) = (values(found), values(expected));
                let scale = expected.iter().fold(1e-3, |max: f32, x| max.max(x.abs()));
                let near = |(a, b): (&f32, &f32)| (a - b).abs() < 2e-5 * scale;
                let far = found.iter().zip(&expected).position(|pair| !near(pair));
                assert_eq!(
                    far, None,
                    "cell of {axes:?}, tokens {tokens}, result {which} of {scale:e}"
                );
            }
        }
    }
}
