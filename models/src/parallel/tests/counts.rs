//! Collectives of each style, forward and backward.

use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Int, Tensor};
use halocline_core::comm::Operation;
use halocline_core::{
    CommStats, DeviceMesh, Gather, Launcher, Placement, PlanPlacement, ReduceOp, Replicate, Result,
    Shard, ShardTensor, Traffic, World, ops,
};
use halocline_ops::prelude::*;

use crate::parallel::{
    Plan, Store, Style, parallelize_module, sequence_parallel, transformer_encoder,
};

/// Collectives of a pass: all-gathers and reduce-scatters of fields, all-reduces, and gathers and
/// scatters of parameters.
type Counts = [u64; 3];

#[derive(Module, Debug)]
struct Layers {
    enter: Reshard,
    first: Linear,
    second: Linear,
    third: Linear,
    norm: LayerNorm,
    words: Embedding,
}

fn layers(world: &World) -> Result<Layers> {
    let linear = |device: &_| LinearConfig::new(8, 8).with_bias(false).init(device);
    world.init(|device| Layers {
        enter: Reshard::default(),
        first: linear(device),
        second: linear(device),
        third: linear(device),
        norm: LayerNormConfig::new(8).init(device),
        words: EmbeddingConfig::new(10, 8).init(device),
    })
}

/// Returns the collectives in both passes of a function of `[batch, tokens, features]`, on two
/// ranks.
fn counts(
    plan: &Plan,
    placement: Placement,
    run: fn(&Layers, ShardTensor<3>) -> ShardTensor<3>,
) -> [Counts; 2] {
    counts_of(layers, plan, |mesh| {
        let x = ShardTensor::<3>::ones([2, 6, 8], mesh, &[placement])?.require_grad();
        Ok(Box::new(move |model: &Layers| {
            let y = run(model, x);
            (y.clone() * y).sum()
        }))
    })
}

type Loss<M> = Box<dyn FnOnce(&M) -> ShardTensor<1>>;

fn counts_of<M: Module>(
    make: fn(&World) -> Result<M>,
    plan: &Plan,
    prepare: impl Fn(&DeviceMesh) -> Result<Loss<M>> + Sync,
) -> [Counts; 2] {
    counts_on(&[("tensor", 2)], make, plan, prepare)
}

/// The same on a mesh whose axes have two ranks each.
fn counts_on<M: Module>(
    axes: &[(&str, usize)],
    make: fn(&World) -> Result<M>,
    plan: &Plan,
    prepare: impl Fn(&DeviceMesh) -> Result<Loss<M>> + Sync,
) -> [Counts; 2] {
    let found = Launcher::local(1 << axes.len()).collect(|world| {
        let mesh = world.mesh_of(axes)?;
        let model = parallelize_module(make(&world)?, &mesh, plan)?;
        let reduces = |stats: &CommStats| stats.of(Traffic::Reduce).messages;
        let before = world.comm_stats();
        let one = Tensor::<1>::ones([1], world.device());
        let operation = Operation::new("one", Traffic::Reduce, None);
        ops::all_reduce(one, &mesh, &[0], ReduceOp::Sum, operation);
        let messages = reduces(&world.comm_stats().since(&before));
        let loss = prepare(&mesh)?;
        let start = world.comm_stats();
        let loss = loss(&model);
        let forward = world.comm_stats();
        loss.backward();
        let backward = world.comm_stats().since(&forward);
        let collectives = |stats: CommStats| {
            let sent = |traffic| stats.of(traffic).messages;
            let reduced = reduces(&stats);
            assert!(reduced.is_multiple_of(messages), "{stats}");
            [
                sent(Traffic::Redistribute),
                reduced / messages,
                sent(Traffic::Gather),
            ]
        };
        Ok([forward.since(&start), backward].map(collectives))
    });
    found.unwrap()[0]
}

const NOTHING: Counts = [0, 0, 0];
const REDUCE: Counts = [0, 1, 0];
const MOVE: Counts = [1, 0, 0];

#[test]
fn styles_send_what_the_table_says() {
    let first = |style| Plan::default().with_layer("first", style);
    let one = |model: &Layers, x: ShardTensor<3>| x.apply(&model.first);
    let colwise = || first(Style::colwise("tensor"));
    assert_eq!(counts(&colwise(), Replicate, one), [NOTHING, REDUCE]);
    assert_eq!(counts(&colwise(), Shard(1), one), [MOVE, MOVE]);
    let rowwise = || first(Style::rowwise("tensor"));
    assert_eq!(counts(&rowwise(), Shard(2), one), [REDUCE, NOTHING]);
    let scattered = first(Style::rowwise("tensor").with_output(PlanPlacement::Shard(1)));
    assert_eq!(counts(&scattered, Shard(2), one), [MOVE, MOVE]);
}

#[test]
fn columns_then_rows_are_one_sum_each_way() {
    let plan = |output| {
        Plan::default()
            .with_layer("first", Style::colwise("tensor"))
            .with_layer("second", Style::rowwise("tensor").with_output(output))
    };
    let mlp = |model: &Layers, x: ShardTensor<3>| x.apply(&model.first).gelu().apply(&model.second);
    let whole = plan(PlanPlacement::Replicate);
    assert_eq!(counts(&whole, Replicate, mlp), [REDUCE, REDUCE]);
    // Tokens are gathered and scattered again.
    let tokens = plan(PlanPlacement::Shard(1));
    assert_eq!(counts(&tokens, Shard(1), mlp), [[2, 0, 0], [2, 0, 0]]);
}

/// Columns over one axis and rows over the other, and the reverse: one sum a layer, each way.
#[test]
fn entries_over_two_axes_are_joined() {
    let plan = Plan::default()
        .with_layer("first", Style::colwise("a"))
        .with_layer("first", Style::rowwise("b"))
        .with_layer("second", Style::rowwise("a"))
        .with_layer("second", Style::colwise("b"));
    let found = counts_on(&[("a", 2), ("b", 2)], layers, &plan, |mesh| {
        let placements = [Replicate, Shard(2)];
        let x = ShardTensor::<3>::ones([2, 6, 8], mesh, &placements)?.require_grad();
        Ok(Box::new(move |model: &Layers| {
            assert_eq!(model.first.weight.dims(), [4, 4]);
            let y = x.apply(&model.first).gelu().apply(&model.second);
            (y.clone() * y).sum()
        }))
    });
    assert_eq!(found, [[0, 2, 0]; 2]);
}

#[test]
fn three_layers_share_what_is_prepared_once() {
    let plan = Plan::default()
        .with_layer("{first,second,third}", Style::colwise("tensor"))
        .with_layer("enter", Style::prepare_input("tensor", PlanPlacement::Fan));
    fn each(model: &Layers, x: ShardTensor<3>) -> ShardTensor<3> {
        let all = [&model.first, &model.second, &model.third];
        let [a, b, c] = all.map(|linear| x.clone().apply(linear));
        a + b + c
    }
    let prepared = |model: &Layers, x: ShardTensor<3>| each(model, x.apply(&model.enter));
    assert_eq!(counts(&plan, Shard(1), prepared), [MOVE, MOVE]);
    assert_eq!(counts(&plan, Replicate, prepared), [NOTHING, REDUCE]);
    assert_eq!(counts(&plan, Shard(1), each), [[3, 0, 0], [3, 0, 0]]);
}

#[test]
fn norms_of_sequences_sum_parameters_in_one_bucket() {
    let plan = Plan::default().with_layer("norm", Style::sequence_parallel("tensor"));
    let norm = |model: &Layers, x: ShardTensor<3>| x.apply(&model.norm);
    assert_eq!(counts(&plan, Shard(1), norm), [NOTHING, REDUCE]);
}

#[test]
fn stored_parameters_are_gathered_for_each_pass() {
    let store =
        |gather| Plan::default().with_store(Store::new("*.weight", "tensor").with_gather(gather));
    // The backward pass of the second layer reads its weight, as does that of the first, for the
    // gradient of x.
    let two = |model: &Layers, x: ShardTensor<3>| x.apply(&model.first).apply(&model.second);
    assert_eq!(
        counts(&store(Gather::EachPass), Shard(0), two),
        [[0, 0, 2], [0, 0, 4]]
    );
    assert_eq!(
        counts(&store(Gather::Once), Shard(0), two),
        [[0, 0, 2], [0, 0, 2]]
    );
}

#[test]
fn embeddings_and_losses_send_what_the_table_says() {
    let indices = |mesh: &DeviceMesh| {
        let index = Tensor::<2, Int>::from_ints([[1, 9, 4], [0, 0, 7]], mesh.device());
        ShardTensor::distribute(index, mesh, &[Replicate])
    };
    let rows = Plan::default().with_layer("words", Style::rowwise("tensor"));
    let looked_up = counts_of(layers, &rows, |mesh| {
        let index = indices(mesh)?;
        Ok(Box::new(move |model: &Layers| {
            let y = index.apply(&model.words);
            (y.clone() * y).sum()
        }))
    });
    assert_eq!(looked_up, [REDUCE, NOTHING]);
    let classes = counts_of(layers, &Plan::default(), |mesh| {
        let logits = ShardTensor::<2>::ones([3, 7], mesh, &[Shard(1)])?.require_grad();
        let target = Tensor::<1, Int>::from_ints([6, 0, 2], mesh.device());
        let target = ShardTensor::distribute(target, mesh, &[Replicate])?;
        let options = CrossEntropyOptions::default().with_label_smoothing(0.1);
        Ok(Box::new(move |_: &Layers| {
            cross_entropy(logits, target, &options, Reduction::Mean).unwrap()
        }))
    });
    assert_eq!(classes, [[0, 2, 0], NOTHING]);
}

/// A step of two layers, each with attention and feed-forward layers, norms and biases.
#[test]
fn steps_of_transformers_send_what_their_layers_send() {
    const LAYERS: u64 = 2;

    fn config() -> TransformerEncoderConfig {
        TransformerEncoderConfig::new(8, 16, 2, LAYERS as usize).with_dropout(0.0)
    }

    let step = |plan: &Plan, placement: Placement| {
        let make = |world: &World| world.init(|device| config().init(device));
        counts_of(make, plan, |mesh| {
            let x = ShardTensor::<3>::ones([2, 6, 8], mesh, &[placement])?.require_grad();
            Ok(Box::new(move |model: &TransformerEncoder| {
                x.apply(model).square().sum()
            }))
        })
    };
    let [attention, feed_forward] = transformer_encoder(&config(), "", "tensor");
    let sums = [0, 2 * LAYERS, 0];
    assert_eq!(step(&attention.merge(&feed_forward), Replicate), [sums; 2]);
    // Tokens are gathered and scattered twice per layer in each pass; gradients of norms, and of
    // the biases added to shards of tokens, form one sum.
    let moves = 4 * LAYERS;
    let sequence = sequence_parallel(&config(), "", "tensor");
    let expected = [[moves, 0, 0], [moves, 1, 0]];
    assert_eq!(step(&sequence, Shard(1)), expected);
}
