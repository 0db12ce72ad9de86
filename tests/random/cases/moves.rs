//! Reductions and rearrangements.

use halocline::prelude::TensorData;
use serde_json::json;

use super::{Case, field, indices, integers, shape, spatial};
use crate::draw::Draw;

pub(super) fn reduction(operator: &str, draw: &mut Draw) -> Option<Case> {
    let x = shape(draw);
    let dim = draw.within(0..=x.len() - 1);
    let options = match operator {
        "sum" | "mean" | "max" | "min" | "logsumexp" => {
            json!({ "dims": draw.some(x.len()), "keepdim": draw.coin() })
        }
        "var" | "std" => {
            let x = draw.list(3, 3..=7);
            let options = json!({
                "dims": draw.some(3), "keepdim": draw.coin(), "correction": draw.within(0..=1),
            });
            return Some(Case::new(options).x("x", &x));
        }
        "argmax" | "argmin" => json!({ "dim": dim, "keepdim": draw.coin() }),
        "cumsum" | "cumprod" | "softmax" | "log_softmax" => {
            json!({ "dim": dim })
        }
        "topk" => json!({ "k": draw.within(1..=x[dim]), "dim": dim }),
        _ => return None,
    };
    Some(Case::new(options).x("x", &x))
}

pub(super) fn rearrangement(operator: &str, draw: &mut Draw) -> Option<Case> {
    let mut x = shape(draw);
    let dims = x.len();
    let dim = draw.within(0..=dims - 1);
    let size = x[dim];
    let options = match operator {
        "flip2d" => json!({ "dims": draw.some(dims) }),
        "roll2d" => {
            let turned = draw.some(dims);
            let shifts: Vec<i64> = turned
                .iter()
                .map(|_| draw.within(0..=30) as i64 - 15)
                .collect();
            json!({ "shifts": shifts, "dims": turned })
        }
        "shift" => {
            let mode = draw.pick(&["circular", "replicate", "constant"]);
            json!({ "dim": dim, "offset": draw.within(0..=16) as i64 - 8, "mode": mode })
        }
        "message_passing" => {
            let x = [&[draw.within(1..=9)][..], &draw.list(2, 1..=3)].concat();
            let edges = draw.within(1..=20);
            let [sources, targets] = [0, 1].map(|_| draw.list(edges, 0..=x[0] - 1));
            let reduce = draw.pick(&["sum", "mean", "amax", "amin"]);
            let options = json!({ "sources": sources, "targets": targets, "reduce": reduce });
            return Some(Case::new(options).x("x", &x));
        }
        "permute" => json!({ "dims": draw.order(dims) }),
        "flatten" => {
            x.push(draw.within(1..=5));
            json!({})
        }
        "pad1d" | "pad2d" | "pad3d" => {
            let (x, cells) = field(spatial(operator), 2, draw);
            let mode = draw.pick(&["constant", "circular", "reflect", "replicate"]);
            let value = (mode == "constant").then_some(0.75);
            let mut options = json!({ "mode": mode, "value": value });
            for (size, side) in cells.iter().rev().zip(["pad_w", "pad_h", "pad_d"]) {
                options[side] = json!(draw.list(2, 0..=size - 1));
            }
            return Some(Case::new(options).x("x", &x));
        }
        "slice" => {
            let start = draw.within(0..=size - 1);
            json!({ "dim": dim, "start": start, "end": draw.within(start + 1..=size), "step": draw.within(1..=3) })
        }
        "cat" | "stack" => {
            let mut case = Case::new(json!({ "dim": dim }));
            for part in 0..draw.within(1..=3) {
                if operator == "cat" {
                    x[dim] = draw.within(1..=7);
                }
                case = case.x(&format!("x{part}"), &x);
            }
            return Some(case);
        }
        "split" => {
            let first = draw.within(1..=size);
            let sizes = if first < size {
                vec![first, size - first]
            } else {
                vec![size]
            };
            json!({ "sizes": sizes, "dim": dim })
        }
        "chunk" => json!({ "chunks": draw.within(1..=size + 1), "dim": dim }),
        "select" => {
            x.push(draw.within(1..=7));
            json!({ "dim": dim, "index": draw.within(0..=size - 1) })
        }
        "index_select" => {
            let count = draw.within(1..=9);
            json!({ "dim": dim, "index": draw.list(count, 0..=size - 1) })
        }
        "gather" | "scatter_add" => {
            let mut places = x.clone();
            places[dim] = draw.within(1..=9);
            let index = indices("index", &places, size).convert_dtype(integers(draw));
            let case = Case::new(json!({ "dim": dim }))
                .x("x", &x)
                .input("index", index);
            return Some(match operator {
                "gather" => case,
                _ => case.x("values", &places),
            });
        }
        "scatter" => {
            // No index appears twice in a line.
            let last = x[dims - 1];
            let mut places = x.clone();
            places[dims - 1] = draw.within(1..=last);
            let lines: usize = places[..dims - 1].iter().product();
            let line = |_| draw.order(last).into_iter().take(places[dims - 1]);
            let index: Vec<i64> = (0..lines).flat_map(line).map(|cell| cell as i64).collect();
            let case = Case::new(json!({})).x("x", &x);
            let index = TensorData::new(index, places.clone()).convert_dtype(integers(draw));
            let case = case.input("index", index);
            return Some(case.x("values", &places));
        }
        "unsqueeze" => json!({ "dim": draw.within(0..=dims) }),
        "squeeze" => {
            x.insert(dim, 1);
            json!({ "dim": dim })
        }
        "reshape" => {
            // Leading dims stay, and the cells of the others are merged.
            let x = draw.list(4, 2..=5);
            let shape = draw.pick(&[0, 1]);
            let last = x[2] * x[3];
            let shape = [vec![x[0], x[1], last], vec![x[0], x[1], 1, last]][shape].clone();
            return Some(Case::new(json!({ "shape": shape })).x("x", &x));
        }
        "expand" => {
            let mut x = draw.list(3, 1..=7);
            let mut size = x.clone();
            (x[1], size[1]) = (1, draw.within(1..=5));
            return Some(Case::new(json!({ "size": size })).x("x", &x));
        }
        "repeat" => json!({ "repeats": draw.list(dims, 1..=3) }),
        "tril" | "triu" => {
            x.push(draw.within(1..=7));
            json!({ "diagonal": draw.within(0..=8) as i64 - 4 })
        }
        "pixel_shuffle" | "pixel_unshuffle" => {
            let (mut x, _) = field(2, 1, draw);
            let factor = draw.within(1..=3);
            if operator == "pixel_shuffle" {
                x[1] *= factor * factor;
                return Some(Case::new(json!({ "upscale_factor": factor })).x("x", &x));
            }
            x[2..]
                .iter_mut()
                .for_each(|size| *size = size.div_ceil(2) * factor);
            return Some(Case::new(json!({ "downscale_factor": factor })).x("x", &x));
        }
        _ => return None,
    };
    Some(Case::new(options).x("x", &x))
}
