//! Messages that attention sends: none for bad input, and those that a plan lists.

use burn::nn::attention::MultiHeadAttentionConfig;
use halocline_core::{
    DeviceMesh, Distribution, Launcher, Layout, Overlap, Placement, RandomKey, Replicate, Result,
    Shard, ShardTensor, Traffic,
};
use serde_json::Value;

use super::*;
use crate::prelude::*;

/// Checks that a program fails on both of two ranks with a message that contains these parts,
/// before anything is sent.
fn refused(parts: &[&str], program: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync) {
    let messages = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("x", 2)])?;
        let before = world.comm_stats();
        let refused = program(&mesh).expect_err("an error").to_string();
        assert_eq!(
            world.comm_stats(),
            before,
            "sent before the error {refused:?}"
        );
        Ok(refused)
    });
    for message in messages.unwrap() {
        for part in parts {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    }
}

fn ones<const D: usize>(
    mesh: &DeviceMesh,
    shape: [usize; D],
    placement: Placement,
) -> Result<ShardTensor<D>> {
    ShardTensor::ones(shape, mesh, &[placement])
}

#[test]
fn bad_neighborhoods_are_refused_before_anything_is_sent() {
    const SHAPE: [usize; 4] = [1, 12, 4, 8];
    let near = |[q, k, v]: [[usize; 4]; 3], options: NeighborhoodOptions<1>| {
        move |mesh: &DeviceMesh| {
            let field = |shape| ones(mesh, shape, Shard(1));
            neighborhood_attention(field(q)?, field(k)?, field(v)?, &options).map(drop)
        }
    };
    let three = NeighborhoodOptions::new([3]);
    refused(
        &[
            "na1d: dim 1: kernel 13 × dilation 1 is 13 cells",
            "expected 1 to 12, the size of the field",
        ],
        near([SHAPE; 3], NeighborhoodOptions::new([13])),
    );
    refused(
        &["kernel 1", "at least 2"],
        near([SHAPE; 3], NeighborhoodOptions::new([1])),
    );
    refused(
        &["kernel 3 × dilation 5 is 15 cells", "expected 1 to 12"],
        near([SHAPE; 3], three.with_dilation([5])),
    );
    refused(
        &["dilation 18446744073709551615", "expected 1 to 12"],
        near([SHAPE; 3], three.with_dilation([usize::MAX])),
    );
    refused(
        &["stride 4", "expected 1 to 3"],
        near([SHAPE; 3], three.with_stride([4])),
    );
    let ten = [1, 10, 4, 8];
    refused(
        &["dilation 3", "the 10 cells of a periodic dim"],
        near([ten; 3], three.with_dilation([3]).with_periodic([true])),
    );
    let heads = [1, 12, 3, 8];
    refused(
        &["[1, 12, 4, 8]", "[1, 12, 3, 8]", "n·heads"],
        near([SHAPE, heads, heads], three),
    );
    refused(
        &["keys [1, 12, 4, 8]", "values [1, 10, 4, 8]"],
        near([SHAPE, SHAPE, ten], three),
    );
    // The same sizes, but different extents.
    refused(&["values", "[4, 8]", "[6, 6]"], |mesh| {
        let field = || ones(mesh, SHAPE, Shard(1));
        let uneven = field()?.layout().with_extents(1, &[4, 8])?;
        let values = ShardTensor::ones(SHAPE, mesh, &uneven)?;
        neighborhood_attention(field()?, field()?, values, &three).map(drop)
    });
    refused(&["tokens", "[1, 2, 4, 6]"], |mesh| {
        let field = || ones(mesh, SHAPE, Shard(1));
        let tokens = || ones(mesh, [1, 2, 4, 6], Replicate);
        let fields = [field()?, field()?, field()?];
        neighborhood_attention_with_tokens(fields, [tokens()?, tokens()?], &three).map(drop)
    });
}

#[test]
fn bad_dense_attention_is_refused_before_anything_is_sent() {
    const SHAPE: [usize; 4] = [1, 12, 4, 8];
    let dense = |[q, k, v]: [([usize; 4], Placement); 3], options: AttentionOptions| {
        move |mesh: &DeviceMesh| {
            let tokens = |(shape, placement)| ones(mesh, shape, placement);
            scaled_dot_product_attention(tokens(q)?, tokens(k)?, tokens(v)?, &options).map(drop)
        }
    };
    let options = AttentionOptions::default();
    let (tokens, heads) = ((SHAPE, Shard(1)), ([1, 12, 3, 8], Shard(1)));
    refused(
        &["[1, 12, 4, 8]", "[1, 12, 3, 8]", "n·heads"],
        dense([tokens, heads, heads], options.clone()),
    );
    refused(
        &["keys [1, 12, 4, 8]", "values [1, 10, 4, 8]"],
        dense([tokens, tokens, ([1, 10, 4, 8], Shard(1))], options.clone()),
    );
    refused(
        &[
            "no rule for Shard(2) of queries with Shard(1) of keys on axis \"x\"",
            "redistribute",
        ],
        dense([(SHAPE, Shard(2)), tokens, tokens], options.clone()),
    );
    let key = RandomKey::new(0, "dropout");
    refused(
        &["dropout 1", "less than 1"],
        dense([tokens; 3], options.clone().with_dropout(1.0, key)),
    );
    refused(&["values", "[4, 8]", "[6, 6]"], |mesh| {
        let field = || ones(mesh, SHAPE, Shard(1));
        let uneven = field()?.layout().with_extents(1, &[4, 8])?;
        let values = ShardTensor::ones(SHAPE, mesh, &uneven)?;
        scaled_dot_product_attention(field()?, field()?, values, &AttentionOptions::default())
            .map(drop)
    });
    refused(&["cell_attention", "order of cells"], |mesh| {
        let field = || ones(mesh, [1, 4, 3, 2, 8], Shard(1));
        let options = AttentionOptions::default().with_causal(true);
        cell_attention(field()?, field()?, field()?, &options).map(drop)
    });
}

/// A plan lists the messages of keys and values that are received: 5 tokens with 2 × 8 numbers, and
/// nothing for later tokens.
#[test]
fn the_plan_of_attention_lists_its_ring() {
    let planned = Launcher::local(2).collect(|world| {
        let mesh = world.mesh([("tokens", 2)])?;
        let config = MultiHeadAttentionConfig::new(8, 2).with_dropout(0.5);
        let mha = world.init(|device| config.init(device))?;
        let x = ones(&mesh, [1, 10, 8], Shard(1))?;
        let before = world.comm_stats();
        let plan = x.plan_of(&mha)?;
        let causal = x.dry_run(|x| {
            let options = AttentionOptions::default().with_causal(true);
            Ok(multi_head_attention(&mha, x.clone(), x.clone(), x, options))
        })?;
        // Replicated queries: maxima, and sums of weighted values and of weights.
        let merged = ones(&mesh, [1, 10, 2, 4], Replicate)?.dry_run(|x| {
            let k = x.clone().redistribute(&[Shard(1)]);
            scaled_dot_product_attention(x, k.clone(), k, &AttentionOptions::default())
        })?;
        assert_eq!(world.comm_stats(), before, "nothing is sent");
        assert!(
            plan.to_string().starts_with("scaled_dot_product_attention"),
            "{plan}"
        );
        let plans = [plan, causal, merged];
        Ok(plans.map(|plan| [plan.bytes_sent(), plan.bytes_received()]))
    });
    let block = 5 * 2 * 8 * 4;
    let both = [block, block];
    let merged = [10 * 2 * (1 + 4 + 1) * 4; 2];
    assert_eq!(
        planned.unwrap(),
        [[both, [block, 0], merged], [both, [0, block], merged]]
    );
}

/// Bytes that each of three ranks sends in the forward and backward pass, if gradients of these
/// operands are requested.
fn sent(wanted: [bool; 3], options: AttentionOptions) -> Vec<[u64; 2]> {
    let found = Launcher::local(3).check(false).collect(|world| {
        let mesh = world.mesh([("tokens", 3)])?;
        let normal = Distribution::Normal(0.0, 1.0);
        // Values are three times as wide.
        let shapes = [[1, 6, 1, 2], [1, 6, 1, 2], [1, 6, 1, 6]];
        let mut leaves = Vec::new();
        for (shape, wanted) in shapes.into_iter().zip(wanted) {
            let layout = Layout::new(mesh.shape(), &shape, &[Shard(1)])?;
            let key = RandomKey::new(0, leaves.len());
            let x = ShardTensor::<4>::random(shape, normal, key, &mesh, &layout)?;
            leaves.push(if wanted { x.require_grad() } else { x });
        }
        let before = world.comm_stats();
        let [q, k, v] = [0, 1, 2].map(|input: usize| leaves[input].clone());
        let y = scaled_dot_product_attention(q, k, v, &options)?;
        let gradients = y.into_local().sum().backward();
        for (leaf, wanted) in leaves.iter().zip(wanted) {
            assert_eq!(leaf.grad(&gradients).is_some(), wanted);
        }
        let sent = world.comm_stats().since(&before);
        let traffic = Traffic::Exchange;
        let backward = sent.of_backward(traffic).bytes;
        Ok([sent.of(traffic).bytes - backward, backward])
    });
    found.unwrap()
}

#[test]
fn gradients_that_nobody_wants_are_not_sent() {
    // Two tokens with keys of two numbers and values of six.
    let [key, value] = [2 * 2 * 4, 2 * 6 * 4];
    let blocks = 2 * (key + value);
    let options = AttentionOptions::default;
    for (wanted, gradients) in [
        ([true, false, false], 0),
        ([false, true, false], key),
        ([true, false, true], value),
        ([true; 3], key + value),
    ] {
        // Gradients of a part follow it to the two ranks after its owner, and go from the last of
        // them to the owner.
        let expected = [[blocks, blocks + 3 * gradients]; 3];
        assert_eq!(sent(wanted, options()), expected, "{wanted:?}");
    }
}

/// A part is sent to later ranks only, and its gradients from the last of them to the owner.
#[test]
fn causal_parts_go_to_later_ranks_only() {
    let part = 2 * (2 + 6) * 4;
    let found = sent([true; 3], AttentionOptions::default().with_causal(true));
    // Part 0; parts 0 and 1; none.
    let forward = [part, 2 * part, 0];
    // Gradients follow the parts, and those of parts 0 and 1 go from the last rank to their owners.
    let backward = [part + part, 2 * part + 2 * part, 2 * part];
    let expected = [0, 1, 2].map(|rank: usize| [forward[rank], backward[rank]]);
    assert_eq!(found, expected);
}

/// Bytes that each of three ranks receives in the forward and backward pass of a program of
/// queries, keys and values.
fn received<const D: usize>(
    shapes: [[usize; D]; 3],
    [queries, keys]: [Placement; 2],
    program: impl Fn([ShardTensor<D>; 3]) -> Result<ShardTensor<D>> + Send + Sync,
) -> Vec<[u64; 2]> {
    let found = Launcher::local(3).check(false).collect(|world| {
        let mesh = world.mesh([("x", 3)])?;
        let leaf = |shape, placement| ones(&mesh, shape, placement).map(ShardTensor::require_grad);
        let leaves = [
            leaf(shapes[0], queries)?,
            leaf(shapes[1], keys)?,
            leaf(shapes[2], keys)?,
        ];
        let counted = || {
            let stats = world.comm_stats();
            let all = [Traffic::Exchange, Traffic::Reduce];
            let backward: u64 = all
                .map(|traffic| stats.of_backward(traffic).bytes)
                .iter()
                .sum();
            let both: u64 = all.map(|traffic| stats.of(traffic).bytes).iter().sum();
            [both - backward, backward]
        };
        let before = counted();
        let y = program(leaves)?;
        y.into_local().sum().backward();
        let after = counted();
        Ok([after[0] - before[0], after[1] - before[1]])
    });
    found.unwrap()
}

/// The table in `docs/attention.md`. All ranks send as much as they receive.
#[test]
fn bytes_are_those_of_the_documentation() {
    let (heads, widths) = (2, [4, 3]);
    let both = (heads * (widths[0] + widths[1]) * size_of::<f32>()) as u64;
    let options = AttentionOptions::default;
    let dense = |[q, k, v]: [ShardTensor<4>; 3]| scaled_dot_product_attention(q, k, v, &options());
    let tokens = |count, width| [1, count, heads, width];
    let of_tokens = |count| {
        [
            tokens(9, widths[0]),
            tokens(count, widths[0]),
            tokens(count, widths[1]),
        ]
    };
    // Gradients of replicated keys and values, of less than 16,384 numbers: those of the two other
    // ranks.
    let sum = 2 * both * 5;
    let cells_sharded = [Shard(1), Shard(1)];
    let replicated = [Shard(1), Replicate];
    assert_eq!(received(of_tokens(5), replicated, dense), [[0, sum]; 3]);
    let ring = [both * 6, both * (6 + 9)];
    assert_eq!(received(of_tokens(9), cells_sharded, dense), [ring; 3]);
    // Maxima, sums of weighted values and of weights, and gradients of the queries.
    let numbers = |count: usize| (2 * 9 * heads * count * size_of::<f32>()) as u64;
    let merged = [numbers(1 + widths[1] + 1), numbers(widths[0])];
    assert_eq!(
        received(of_tokens(5), [Replicate, Shard(1)], dense),
        [merged; 3]
    );
    let heads_sharded = [Shard(2), Shard(2)];
    assert_eq!(received(of_tokens(9), heads_sharded, dense), [[0; 2]; 3]);
    let cells = |width| [1, 3, 3, heads, width];
    let of_cells = [cells(widths[0]), cells(widths[0]), cells(widths[1])];
    let all = |[q, k, v]: [ShardTensor<5>; 3]| cell_attention(q, k, v, &options());
    assert_eq!(received(of_cells, cells_sharded, all), [ring; 3]);
    let learned = |[q, k, v]: [ShardTensor<5>; 3]| {
        let token = |width| {
            let token = ShardTensor::<4>::ones([1, 5, heads, width], q.mesh(), &[Replicate]);
            token.map(ShardTensor::require_grad)
        };
        let tokens = [token(widths[0])?, token(widths[1])?];
        cell_attention_with_tokens([q.clone(), k, v], tokens, &options())
    };
    let with_tokens = [ring[0], ring[1] + sum];
    assert_eq!(received(of_cells, cells_sharded, learned), [with_tokens; 3]);
    // Halos of one and two cells, in a dim without ends.
    let near = |[q, k, v]: [ShardTensor<4>; 3]| {
        let options = NeighborhoodOptions::new([4]).with_periodic([true]);
        neighborhood_attention(q, k, v, &options)
    };
    let halo = both * 3;
    assert_eq!(received(of_tokens(9), cells_sharded, near), [[halo; 2]; 3]);
    assert_eq!(received(of_tokens(9), heads_sharded, near), [[0; 2]; 3]);
}

/// An event of a timeline: start and end, in microseconds.
struct Event {
    name: String,
    rank: u64,
    time: [f64; 2],
}

/// Timeline of a program on three ranks: communications, and periods of work.
fn timeline(
    name: &str,
    program: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync,
) -> [Vec<Event>; 2] {
    let file = std::env::temp_dir().join(format!("{name}-{}.json", std::process::id()));
    let launcher = Launcher::local(3).overlap(Overlap::On).trace(&file);
    launcher
        .run(|world| program(&world.mesh([("x", 3)])?))
        .unwrap();
    let text = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let document: Value = serde_json::from_slice(&text).unwrap();
    ["exchange", "operator"].map(|kind| {
        let events = document["traceEvents"].as_array().expect("events");
        let events = events.iter().filter(|event| event["cat"] == kind);
        let events = events.map(|event| {
            let number = |key: &str| event[key].as_f64().expect("a number");
            Event {
                name: event["name"].as_str().expect("a name").into(),
                rank: event["tid"].as_u64().expect("a rank"),
                time: [number("ts"), number("ts") + number("dur")],
            }
        });
        events.collect()
    })
}

/// Checks that, on every rank, work named `during` is done during `count` communications named
/// `name`.
fn assert_meanwhile([sent, work]: &[Vec<Event>; 2], name: &str, count: usize, during: &str) {
    for rank in 0..3 {
        let named = |event: &&Event, name: &str| event.rank == rank && event.name == name;
        let has_work = |message: &&Event| {
            let [begin, end] = message.time;
            let mut work = work.iter().filter(|event| named(event, during));
            // Microseconds since 1970 are rounded to quarters.
            work.any(|event| begin <= event.time[0] + 1.0 && event.time[1] <= end + 1.0)
        };
        let sent = sent.iter().filter(|event| named(event, name));
        assert_eq!(
            sent.filter(has_work).count(),
            count,
            "{name} of rank {rank}"
        );
    }
}

#[test]
fn queries_within_the_shard_are_computed_while_keys_travel() {
    let events = timeline("halos", |mesh| {
        let field = || ShardTensor::<4>::ones([1, 60, 2, 4], mesh, &[Shard(1)]);
        let field = || field().map(ShardTensor::require_grad);
        let options = NeighborhoodOptions::new([5]);
        let y = neighborhood_attention(field()?, field()?, field()?, &options)?;
        y.into_local().sum().backward();
        Ok(())
    });
    let name = "na1d";
    assert_meanwhile(&events, name, 1, "attention meanwhile");
    let backward = "attention meanwhile (backward)";
    assert_meanwhile(&events, &format!("{name} (backward)"), 1, backward);
}

#[test]
fn a_block_is_computed_with_while_the_next_one_travels() {
    let events = timeline("ring", |mesh| {
        let tokens = || ShardTensor::<4>::ones([1, 60, 2, 4], mesh, &[Shard(1)]);
        let tokens = || tokens().map(ShardTensor::require_grad);
        let options = AttentionOptions::default();
        let y = scaled_dot_product_attention(tokens()?, tokens()?, tokens()?, &options)?;
        y.into_local().sum().backward();
        Ok(())
    });
    let (name, work) = ("scaled_dot_product_attention", "attention to a block");
    assert_meanwhile(&events, name, 2, work);
    // Two blocks, and the gradients of the first two; those of the last one are sent to their owner
    // when everything is computed.
    let backward = |name: &str| format!("{name} (backward)");
    assert_meanwhile(&events, &backward(name), 4, &backward(work));
}
