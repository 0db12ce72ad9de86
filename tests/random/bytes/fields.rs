//! Halos, partial results across shards, cells that move to other ranks, attention and graphs.

use halocline::prelude::*;
use serde_json::json;

use super::{CELLS, F32, PAIRS, SIDES, Sent, sent};
use crate::cases::Case;

/// Field of three batch entries, two channels and five columns: a row is `ROW` bytes.
const FIELD: [usize; 4] = [3, 2, CELLS, 5];
const ROW: u64 = 3 * 2 * 5 * F32;

fn field(options: serde_json::Value) -> Case {
    Case::new(options).x("x", &FIELD)
}

pub(super) fn sent_by() -> Vec<Sent> {
    let mut all = convolutions();
    all.extend(pools());
    all.extend(resampled());
    all.extend(moved());
    all.extend(attention());
    all
}

/// A halo of one cell from each neighbour, its gradients back, and the sum of the gradients of the
/// parameters.
fn convolutions() -> Vec<Sent> {
    let halo = |cells: u64, parameters: u64| {
        [
            SIDES * cells * F32,
            (SIDES * cells + PAIRS * parameters) * F32,
        ]
    };
    let around = |weight: &[usize], x: &[usize]| {
        let options = json!({ "padding": vec![1; x.len() - 2], "padding_mode": "zeros" });
        Case::new(options).x("x", x).parameter("weight", weight)
    };
    let twice = |weight: &[usize], x: &[usize]| {
        let options = json!({ "stride": vec![2; x.len() - 2] });
        Case::new(options).x("x", x).parameter("weight", weight)
    };
    // Windows of three outputs, two apart: neighbouring windows share one output. Results have
    // outputs · channels cells.
    let shared =
        |cells: u64, parameters: u64| [2 * cells * F32, (2 * cells + PAIRS * parameters) * F32];
    // Around a periodic dim the last window and the first share one, too.
    let ring = json!({ "stride": [2], "padding_mode": "circular" });
    let ring = Case::new(ring).x("x", &[3, 2, CELLS]);
    let windows = json!({ "kernel_size": [3, 3], "padding": [1, 1] });
    let mut folded = windows.clone();
    folded["output_size"] = json!([CELLS, 5]);
    // A rank of 4 × 3 of 8 × 6 cells needs a row, a column and a corner, in two channels.
    let corner = [
        4 * 2 * (3 + 4 + 1) * F32,
        (4 * 2 * (3 + 4 + 1) + 4 * 3 * 54) * F32,
    ];
    vec![
        sent(
            "conv1d",
            around(&[4, 3, 3], &[2, 3, CELLS]),
            2,
            halo(2 * 3, 36),
        ),
        sent(
            "conv1d",
            around(&[4, 3, 3], &[6, 3, 5]),
            0,
            [0, PAIRS * 36 * F32],
        )
        .with_extents(&[3, 2, 1]),
        sent(
            "conv2d",
            around(&[3, 2, 3, 3], &FIELD),
            2,
            halo(ROW / F32, 54),
        ),
        sent("conv2d", around(&[3, 2, 3, 3], &[1, 2, 8, 6]), 2, corner)
            .on_two_axes([Shard(2), Shard(3)]),
        sent(
            "conv3d",
            around(&[2, 2, 3, 3, 3], &[1, 2, CELLS, 4, 3]),
            2,
            halo(2 * 4 * 3, 108),
        ),
        sent(
            "conv_transpose1d",
            twice(&[2, 3, 3], &[3, 2, CELLS]),
            2,
            shared(3 * 3, 18),
        ),
        sent(
            "conv_transpose1d",
            ring.parameter("weight", &[2, 3, 3]),
            2,
            [3 * 9 * F32, (3 * 9 + PAIRS * 18) * F32],
        ),
        sent(
            "conv_transpose2d",
            twice(&[2, 3, 3, 3], &FIELD),
            2,
            shared(3 * 3 * 11, 54),
        ),
        sent(
            "conv_transpose3d",
            twice(&[1, 2, 3, 3, 3], &[1, 1, CELLS, 3, 2]),
            2,
            shared(2 * 7 * 5, 54),
        ),
        sent("unfold", field(windows), 2, [SIDES * ROW; 2]),
        // Each neighbour sends its part of a row of two channels.
        sent(
            "fold",
            Case::new(folded).x("x", &[3, 18, CELLS, 5]),
            2,
            [SIDES * ROW; 2],
        ),
    ]
}

fn pools() -> Vec<Sent> {
    // Windows around every second cell: those of rank 1, around cells 4 and 6, reach cells 3 and 7
    // of other ranks.
    let overlapping = |x: &[usize]| {
        let dims = x.len() - 2;
        let options = json!({ "kernel_size": vec![3; dims], "stride": vec![2; dims], "padding": vec![1; dims] });
        Case::new(options).x("x", x)
    };
    let both = |row: u64| [2 * row * F32; 2];
    let areas = |sizes: &[usize], x: &[usize]| Case::new(json!({ "output_size": sizes })).x("x", x);
    let halved = |x: &[usize]| {
        let mut sizes = vec![1; x.len() - 2];
        sizes[0] = 2;
        let options =
            json!({ "norm_type": 2, "kernel_size": sizes, "stride": sizes, "ceil_mode": false });
        Case::new(options).x("x", x)
    };
    let mut all = Vec::new();
    for names in [
        ["max_pool1d", "max_pool2d", "max_pool3d"],
        ["avg_pool1d", "avg_pool2d", "avg_pool3d"],
    ] {
        all.push(sent(names[0], overlapping(&[3, 2, CELLS]), 2, both(6)));
        all.push(sent(names[1], overlapping(&FIELD), 2, both(30)));
        all.push(sent(
            names[2],
            overlapping(&[1, 2, CELLS, 3, 3]),
            2,
            both(18),
        ));
    }
    // Windows of cells 2·i and 2·i + 1: those of cells 2 and 3 and of cells 4 and 5 cross shards.
    let in_pairs =
        |name, x: &[usize], row| sent(name, halved(x), 2, both(row)).with_extents(&[3, 2, 4]);
    all.push(in_pairs("lp_pool1d", &[3, 2, CELLS], 6));
    all.push(in_pairs("lp_pool2d", &FIELD, 30));
    all.push(in_pairs("lp_pool3d", &[1, 2, CELLS, 3, 3], 18));
    // Four areas of nine cells: the second, of cells 2 to 4, and the last, of cells 6 to 8, each
    // lie on two ranks, one of which sends its part of the result.
    for names in [
        [
            "adaptive_avg_pool1d",
            "adaptive_avg_pool2d",
            "adaptive_avg_pool3d",
        ],
        [
            "adaptive_max_pool1d",
            "adaptive_max_pool2d",
            "adaptive_max_pool3d",
        ],
    ] {
        all.push(sent(names[0], areas(&[4], &[3, 2, CELLS]), 2, both(6)));
        all.push(sent(names[1], areas(&[4, 3], &FIELD), 2, both(3 * 2 * 3)));
        all.push(sent(
            names[2],
            areas(&[4, 2, 2], &[1, 2, CELLS, 3, 3]),
            2,
            both(2 * 2 * 2),
        ));
    }
    all
}

fn resampled() -> Vec<Sent> {
    let to = |mode: &str, sizes: &[usize], x: &[usize]| {
        Case::new(json!({ "mode": mode, "align_corners": false, "output_size": sizes, "antialias": false })).x("x", x)
    };
    // Both outputs between two cells belong to the rank of the first cell: one cell crosses each of
    // two borders.
    let border = |cells: u64| [2 * cells * F32; 2];
    let around = |size: usize, antialias: bool| {
        let options = json!({
            "mode": "linear", "output_size": [size], "antialias": antialias, "padding_mode": "circular",
        });
        Case::new(options).x("x", &[3, 2, CELLS])
    };
    vec![
        sent(
            "interpolate1d",
            to("linear", &[2 * CELLS], &[3, 2, CELLS]),
            2,
            border(6),
        ),
        // Two more cells cross the ends of a periodic dim, for an output at each of them.
        sent(
            "interpolate1d",
            around(2 * CELLS, false),
            2,
            [(2 + 2) * 6 * F32; 2],
        ),
        // Of four outputs, the first and the second lie on two ranks, and the others on three.
        sent(
            "interpolate1d",
            around(4, true),
            2,
            [(1 + 1 + 2 + 2) * 6 * F32; 2],
        ),
        // Doubling the size is a stencil, whose halo has one cell beyond each end of the five
        // columns.
        sent(
            "interpolate2d",
            to("bilinear", &[2 * CELLS, 10], &FIELD),
            2,
            [SIDES * 6 * 7 * F32; 2],
        ),
        sent(
            "interpolate2d",
            to("bilinear", &[2 * CELLS, 11], &FIELD),
            2,
            border(6 * 5),
        ),
        sent(
            "interpolate3d",
            to("trilinear", &[2 * CELLS, 6, 6], &[1, 2, CELLS, 3, 3]),
            2,
            border(18),
        ),
        // Coarser: as in adaptive pooling, one of the two ranks of an area sends its part of the
        // result.
        sent(
            "interpolate2d",
            to("area", &[4, 3], &FIELD),
            2,
            border(6 * 3),
        ),
        // Places within one cell of each cell reach one row below and two above; other ranks have
        // two of these for rank 0, one and two for rank 1, and one for rank 2.
        sent("grid_sample", own_places(), 2, [(2 + 1 + 2 + 1) * ROW; 2]),
    ]
}

/// Returns a grid that samples each cell at its own place.
fn own_places() -> Case {
    let [batch, _, rows, columns] = FIELD;
    let place = |cell: usize, size: usize| 2.0 * cell as f32 / (size - 1) as f32 - 1.0;
    let cells = (0..batch * rows * columns).map(|cell| [cell % columns, cell / columns % rows]);
    let places = cells.flat_map(|[column, row]| [place(column, columns), place(row, rows)]);
    let places = TensorData::new(places.collect::<Vec<_>>(), [batch, rows, columns, 2]);
    let options = json!({ "mode": "bilinear", "padding_mode": "zeros", "align_corners": true, "bound": [1, 1] });
    field(options).input("grid", places)
}

fn moved() -> Vec<Sent> {
    let rows = |count: u64| [count * ROW; 2];
    let padded = |x: &[usize], sides: &[&str]| {
        let mut options = json!({ "mode": "circular" });
        let (last, others) = sides.split_last().expect("a side");
        others.iter().for_each(|side| options[side] = json!([0, 0]));
        options[last] = json!([1, 1]);
        Case::new(options).x("x", x)
    };
    vec![
        // Rank 0 receives its four rows from other ranks, and ranks 1 and 2 receive two each.
        sent("flip2d", field(json!({ "dims": [2] })), 2, rows(8)),
        // Each rank receives the last row of the rank before.
        sent(
            "roll2d",
            field(json!({ "shifts": [1], "dims": [2] })),
            2,
            rows(3),
        ),
        sent(
            "shift",
            field(json!({ "dim": 2, "offset": -1, "mode": "constant" })),
            2,
            rows(2),
        ),
        // The first and the last row, each beyond the other end.
        sent(
            "pad1d",
            padded(&[3, 2, CELLS], &["pad_w"]),
            2,
            [2 * 6 * F32; 2],
        ),
        sent("pad2d", padded(&FIELD, &["pad_w", "pad_h"]), 2, rows(2)),
        sent(
            "pad3d",
            padded(&[1, 2, CELLS, 3, 3], &["pad_w", "pad_h", "pad_d"]),
            2,
            [2 * 18 * F32; 2],
        ),
        // Of nine rows and nine more, the ranks hold eight, six and four. Rank 0 receives rows 4 to
        // 7 from other ranks, rank 1 rows 8 and 9 to 12, and rank 2 rows 14 and 15.
        sent(
            "cat",
            field(json!({ "dim": 2 })).x("x1", &FIELD),
            2,
            rows(4 + 5 + 2),
        ),
        sent(
            "index_select",
            field(json!({ "dim": 2, "index": [8, 0, 4] })),
            2,
            rows(3),
        ),
        // Rank 0 holds rows 0 to 7 of eighteen, rank 1 rows 8 to 13, and rank 2 rows 14 to 17.
        sent(
            "repeat",
            field(json!({ "repeats": [1, 1, 2, 1] })),
            2,
            rows(4 + 5 + 2),
        ),
        // Blocks of two by two channels, cut after three of four.
        sent(
            "pixel_shuffle",
            Case::new(json!({ "upscale_factor": 2 })).x("x", &[3, 8, 2, 5]),
            1,
            [3 * 2 * 5 * F32; 2],
        )
        .with_extents(&[3, 5]),
        // Blocks of two rows: rank 1 has the second row of the second block, rank 2 that of the
        // third.
        sent(
            "pixel_unshuffle",
            Case::new(json!({ "downscale_factor": 2 })).x("x", &[3, 2, 8, 4]),
            2,
            [2 * 3 * 2 * 4 * F32; 2],
        )
        .with_extents(&[3, 2, 3]),
    ]
}

fn attention() -> Vec<Sent> {
    const HEADS: u64 = 2 * 4;
    let tokens = |cells: &[usize]| -> Vec<usize> { [&[1], cells, &[2, 4][..]].concat() };
    let near = |cells: &[usize]| {
        let dims = cells.len();
        let options = json!({
            "kernel_size": vec![3; dims], "dilation": vec![1; dims], "stride": vec![1; dims],
            "is_causal": vec![false; dims], "scale": 0.5,
        });
        let [q, k, v] = ["q", "k", "v"].map(|name| (name, tokens(cells)));
        Case::new(options).x(q.0, &q.1).x(k.0, &k.1).x(v.0, &v.1)
    };
    // One cell of keys and one of values from each neighbour.
    let halo = |cells: u64| [SIDES * 2 * cells * HEADS * F32; 2];
    let dense = |name: &str, case: Case| case.x(name, &[1, 2, CELLS, 4]);
    let dense = dense(
        "v",
        dense("k", dense("q", Case::new(json!({ "is_causal": false })))),
    );
    let ring = 2 * CELLS as u64 * 2 * HEADS * F32;
    let edges = json!({
        // Cells 8, 8, 0 and 3 are needed by ranks 0, 0, 0 and 2.
        "sources": [8, 8, 0, 3], "targets": [0, 1, 2, 7], "reduce": "sum",
    });
    vec![
        // Keys and values pass the two other ranks in both passes; in the backward pass their
        // gradients go all the way round.
        sent(
            "scaled_dot_product_attention",
            dense,
            2,
            [ring, ring + ring / 2 * 3],
        ),
        sent("na1d", near(&[CELLS]), 1, halo(1)),
        sent("na2d", near(&[CELLS, 4]), 1, halo(4)),
        sent("na3d", near(&[CELLS, 3, 3]), 1, halo(9)),
        sent(
            "message_passing",
            Case::new(edges).x("x", &[CELLS, 5]),
            0,
            [2 * 5 * F32; 2],
        ),
    ]
}
