//! Plans for the models of this crate and of burn: training with each is that of one device.

mod training;

use burn::module::Module;
use burn::nn::transformer::TransformerEncoderConfig;
use burn::tensor::{Device, Tensor, TensorData};
use halocline_core::{Launcher, Placement, Replicate, Shard, ShardTensor};
use halocline_models::parallel::{
    Plan, Store, init_parallel, sequence_parallel, transformer_encoder,
};
use halocline_models::{
    FieldTransformerConfig, FnoConfig, GraphCastNetConfig, GridMesh, SfnoConfig,
    SphereAttentionConfig, SurrogateCnnConfig, UNetConfig,
};
use halocline_ops::prelude::*;
use training::{Trained, compare, train};

/// Number of steps of the longer runs.
const STEPS: usize = 50;

/// Axes with their sizes, and the placements of a field.
type Place<'a> = (&'a [(&'a str, usize)], &'a [Placement]);

fn check<const D: usize, M>(
    shape: [usize; D],
    make: impl Fn(&Device) -> M + Sync,
    plan: &Plan,
    places: &[(Place<'_>, usize)],
) where
    M: Module + Layer<ShardTensor<D>, Output = ShardTensor<D>>,
{
    let run = |plan: &Plan, (axes, placements): Place<'_>, steps: usize| -> Vec<Trained> {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let found = Launcher::local(ranks).seed(7).collect(|world| {
            let mesh = world.mesh_of(axes)?;
            let model = init_parallel(&world, &mesh, plan, &make)?;
            let count = shape.iter().product::<usize>();
            let values = (0..count).map(|i| ((i * 37) % 23) as f32 / 11.0 - 1.0);
            let data = TensorData::new(values.collect::<Vec<_>>(), shape);
            let whole = Tensor::<D>::from_data(data, &world.device().clone().inner());
            let x = ShardTensor::distribute(whole, &mesh, placements)?;
            Ok(train(model, &x, &(x.clone() * 0.5), 3e-3, steps))
        });
        found.unwrap_or_else(|error| panic!("{axes:?} {placements:?}: {error}"))
    };
    let steps = places.iter().map(|(_, steps)| *steps);
    let steps = steps.max().expect("a place");
    let one: Place<'_> = (&[("data", 1)], &[Replicate]);
    let expected = run(&Plan::default(), one, steps).remove(0);
    let (losses, _) = &expected;
    assert!(losses[steps - 1] < losses[0], "{losses:?}");
    for (place, steps) in places {
        for found in run(plan, *place, *steps) {
            compare(&found, &expected, &format!("{place:?}"));
        }
    }
}

/// Adds storage over the data axis to a plan, for meshes that may lack its axes.
fn stored(plan: Plan) -> Plan {
    plan.with_store(Store::new("**", "data").with_at_least(20))
        .with_optional_axis("tensor")
        .with_optional_axis("data")
}

const DATA_2: Place<'_> = (&[("data", 2)], &[Shard(0)]);
const TENSOR_2: Place<'_> = (&[("tensor", 2)], &[Replicate]);
const TENSOR_3: Place<'_> = (&[("tensor", 3)], &[Replicate]);
const TENSOR_4: Place<'_> = (&[("tensor", 4)], &[Replicate]);
const BOTH: Place<'_> = (&[("data", 2), ("tensor", 2)], &[Shard(0), Replicate]);
const ALL: Place<'_> = (
    &[("data", 2), ("lat", 2), ("tensor", 2)],
    &[Shard(0), Shard(2), Replicate],
);

#[test]
fn unets() {
    let config = UNetConfig::new(2, 2).with_width(6).with_levels(1);
    let plan = stored(config.tensor_parallel("tensor"));
    let places = [
        (DATA_2, STEPS),
        (TENSOR_2, STEPS),
        (TENSOR_3, STEPS),
        (BOTH, STEPS),
        (ALL, STEPS),
        (TENSOR_4, 5), // six channels on four ranks
    ];
    check([4, 2, 9, 10], |device| config.init(device), &plan, &places);
}

#[test]
fn surrogates() {
    let config = SurrogateCnnConfig::new(2).with_width(5).with_blocks(2);
    let plan = stored(config.tensor_parallel("tensor"));
    let places = [(DATA_2, 3), (TENSOR_2, 3), (TENSOR_3, 3), (ALL, 3)];
    check([4, 2, 9, 10], |device| config.init(device), &plan, &places);
}

#[test]
fn fourier_operators() {
    for blocks in [2, 3] {
        let config = FnoConfig::new(2, 2, [5, 4])
            .with_width(6)
            .with_blocks(blocks)
            .with_projection(7);
        let plan = stored(config.tensor_parallel("tensor"));
        let places = [(DATA_2, 3), (TENSOR_2, 3), (TENSOR_4, 3), (ALL, 3)];
        check([4, 2, 9, 10], |device| config.init(device), &plan, &places);
    }
}

#[test]
fn spherical_fourier_operators() {
    let sht = Sht::new([9, 10], SphereGrid::Lobatto).unwrap();
    let config = SfnoConfig::new(2, 2).with_width(6).with_blocks(2);
    let plan = stored(config.tensor_parallel("tensor"));
    let places = [(DATA_2, 3), (TENSOR_2, 3), (TENSOR_4, 3), (ALL, 3)];
    check(
        [4, 2, 9, 10],
        |device| config.init(&sht, device),
        &plan,
        &places,
    );
    let inner = Sht::new([4, 8], SphereGrid::LegendreGauss).unwrap();
    let outer = sht.with_degrees(inner.degrees()).unwrap();
    let config = config.with_residual(true);
    check(
        [4, 2, 9, 10],
        |device| config.init_within([&outer, &inner], device),
        &plan,
        &places,
    );
}

#[test]
fn attention_on_the_sphere() {
    let near = GeodesicNeighborhood::new([7, 6], SphereGrid::Lobatto, Some(0.9)).unwrap();
    let config = SphereAttentionConfig::new(4, 4)
        .with_key_channels(Some(8))
        .with_qk_norm(true);
    let plan = stored(config.tensor_parallel("tensor"));
    let places = [(DATA_2, 3), (TENSOR_2, 3), (TENSOR_4, 3), (ALL, 3)];
    check(
        [4, 4, 7, 6],
        |device| config.init(&near, device),
        &plan,
        &places,
    );
}

#[test]
fn graphs_of_cells() {
    let position = |cell: i32| {
        [
            f64::from(80 - 20 * (cell / 10)),
            f64::from(36 * (cell % 10)),
        ]
    };
    let positions: Vec<[f64; 2]> = (0..90).map(position).collect();
    let mesh = GridMesh::new(&positions, 1).unwrap();
    let config = GraphCastNetConfig::new(2, 2).with_width(6).with_layers(1);
    let plan = stored(config.tensor_parallel("tensor"));
    let places = [(DATA_2, 3), (TENSOR_2, 3), (TENSOR_4, 3), (ALL, 3)];
    check(
        [4, 2, 9, 10],
        |device| config.init(&mesh, device),
        &plan,
        &places,
    );
}

#[test]
fn transformers_of_fields() {
    let config = FieldTransformerConfig::new(2)
        .with_d_model(24)
        .with_heads(3)
        .with_blocks(2)
        .with_dense_blocks(1)
        .with_tokens(2)
        .with_kernel([3, 5]);
    let plan = stored(config.tensor_parallel("tensor"));
    let places = [(DATA_2, STEPS), (TENSOR_3, STEPS), (ALL, STEPS)];
    check([4, 2, 12, 10], |device| config.init(device), &plan, &places);
}

#[test]
fn transformers_of_burn() {
    for norm_first in [false, true] {
        let config = TransformerEncoderConfig::new(12, 20, 6, 2)
            .with_dropout(0.0)
            .with_norm_first(norm_first);
        let make = |device: &Device| config.init(device);
        let [attention, feed_forward] = transformer_encoder(&config, "", "tensor");
        let heads = [(TENSOR_2, 3), (BOTH, 3)];
        check([4, 7, 12], make, &stored(attention.clone()), &heads);
        check([4, 7, 12], make, &stored(feed_forward.clone()), &heads);
        check(
            [4, 7, 12],
            make,
            &stored(attention.merge(&feed_forward)),
            &heads,
        );
        let sequence = stored(sequence_parallel(&config, "", "tensor"));
        let places: [(Place<'_>, usize); 2] = [
            ((&[("tensor", 3)], &[Shard(1)]), 3),
            ((&[("data", 2), ("tensor", 2)], &[Shard(0), Shard(1)]), 3),
        ];
        check([4, 7, 12], make, &sequence, &places);
    }
}
