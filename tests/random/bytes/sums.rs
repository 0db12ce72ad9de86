//! Statistics, sums over ranks, losses, and sums of the gradients of parameters.

use halocline::prelude::TensorData;
use serde_json::{Value, json};

use super::{CELLS, F32, F64, PAIRS, SIDES, Sent, sent};
use crate::cases::Case;

/// Batch, channels and cells; the cells are sharded.
const FIELD: [usize; 3] = [2, 4, CELLS];

fn field(options: Value) -> Case {
    Case::new(options).x("x", &FIELD)
}

/// Returns the bytes sent by a sum of a few numbers over all ranks.
fn summed(numbers: u64) -> u64 {
    PAIRS * numbers * F32
}

pub(super) fn sent_by() -> Vec<Sent> {
    let mut all = norms();
    all.extend(reductions());
    all.extend(products());
    all.extend(losses());
    all
}

fn norms() -> Vec<Sent> {
    // Count, mean and sum of squares forward, and two sums backward, in f64; plus the gradients of
    // weight and bias.
    let statistics = |groups: u64, channels: u64| {
        let backward = PAIRS * groups * 2 * F64 + summed(2 * channels);
        [PAIRS * groups * 3 * F64, backward]
    };
    let with =
        |case: Case, sizes: &[usize]| case.parameter("weight", sizes).parameter("bias", sizes);
    let groups = json!({ "num_groups": 2, "eps": 1e-3 });
    let channels = json!({ "eps": 1e-3 });
    let batch = json!({ "training": true, "eps": 1e-3 });
    let last = |dims: &[usize]| json!({ "normalized_shape": dims, "eps": 1e-3 });
    let length = json!({ "dim": 0 });
    vec![
        sent(
            "group_norm",
            with(field(groups), &[4]),
            2,
            statistics(2 * 2, 4),
        ),
        sent(
            "instance_norm",
            with(field(channels), &[4]),
            2,
            statistics(2 * 4, 4),
        ),
        sent("batch_norm", with(field(batch), &[4]), 2, statistics(4, 4)),
        // Samples on different ranks have no statistic in common.
        sent(
            "layer_norm",
            with(Case::new(last(&[4])).x("x", &[CELLS, 3, 4]), &[4]),
            0,
            [0, summed(8)],
        ),
        // Normalised over the sharded dim: statistics of each of three rows.
        sent(
            "layer_norm",
            Case::new(last(&[CELLS, 4])).x("x", &[3, CELLS, 4]),
            1,
            statistics(3, 0),
        ),
        sent(
            "rms_norm",
            Case::new(last(&[4]))
                .x("x", &[CELLS, 3, 4])
                .parameter("weight", &[4]),
            0,
            [0, summed(4)],
        ),
        sent(
            "weight_norm",
            Case::new(length)
                .x("v", &[3, CELLS, 2])
                .parameter("g", &[3, 1, 1]),
            1,
            [summed(3), summed(3)],
        ),
    ]
}

fn reductions() -> Vec<Sent> {
    let over = |options: Value| field(options);
    let cells = json!({ "dims": [2], "keepdim": true, "correction": 1 });
    let along = json!({ "dim": 2 });
    let along_dims = json!({ "dims": [2] });
    let lines = 2 * 4;
    let before = 3 * lines * F32;
    vec![
        // The mean of each line; variances stay partial.
        sent("var", over(cells.clone()), 2, [summed(lines), 0]),
        sent("std", over(cells), 2, [summed(2 * lines), 0]),
        sent(
            "vector_norm",
            over(json!({ "ord": 2, "dims": [2] })),
            2,
            [summed(lines), 0],
        ),
        // An extremum, and the number of cells that hold it.
        sent("max", over(along_dims.clone()), 2, [summed(lines); 2]),
        sent("min", over(along_dims), 2, [summed(lines); 2]),
        // An extremum, and an index.
        sent(
            "argmax",
            over(along.clone()),
            2,
            [PAIRS * lines * 2 * F32, 0],
        ),
        sent(
            "argmin",
            over(along.clone()),
            2,
            [PAIRS * lines * 2 * F32, 0],
        ),
        // A total from each rank to each one after it.
        sent("cumsum", over(along.clone()), 2, [before; 2]),
        // Totals in f64.
        sent("cumprod", over(along.clone()), 2, [2 * before; 2]),
        sent(
            "softmax",
            over(along.clone()),
            2,
            [summed(2 * lines), summed(lines)],
        ),
        sent(
            "log_softmax",
            over(along.clone()),
            2,
            [summed(2 * lines), summed(lines)],
        ),
        sent(
            "logsumexp",
            over(json!({ "dims": [2], "keepdim": true })),
            2,
            [summed(2 * lines), 0],
        ),
        sent(
            "select",
            Case::new(json!({ "dim": 2, "index": 5 })).x("x", &FIELD),
            2,
            [0, 0],
        ),
    ]
}

/// Sums of the gradients of replicated parameters.
fn products() -> Vec<Sent> {
    let x = |case: Case| case.x("x", &[2, CELLS, 5]);
    let index = Case::new(json!({})).index("index", &[2, CELLS], 7);
    let matrices = Case::new(json!({})).x("a", &[CELLS, 5]).x("b", &[5, 7]);
    let linear = x(Case::new(json!({})))
        .parameter("weight", &[7, 5])
        .parameter("bias", &[7]);
    let einsum = Case::new(json!({ "equation": "bchw,co->bohw" })).x("x", &[2, 3, CELLS, 5]);
    let mlp = x(Case::new(json!({})))
        .parameter("w1", &[7, 5])
        .parameter("b1", &[7])
        .parameter("w2", &[5, 7])
        .parameter("b2", &[5]);
    let field = || field(json!({}));
    vec![
        sent(
            "prelu",
            field().parameter("weight", &[4]),
            2,
            [0, summed(4)],
        ),
        sent(
            "addcmul",
            field().x("other", &FIELD).parameter("scale", &[1, 4, 1]),
            2,
            [0, summed(4)],
        ),
        sent("matmul", matrices, 0, [0, summed(35)]),
        sent("linear", linear, 1, [0, summed(35 + 7)]),
        sent("einsum", einsum.parameter("w", &[3, 4]), 2, [0, summed(12)]),
        sent("linear_row_col_mlp", mlp, 1, [0, summed(2 * 35 + 7 + 5)]),
        sent(
            "embedding",
            index.parameter("weight", &[7, 4]),
            1,
            [0, summed(28)],
        ),
    ]
}

fn losses() -> Vec<Sent> {
    let both = |options: Value, x: &[usize]| Case::new(options).x("x", x).x("target", x);
    let differences = json!({ "reduction": "sum", "mode": "replicate", "dims": [2] });
    let classes = json!({ "reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0 });
    let logits = |cells: &[usize]| {
        let case = Case::new(classes.clone()).x("logits", &[&[2, CELLS], cells].concat());
        case.index("target", &[&[2], cells].concat(), CELLS)
    };
    let windows = json!({
        "reduction": "mean", "window": [3, 3], "sigma": 1.2, "data_range": 3.0, "padding": [0, 0],
        "padding_mode": "zeros",
    });
    // Windows of three rows: a rank needs one row from each neighbour, or two rows from one of
    // them.
    let [row, fields] = [3 * 5 * F32, 5 * 2];
    let row_of_cells = 2 * 4 * F32;
    vec![
        // For each sample a maximum, and a sum together with the logit of the target.
        sent("cross_entropy", logits(&[]), 1, [summed(2 + 2 * 2), 0]),
        sent(
            "cross_entropy_spatial",
            logits(&[2, 3]),
            1,
            [summed(12 + 2 * 12), 0],
        ),
        sent(
            "mse_loss",
            both(json!({ "reduction": "mean" }), &FIELD),
            2,
            [0; 2],
        ),
        sent(
            "l1_loss",
            both(json!({ "reduction": "mean" }), &FIELD),
            2,
            [0; 2],
        ),
        sent(
            "huber_loss",
            both(json!({ "reduction": "mean", "delta": 0.7 }), &FIELD),
            2,
            [0; 2],
        ),
        sent(
            "binary_cross_entropy_with_logits",
            both(json!({ "reduction": "mean", "pos_weight": [2.0] }), &FIELD),
            2,
            [0; 2],
        ),
        sent(
            "gaussian_nll_loss",
            both(json!({ "reduction": "mean", "full": false }), &FIELD)
                .input("var", TensorData::ones::<f32, _>(FIELD)),
            2,
            [0; 2],
        ),
        // One cell of the next rank, at two borders.
        sent(
            "total_variation",
            field(differences.clone()),
            2,
            [SIDES / 2 * row_of_cells; 2],
        ),
        sent(
            "gradient_loss",
            both(differences, &FIELD),
            2,
            [SIDES / 2 * row_of_cells; 2],
        ),
        sent(
            "ssim_loss",
            both(windows, &[3, 2, CELLS, 5]),
            2,
            // For each channel the sum, and the number of finite cells.
            [summed(4) + SIDES * fields * row, SIDES * fields * row],
        ),
    ]
}
